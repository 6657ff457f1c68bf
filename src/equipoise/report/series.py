"""The figures of a report as numbers: which there are, and the lines or matrices in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import paper
from ..paper import Table
from ..paper.match import Filled, FilledRow

Figure = dict[str, Any]
"""`kind` lines: `series` of numbers over x, of which those of one `group` share a colour, and dashed ones are the
paper's; `kind` confusion: `panels`, the runs whose matrices are shown. See `lines` and `confusion`"""

DATASETS = tuple(name for name in paper.DATASETS if name != "digits")
"""those of the paper: what was rehearsed on digits is no number of it"""
MAIN = ("table1", "table3")
"""the two main tables, with memory and without"""


def note_joined(cells: Iterable[Filled]) -> str:
    """A sentence for the caption of what is drawn from these cells, if any is measured with joined batches."""
    if not any(cell.joined for cell in cells):
        return ""
    return " Where no run with short batches is recorded yet, it is one with joined batches."


def figures(filled: dict[str, tuple[Table, list[FilledRow]]]) -> Iterator[Figure]:
    """Those of the paper of which something has been measured, and the accuracies by step behind its tables."""
    for id, words in zip(MAIN, ("20 images of every class kept", "without memory")):
        table, rows = filled[id]
        for column in table.columns:
            own = [row for row in rows if not row.row.quoted]
            cells = [cell_of(row, column.id) for row in own]
            series = [curve(row.row.name, i, cell) for i, (row, cell) in enumerate(zip(own, cells))]
            yield from lines(
                f"steps-{id}-{column.id}",
                f"{column.group}, {column.title}, {words}",
                "Accuracy on all classes so far, by their number; mean over the seeds, with its deviation "
                "where there are several." + note_joined(cells),
                {"label": "classes learned", "scale": "linear"},
                [s for s in series if s is not None],
            )
    yield from confusion(filled["confusion"][1])
    yield from weights(filled["table5"][1])
    yield from memory(filled["table4"][1])
    yield from relaxations(filled["epsilon"][1])


def lines(id: str, title: str, caption: str, x: dict[str, Any], series: list[Figure]) -> Iterator[Figure]:
    """A figure of curves, if there is one."""
    if any(not s["dashed"] for s in series):
        axis = {"threshold": None, "ticks": sorted({v for s in series for v in s["x"]}), **x}
        y = {"label": "accuracy, %"}
        yield {"id": id, "kind": "lines", "title": title, "caption": caption, "x": axis, "y": y, "series": series}


def curve(name: str, group: int, cell: Filled) -> Figure | None:
    """A run's accuracy by the number of classes, over its seeds."""
    if not cell.found:
        return None
    x = [step["classes"] for step in cell.found[0].result["steps"]]
    y = np.array([[step["top1"] for step in one.result["steps"]] for one in cell.found])
    spread = y.std(0, ddof=1).tolist() if len(y) > 1 else None
    return {"name": name, "x": x, "y": y.mean(0).tolist(), "spread": spread, "dashed": False, "group": group}


def over(name: str, points: Sequence[tuple[float, Filled | float | None]], group: int, dashed: bool) -> Figure | None:
    """A curve over a setting, through the points that there are: measured cells, or published numbers."""
    known = [(x, v) for x, v in points if (v.ours if isinstance(v, Filled) else v) is not None]
    if not known:
        return None
    y = [v.ours if isinstance(v, Filled) else v for _, v in known]
    stds = [v.std if isinstance(v, Filled) else None for _, v in known]
    spread = stds if all(s is not None for s in stds) else None
    return {"name": name, "x": [x for x, _ in known], "y": y, "spread": spread, "dashed": dashed, "group": group}


