"""Launching training steps: kernel by kernel, or the whole step as a CUDA graph.

A step of a small net is hundreds of kernels of a few microseconds each. Launching them one by one from Python takes
several times as long as running them, so on a GPU a step is captured once and then replayed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import is_gpu_full
from .gpu import STREAMS
from .kernels.launch import compile_together

Engine = Literal["fused", "compiled", "captured", "eager"]
"""CUDA graph with our own kernels; CUDA graph with torch.compile; CUDA graph; kernel by kernel"""
ENGINES: tuple[Engine, ...] = get_args(Engine)

Steps = list[Callable[[], None]]

WARM_UP = 3
"""calls before capturing: libraries choose algorithms and allocate workspaces"""

RECORDING = threading.Lock()
"""one capture at a time: the capture stream and the list of kernels to compile are global"""

log = logging.getLogger("equipoise")


class UnfitError(Exception):
    """This engine does not support the model; the message says why. The next one is tried."""


class SideStream:
    """Runs a `with` block on a second stream of the GPU; `join` makes the main stream wait. No effect on a CPU.

    Tensors that the block reads must stay alive until the join: the main stream reuses freed memory at once.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self.device = device
        self.stream = STREAMS.get(device, purpose) if device.type == "cuda" else None
        self.inside = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self.inside.enter_context(torch.cuda.stream(self.stream))

    def __exit__(self, *error: object) -> None:
        self.inside.close()

    def join(self) -> None:
        """Make the main stream wait for the side stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def prepare(
    engine: Engine,
    make: Callable[[Engine], Steps],
    state: Sequence[Tensor],
    requested: bool = False,
    generators: Sequence[torch.Generator] = (),
) -> tuple[Steps, Engine]:
    """Prepare the steps that `make` returns for an engine; returns them and the engine that is used.

    If a compiler, a driver or an operator fails, it warns and tries the next simpler engine. So it does if an engine
    does not support the model, but warns only if the engine was `requested` by name. `state` lists all tensors that a
    step changes; they are restored. `generators` are those that a step draws from.
    """
    for attempt in ENGINES[ENGINES.index(engine) :]:
        if attempt == "eager":
            break
        try:
            return [capture_step(step, state, generators) for step in make(attempt)], attempt
        except UnfitError as error:
            if requested:
                simpler = ENGINES[ENGINES.index(attempt) + 1]
                log.warning("training is %s instead of %s: %s", simpler, attempt, error)
        except Exception as error:
            if is_gpu_full(error):
                raise  # a simpler engine needs as much
            before = [t.detach().clone() for t in state]
            make("eager")[0]()  # a bug in an objective raises its own error here
            restore_tensors(state, before)
            reason = str(error).strip().splitlines()
            log.warning("training cannot be %s here, and is slower: %s", attempt, reason[0] if reason else repr(error))
    return make("eager"), "eager"


def restore_tensors(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Restore the values of tensors."""
    with torch.no_grad():
        for t, old in zip(state, before):
            t.copy_(old)


def capture_step(
    step: Callable[[], None], state: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
) -> Callable[[], None]:
    """Capture `step` as a CUDA graph. `state` lists the tensors that it changes; they are restored."""
    before = [t.detach().clone() for t in state]
    with RECORDING:
        return _capture_step(step, state, before, generators)


def _capture_step(
    step: Callable[[], None], state: Sequence[Tensor], before: Sequence[Tensor], generators: Sequence[torch.Generator]
) -> Callable[[], None]:
    restore = partial(restore_tensors, state, before)

    side = STREAMS.get(torch.device("cuda"), "recording")
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            with compile_together():
                step()
            restore()
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:  # so that each replay draws new numbers
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            step()
    except BaseException:
        STREAMS.forget()  # a failed capture may leave them in any state
        raise
    finally:
        torch.cuda.synchronize()
        restore()

    def replay(keep: Callable[[], None] = step) -> None:  # keeps alive all tensors that the graph uses
        graph.replay()

    return replay
