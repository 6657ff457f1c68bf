"""Who is told of a run's progress: nobody, a log of plain lines, or one line in a terminal that moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from ..engine.train import Epoch
from .plan import Training, Work, total_images


class Watch:
    """Told of everything. Puts what is worth saying into words, and the time left; `say` prints nothing here."""

    def begin(self, settings: dict[str, Any], work: Work) -> None:
        """A run begins or is resumed; `work` is what each step trains on."""
        self.work, self.images = work, total_images(work)

    def before(self, lines: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> None:
        """These epochs and steps are done: from an earlier attempt, or taken over from another run."""

    def say(self, text: str) -> None:
        """Something the user should know."""

    def tick(self, t: int, done: float) -> None:
        """Step t has come so far, as a fraction."""

    def epoch(self, e: Epoch) -> None:
        """An epoch has ended."""

    def confusion(self, counts: Tensor) -> None:
        """How the classes were taken for each other after a step; its accuracies follow."""

    def step(self, record: dict[str, Any]) -> None:
        """A step has ended, with these accuracies."""
        new = "" if record["new"] is None else f", new {record['new']:.2f}"
        self.say(
            f"step {record['step']} done in {duration(record['seconds'])}: {record['classes']} classes, "
            f"accuracy {record['top1']:.2f}% (base {record['base']:.2f}{new})"
        )

    def close(self) -> None:
        """No more will come."""

    def left(self, e: Epoch) -> float:
        """Seconds left, at the speed of this epoch; the teacher's cost is in it from the first increment on."""
        ahead = sum(self.images[e.step + 1 :]) + self.images[e.step] * (
            1 - fraction_done(self.work[e.step], e.stage, e.epoch)
        )
        return ahead / max(e.images_per_second, 1e-9)

    def words(self, e: Epoch) -> str:
        """An epoch in one line."""
        alpha = "" if e.alpha is None else f", α {e.alpha:.3f}"
        stage = "" if e.stage == "train" else f"{STAGES.get(e.stage, e.stage)}, "
        return (
            f"step {e.step}/{len(self.images) - 1}, {stage}epoch {e.epoch}/{e.epochs}: loss {e.loss:.4f}{alpha}, "
            f"{e.images_per_second:,.0f} images/s, {duration(self.left(e))} left"
        )


STAGES = {"refit": "fine-tuning on the memory"}
"""what people call a stage"""


def fraction_done(step: list[Training], stage: str, epochs: float) -> float:
    """How much of a step's images have been trained on after so many epochs of a stage."""
    k = next(k for k, training in enumerate(step) if training.stage == stage)
    before = sum(training.epochs * training.images for training in step[:k])
    total = before + sum(training.epochs * training.images for training in step[k:])
    return (before + epochs * step[k].images) / max(1, total)


HOOKS = ("begin", "before", "say", "tick", "epoch", "confusion", "step", "close")
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

    def epoch(self, e: Epoch) -> None:
        """Print it, if the last one is long enough ago, or it is the last of its stage."""
        if time.monotonic() - self.last >= self.every or e.epoch == e.epochs:
            self.last = time.monotonic()
            self.say(self.words(e))


def bar_with_words(console: Console) -> Progress:
    """A bar, and its description after it, while there is a terminal; rich would add a time left of its own."""
    columns = BarColumn(bar_width=20), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class LiveWatch(Watch):
    """A bar that moves with every epoch, for terminals; steps stay above it as lines."""

    def __init__(self, console: Console) -> None:
        self.console, self.bar = console, bar_with_words(console)
        self.task = self.bar.add_task("starting", total=1.0)

    def begin(self, settings: dict[str, Any], work: Work) -> None:
        """Show the bar."""
        super().begin(settings, work)
        self.bar.start()

    def say(self, text: str) -> None:
        """Print it above the bar."""
        self.console.print(text, highlight=False, markup=False)  # a path may hold brackets

    def tick(self, t: int, done: float) -> None:
        """Move the bar."""
        now = sum(self.images[:t]) + self.images[t] * done
        self.bar.update(self.task, completed=now, total=sum(self.images))

    def epoch(self, e: Epoch) -> None:
        """Say where it is."""
        self.bar.update(self.task, description=self.words(e))

    def close(self) -> None:
        """Take the bar away."""
        self.bar.stop()


def duration(seconds: float) -> str:
    """Seconds as people write them."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 72:
        return f"{hours / 24:.0f} days"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
