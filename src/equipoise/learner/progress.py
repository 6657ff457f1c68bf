"""Progress of a step in one line on standard error: how long it will take here, and how far it is."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live as Display
from rich.text import Text

from ..engine.train import Callbacks, Epoch
from ..errors import format_count
from ..step import Plan, Stage
from .state import Live
from .step import Before
from .words import duration

MEASURED = 0.5
"""seconds of training from which its speed is known"""
EVERY = 0.1
"""seconds between two looks at the line"""


class Progress:
    """The line of a step. In a terminal it is updated in place; elsewhere it is printed, if at all (`verbose=True`),
    when the time is known and again at the end.

    Speed is measured from the end of the first batch on: before it, a GPU's steps are compiled and recorded. What a
    callback takes is part of it, since it goes on taking that.
    """

    def __init__(self, before: Before, live: Live, verbose: bool | None) -> None:
        in_terminal = is_terminal(sys.stderr)
        self.shown = in_terminal if verbose is None else verbose
        self.live, self.plan, self.device = live, before.plan, before.images.x.device.type
        hold = before.method.hold(before.plan)
        stages = live.stages
        self.epochs = [0 if isinstance(s, str) else s.recipe.epochs for s in stages]
        self.images = [0 if isinstance(s, str) else count_images(s, self.plan, hold) for s in stages]
        self.done_before = self.epochs_done(live.at.epoch)
        self.began = self.drawn = time.monotonic()
        self.first: tuple[float, float] | None = None  # when the first batch was done, and how much work then was
        self.left: float | None = None
        self.display: Display | None = None
        if self.shown and in_terminal:
            # What a callback prints comes above the line, unless it goes elsewhere.
            prints = is_terminal(sys.stdout)
            self.display = Display(console=Console(file=sys.stderr), auto_refresh=False, redirect_stdout=prints)

    def __enter__(self) -> Self:
        if self.display is not None:
            with unless_closed():
                self.display.start()
            self.draw(self.announce())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if not self.shown:
            return
        took = duration(time.monotonic() - self.began)
        if kind is None:
            self.say(f"{self.announce()} in {took} on {self.device}")
        else:
            self.say(f"step {self.plan.t}: stopped after {took}, in epoch {self.epoch_words(self.live.at.epoch)}")
        if self.display is not None:
            with unless_closed():
                self.display.stop()

    def watch(self, tell: Callbacks) -> Callbacks:
        """Whom `fit` tells of epochs and batches: this line, then whoever else is told."""
        if not self.shown:
            return tell

        def on_epoch(e: Epoch) -> None:
            self.move(e.epoch, ended=True)
            tell.epoch(e)

        def on_batch(epochs: float) -> None:
            self.move(epochs)
            tell.batch(epochs)

        return Callbacks(on_epoch, on_batch)

    # How far it is -------------------------------------------------------------------------------------------

    def move(self, epochs: float, ended: bool = False) -> None:
        """The stage under way has come so far; `ended` where an epoch has, for which the CPU has waited."""
        now, work = time.monotonic(), self.work_done(epochs)
        if self.first is None:
            self.first = now, work
        seconds, done = now - self.first[0], work - self.first[1]
        # A GPU is sent batches that it has not computed yet: only at the end of an epoch is it known how fast it is.
        if done > 0 and seconds > 0 and (ended or (seconds >= MEASURED and self.device == "cpu")):
            known, total = self.left is not None, sum(map(int.__mul__, self.epochs, self.images))
            self.left = (total - work) * seconds / done
            if not known and self.display is None:
                self.say(f"{self.announce()}, about {duration(now - self.began + self.left)} on {self.device}")
        if self.display is not None and self.left is not None and now - self.drawn >= EVERY:
            self.drawn = now
            self.draw(self.describe_position(epochs, now))

    def epochs_done(self, epochs: float) -> float:
        """Epochs of all stages, of which the one under way has done so many."""
        return sum(self.epochs[: self.live.at.stage]) + epochs

    def work_done(self, epochs: float) -> float:
        """The same in images that were trained on."""
        k = self.live.at.stage
        return sum(map(int.__mul__, self.epochs[:k], self.images)) + epochs * self.images[k]

    # In words ------------------------------------------------------------------------------------------------

    def announce(self) -> str:
        """What is to be learned, and in how many epochs."""
        total, done = sum(self.epochs), int(self.done_before)
        epochs = f", the last {total - done} of {total} epochs" if done else f", {format_count(total, 'epoch')}"
        return f"step {self.plan.t}: {self.subject()}{epochs if total else ''}"

    def subject(self) -> str:
        """The new classes, and all images at hand."""
        return (
            f"{format_count(self.plan.sizes[-1], 'class', 'classes')}, {format_count(sum(self.plan.counts), 'image')}"
        )

    def epoch_words(self, epochs: float) -> str:
        """The epoch under way, of how many."""
        total = sum(self.epochs)
        return f"{min(int(self.epochs_done(epochs)) + 1, total)}/{total}"

    def describe_position(self, epochs: float, now: float) -> str:
        """Where the step is, and the time left."""
        left = self.left or 0.0
        time_left = f"{duration(left)} left of {duration(now - self.began + left)} on {self.device}"
        return f"step {self.plan.t}, epoch {self.epoch_words(epochs)}: {time_left} ({self.subject()})"

    def say(self, words: str) -> None:
        """A line that stays."""
        if self.display is not None:
            self.draw(words)
        elif sys.stderr is not None:
            with unless_closed():
                print(words, file=sys.stderr, flush=True)

    def draw(self, words: str) -> None:
        """Put words into the line."""
        if self.display is not None:
            with unless_closed():
                self.display.update(Text(words, no_wrap=True, overflow="ellipsis"), refresh=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is shown in a terminal. It is None or closed where there is none to write to."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def unless_closed() -> contextlib.suppress:
    """What is written goes nowhere if the stream is closed or the terminal gone: training is worth more than a line."""
    return contextlib.suppress(OSError, ValueError)


def count_images(stage: Stage, plan: Plan, hold: int) -> int:
    """About how many images an epoch of a stage has: a remedy may take some of them several times."""
    held = min(hold * plan.N, sum(plan.counts))
    kept = sum(min(n, plan.keep) for n in plan.counts)
    return {"all": sum(plan.counts) - held, "memory": kept if kept > 1 else 0, "held": held}[stage.images]
