"""An attempt at a run, in a process of its own, that kills itself at a moment that is given."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.learner.state import Live
from equipoise.learner.step import Before
from equipoise.runs.progress import Watch
from equipoise.runs.run import run
from equipoise.runs.settings import Machine, Options, Run

Moment = tuple[int, str, int]
"""step, stage and epoch; or step, before or after the choice of exemplars, and 0"""
NEVER: Moment = (-1, "", -1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Log(Watch):
    """Notes the epochs that are trained."""

    def __init__(self, path: Path, at: Moment) -> None:
        self.path, self.at = path, at

    def end_epoch(self, e: Any) -> None:
        with self.path.open("a") as f:
            print(os.getpid(), e.step, e.stage, e.epoch, file=f)
        if (e.step, e.stage, e.epoch) == self.at:
            die()


def attempt(settings: Run, out: Path, store: Path | None, every: float, fatal: int, at: Moment) -> None:
    """Do the run, or go on with it; `fatal` is the number of the renaming of a file just before which it ends."""
    true, calls, choose = os.replace, [], Before.choose

    def replace(*args: Any, **more: Any) -> None:
        calls.append(args)
        if len(calls) == fatal:
            die()
        true(*args, **more)

    def chosen(self: Before, live: Live, select: str) -> Tensor:
        if (self.plan.t, "before the choice", 0) == at:
            die()
        found = choose(self, live, select)
        if (self.plan.t, "after the choice", 0) == at:
            die()
        return found

    os.replace, Before.choose = replace, chosen  # type: ignore[method-assign]
    run(settings, out, Machine("cpu", "fp32"), Options(store=store, checkpoint=every), Log(out.with_suffix(".log"), at))
