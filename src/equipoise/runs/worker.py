"""A worker process: starting it, its main function, and handling its exit."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import BusyError, describe_error, get_first_line
from .folder import ERROR, LOG, WARNINGS, claim_run_folder, is_locked, read_last_epoch
from .mps import PRIORITY, YIELDING
from .progress import Both, PlainWatch, Watch
from .queue import START, Job, Work, conclude
from .tensorboard import TensorBoard

if TYPE_CHECKING:
    from .workers import Local

TRIES = 3
"""attempts without progress after which a run has failed"""
PAUSE = 3.0
"""retry delay in seconds: PAUSE · 4^tries, since a GPU that was lost may be back by then"""

FINAL = 2
"""exit code for errors that a retry would repeat, such as an invalid setting or diverged training"""

BUSY = 3
"""exit code if another process uses the run's folder: neither an attempt nor a failure"""

log = logging.getLogger("equipoise")


def choose_gpu(slot: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for a worker, equally many per GPU; None to leave it unchanged.

    Of the GPUs that the user lists, torch counts those before the first missing one.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [str(i) for i in range(count)] if listed is None else [name.strip() for name in listed.split(",")]
    return ids[slot % count]


def start_process(run: Work, job: Job, on: Local, slot: int, here: str, yields: bool) -> SpawnProcess:
    """Start a process that runs or resumes the job; device "auto" becomes `here`. `yields` lowers its GPU priority."""
    job.tries += 1
    claim_run_folder(job.folder)
    (job.folder / LOG).touch()  # raises if the folder is read-only
    if not is_locked(job.folder):
        for name in (ERROR, WARNINGS):
            (job.folder / name).unlink(missing_ok=True)
    job.reached = max(job.reached, read_furthest(job.folder))
    gpu = choose_gpu(slot) if job.machine.device in ("auto", "cuda") else None  # cuda:1 is a number among all
    said = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    if yields and PRIORITY not in os.environ:
        said[PRIORITY] = YIELDING
    if job.machine.device == "auto":
        job = replace(job, machine=replace(job.machine, device=here))
    process = multiprocessing.get_context("spawn").Process(target=work, args=(run, job, on, said), daemon=True)
    process.start()
    return process


def conclude_try(job: Job, code: int | None) -> bool:
    """Record how a job's process ended; returns whether the job is over, or False for a retry."""
    if code == 0:
        conclude(job, done=True)
        return True
    if code == BUSY:
        job.tries -= 1
        return False
    reason = f"the process ended with code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    with contextlib.suppress(OSError):
        reason = (job.folder / ERROR).read_text(errors="replace").strip() or reason
    if code != FINAL:
        now = read_furthest(job.folder)
        if now > job.reached:  # it made progress
            job.reached, job.tries = now, 0
        if job.tries < TRIES:
            log.warning("%s: %s; trying again", job.folder, reason)
            job.not_before = time.monotonic() + PAUSE * 4**job.tries
            return False
    job.failure = reason
    return True


def read_furthest(folder: Path) -> tuple[int, float]:
    """The current step of the run in a folder, and the fraction of it that is done."""
    epoch = read_last_epoch(folder)
    return START if epoch is None else (epoch["step"], epoch["done"])


def work(run: Work, job: Job, on: Local, told: Mapping[str, str]) -> None:
    """The main function of a worker: output goes to LOG in the run's folder, the reason of a failure to ERROR."""
    os.setsid()  # so that Ctrl-C in a terminal reaches the queue alone
    os.environ.update(told)  # read when CUDA is first used, later
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(on.threads)
    folder = job.folder
    sys.stdout = sys.stderr = words = (folder / LOG).open("a", buffering=1)
    for handler in (logging.StreamHandler(words), logging.FileHandler(folder / WARNINGS, delay=True)):
        handler.setLevel(logging.WARNING)
        log.addHandler(handler)

    def give_up(error: BaseException, code: int) -> NoReturn:
        said = describe_error(error, "--batch or --workers") or get_first_line(error) or repr(error)
        (folder / ERROR).write_text(said + "\n")
        traceback.print_exc(file=words)
        sys.exit(code)

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see block_ctrl_c
        watch: Watch = PlainWatch(words)
        if on.tensorboard:
            watch = Both(watch, TensorBoard(folder))
        try:
            run(job.run, folder, job.machine, on.options, watch)
        finally:
            watch.close()  # what it has not written yet would go with the process
    except BusyError as error:  # what is in the folder is another's: nothing is written but this
        print(error)
        sys.exit(BUSY)
    except (OSError, RuntimeError, KeyboardInterrupt) as error:  # a full disk, a lost GPU: worth another try
        give_up(error, 1)
    except Exception as error:
        device = torch.device(job.machine.device)
        lost = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()  # it may be back later
        give_up(error, 1 if lost else FINAL)


def read_warnings(folder: Path) -> list[str]:
    """The warnings of a worker."""
    with contextlib.suppress(OSError):
        return (folder / WARNINGS).read_text(errors="replace").splitlines()
    return []


def die_with_parent() -> None:
    """End this process when its parent dies, so that a killed queue leaves no workers behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a process that a queue has started"
    parent.join()
    os._exit(1)
