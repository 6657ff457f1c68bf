"""One run: a method on a data set under a protocol, from settings to `result.json`; resumable and idempotent."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from . import checkpoint, record
from .data import Images, class_order, step_sizes
from .datasets import Dataset, load, split
from .errors import DataError, check
from .evaluate import confusion_matrix, forgetting, summary
from .folder import Result, agree, locked, read_result
from .inputs import image_shape
from .learner import Learner
from .losses import Standard
from .machine import hardware, versions
from .memory import Budget
from .method import Method, Recipe
from .methods.il_baseline import ILBaseline
from .store import UNKNOWN, Store, keys, method_code
from .watch import Watch


@dataclass(frozen=True)
class Run:
    """Everything that determines a result. The same object is the flags, the record and the cache key."""

    method: Method = field(default_factory=ILBaseline)
    """how to learn"""
    dataset: str = "cifar100"
    """digits (embedded) or cifar100"""
    base: int | None = None
    """classes of the base step; half of all if none are named"""
    steps: int | None = None
    """steps after the base step; 5 if neither this nor --increment is given"""
    increment: int | None = None
    """classes of each step after the base step, instead of --steps"""
    order: str = "1993"
    """order of the classes: a NumPy seed, `natural`, or a file that lists the labels"""
    validation: float = 0.0
    """fraction of the training images of every class to set aside and measure on, instead of the test images"""
    memory: str = "20"
    """exemplars kept: 20 of every class, total:2000 in all, or 0"""
    select: Literal["herding", "random"] = "herding"
    """how exemplars are chosen"""
    recipe: Recipe | None = None
    """how to optimise; None for the method's own recipe"""
    seed: int = 0
    """of weights, batches, augmentation and everything else that is random"""
    device: str = "auto"
    """auto, cpu or cuda"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""
    engine: Literal["auto", "fused", "compiled", "captured", "eager"] = "auto"
    """how training steps are launched, which changes only their speed: auto is fused on a GPU, eager on a CPU"""


@dataclass(frozen=True)
class Plan:
    """A run made definite: the data in learning order, the steps, and one learner with all settings resolved."""

    run: Run
    """what was asked for"""
    data: Dataset
    """as it was loaded"""
    train: Images
    """on the device; labels are positions in the learning order"""
    test: Images
    """likewise; of a run with validation, the images that were set aside"""
    order: list[int]
    """the data set's labels in learning order"""
    sizes: tuple[int, ...]
    """classes of each step"""
    learner: Learner
    """with nothing learned yet"""
    settings: dict[str, Any]
    """everything that determines the result, as it is recorded"""

    def edges(self, t: int) -> tuple[int, int]:
        """N_{t-1} and N_t."""
        return sum(self.sizes[:t]), sum(self.sizes[: t + 1])

    def keys(self) -> list[str]:
        """The key of the state after each step."""
        s = self.settings
        counts = torch.bincount(self.train.of(0, self.sizes[0]).y)
        equal = bool((counts == counts[0]).all())
        # Equal counts make every λ equal, so in the base step only the rest of the method matters.
        at_base = replace(self.run.method, loss=Standard()) if equal else self.run.method
        always = {k: s[k] for k in ("seed", "device", "precision", "recipe", "method_code")} | {
            # The order in which a CPU adds depends on how many threads it adds with.
            "threads": torch.get_num_threads() if s["device"] == "cpu" else None,
            "data": self.data.fingerprint,
            "augment": record.describe(self.data.augment),
            "normalise": [self.data.mean, self.data.std],
        }
        if s["validation"]:  # else not even its name: the keys are what they were before there was this setting
            always["validation"] = s["validation"]
        base = {"method": record.describe(at_base)}
        later = {"method": record.describe(self.run.method), "memory": s["memory"], "select": s["select"]}
        brought = [self.order[slice(*self.edges(t))] for t in range(len(self.sizes))]
        return list(keys(always, base, later, brought))

    def images_to_train(self) -> list[int]:
        """How many images each step trains on, over all epochs: for the time left."""
        recipe, _ = self.learner.settings_for(image_shape(self.train.x))
        counts = torch.bincount(self.train.y).tolist()
        totals = []
        for t in range(len(self.sizes)):
            old, now = self.edges(t)
            kept = sum(min(self.learner.budget_.share(old), c) for c in counts[:old])
            totals.append(recipe.epochs * (sum(counts[old:now]) + kept))
        return totals


