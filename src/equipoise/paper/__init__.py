"""The paper's tables and figures as data: each cell is a run and the number that was published for it.

Jodelet, Liu and Murata, "Balanced softmax cross-entropy for incremental learning with and without memory",
Computer Vision and Image Understanding 225, 2022. Their numbers on CIFAR-100 are means of three runs. Rows that they
quote from other papers have no run in the same table: such numbers are shown beside ours, and never mixed with them.
The table `comparators` measures what they are of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..data.datasets import COUNTS
from ..data.memory import Budget
from ..errors import make_unknown_error
from ..settings import list_changes
from .beyond import anytime, batches, bounds, choice, costs, mini_imagenet, orders, schedules, separated, tails
from .cells import DATASETS, Cell, Table
from .comparators import comparators, unprinted
from .quoted import quoted
from .tables import confusion, epsilon, table1, table2, table3, table4, table5, table6, text

__all__ = ["DATASETS", "Cell", "Table", "make_table", "make_tables", "rehearse_on_digits"]

PRINTED = (table1, table2, table3, table4, table5, table6, confusion, epsilon, text)
BEYOND = (
    comparators,
    quoted,
    unprinted,
    batches,
    choice,
    orders,
    anytime,
    separated,
    schedules,
    tails,
    mini_imagenet,
    bounds,
    costs,
)
PRINTED_NAMES = tuple(make.__name__ for make in PRINTED)
"""the tables and figures that the paper has itself"""
MAKERS: dict[str, Callable[[], Table]] = {make.__name__.replace("_", "-"): make for make in (*PRINTED, *BEYOND)}


def make_table(name: str) -> Table:
    """The table of this name."""
    if name not in MAKERS:
        raise make_unknown_error("table or figure", name, [*MAKERS, "claims"])
    return MAKERS[name]()


def make_tables() -> list[Table]:
    """All tables and figures."""
    return [make() for make in MAKERS.values()]


def rehearse_on_digits(table: Table) -> Table:
    """The table with digits in the place of CIFAR-100 in 5 steps, and without the rest: minutes on any machine."""

    def on_digits(cell: Cell) -> Cell | None:
        run, column = cell.run, cell.column
        if run is None or run.data.name != "cifar100" or run.protocol.steps != 5:
            return None
        kept = Budget.parse(run.protocol.memory)
        if kept.total is not None:  # as many of each class
            kept = replace(kept, total=kept.total * len(COUNTS["digits"]) // len(COUNTS["cifar100"]))
        protocol = replace(run.protocol, memory=str(kept))
        if protocol.order == "podnet":  # an order of a hundred classes
            protocol = replace(protocol, order="natural")
        if run.data.imbalance > 1:  # five steps of one class have nothing to be imbalanced
            protocol = replace(protocol, steps=1)
        there = replace(run, data=replace(run.data, name="digits"), protocol=protocol)
        if run.recipe is not None:
            changes = list_changes(run.recipe, run.default_recipe)
            there = replace(there, recipe=replace(there.default_recipe, **dict(changes)))
        id, group = column.id.replace("cifar100", "digits"), column.group.replace("CIFAR-100", "digits")
        column = replace(column, id=id, group=group, dataset="digits")
        return Cell(column, None, there)

    return table.map(on_digits)
