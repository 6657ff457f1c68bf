"""Several runs on one GPU: as threads of one process, each with a stream of its own, against processes under MPS.

`python benchmarks/streams.py` prints images a second of 2, 4 and 8 at once, or of as many as `--packed` names, with and
without a teacher; on a CPU, of few images, to show that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from equipoise.cli.speed import Row, Setting, Stretch, combine, measure, run_our_loop
from equipoise.engine import train
from equipoise.runs.mps import run_mps


def in_threads(row: Row, on: Setting) -> float:
    """Images a second of the row's runs as threads, whose steps are recorded one after the other, before any trains."""
    cuda = on.device.type == "cuda"
    turn, ready, start = threading.Lock(), threading.Barrier(row.packed), threading.Barrier(row.packed)
    prepare = train.prepare

    def in_turn(*args: Any) -> Any:
        made = prepare(*args)
        turn.release()
        ready.wait()
        return made

    def one(_: int) -> Stretch:
        turn.acquire()
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext():
            return run_our_loop(row, on, start)

    train.prepare = in_turn
    try:
        with ThreadPoolExecutor(row.packed) as pool:
            return combine(list(pool.map(one, range(row.packed))))
    finally:
        train.prepare = prepare


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packed", type=int, nargs="*")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine, images, packed = ("fused", 25_600, (2, 4, 8)) if device.type == "cuda" else ("eager", 256, (2,))
    rows = [Row(engine, teacher, k) for teacher in (False, True) for k in args.packed or packed]
    on = Setting(device, device.type == "cuda", images, 128)
    threads = {row: in_threads(row, on) for row in rows}
    with run_mps():
        for row in rows:
            processes = measure(row, on)
            words = f"{row}{', teacher' if row.teacher else ''}"
            print(f"{words}: {threads[row]:,.0f} images/s as threads, {processes:,.0f} as processes", flush=True)


if __name__ == "__main__":
    main()
