"""What the paper claims, sentence by sentence, judged by records.

A claim is a sentence in our words and its checks. A check is a function of cells of the tables: called with the
published numbers it gives what the paper says, with the measured ones what came out. No verdict is written down
anywhere: it follows from the records, or there is none yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...runs.record import find_computer
from ..cells import TIMED, Table
from ..match import ONE, SEVERAL, Filled, FilledRow

Place = tuple[str, str, str, str]
"""where a number is: table, row, column, and a metric of that run, empty for the column's own"""
Read = Callable[..., float]
"""gives the number of a cell: `read(table, row, column)`, or of another metric of its run as a fourth argument"""
Value = Callable[[Read], float]
"""computes the number that a check is about"""

NUMBER, ORDER, SIMILAR = "number", "order", "similar"
RULES: dict[str, Callable[[float, float | None, float], bool]] = {
    NUMBER: lambda ours, paper, allowed: paper is not None and abs(ours - paper) <= allowed and ours * paper >= 0,
    ORDER: lambda ours, paper, allowed: ours > 0,
    SIMILAR: lambda ours, paper, allowed: abs(ours) <= abs(paper or 0.0) + allowed,
}
"""when a check holds: the paper's number up to the tolerance, with its sign; a difference above 0; a difference that is
no further from 0 than the paper's own, up to the tolerance"""

ACCURACY, DIFFERENCE, PERCENT, PLACES = "{:.2f}", "{:+.2f}", "{:+.1f}%", "{:.0f}"
"""how the number of a check is written: an accuracy, a difference in points, a ratio, or places in a list"""


@dataclass(frozen=True)
class Check:
    """One number of a claim."""

    what: str
    """the setting, such as CIFAR-100, 5 steps"""
    value: Value
    rule: str = ORDER
    paper: float | None = None
    """the number that the text prints, where the tables do not give it"""
    form: str = DIFFERENCE
    allowed: float | None = None
    """the tolerance, if it is not that of an accuracy"""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper."""

    where: str
    """section, table or figure"""
    text: str
    """the sentence in our words"""
    checks: tuple[Check, ...]
    some: bool = False
    """whether it is claimed of some settings only, so that one check that holds is enough"""


Cells = Mapping[tuple[str, str, str], Filled]
"""cells of the tables by table, row and column"""


def find_cells(filled: Iterable[tuple[Table, Sequence[FilledRow]]]) -> Cells:
    """The cells of these tables by their names."""
    return {
        (table.id, row.row.name, cell.cell.column.id): cell
        for table, rows in filled
        for row in rows
        for cell in row.cells
    }


class Judged(NamedTuple):
    """A check with the paper's number and ours."""

    check: Check
    cells: tuple[Filled, ...]
    """what it is computed from"""
    paper: float | None
    ours: float | None

    @property
    def own(self) -> list[Filled]:
        """The cells that are measured here, not quoted."""
        return [cell for cell in self.cells if not cell.quoted]

    @property
    def seeds(self) -> int:
        """The fewest seeds of any of its cells."""
        return min(len(cell.found) for cell in self.own)

    @property
    def joined(self) -> bool:
        """Whether runs with joined batches stand in for any of its runs."""
        return any(cell.joined for cell in self.own)

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None if a run is missing, or its like."""
        if self.ours is None:
            return None
        tolerance = SEVERAL if self.seeds > 2 else ONE
        allowed = tolerance if self.check.allowed is None else self.check.allowed
        return RULES[self.check.rule](self.ours, self.paper, allowed)


class Verdict(NamedTuple):
    """A claim with its judged checks."""

    claim: Claim
    checks: tuple[Judged, ...]

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many checks hold, do not hold, and are not run yet."""
        holds = [judged.holds for judged in self.checks]
        return holds.count(True), holds.count(False), holds.count(None)

    @property
    def state(self) -> str:
        """`holds`, `holds so far` where some checks are not run yet, `does not hold` or `not run yet`."""
        good, bad, missing = self.counts
        if self.claim.some:
            return "holds" if good else "not run yet" if missing else "does not hold"
        if bad:
            return "does not hold"
        return "not run yet" if not good else "holds so far" if missing else "holds"


def judge(claims: Iterable[Claim], cells: Cells) -> list[Verdict]:
    """Every claim with what the records say of it."""
    return [Verdict(claim, tuple(judge_check(check, cells) for check in claim.checks)) for claim in claims]


def judge_check(check: Check, cells: Cells) -> Judged:
    """Compute a check from the published and from the measured numbers."""
    own = {place: find_cell(cells, *place) for place in list_places(check)}

    def compute(number: Callable[[Filled], float | None]) -> float | None:
        numbers = {place: number(cell) for place, cell in own.items()}
        known = {place: value for place, value in numbers.items() if value is not None and math.isfinite(value)}
        return check.value(lambda *place: known[name_place(*place)]) if len(known) == len(own) else None

    measured = compute(lambda cell: cell.cell.paper if cell.quoted else cell.ours)
    ours = measured if are_comparable([cell for cell in own.values() if not cell.quoted]) else None
    paper = compute(lambda cell: cell.cell.paper) if check.paper is None else check.paper
    return Judged(check, tuple(own.values()), paper, ours)


def are_comparable(cells: Sequence[Filled]) -> bool:
    """Whether measured cells are of one kind: joined batches change accuracies, and the machine changes seconds."""
    timed = [cell for cell in cells if cell.cell.column.metric in TIMED]
    machines = {find_computer(found.result) for cell in timed for found in cell.found}
    return len(machines) < 2 and len({cell.joined for cell in cells}) < 2


def name_place(table: str, row: str, column: str, metric: str = "") -> Place:
    """The place of a number."""
    return table, row, column, metric


def list_places(check: Check) -> list[Place]:
    """The places of the numbers that a check is computed from."""
    seen: dict[Place, None] = {}

    def read(*place: str) -> float:
        seen[name_place(*place)] = None
        return 1.0

    check.value(read)
    return list(seen)


def find_cell(cells: Cells, table: str, row: str, column: str, metric: str) -> Filled:
    """A cell, or the same runs by another metric, for which the paper prints nothing."""
    found = cells[table, row, column]
    if not metric:
        return found
    return replace(found, cell=replace(found.cell, column=replace(found.cell.column, metric=metric), paper=None))


def restrict_tables(tables: Iterable[Table], claims: Iterable[Claim]) -> list[Table]:
    """The parts of the tables that these claims are judged by."""
    used = {place[:3] for claim in claims for check in claim.checks for place in list_places(check)}
    parts = []
    for table in tables:
        rows = [
            replace(row, cells=tuple(cell for cell in row.cells if (table.id, row.name, cell.column.id) in used))
            for row in table.rows
        ]
        parts.append(replace(table, rows=tuple(row for row in rows if row.cells)))
    return [part for part in parts if part.rows]