def prepare(run: Run, data: Path | None = None, progress: bool = True) -> Plan:
    """Check everything that can be checked before anything is computed, and load the data."""
    budget = Budget.parse(run.memory)
    check("seed", run.seed, least=0, whole=True)
    check("validation", run.validation, least=0, below=1)
    run = replace(run, seed=int(run.seed), validation=float(run.validation))
    _learner(run, budget)  # a bad setting is said before any data is looked for
    loaded = load(run.dataset, data, progress)
    classes = len(loaded.classes)
    order = class_order(run.order, classes)
    base = run.base if run.base is not None else classes // 2
    steps = 5 if run.steps is None and run.increment is None else run.steps
    sizes = step_sizes(classes, base, steps, run.increment)
    run.method.loss.check_memory(*(budget.share(sum(sizes[:t])) for t in range(1, len(sizes))))
    learner = _learner(run, budget, augment=loaded.augment, normalise=(loaded.mean, loaded.std))
    # Labels become positions in the learning order, in both sets: the classes seen so far are those below N_t.
    position = torch.empty(classes, dtype=torch.long)
    position[torch.tensor(order)] = torch.arange(classes)
    parts = split(loaded, run.validation, run.seed)
    train, test = (Images(part.x, position[part.y]).to(learner.device_) for part in parts)
    recipe, _ = learner.settings_for(image_shape(train.x))
    settings = {
        **record.flat(run.method),
        "method_code": method_code(run.method),
        "dataset": run.dataset,
        "base": base,
        "steps": len(sizes) - 1,
        "increment": sizes[1],
        "order": run.order,
        "class_order": order,
        "validation": run.validation,
        "memory": str(budget),
        "select": run.select,
        "seed": run.seed,
        "device": learner.device_.type,
        "precision": "bf16" if learner.bf16_ else "fp32",
        "recipe": record.describe(recipe),
        "augment": record.describe(loaded.augment),
        "normalise": [list(loaded.mean), list(loaded.std)],
        "data": loaded.fingerprint,
    }
    return Plan(run, loaded, train, test, order, sizes, learner, settings)


def _learner(run: Run, budget: Budget, **more: Any) -> Learner:
    same = {k: getattr(run, k) for k in ("select", "recipe", "seed", "device", "precision", "engine")}
    return Learner(run.method, budget, **same, **more)


