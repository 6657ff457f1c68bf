"""Microseconds of each kernel of `equipoise.engine.kernels` at the shapes of ResNet-32, for several tile sizes.

    python benchmarks/kernels.py [--batch 128] [--at-once 4] > kernels.txt

Tiles that are fast both ways are what `equipoise.engine.kernels.tiles` has in its tables. Each line is one kernel at
one shape, alone and several at once: in as many streams, each on data of its own, the time divided by their number, as
where runs share a GPU. Times are medians over replays of a CUDA graph.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton.testing

from equipoise.engine.kernels import triton as K
from equipoise.engine.kernels.tiles import cdiv, count_at_a_time

SIDES = {16: 32, 32: 16, 64: 8}
KINDS = ("conv", "input", "strided", "weight", "normalise", "backward")
REPEATED = 20
"""launches in a row, in each stream"""


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
        step = count_at_a_time(c, 3)
        for tile, tall, wide, warps, ahead in itertools.product((64, 128, 256), (1, 2), (1, 2), (4, 8), (1, 3)):
            patch = tall * wide
            if not 16 <= tile * patch * c // (32 * warps) <= 64:
                continue
            name = f"{tile * patch} pixels, {warps} warps, {ahead} ahead, by {tall} x {wide}"
            grid = (cdiv(pixels, tile * patch), 1)
            tiles = {"BM": tile, "BN": patch * c, "BK": step, "AHEAD": ahead, "TALL": tall, "WIDE": wide}
            tiles["num_warps"] = warps
            if kind == "conv":
                flags = {"SUMS": True, "BIAS": False, "RESIDUAL": False, "RELU": False}
                add(name, K.conv, grid, (x, w, y, sums, y, y, pixels, side, side, c, c, 3, 1), **flags, **tiles)
            else:
                flags = {"SHORT": False, "SAME": True, "EXTRA": False, "RELU": True, "BELOW": False}
                args = (g, w, g, w, z, g, x, y, y, z, sums, sums, pixels, side, side, c, c, 1)
                add(name, K.input_gradient, grid, args, **flags, **tiles)
    elif kind == "strided" and c < 64:
        dy, dys = (torch.randn(pixels // 4, 2 * c, device="cuda").bfloat16() for _ in range(2))
        w, ws = (torch.randn(2 * c, side, side, c, device="cuda").bfloat16() for side in (3, 1))
        flags = {"SHORT": True, "SAME": False, "EXTRA": False, "RELU": True, "BELOW": False, "TALL": 2, "WIDE": 2}
        for tile, warps, ahead in itertools.product((128, 256, 512), (4, 8), (1, 3)):
            name, grid = f"{tile} pixels, {warps} warps, {ahead} ahead", (cdiv(pixels, tile), 1)
            args = (dy, w, dys, ws, z, g, x, y, y, z, sums, sums, pixels, side, side, c, 2 * c, 2)
            tiles = {"BM": tile // 4, "BN": 4 * c, "BK": count_at_a_time(2 * c, 3), "AHEAD": ahead, "num_warps": warps}
            add(name, K.input_gradient, grid, args, **flags, **tiles)
    elif kind == "weight":
        wide = {16: 64, 32: 128, 64: 64}[c]
        shares = {16: (32, 64, 128), 32: (16, 32, 64), 64: (8, 16, 32)}[c]
        for tile, pair, many in itertools.product((32, 64, 128), (1, 2), shares):
            share = cdiv(cdiv(pixels, many * pair), tile) * tile
            parts = torch.empty(many * pair, c, 3, 3, c, device="cuda")
            name = f"tile {tile}, shares {many}, pair {pair}"
            args = (x, g, parts, pixels, share, side, side, c, c, 3, 1)
            grid = (many, 3, cdiv((2 + pair) * c, wide))
            add(name, K.weight_gradient, grid, args, BP=tile, BK=wide, PAIR=pair, num_warps=4)
    elif kind in ("normalise", "backward"):
        for tile, warps in itertools.product((64, 128, 256, 512, 1024), (2, 4, 8)):
            name, grid = f"tile {tile}, warps {warps}", (cdiv(pixels, tile),)
            if kind == "normalise":
                args = (y, sums, one, one, x, sums, one, one, z, pixels, c)
                add(name, K.normalise, grid, args, OTHER=1, RELU=True, BM=tile, num_warps=warps)
            else:
                args = (g, y, sums, sums, one, z, y, sums, sums, one, z, pixels, c)
                add(name, K.normalise_backward, grid, args, SHORT=False, BM=tile, num_warps=warps)
    return found


def at_once(launches: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of several launches side by side, in a stream each, divided by their number."""
    streams = [torch.cuda.Stream() for _ in launches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for stream, launch in zip(streams, launches):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(REPEATED):
                    launch()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    times = []
    for _ in range(8):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / (REPEATED * len(launches)))
    return statistics.median(times)


def measure(kind: str, c: int, batch: int, many: int, lock: str, out: Any) -> None:
    """Compile all candidates, and time them one at a time."""
    times = []
    for same in zip(*(candidates(kind, c, batch) for _ in range(many))):
        name, launches = same[0][0], [launch for _, launch in same]
        try:
            for launch in launches:
                launch()
            torch.cuda.synchronize()
            with Path(lock).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = 1e3 * triton.testing.do_bench_cudagraph(launches[0], rep=4, return_mode="median")
                times.append((at_once(launches), alone, name))
        except Exception as error:
            times.append((float("inf"), float("inf"), f"{name}: {str(error).splitlines()[0][:60]}"))
    out.put((kind, c, times))


def main() -> None:
    """Print the fastest of every kernel and shape, alone and at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kernels", nargs="*", default=KINDS)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    jobs = list(itertools.product(args.kernels, SIDES))
    with tempfile.NamedTemporaryFile() as lock:
        processes = [
            context.Process(target=measure, args=(*job, args.batch, args.at_once, lock.name, out)) for job in jobs
        ]
        for process in processes:
            process.start()
        found = {(kind, c): times for kind, c, times in (out.get() for _ in jobs)}
        for process in processes:
            process.join()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; batch {args.batch}")
    for kind, c in jobs:
        print(f"{kind} {c}: µs of {args.at_once} at once, divided by their number, and alone")
        times = found[kind, c]
        shown = sorted(times)[:4] + sorted(times, key=lambda row: row[1])[:4]
        for together, alone, name in dict.fromkeys(shown):
            print(f"  {together:7.2f} {alone:7.2f}  {name}")


if __name__ == "__main__":
    main()
