"""Images that several tests share, and fewer digits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from equipoise.data import datasets

READ_DIGITS = functools.cache(datasets._read_digits)  # it takes a sixth of a short run's time


@contextlib.contextmanager
def digits_of(each: int) -> Iterator[None]:
    """Digits with this many images of each class to train on: 50 are enough for many runs of which none must be good.

    There are 140.
    """
    table = READ_DIGITS()[: 16 * each]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "_read_digits", lambda: table)
        patch.setattr(datasets, "DIGITS_TRAIN", each)
        yield


def images(classes: range, each: int = 12) -> tuple[Tensor, list[int]]:
    """Noise with a bright square whose place tells the class."""
    gen, y = torch.Generator().manual_seed(classes.start), [c for c in classes for _ in range(each)]
    x = torch.randint(0, 120, (len(y), 1, 8, 8), generator=gen, dtype=torch.uint8)
    for i, c in enumerate(y):
        x[i, 0, c : c + 2, 1:6] += 100
    return x, y
