"""Tables of measured and published numbers: for a terminal, as Markdown, as LaTeX and as CSV.

All of them are made of the same cells, in the same order, and equal records give equal bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table as Rich
from rich.text import Text

from ..paper import Column, Table
from ..paper.match import Filled, FilledRow
from .words import mean_and_deviation

COLOURS = {"close": "green", "better": "cyan", "near": "yellow", "off": "red", "measured": ""}
"""how far a cell is from the paper's"""


def shown(filled: Sequence[FilledRow]) -> list[Column]:
    """The columns, in the order in which rows have them."""
    return list(dict.fromkeys(cell.cell.column for row in filled for cell in row.cells))


def by_column(row: FilledRow) -> dict[Column, Filled]:
    """The cells of a row by their columns, of which not every row has all."""
    return {cell.cell.column: cell for cell in row.cells}


def measured(cell: Filled) -> str:
    """Mean ± deviation over seeds."""
    return mean_and_deviation(cell.values)


def beside(cell: Filled) -> str:
    """What stands beside the measured number: the paper's, the difference with its mark, how many seeds if several."""
    words = [] if cell.cell.paper is None else [f"{cell.cell.paper:.2f}"]
    joined = JOINED if cell.joined else ""
    if cell.difference is not None:
        words.append(signed(cell.difference) + MARKS.get(cell.state, "") + joined)
    elif joined:
        words.append(joined)
    if len(cell.found) > 1:
        words.append(f"{len(cell.found)} seeds")
    return ", ".join(words)


def signed(difference: float) -> str:
    """A difference with its sign, and a minus as long as a plus."""
    return f"{difference:+.2f}".replace("-", "−")


def seeds_in(filled: Sequence[FilledRow]) -> str:
    """How many seeds the measured numbers are of."""
    counts = sorted({len(cell.found) for row in filled for cell in row.cells if cell.found})
    if not counts:
        return "nothing yet"
    if len(counts) == 1:
        return f"{counts[0]} seed{'s' if counts[0] > 1 else ''}"
    return f"{counts[0]} to {counts[-1]} seeds"


MARKS = {"near": "†", "off": "‡"}
JOINED, WHY_JOINED = "ʲ", "measured with joined batches: with short ones there is no record yet"
LEGEND = (
    "; in brackets the paper's, and the difference to it († further than the seeds allow, ‡ twice as far; no "
    "mark for a better average or final accuracy in rows with a remedy)"
)


def explain_joined(filled: Sequence[FilledRow]) -> str:
    """A sentence about cells that are measured with joined batches instead of short ones, if there are any."""
    if not any(cell.joined for row in filled for cell in row.cells):
        return ""
    return f" {JOINED} {WHY_JOINED}."


def commands_of(filled: Sequence[FilledRow]) -> Iterator[str]:
    """What measures each cell, a line for each run: several cells may be of one."""
    for row in filled:
        of: dict[str, list[str]] = {}
        for cell in row.cells:
            if cell.command:
                names = of.setdefault(cell.command, [row.row.name])
                names += [word for word in (cell.cell.column.group, cell.cell.column.title) if word not in names]
        for command, names in of.items():
            yield f"{', '.join(names)}: {command}"


def titled(table: Table, filled: Sequence[FilledRow]) -> str:
    """What stands above a table."""
    lacking = list(dict.fromkeys(cell.needs for row in filled for cell in row.cells if cell.needs))
    needs = f" Not measured: needs {' and '.join(lacking)}." if lacking else ""
    legend = LEGEND if any(cell.cell.paper is not None for row in filled for cell in row.cells) else ""
    return f"{table.title}. {table.caption}. Measured, {seeds_in(filled)}{legend}.{explain_joined(filled)}{needs}"


