"""The main job on embedded data: ten digits, five at once and then one by one, with and without memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..engine.train import Epoch
from ..files import claim_folder
from ..losses import Balanced, Loss, Meta, Relaxed, Standard
from ..methods.il_baseline import ILBaseline
from ..report.terminal import mean_and_deviation
from ..runs.folder import Result
from ..runs.progress import Watch, duration
from ..runs.run import Run, run
from ..runs.shared_steps import Store

MEMORY = "5"
CASES: dict[str, tuple[Loss, ...]] = {
    MEMORY: (Standard(), Balanced(), Meta()),
    "0": (Standard(), Balanced(), Relaxed()),
}
"""the losses that are compared, by memory per class"""
PICTURES = ("accuracy.png", "confusion.png")


class DemoWatch(Watch):
    """Moves one bar over all runs in a terminal; where there is none, prints a line for each run."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=runs, words="")
        self.done = 0

    def next(self, description: str) -> None:
        """Another run begins."""
        self.bar.update(self.task, description=description, words="")

    def finished(self, description: str, result: Result) -> None:
        """A run has ended."""
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        if not self.console.is_terminal:
            accuracy = result["average_incremental_accuracy"]
            print(f"{description}: average incremental accuracy {accuracy:.2f}%", flush=True)

    def epoch(self, e: Epoch) -> None:
        """Move the bar by a fraction of a run."""
        part = (e.step + e.epoch / e.epochs) / len(self.images)
        self.bar.update(self.task, completed=self.done + part, words=f"step {e.step}, loss {e.loss:.3f}")


def demo(out: Path, seeds: Sequence[int], console: Console) -> None:
    """Run all cases, then print a table and a sentence, and draw the pictures."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # such small nets only lose by more
    store = Store(out / "store")
    results: dict[tuple[str, str], list[Result]] = {}
    todo = [(seed, memory, loss) for seed in seeds for memory, losses in CASES.items() for loss in losses]
    folders = {case: out / f"{case[2].name}_memory-{case[1]}_seed-{case[0]}" for case in todo}
    claim_folder(out, "demo", [*PICTURES, "store", *(folder.name for folder in folders.values())])
    watch = DemoWatch(console, len(todo))
    with watch.bar:
        for seed, memory, loss in todo:
            words = f"{loss.name}, memory {memory}, seed {seed}"
            watch.next(words)
            asked = Run(ILBaseline(loss), dataset="digits", base=5, steps=5, memory=memory, seed=seed, device="cpu")
            result = run(asked, folders[seed, memory, loss], store=store, watch=watch)
            results.setdefault((memory, loss.name), []).append(result)
            watch.finished(words, result)
    print_comparison(results, console)
    console.print(sentence(results), highlight=False, soft_wrap=True)
    for path in draw(results, out):
        console.print(f"picture: {path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(todo)} runs, {duration(time.perf_counter() - began)}", highlight=False)


def print_comparison(results: dict[tuple[str, str], list[Result]], console: Console) -> None:
    """A row for each memory and loss."""
    seeds = len(next(iter(results.values())))
    table = Table(
        title=f"Digits, 5 + 5 × 1 classes: accuracy in percent, mean ± deviation over {seeds} seed(s)",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("memory")
    table.add_column("loss")
    for name in ("average", "final", "final base", "final new"):
        table.add_column(name, justify="right", no_wrap=True)
    for k, (memory, losses) in enumerate(CASES.items()):
        if k:
            table.add_section()
        for loss in losses:
            group = results[memory, loss.name]
            finals = [[r["final"][key] for r in group] for key in ("top1", "base", "new")]
            columns = [[r["average_incremental_accuracy"] for r in group], *finals]
            table.add_row(memory, loss.name, *(mean_and_deviation(c) for c in columns))
    console.print(table)


def average(group: Sequence[Result]) -> float:
    """The mean over seeds of the average incremental accuracy."""
    return float(np.mean([r["average_incremental_accuracy"] for r in group]))


def sentence(results: dict[tuple[str, str], list[Result]]) -> str:
    """What happened, whatever it was."""
    parts = []
    for memory, losses in CASES.items():
        where = f"with {memory} images per class in memory" if memory != "0" else "without memory"
        standard = average(results[memory, "standard"])
        others = []
        for loss in losses[1:]:
            gain = average(results[memory, loss.name]) - standard
            verdict = f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}" if gain else "like"
            others.append(f"{loss.name} ends {verdict} standard")
        parts.append(f"{where}, {' and '.join(others)} ({standard:.1f}%)")
    text = "; ".join(parts)
    return f"In average incremental accuracy, {text}."


def draw(results: dict[tuple[str, str], list[Result]], out: Path) -> list[Path]:
    """The curves of all cases, and the confusion matrices of their first seed."""
    from ..report import figures  # matplotlib is slow to import, and only pictures need it

    titles = {m: f"{m} images per class in memory" if m != "0" else "no memory" for m in CASES}
    panels = {
        titles[memory]: [(loss.name.capitalize(), results[memory, loss.name]) for loss in losses]
        for memory, losses in CASES.items()
    }
    matrices = [(f"{name}, {title}", group[0]) for title, curves in panels.items() for name, group in curves]
    return [
        figures.accuracy_curves(panels, out / PICTURES[0]),
        figures.confusions(
            [(n.replace(" images per class in memory", " in memory"), r) for n, r in matrices], out / PICTURES[1]
        ),
    ]
