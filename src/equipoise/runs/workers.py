"""Runs jobs on this machine in worker processes, and restarts those that die.

Each run is a process of its own, so that one that fails harms no other. Where several share a GPU, one whose kernels
fault takes the others down with it: all of them resume from checkpoints, and only attempts without progress count.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import torch

from ..engine.device import resolve_device
from ..errors import UsageError, describe_error
from .environment import count_cores
from .folder import is_locked
from .mps import run_mps
from .queue import Job, Tell, Work, conclude, find_critical, has_base
from .settings import Options
from .tensorboard import import_summary_writer
from .worker import BUSY, conclude_try, read_warnings, start_process

LOOK = 1.0
"""seconds between checks for other processes in the folders of waiting jobs"""

log = logging.getLogger("equipoise")


def count_default_workers() -> int:
    """Four runs per GPU, since one does not use it fully; without a GPU, one per core."""
    return 4 * torch.cuda.device_count() if torch.cuda.is_available() else count_cores()


class Worker(NamedTuple):
    """A process and its job."""

    job: Job
    process: SpawnProcess
    slot: int
    """the lowest number that was free"""


@dataclass(frozen=True)
class Local:
    """This machine: number of concurrent runs and CPU threads of each."""

    workers: int = field(default_factory=count_default_workers)
    threads: int = 1
    options: Options = Options()
    tensorboard: bool = False
    until: float = math.inf
    """when to stop starting jobs, by `time.monotonic`"""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers must be 1 or more, not {self.workers}")
        if self.tensorboard:
            import_summary_writer()  # raises now if it is not installed

    def do(self, run: Work, jobs: Sequence[Job], tell: Tell) -> None:
        """Do these jobs; each ends with a result or a failure, unless it was not started in time.

        A job that another process runs is waited for, and run only if that process ends without a result.
        """
        crew = Crew(self, run, jobs)
        with run_mps():
            try:
                while crew.busy or (crew.waiting and time.monotonic() < self.until):
                    crew.update_waiting()
                    crew.start_jobs()
                    time.sleep(0.05)
                    crew.collect()
                    tell([one.job for one in crew.busy])
            except KeyboardInterrupt:
                # Workers are in separate process groups, so Ctrl-C is forwarded: they finish the epoch and save.
                for one in crew.busy:
                    if one.process.pid is not None and one.process.is_alive():
                        os.kill(one.process.pid, signal.SIGINT)
                for one in crew.busy:
                    one.process.join()
                raise
            finally:
                for one in crew.busy:
                    one.process.terminate()
                    one.process.join()


class Crew:
    """The state of a queue: waiting jobs, running workers, and jobs that other processes run."""

    def __init__(self, on: Local, run: Work, jobs: Sequence[Job]) -> None:
        self.on, self.run = on, run
        self.waiting = list(jobs)
        self.busy: list[Worker] = []
        self.elsewhere: list[Job] = []
        self.first = find_critical(jobs, on.workers)
        # Resolved once: a worker that loses the GPU must not fall back to the CPU, where it would take days.
        self.device = resolve_device("auto").type
        self.warned: set[str] = set()
        self.looked = -math.inf

    def update_waiting(self) -> None:
        """Check regularly which waiting jobs are done, and which other processes run."""
        if time.monotonic() - self.looked < LOOK:
            return
        for job in self.waiting:
            conclude(job)
        self.waiting = [job for job in self.waiting if not job.is_over]
        self.elsewhere = [job for job in self.waiting if is_locked(job.folder)]
        for job in self.elsewhere:
            self.warn_once(f"{job.folder}: another process is using it; waiting for it")
        self.looked = time.monotonic()

    def warn_once(self, words: str, where: str = "") -> None:
        """Warn once per message."""
        if words not in self.warned:
            self.warned.add(words)
            log.warning("%s%s", where, words)

    def start_jobs(self) -> None:
        """Start jobs while there are free workers."""
        while len(self.busy) < self.on.workers and time.monotonic() < self.on.until:
            at_work = [*(one.job for one in self.busy), *self.elsewhere]
            occupied = {job.folder for job in at_work}
            delayed = [job for job in self.waiting if time.monotonic() < job.not_before]
            free = [job for job in self.waiting if job not in delayed and job.folder not in occupied]
            chosen = next_job(free, [*at_work, *delayed], self.on)
            if chosen is None:
                return
            self.waiting.remove(chosen)
            slot = min(set(range(self.on.workers)) - {one.slot for one in self.busy})
            try:
                with block_ctrl_c():
                    yields = bool(self.first) and chosen not in self.first
                    process = start_process(self.run, chosen, self.on, slot, self.device, yields)
                    self.busy.append(Worker(chosen, process, slot))
            except (OSError, UsageError) as error:  # a foreign file, a full disk: this job alone
                chosen.failure = describe_error(error)

    def collect(self) -> None:
        """Handle finished processes; jobs to retry go back to the waiting ones."""
        over = [one for one in self.busy if not one.process.is_alive()]
        self.busy = [one for one in self.busy if one not in over]
        for one in over:
            if one.process.exitcode != BUSY:  # else what is in the folder is another's
                for words in read_warnings(one.job.folder):
                    self.warn_once(words, f"{one.job.folder}: ")
        # First again: the longest were begun first, and others may wait for the step that one was at.
        self.waiting = [one.job for one in over if not conclude_try(one.job, one.process.exitcode)] + self.waiting
        self.elsewhere += [one.job for one in over if one.process.exitcode == BUSY]


def next_job(waiting: Sequence[Job], busy: Sequence[Job], on: Local) -> Job | None:
    """The first job that need not wait for a base step that another job computes."""
    computing = {job.group for job in busy if job.group and on.options.store is not None and not has_base(job)}
    return next((job for job in waiting if job.group not in computing), None)


@contextlib.contextmanager
def block_ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard after the block; by a process that is started within it, when that is ready to hear it.

    A worker that is still importing is in the process group of the queue, and would die with a traceback. To block
    the signal instead of ignoring it loses none: neither one to the queue, nor what the queue hands on to its workers.
    """
    resource_tracker.ensure_running()  # else starting a process would start this first, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
