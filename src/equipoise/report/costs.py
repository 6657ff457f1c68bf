"""The costs of a loss: seconds and memory of timed runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..paper import Table
from ..paper.cells import scale_training, sum_steps
from ..paper.match import Filled, FilledRow
from ..runs.record import find_computer
from .grid import Grid, Line, Shown

COLUMNS = (
    "epochs",
    "training, s",
    "refitting, s",
    "at full length, against Balanced",
    "whole steps, s",
    "training, MiB",
    "whole run, MiB",
    "machine",
)


def make_costs(table: Table, filled: Sequence[FilledRow]) -> Grid:
    """The seconds and memory of every row, for the first seed; – if not timed."""
    cells = {row.row.name: row.cells[0] for row in filled}
    rows = [Line(name, list(map(Shown, time_row(name, cells)))) for name in cells]
    commands = [f"{cell.command} --store none" for cell in cells.values()]
    lines = [(row.name, *(strip_number(cell.text) for cell in row.cells), end) for row, end in zip(rows, commands)]
    return Grid(
        id=table.id,
        title=table.title,
        caption=f"{' and '.join(c.group for c in table.columns)}. {table.caption}; one trial. Memory is the GPU's "
        "at its peak: while the first step after the base step is trained, and in the whole run, predicting included. "
        "At full length: training is scaled to the method's own number of epochs, refitting is as measured. "
        "A whole step is both and, besides, recording kernels, choosing exemplars, measuring and saving: in runs as "
        "short as these, that weighs more than in a real one.",
        columns=[("", name) for name in COLUMNS],
        rows=rows,
        commands=[f"{name}: {command}" for name, command in zip(cells, commands)],
        numbers=[("name", *COLUMNS, "command"), *lines],
    )


def time_row(name: str, cells: Mapping[str, Filled]) -> list[str]:
    """The costs of a row, and its time relative to Balanced with the same method on the same machine."""
    if not cells[name].found:
        return ["–"] * len(COLUMNS)
    result = cells[name].found[0].result
    rival = cells.get(name.split(",")[0].split(" with")[0] + ", Balanced")
    times = "–"
    if rival is not None and rival.found and find_computer(rival.found[0].result) == find_computer(result):
        times = f"{scale_training(result) / scale_training(rival.found[0].result):.2f}"
    first = result["steps"][1] if len(result["steps"]) > 1 else {}
    peaks = first.get("training_mib"), result["machine"].get("peak_memory_mib")
    return [
        str(result["run"]["recipe"]["epochs"]),
        f"{sum_steps(result, 'training_seconds'):.2f}",
        f"{sum_steps(result, 'refitting_seconds'):.2f}" if sum_steps(result, "refitting_seconds") else "–",
        times,
        f"{sum_steps(result, 'seconds'):.2f}",
        *("–" if peak is None else f"{peak:,.0f}" for peak in peaks),
        find_computer(result),
    ]


def strip_number(text: str) -> str:
    """A number for CSV; empty if there is none."""
    return "" if text == "–" else re.sub(r"(?<=\d),(?=\d)", "", text)
