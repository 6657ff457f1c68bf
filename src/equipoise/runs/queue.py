"""A queue of runs.

A queue has no state besides the folders of its runs: started again, it does only what is missing. Runs that share a
step wait for the one that computes it (`SharedSteps.claim`).
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
from .settings import Data, Machine, Run

Work = Callable[..., Result]
"""`equipoise.runs.run.run`, or an importable function with the same arguments"""


START = (-1, -1.0)
"""progress of a run without a finished epoch"""


@dataclass
class Job:
    """A run, its folder and its status."""

    run: Run
    machine: Machine
    folder: Path
    group: str = ""
    """jobs of a group share their base step: one computes it before the others start"""
    images: list[int] = field(default_factory=list)
    """number of images that each step trains on"""
    tries: int = 0
    """attempts since the last progress"""
    reached: tuple[int, float] = START
    """furthest step so far, and the fraction of it that is done"""
    not_before: float = 0.0
    """time of the next retry, by `time.monotonic`"""
    result: Result | None = None
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has a result or has failed for good."""
        return self.result is not None or self.failure is not None


Tell = Callable[[Sequence[Job]], None]
"""called regularly with the running jobs"""


class Place(Protocol):
    """Runs jobs: `workers.Local` on this machine; a cluster would implement the same method."""

    def do(self, run: Work, jobs: Sequence[Job], tell: Tell) -> None:
        """Run these jobs. Each ends with a result or a failure, or with neither if time is up; none stops another."""


def map(run: Work, jobs: Sequence[Job], on: Place, tell: Tell = lambda busy: None) -> None:
    """Run all jobs that have no result yet, roughly in this order. Sets the result or the failure of each job."""
    for job in jobs:
        conclude(job)
    on.do(run, [job for job in jobs if not job.is_over], tell)


def conclude(job: Job, done: bool = False) -> None:
    """Read the result of a job, if any; it must exist if the job is `done`."""
    try:
        if done or (job.folder / "result.json").is_file():
            job.result = read_result(job.folder)
    except (DataError, OSError) as error:  # such as a missing permission
        job.failure = describe_error(error)


def has_base(job: Job) -> bool:
    """Whether the base step of a job is done, so that others can reuse it."""
    line = read_last_epoch(job.folder)
    return job.result is not None or (line is not None and (line["step"] > 0 or line["done"] == 1))


def plan_jobs(runs: Sequence[Run], machine: Machine, parent: Path, data: Path | None = None) -> list[Job]:
    """Create a job for each distinct run, with a folder below `parent`. Invalid runs are refused here."""
    resolve_device(machine.device)
    jobs: dict[str, Job] = {}
    loaded: dict[Data, Dataset] = {}
    folders = [parent / name_folder(run, machine) for run in runs]
    for folder in folders:  # before loading data
        check_run_folder(folder)
    for run, folder in zip(runs, folders):
        on_cpu = replace(machine, device="cpu", engine="auto")  # keeps the GPU free for the workers
        plan = prepare(run, on_cpu, data, loaded.get(run.data.images))
        loaded[run.data.images] = plan.data
        job = Job(plan.run, machine, folder, plan.compute_keys()[0], count_images(plan.list_work()))
        jobs.setdefault(digest([plan.settings["run"], plan.order]), job)
    return list(jobs.values())


def estimate_cost(job: Job) -> float:
    """Rough cost of a job, in images of IL-Baseline: from speeds on one H200 (results/README.md, speed of the methods),
    or by arithmetic.

    All base steps are assumed to cost the same.
    """
    method = job.run.method
    return sum(job.images[:1]) + method.cost * method.remedy.cost * sum(job.images[1:])


def sort_longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs by cost, so that no long job runs alone at the end."""
    return sorted(jobs, key=estimate_cost, reverse=True)


def find_critical(jobs: Sequence[Job], workers: int) -> list[Job]:
    """The jobs that would run alone at the end even if started first.

    With an equal share of the machine, such a job takes longer than all jobs together.
    """
    at_once = min(workers, len(jobs))
    groups = {job.group or str(job.folder): sum(job.images[:1]) for job in jobs}
    total = sum(groups.values()) + sum(estimate_cost(job) - sum(job.images[:1]) for job in jobs)
    return [job for job in jobs if at_once * estimate_cost(job) > total]


def report_failures(jobs: Sequence[Job]) -> None:
    """Print which runs failed, and raise if any did."""
    failed = [job for job in jobs if job.failure]
    for job in failed:
        print(f"{job.folder}: {job.failure}", file=sys.stderr)
    if failed:
        which = "the run" if len(jobs) == 1 else f"{len(failed)} of {len(jobs)} runs"
        raise EquipoiseError(f"{which} failed; repeat the command to retry {'it' if len(failed) == 1 else 'them'}")
