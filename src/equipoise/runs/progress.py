"""Two displays: of one run, as plain lines or as a line in a terminal that moves; and of a queue of runs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from ..engine.train import Epoch
from ..learner.words import duration
from .folder import read_last_epoch
from .plan import Training, Work, count_images
from .queue import Job, has_base


class Watch:
    """Told of everything. Puts what is worth saying into words, and the time left; `say` prints nothing here."""

    def begin(self, work: Work) -> None:
        """A run begins or is resumed; `work` is what each step trains on."""
        self.work, self.images = work, count_images(work)

    def show_past(self, lines: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> None:
        """These epochs and steps are done: from an earlier attempt, or taken over from another run."""

    def say(self, text: str) -> None:
        """Something the user should know."""

    def tick(self, t: int, done: float) -> None:
        """Step t has come so far, as a fraction."""

    def end_epoch(self, e: Epoch) -> None:
        """An epoch has ended."""

    def show_confusion(self, counts: Tensor) -> None:
        """How the classes were taken for each other after a step; its accuracies follow."""

    def end_step(self, record: dict[str, Any]) -> None:
        """A step has ended, with these accuracies."""
        new = "" if record["new"] is None else f", new {record['new']:.2f}"
        self.say(
            f"step {record['step']} done in {duration(record['seconds'])}: {record['classes']} classes, "
            f"accuracy {record['top1']:.2f}% (base {record['base']:.2f}{new})"
        )

    def close(self) -> None:
        """No more will come."""

    def estimate_time_left(self, e: Epoch) -> float:
        """Seconds left, at the speed of this epoch; the teacher's cost is in it from the first increment on."""
        ahead = sum(self.images[e.step + 1 :]) + self.images[e.step] * (
            1 - compute_fraction_done(self.work[e.step], e.stage, e.epoch)
        )
        return ahead / max(e.images_per_second, 1e-9)

    def describe_epoch(self, e: Epoch) -> str:
        """An epoch in one line."""
        alpha = "" if e.alpha is None else f", α {e.alpha:.3f}"
        stage = "" if e.stage == "train" else f"{STAGES.get(e.stage, e.stage)}, "
        return (
            f"step {e.step}/{len(self.images) - 1}, {stage}epoch {e.epoch}/{e.epochs}: loss {e.loss:.4f}{alpha}, "
            f"{e.images_per_second:,.0f} images/s, {duration(self.estimate_time_left(e))} left"
        )


STAGES = {"refit": "fine-tuning on the memory"}
"""what people call a stage"""


def compute_fraction_done(step: list[Training], stage: str, epochs: float) -> float:
    """How much of a step's images have been trained on after so many epochs of a stage."""
    k = next(k for k, training in enumerate(step) if training.stage == stage)
    before, total = count_images([step[:k], step])
    return (before + epochs * step[k].images) / max(1, total)


HOOKS = ("begin", "show_past", "say", "tick", "end_epoch", "show_confusion", "end_step", "close")
"""all that a watch is told by"""


class Both(Watch):
    """Tells two of everything."""

    def __init__(self, one: Watch, other: Watch) -> None:
        def to_both(name: str) -> Callable[..., None]:
            def tell(*told: Any) -> None:
                for watch in (one, other):
                    getattr(watch, name)(*told)

            return tell

        for name in HOOKS:
            setattr(self, name, to_both(name))


class PlainWatch(Watch):
    """Plain lines, for logs: each step's result, and the epochs in between not more often than every few seconds."""

    def __init__(self, file: TextIO | None = None, every: float = 5.0) -> None:
        self.file, self.every = file, every
        self.last = time.monotonic() - every

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self.file or sys.stderr, flush=True)

    def tick(self, t: int, done: float) -> None:
        """Print it, if nothing has been printed for a minute."""
        if time.monotonic() - self.last >= 12 * self.every:
            self.last = time.monotonic()
            self.say(f"step {t}/{len(self.images) - 1}, {done:.1%}")

    def end_epoch(self, e: Epoch) -> None:
        """Print it, if the last one is long enough ago, or it is the last of its stage."""
        if time.monotonic() - self.last >= self.every or e.epoch == e.epochs:
            self.last = time.monotonic()
            self.say(self.describe_epoch(e))


