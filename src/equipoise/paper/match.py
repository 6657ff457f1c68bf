"""Matches records with cells of the paper, and compares measured with published numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.datasets import COUNTS, SHAPES
from ..errors import EquipoiseError
from ..remedies import Standard
from ..runs.command import write_command
from ..runs.folder import check_exists
from ..runs.plan import read_run, resolve
from ..runs.record import Result, read_results
from ..runs.settings import Run
from ..settings import digest, to_plain
from .cells import METRICS, Cell, Row, Table, find_images_needed

ONE, SEVERAL = 1.5, 1.0
"""tolerance in points for one or two seeds, and for the mean of three or more"""


class Found(NamedTuple):
    """A record, and its path below the folder of records."""

    id: str
    result: Result


class Records(NamedTuple):
    """All results of a folder."""

    found: list[Found]
    """in the order of their names"""
    by_run: dict[str, dict[int, Found]]
    """by settings, then by seed"""


NONE = Records([], {})


def make_key(run: Run) -> str:
    """The key of a run's resolved settings without the seed, and wherever its images are."""
    resolved = resolve(run, len(COUNTS[run.data.name]), run.data.shape)
    return digest(to_plain(replace(resolved, data=replace(resolved.data, images_on=None), seed=0)))


make_cell_key = functools.lru_cache(4096)(make_key)
"""the same for runs of the paper's cells, which are the same few hundred again and again"""


def identify_run(run: Run) -> tuple[str, int]:
    """What tells runs apart: the key of the settings, and the seed."""
    return make_cell_key(run), run.seed


def load_records(folder: Path) -> Records:
    """Load all results below a folder.

    Of two with equal settings and seed, prefer one that reused nothing, rather one that looked within its steps, else
    the first by name.
    """
    check_exists(folder, "one that holds the folders of runs")
    records = Records([], {})
    for path, result in read_results(path.parent for path in sorted(folder.rglob("result.json"))).items():
        found = Found(path.relative_to(folder).as_posix(), result)
        records.found.append(found)
        with contextlib.suppress(EquipoiseError):  # a method or a protocol that is not ours: no cell of the paper
            run = read_run(found.result["run"])
            if run.data.name in SHAPES:
                by_seed = records.by_run.setdefault(make_key(run), {})
                kept = by_seed.setdefault(run.seed, found)
                if rank_record(found) > rank_record(kept):
                    by_seed[run.seed] = found
    return records


def rank_record(found: Found) -> int:
    """How much a record can be used for: 0 if it reused a step, 1 if not, 2 if it looked within its steps besides."""
    return 0 if found.result.get("reused") else 2 if found.result.get("looks") else 1


@dataclass(frozen=True)
class Filled:
    """A cell of the paper with its measurements."""

    cell: Cell
    found: tuple[Found, ...]
    """a record for each seed"""
    quoted: bool = False
    """whether it shows a published number alone, to which nothing here is compared"""
    joined: bool = False
    """measured with joined batches, since no record with short ones exists"""
    flags: str = ""
    """what its command says besides, of how it is done"""

    @property
    def values(self) -> list[float]:
        """The measured values by seed."""
        return [METRICS[self.cell.column.metric](one.result) for one in self.found]

    @property
    def ours(self) -> float | None:
        """Mean over the seeds."""
        return float(np.mean(self.values)) if self.found else None

    @property
    def std(self) -> float | None:
        """Sample deviation over the seeds."""
        return float(np.std(self.values, ddof=1)) if len(self.found) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured minus published."""
        return None if self.ours is None or self.cell.paper is None else self.ours - self.cell.paper

    @property
    def needs(self) -> str | None:
        """The data set whose images it needs, if it is not measured and no download gives them."""
        return None if self.cell.run is None or self.found else find_images_needed(self.cell.run)

    @property
    def state(self) -> str:
        """How the difference is judged: `close` within the tolerance, `near` within twice that, `off` beyond.

        `better` is above the tolerance. Rows without a remedy are never better: there it points to another protocol.
        """
        if self.quoted:
            return "quoted"
        if self.cell.run is None:
            return "none"
        if self.needs:
            return "needs data"
        if not self.found:
            return "missing"
        if self.difference is None:
            return "measured"
        allowed = SEVERAL if len(self.found) > 2 else ONE
        remedied = self.cell.run.method.remedy != Standard()
        remedied &= self.cell.column.metric not in ("final base", "final new")  # one is paid for with the other
        if abs(self.difference) <= allowed:
            return "close"
        if self.difference > 0 and remedied:
            return "better"
        return "near" if abs(self.difference) <= 2 * allowed else "off"

    @property
    def last(self) -> str | None:
        """Whether the epochs of its runs end with joined or short batches."""
        if self.cell.run is None:
            return None
        return "short" if join_batches(self.cell.run) and not self.joined else "joined"

    @property
    def command(self) -> str | None:
        """The command that measures it."""
        return None if self.cell.run is None else write_command(self.cell.run) + self.flags


class FilledRow(NamedTuple):
    """A row of the paper with its measurements."""

    row: Row
    cells: tuple[Filled, ...]

    @property
    def values(self) -> list[float]:
        """The numbers of the cells that are measured."""
        return [cell.ours for cell in self.cells if cell.ours is not None]

    @property
    def mean(self) -> float | None:
        """Mean over the measured cells."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample deviation over the measured cells."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


