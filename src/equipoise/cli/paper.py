"""`equipoise paper`: lists the paper's tables, does their missing runs, and prints them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from ..engine.device import resolve_device
from ..errors import format_count
from ..report.terminal import make_console
from ..runs import queue
from ..runs.settings import Machine, Options
from ..runs.shared_steps import parse_store
from ..runs.workers import Local
from . import reproduce
from .arguments import Paper


def do_paper(f: Paper) -> None:
    """Reproduce the paper's tables: list them, run what is missing, and print measured beside published numbers."""
    seeds, machine = 1 if f.seeds is None else f.seeds, Machine(device=f.device)
    options = Options(f.data, parse_store(f.store), f.checkpoint)
    resolve_device(f.device)
    named = [name for name in f.names if name != "claims"]
    shown = reproduce.choose_tables(named, f.dataset, f.rows) if named or not f.names else []
    tables = shown + (reproduce.choose_for_claims(f.dataset, f.rows) if "claims" in f.names else [])
    console = make_console()
    if not f.results.exists():
        print(f"{f.results} does not exist: nothing is recorded yet", file=sys.stderr)
    if not f.names:
        reproduce.print_overview(tables, f.results, seeds, f.device if f.dry_run else None, console)
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
            on = on if f.minutes is None else replace(on, until=time.monotonic() + 60 * f.minutes)
            jobs = reproduce.reproduce(tables, f.results, seeds, machine, on)
            if left := sum(not job.is_over for job in jobs):
                reproduce.print_note(f"{format_count(left, 'run')} left for another time: repeat the command")
        records = reproduce.read_results(f.results)
        reproduce.print_tables(shown, records, f.seeds, f.format, f.commands)
        if "claims" in f.names:
            reproduce.print_claims(records, f.seeds, f.format)
    queue.report_failures(jobs)
    if not f.no_run:
        reproduce.refuse_planned(tables)
