"""One attempt at a run: from the last checkpoint, or the longest shared prefix, to the end."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..engine.train import Epoch
from ..errors import DataError
from ..learner import Learner, saved
from .environment import describe_hardware, list_versions
from .metrics import confusion_matrix, forgetting, summarise
from .plan import Prepared
from .progress import Watch, compute_fraction_done, duration
from .record import Result
from .settings import Options
from .shared_steps import SharedSteps

OVERHEAD = ("preparing", "evaluating", "saving")
"""overhead besides training, recorded for every step: compiling and capturing, evaluation, writing files"""


def check_note(note: Any, key: str | None = None) -> None:
    """Refuse what no run saved, and a shared step of another key, wherever it was found."""
    if not isinstance(note, dict) or not all(isinstance(note.get(name), list) for name in ("records", "lines")):
        raise DataError("it was not saved by a run")
    if key is not None and note.get("key") != key:
        raise DataError(f"it is another step, {note.get('key')}")


class Attempt:
    """One attempt at a run by one process."""

    def __init__(
        self, plan: Prepared, folder: Path, shared: SharedSteps | None, watch: Watch, options: Options
    ) -> None:
        self.plan, self.folder, self.shared, self.watch, self.options = plan, folder, shared, watch, options
        self.learner = plan.learner
        self.keys = plan.compute_keys()
        self.work = plan.list_work()
        self.records: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.reused: dict[str, Any] | None = None
        self.saved = time.monotonic()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.waiting: float | None = None
        self.began = 0.0
        self.trained = self.warned = self.stopping = self.training = False

    @property
    def t(self) -> int:
        """The current or next step."""
        return len(self.learner.sizes_) - self.learner.unfinished_

    # Taking up -----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Restore the last checkpoint, if any."""
        if (self.folder / "checkpoint" / saved.INFO).is_file():  # not so when the first one was cut off
            note = self.learner.restore(self.folder / "checkpoint", check_note)
            self.records, self.lines, self.reused = note["records"], note["lines"], note.get("reused")
        self.rewrite_metrics()
        self.watch.begin(self.work)
        self.watch.show_past(self.lines, self.records)

    @contextlib.contextmanager
    def catch_ctrl_c(self) -> Iterator[None]:
        """Make Ctrl-C stop at the end of the epoch, after a checkpoint; a second one stops at once."""
        in_main = threading.current_thread() is threading.main_thread()  # only it receives signals
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def stop(number: int, frame: Any) -> None:
            if self.stopping or not self.training:
                raise KeyboardInterrupt
            self.stopping = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def begin_step(self) -> Iterator[None]:
        """Reuse the next step if it is shared; else lock it during the block, while it is computed."""
        if self.stopping:
            raise KeyboardInterrupt
        with contextlib.ExitStack() as stack:
            if self.shared is not None:
                if not self.learner.unfinished_:
                    self.reuse(self.shared)
                key = self.keys[self.t]
                if not self.shared.has(key):
                    words = f"waiting for another run that computes step {self.t}"
                    stack.enter_context(self.shared.claim(key, lambda: self.watch.say(words)))
                    if not self.learner.unfinished_:
                        self.reuse(self.shared)  # it may have been finished meanwhile
            spent = sum(line["seconds"] for line in self.list_stage_ends(self.t)) if self.learner.unfinished_ else 0.0
            self.began = time.perf_counter() - spent
            self.waiting, self.training = time.perf_counter(), True
            yield
            self.training = False

    def reuse(self, shared: SharedSteps) -> None:
        """Restore the longest shared prefix, if it is longer than what is done."""
        for t in reversed(range(len(self.learner.sizes_), len(self.keys))):
            key = self.keys[t]
            if not shared.has(key):
                continue
            try:
                note = self.learner.restore(shared.find_entry(key), partial(check_note, key=key))
            except DataError as error:
                why = str(error).split(": delete")[0]  # which is done here
                self.watch.say(f"computing a shared step again: {why}")
                shared.drop(key)
                continue
            # All of it, also of steps that this run did too: what follows belongs to that net and to no other.
            self.records, self.lines = note["records"], note["lines"]
            under_way = sum(line["seconds"] for line in self.list_stage_ends(t))
            seconds = round(sum(r["seconds"] for r in self.records) + under_way, 3)
            self.reused = {"steps": [*range(t + 1)], "seconds": seconds, "key": key}
            self.rewrite_metrics()
            self.watch.say(f"steps 0 to {t} reused from the store (they had taken {duration(seconds)})")
            self.watch.show_past(self.lines, self.records)
            return

    # While it is trained -------------------------------------------------------------------------------------

    def tick(self, epochs: float) -> None:
        """Report the progress of the stage, and acknowledge Ctrl-C."""
        if self.waiting is not None:  # time before the first batch was compiling and capturing
            self.spent["preparing"] += time.perf_counter() - self.waiting
            self.waiting = None
        self.watch.tick(self.t, compute_fraction_done(self.work[self.t], self.learner.stage_, epochs))
        if self.stopping and not self.warned:
            self.warned = True
            self.watch.say("stopping at the end of this epoch; Ctrl-C again stops at once")

    def at_epoch_end(self, learner: Learner) -> None:
        """Record the epoch, report it, and save a checkpoint if due."""
        e = learner.progress_
        assert e is not None, "this is called at the end of an epoch"
        self.trained = True
        line = {k: round(v, 6) if isinstance(v, float) else v for k, v in e._asdict().items()}
        line["done"] = round(compute_fraction_done(self.work[e.step], e.stage, e.epoch), 6)
        if self.options.evaluate_every and e.epoch % self.options.evaluate_every == 0:
            line["accuracy"] = self.measure(e.step)["top1"]
        self.lines.append(line)
        with (self.folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")
        if e.epoch == e.epochs or time.monotonic() - self.saved >= self.options.checkpoint:
            self.save_checkpoint()
        if learner.chooses_next_:
            self.share(e)
        self.watch.end_epoch(e)
        if self.stopping:
            self.save_checkpoint()
            raise KeyboardInterrupt

    def share(self, e: Epoch) -> None:
        """Save the step for other runs."""
        key = self.keys[e.step]
        if self.shared is not None and not self.shared.has(key):
            lines = [{k: v for k, v in line.items() if k != "accuracy"} for line in self.lines]
            note = {"key": key, "records": self.records, "lines": lines}
            try:
                with self.time_block("saving"):
                    self.shared.put(key, lambda folder: self.learner.save(folder, note))
            except OSError as error:  # sharing is a convenience; the run goes on without
                self.watch.say(f"step {e.step} cannot be shared with other runs: {error}")

    def end_step(self, t: int) -> None:
        """Evaluate the step, record it and save a checkpoint."""
        accuracies = self.measure(t)
        stages = self.list_stage_ends(t)
        by_stage = {line["stage"]: line["seconds"] for line in stages}
        training = by_stage.pop("train", 0.0)
        spent = {"": time.perf_counter() - self.began, "training_": training, "refitting_": sum(by_stage.values())}
        spent |= {f"{what}_": self.spent[what] for what in OVERHEAD}
        times = {f"{what}seconds": round(seconds, 3) for what, seconds in spent.items()}
        mib = next((line["mib"] for line in stages if line["stage"] == "train"), None)
        self.records.append({"step": t, "classes": self.plan.edges(t)[1], **accuracies, **times, "training_mib": mib})
        self.spent.clear()
        self.watch.show_confusion(self.confusion)
        self.watch.end_step(self.records[-1])
        if t + 1 < len(self.plan.sizes):
            self.save_checkpoint()

    def list_stage_ends(self, t: int) -> list[dict[str, Any]]:
        """The last line of each stage of step t so far."""
        return list({line["stage"]: line for line in self.lines if line["step"] == t}.values())

    @contextlib.contextmanager
    def time_block(self, what: str) -> Iterator[None]:
        """Add the duration of the block to the overhead."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[what] += time.perf_counter() - began

    def save_checkpoint(self) -> None:
        """Save all that resuming needs."""
        note = {"records": self.records, "lines": self.lines, "reused": self.reused}
        with self.time_block("saving"):
            self.learner.save(self.folder / "checkpoint", note)
        self.saved = time.monotonic()

    def rewrite_metrics(self) -> None:
        """Drop the lines of epochs after the checkpoint, which are repeated."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        files.write_file(self.folder / "metrics.jsonl", text.encode())

    def measure(self, t: int) -> dict[str, Any]:
        """Accuracies after step t, on the test (or validation) images of all classes so far."""
        _, now = self.plan.edges(t)
        test = self.plan.test
        with self.time_block("evaluating"):
            where = test.find_positions(0, now)
            z, y = self.learner.logits_at(test.x, where), test.y[where]
            self.confusion = confusion_matrix(z, y, now)
            return summarise(z, y, self.plan.sizes[: t + 1])

    def list_looks(self) -> list[dict[str, Any]]:
        """The accuracies measured within steps, each with the part of its step that was done."""
        names = {"step": "step", "stage": "stage", "done": "done", "accuracy": "top1"}
        return [{new: line[old] for old, new in names.items()} for line in self.lines if "accuracy" in line]

    def make_result(self) -> Result:
        """The content of `result.json`."""
        plan, records = self.plan, self.records
        looks = self.list_looks()
        machine = {**plan.machine, **describe_hardware(self.learner.device_)}
        return {
            "format": 1,
            **{name: value for name, value in plan.settings.items() if name != "data"},  # it is in `resolved`
            "machine": {**machine, "engine": self.learner.engine_used_ if self.trained else None},
            "versions": list_versions(),
            "average_incremental_accuracy": float(np.mean([r["top1"] for r in records])),
            "average_incremental_accuracy_top5": float(np.mean([r["top5"] for r in records])),
            "final": {k: records[-1][k] for k in ("top1", "top5", "base", "new")},
            "forgetting": forgetting([r["by_step"] for r in records]),
            "alpha": self.learner.alphas_,
            "steps": records,
            **({"looks": looks} if looks else {}),
            "confusion": self.confusion.tolist(),
            "resolved": plan.describe_stages(),
            "reused": self.reused,
            "seconds": round(sum(r["seconds"] for r in records), 3),
        }
