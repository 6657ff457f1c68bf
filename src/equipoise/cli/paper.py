"""`equipoise paper`: the paper's tables, which of their runs are recorded, and doing those that are not."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from ..engine.device import resolve_device
from ..errors import UsageError, check
from ..report.terminal import for_output
from ..runs import queue
from ..runs.settings import Machine, Options
from ..runs.shared_steps import store_folder
from ..runs.workers import Local
from . import reproduce
from .flags import HINTS
from .words import hint, parse


@dataclass
class Paper:
    """The paper's tables and figures: what there is, what is recorded, and the button that does the rest."""

    names: Positional[tuple[str, ...]] = ()
    """table1 to table6, confusion, epsilon, batches, separated, bounds, costs; without any, what there is"""
    dataset: Annotated[str | None, hint("all")] = None
    """only the cells of one data set; `digits` rehearses a table on the embedded images, in minutes"""
    rows: Annotated[str | None, hint("all")] = None
    """only some rows: names (podnet), patterns (podnet*) or parts of names (balanced), separated by commas"""
    seeds: Annotated[int | None, hint("1, and to print what is recorded: all there are")] = None
    """seeds of each run, from 0"""
    dry_run: bool = False
    """list the runs that are missing, with the time and the memory they would take here, and do nothing"""
    no_run: bool = False
    """print what is recorded, and run nothing"""
    results: Path = Path("results")
    """folder of records: looked into first, and where new runs are put"""
    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal"
    """how the tables are printed"""
    commands: bool = False
    """print the command of each cell below its table; in CSV it has a column anyway"""
    workers: Annotated[int | None, hint(HINTS["workers"])] = None
    """runs at a time"""
    device: str = "auto"
    """auto, cpu or cuda"""
    data: Annotated[Path | None, hint(HINTS["data"])] = None
    """folder with the data set's files"""
    store: Annotated[str | None, hint(HINTS["store"])] = None
    """folder where steps are shared with other runs; `none` to share none"""
    checkpoint: float = 30.0
    """seconds between checkpoints"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into each run's folder"""


def paper_verb(argv: list[str]) -> None:
    """Reproduce the paper's tables: what there is, what is recorded, and doing the runs that are missing."""
    f = parse(Paper, "paper", argv)
    seeds, machine = 1 if f.seeds is None else f.seeds, Machine(device=f.device)
    check("seeds", seeds, least=1, whole=True)
    options = Options(f.data, store_folder(f.store), f.checkpoint)
    resolve_device(f.device)
    if f.dry_run and f.no_run:
        raise UsageError("--dry-run lists what is missing and --no-run prints what is there: ask for one of them")
    tables = reproduce.choose_tables(f.names, f.dataset, f.rows)
    console = for_output()
    if not f.results.exists():
        print(f"{f.results} is not there: nothing is recorded yet", file=sys.stderr)
    if not f.names:
        reproduce.print_overview(tables, f.results, seeds, None if f.no_run else f.device, console)
        return
    if not f.no_run and f.dataset is not None:
        reproduce.refuse_planned(tables)
    jobs: list[queue.Job] = []
    if f.dry_run:
        reproduce.print_missing(tables, f.results, seeds, machine, console)
    else:
        if not f.no_run:
            on = Local(options=options, tensorboard=f.tensorboard)
            on = on if f.workers is None else replace(on, workers=f.workers)
            jobs = reproduce.reproduce(tables, f.results, seeds, machine, on)
        records = reproduce.read_results(f.results)
        reproduce.print_tables(tables, records, f.seeds, f.format, f.commands)
    queue.complain(jobs)
    if not f.no_run:
        reproduce.refuse_planned(tables)
