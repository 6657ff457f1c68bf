"""Launching our kernels, and compiling them together."""

from __future__ import annotations

from unittest.mock import MagicMock, call

import pytest
import torch

from equipoise.engine.kernels.launch import compile_together, launch


def test_kernels_asked_for_together_are_compiled_once_each_and_not_run() -> None:
    one, two, x = MagicMock(), MagicMock(), torch.zeros(3)
    with compile_together():
        launch(one, (1,), x, 3, BM=16)
        launch(one, (1,), torch.ones(3), 3, BM=16)  # the same kernel for other numbers
        for t, count, tile in ((x, 4, 16), (x, 3, 32), (x.double(), 3, 16)):
            launch(one, (1,), t, count, BM=tile)
        launch(two, (2, 1), x, 3, BM=16)
        assert not one.mock_calls and not two.mock_calls
    compiled = one.warmup.call_args_list
    assert not one.__getitem__.called and two.mock_calls == [call.warmup(x, 3, grid=(2, 1), BM=16)]
    assert len(compiled) == 4 == len({(c.args[0].dtype, c.args[1], c.kwargs["BM"]) for c in compiled})
    launch(two, (1,), x, 4, BM=16)
    assert two.mock_calls[1:] == [call.__getitem__((1,)), call.__getitem__()(x, 4, BM=16)]


def test_launching_goes_on_after_an_error() -> None:
    kernel = MagicMock(**{"warmup.side_effect": ValueError("does not compile")})
    with pytest.raises(KeyError), compile_together():
        launch(kernel, (1,))
        raise KeyError
    launch(kernel, (1,))
    assert kernel.mock_calls == [call.__getitem__((1,)), call.__getitem__()()]
    with pytest.raises(ValueError, match="does not compile"), compile_together():
        launch(kernel, (1,))
    launch(kernel, (1,))
    assert kernel.__getitem__.return_value.call_count == 2
