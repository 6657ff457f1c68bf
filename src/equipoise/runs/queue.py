"""Many runs: which are to be done, where, and how they stand.

A run's folder holds all there is to know about it: a queue itself has no state, and asking again does only what is
missing. Runs that share a step wait for whoever is computing it (`Store.claim`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..data.datasets import Dataset
from ..engine.device import resolve_device
from ..errors import DataError, EquipoiseError, describe_error
from ..settings import digest
from .command import name_folder
from .folder import check_run_folder, read_last_epoch
from .plan import count_images, prepare
from .record import Result, read_result
from .settings import Machine, Run

Work = Callable[..., Result]
"""`equipoise.runs.run.run`, or what takes the same arguments: it must be importable, since workers import it"""


START = (-1, -1.0)
"""how far a run is that has not ended an epoch"""


@dataclass
class Job:
    """A run, its folder, and how it stands."""

    run: Run
    machine: Machine
    folder: Path
    group: str = ""
    """jobs of one group share their base step: one of them computes it before others are begun"""
    images: list[int] = field(default_factory=list)
    """how many each step trains on, over all epochs"""
    tries: int = 0
    """attempts since it last got further"""
    reached: tuple[int, float] = START
    """step, and how much of it, of the furthest that it got, before it was begun here or since"""
    not_before: float = 0.0
    """when it may be tried again, by `time.monotonic`"""
    result: Result | None = None
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is done or has failed for good."""
        return self.result is not None or self.failure is not None


Tell = Callable[[Sequence[Job]], None]
"""told now and then which jobs are being worked at"""


class Place(Protocol):
    """Where jobs are done: `workers.Local` is this machine; a cluster needs only this one method."""

    def do(self, run: Work, jobs: Sequence[Job], tell: Tell) -> None:
        """Do these jobs; each ends with a result or a failure, and no failure stops another."""


def map(run: Work, jobs: Sequence[Job], on: Place, tell: Tell = lambda busy: None) -> None:
    """Do all jobs that are not done, in this order as far as possible.

    What is mapped over are jobs, not bare settings: a `Job` is a run and the folder that it is recorded in, since the
    folder is all the state there is. Nothing is returned: each job ends with a result or a failure, noted on it.
    """
    for job in jobs:
        conclude(job)
    on.do(run, [job for job in jobs if not job.is_over], tell)


def conclude(job: Job, done: bool = False) -> None:
    """Read the result of a job if there is one; if it is `done`, there must be."""
    try:
        if done or (job.folder / "result.json").is_file():
            job.result = read_result(job.folder)
    except (DataError, OSError) as error:  # perhaps no permission to look
        job.failure = describe_error(error)


def has_base(job: Job) -> bool:
    """Whether a job has its base step, so that others can take it over. One that is over may have failed before."""
    line = read_last_epoch(job.folder)
    return job.result is not None or (line is not None and (line["step"] > 0 or line["done"] == 1))


def plan_jobs(runs: Sequence[Run], machine: Machine, parent: Path, data: Path | None = None) -> list[Job]:
    """A job for each different run, in a folder of its own below `parent`.

    Whatever is wrong with any of them is said now, before the first begins.
    """
    resolve_device(machine.device)
    jobs: dict[str, Job] = {}
    loaded: dict[str, Dataset] = {}
    folders = [parent / name_folder(run, machine) for run in runs]
    for folder in folders:  # before any data is looked for
        check_run_folder(folder)
    for run, folder in zip(runs, folders):
        on_cpu = replace(machine, device="cpu", engine="auto")  # the GPU is left to those who do the runs
        plan = prepare(run, on_cpu, data, loaded.get(run.data.name))
        loaded[run.data.name] = plan.data
        job = Job(plan.run, machine, folder, plan.compute_keys()[0], count_images(plan.list_work()))
        jobs.setdefault(digest([plan.settings["run"], plan.order]), job)
    return list(jobs.values())


def estimate_cost(job: Job) -> float:
    """About how long a job takes, in images of IL-Baseline: from the images a second that one H200 did
    (results/README.md, speed of the methods). Every base step is taken to cost the same."""
    method = job.run.method
    return sum(job.images[:1]) + method.cost * method.remedy.cost * sum(job.images[1:])


def sort_longest_first(jobs: Sequence[Job]) -> list[Job]:
    """So that no long one is left alone at the end."""
    return sorted(jobs, key=estimate_cost, reverse=True)


def find_critical(jobs: Sequence[Job], workers: int) -> list[Job]:
    """Those that would be left alone at the end even if they are begun first.

    With an equal share of the machine, such a job takes longer than all jobs together take, of which a group computes
    its base step once.
    """
    at_once = min(workers, len(jobs))
    groups = {job.group or str(job.folder): sum(job.images[:1]) for job in jobs}
    total = sum(groups.values()) + sum(estimate_cost(job) - sum(job.images[:1]) for job in jobs)
    return [job for job in jobs if at_once * estimate_cost(job) > total]


def report_failures(jobs: Sequence[Job]) -> None:
    """Say which runs failed, if any did."""
    failed = [job for job in jobs if job.failure]
    for job in failed:
        print(f"{job.folder}: {job.failure}", file=sys.stderr)
    if failed:
        raise EquipoiseError(f"{len(failed)} of {len(jobs)} runs failed; the same command tries them again")
