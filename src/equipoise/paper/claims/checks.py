"""What most checks of claims are: two rows of a table compared in each of its columns, or a number that is printed."""

from __future__ import annotations

from collections.abc import Sequence

from ..cells import BALANCED, DATASETS, IL, META, RELAXED
from ..published import TABLE1, TABLE3, parse_numbers
from .judge import ACCURACY, NUMBER, ORDER, Check, Value

IL_BALANCED, IL_META = f"{IL}, {BALANCED}", f"{IL}, {META}"
LUCIR_BALANCED, PODNET_BALANCED = f"LUCIR, {BALANCED}", f"PODNet, {BALANCED}"
LUCIR_RELAXED, PODNET_RELAXED = f"LUCIR, {RELAXED}", f"PODNet, {RELAXED}"

CIFAR = ("cifar100-5", "cifar100-10", "cifar100-25")
SUBSET = ("imagenet-subset-5", "imagenet-subset-10", "imagenet-subset-25")
IMAGENET = ("imagenet-5", "imagenet-10")
ALL = (*CIFAR, *SUBSET, *IMAGENET)
"""the columns of table 1"""
FEW_STEPS = tuple(column for column in ALL if not column.endswith("-25"))
"""the columns of table 3"""
TOPS = ("imagenet-average", "imagenet-average-top-5")
"""the columns of table 2"""


def name_setting(column: str) -> str:
    """The title of a column of a data set and a number of steps, or of table 2."""
    dataset, _, steps = column.rpartition("-")
    if column in TOPS:
        return "ImageNet, ten equal steps" + (", top 5" if steps == "5" else "")
    return f"{DATASETS[dataset]}, {steps} steps"


def subtract(one: Sequence[str], other: Sequence[str]) -> Value:
    """The number at one place minus that at another."""
    return lambda read: read(*one) - read(*other)


def compare(
    table: str, row: str, other: str, columns: Sequence[str], rule: str = ORDER, of: str | None = None
) -> tuple[Check, ...]:
    """A check in each column: the number of a row minus that of another, of the same table unless `of` names it."""
    return tuple(
        Check(f"{name_setting(c)}: {row} − {other}", subtract((table, row, c), (of or table, other, c)), rule)
        for c in columns
    )


def check_number(what: str, *place: str) -> Check:
    """A check of a number that the paper prints."""
    return Check(what, lambda read: read(*place), NUMBER, form=ACCURACY)


def check_lean(what: str, table: str, row: str, column: str, new: bool = False) -> Check:
    """A check that a run ends better on the base classes than on the later ones, or with `new` the other way round."""
    base, later = (table, row, column, "final base"), (table, row, column, "final new")
    return Check(what, subtract(later, base) if new else subtract(base, later))


def check_lead(table: str, row: str, columns: Sequence[str], place: int = 1) -> tuple[Check, ...]:
    """A check in each column: how far a row is above the best of the others, or above the next for a later place."""
    text = {"table1": TABLE1, "table3": TABLE3}[table]

    def value(column: str, at: int) -> Value:
        others = [name for name, values in parse_numbers(text) if name != row and values[at] is not None]
        return lambda read: read(table, row, column) - sorted(read(table, o, column) for o in others)[-place]

    known = ALL if table == "table1" else FEW_STEPS
    return tuple(
        Check(
            f"{name_setting(c)}: {row} − {'the best other' if place == 1 else 'the second of the others'}",
            value(c, known.index(c)),
        )
        for c in columns
    )


COST = "cifar100-cost"


def need_more(row: str, other: str, metric: str) -> Value:
    """By how many percent a timed run needs more than another."""
    return lambda read: 100 * (read("costs", row, COST, metric) / read("costs", other, COST, metric) - 1)
