"""The figures of a report as numbers: the lines or matrices of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .. import paper
from ..paper import Cell, Table
from ..paper.match import Filled, FilledRow
from ..runs.record import Result
from .grid import write_csv

K = TypeVar("K")
Figure = dict[str, Any]
"""`id`, `title`, `caption`, and of `kind` lines: `series` over the axis `x`; of `kind` confusion: `panels`, each with
its `name` and the `result` whose matrix is shown"""
Series = dict[str, Any]
"""a line's `name`, `x`, `y` and `spread`, which is None where there is one seed; lines of one `group` share a colour,
`dashed` ones are the paper's"""

DATASETS = tuple(name for name in paper.DATASETS if name != "digits")
"""all data sets but digits, which is only a rehearsal"""
MAIN = ("table1", "table3")
"""the two main tables, with memory and without"""
SHOWN = ("average", "final", "final base", "final new")
"""what is shown by α or by ε: each has one colour in all of these figures"""

FIGURE_3 = ("LUCIR, 5 steps, no memory", "LUCIR, Balanced, 5 steps, no memory")
"""the rows of the table `text` whose matrices the paper shows"""

BY_CLASSES = {"label": "classes learned", "scale": "linear"}


def note_joined(cells: Iterable[Filled]) -> str:
    """A sentence for the caption if any of these cells is measured with joined batches."""
    if not any(cell.joined for cell in cells):
        return ""
    return " Where no run with short batches is recorded yet, it is one with joined batches."


def make_figures(filled: dict[str, tuple[Table, list[FilledRow]]]) -> Iterator[Figure]:
    """The paper's figures with any measured number, and the accuracies by step behind its tables."""
    for id, words in zip(MAIN, ("20 images of every class kept", "without memory")):
        yield from chart_steps(*filled[id], words)
    kept = {row.row.name: row.cells[0] for row in filled["confusion"][1]}
    yield from chart_confusion("confusion", "Confusion", "CIFAR-100 in 5 steps, 20 images of every class kept", kept)
    none = {row.row.name: row for row in filled["text"][1] if row.row.name in FIGURE_3}
    yield from chart_confusion(
        "confusion-no-memory",
        "Confusion without memory",
        "ImageNet-Subset in 5 steps, without memory",
        find_cells(none, "imagenet-subset-final"),
    )
    yield from chart_weights(filled["table5"][1])
    yield from chart_memory(filled["table4"][1])
    yield from chart_relaxations(filled["epsilon"][1])
    yield from chart_looks(filled["anytime"][1])


def chart_steps(table: Table, rows: Sequence[FilledRow], words: str) -> Iterator[Figure]:
    """A figure for each column of a table: accuracy after each step."""
    own = {row.row.name: row for row in rows if not row.row.quoted}
    for column in table.columns:
        cells = find_cells(own, column.id)
        runs = {name: [one.result for one in cell.found] for name, cell in cells.items()}
        yield from make_lines(
            f"steps-{table.id}-{column.id}",
            f"{column.group}, {column.title}, {words}",
            "Accuracy on all classes so far, by their number; mean over the seeds, with its deviation where there are "
            "several.",
            BY_CLASSES,
            [make_curve(name, i, results) for i, (name, results) in enumerate(runs.items()) if results],
            cells.values(),
        )


