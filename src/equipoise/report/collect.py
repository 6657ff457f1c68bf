"""What a report shows, collected from records: plain values, for the page, the Markdown and the pictures alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import __version__, paper
from ..data.datasets import SHAPES
from ..errors import EquipoiseError
from ..paper import Table
from ..paper.match import ONE, SEVERAL, Filled, FilledRow, Found, Records, fill
from ..runs.command import command
from ..runs.folder import Result, flat_settings
from ..runs.run import Run, run_from
from ..settings import changed
from .costs import costs, machine
from .tables import WHY_JOINED, explain_joined
from .terminal import label, protocol, reuse_words

Figure = dict[str, Any]
"""`lines`: series of numbers over x; `confusion`: runs whose matrices are shown. See `page.py` for the fields"""

DATASETS = tuple(name for name in paper.DATASETS if name != "digits")
"""those of the paper: what was rehearsed on digits is no number of it"""
MAIN = ("table1", "table3")
"""the two main tables, with memory and without"""


def collected(records: Records) -> dict[str, Any]:
    """Everything on the page."""
    filled = {table.id: (table, fill(table, records)) for table in paper.tables()}
    results = [found.result for found in records.found]
    return {
        "title": "Balanced softmax cross-entropy, reproduced",
        "subtitle": "Class-incremental learning, with and without memory: published and measured side by side.",
        "made": {
            "equipoise": __version__,
            "runs": len(results),
            "hardware": distinct(machine(result) for result in results),
            "torch": distinct(result["versions"]["torch"].split("+")[0] for result in results if "versions" in result),
        },
        "states": {
            "close": f"within {ONE:g} points of the paper, or {SEVERAL:g} for the mean of three or more seeds",
            "better": "further, on the good side",
            "near": "within twice as much",
            "off": "beyond",
        },
        "headline_caption": "Average incremental accuracy on CIFAR-100: 50 classes, then 5 steps of 10; with 20 images "
        "of every class kept, or none." + note_joined(row.cells[0] for id in MAIN for row in filled[id][1]),
        "headline": headline(filled),
        "tables": [as_table(table, rows) for table, rows in filled.values() if not (table.alone or table.figure)],
        "figures": list(figures(filled)),
        "costs": costs(*filled["costs"]) if any(r.cells[0].found for r in filled["costs"][1]) else None,
        "runs": told_apart([as_run(found) for found in records.found]),
    }


def distinct(values: Iterator[str]) -> list[str]:
    """Each value once, sorted."""
    return sorted(set(values))


def note_joined(cells: Iterable[Filled]) -> str:
    """A sentence for the caption of what is drawn from these cells, if any is measured with joined batches."""
    if not any(cell.joined for cell in cells):
        return ""
    return " Where no run with short batches is recorded yet, it is one with joined batches."


def headline(filled: dict[str, tuple[Table, list[FilledRow]]]) -> list[dict[str, Any]]:
    """The measured ones among the first column of the two main tables: 5 steps on CIFAR-100."""
    chosen = []
    for id, words in zip(MAIN, ("", ", no memory")):
        for row in filled[id][1]:
            cell = row.cells[0]
            if cell.ours is not None and cell.cell.paper is not None:
                numbers = {"ours": cell.ours, "std": cell.std, "paper": cell.cell.paper, "seeds": len(cell.found)}
                chosen.append({"name": row.row.name + words, **numbers, "state": cell.state})
    return chosen


def as_table(table: Table, filled: Sequence[FilledRow]) -> dict[str, Any]:
    """A table of the page."""
    return {
        "id": table.id,
        "title": table.title,
        "caption": f"{table.caption}.{explain_joined(filled)}",
        "metric": "accuracy, %",
        "names": {"table5": "weight", "table6": "remedy", "separated": "reading"}.get(table.id, "method"),
        "columns": [{"id": c.id, "group": c.group, "title": c.title} for c in table.columns],
        "rows": [
            {"name": row.row.name, "quoted": row.row.quoted, "cells": [as_cell(cell) for cell in row.cells]}
            for row in filled
        ],
    }


def as_cell(cell: Filled) -> dict[str, Any]:
    """A cell of the page."""
    return {
        "column": cell.cell.column.id,
        "paper": cell.cell.paper,
        "ours": cell.ours,
        "std": cell.std,
        "seeds": len(cell.found),
        "difference": cell.difference,
        "state": cell.state,
        "why": f"needs {cell.needs}" if cell.needs else WHY_JOINED if cell.joined else None,
        "command": cell.command,
        "runs": [found.id for found in cell.found],
    }


def as_run(found: Found) -> dict[str, Any]:
    """A run's section of the page."""
    result = found.result
    settings = result["run"]
    try:
        again = command(replace(run_from(settings), **other_machinery(result)))
    except EquipoiseError:
        again = None
    versions = ", ".join(f"{k} {v}" for k, v in result.get("versions", {}).items())
    words = [NAMES.get(settings["method"], settings["method"]), label(result), *unusual(result)]
    words += [paper.DATASETS.get(settings["dataset"], settings["dataset"]), protocol(settings)]
    return {
        "id": found.id,
        "title": ", ".join([*words, f"memory {settings['memory']}", f"seed {settings['seed']}"]),
        "command": again,
        "average": result["average_incremental_accuracy"],
        "final": result["final"]["top1"],
        "base": result["final"]["base"],
        "new": result["final"]["new"],
        "settings": {k: words_for(v) for k, v in flat_settings(settings).items() if v is not None},
        "steps": [
            {k: step.get(k) for k in ("step", "classes", "top1", "top5", "base", "new", "latest", "seconds")}
            | {"alpha": alpha}
            for step, alpha in zip(result["steps"], result["alpha"])
        ],
        "confusion": result["confusion"],
        "class_order": result["class_order"],
        "base_classes": settings["base"],
        "hardware": machine(result),
        "versions": versions,
        "seconds": result.get("seconds"),
        "reused": reuse_words(result.get("reused")).lstrip("; ") or None,
    }


