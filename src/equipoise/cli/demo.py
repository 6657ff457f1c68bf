"""`equipoise demo`: ten digits, five at once and then one by one, with and without memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..errors import format_count
from ..files import claim_folder
from ..methods.il_baseline import ILBaseline
from ..remedies import Balanced, Meta, Relaxed, Remedy, Standard
from ..report import figures
from ..report.terminal import format_mean, make_console
from ..runs.progress import duration
from ..runs.record import Result
from ..runs.run import run
from ..runs.settings import Data, Machine, Options, Protocol, Run
from .arguments import Demo

PICTURES = ("accuracy.png", "confusion.png")
MEMORY = "5"
CASES: dict[str, tuple[Remedy, ...]] = {
    MEMORY: (Standard(), Balanced(), Meta()),
    "0": (Standard(), Balanced(), Relaxed()),
}
"""the remedies that are compared, by memory per class"""
Results = dict[tuple[str, str], list[Result]]
"""the results of all seeds, by memory and remedy"""


def do_demo(f: Demo) -> None:
    """Learn handwritten digits one by one, with and without memory, with each loss of the paper; about a minute."""
    run_demo(f.out, range(f.seeds), make_console())


def run_demo(out: Path, seeds: Sequence[int], console: Console) -> None:
    """Do all runs, print a table and a summary, and draw the pictures."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # such small nets are only slower with more
    cases = [(seed, memory, remedy) for seed in seeds for memory, remedies in CASES.items() for remedy in remedies]
    folders = [out / f"{remedy.name}_memory-{memory}_seed-{seed}" for seed, memory, remedy in cases]
    claim_folder(out, "demo", [*PICTURES, "store", *(folder.name for folder in folders)])
    results: Results = {}
    bar = track(zip(cases, folders), "", len(cases), console=console, transient=True, disable=not console.is_terminal)
    for (seed, memory, remedy), folder in bar:
        one = Run(ILBaseline(remedy), Data("digits"), Protocol(base=5, steps=5, memory=memory), seed=seed)
        result = run(one, folder, Machine(device="cpu"), Options(store=out / "store"))
        results.setdefault((memory, remedy.name), []).append(result)
        words = f"{remedy.name}, memory {memory}, seed {seed}"
        accuracy = result["average_incremental_accuracy"]
        console.print(f"{words}: average incremental accuracy {accuracy:.2f}%", highlight=False, soft_wrap=True)
    print_comparison(results, console)
    console.print(describe_results(results), highlight=False, soft_wrap=True)
    for path in draw(results, out):
        console.print(f"picture: {path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(cases)} runs, {duration(time.perf_counter() - began)}", highlight=False)


def print_comparison(results: Results, console: Console) -> None:
    """Print a table with a row for each memory and remedy."""
    seeds = len(next(iter(results.values())))
    table = Table(
        title=f"Digits, 5 + 5 × 1 classes: accuracy in percent, mean ± deviation over {format_count(seeds, 'seed')}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("memory")
    table.add_column("remedy")
    for name in ("average", "final", "final base", "final new"):
        table.add_column(name, justify="right", no_wrap=True)
    for k, (memory, remedies) in enumerate(CASES.items()):
        if k:
            table.add_section()
        for remedy in remedies:
            group = results[memory, remedy.name]
            finals = [[r["final"][key] for r in group] for key in ("top1", "base", "new")]
            columns = [[r["average_incremental_accuracy"] for r in group], *finals]
            table.add_row(memory, remedy.name, *(format_mean(c) for c in columns))
    console.print(table)


def average_accuracy(group: Sequence[Result]) -> float:
    """The mean over seeds of the average incremental accuracy."""
    return float(np.mean([r["average_incremental_accuracy"] for r in group]))


def describe_results(results: Results) -> str:
    """Describe the comparison in one sentence."""
    parts = []
    for memory, remedies in CASES.items():
        where = f"with {memory} images per class in memory" if memory != "0" else "without memory"
        standard = average_accuracy(results[memory, "standard"])
        others = []
        for remedy in remedies[1:]:
            gain = average_accuracy(results[memory, remedy.name]) - standard
            verdict = f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}" if gain else "like"
            others.append(f"{remedy.name} ends {verdict} standard")
        parts.append(f"{where}, {' and '.join(others)} ({standard:.1f}%)")
    text = "; ".join(parts)
    return f"In average incremental accuracy, {text}."


def draw(results: Results, out: Path) -> list[Path]:
    """Draw the accuracy curves of all cases, and the confusion matrices of their first seed."""
    titles = {m: f"{m} images per class in memory" if m != "0" else "no memory" for m in CASES}
    panels = {
        titles[memory]: [(remedy.name.capitalize(), results[memory, remedy.name]) for remedy in remedies]
        for memory, remedies in CASES.items()
    }
    matrices = [(f"{name}, {title}", group[0]) for title, curves in panels.items() for name, group in curves]
    return [
        figures.draw_accuracy(panels, out / PICTURES[0]),
        figures.draw_confusions(
            [(n.replace(" images per class in memory", " in memory"), r) for n, r in matrices], out / PICTURES[1]
        ),
    ]