def chart_weights(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Stability against plasticity by α; the paper's numbers are dashed."""
    fixed = {float(row.row.name.split()[1]): row for row in rows if row.row.name.startswith("α")}
    for t in (5, 10):
        series, used = list[Series](), list[Filled]()
        for group, metric in enumerate(SHOWN):
            # The paper has no column for the later classes, but their accuracy is in the same records.
            column = f"cifar100-{t}-{'final' if metric == 'final new' else metric.replace(' ', '-')}"
            cells = find_cells(fixed, column)
            if metric == "final new":
                later = {x: Cell(replace(c.cell.column, metric=metric), None, c.cell.run) for x, c in cells.items()}
                cells = {x: replace(c, cell=later[x]) for x, c in cells.items()}
            series += compare_over(metric, group, cells)
            used += cells.values()
        yield from make_lines(
            f"alpha-{t}",
            f"The weight α of old classes, {t} steps",
            "IL-Baseline, Balanced, CIFAR-100, 20 images of every class kept: the smaller α, the better old classes "
            "are kept, and the less is learned.",
            {"label": "α", "scale": "log"},
            series,
            used,
        )


def chart_memory(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Accuracy by the size of the memory; the paper's numbers are dashed."""
    series: list[Series] = []
    for group, row in enumerate(rows):
        series += compare_over(row.row.name, group, {float(c.cell.column.title.split()[0]): c for c in row.cells})
    yield from make_lines(
        "memory",
        "The size of the memory",
        "Average incremental accuracy on CIFAR-100 in 5 steps, by the number of images kept of every class.",
        {"label": "images kept of every class", "scale": "log"},
        series,
        [cell for row in rows for cell in row.cells],
    )


def chart_relaxations(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Stability against plasticity by ε, without memory."""
    for dataset, method, t in itertools.product(DATASETS, ("LUCIR", "PODNet"), (5, 10)):
        start = f"{method}, {t} steps, ε "
        names = {row.row.name: row for row in rows if row.row.name.startswith(start)}
        own = {float(name.removeprefix(start).rstrip("%")): row for name, row in names.items()}
        series, used = list[Series](), list[Filled]()
        for metric in ("average", "final base", "final new"):
            cells = find_cells(own, f"{dataset}-{metric.replace(' ', '-')}")
            series += compare_over(metric, SHOWN.index(metric), cells)
            used += cells.values()
        if max((len(s["x"]) for s in series), default=0) < 3:
            continue  # a line through two points would pass for a curve
        yield from make_lines(
            f"epsilon-{dataset}-{method.lower()}-{t}",
            f"The ε of the relaxed loss: {method}, {paper.DATASETS[dataset]}, {t} steps",
            "Without memory; every epoch ends with a short batch. ε in percent of the images of a class: 0 is the "
            "balanced loss, 100 nearly the standard one.",
            {"label": "ε, %", "scale": "symlog", "threshold": 0.1},
            series,
            used,
        )


def chart_looks(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Accuracy while the steps are trained, of the first seed."""
    series: list[Series] = []
    for group, row in enumerate(rows):
        looks = [look for one in row.cells[0].found[:1] for look in one.result["looks"] if look["step"]]
        x, y = [look["step"] - 1 + look["done"] for look in looks], [look["top1"] for look in looks]
        if looks:
            series.append({"name": row.row.name, "x": x, "y": y, "spread": None, "dashed": False, "group": group})
    yield from make_lines(
        "anytime",
        "Inference at any time",
        "Accuracy on all classes so far while the steps after the base step are trained, every ten epochs: CIFAR-100 "
        "in 5 steps, 20 images of every class kept. What is fine-tuned at the end of a step rises there.",
        {"label": "steps trained", "scale": "linear"},
        series,
        [],
    )


def find_cells(rows: Mapping[K, FilledRow], column: str) -> dict[K, Filled]:
    """The cells of a column, in the rows that have it."""
    return {key: cell for key, row in rows.items() for cell in row.cells if cell.cell.column.id == column}


def make_curve(name: str, group: int, results: Sequence[Result]) -> Series:
    """A run's accuracy by the number of classes, over its seeds."""
    x = [step["classes"] for step in results[0]["steps"]]
    y = np.array([[step["top1"] for step in result["steps"]] for result in results])
    spread = y.std(0, ddof=1).tolist() if len(y) > 1 else None
    return {"name": name, "x": x, "y": y.mean(0).tolist(), "spread": spread, "dashed": False, "group": group}


def compare_over(name: str, group: int, cells: Mapping[float, Filled]) -> Iterator[Series]:
    """Cells over a setting: a line for the measured numbers, and a dashed one for the paper's."""
    ours = [(x, cell.ours, cell.std) for x, cell in cells.items() if cell.ours is not None]
    published = [(x, cell.cell.paper, None) for x, cell in cells.items() if cell.cell.paper is not None]
    for words, points in ((name, ours), (f"{name}, the paper", published)):
        if points:
            x, y, deviations = map(list, zip(*points))
            line = {"name": words, "x": x, "y": y, "dashed": points is published, "group": group}
            yield {**line, "spread": deviations if any(d is not None for d in deviations) else None}


def make_lines(
    id: str, title: str, caption: str, x: Mapping[str, Any], series: Sequence[Series], cells: Iterable[Filled]
) -> Iterator[Figure]:
    """A figure with these curves, if any of their cells is measured."""
    if any(not s["dashed"] for s in series):
        words = caption + note_joined(cells)
        yield {"id": id, "kind": "lines", "title": title, "caption": words, "x": x, "series": series}


def chart_confusion(id: str, title: str, words: str, cells: Mapping[str, Filled]) -> Iterator[Figure]:
    """The matrices after the last step, of the first seed."""
    panels = [{"name": name, "result": cell.found[0].result} for name, cell in cells.items() if cell.found]
    if panels:
        yield {
            "id": id,
            "kind": "confusion",
            "title": title,
            "caption": f"How often a class (row) is taken for another (column), after log(1 + x); {words}. Classes in "
            "the order in which they were learned." + note_joined(cells.values()),
            "panels": panels,
        }


def list_points(figure: Figure) -> str:
    """The points of a figure of curves, or the counts of its matrices that are not 0, as CSV, a line each."""
    rows: list[tuple[object, ...]]
    if figure["kind"] == "confusion":
        rows = [("panel", "true", "predicted", "images")]
        for panel in figure["panels"]:
            for i, row in enumerate(panel["result"]["confusion"]):
                rows += [(panel["name"], i, j, count) for j, count in enumerate(row) if count]
        return write_csv(rows)
    rows = [("series", "x", "y", "spread")]
    for s in figure["series"]:
        for x, y, d in zip(s["x"], s["y"], s["spread"] or [None] * len(s["x"])):
            rows.append((s["name"], f"{x:g}", f"{y:.4f}", None if d is None else f"{d:.4f}"))
    return write_csv(rows)
