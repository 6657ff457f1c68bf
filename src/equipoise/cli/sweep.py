"""`equipoise sweep`: many runs, several at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..report.terminal import make_console, print_table
from ..runs import queue
from ..runs.progress import QueueWatch
from ..runs.run import run
from ..runs.workers import Local
from .request import Request, parse_request
from .words import expand_lists, pop_flag, read_runs


@dataclass(frozen=True)
class Many(Request):
    """The settings of `equipoise sweep METHOD`. Its last three hold for all runs and are parsed first."""

    out: Path | None = Path("runs")
    """folder for all runs, each in one of its own"""
    workers: int | None = None
    """runs at a time (default: 4 for each GPU, else one for each core)"""
    runs: Path | None = None
    """file with the words of a run in each line; the flags given here are added to each (default: none)"""


def do_sweep(argv: list[str]) -> None:
    """Do many runs, several at a time: as run, but a value may be a list such as --seed 0,1,2; and --workers N.

    --runs FILE takes one run from each line of a file; the flags given here are added to each.
    """
    argv, workers = pop_flag("--workers", argv)
    argv, file = pop_flag("--runs", argv)
    argv, out = pop_flag("--out", argv)
    if workers is not None and not workers.isdecimal():
        raise UsageError(f"--workers must be a whole number, not {workers}")
    lines = [argv] if file is None else [words + argv for words in read_runs(Path(file))]
    requests = [parse_request(words, "sweep", Many) for line in lines for words in expand_lists(line)]
    first = requests[0]
    for name in ("store", "data", "checkpoint", "evaluate_every"):
        if any(getattr(one.options, name) != getattr(first.options, name) for one in requests):
            raise UsageError(f"--{name.replace('_', '-')} is one for all runs of a sweep")
    if any(one.tensorboard != first.tensorboard for one in requests):
        raise UsageError("--tensorboard is one for all runs of a sweep")
    jobs = plan_jobs(requests, Path(out or "runs"))
    on = Local(
        options=first.options,
        tensorboard=first.tensorboard,
        **({} if workers is None else {"workers": int(workers)}),
    )
    console = make_console()
    with QueueWatch(console, jobs, shared=on.options.store is not None) as watch:
        queue.map(run, jobs, on, watch.tell)
    if done := [job.result for job in jobs if job.result]:
        print_table(done, console)
    queue.report_failures(jobs)


def plan_jobs(requests: list[Many], parent: Path) -> list[queue.Job]:
    """The jobs of these requests, grouped by machine settings."""
    machines = dict.fromkeys(request.machine for request in requests)
    jobs = []
    for machine in machines:
        runs = [request.run for request in requests if request.machine == machine]
        jobs += queue.plan_jobs(runs, machine, parent, requests[0].options.data)
    return jobs
