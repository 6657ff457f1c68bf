"""The paper's tables at the command line: their runs, which are missing, and how these are done."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as Rich

from .. import paper
from ..errors import UsageError, format_count, make_unknown_error
from ..paper import Table
from ..paper.claims import CLAIMS, find_cells, restrict_tables
from ..paper.match import (
    NONE,
    Records,
    fill,
    find_images_needed,
    find_missing_runs,
    identify_run,
    list_runs,
    load_records,
)
from ..report import grid
from ..report.claims import judge_claims, make_claims_grid, write_claims
from ..report.tables import make_grid
from ..report.terminal import make_console
from ..runs import estimate, queue
from ..runs.command import write_command
from ..runs.progress import QueueWatch, duration
from ..runs.run import run as run_one
from ..runs.settings import Machine, Run
from ..runs.workers import Local
from .imagenet import list_cell_runs, list_images_needed

FORMATS = {"markdown": grid.render_markdown, "latex": grid.render_latex}


def print_note(words: str) -> None:
    """Print a note to stderr."""
    print(words, file=sys.stderr, flush=True)


def choose_tables(names: Sequence[str], dataset: str | None, rows: str | None) -> list[Table]:
    """The tables with these names (default: all), restricted to a data set or to rows that match `rows`."""
    tables = [paper.make_table(name) for name in names] if names else paper.make_tables()
    if dataset is not None:
        if dataset not in paper.DATASETS:
            raise make_unknown_error("data set", dataset, paper.DATASETS)
        tables = [paper.rehearse_on_digits(table) if dataset == "digits" else table.on(dataset) for table in tables]
    if rows is not None:
        known = list(dict.fromkeys(row.name for table in tables for row in table.rows))
        names_of_rows = match_rows(rows, known)
        tables = [
            replace(table, rows=tuple(row for row in table.rows if row.name in names_of_rows)) for table in tables
        ]
    tables = [table for table in tables if table.rows]
    if not tables:
        raise UsageError(f"{' and '.join(names) or 'the paper'} has nothing on {dataset}: leave out --dataset")
    return tables


def choose_for_claims(dataset: str | None, rows: str | None) -> list[Table]:
    """The parts of the tables by which the paper's claims are judged; with a data set, its cells."""
    if rows is not None or dataset == "digits":
        raise UsageError("claims are of the paper's own rows and data sets: leave out --rows and --dataset digits")
    if dataset is not None and dataset not in paper.DATASETS:
        raise make_unknown_error("data set", dataset, paper.DATASETS)
    tables = restrict_tables(paper.make_tables(), CLAIMS)
    return tables if dataset is None else [part for table in tables if (part := table.on(dataset)).rows]


def match_rows(words: str, known: Sequence[str]) -> set[str]:
    """The rows that match: one whole name, which may contain a comma, or several words separated by commas.

    A word is a whole name, a part of names, or a pattern such as podnet*.
    """
    names = {name.lower(): name for name in known}
    if words.strip().lower() in names:
        return {names[words.strip().lower()]}
    matched: set[str] = set()
    for word in filter(None, (part.strip().lower() for part in words.split(","))):
        alike = (name for low, name in names.items() if word in low or fnmatchcase(low, word))
        found = {names[word]} if word in names else set(alike)
        if not found:
            raise make_unknown_error("row", word, known)
        matched |= found
    if not matched:
        raise UsageError(f"--rows {words!r} names no row; choose from {'; '.join(known)}")
    return matched


def read_results(folder: Path) -> Records:
    """The records of a folder; none if it does not exist."""
    return load_records(folder) if folder.exists() else NONE


class Wanted(NamedTuple):
    """What is to be recorded."""

    tables: Sequence[Table]
    seeds: int
    folders: bool
    """whether cells on ImageNet are"""

    def list_runs(self, table: Table) -> list[Run]:
        """The runs of one of the tables."""
        return list_runs([table], self.seeds, self.folders)


def print_overview(wanted: Wanted, folder: Path, device: str | None, console: Console) -> None:
    """Print all tables and figures with their numbers of runs and, given a device, the time of the missing ones."""
    seeds = wanted.seeds
    records = read_results(folder)
    made = Rich(box=box.SIMPLE_HEAD, title=f"The paper's tables and figures, {format_count(seeds, 'seed')} of each run")
    time = () if device is None else ("one at a time",)
    for name in ("name", "what", "runs", "recorded", "missing", *time, "not here"):
        made.add_column(name, justify="left" if name in ("name", "what", "not here") else "right")
    for table in wanted.tables:
        runs = wanted.list_runs(table)
        left = find_missing_runs(runs, records, table.alone, table.look > 0)
        numbers = [str(count) for count in (len(runs), len(runs) - len(left), len(left))]
        if device is not None:  # an estimate takes measuring, which takes a minute or two the first time
            seconds = estimate.estimate(left, device, print_note, shared=Way(table.look, table.alone).shared).seconds
            numbers.append(duration(seconds) if left else "–")
        others = {run for run in list_cell_runs([table]) if find_images_needed(run) and not wanted.folders}
        whose = " and ".join(list_images_needed([table]))
        needs = f"{len(others) * seeds} runs need {whose}" if others else ""
        made.add_row(table.id, table.caption, *numbers, needs)
    console.print(made)


