"""Launching our own kernels, and compiling those of a whole step at once: a kernel takes half a second, and there are
fifty of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

_collected: dict[Any, tuple[Any, ...]] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """Run a Triton kernel; or, within `together`, only note that it is wanted."""
    if _collected is None:
        kernel[grid](*args, **flags)
        return
    what = tuple(a.dtype if isinstance(a, Tensor) else a for a in args)
    _collected.setdefault((id(kernel), what, *sorted(flags.items())), (kernel, grid, args, flags))


@contextlib.contextmanager
def compile_together() -> Iterator[None]:
    """Within the block kernels are not run; at its end all that were asked for are compiled, on all cores.

    What the block computes is nonsense: whoever uses this puts everything back as it was.
    """
    global _collected
    _collected = {}
    try:
        yield
        wanted = list(_collected.values())
    finally:
        _collected = None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(k.warmup, *args, grid=grid, **flags) for k, grid, args, flags in wanted]:
            done.result()
