"""A table as it is shown, made once and rendered for a terminal, as Markdown, as LaTeX and as CSV.

Equal tables give equal bytes.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table as Rich
from rich.text import Text

COLOURS = {"close": "green", "better": "cyan", "near": "yellow", "off": "red", "measured": ""}
"""of measured cells, by how far they are from the paper's"""
TYPESET = {letter: f"\\{letter}" for letter in "&%_#$"} | {"α": r"$\alpha$", "ε": r"$\varepsilon$"}
TYPESET |= {"−": "$-$", "–": "--", " ± ": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "ʲ": "$^{j}$"}
"""what LaTeX would take for a command, and letters that it has commands for"""

NAMES = {False: "l", True: r"p{0.5\linewidth}"}
"""LaTeX's column of the names of rows; with sentences, one in which lines are broken"""


class Shown(NamedTuple):
    """A cell: its text, and in brackets what it is compared with."""

    text: str = ""
    beside: str = ""
    state: str = ""
    """one of COLOURS if it was measured; `quoted` for a number of other papers"""


class Line(NamedTuple):
    """A row."""

    name: str
    cells: Sequence[Shown]
    quoted: bool = False


class Grid(NamedTuple):
    """A table."""

    id: str
    title: str
    caption: str
    columns: Sequence[tuple[str, str]]
    """the group of each column, which may be empty, and its title"""
    rows: Sequence[Line]
    commands: Sequence[str]
    """what measures the cells, each after what it measures and a colon"""
    numbers: Sequence[Sequence[object]]
    """the lines of the CSV, of which the first names the fields"""
    sentences: bool = False
    """whether its rows are sentences, which are broken into lines"""


def render_terminal(grid: Grid) -> Rich:
    """A table with a colour for every cell that was measured."""
    made = Rich(box=box.SIMPLE_HEAD)
    made.add_column("", no_wrap=not grid.sentences, ratio=1 if grid.sentences else None)
    for group, title in grid.columns:
        made.add_column(f"{group}\n{title}".strip(), justify="right")
    for row in grid.rows:
        name = Text(f"{row.name} (quoted)", style="dim") if row.quoted else Text(row.name)
        made.add_row(name, *map(colour_cell, row.cells))
    return made


def colour_cell(cell: Shown) -> Text:
    """A cell in a terminal: what is measured stands out, the rest is dim."""
    style = f"bold {COLOURS[cell.state]}".strip() if cell.state in COLOURS else "dim" if cell.state else ""
    return Text.assemble((cell.text, style), (f" ({cell.beside})" if cell.beside else "", "dim"))


def render_markdown(grid: Grid, commands: bool = False) -> str:
    """A table under its title and caption; if `commands`, what measures each cell is folded up below it."""

    def mark(cell: Shown) -> str:
        stars = "**" if cell.state in COLOURS else "*" if cell.state == "quoted" else ""
        return f"{stars}{cell.text}{stars}" + (f" ({cell.beside})" if cell.beside else "")

    heads = [", ".join(filter(None, column)) for column in grid.columns]
    lines = [f"### {grid.title}", "", grid.caption, ""]
    lines += [f"| | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for row in grid.rows:
        name = f"*{row.name} (quoted)*" if row.quoted else row.name
        lines.append(f"| {name} | {' | '.join(map(mark, row.cells))} |")
    if commands and grid.commands:
        items = [f"- {what}: `{command}`" for what, _, command in (line.rpartition(": ") for line in grid.commands)]
        lines += ["", "<details><summary>The command of each cell</summary>", "", *items, "", "</details>"]
    return "\n".join(lines) + "\n"


def render_latex(grid: Grid, commands: bool = False) -> str:
    """A table for a paper: needs the package booktabs. If `commands`, what measures each cell as comments."""

    def typeset(cell: Shown) -> str:
        text = rf"\emph{{{escape(cell.text)}}}" if cell.state == "quoted" else escape(cell.text)
        return text + (rf" {{\scriptsize({escape(cell.beside)})}}" if cell.beside else "")

    groups: dict[str, int] = {}  # columns of one group are neighbours
    for group, _ in grid.columns:
        groups[group] = groups.get(group, 0) + 1
    above = "".join(rf" & \multicolumn{{{n}}}{{c}}{{{escape(group)}}}" for group, n in groups.items())
    lines = [
        r"\begin{table}",
        rf"  \caption{{{escape(f'{grid.title}. {grid.caption}')}}}",
        rf"  \label{{tab:{grid.id}}}",
        rf"  \begin{{tabular}}{{{NAMES[grid.sentences]}{'r' * len(grid.columns)}}}",
        r"    \toprule",
        *([rf"    {above} \\"] if any(groups) else []),
        "    " + "".join(rf" & {escape(title)}" for _, title in grid.columns) + r" \\",
        r"    \midrule",
    ]
    for row in grid.rows:
        name = escape(row.name) + (r" \emph{(quoted)}" if row.quoted else "")
        lines.append("    " + " & ".join([name, *map(typeset, row.cells)]) + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    lines += [f"% {line}" for line in grid.commands] if commands else []
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text with what LaTeX would take for a command made harmless, and our marks as LaTeX has them."""
    return re.sub("|".join(map(re.escape, TYPESET)), lambda found: TYPESET[found[0]], text)


def write_csv(lines: Iterable[Sequence[object]]) -> str:
    """Lines of values as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
