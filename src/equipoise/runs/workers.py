"""This machine as a place for many runs: worker processes, and what to do when one of them dies.

Each run is a process of its own, so that one that fails harms no other. Where several share a GPU, one whose kernels
fault takes the others down with it: all of them go on from their checkpoints, and only tries in vain are counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from ..engine.device import resolve_device
from ..errors import BusyError, UsageError, first_line, sentence
from ..files import LOCK
from .environment import cores
from .folder import BASED, ERROR, LOG, WARNINGS, claim_run_folder
from .mps import PRIORITY, YIELDING, multi_process_service
from .progress import Both, PlainWatch, Watch
from .queue import Job, Tell, Work, conclude, conclude_if_done, critical
from .queue_progress import last_epoch
from .shared_steps import Store
from .tensorboard import TensorBoard, summary_writer

TRIES = 3
"""how often a run is begun or taken up again, without getting any further than before, until it counts as failed"""
PAUSE = 3.0
"""a quarter of the seconds until a run is taken up again, four times as many after each try in vain: a GPU may be
back by then"""
NOWHERE = (-1, -1)
"""where a run is that has not ended an epoch"""

FINAL = 2
"""exit code of a worker for whom trying again would end alike: a setting that cannot be, training that diverges"""

BUSY = 3
"""exit code of a worker that found another process at work in the run's folder: no try, and no failure"""
LOOK = 1.0
"""seconds between looks at who else is at work in the folders of jobs that wait"""

log = logging.getLogger("equipoise")


def usual_workers() -> int:
    """Four runs for each GPU, which a single one cannot fill; without one, a run for each core."""
    return 4 * torch.cuda.device_count() if torch.cuda.is_available() else cores()


