"""How a queue of runs stands, and who is told: read from the folders of the runs, whoever is working there."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from .folder import last_epoch
from .progress import bar_with_words, duration
from .queue import Job, has_base


class Standing(NamedTuple):
    """How a queue stands."""

    done: int
    failed: int
    running: int
    waiting: int
    left: float
    """images still to be trained on"""
    speed: float
    """images a second of all that are at work, each in its last epoch"""


def queue_status(jobs: Sequence[Job], busy: Sequence[Job], shared: bool = True) -> Standing:
    """How a queue stands, read from the folders of its runs.

    Where steps are shared, the base step of a group is counted once, as far as whoever computes it has come. A job at
    work that has not ended an epoch yet is taken to be as fast as the others are on average.
    """
    left = 0.0
    speeds: list[float] = []
    unknown = 0
    based = {job.group for job in jobs if job.group and has_base(job)}
    bases: dict[str, float] = {}
    for job in jobs:
        if job.over:
            continue
        ahead: list[float] = list(job.images)
        line = last_epoch(job.folder)
        if line is not None and line["step"] < len(ahead):
            t = line["step"]
            ahead[:t] = [0] * t
            ahead[t] *= 1 - line["done"]
            speeds += [line["images_per_second"]] if job in busy else []
        elif job in busy and any(ahead):
            unknown += 1
        if shared and job.group and ahead:
            bases[job.group] = 0 if job.group in based else min(ahead[0], bases.get(job.group, math.inf))
            ahead[0] = 0
        left += sum(ahead)
    left += sum(bases.values())
    speed = sum(speeds) * (1 + unknown / len(speeds)) if speeds else 0.0
    failed, over = sum(job.failure is not None for job in jobs), sum(job.over for job in jobs)
    return Standing(over - failed, failed, len(busy), len(jobs) - over - len(busy), left, speed)


class QueueWatch:
    """How a queue of runs stands: a bar in a terminal; elsewhere lines on standard error, beside the output.

    Such a line comes at each change, once the time left is known, and every minute in between.

    `shared` is whether the runs share steps (`Local.store` is there): else each has a base step of its own ahead.
    """

    def __init__(
        self, console: Console, jobs: Sequence[Job], shared: bool = True, every: float = 2.0, quiet: float = 60.0
    ) -> None:
        self.jobs, self.shared, self.every, self.quiet = jobs, shared, every, quiet
        self.bar = bar_with_words(console)
        self.task = self.bar.add_task("")
        self.plain = not console.is_terminal
        self.seen: tuple[int, ...] = ()
        self.looked = self.said = -math.inf
        self.moving = False

    def __enter__(self) -> QueueWatch:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def tell(self, busy: Sequence[Job]) -> None:
        """Show where it is, if that has changed; how far the runs are, now and then: that is read from their files."""
        seen, clock = (len(busy), *(job.over for job in self.jobs)), time.monotonic()
        changed = seen != self.seen
        if not changed and clock - self.looked < self.every:
            return
        self.seen, self.looked = seen, clock
        now = queue_status(self.jobs, busy, self.shared)
        words = queue_words(now)
        self.bar.update(self.task, total=len(self.jobs), completed=now.done + now.failed, description=words)
        moving = now.speed > 0
        if self.plain and (changed or (moving and not self.moving) or clock - self.said >= self.quiet):
            self.said = clock
            print(words, file=sys.stderr, flush=True)
        self.moving = moving


def queue_words(now: Standing) -> str:
    """How a queue stands, in one line."""
    total = now.done + now.failed + now.running + now.waiting
    words = [f"{now.done} of {total} done", f"{now.running} running"]
    words += [f"{now.waiting} waiting"] if now.waiting else []
    words += [f"{now.failed} failed"] if now.failed else []
    words += [f"{duration(now.left / now.speed)} left"] if now.speed and now.left else []
    return ", ".join(words)