def run(
    run: Run,
    out: str | Path,
    *,
    data: Path | None = None,
    store: Store | None = None,
    watch: Watch | None = None,
    checkpoint_every: float = 30.0,
    evaluate_every: int = 0,
) -> Result:
    """Do a run in the folder `out`, or go on with it, or return its recorded result.

    Args:
        run: the settings.
        out: the run's folder; it holds run.json, metrics.jsonl, result.json and the final model, whose labels are the
            data set's.
        data: where the data set lies, if it is not embedded.
        store: where steps are shared with other runs; None to share none.
        watch: who is told of the progress.
        checkpoint_every: seconds between checkpoints; 0 for one at every epoch.
        evaluate_every: epochs between looks at the test (or validation) images on the way, for metrics.jsonl (of
            steps that are trained here, not of reused ones); 0 for none.
    """
    check("checkpoint", checkpoint_every, least=0)
    check("evaluate-every", evaluate_every, least=0, whole=True)
    watch = watch or Watch()
    folder = Path(out)
    plan = prepare(run, data)
    if store is not None and plan.settings["method_code"] == UNKNOWN:
        watch.say("steps are not shared: the source of the method is not in a file")
        store = None
    if store is not None:
        store.open()
    with locked(folder):
        agree(folder, plan.settings)
        recorded = folder / "result.json"
        if recorded.is_file():
            return read_result(folder)
        for inside in (folder, folder / "checkpoint", folder / "model"):
            for left in inside.glob(f".*{checkpoint.PARTIAL}"):
                left.unlink(missing_ok=True)
        checkpoint.write_json(folder / "run.json", plan.settings)
        attempt = Attempt(plan, folder, store, watch, checkpoint_every, evaluate_every)
        with attempt.hearing_ctrl_c():
            result = attempt.carry_out()
        plan.learner.rename(dict(enumerate(plan.order))).save(folder / "model")
        checkpoint.write_json(recorded, result)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        return result


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
        self.trained = self.told = self.stopping = self.training = False

    def carry_out(self) -> Result:
        """All steps that are not done yet, then the result."""
        plan, learner = self.plan, self.learner
        if (self.folder / "checkpoint" / checkpoint.INFO).is_file():  # not so when the first one was cut off
            self.recall(learner.restore(self.folder / "checkpoint"))
        self.rewrite_metrics()
        self.watch.begin(plan.settings, plan.images_to_train())
        while len(self.records) < len(plan.sizes):
            if self.stopping:
                raise KeyboardInterrupt
            with self.turn():
                t = len(learner.sizes_) - 1 if learner.unfinished_ else len(learner.sizes_)
                began = time.perf_counter() - (self.lines[-1]["seconds"] if learner.unfinished_ else 0.0)
                step = plan.train.of(*plan.edges(t))
                self.training = True
                learner.learn(step.x, step.y, self.at_epoch_end, partial(self.tick, t))
                self.training = False
            accuracies = self.measure(t)
            seconds = round(time.perf_counter() - began, 3)
            spent = {"seconds": seconds, "training_seconds": self.lines[-1]["seconds"]}
            self.records.append({"step": t, "classes": plan.edges(t)[1], **accuracies, **spent})
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

    def tick(self, t: int, epochs: float) -> None:
        """Tell how far step t is, and that Ctrl-C was heard."""
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
                self.watch.say(f"computing a shared step again: {error}")
                self.store.drop(self.keys[t])
                continue
            # All of it, also of steps that this run did too: what follows belongs to that net and to no other.
            self.records, self.lines = note["records"], note["lines"]
            seconds = round(sum(r["seconds"] for r in self.records) + self.lines[-1]["seconds"], 3)
            self.reused = {"steps": [*range(t + 1)], "seconds": seconds, "key": self.keys[t]}
            self.rewrite_metrics()
            self.watch.reused(t, seconds)
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
                self.store.put(self.keys[e.step], lambda folder: learner.save(folder, note))
            except OSError as error:  # sharing is a convenience; the run goes on without
                self.watch.say(f"step {e.step} cannot be shared with other runs: {error}")
        self.watch.epoch(e)
        if self.stopping:
            self.save_checkpoint()
            raise KeyboardInterrupt

    def note(self) -> dict[str, Any]:
        """What goes on in a checkpoint besides the learner."""
        return {"records": self.records, "lines": self.lines, "reused": self.reused}

    def recall(self, note: dict[str, Any]) -> None:
        """The inverse of `note`."""
        self.records, self.lines, self.reused = note["records"], note["lines"], note["reused"]

    def save_checkpoint(self) -> None:
        """Save all that going on needs."""
        self.learner.save(self.folder / "checkpoint", self.note())
        self.saved = time.monotonic()

    def rewrite_metrics(self) -> None:
        """Epochs after the checkpoint are done again, so their lines go."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        checkpoint.write_file(self.folder / "metrics.jsonl", text.encode())

    def measure(self, t: int) -> dict[str, Any]:
        """Accuracies after step t, on the test (or validation) images of all classes so far."""
        _, now = self.plan.edges(t)
        test = self.plan.test.of(0, now)
        z = self.learner.logits(test.x)
        self.confusion = confusion_matrix(z, test.y, now)
        return summary(z, test.y, self.plan.sizes[: t + 1])

    def result(self) -> Result:
        """What `result.json` holds."""
        plan, records = self.plan, self.records
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
            "reused": self.reused,
            "seconds": round(sum(r["seconds"] for r in records), 3),
            "versions": versions(),
            "hardware": {**hardware(self.learner.device_), "engine": self.learner.engine_ if self.trained else None},
        }
