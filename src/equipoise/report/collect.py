"""What the page shows, collected from records as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .. import __version__, paper
from ..errors import EquipoiseError
from ..paper import Table
from ..paper.claims import find_cells
from ..paper.match import ONE, SEVERAL, Filled, FilledRow, Found, Records, fill
from ..runs.command import write_command
from ..runs.plan import read_run
from ..runs.record import find_computer
from ..settings import flatten
from .claims import collect_claims, judge_claims
from .costs import make_costs
from .gaps import make_gaps
from .grid import Grid
from .series import MAIN, make_figures, note_joined
from .tables import WHY_JOINED, explain_joined, name_elsewhere
from .words import (
    describe_changes,
    describe_reused,
    find_machine,
    find_method_title,
    format_data,
    format_protocol,
    format_remedy,
    format_value,
)


def collect_data(records: Records) -> dict[str, Any]:
    """All values of the page."""
    filled = {table.id: (table, fill(table, records)) for table in paper.make_tables()}
    results = [found.result for found in records.found]
    return {
        "title": "Balanced softmax cross-entropy, reproduced",
        "subtitle": "Class-incremental learning, with and without memory: published and measured side by side.",
        "made": {
            "equipoise": __version__,
            "runs": len(results),
            "hardware": sorted({find_computer(result) for result in results}),
            "torch": sorted({r["versions"]["torch"].split("+")[0] for r in results if "torch" in r["versions"]}),
        },
        "states": {
            "close": f"within {ONE:g} points of the paper, or {SEVERAL:g} for the mean of three or more seeds",
            "better": "further, on the good side",
            "near": "within twice as much",
            "off": "beyond",
        },
        "headline_caption": "Average incremental accuracy on CIFAR-100: 50 classes, then 5 steps of 10; with 20 images "
        "of every class kept, or none." + note_joined(row.cells[0] for id in MAIN for row in filled[id][1]),
        "headline": collect_headline(filled),
        "tables": [collect_table(table, rows) for table, rows in filled.values() if not (table.alone or table.figure)],
        "gaps": collect_plain(make_gaps(filled.values())),
        "claims": collect_claims(judge_claims(find_cells(filled.values()))),
        "figures": list(make_figures(filled)),
        "costs": collect_plain(make_costs(*filled["costs"]))
        if any(r.cells[0].found for r in filled["costs"][1])
        else None,
        "runs": make_titles_unique([collect_run(found) for found in records.found]),
    }


def collect_headline(filled: dict[str, tuple[Table, list[FilledRow]]]) -> list[dict[str, Any]]:
    """The measured cells for 5 steps on CIFAR-100, the first column of the two main tables."""
    rows = [(row, words) for id, words in zip(MAIN, ("", ", no memory")) for row in filled[id][1]]
    return [collect_cell(row.cells[0]) | {"name": row.row.name + words} for row, words in rows if row.cells[0].found]


def collect_table(table: Table, filled: Sequence[FilledRow]) -> dict[str, Any]:
    """The values of a table."""
    columns = [{"id": c.id, "group": c.group, "title": c.title} for c in table.columns]
    rows: list[dict[str, Any]] = [
        {
            "name": row.row.name,
            "quoted": row.row.quoted,
            "elsewhere": row.row.elsewhere,
            "cells": [collect_cell(cell) for cell in row.cells],
        }
        for row in filled
    ]
    if table.mean:
        columns.append({"id": "mean", "group": "", "title": table.mean})
        for line, row in zip(rows, filled):
            line["cells"].append(collect_mean(row))
    return {
        "id": table.id,
        "title": table.title,
        "caption": f"{table.caption}.{name_elsewhere(filled)}{explain_joined(filled)} Accuracy, %.",
        "names": {"table5": "weight", "table6": "remedy", "separated": "reading"}.get(table.id, "method"),
        "columns": columns,
        "rows": rows,
    }


def collect_cell(cell: Filled) -> dict[str, Any]:
    """The values of a cell."""
    return {
        "column": cell.cell.column.id,
        "paper": cell.cell.paper,
        "source": cell.cell.source.removeprefix("the "),
        "ours": cell.ours,
        "std": cell.std,
        "seeds": len(cell.found),
        "difference": cell.difference,
        "state": cell.state,
        "why": f"needs {cell.needs}" if cell.needs else WHY_JOINED if cell.joined else None,
        "command": cell.command,
        "runs": [found.id for found in cell.found],
    }


def collect_mean(row: FilledRow) -> dict[str, Any]:
    """The values of the cell with the mean over a row, which has one if several of its cells are measured."""
    mean = None if row.std is None else row.mean
    nothing = dict.fromkeys(("paper", "difference", "why", "command"))
    return {"column": "mean", "ours": mean, "std": row.std, "state": "measured", "runs": [], **nothing}


def collect_plain(grid: Grid) -> dict[str, Any]:
    """The values of a table, as strings."""
    rows = [[row.name, *(cell.text for cell in row.cells)] for row in grid.rows]
    return {"title": grid.title, "caption": grid.caption, "columns": ["", *(c for _, c in grid.columns)], "rows": rows}


def collect_run(found: Found) -> dict[str, Any]:
    """The values of a run's section."""
    result = found.result
    run, final = result["run"], result["final"]
    try:
        again = write_command(read_run(run), find_machine(result))
    except EquipoiseError:
        again = None
    words = [find_method_title(run), format_remedy(run), *describe_changes(result)]
    words += [format_data(run, paper.DATASETS), format_protocol(result)]
    return {
        "id": found.id,
        "title": ", ".join([*words, f"memory {run['protocol']['memory']}", f"seed {run['seed']}"]),
        "command": again,
        "average": result["average_incremental_accuracy"],
        "final": final["top1"],
        "base": final["base"],
        "new": final["new"],
        "settings": {name: format_value(value) for name, value in flatten(run).items() if value is not None},
        "steps": [step | {"alpha": alpha} for step, alpha in zip(result["steps"], result["alpha"])],
        "confusion": result["confusion"],
        "hardware": find_computer(result),
        "versions": ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
        "seconds": result.get("seconds"),
        "reused": describe_reused(result.get("reused")) or None,
    }


def make_titles_unique(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the folder to the titles of runs that are recorded twice."""
    often = Counter(run["title"] for run in runs)
    return [run | {"title": f"{run['title']} ({run['id']})"} if often[run["title"]] > 1 else run for run in runs]
