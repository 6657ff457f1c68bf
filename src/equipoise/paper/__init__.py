"""The paper's tables and figures as data: each cell is a run and the number that was published for it.

Jodelet, Liu and Murata, "Balanced softmax cross-entropy for incremental learning with and without memory",
Computer Vision and Image Understanding 225, 2022. Their numbers on CIFAR-100 are means of three runs. Rows that they
quote from other papers have no run here: such numbers are shown beside ours, and never mixed with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..data.datasets import SHAPES
from ..errors import unknown
from ..settings import changed
from ..step import plan_for
from .beyond import batches, bounds, costs, separated
from .cells import DATASETS, METRICS, ROWS, Cell, Column, Row, Table, cifar
from .tables import confusion, epsilon, table1, table2, table3, table4, table5, table6

__all__ = [
    "DATASETS",
    "MAKERS",
    "METRICS",
    "ROWS",
    "Cell",
    "Column",
    "Row",
    "Table",
    "cifar",
    "rehearsed",
    "table",
    "tables",
]

MAKERS: dict[str, Callable[[], Table]] = {
    make.__name__: make
    for make in (table1, table2, table3, table4, table5, table6, confusion, epsilon, batches, separated, bounds, costs)
}


def table(name: str) -> Table:
    """The table of that name."""
    if name not in MAKERS:
        raise unknown("table or figure", name, MAKERS)
    return MAKERS[name]()


def tables() -> list[Table]:
    """All of them."""
    return [make() for make in MAKERS.values()]


def rehearsed(table: Table) -> Table:
    """The table with digits in the place of CIFAR-100 in 5 steps, and without the rest: minutes on any machine."""

    def cell(c: Cell) -> Cell | None:
        if c.run is None or c.run.data.name != "cifar100" or c.run.protocol.steps != 5:
            return None
        column = replace(
            c.column,
            id=c.column.id.replace("cifar100", "digits"),
            group=c.column.group.replace("CIFAR-100", "digits"),
            dataset="digits",
        )
        recipe = c.run.recipe
        if recipe is not None:
            there, here = (c.run.method.recipe(plan_for(SHAPES[name])) for name in ("cifar100", "digits"))
            recipe = replace(here, **dict(changed(recipe, there)))
        return Cell(column, None, replace(c.run, data=replace(c.run.data, name="digits"), recipe=recipe), c.metric)

    kept = ((row, tuple(filter(None, map(cell, row.cells)))) for row in table.rows)
    return replace(table, rows=tuple(replace(row, cells=cells) for row, cells in kept if cells))
