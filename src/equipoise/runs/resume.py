"""One process's part in a run: from the last checkpoint, or the longest shared prefix, to the end."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import files
from ..data.augment import Crop
from ..data.inputs import image_shape
from ..engine.train import Epoch
from ..errors import DataError
from ..learner import Learner
from ..learner.record import describe
from ..method import Method, Recipe
from .environment import hardware, versions
from .folder import BASED, Result
from .metrics import confusion_matrix, forgetting, summary
from .progress import Watch
from .shared_steps import Store

if TYPE_CHECKING:
    from .run import Plan

BESIDES = ("preparing_", "refitting_", "evaluating_", "saving_")
"""what takes time besides training, and is noted for every step: compiling and recording, refitting, and the files"""


class Attempt:
    """One process's part in a run: from the last checkpoint, or the longest shared prefix, to the end."""

    def __init__(
        self, plan: Plan, folder: Path, store: Store | None, watch: Watch, checkpoint_every: float, evaluate_every: int
    ) -> None:
        self.plan, self.folder, self.store, self.watch = plan, folder, store, watch
        self.checkpoint_every, self.evaluate_every = checkpoint_every, evaluate_every
        self.learner = plan.learner
        self.keys = plan.keys()
        self.records: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.reused: dict[str, Any] | None = None
        self.saved = time.monotonic()
        self.spent = dict.fromkeys(BESIDES, 0.0)
        self.waiting: float | None = None
        self.trained = self.told = self.stopping = self.training = False

    def carry_out(self) -> Result:
        """All steps that are not done yet, then the result."""
        plan, learner = self.plan, self.learner
        if (self.folder / "checkpoint" / files.INFO).is_file():  # not so when the first one was cut off
            self.recall(learner.restore(self.folder / "checkpoint"))
        self.rewrite_metrics()
        self.watch.begin(plan.settings, plan.images_to_train())
        self.watch.before(self.lines, self.records)
        while len(self.records) < len(plan.sizes):
            if self.stopping:
                raise KeyboardInterrupt
            with self.turn():
                t = len(learner.sizes_) - 1 if learner.unfinished_ else len(learner.sizes_)
                began = time.perf_counter() - (self.lines[-1]["seconds"] if learner.unfinished_ else 0.0)
                step = plan.train.of(*plan.edges(t))
                self.training = True
                self.waiting = time.perf_counter()
                learner.learn(step.x, step.y, self.at_epoch_end, partial(self.tick, t), self.at_refit_epoch_end)
                self.training = False
            accuracies = self.measure(t)
            last = next((line for line in reversed(self.lines) if line["step"] == t), {"seconds": 0.0})
            spent = {"": time.perf_counter() - began, "training_": last["seconds"], **self.spent}
            times = {f"{what}seconds": round(seconds, 3) for what, seconds in spent.items()}
            took = times | {"training_mib": last.get("mib")}
            self.records.append({"step": t, "classes": plan.edges(t)[1], **accuracies, **took})
            self.spent = dict.fromkeys(BESIDES, 0.0)
            self.watch.confusion(self.confusion)
            self.watch.step(self.records[-1])
            if t + 1 < len(plan.sizes):
                self.save_checkpoint()
        return self.result()

    @contextlib.contextmanager
    def hearing_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C stops at the end of the epoch, with a checkpoint, so that nothing is lost; a second one at once."""
        in_main = threading.current_thread() is threading.main_thread()  # signals belong to that one
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def heard(number: int, frame: Any) -> None:
            if self.stopping or not self.training:
                raise KeyboardInterrupt
            self.stopping = True

        before = signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The next step, taken over where it can be; else with the sole right to compute it, among all who share it."""
        if not self.learner.unfinished_:
            self.reuse()
        t = len(self.learner.sizes_) - self.learner.unfinished_
        if self.store is None or self.store.has(self.keys[t]):
            yield
            return
        with self.store.claim(self.keys[t], lambda: self.watch.say(f"waiting for another run that computes step {t}")):
            if not self.learner.unfinished_:
                self.reuse()  # what came while this waited
            yield

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[what] += time.perf_counter() - began

    def tick(self, t: int, epochs: float) -> None:
        """Tell how far step t is, and that Ctrl-C was heard."""
        if self.waiting is not None:  # the first batch: all before it was compiling and recording
            self.spent["preparing_"] += time.perf_counter() - self.waiting
            self.waiting = None
        self.watch.tick(t, epochs)
        if self.stopping and not self.told:
            self.told = True
            self.watch.say("stopping at the end of this epoch; Ctrl-C again stops at once")

    def reuse(self) -> None:
        """Take over the longest prefix that is in the store and goes beyond what is done."""
        if self.store is None:
            return
        for t in reversed(range(len(self.learner.sizes_), len(self.keys))):
            if not self.store.has(self.keys[t]):
                continue
            try:
                note = self.learner.restore(self.store.entry(self.keys[t]))
            except DataError as error:
                why = str(error).split(": delete")[0]  # which is done here
                self.watch.say(f"computing a shared step again: {why}")
                self.store.drop(self.keys[t])
                continue
            # All of it, also of steps that this run did too: what follows belongs to that net and to no other.
            self.records, self.lines = note["records"], note["lines"]
            seconds = round(sum(r["seconds"] for r in self.records) + self.lines[-1]["seconds"], 3)
            self.reused = {"steps": [*range(t + 1)], "seconds": seconds, "key": self.keys[t]}
            self.rewrite_metrics()
            self.watch.reused(t, seconds)
            self.watch.before(self.lines, self.records)
            (self.folder / BASED).touch()
            return

    def at_epoch_end(self, learner: Learner) -> None:
        """Note the epoch, tell of it, and save what is due."""
        e = learner.progress_
        assert e is not None
        self.trained = True
        line = {k: round(v, 6) if isinstance(v, float) else v for k, v in e._asdict().items()}
        if self.evaluate_every and e.epoch % self.evaluate_every == 0:
            line["accuracy"] = self.measure(e.step)["top1"]
        self.lines.append(line)
        with (self.folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")
        if e.epoch == e.epochs or time.monotonic() - self.saved >= self.checkpoint_every:
            self.save_checkpoint()
        if e.epoch == e.epochs and self.store is not None and not self.store.has(self.keys[e.step]):
            lines = [{k: v for k, v in line.items() if k != "accuracy"} for line in self.lines]
            note = {"records": self.records, "lines": lines}
            try:
                with self.timed("saving_"):
                    self.store.put(self.keys[e.step], lambda folder: learner.save(folder, note))
            except OSError as error:  # sharing is a convenience; the run goes on without
                self.watch.say(f"step {e.step} cannot be shared with other runs: {error}")
        if e.epoch == e.epochs:
            (self.folder / BASED).touch()
        self.watch.epoch(e)
        if self.stopping:
            self.save_checkpoint()
            raise KeyboardInterrupt

    def at_refit_epoch_end(self, e: Epoch) -> None:
        """Tell of it. It is not noted: what is saved is the step before its refit, which is done again as a whole."""
        self.spent["refitting_"] = e.seconds
        self.watch.refit(e)
        if self.stopping:
            raise KeyboardInterrupt

    def note(self) -> dict[str, Any]:
        """What goes on in a checkpoint besides the learner."""
        return {"records": self.records, "lines": self.lines, "reused": self.reused}

    def recall(self, note: dict[str, Any]) -> None:
        """The inverse of `note`."""
        self.records, self.lines, self.reused = note["records"], note["lines"], note["reused"]

    def save_checkpoint(self) -> None:
        """Save all that going on needs."""
        with self.timed("saving_"):
            self.learner.save(self.folder / "checkpoint", self.note())
        self.saved = time.monotonic()

    def rewrite_metrics(self) -> None:
        """Epochs after the checkpoint are done again, so their lines go."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        files.write_file(self.folder / "metrics.jsonl", text.encode())

    def measure(self, t: int) -> dict[str, Any]:
        """Accuracies after step t, on the test (or validation) images of all classes so far."""
        _, now = self.plan.edges(t)
        with self.timed("evaluating_"):
            test = self.plan.test.of(0, now)
            z = self.learner.logits(test.x)
            self.confusion = confusion_matrix(z, test.y, now)
            return summary(z, test.y, self.plan.sizes[: t + 1])

    def settings(self) -> dict[str, Method | Recipe | Crop]:
        """All that a record names in full."""
        recipe, augment = self.learner.settings_for(image_shape(self.plan.train.x))
        return {"method": self.plan.run.method, "recipe": recipe, "augment": augment}

    def result(self) -> Result:
        """What `result.json` holds."""
        plan, records = self.plan, self.records
        recipe, _ = self.learner.settings_for(image_shape(plan.train.x))
        refit = plan.run.method.refitting(recipe.last) if self.learner.budget_.share(plan.edges(1)[1]) else None
        return {
            "average_incremental_accuracy": float(np.mean([r["top1"] for r in records])),
            "average_incremental_accuracy_top5": float(np.mean([r["top5"] for r in records])),
            "final": {k: records[-1][k] for k in ("top1", "top5", "base", "new")},
            "forgetting": forgetting([r["by_step"] for r in records]),
            "alpha": self.learner.alphas_,
            "steps": records,
            "confusion": self.confusion.tolist(),
            "class_order": plan.order,
            "run": {k: v for k, v in plan.settings.items() if k != "class_order"},
            "refit": None if refit is None else {**asdict(refit), "recipe": describe(refit.recipe, in_full=True)},
            "in_full": {name: describe(value, in_full=True) for name, value in self.settings().items()},
            "reused": self.reused,
            "seconds": round(sum(r["seconds"] for r in records), 3),
            "versions": versions(),
            "hardware": {**hardware(self.learner.device_), "engine": self.learner.engine_ if self.trained else None},
        }