class Way(NamedTuple):
    """How the runs of a table are done."""

    look: int = 0
    """epochs between accuracies within a step; 0 for none"""
    alone: bool = False
    """one at a time"""

    @property
    def shared(self) -> bool:
        """Whether steps of other runs may be reused."""
        return not self.look and not self.alone

    @property
    def flags(self) -> str:
        """What their commands say of it."""
        looks = f" --evaluate-every {self.look}" if self.look else ""
        return looks if self.shared else f"{looks} --store none"


def list_ways(tables: Sequence[Table]) -> list[Way]:
    """The ways of these tables: first those that look, which are records for other tables too; timed ones last."""
    return sorted({Way(table.look, table.alone) for table in tables}, key=lambda way: (way.alone, -way.look))


def find_missing(wanted: Wanted, records: Records, way: Way) -> list[list[Run]]:
    """The missing runs of the tables whose runs are done in this way, in groups that are done one after the other.

    All tables with the first seed come first, in their order, then those with the next seed. No run is in two groups.
    """
    groups: list[list[Run]] = []
    known = set[tuple[str, int]]()
    own = [wanted.list_runs(table) for table in wanted.tables if (table.look, table.alone) == way]
    for seed, runs in itertools.product(range(wanted.seeds), own):
        new = [run for run in runs if run.seed == seed and identify_run(run) not in known]
        known |= set(map(identify_run, new))
        groups.append(find_missing_runs(new, records, way.alone, way.look > 0))
    return groups


def print_missing(wanted: Wanted, folder: Path, machine: Machine, data: Path | None, console: Console) -> None:
    """Print the missing runs with their estimated time and memory."""
    named = "" if data is None else f" --data {shlex.quote(str(data))}"
    records = read_results(folder)
    count, seconds, mib = 0, 0.0, 0.0
    planned = set[tuple[str, int]]()
    for way in list_ways(wanted.tables):
        groups = find_missing(wanted, records, way)
        groups = [[run for run in group if identify_run(run) not in planned] for group in groups]
        runs = [run for group in groups for run in sorted(group, key=lambda run: -sum(estimate.count_step_images(run)))]
        planned |= set(map(identify_run, runs))
        for run in runs:
            took = estimate.estimate([run], machine.device, print_note)
            images = sum(estimate.count_step_images(run))
            words = f"{images / 1e6:.2f} million images, {duration(took.seconds)}, {took.mib:,.0f} MiB"
            command = f"{write_command(run, machine)}{named}{way.flags}"
            console.print(f"{command}  # {words}", highlight=False, soft_wrap=True)
        took = estimate.estimate(runs, machine.device, print_note, shared=way.shared)
        count, seconds, mib = count + len(runs), seconds + took.seconds, max(mib, took.mib)
    if count:
        words = f"{format_count(count, 'run')}, {duration(seconds)} one after the other, at this speed"
        console.print(f"{words}; up to {mib:,.0f} MiB a run", highlight=False, soft_wrap=True)
    else:
        console.print("nothing is missing that can be run here")


def reproduce(wanted: Wanted, folder: Path, machine: Machine, on: Local) -> list[queue.Job]:
    """Do the missing runs, table by table. Timed runs come last, one at a time. They and those that look reuse nothing.

    Within a table the longest runs come first, so that none is left to run alone at the end.
    """
    done: list[queue.Job] = []
    for way in list_ways(wanted.tables):
        groups = find_missing(wanted, read_results(folder), way)
        place = {identify_run(run): k for k, group in enumerate(groups) for run in group}
        runs = [run for group in groups for run in group]
        options = on.options if way.shared else replace(on.options, store=None, evaluate_every=way.look)
        here = replace(on, workers=1 if way.alone else on.workers, options=options)
        special = "alone" if way.alone else "looked" if way.look else ""
        jobs: list[queue.Job] = []
        for dataset in dict.fromkeys(run.data.name for run in runs):
            parent, own = folder / (special or dataset), [run for run in runs if run.data.name == dataset]
            jobs += queue.plan_jobs(own, machine, parent, on.options.data)
        jobs = sorted(queue.sort_longest_first(jobs), key=lambda job: place[identify_run(job.run)])
        if jobs:
            with QueueWatch(make_console(), jobs, shared=here.options.store is not None) as watch:
                queue.map(run_one, jobs, here, watch.tell)
        done += jobs
    return done


def print_tables(tables: Sequence[Table], records: Records, seeds: int | None, form: str, commands: bool) -> None:
    """Print measured and published numbers side by side, in the given format."""
    print_grids([make_grid(table, fill(table, records, seeds)) for table in tables], form, commands)


def print_grids(grids: Sequence[grid.Grid], form: str, commands: bool) -> None:
    """Print tables in the given format."""
    console, head = make_console(), None
    for made in grids:
        if form == "csv":  # tables with the same fields share one header
            lines = made.numbers[1:] if made.numbers[0] == head else made.numbers
            head = made.numbers[0]
            print(grid.write_csv(lines), end="")
        elif form != "terminal":
            print(FORMATS[form](made, commands))
        else:
            console.print(f"{made.title}. {made.caption}", soft_wrap=True, highlight=False)
            console.print(grid.render_terminal(made))
            for line in made.commands if commands else ():
                console.print(line, soft_wrap=True, highlight=False)


def print_claims(records: Records, seeds: int | None, form: str) -> None:
    """Print the paper's claims and what the records say of them, in the given format."""
    verdicts = judge_claims(find_cells((table, fill(table, records, seeds)) for table in paper.make_tables()))
    if form == "markdown":
        print(write_claims(verdicts), end="")
    else:
        print_grids([make_claims_grid(verdicts)], form, commands=False)