def terminal(filled: Sequence[FilledRow]) -> Rich:
    """A table with a colour for every cell that was measured."""
    made = Rich(box=box.SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    columns = shown(filled)
    for column in columns:
        made.add_column(f"{column.group}\n{column.title}", justify="right")
    for row in filled:
        cells = by_column(row)
        name = Text(row.row.name + (" (quoted)" if row.row.quoted else ""), style="dim" if row.row.quoted else "")
        made.add_row(name, *(_coloured(cells.get(column)) for column in columns))
    return made


def _coloured(cell: Filled | None) -> Text:
    if cell is None or cell.state == "none":
        return Text("")
    if cell.state == "quoted":
        return Text(beside(cell) or "–", style="dim")
    paper = f" ({beside(cell)})" if beside(cell) else ""
    if cell.needs:
        return Text(f"needs {cell.needs}{paper}", style="dim")
    return Text.assemble((measured(cell), f"bold {COLOURS.get(cell.state, '')}".strip()), (paper, "dim"))


def markdown(table: Table, filled: Sequence[FilledRow], commands: bool = False) -> str:
    """A table; if `commands`, below it what measures each of its cells."""
    columns = shown(filled)
    lines = [
        f"### {table.title}",
        "",
        titled(table, filled).removeprefix(f"{table.title}. "),
        "",
        "| | " + " | ".join(f"{c.group}, {c.title}" for c in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for row in filled:
        cells = by_column(row)
        name = f"*{row.row.name} (quoted)*" if row.row.quoted else row.row.name
        lines.append(f"| {name} | " + " | ".join(_marked(cells.get(column)) for column in columns) + " |")
    if commands:
        lines += ["", *detailed(list(commands_of(filled)))]
    return "\n".join(lines) + "\n"


def detailed(commands: Sequence[str]) -> list[str]:
    """Lines of Markdown that unfold to these commands, each with what it measures before it."""
    items = [f"- {what}: `{command}`" for what, _, command in (line.rpartition(": ") for line in commands)]
    return ["<details><summary>The command of each cell</summary>", "", *items, "", "</details>"]


def _marked(cell: Filled | None) -> str:
    if cell is None or cell.state == "none":
        return ""
    paper = beside(cell)
    if cell.state == "quoted":
        return f"*{paper}*" if paper else ""
    ours = f"**{measured(cell)}**" if cell.found else "–"
    return ours + (f" ({paper})" if paper else "")


def latex(table: Table, filled: Sequence[FilledRow], commands: bool = False) -> str:
    """A table for a paper: needs the package booktabs. If `commands`, what measures each cell as comments."""
    columns = shown(filled)
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    lines = [
        r"\begin{table}",
        rf"  \caption{{{escape(titled(table, filled))}}}",
        rf"  \label{{tab:{table.id}}}",
        rf"  \begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"    \toprule",
        "    " + "".join(rf" & \multicolumn{{{n}}}{{c}}{{{escape(name)}}}" for name, n in groups) + r" \\",
        "    " + "".join(rf" & {escape(c.title)}" for c in columns) + r" \\",
        r"    \midrule",
    ]
    for row in filled:
        cells = by_column(row)
        name = escape(row.row.name) + (r" \emph{(quoted)}" if row.row.quoted else "")
        lines.append("    " + " & ".join([name, *(_typeset(cells.get(column)) for column in columns)]) + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    lines += [f"% {line}" for line in commands_of(filled)] if commands else []
    return "\n".join(lines) + "\n"


def _typeset(cell: Filled | None) -> str:
    if cell is None or cell.state == "none":
        return ""
    paper = typeset_marks(beside(cell).replace("−", "$-$"))
    if cell.state == "quoted":
        return rf"\emph{{{paper}}}" if paper else "--"
    ours = measured(cell).replace(" ± ", r"$\pm$").replace("–", "--")
    return ours + (rf" {{\scriptsize({paper})}}" if paper else "")


def escape(text: str) -> str:
    """Text with what LaTeX would take for a command made harmless."""
    plain = {letter: f"\\{letter}" for letter in "&%_#$"} | {"α": r"$\alpha$", "ε": r"$\varepsilon$"}
    return typeset_marks("".join(plain.get(letter, letter) for letter in text))


def typeset_marks(text: str) -> str:
    """Text with the marks of cells as LaTeX has them."""
    for mark, typeset in (("†", r"$^\dagger$"), ("‡", r"$^\ddagger$"), (JOINED, "$^{j}$")):
        text = text.replace(mark, typeset)
    return text


FIELDS = ("table", "row", "column", "metric", "quoted", "paper", "ours", "std", "seeds", "difference", "state", "last")


def comma_separated(table: Table, filled: Sequence[FilledRow], head: bool = True) -> str:
    """A line for each cell, with the command that measures it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if head:
        writer.writerow([*FIELDS, "command"])
    for row in filled:
        for cell in row.cells:
            if cell.state == "none":
                continue
            figures = (cell.cell.paper, cell.ours, cell.std)
            paper, ours, std = ("" if v is None else f"{v:.4f}" for v in figures)
            difference = "" if cell.difference is None else f"{cell.difference:.4f}"
            named = (table.id, row.row.name, cell.cell.column.id, cell.cell.metric, "yes" if row.row.quoted else "no")
            why = f"needs {cell.needs}" if cell.needs else cell.state
            writer.writerow(
                [*named, paper, ours, std, len(cell.found), difference, why, cell.last or "", cell.command or ""]
            )
    return out.getvalue()
