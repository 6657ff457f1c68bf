"""The paper's tables with measured numbers, ready to be rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import format_count
from ..paper import Table
from ..paper.cells import THE_PAPER
from ..paper.match import Filled, FilledRow
from .costs import make_costs
from .grid import Grid, Line, Shown
from .words import format_mean

MARKS = {"near": "†", "off": "‡"}
JOINED, WHY_JOINED = "ʲ", "measured with joined batches: with short ones there is no record yet"
LEGEND = (
    ". In brackets are {} and the difference to it: † more than 1.5 points apart (1.0 with three seeds or more), ‡ "
    "more than twice that. In rows with a remedy, an average or a final accuracy above it has no mark"
)
FIELDS = (
    "table", "row", "column", "metric", "quoted", "paper", "source", "ours", "std", "seeds", "difference", "state",
    "last",
)  # fmt: skip


def make_grid(table: Table, filled: Sequence[FilledRow]) -> Grid:
    """A table with published and measured numbers; for timed runs, the table of costs."""
    if table.alone:
        return make_costs(table, filled)
    rows = []
    for row in filled:  # of which not every one has all columns
        cells = {cell.cell.column: show_cell(cell) for cell in row.cells}
        shown = [cells.get(c, Shown()) for c in table.columns]
        rows.append(Line(row.row.name, [*shown, *([show_mean(row)] if table.mean else [])], row.row.quoted))
    return Grid(
        id=table.id,
        title=table.title,
        caption=describe(table, filled),
        columns=[(column.group, column.title) for column in table.columns] + ([("", table.mean)] if table.mean else []),
        rows=rows,
        commands=list(list_commands(filled)),
        numbers=[(*FIELDS, "command"), *list_numbers(table, filled)],
    )


def show_cell(cell: Filled) -> Shown:
    """A cell: mean ± deviation over the seeds, and the paper's number."""
    if cell.state == "none":
        return Shown()
    if cell.quoted:
        return Shown("–", state="missing") if cell.cell.paper is None else Shown(f"{cell.cell.paper:.2f}", "", "quoted")
    return Shown(format_mean(cell.values), compare(cell), cell.state)


def show_mean(row: FilledRow) -> Shown:
    """Mean ± deviation over the measured cells of a row, if these are several, and how many unless they are all."""
    if row.std is None:
        return Shown("–", state="missing")
    return Shown(
        format_mean(row.values), "" if len(row.values) == len(row.cells) else f"of {len(row.values)}", "measured"
    )


def compare(cell: Filled) -> str:
    """The text beside the measured number: the paper's number, the marked difference, and how many seeds if several."""
    paper = "" if cell.cell.paper is None else f"{cell.cell.paper:.2f}"
    apart = "" if cell.difference is None else f"{cell.difference:+.2f}".replace("-", "−") + MARKS.get(cell.state, "")
    seeds = f"{len(cell.found)} seeds" if len(cell.found) > 1 else ""
    return ", ".join(filter(None, (paper, apart + (JOINED if cell.joined else ""), seeds)))


def describe(table: Table, filled: Sequence[FilledRow]) -> str:
    """The caption: what the numbers are, and what their marks mean."""
    lacking = list(dict.fromkeys(cell.needs for row in filled for cell in row.cells if cell.needs))
    needs = f" Not measured: needs {' and '.join(lacking)}." if lacking else ""
    compared = [cell for row in filled for cell in row.cells if cell.cell.run and cell.cell.paper is not None]
    sources = {cell.cell.source for cell in compared}
    legend = (
        LEGEND.format("the paper's number" if sources == {THE_PAPER} else "the published number") if sources else ""
    )
    notes = name_elsewhere(filled) + explain_joined(filled)
    return f"{table.caption}. Measured, {count_seeds(filled)}{legend}.{notes}{needs}"


def name_elsewhere(filled: Sequence[FilledRow]) -> str:
    """A sentence about the table that measures what is quoted here, if there is one."""
    named = dict.fromkeys(row.row.elsewhere for row in filled if row.row.elsewhere)
    return f" What is quoted is measured, on CIFAR-100, in the table {' and '.join(named)}." if named else ""


def count_seeds(filled: Sequence[FilledRow]) -> str:
    """The number of seeds of the measured cells."""
    counts = sorted({len(cell.found) for row in filled for cell in row.cells if cell.found})
    if not counts:
        return "nothing yet"
    if len(counts) == 1:
        return format_count(counts[0], "seed")
    return f"{counts[0]} to {counts[-1]} seeds" + (", 1 where none are named" if counts[0] == 1 else "")


def explain_joined(filled: Sequence[FilledRow]) -> str:
    """A sentence about cells that are measured with joined batches instead of short ones, if there are any."""
    if not any(cell.joined for row in filled for cell in row.cells):
        return ""
    return f" {JOINED} {WHY_JOINED}."


def list_commands(filled: Sequence[FilledRow]) -> Iterator[str]:
    """The command of each run, with the cells that it measures."""
    for row in filled:
        of: dict[str, list[str]] = {}
        for cell in row.cells:
            if cell.command:
                names = of.setdefault(cell.command, [row.row.name])
                names += [word for word in (cell.cell.column.group, cell.cell.column.title) if word not in names]
        for command, names in of.items():
            yield f"{', '.join(names)}: {command}"


def list_numbers(table: Table, filled: Sequence[FilledRow]) -> Iterator[tuple[object, ...]]:
    """A line for each cell, with the command that measures it."""
    for row in filled:
        for cell in row.cells:
            if cell.state == "none":
                continue
            figures = (cell.cell.paper, cell.ours, cell.std, cell.difference)
            paper, ours, std, difference = ("" if v is None else f"{v:.4f}" for v in figures)
            named = (
                table.id,
                row.row.name,
                cell.cell.column.id,
                cell.cell.column.metric,
                "yes" if cell.quoted else "no",
            )
            why = f"needs {cell.needs}" if cell.needs else cell.state
            source = cell.cell.source if paper else ""
            yield *named, paper, source, ours, std, len(cell.found), difference, why, cell.last, cell.command
