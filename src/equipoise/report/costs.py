"""What a loss costs: seconds and memory of runs that were timed, in every format that tables have."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table as Rich

from ..data.datasets import SHAPES
from ..paper import Cell, Table
from ..paper.match import FilledRow
from ..runs.folder import Result
from ..step import plan_for
from .tables import detailed, escape
from .words import computer

COLUMNS = (
    "",
    "epochs",
    "training, s",
    "refitting, s",
    "at full length, against Balanced",
    "whole steps, s",
    "training, MiB",
    "whole run, MiB",
    "machine",
)

Costs = Mapping[str, Any]
"""`title`, `caption`, `columns` and `rows` of words, and the `commands` that measure them"""


def costs(table: Table, filled: Sequence[FilledRow]) -> Costs:
    """Seconds and memory of every row, and how many times as long as Balanced of the same method, on the same machine.

    Of the first seed; – for what has not been timed.
    """
    found = {row.row.name: row.cells[0].found[0].result for row in filled if row.cells and row.cells[0].found}
    full = {row.row.name: own_epochs(row.cells[0].cell) for row in filled if row.cells}

    def line(name: str) -> list[str]:
        if name not in found:
            return [name, *"–" * (len(COLUMNS) - 1)]
        result = found[name]
        other = name.split(",")[0].split(" with")[0] + ", Balanced"
        rival = found.get(other)
        alike = rival is not None and computer(rival) == computer(result)
        times = trained(result, full[name]) / trained(rival, full[other]) if rival is not None and alike else None
        first = result["steps"][1] if len(result["steps"]) > 1 else {}
        peaks = first.get("training_mib"), result["machine"].get("peak_memory_mib")
        return [
            name,
            str(result["run"]["recipe"]["epochs"]),
            f"{seconds(result, 'training'):.2f}",
            f"{seconds(result, 'refitting'):.2f}" if seconds(result, "refitting") else "–",
            "–" if times is None else f"{times:.2f}",
            f"{seconds(result, ''):.2f}",
            *("–" if peak is None else f"{peak:,.0f}" for peak in peaks),
            computer(result),
        ]

    return {
        "title": table.title,
        "caption": f"{' and '.join(c.group for c in table.columns)}. {table.caption}; one trial. Memory is the GPU's "
        "at its peak: while the first step after the base step is trained, and in the whole run, predicting included. "
        "At full length: training is scaled to the method's own number of epochs, refitting is as measured. "
        "A whole step is both and, besides, recording kernels, choosing exemplars, measuring and saving: in runs as "
        "short as these, that weighs more than in a real one.",
        "columns": list(COLUMNS),
        "rows": [line(row.row.name) for row in filled],
        "commands": [f"{row.row.name}: {row.cells[0].command} --store none" for row in filled],
    }


def seconds(result: Result, what: str) -> float:
    """Of all steps after the base step."""
    name = f"{what}_seconds" if what else "seconds"
    return float(sum(step.get(name, 0.0) for step in result["steps"][1:]))


def own_epochs(cell: Cell) -> int:
    """The method's own number of epochs; its cost is measured with fewer."""
    assert cell.run is not None
    return cell.run.method.recipe(plan_for(SHAPES[cell.run.data.name])).epochs


def trained(result: Result, epochs: int) -> float:
    """Seconds of training, scaled to so many epochs, and of what is trained afterwards."""
    return seconds(result, "training") * epochs / int(result["run"]["recipe"]["epochs"]) + seconds(result, "refitting")


def terminal(made: Costs) -> Rich:
    """For a terminal."""
    table = Rich(box=box.SIMPLE_HEAD)
    for i, name in enumerate(made["columns"]):
        table.add_column(name, justify="right" if 0 < i < len(COLUMNS) - 1 else "left")
    for row in made["rows"]:
        table.add_row(*row)
    return table


def markdown(made: Costs, commands: bool = False) -> str:
    """As Markdown; if `commands`, with what measures each row below it."""
    columns = made["columns"]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in made["rows"]]
    lines += ["", *detailed(made["commands"])] if commands else []
    return f"### {made['title']}\n\n{made['caption']}\n\n" + "\n".join(lines) + "\n"


def latex(made: Costs, commands: bool = False) -> str:
    """For a paper: needs the package booktabs; if `commands`, with what measures each row as comments."""
    rows = [" & ".join(map(escape, row)) + r" \\" for row in (made["columns"], *made["rows"])]
    head, *body = (f"    {row.replace('–', '--')}" for row in rows)
    caption = rf"  \caption{{{escape(made['caption'])}}}"
    begin = [r"\begin{table}", caption, rf"  \begin{{tabular}}{{l{'r' * (len(COLUMNS) - 1)}}}", r"    \toprule"]
    end = [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    end += [f"% {line}" for line in made["commands"]] if commands else []
    return "\n".join([*begin, head, r"    \midrule", *body, *end]) + "\n"


def comma_separated(made: Costs, commands: bool = False) -> str:
    """A line for each row, with its command."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", *made["columns"][1:], "command"])
    for (name, *values, machine), command in zip(made["rows"], made["commands"]):
        plain = ["" if value == "–" else value.replace(",", "") for value in values]
        writer.writerow([name, *plain, "" if machine == "–" else machine, command.rpartition(": ")[2]])
    return out.getvalue()