def confusion(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """The matrices after the last step, of the first seed."""
    found = [(row.row.name, row.cells[0].found[0]) for row in rows if row.cells[0].found]
    panels = [{"name": f"{name}: {one.result['final']['top1']:.1f}%", "run": one.id} for name, one in found]
    if panels:
        yield {
            "id": "confusion",
            "kind": "confusion",
            "title": "Confusion",
            "caption": "How often a class (row) is taken for another (column), after log(1 + x); CIFAR-100 in 5 steps, "
            "20 images of every class kept. Classes in the order in which they were learned."
            + note_joined(row.cells[0] for row in rows),
            "panels": panels,
        }


SHOWN = ("average", "final", "final base", "final new")
"""what is shown by α or by ε: each has one colour in all of these figures"""


def weights(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Stability against plasticity by α; the paper's numbers are dashed."""
    fixed = [row for row in rows if row.row.name.startswith("α")]
    for t in (5, 10):
        series = []
        for group, metric in enumerate(SHOWN):
            # The paper has no column for the later classes, but their accuracy is in the same records.
            column = f"cifar100-{t}-{'final' if metric == 'final new' else metric.replace(' ', '-')}"
            cells = [cell_of(row, column) for row in fixed]
            if metric == "final new":
                cells = [replace(c, cell=replace(c.cell, metric=metric, paper=None)) for c in cells]
            at = [(float(row.row.name.split()[1]), cell) for row, cell in zip(fixed, cells)]
            series.append(over(metric, at, group, dashed=False))
            series.append(over(f"{metric}, the paper", [(x, c.cell.paper) for x, c in at], group, dashed=True))
        yield from lines(
            f"alpha-{t}",
            f"The weight α of old classes, {t} steps",
            "IL-Baseline, Balanced, CIFAR-100, 20 images of every class kept: the smaller α, the better old classes "
            "are kept, and the less is learned."
            + note_joined(cell for row in fixed for cell in row.cells if f"-{t}-" in cell.cell.column.id),
            {"label": "α", "scale": "log"},
            [s for s in series if s is not None],
        )


def cell_of(row: FilledRow, column: str) -> Filled:
    """A row's cell in that column."""
    return next(cell for cell in row.cells if cell.cell.column.id == column)


def memory(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Accuracy by the size of the memory; the paper's numbers are dashed."""
    series = []
    for group, row in enumerate(rows):
        at = [(float(cell.cell.column.title.split()[0]), cell) for cell in row.cells]
        series.append(over(row.row.name, at, group, dashed=False))
        series.append(over(f"{row.row.name}, the paper", [(x, c.cell.paper) for x, c in at], group, dashed=True))
    yield from lines(
        "memory",
        "The size of the memory",
        "Average incremental accuracy on CIFAR-100 in 5 steps, by the number of images kept of every class."
        + note_joined(cell for row in rows for cell in row.cells),
        {"label": "images kept of every class", "scale": "log"},
        [s for s in series if s is not None],
    )


def relaxations(rows: Sequence[FilledRow]) -> Iterator[Figure]:
    """Stability against plasticity by ε, without memory."""
    for dataset in DATASETS:
        for method in ("LUCIR", "PODNet"):
            for t in (5, 10):
                start = f"{method}, {t} steps, ε "
                own = [row for row in rows if row.row.name.startswith(start)]
                own = [row for row in own if any(cell.cell.column.dataset == dataset for cell in row.cells)]
                series = []
                for metric in ("average", "final base", "final new"):
                    column = f"{dataset}-{metric.replace(' ', '-')}"
                    at = [(float(r.row.name.removeprefix(start).rstrip("%")), cell_of(r, column)) for r in own]
                    series.append(over(metric, at, SHOWN.index(metric), dashed=False))
                if max((len(s["x"]) for s in series if s is not None), default=0) < 3:
                    continue  # a line through two points would pass for a curve
                yield from lines(
                    f"epsilon-{dataset}-{method.lower()}-{t}",
                    f"The ε of the relaxed loss: {method}, {paper.DATASETS[dataset]}, {t} steps",
                    "Without memory; every epoch ends with a short batch. ε in percent of the images of a class: 0 is "
                    "the balanced loss, 100 nearly the standard one."
                    + note_joined(cell for row in own for cell in row.cells if cell.cell.column.dataset == dataset),
                    {"label": "ε, %", "scale": "symlog", "threshold": 0.1},
                    [s for s in series if s is not None],
                )
