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
from ..errors import DataError, EquipoiseError, sentence
from ..learner import record
from .folder import Result, check_run_folder, read_result
from .run import Run, prepare, run_name

Work = Callable[..., Result]
"""`equipoise.runs.run.run`, or what takes the same arguments: it must be importable, since workers import it"""


@dataclass
class Job:
    """A run, its folder, and how it stands."""

    run: Run
    folder: Path
    group: str = ""
    """jobs of one group share their base step: one of them computes it before others are begun"""
    images: list[int] = field(default_factory=list)
    """how many each step trains on, over all epochs"""
    tries: int = 0
    """how often it was begun or taken up again since it last got further"""
    reached: tuple[int, int] | None = None
    """step and epoch of the furthest that it got, before it was begun here or since"""
    not_before: float = 0.0
    """when it may be taken up again, by `time.monotonic`"""
    result: Result | None = None
    failure: str | None = None

    @property
    def over(self) -> bool:
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
        conclude_if_done(job)
    on.do(run, [job for job in jobs if not job.over], tell)


def conclude_if_done(job: Job) -> None:
    """Read the result of a job if there is one."""
    try:
        done = (job.folder / "result.json").is_file()
    except OSError as error:  # no permission to look
        job.failure = sentence(error)
        return
    if done:
        conclude(job)


def conclude(job: Job) -> None:
    """Read the result of a job that is done."""
    try:
        job.result = read_result(job.folder)
    except (DataError, OSError) as error:
        job.failure = sentence(error)


def planned(runs: Sequence[Run], parent: Path, data: Path | None = None) -> list[Job]:
    """A job for each different run, in a folder of its own below `parent`.

    Whatever is wrong with any of them is said now, before the first begins.
    """
    jobs: dict[str, Job] = {}
    loaded: dict[str, Dataset] = {}
    for asked in runs:
        check_run_folder(parent / run_name(asked))
    for asked in runs:
        resolve_device(asked.device)
        here = replace(asked, device="cpu", engine="auto")  # the GPU is left to those who do the runs
        plan = prepare(here, data, loaded=loaded.get(asked.dataset))
        loaded[asked.dataset] = plan.data
        same = record.digest([plan.settings, asked.device, asked.precision])
        jobs.setdefault(same, Job(asked, parent / run_name(asked), plan.keys()[0], plan.images_to_train()))
    return list(jobs.values())


COSTS = {"lucir": 98_800 / 89_200, "podnet": 102_100 / 80_500}
META_COST = 102_100 / 83_200
"""how much longer an image takes where there is a teacher, by the name of the method and with the meta loss, than with
IL-Baseline and the balanced loss: from the images a second that one H200 did (results/README.md, speed of the methods);
what is not named, and every base step, is taken to cost as much as those. Meta's images are counted with those that it
holds out"""


def cost(job: Job) -> float:
    """About how long a job takes, in images of IL-Baseline."""
    method = job.run.method
    relative = COSTS.get(method.name, 1.0) * (META_COST if method.loss.name == "meta" else 1.0)
    return sum(job.images[:1]) + relative * sum(job.images[1:])


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """So that no long one is left alone at the end."""
    return sorted(jobs, key=cost, reverse=True)


def critical(jobs: Sequence[Job], workers: int) -> list[Job]:
    """Those that would be left alone at the end even if they are begun first.

    With an equal share of the machine, such a job takes longer than all jobs together take, of which a group computes
    its base step once.
    """
    at_once = min(workers, len(jobs))
    groups = {job.group or str(job.folder): sum(job.images[:1]) for job in jobs}
    total = sum(groups.values()) + sum(cost(job) - sum(job.images[:1]) for job in jobs)
    return [job for job in jobs if at_once * cost(job) > total]


def complain(jobs: Sequence[Job]) -> None:
    """Say which runs failed, if any did."""
    failed = [job for job in jobs if job.failure]
    for job in failed:
        print(f"{job.folder}: {job.failure}", file=sys.stderr)
    if failed:
        raise EquipoiseError(f"{len(failed)} of {len(jobs)} runs failed; the same command tries them again")