def fill(table: Table, records: Records, seeds: int | None = None) -> list[FilledRow]:
    """Every cell with its records, for the seeds 0 to `seeds` − 1 or all recorded seeds.

    Where a run with short batches has none, those of the same run with joined batches stand in, unless the row has a
    cell for these too, or the table is of timings.
    """

    def find(run: Run) -> tuple[Found, ...]:
        by_seed = find_records(run, records, table.alone, table.look > 0)
        return tuple(by_seed[s] for s in sorted(by_seed) if seeds is None or s < seeds)

    flags = f" --evaluate-every {table.look} --store none" if table.look else ""

    def one(cell: Cell, row: Row) -> Filled:
        if cell.run is None:
            return Filled(cell, (), row.quoted or cell.paper is not None)
        found, joined = find(cell.run), join_batches(cell.run)
        if found or joined is None or table.alone or make_cell_key(joined) in map(make_cell_key, list_row_runs(row)):
            return Filled(cell, found, row.quoted, flags=flags)
        found = find(joined)
        return Filled(cell, found, row.quoted, joined=bool(found), flags=flags)

    return [FilledRow(row, tuple(one(cell, row) for cell in row.cells)) for row in table.rows]


def list_row_runs(row: Row) -> Iterator[Run]:
    """The runs of a row."""
    return (cell.run for cell in row.cells if cell.run is not None)


def join_batches(run: Run) -> Run | None:
    """The same run with joined batches, if its epochs end with short ones."""
    if run.recipe is None or run.recipe.last != "short":
        return None
    return replace(run, recipe=replace(run.recipe, last="joined"))


def find_records(run: Run, records: Records, alone: bool = False, looks: bool = False) -> dict[int, Found]:
    """The records of a run by seed; with `alone` those that reused nothing, with `looks` those that looked besides."""
    found, least = records.by_run.get(make_cell_key(run), {}), 2 if looks else 1 if alone else 0
    return {seed: one for seed, one in found.items() if rank_record(one) >= least}


def list_runs(tables: Sequence[Table], seeds: int, folders: bool = False) -> list[Run]:
    """The distinct runs behind all cells, for each seed; those on ImageNet only if `folders` of images are there."""
    runs = [run for table in tables for row in table.rows for run in list_row_runs(row)]
    runs = [run for run in runs if folders or find_images_needed(run) is None]
    each = (replace(run, seed=seed) for run in runs for seed in range(seeds))
    return list({identify_run(run): run for run in each}.values())


def find_missing_runs(runs: Sequence[Run], records: Records, alone: bool = False, looks: bool = False) -> list[Run]:
    """The runs without a record; with `alone` or `looks`, without one as `find_records` has it."""
    return [run for run in runs if run.seed not in find_records(run, records, alone, looks)]
