"""The button: which runs the paper's tables take, which of them are recorded, and doing those that are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as Rich

from . import paper, speed, sweep
from .compare import NONE, Records, fill, lacking, missing, recorded, wanted
from .errors import RunError, UsageError, unknown
from .local import Local
from .paper import Table
from .progress import QueueWatch
from .report import tables as written
from .run import Run
from .run import run as do
from .watch import duration
from .words import command

FORMATS: dict[str, Callable[..., str]] = {
    "markdown": written.markdown,
    "latex": written.latex,
    "csv": written.comma_separated,
}


def say(words: str) -> None:
    """Tell a person what takes so long, beside the output."""
    print(words, file=sys.stderr, flush=True)


def chosen(names: Sequence[str], dataset: str | None, rows: str | None) -> list[Table]:
    """The tables of these names, all if none are named: of one data set, or of rows whose names hold these words."""
    tables = [paper.table(name) for name in names] if names else paper.tables()
    if dataset is not None:
        if dataset not in paper.DATASETS:
            raise unknown("data set", dataset, paper.DATASETS)
        tables = [paper.rehearsed(table) if dataset == "digits" else table.on(dataset) for table in tables]
    if rows is not None:
        words = [word.strip().lower() for word in rows.split(",") if word.strip()]
        known = [row.name for table in tables for row in table.rows]
        for word in words:
            if not any(word in name.lower() for name in known):
                raise unknown("row", word, dict.fromkeys(known))
        tables = [replace(table, rows=tuple(row for row in table.rows if named(row.name, words))) for table in tables]
    if not any(table.rows for table in tables):
        raise UsageError(f"{' and '.join(names)}: there is nothing on {dataset}; leave out --dataset to see what is")
    return tables


def named(name: str, words: Sequence[str]) -> bool:
    """Whether a row is meant: by its whole name, or else by a part of it."""
    return name.lower() in words or any(word in name.lower() for word in words)


def needed(tables: Sequence[Table]) -> list[str]:
    """Data sets that these tables need and that cannot be loaded."""
    runs = [cell.run for table in tables for row in table.rows for cell in row.cells if cell.run is not None]
    return sorted({name for run in runs if (name := lacking(run)) is not None})


def results_in(folder: Path) -> Records:
    """What is recorded there; nothing if the folder is not there yet."""
    return recorded(folder) if folder.exists() else NONE


def overview(tables: Sequence[Table], folder: Path, seeds: int, device: str, console: Console) -> None:
    """What there is: tables and figures, their runs, and how long those that are missing would take here."""
    records = results_in(folder)
    made = Rich(box=box.SIMPLE_HEAD, title=f"The paper's tables and figures, {seeds} seed(s) of each run")
    for name in ("name", "what", "runs", "recorded", "missing", "one at a time", "needs"):
        made.add_column(name, justify="left" if name in ("name", "what", "needs") else "right")
    for table in tables:
        runs = wanted([table], seeds)
        left = missing(runs, records)
        time = duration(speed.estimate(with_device(left, device), say).seconds) if left else "–"
        counts = (str(len(runs)), str(len(runs) - len(left)), str(len(left)))
        made.add_row(table.id, table.caption, *counts, time, ", ".join(needed([table])))
    console.print(made)


def with_device(runs: Sequence[Run], device: str) -> list[Run]:
    """The same runs on that device."""
    return [replace(run, device=device) for run in runs]


def plan(tables: Sequence[Table], folder: Path, seeds: int, device: str, console: Console) -> None:
    """Say which runs are missing, and what they would take."""
    runs = with_device(missing(wanted(tables, seeds), results_in(folder)), device)
    for asked in sorted(runs, key=lambda run: -sum(speed.images_of(run))):
        took = speed.estimate([asked], say)
        images = sum(speed.images_of(asked))
        words = f"{images / 1e6:.2f} million images, {duration(took.seconds)}, {took.mib:,.0f} MiB"
        console.print(f"{command(asked)}  # {words}", highlight=False, soft_wrap=True)
    if runs:
        took = speed.estimate(runs)
        words = f"{len(runs)} runs, {duration(took.seconds)} one after the other with shared base steps, at this speed"
        console.print(f"{words}; up to {took.mib:,.0f} MiB a run", highlight=False, soft_wrap=True)
    else:
        console.print("nothing is missing")


def reproduce(
    tables: Sequence[Table], folder: Path, seeds: int, device: str, on: Local, console: Console
) -> list[sweep.Job]:
    """Do the runs that are missing; those that are timed one at a time, after the others, with nothing reused."""
    records = results_in(folder)
    done: list[sweep.Job] = []
    for alone in (False, True):
        runs = with_device(missing(wanted([t for t in tables if t.alone == alone], seeds), records), device)
        here = replace(on, workers=1, store=None) if alone else on
        jobs: list[sweep.Job] = []
        for dataset in dict.fromkeys(run.dataset for run in runs):
            parent = folder / ("alone" if alone else dataset)
            jobs += sweep.planned([run for run in runs if run.dataset == dataset], parent, on.data)
        jobs = sweep.longest_first(jobs)
        if jobs:
            with QueueWatch(console, jobs) as watch:
                sweep.map(do, jobs, here, watch.tell)
        done += jobs
    return done


def print_tables(
    tables: Sequence[Table], folder: Path, seeds: int | None, form: str, commands: bool, console: Console
) -> None:
    """Measured and published side by side: for the terminal, or in a format for elsewhere."""
    records = results_in(folder)
    for table in tables:
        filled = fill(table, records, seeds)
        if form != "terminal":
            print(FORMATS[form](table, filled))
            continue
        console.print(written.titled(table, filled), soft_wrap=True, highlight=False)
        console.print(written.terminal(filled))
        if commands:
            for row in filled:
                for cell in row.cells:
                    if cell.command:
                        where = f"{row.row.name}, {cell.cell.column.title}"
                        console.print(f"{where}: {cell.command}", soft_wrap=True, highlight=False)


def refuse_what_needs(tables: Sequence[Table]) -> None:
    """Say which data sets would be needed for the rest."""
    lacking = needed(tables)
    if lacking:
        raise RunError(f"this version cannot load {' and '.join(lacking)}: the cells that need it are left empty")
