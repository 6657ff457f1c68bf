"""`equipoise paper`: lists the paper's tables, does their missing runs, and prints them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from ..engine.device import resolve_device
from ..errors import UsageError, format_count
from ..paper import Table
from ..report.terminal import make_console
from ..runs import queue
from ..runs.folder import check_exists
from ..runs.settings import Machine, Options
from ..runs.shared_steps import parse_store
from ..runs.workers import Local
from . import imagenet, reproduce
from .arguments import Paper


def do_paper(f: Paper) -> None:
    """Reproduce the paper's tables: list them, run what is missing, and print measured beside published numbers."""
    machine = Machine(device=f.device)
    options = Options(f.data, parse_store(f.store), f.checkpoint)
    resolve_device(f.device)
    shown, tables = choose(f)
    console = make_console()
    on_folders = imagenet.has_only_folders(tables)
    if (on_folders or f.subset) and (words := imagenet.describe_subset(tables)):
        reproduce.print_note(words)
    wanted = reproduce.Wanted(tables, f.seeds or 1, on_folders and (f.dry_run or f.data is not None))
    if not f.results.exists():
        print(f"{f.results} does not exist: nothing is recorded yet", file=sys.stderr)
    if not f.names:
        reproduce.print_overview(wanted, f.results, f.device if f.dry_run else None, console)
        return
    if not f.no_run and on_folders:
        if not wanted.folders:
            imagenet.refuse_without_images(tables)
        elif f.data is not None:
            check_exists(f.data, "the one that holds the images")
    jobs: list[queue.Job] = []
    if f.dry_run:
        reproduce.print_missing(wanted, f.results, machine, f.data, console)
    else:
        if not f.no_run:
            on = Local(options=options, tensorboard=f.tensorboard)
            workers = 1 if wanted.folders and f.workers is None else f.workers  # one net for large images fills a GPU
            on = on if workers is None else replace(on, workers=workers)
            on = on if f.minutes is None else replace(on, until=time.monotonic() + 60 * f.minutes)
            jobs = reproduce.reproduce(wanted, f.results, machine, on)
            if left := sum(not job.is_over for job in jobs):
                reproduce.print_note(f"{format_count(left, 'run')} left for another time: repeat the command")
        records = reproduce.read_results(f.results)
        reproduce.print_tables(shown, records, f.seeds, f.format, f.commands)
        if "claims" in f.names:
            reproduce.print_claims(records, f.seeds, f.format)
    queue.report_failures(jobs)
    if not f.no_run and not wanted.folders:
        imagenet.refuse_without_images(tables)


def choose(f: Paper) -> tuple[list[Table], list[Table]]:
    """The tables to print, and those whose runs are wanted: these and the parts that the claims are judged by."""
    named = [name for name in f.names if name != "claims"]
    shown = reproduce.choose_tables(named, f.dataset, f.rows) if named or not f.names else []
    judged = reproduce.choose_for_claims(f.dataset, f.rows) if "claims" in f.names else []
    if judged and f.subset is not None:
        raise UsageError("claims are of ImageNet-Subset as the paper defines it: leave out --subset")
    shown = imagenet.choose_subset(shown, f.subset)
    return shown, imagenet.place_images(shown + judged, f.images_on)