def make_bar(console: Console) -> Progress:
    """A bar, and its description after it, while there is a terminal; rich would add a time left of its own."""
    columns = BarColumn(bar_width=20), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class LiveWatch(Watch):
    """A bar that moves with every epoch, for terminals; steps stay above it as lines."""

    def __init__(self, console: Console) -> None:
        self.console, self.bar = console, make_bar(console)
        self.task = self.bar.add_task("starting", total=1.0)

    def begin(self, work: Work) -> None:
        """Show the bar."""
        super().begin(work)
        self.bar.start()

    def say(self, text: str) -> None:
        """Print it above the bar."""
        self.console.print(text, highlight=False, markup=False)  # a path may hold brackets

    def tick(self, t: int, done: float) -> None:
        """Move the bar."""
        now = sum(self.images[:t]) + self.images[t] * done
        self.bar.update(self.task, completed=now, total=sum(self.images))

    def end_epoch(self, e: Epoch) -> None:
        """Say where it is."""
        self.bar.update(self.task, description=self.describe_epoch(e))

    def close(self) -> None:
        """Take the bar away."""
        self.bar.stop()


# A queue: read from the folders of its runs, whoever is working there


class QueueStatus(NamedTuple):
    """How a queue stands."""

    done: int
    failed: int
    running: int
    waiting: int
    left: float
    """images still to be trained on"""
    speed: float
    """images a second of all that are at work, each in its last epoch"""


def read_queue_status(jobs: Sequence[Job], busy: Sequence[Job], shared: bool = True) -> QueueStatus:
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
        if job.is_over:
            continue
        ahead: list[float] = list(job.images)
        line = read_last_epoch(job.folder)
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
    failed, over = sum(job.failure is not None for job in jobs), sum(job.is_over for job in jobs)
    return QueueStatus(over - failed, failed, len(busy), len(jobs) - over - len(busy), left, speed)


class QueueWatch:
    """How a queue of runs stands: a bar in a terminal; elsewhere lines on standard error, beside the output.

    Such a line comes at each change, once the time left is known, and every minute in between.

    `shared` is whether the runs share steps (`Local.store` is there): else each has a base step of its own ahead.
    """

    def __init__(
        self, console: Console, jobs: Sequence[Job], shared: bool = True, every: float = 2.0, quiet: float = 60.0
    ) -> None:
        self.jobs, self.shared, self.every, self.quiet = jobs, shared, every, quiet
        self.bar = make_bar(console)
        self.task = self.bar.add_task("")
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
        seen, clock = (len(busy), *(job.is_over for job in self.jobs)), time.monotonic()
        changed = seen != self.seen
        if not changed and clock - self.looked < self.every:
            return
        self.seen, self.looked = seen, clock
        now = read_queue_status(self.jobs, busy, self.shared)
        words = describe_queue(now)
        self.bar.update(self.task, total=len(self.jobs), completed=now.done + now.failed, description=words)
        moving = now.speed > 0
        if self.bar.disable and (changed or (moving and not self.moving) or clock - self.said >= self.quiet):
            self.said = clock
            print(words, file=sys.stderr, flush=True)
        self.moving = moving


def describe_queue(now: QueueStatus) -> str:
    """How a queue stands, in one line."""
    total = now.done + now.failed + now.running + now.waiting
    words = [f"{now.done} of {total} done", f"{now.running} running"]
    words += [f"{now.waiting} waiting"] if now.waiting else []
    words += [f"{now.failed} failed"] if now.failed else []
    words += [f"{duration(now.left / now.speed)} left"] if now.speed and now.left else []
    return ", ".join(words)
