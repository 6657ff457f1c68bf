"""Progress displays: of one run, as lines or as a bar in a terminal; and of a queue."""

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
    """Receives the events of a run. This base class prints nothing."""

    def begin(self, work: Work) -> None:
        """A run starts or is resumed; `work` lists its stages."""
        self.work, self.images = work, count_images(work)

    def show_past(self, lines: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> None:
        """These epochs and steps are done, by an earlier attempt or another run."""

    def say(self, text: str) -> None:
        """Show a message to the user."""

    def tick(self, t: int, done: float) -> None:
        """A fraction of step t is done."""

    def end_epoch(self, e: Epoch) -> None:
        """An epoch has ended."""

    def show_confusion(self, counts: Tensor) -> None:
        """The confusion matrix after a step; `end_step` follows."""

    def end_step(self, record: dict[str, Any]) -> None:
        """A step has ended; `record` holds its accuracies."""
        new = "" if record["new"] is None else f", new {record['new']:.2f}"
        self.say(
            f"step {record['step']} done in {duration(record['seconds'])}: {record['classes']} classes, "
            f"accuracy {record['top1']:.2f}% (base {record['base']:.2f}{new})"
        )

    def close(self) -> None:
        """The run has ended."""

    def estimate_time_left(self, e: Epoch) -> float:
        """Estimated seconds left, at the speed of this epoch."""
        ahead = sum(self.images[e.step + 1 :]) + self.images[e.step] * (
            1 - compute_fraction_done(self.work[e.step], e.stage, e.epoch)
        )
        return ahead / max(e.images_per_second, 1e-9)

    def describe_epoch(self, e: Epoch) -> str:
        """Describe an epoch in one line."""
        alpha = "" if e.alpha is None else f", α {e.alpha:.3f}"
        stage = "" if e.stage == "train" else f"{STAGES.get(e.stage, e.stage)}, "
        return (
            f"step {e.step}/{len(self.images) - 1}, {stage}epoch {e.epoch}/{e.epochs}: loss {e.loss:.4f}{alpha}, "
            f"{e.images_per_second:,.0f} images/s, {duration(self.estimate_time_left(e))} left"
        )


STAGES = {"refit": "fine-tuning on the memory"}
"""names of stages for users"""


def compute_fraction_done(step: list[Training], stage: str, epochs: float) -> float:
    """The fraction of a step that is done after so many epochs of a stage."""
    k = next(k for k, training in enumerate(step) if training.stage == stage)
    before, total = count_images([step[:k], step])
    return (before + epochs * step[k].images) / max(1, total)


HOOKS = ("begin", "show_past", "say", "tick", "end_epoch", "show_confusion", "end_step", "close")
"""the methods of a watch that events call"""


class Both(Watch):
    """Forwards all events to two watches."""

    def __init__(self, one: Watch, other: Watch) -> None:
        def to_both(name: str) -> Callable[..., None]:
            def forward(*event: Any) -> None:
                for watch in (one, other):
                    getattr(watch, name)(*event)

            return forward

        for name in HOOKS:
            setattr(self, name, to_both(name))


class PlainWatch(Watch):
    """Prints plain lines, for logs: each step's result, and epochs every few seconds at most."""

    def __init__(self, file: TextIO | None = None, every: float = 5.0) -> None:
        self.file, self.every = file, every
        self.last = time.monotonic() - every

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.file or sys.stderr, flush=True)

    def tick(self, t: int, done: float) -> None:
        """Print the progress, if nothing was printed for a minute."""
        if time.monotonic() - self.last >= 12 * self.every:
            self.last = time.monotonic()
            self.say(f"step {t}/{len(self.images) - 1}, {done:.1%}")

    def end_epoch(self, e: Epoch) -> None:
        """Print the epoch, unless one was printed within the last seconds; always print the last one of a stage."""
        if time.monotonic() - self.last >= self.every or e.epoch == e.epochs:
            self.last = time.monotonic()
            self.say(self.describe_epoch(e))


def make_bar(console: Console) -> Progress:
    """A progress bar followed by its description; hidden outside a terminal."""
    columns = BarColumn(bar_width=20), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class LiveWatch(Watch):
    """Shows a progress bar in a terminal, with the results of steps as lines above it."""

    def __init__(self, console: Console) -> None:
        self.console, self.bar = console, make_bar(console)
        self.task = self.bar.add_task("starting", total=1.0)

    def begin(self, work: Work) -> None:
        """Show the bar."""
        super().begin(work)
        self.bar.start()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False)  # a path may contain brackets

    def tick(self, t: int, done: float) -> None:
        """Update the bar."""
        now = sum(self.images[:t]) + self.images[t] * done
        self.bar.update(self.task, completed=now, total=sum(self.images))

    def end_epoch(self, e: Epoch) -> None:
        """Describe the epoch beside the bar."""
        self.bar.update(self.task, description=self.describe_epoch(e))

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()


# A queue: its status is read from the folders of its runs, whichever process runs them


class QueueStatus(NamedTuple):
    """The status of a queue."""

    done: int
    failed: int
    running: int
    waiting: int
    left: float
    """images left to train on"""
    speed: float
    """images per second of all running jobs, each in its last epoch"""


def read_queue_status(jobs: Sequence[Job], busy: Sequence[Job], shared: bool = True) -> QueueStatus:
    """Read the status of a queue from the folders of its runs.

    If steps are shared, the base step of a group counts once. A running job without a finished epoch counts with the
    mean speed of the others.
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
    """Shows the status of a queue: as a bar in a terminal, else as lines on stderr.

    A line is printed at each change, once the time left is known, and every minute. `shared`: whether runs share steps.
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
        """Update the display: at once if a job started or ended, else every few seconds, from the files of the runs."""
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
    """Describe the status of a queue in one line."""
    total = now.done + now.failed + now.running + now.waiting
    words = [f"{now.done} of {total} done", f"{now.running} running"]
    words += [f"{now.waiting} waiting"] if now.waiting else []
    words += [f"{now.failed} failed"] if now.failed else []
    words += [f"{duration(now.left / now.speed)} left"] if now.speed and now.left else []
    return ", ".join(words)
