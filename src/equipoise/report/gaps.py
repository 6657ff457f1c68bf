"""Which of the paper's own numbers are far from what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import paper
from ..errors import format_count
from ..paper import Table
from ..paper.match import Filled, FilledRow, identify_run
from .grid import Grid, Line, Shown
from .tables import FIELDS, JOINED, WHY_JOINED, list_commands, list_numbers
from .words import format_mean, format_number, format_signed

FAR, NEAR = 1.0, 0.5
"""points: what is further apart is listed; what is nearer is what we want"""

Gap = tuple[Table, FilledRow, Filled]
"""a cell, and where it stands"""


def make_gaps(filled: Iterable[tuple[Table, Sequence[FilledRow]]]) -> Grid:
    """The cells of the paper's own tables that are further than a point from the paper, the furthest first."""
    known = list(list_comparisons(filled))
    near, close = (sum(abs(gap) <= limit for gap in map(measure_gap, known)) for limit in (NEAR, FAR))
    far = sorted((one for one in known if measure_gap(one) > FAR), key=measure_gap, reverse=True)
    joined = f" {JOINED} {WHY_JOINED}." if any(cell.joined for _, _, cell in far) else ""
    return Grid(
        id="gaps",
        title="Further from the paper than a point",
        caption=f"Of {format_count(len(known), 'number')} of the paper that are measured here, {near} are within "
        f"{NEAR:g} points of it and {close} within {FAR:g}; these are not.{joined}",
        columns=[("", name) for name in ("where", "the paper", "measured", "seeds", "difference")],
        rows=[Line(row.row.name, show_gap(table, cell)) for table, row, cell in far],
        commands=[line for _, row, cell in far for line in list_commands([row._replace(cells=(cell,))])],
        numbers=[
            (*FIELDS, "command"),
            *(line for table, row, cell in far for line in list_numbers(table, [row._replace(cells=(cell,))])),
        ],
    )


def list_comparisons(filled: Iterable[tuple[Table, Sequence[FilledRow]]]) -> Iterator[Gap]:
    """The measured cells of the paper's own tables; a number that is in several of them once."""
    seen = set()
    for table, rows in filled:
        for row in rows if table.id in paper.PRINTED_NAMES else ():
            for cell in row.cells:
                if cell.quoted or cell.difference is None or cell.cell.run is None:
                    continue
                number = identify_run(cell.cell.run), cell.cell.column.metric, cell.cell.paper
                if number not in seen:
                    seen.add(number)
                    yield table, row, cell


def measure_gap(one: Gap) -> float:
    """How far a cell is from the paper."""
    return abs(one[2].difference or 0.0)


def show_gap(table: Table, cell: Filled) -> list[Shown]:
    """The cells of a row."""
    column, difference = cell.cell.column, format_signed(cell.difference or 0.0)
    return [
        Shown(", ".join(filter(None, (table.title, column.group, column.title)))),
        Shown(format_number(cell.cell.paper)),
        Shown(format_mean(cell.values), state=cell.state),
        Shown(str(len(cell.found))),
        Shown(difference + (JOINED if cell.joined else "")),
    ]
