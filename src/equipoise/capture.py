"""How training steps are launched: kernel by kernel, or the whole step recorded as a CUDA graph and replayed.

A net of half a million weights is some hundreds of kernels of a few microseconds each. Launching them one by one from
Python takes several times as long as running them, so on a GPU a step is recorded once and then replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Engine = Literal["compiled", "captured", "eager"]
"""a CUDA graph with compiled backbones; a CUDA graph; kernel by kernel"""
ENGINES: tuple[Engine, ...] = get_args(Engine)

Steps = list[Callable[[], None]]

WARM_UP = 3
"""calls before recording: libraries choose their algorithms, and what is allocated once is allocated"""

log = logging.getLogger("equipoise")


def prepared(engine: Engine, make: Callable[[bool], Steps], state: Sequence[Tensor]) -> tuple[Steps, Engine]:
    """The steps that `make` makes (with compiled backbones or not), ready to be called as the engine says.

    `state` is every tensor that a step changes; it is left as it was. Where a compiler, a driver or an operator does
    not go along, that is said and the next simpler engine is taken; the one taken is returned too.
    """
    for attempt in ENGINES[ENGINES.index(engine) :]:
        steps = make(attempt == "compiled")
        if attempt == "eager":
            break
        try:
            return [captured(step, state) for step in steps], attempt
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()
            log.warning("training cannot be %s here, and is slower: %s", attempt, reason[0] if reason else repr(error))
    return steps, "eager"


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """`step` as a CUDA graph that does the same to the same tensors; `state` is what it changes, left as it was."""
    before = [t.clone() for t in state]

    def restore() -> None:
        with torch.no_grad():
            for t, old in zip(state, before):
                t.copy_(old)

    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    finally:
        torch.cuda.synchronize()
        restore()

    def replay(keep: Callable[[], None] = step) -> None:  # with the step, all that the graph has addresses of
        graph.replay()

    return replay