def told_apart(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs; where one was recorded twice, with its folder in the title."""
    often = Counter(run["title"] for run in runs)
    return [run | {"title": f"{run['title']} ({run['id']})"} if often[run["title"]] > 1 else run for run in runs]


NAMES = {"il-baseline": "IL-Baseline", "lucir": "LUCIR", "podnet": "PODNet", "ncm": "NCM", "slda": "SLDA"}
"""how the papers write them"""


def unusual(result: Result) -> Iterator[str]:
    """What tells a run apart from one with default settings, in a few words."""
    settings = result["run"]
    if settings["mitigation"] != "none":
        yield settings["mitigation"].replace("-", " ")
    try:
        run = run_from(settings)
        usual = run.method.recipe(SHAPES[run.dataset])
    except (EquipoiseError, KeyError):
        yield f"{settings['recipe']['epochs']} epochs"
    else:
        differ = [*changed(run.method, type(run.method)(), skip=("loss", "mitigation"))]
        differ += changed(run.recipe or usual, usual)
        yield from (setting_words(name.replace("_", " "), value) for name, value in differ)
        asked = ((name, value) for name, value in changed(run, Run()) if name in PROTOCOL)
        yield from (PROTOCOL[name].format(words_for(value)) for name, value in asked)
    yield from other_machinery(result).values()


PROTOCOL = {
    "order": "class order {}",
    "validation": "measured on {} of the training images, set aside",
    "select": "{} exemplars",
    "brightness": "brightness {}",
}
"""how settings of a run are said that are no method's and no recipe's"""


def other_machinery(result: Result) -> dict[str, Any]:
    """Precision and engine of a run on a GPU, where they are not what they are by default."""
    settings, engine = result["run"], result.get("hardware", {}).get("engine")
    if settings.get("device") != "cuda" or (settings["precision"], engine) in (("bf16", "fused"), ("bf16", None)):
        return {}
    return {"precision": settings["precision"], **({"engine": engine} if engine else {})}


def setting_words(name: str, value: Any) -> str:
    """A setting that is not as usual, such as `short last`, `8 epochs`, `no imprint`."""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{words_for(value)} {name}"


def words_for(value: Any) -> str:
    """A setting as a person reads it."""
    if isinstance(value, list):
        return " ".join(map(words_for, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Figures ------------------------------------------------------------------------------------------------------


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