def gpu_for(slot: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be for the worker in a slot, equally many for each GPU; None to leave it.

    Of those that the user lists, torch counts the ones before the first that is not there.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [str(i) for i in range(count)] if listed is None else [name.strip() for name in listed.split(",")]
    return ids[slot % count]


class Worker(NamedTuple):
    """A process and what it does."""

    job: Job
    process: SpawnProcess
    slot: int
    """its number among those at work: the lowest that was free"""


@dataclass(frozen=True)
class Local:
    """This machine: so many runs at a time, each with so many CPU threads."""

    workers: int = field(default_factory=usual_workers)
    threads: int = 1
    store: Path | None = None
    data: Path | None = None
    checkpoint_every: float = 30.0
    evaluate_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers must be 1 or more, not {self.workers}")
        if self.tensorboard:
            summary_writer()  # that it cannot be had is said before anything is computed

    def do(self, run: Work, jobs: Sequence[Job], tell: Tell) -> None:
        """Do these jobs; each ends with a result or a failure.

        One that another queue or a `run` is at work at is waited for, and done only if that ends without a result.
        """
        waiting = list(jobs)
        first = critical(jobs, self.workers)
        # Asked once: a worker that cannot see the GPU must not go to the CPU instead, where it would take days.
        here = resolve_device("auto").type
        warned: set[str] = set()
        busy: list[Worker] = []
        elsewhere: list[Job] = []
        said: set[Path] = set()
        looked = -math.inf
        with multi_process_service():
            try:
                while waiting or busy:
                    if time.monotonic() - looked >= LOOK:
                        for job in waiting:
                            conclude_if_done(job)
                        waiting = [job for job in waiting if not job.over]
                        elsewhere = [job for job in waiting if held(job.folder)]
                        for job in elsewhere:
                            if job.folder not in said:
                                log.warning("%s: another process is at work there; waiting for it", job.folder)
                        said |= {job.folder for job in elsewhere}
                        looked = time.monotonic()
                    while len(busy) < self.workers:
                        at_work = [*(one.job for one in busy), *elsewhere]
                        taken = {job.folder for job in at_work}
                        resting = [job for job in waiting if time.monotonic() < job.not_before]
                        free = [job for job in waiting if job not in resting and job.folder not in taken]
                        chosen = next_of(free, [*at_work, *resting], self)
                        if chosen is None:
                            break
                        waiting.remove(chosen)
                        slot = min(set(range(self.workers)) - {one.slot for one in busy})
                        try:
                            with ctrl_c_kept_back():
                                yields = bool(first) and chosen not in first
                                busy.append(Worker(chosen, started(run, chosen, self, slot, here, yields), slot))
                        except (OSError, UsageError) as error:  # a foreign file, a full disk: this job alone
                            chosen.failure = sentence(error)
                    time.sleep(0.05)
                    over = [one for one in busy if not one.process.is_alive()]
                    busy = [one for one in busy if one not in over]
                    for one in over:
                        if one.process.exitcode != BUSY:  # else what is in the folder is another's
                            repeat_warnings(one.job.folder, warned)
                    # First again: the longest were begun first, and others may wait for the step that one was at.
                    waiting = [one.job for one in over if not ended(one.job, one.process.exitcode)] + waiting
                    elsewhere += [one.job for one in over if one.process.exitcode == BUSY]
                    tell([one.job for one in busy])
            except KeyboardInterrupt:
                # Workers hear it from here only, being in process groups of their own: they end their epoch and save.
                for one in busy:
                    if one.process.pid is not None and one.process.is_alive():
                        os.kill(one.process.pid, signal.SIGINT)
                for one in busy:
                    one.process.join()
                raise
            finally:
                for one in busy:
                    one.process.terminate()
                    one.process.join()


def next_of(waiting: Sequence[Job], busy: Sequence[Job], on: Local) -> Job | None:
    """The first job that would not merely wait for the base step that another is computing."""
    computing = {job.group for job in busy if job.group and on.store is not None and in_base_step(job.folder)}
    return next((job for job in waiting if job.group not in computing), None)


def in_base_step(folder: Path) -> bool:
    """Whether the run of a folder neither has its base step nor is done."""
    return not any((folder / name).exists() for name in (BASED, "result.json"))


def held(folder: Path) -> bool:
    """Whether a process is at work in a folder (`folder.locked`)."""
    try:
        with (folder / LOCK).open("r+") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file; or whatever it is, the worker will say it
        return False
    return False


@contextlib.contextmanager
def ctrl_c_kept_back() -> Iterator[None]:
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


def started(run: Work, job: Job, on: Local, slot: int, here: str, yields: bool) -> SpawnProcess:
    """A process that does the job, or goes on with it, on the kind of device that is `here` where it is left open.

    One that `yields` lets others on its GPU go first.
    """
    job.tries += 1
    claim_run_folder(job.folder)
    (job.folder / LOG).touch()  # a folder that nothing can be written to is noticed here
    if not held(job.folder):
        for name in (ERROR, WARNINGS):
            (job.folder / name).unlink(missing_ok=True)
    if job.reached is None:
        job.reached = furthest(job.folder)
    gpu = gpu_for(slot) if job.run.device in ("auto", "cuda") else None  # cuda:1 is a number among all
    said = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    if yields and PRIORITY not in os.environ:
        said[PRIORITY] = YIELDING
    if job.run.device == "auto":
        job = replace(job, run=replace(job.run, device=here))
    args = (run, job, on, os.getpid(), said)
    process = multiprocessing.get_context("spawn").Process(target=work, args=args, daemon=True)
    process.start()
    return process


def ended(job: Job, code: int | None) -> bool:
    """Note how a job's process ended; whether that is the end of the job, or it is to be tried again."""
    if code == 0:
        conclude(job)
        return True
    if code == BUSY:
        job.tries -= 1
        return False
    file = job.folder / ERROR
    reason = f"the process ended with code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    with contextlib.suppress(OSError):
        reason = file.read_text(errors="replace").strip() or reason
    if code != FINAL:
        now = furthest(job.folder)
        if now > (job.reached or NOWHERE):  # whatever ended it, the try was not in vain
            job.reached, job.tries = now, 0
        if job.tries < TRIES:
            log.warning("%s: %s; trying again", job.folder, reason)
            job.not_before = time.monotonic() + PAUSE * 4**job.tries
            return False
    job.failure = reason
    return True


def furthest(folder: Path) -> tuple[int, int]:
    """Step and epoch that the run of a folder has come to."""
    epoch = last_epoch(folder)
    return NOWHERE if epoch is None else (epoch["step"], epoch["epoch"])


def work(run: Work, job: Job, on: Local, parent: int, told: Mapping[str, str]) -> None:
    """What a worker process does. Its words go to LOG in the run's folder, the reason of a failure to ERROR."""
    os.setsid()  # so that Ctrl-C in a terminal reaches the queue alone
    os.environ.update(told)  # CUDA looks at it when it is first used, which is later
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(on.threads)
    folder = job.folder
    sys.stdout = sys.stderr = words = (folder / LOG).open("a", buffering=1)
    for handler in (logging.StreamHandler(words), logging.FileHandler(folder / WARNINGS, delay=True)):
        handler.setLevel(logging.WARNING)
        log.addHandler(handler)

    def give_up(error: BaseException, code: int) -> NoReturn:
        said = sentence(error, "--batch or --workers") or first_line(error) or repr(error)
        (folder / ERROR).write_text(said + "\n")
        traceback.print_exc(file=words)
        sys.exit(code)

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see ctrl_c_kept_back
        store = None if on.store is None else Store(on.store)
        watch: Watch = PlainWatch(words)
        if on.tensorboard:
            watch = Both(watch, TensorBoard(folder))
        every = {"checkpoint_every": on.checkpoint_every, "evaluate_every": on.evaluate_every}
        try:
            run(job.run, folder, data=on.data, store=store, watch=watch, **every)
        finally:
            watch.close()  # what it has not written yet would go with the process
    except BusyError as error:  # what is in the folder is another's: nothing is written but this
        print(error)
        sys.exit(BUSY)
    except (OSError, RuntimeError, KeyboardInterrupt) as error:  # a full disk, a lost GPU: worth another try
        give_up(error, 1)
    except Exception as error:
        device = torch.device(job.run.device)
        lost = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()  # it may be back later
        give_up(error, 1 if lost else FINAL)


def repeat_warnings(folder: Path, warned: set[str]) -> None:
    """What a worker warned of, once for all runs of a queue: nobody looks into the logs of runs that end well."""
    with contextlib.suppress(OSError):
        for words in (folder / WARNINGS).read_text(errors="replace").splitlines():
            if words not in warned:
                warned.add(words)
                log.warning("%s: %s", folder, words)


def die_with(parent: int) -> None:
    """End this process when its parent is gone, so that a killed queue leaves nobody at work in its folders."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
