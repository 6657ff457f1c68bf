"""Launching our own kernels, and compiling all kernels of a step in parallel: fifty, half a second each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

_collected: dict[Any, tuple[Any, ...]] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """Run a Triton kernel; within `compile_together`, only collect it."""
    if _collected is None:
        kernel[grid](*args, **flags)
        return
    what = tuple(a.dtype if isinstance(a, Tensor) else a for a in args)
    _collected.setdefault((id(kernel), what, *sorted(flags.items())), (kernel, grid, args, flags))


@contextlib.contextmanager
def compile_together() -> Iterator[None]:
    """Collect the kernels launched in the block without running them; then compile them on all cores.

    The results of the block are garbage: the caller must restore all tensors.
    """
    global _collected
    _collected = {}
    try:
        yield
        kernels = list(_collected.values())
    finally:
        _collected = None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(k.warmup, *args, grid=grid, **flags) for k, grid, args, flags in kernels]:
            done.result()
