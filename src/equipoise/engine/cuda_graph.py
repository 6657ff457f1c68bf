"""How training steps are launched: kernel by kernel, or the whole step recorded as a CUDA graph and replayed.

A net of half a million weights is some hundreds of kernels of a few microseconds each. Launching them one by one from
Python takes several times as long as running them, so on a GPU a step is recorded once and then replayed.
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
"""a CUDA graph with our own kernels; one with compiled backbones; a CUDA graph; kernel by kernel"""
ENGINES: tuple[Engine, ...] = get_args(Engine)

Steps = list[Callable[[], None]]

WARM_UP = 3
"""calls before recording: libraries choose their algorithms, and what is allocated once is allocated"""

RECORDING = threading.Lock()
"""held while a step is recorded: torch's stream for that and the list of kernels to compile are the whole process's"""

log = logging.getLogger("equipoise")


class UnfitError(Exception):
    """This engine does not support the model, and why; the next one is tried."""


class SideStream:
    """Runs the block `with aside:` on a second stream of the GPU; `join` makes the main stream wait. None on a CPU.

    What is read aside must live until the join: memory that its own stream gives back is used again at once.
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
        """Let what follows wait for what was done aside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def prepare(
    engine: Engine,
    make: Callable[[Engine], Steps],
    state: Sequence[Tensor],
    requested: bool = False,
    generators: Sequence[torch.Generator] = (),
) -> tuple[Steps, Engine]:
    """The steps that `make` makes for an engine, ready to be called, and the engine that was taken.

    `state` is every tensor that a step changes; it is left as it was. Where a compiler, a driver or an operator fails,
    a warning says so and the next simpler engine is taken. An engine that does not support the model is passed over,
    with a warning where it was `requested` by name. A step draws its random numbers from `generators`, if any.
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
                raise  # a simpler engine needs no less
            before = [t.detach().clone() for t in state]
            make("eager")[0]()  # a fault in an objective is raised here, as what it is
            restore_tensors(state, before)
            reason = str(error).strip().splitlines()
            log.warning("training cannot be %s here, and is slower: %s", attempt, reason[0] if reason else repr(error))
    return make("eager"), "eager"


def restore_tensors(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Give tensors the values that they had before."""
    with torch.no_grad():
        for t, old in zip(state, before):
            t.copy_(old)


def capture_step(
    step: Callable[[], None], state: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
) -> Callable[[], None]:
    """`step` as a CUDA graph that does the same to the same tensors; `state` is what it changes, left as it was."""
    before = [t.detach().clone() for t in state]
    with RECORDING:
        return _capture_step(step, state, before, generators)


def _capture_step(
    step: Callable[[], None], state: Sequence[Tensor], before: Sequence[Tensor], generators: Sequence[torch.Generator]
) -> Callable[[], None]:
    restore = partial(restore_tensors, state, before)

    aside = STREAMS.get(torch.device("cuda"), "recording")
    aside.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(aside):
            with compile_together():
                step()
            restore()
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:  # so that each replay goes on drawing from it
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            step()
    except BaseException:
        STREAMS.forget()  # who knows what state a recording that failed has left them in
        raise
    finally:
        torch.cuda.synchronize()
        restore()

    def replay(keep: Callable[[], None] = step) -> None:  # with the step, all that the graph has addresses of
        graph.replay()

    return replay
