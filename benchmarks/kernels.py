"""Microseconds of each kernel of `equipoise.kernels` at the shapes of ResNet-32, for several tile sizes.

    python benchmarks/kernels.py [--batch 128] > kernels.txt

The fastest tiles are what `equipoise.fused` has in its tables. Each line is one kernel at one shape; times are medians
over replays of a CUDA graph, with what it reads and writes in the L2 cache, as it is in training.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton.testing

from equipoise import kernels as K
from equipoise.fused import cdiv

SIDES = {16: 32, 32: 16, 64: 8}


def candidates(kind: str, c: int, batch: int) -> list[tuple[str, Callable[[], Any]]]:
    """Named launches of a kernel with c channels."""
    side = SIDES[c]
    pixels = batch * side * side

    def rows() -> torch.Tensor:
        return torch.randn(pixels, c, device="cuda").bfloat16()

    x, y, g, z = rows(), rows(), rows(), rows()
    w = torch.randn(c, 3, 3, c, device="cuda").bfloat16()
    sums = torch.zeros(4, K.REPLICAS.value, 2, K.WIDEST.value, dtype=torch.int64, device="cuda")
    one = torch.ones(c, device="cuda")
    found = []

    def add(name: str, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **more: Any) -> None:
        found.append((name, lambda: kernel[grid](*args, **more)))

    if kind in ("conv", "input"):
        step = 64 if c == 16 else c
        for tile, pair, warps, ahead in itertools.product((64, 128, 256), (1, 2), (2, 4, 8), (1, 2, 3)):
            if not 8 <= tile * pair * c // (32 * warps) <= 64:
                continue
            name = f"tile {tile}, warps {warps}, ahead {ahead}, pair {pair}"
            grid = (cdiv(pixels, tile * pair), 1)
            tiles = {"BM": tile, "BN": pair * c, "BK": step, "AHEAD": ahead, "PAIR": pair, "num_warps": warps}
            if kind == "conv":
                flags = {"SUMS": True, "BIAS": False, "RESIDUAL": False, "RELU": False}
                add(name, K.conv, grid, (x, w, y, sums, y, y, pixels, side, side, c, c, 3, 1), **flags, **tiles)
            else:
                flags = {"SHORT": False, "SAME": True, "EXTRA": False, "RELU": True, "BELOW": False}
                args = (g, w, g, w, z, g, x, y, y, z, sums, sums, pixels, side, side, c, c, 1)
                add(name, K.input_gradient, grid, args, **flags, **tiles)
    elif kind == "weight":
        wide = {16: 64, 32: 128, 64: 64}[c]
        shares = {16: (64, 128, 256), 32: (32, 64, 128), 64: (16, 32, 64)}[c]
        for tile, pair, many, warps in itertools.product((32, 64, 128), (1, 2), shares, (4, 8)):
            share = cdiv(cdiv(pixels, many * pair), tile) * tile
            parts = torch.empty(many * pair, c, 3, 3, c, device="cuda")
            name = f"tile {tile}, shares {many}, warps {warps}, pair {pair}"
            args = (x, g, parts, pixels, share, side, side, c, c, 3, 1)
            grid = (many, 3, cdiv((2 + pair) * c, wide))
            add(name, K.weight_gradient, grid, args, BP=tile, BK=wide, PAIR=pair, num_warps=warps)
    else:
        for tile, warps in itertools.product((64, 128, 256, 512, 1024), (2, 4, 8)):
            name, grid = f"tile {tile}, warps {warps}", (cdiv(pixels, tile),)
            if kind == "normalise":
                args = (y, sums, one, one, x, sums, one, one, z, pixels, c)
                add(name, K.normalise, grid, args, OTHER=1, RELU=True, BM=tile, num_warps=warps)
            else:
                args = (g, y, sums, sums, one, z, y, sums, sums, one, z, pixels, c)
                add(name, K.normalise_backward, grid, args, SHORT=False, BM=tile, num_warps=warps)
    return found


def measure(kind: str, c: int, batch: int, lock: str, out: Any) -> None:
    """Compile all candidates, and time them one at a time."""
    times = []
    for name, launch in candidates(kind, c, batch):
        try:
            launch()
            torch.cuda.synchronize()
            with Path(lock).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                times.append((1e3 * triton.testing.do_bench_cudagraph(launch, rep=4, return_mode="median"), name))
        except Exception as error:
            times.append((float("inf"), f"{name}: {str(error).splitlines()[0][:60]}"))
    out.put((kind, c, sorted(times)))


def main() -> None:
    """Print the fastest five of every kernel and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--kernels", nargs="*", default=["conv", "input", "weight", "normalise", "backward"])
    asked = parser.parse_args()
    batch = asked.batch
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    jobs = list(itertools.product(asked.kernels, SIDES))
    with tempfile.NamedTemporaryFile() as lock:
        processes = [context.Process(target=measure, args=(*job, batch, lock.name, out)) for job in jobs]
        for process in processes:
            process.start()
        found = {(kind, c): times for kind, c, times in (out.get() for _ in jobs)}
        for process in processes:
            process.join()
    for kind, c in jobs:
        print(f"{kind} {c}:")
        for time, name in [*found[kind, c][:5], found[kind, c][-1]]:
            print(f"  {time:7.2f} µs  {name}")


if __name__ == "__main__":
    main()
