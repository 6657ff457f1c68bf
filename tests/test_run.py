"""A run: what it records, that the record is true, and what it shares with other runs."""

from __future__ import annotations

import copy
import fcntl
import functools
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.metrics import confusion_matrix
from squares import digits_of
from torch import Tensor

import equipoise
import equipoise.runs.plan
from equipoise import (
    LUCIR,
    NCM,
    SLDA,
    Balanced,
    BalancedFinetuning,
    ClassOversampling,
    DataError,
    Finetune,
    FineTuning,
    ILBaseline,
    Joint,
    Learner,
    MemoryOversampling,
    Meta,
    Method,
    Plan,
    PODNet,
    Recipe,
    Relaxed,
    Remedy,
    RunError,
    Stage,
    Standard,
    Step,
    UsageError,
    methods,
)
from equipoise.data import datasets
from equipoise.data.images import Images
from equipoise.engine import gpu
from equipoise.engine.train import Training
from equipoise.files import MANIFEST
from equipoise.methods.around import Around
from equipoise.remedies import REMEDIES
from equipoise.report.words import find_remedy
from equipoise.runs import environment
from equipoise.runs.command import name_folder
from equipoise.runs.environment import hash_code
from equipoise.runs.metrics import forgetting
from equipoise.runs.plan import Prepared, count_images, read_run, resolve
from equipoise.runs.plan import prepare as prepared
from equipoise.runs.progress import Watch, duration
from equipoise.runs.record import Result, read_result
from equipoise.runs.run import run as run_on
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.runs.shared_steps import SharedSteps
from equipoise.settings import to_plain
from equipoise.step import Stages

RECIPE = Recipe(epochs=3, lr=0.05, batch=32)
with digits_of(30):
    DIGITS = datasets.load("digits")

FIELDS = {
    *("average_incremental_accuracy", "average_incremental_accuracy_top5", "steps", "final", "forgetting", "format"),
    *("confusion", "class_order", "alpha", "run", "machine", "resolved", "reused", "versions", "seconds"),
}
STEP_FIELDS = {"step", "classes", "top1", "top5", "base", "new", "latest", "by_step", "training_mib"}
SECONDS = {f"{what}seconds" for what in ("", "training_", "preparing_", "refitting_", "evaluating_", "saving_")}
TIMES = SECONDS | {"images_per_second", "engine"}  # the engine is null where nothing was trained
CPU = Machine("cpu", "fp32")


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    with digits_of(30):
        yield


def small(
    remedy: Remedy | None = None, method: Method | None = None, recipe: Recipe = RECIPE, seed: int = 0, **more: Any
) -> Run:
    """A run of a second: 4 digits, then 3 times 2."""
    of_data = {k: more.pop(k) for k in ("validation", "brightness", "name") if k in more}
    protocol = Protocol(**{"base": 4, "steps": 3, "memory": "5", **more})
    data = Data(**{"name": "digits", **of_data})
    return Run(method or ILBaseline(remedy or Balanced()), data, protocol, recipe, seed)


def run(one: Run, out: Path, shared: SharedSteps | None = None, machine: Machine = CPU, **more: Any) -> Result:
    """A run on a CPU, which shares its steps in a folder."""
    watch = more.pop("watch", None)
    return run_on(one, out, machine, Options(store=shared.folder if shared else None, **more), watch)


def prepare(one: Run, machine: Machine = CPU) -> Prepared:
    return prepared(one, machine)


def keys_of(one: Run, machine: Machine = CPU) -> list[str]:
    """The keys of its steps."""
    keys = prepare(one, machine).compute_keys()
    assert all(keys)
    return [key or "" for key in keys]


def tensors(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(value: Any) -> Any:
    """All but the times."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def assert_same_run(one: Path, two: Path) -> None:
    """Weights, exemplars, accuracies, every epoch's loss: not a bit differs."""
    a, b = tensors(one / "model"), tensors(two / "model")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert timeless(metrics(one)) == timeless(metrics(two))
    results = (timeless(read_result(folder)) for folder in (one, two))
    assert len({json.dumps({k: v for k, v in r.items() if k != "reused"}, sort_keys=True) for r in results}) == 1


def entries(shared: SharedSteps) -> list[Path]:
    return sorted(p.parent for p in shared.folder.rglob("learner.json"))


class Ear(Watch):
    """Hears what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.reuse: list[str] = []
        self.trained: list[tuple[int, int]] = []
        self.steps: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        (self.reuse if "reused from the store" in text else self.said).append(text)

    def end_epoch(self, e: Any) -> None:
        self.trained.append((e.step, e.epoch))

    def end_step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SharedSteps, dict[str, Any]]:
    """A finished run, the store it filled, and what it returned."""
    folder = tmp_path_factory.mktemp("done")
    store = SharedSteps(folder / "store")
    return folder / "run", store, run(small(), folder / "run", shared=store)


Done = tuple[Path, SharedSteps, dict[str, Any]]

# The record


def test_the_result_has_the_documented_fields(done: Done) -> None:
    folder, _, returned = done
    result = json.loads((folder / "result.json").read_text())
    assert result == returned
    assert set(result) == FIELDS
    assert [set(step) for step in result["steps"]] == [STEP_FIELDS | SECONDS] * 4
    assert set(result["final"]) == {"top1", "top5", "base", "new"}
    assert [(s["step"], s["classes"]) for s in result["steps"]] == [(0, 4), (1, 6), (2, 8), (3, 10)]
    assert result["steps"][0]["new"] is None and all(s["new"] is not None for s in result["steps"][1:])
    assert all(s["seconds"] > 0 for s in result["steps"])
    assert result["seconds"] == pytest.approx(sum(s["seconds"] for s in result["steps"]), abs=0.01)
    assert result["alpha"] == [None] * 4 and result["reused"] is None
    assert result["versions"].keys() >= {"equipoise", "code", "python", "torch", "numpy"}
    machine = result["machine"]
    where = {"device": "cpu", "precision": "fp32", "threads": 1, "engine": "eager"}
    assert {name: machine[name] for name in where} == where and machine["cpu"] and result["format"] == 1
    assert result["run"] == {
        "method": {
            **{"name": "il-baseline", "remedy": {"name": "balanced", "alpha": 1.0}},
            **{"T": 2.0, "weights": "rho", "distil": "together"},
        },
        "data": {"name": "digits", "validation": 0.0, "brightness": 0.0},
        "protocol": {"base": 4, "steps": 3, "order": "1993", "memory": "5", "select": "herding"},
        "recipe": {**vars(RECIPE), "milestones": [0.4, 0.6, 0.8]},
        "seed": 0,
    }
    assert json.loads((folder / "run.json").read_text()) == {
        "data": result["resolved"]["data"],
        **{name: result[name] for name in ("run", "class_order")},
        "machine": {"device": "cpu", "precision": "fp32"},
    }
    resolved = result["resolved"]
    assert resolved.keys() == {"data", "normalise", "augment", "stages"} and resolved["data"] == DIGITS.fingerprint
    assert resolved["augment"] == {"pad": 1, "flip": False, "brightness": 0.0}
    (stages,) = resolved["stages"]
    assert stages["from"] == 0 and stages["stages"][1:] == ["choose"]
    assert stages["stages"][0]["name"] == "train" and stages["stages"][0]["recipe"] == result["run"]["recipe"]
    ids = np.arange(10)
    np.random.RandomState(1993).shuffle(ids)
    assert result["class_order"] == ids.tolist()


def test_the_accuracies_are_true(done: Done) -> None:
    """Every number again, from the nets that were saved and the test images alone."""
    folder, store, result = done
    position = np.argsort(result["class_order"])
    x, y = DIGITS.test.x.numpy(), position[DIGITS.test.y.numpy()]
    keys = keys_of(small())
    top1, by_step = [], []
    for t, now in enumerate((4, 6, 8, 10)):
        learner = Learner.load(store.find_entry(keys[t]))  # as it was when step t had been trained
        assert learner.classes_ == list(range(now))
        z = learner.logits(x[y < now]).numpy()
        seen = y[y < now]
        right = z.argmax(1) == seen
        five = np.argsort(-z, 1)[:, :5] == seen[:, None]
        record = result["steps"][t]
        old = max(4, now - 2) if t else 0
        assert record["top1"] == pytest.approx(100 * right.mean())
        assert record["top5"] == pytest.approx(100 * five.any(1).mean())
        assert record["base"] == pytest.approx(100 * right[seen < 4].mean())
        assert record["latest"] == pytest.approx(100 * right[seen >= old].mean())
        if t:
            assert record["new"] == pytest.approx(100 * right[seen >= 4].mean())
        top1.append(record["top1"])
        edges = [(0, 4), (4, 6), (6, 8), (8, 10)][: t + 1]
        by_step.append([100 * right[(seen >= a) & (seen < b)].mean() for a, b in edges])
        np.testing.assert_allclose(record["by_step"], by_step[-1])
    assert result["average_incremental_accuracy"] == pytest.approx(sum(top1) / 4)
    assert result["average_incremental_accuracy_top5"] == pytest.approx(sum(s["top5"] for s in result["steps"]) / 4)
    assert result["final"] == {k: result["steps"][-1][k] for k in ("top1", "top5", "base", "new")}
    lost = [max(row[j] for row in by_step[j:3]) - by_step[3][j] for j in range(3)]
    assert result["forgetting"] == pytest.approx(sum(lost) / 3)

    final = Learner.load(folder / "model")
    assert not final.unfinished_ and final.sizes_ == (4, 2, 2, 2)
    order = result["class_order"]
    assert final.classes_ == order  # the model speaks in the data set's labels
    predicted = np.array([order.index(label) for label in final.predict(x)])
    assert result["final"]["top1"] == pytest.approx(100 * (predicted == y).mean())
    np.testing.assert_array_equal(result["confusion"], confusion_matrix(y, predicted, labels=range(10)))
    assert 100 * np.trace(result["confusion"]) / len(y) == pytest.approx(result["final"]["top1"])
    assert final.exemplars_ is not None and final.exemplars_.y.tolist() == [c for c in range(10) for _ in range(5)]


def test_forgetting_is_against_the_best_before_the_last_step() -> None:
    assert forgetting([[90.0], [95.0, 80.0], [70.0, 85.0, 60.0]]) == pytest.approx(((95 - 70) + (80 - 85)) / 2)
    assert forgetting([[50.0], [60.0, 80.0]]) == -10
    assert forgetting([[50.0]]) is None


def test_metrics_have_a_line_per_epoch(done: Done) -> None:
    lines = metrics(done[0])
    assert [(m["step"], m["epoch"]) for m in lines] == [(t, e) for t in range(4) for e in (1, 2, 3)]
    assert {m["epochs"] for m in lines} == {3} and {m["stage"] for m in lines} == {"train"}
    np.testing.assert_allclose([m["done"] for m in lines], [1 / 3, 2 / 3, 1] * 4, atol=1e-6)
    # Milestones 0.4, 0.6 and 0.8 of 3 epochs: after epochs 1, 2 and 2.
    np.testing.assert_allclose([m["lr"] for m in lines], [0.05, 0.005, 0.0005 / 10] * 4, atol=1e-9)
    for t in range(4):
        seconds = [m["seconds"] for m in lines if m["step"] == t]
        assert 0 < seconds[0] < seconds[1] < seconds[2] <= done[2]["steps"][t]["seconds"]
    assert all(m["images_per_second"] > 0 and m["loss"] > 0 and m["alpha"] is None for m in lines)


def test_meta_records_its_alpha(tmp_path: Path) -> None:
    """One step of 6 classes: more updates of α in an epoch than B_t has batches."""
    result = run(small(Meta(every=4), steps=1), tmp_path)
    assert result["alpha"][0] is None and result["alpha"][1] > 0 and result["alpha"][1] != 1
    alphas = [m["alpha"] for m in metrics(tmp_path)]
    assert alphas[:3] == [None] * 3 and alphas[-1] == pytest.approx(result["alpha"][1], abs=1e-6)
    assert len(set(alphas[3:])) > 1
    assert result["run"]["method"]["remedy"] == {
        **{"name": "meta", "alpha_lr": 10.0, "every": 4, "hold_out": 0.1, "count": "train"}
    }


def test_a_finished_folder_holds_no_leftovers(done: Done) -> None:
    ours = {".lock", MANIFEST, "run.json", "metrics.jsonl", "result.json", "model"}
    assert {p.name for p in done[0].iterdir()} == ours


def test_a_watch_hears_of_every_epoch_and_step(tmp_path: Path) -> None:
    ear = Ear()
    result = run(small(steps=1), tmp_path, watch=ear)
    assert ear.trained == [(t, e) for t in (0, 1) for e in (1, 2, 3)]
    assert ear.steps == result["steps"] and ear.said == [] and ear.reuse == []


def test_looking_at_the_test_images_on_the_way_changes_nothing(done: Done, tmp_path: Path) -> None:
    result = run(small(), tmp_path, evaluate_every=2)
    lines = metrics(tmp_path)
    assert [(m["step"], m["epoch"]) for m in lines if "accuracy" in m] == [(t, 2) for t in range(4)]
    every = run(small(), tmp_path / "every", evaluate_every=1)
    accuracies = [m["accuracy"] for m in metrics(tmp_path / "every")]
    assert accuracies[2::3] == [step["top1"] for step in every["steps"]]
    for folder, one, often in ((tmp_path, result, 1), (tmp_path / "every", every, 3)):
        looks = one.pop("looks")
        assert [look["step"] for look in looks] == [t for t in range(4) for _ in range(often)]
        assert timeless(one) == timeless(done[2])
        mine, theirs = tensors(folder / "model"), tensors(done[0] / "model")
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# The same folder


def test_the_same_run_again_comes_from_the_record(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it trains again")

    monkeypatch.setattr("equipoise.learner.fit", refuse)
    before = {p: p.stat().st_mtime_ns for p in done[0].rglob("*") if p.name != ".lock"}
    for store in (None, done[1]):
        assert run(small(), done[0], shared=store) == done[2]
    assert {p: p.stat().st_mtime_ns for p in done[0].rglob("*") if p.name != ".lock"} == before


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (small(seed=1), ["seed (there 0, here 1)"]),
        (small(memory="6"), ["protocol.memory (there 5, here 6)"]),
        (
            small(memory="total:5", select="random"),
            ["protocol.memory (there 5, here total:5)", "protocol.select (there herding, here random)"],
        ),
        (small(Balanced(0.5)), ["method.remedy.alpha (there 1.0, here 0.5)"]),
        (
            small(Relaxed()),
            [
                "method.remedy.alpha (there 1.0, here None)",
                "method.remedy.epsilon (there None, here 0.2%)",
                "method.remedy.name (there balanced, here relaxed)",
            ],
        ),
        (small(recipe=replace(RECIPE, lr=0.04)), ["recipe.lr (there 0.05, here 0.04)"]),
        (
            small(order="natural"),
            [
                "class_order (there [4, 2, 7, 6, 0, 3, 5, 8, 9, 1], here [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])",
                "protocol.order (there 1993, here natural)",
            ],
        ),
        (small(steps=2), ["protocol.steps (there 3, here 2)"]),
        (small(validation=0.5), ["data.validation (there 0.0, here 0.5)"]),
        (small(method=ILBaseline(Balanced(), T=3.0)), ["method.T (there 2.0, here 3.0)"]),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(other: Run, differ: list[str], done: Done) -> None:
    before = {p: p.read_bytes() for p in done[0].rglob("*") if p.is_file()}
    with pytest.raises(RunError) as error:
        run(other, done[0])
    words = str(error.value)
    assert str(done[0]) in words and "another --out" in words
    named = words.split("other settings: ")[1].split(";")[0]
    for name in differ:
        assert name in named
        named = named.replace(name, "")
    assert named.strip(", ") == "", "a setting is named that does not differ"
    assert {p: p.read_bytes() for p in done[0].rglob("*") if p.is_file()} == before


def test_settings_that_are_spelled_differently_agree(done: Done) -> None:
    assert run(small(memory="05", order=1993, validation=0, seed=np.int64(0)), done[0]) == done[2]


class StopError(Exception):
    pass


class Stop(Watch):
    """Stops a run at an epoch of a step."""

    def __init__(self, step: int, epoch: int) -> None:
        self.at = (step, epoch)

    def end_epoch(self, e: Any) -> None:
        if (e.step, e.epoch) == self.at:
            raise StopError


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a run that was stopped in its second step."""
    with pytest.raises(StopError):
        run(small(), tmp_path / "stopped", watch=Stop(1, 1))
    return tmp_path / "stopped"


def test_where_it_is_computed_matters_only_while_it_is_computed(stopped: Path, done: Done) -> None:
    half = Machine("cpu", "bf16")
    with pytest.raises(RunError, match=r"other settings: precision \(there fp32, here bf16\); choose another --out"):
        run(small(), stopped, machine=half)
    with pytest.raises(RunError, match=r"settings: seed \(there 0, here 1\), precision \(there fp32, here bf16\);"):
        run(small(seed=1), stopped, machine=half)
    recorded = json.loads((stopped / "run.json").read_text())
    recorded["machine"]["device"] = "cuda"
    (stopped / "run.json").write_text(json.dumps(recorded))
    with pytest.raises(RunError, match="is of a run on a GPU: use --device cuda where there is one"):
        run(small(), stopped)
    assert run(small(), done[0], machine=half) == done[2], "what is recorded is returned anywhere"


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=f"another process is using {tmp_path}.*--out"):
            run(small(), tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {".lock"}


def test_the_lock_is_held_while_a_run_works(tmp_path: Path) -> None:
    refused = []

    class Intruder(Watch):
        def end_epoch(self, e: Any) -> None:
            with pytest.raises(RunError, match="another process"):
                run(small(steps=1), tmp_path)
            refused.append(e)

    run(small(steps=1), tmp_path, watch=Intruder())
    assert len(refused) == 6


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        run(small(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


BROKEN = ("", "{", "[1]", "null", '{"steps": []}', '{"format": 1}', '{"format": 2}')


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_record_is_named_and_kept(text: str, done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder)
    (folder / "result.json").write_text(text)
    with pytest.raises(DataError, match=str(folder / "result.json")):
        run(small(), folder)
    assert (folder / "result.json").read_text() == text


@pytest.mark.parametrize("text", BROKEN)
def test_broken_settings_of_a_run_that_goes_on_are_named_and_kept(text: str, stopped: Path) -> None:
    (stopped / "run.json").write_text(text)
    with pytest.raises(DataError, match=str(stopped / "run.json")):
        run(small(), stopped)
    assert (stopped / "run.json").read_text() == text


@pytest.mark.parametrize(
    "part",
    [
        "format",
        "run",
        "machine",
        "final",
        "steps",
        "confusion",
        "class_order",
        "alpha",
        "run.method",
        "run.data",
        "run.protocol",
        "run.recipe",
    ],
)
def test_a_result_without_a_part_is_named(part: str, done: Done, tmp_path: Path) -> None:
    result = json.loads((done[0] / "result.json").read_text())
    *outer, last = part.split(".")
    del (result[outer[0]] if outer else result)[last]
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(DataError, match=f"{tmp_path / 'result.json'} is not"):
        read_result(tmp_path)


def test_reading_a_result_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name the folder of a run"):
        read_result(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match="not finished"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"name": "digit"}, "did you mean 'digits'"),
        ({"base": 10}, "--base 10 must be from 2 to 9"),
        ({"steps": 4}, "--steps 4 does not divide the 6 classes"),
        ({"memory": "lots"}, "memory must be a number"),
        ({"select": "best"}, "select"),
        ({"order": "no-such-file"}, "--order no-such-file"),
        ({"seed": -1}, "seed must be .*0 or more, not -1"),
        ({"validation": 1.0}, "validation must be .*below 1, not 1"),
        ({"brightness": 2.0}, "brightness"),
        ({"remedy": Meta(), "memory": "1"}, "meta needs at least 2 image.*keeps 1: raise --memory"),
        ({"remedy": Meta(), "memory": "total:15"}, "meta needs at least 2 image.*keeps 1: raise --memory"),
        ({"remedy": Relaxed(0)}, "epsilon 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(bad: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run(small(**bad), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("machine", "message"), [(("tpu",), "device"), (("cpu", "half"), "precision"), (("cpu", "fp32", "steam"), "engine")]
)
def test_a_bad_machine_is_refused_before_anything_is_made(
    machine: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"{message} .*not '{machine[-1]}'"):
        run(small(), tmp_path / "out", machine=Machine(*machine))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [{"checkpoint": -1.0}, {"evaluate_every": -1}, {"evaluate_every": 1.5}], ids=str)
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        Options(**bad)


# Shared prefixes


def key(one: Run, t: int = 0) -> str:
    return keys_of(one)[t]


def test_one_base_step_serves_all_losses_and_protocols() -> None:
    runs = [
        *(small(loss) for loss in (Standard(), Balanced(), Balanced(0.5), Relaxed(), Relaxed(3), Meta(), Meta(2.0))),
        *(small(steps=steps) for steps in (1, 2, 6)),
        *(small(memory=memory) for memory in ("0", "20", "total:40")),
        small(select="random"),
    ]
    assert len({key(one) for one in runs}) == 1
    # The later steps are their own.
    after = [key(one, 1) for one in runs]
    assert len(set(after[:7])) == 7 and len(set(after[7:])) == 7 and set(after[:7]) & set(after[7:]) == set()


def test_what_changes_the_base_step_is_not_shared(tmp_path: Path) -> None:
    others = [
        small(seed=1),
        small(order="1"),
        small(base=5, steps=5),
        small(validation=0.1),
        small(brightness=0.25),
    ]
    recipe: dict[str, Any] = {"epochs": 4, "lr": 0.04, "milestones": (0.5,), "decay": 0.5, "batch": 31}
    recipe |= {"momentum": 0.8, "weight_decay": 0.0, "clamp": 1.0, "schedule": "cosine", "last": "short"}
    assert recipe.keys() == vars(RECIPE).keys()
    others += [small(recipe=replace(RECIPE, **{k: v})) for k, v in recipe.items()]
    keys = {key(small()), keys_of(small(), Machine("cpu", "bf16"))[0], *map(key, others)}
    assert len(keys) == 2 + len(others)
    # The same order, said in another way, is the same.
    (tmp_path / "order").write_text(" ".join(map(str, prepare(small()).order)))
    assert keys_of(small(order=str(tmp_path / "order"))) == keys_of(small())


def test_what_changes_later_steps_splits_from_there() -> None:
    mine = keys_of(small())
    assert len(set(mine)) == 4
    for other in (small(Balanced(0.5)), small(memory="6"), small(select="random"), small(Standard())):
        theirs = keys_of(other)
        assert theirs[0] == mine[0] and not set(theirs[1:]) & set(mine[1:])


def unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the digits have 40 images less of the first class of the order."""
    first = prepare(small()).order[0]
    keep = torch.ones(len(DIGITS.train), dtype=torch.bool)
    keep[(DIGITS.train.y == first).nonzero()[:40, 0]] = False
    train = Images(DIGITS.train.x[keep], DIGITS.train.y[keep])
    data = replace(DIGITS, train=train, fingerprint="unequal")
    monkeypatch.setattr(equipoise.runs.plan, "load", lambda *_, **__: data)


def test_unequal_counts_are_not_shared_across_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = SharedSteps(tmp_path / "store")
    short = replace(RECIPE, epochs=1)
    remedies = (Standard(), Balanced())
    for remedy in remedies:
        run(small(remedy, steps=1, recipe=short), tmp_path / f"equal-{remedy.name}", shared=store)
    equal = [tensors(store.find_entry(key(small(remedy, steps=1, recipe=short)))) for remedy in remedies]
    assert len(entries(store)) == 3

    unequal(monkeypatch)
    keys = [key(small(remedy, steps=1, recipe=short)) for remedy in remedies]
    assert len(set(keys)) == 2 and key(small(Standard(), steps=2, recipe=short)) == keys[0]
    for remedy in remedies:
        assert run(small(remedy, steps=1, recipe=short), tmp_path / remedy.name, shared=store)["reused"] is None
    assert len(entries(store)) == 7
    # And that is right: with these counts the remedies differ, with equal ones they do not.
    standard, balanced = (tensors(store.find_entry(k)) for k in keys)
    assert not torch.equal(standard["live.net.head.weight"], balanced["live.net.head.weight"])
    assert torch.equal(equal[0]["live.net.head.weight"], equal[1]["live.net.head.weight"])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(small(), id="same"),
        pytest.param(small(Standard()), id="standard"),
        pytest.param(small(Relaxed()), id="relaxed"),
        pytest.param(small(Meta(every=5)), id="meta"),
        pytest.param(small(steps=2, memory="total:30"), id="other steps and memory"),
        pytest.param(small(memory="0"), id="no memory"),
    ],
)
def test_a_run_from_a_reused_prefix_is_bit_identical(other: Run, done: Done, tmp_path: Path) -> None:
    ear = Ear()
    shared = run(other, tmp_path / "shared", shared=done[1], watch=ear)
    alone = run(other, tmp_path / "alone")
    assert alone["reused"] is None
    steps = list(range(4)) if other == small() else [0]
    trained = [(t, e) for t in range(len(shared["steps"])) if t not in steps for e in (1, 2, 3)]
    assert ear.trained == trained, "the prefix was trained again"
    assert shared["reused"]["steps"] == steps
    # The seconds are those of the run that did it, on which these steps are recorded as well.
    spent = sum(s["seconds"] for s in read_result(done[0])["steps"] if s["step"] in steps[:-1])
    spent += next(m["seconds"] for m in metrics(done[0]) if m["epoch"] == 3 and m["step"] == steps[-1])
    assert shared["reused"]["seconds"] == pytest.approx(spent, abs=0.01) and shared["reused"]["seconds"] > 0
    took = duration(shared["reused"]["seconds"])
    assert ear.reuse == [f"steps 0 to {steps[-1]} reused from the store (they had taken {took})"]
    assert all(s["seconds"] > 0 for s in shared["steps"])
    assert_same_run(tmp_path / "shared", tmp_path / "alone")
    assert read_result(tmp_path / "shared") == shared


def test_a_run_fills_the_store_with_each_step_once(tmp_path: Path) -> None:
    store = SharedSteps(tmp_path / "store")
    assert run(small(), tmp_path / "one", shared=store)["reused"] is None
    assert [p.name for p in entries(store)] == sorted(keys_of(small()))
    run(small(Standard()), tmp_path / "two", shared=store)
    assert len(entries(store)) == 4 + 3
    before = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*") if p.is_file()}
    run(small(), tmp_path / "three", shared=store)
    assert {p: p.stat().st_mtime_ns for p in store.folder.rglob("*") if p.is_file()} == before


def test_without_a_store_nothing_is_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run(small(steps=1), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "no tensors", "broken json", "no learner"])
def test_a_corrupt_entry_is_computed_again_and_said(damage: str, done: Done, tmp_path: Path) -> None:
    store = SharedSteps(tmp_path / "store")
    run(small(), tmp_path / "one", shared=store)
    keys = keys_of(small())
    for t in (3, 1):  # the longest prefix and one in between; step 2 is good
        entry = store.find_entry(keys[t])
        (file,) = entry.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif damage == "truncated":
            file.write_bytes(data[: len(data) // 2])
        elif damage == "no tensors":
            file.unlink()
        else:
            (entry / "learner.json").write_text("{" if damage == "broken json" else "{}")
    ear = Ear()
    result = run(small(), tmp_path / "two", shared=store, watch=ear)
    assert len(ear.said) == 1 and "again" in ear.said[0] and keys[3] in ear.said[0]
    assert result["reused"]["steps"] == [0, 1, 2] and {t for t, _ in ear.trained} == {3}
    assert_same_run(tmp_path / "two", done[0])
    assert Learner.load(store.find_entry(keys[3])).sizes_ == (4, 2, 2, 2)


def test_a_shared_step_of_another_key_is_not_used(tmp_path: Path) -> None:
    """Whoever put it there: its name says one thing and its note another."""
    store = SharedSteps(tmp_path / "store")
    run(small(steps=1), tmp_path / "one", store)
    (here, *_), (there, *_) = keys_of(small(steps=1)), keys_of(small(steps=1, seed=1))
    shutil.copytree(store.find_entry(here), store.find_entry(there))
    ear = Ear()
    result = run(small(steps=1, seed=1), tmp_path / "two", store, watch=ear)
    assert len(ear.said) == 1 and "again" in ear.said[0] and here in ear.said[0] and there in ear.said[0]
    assert result["reused"] is None and ear.trained == [(t, e) for t in range(2) for e in (1, 2, 3)]
    run(small(steps=1, seed=1), tmp_path / "alone")
    assert_same_run(tmp_path / "two", tmp_path / "alone")
    note = json.loads((store.find_entry(there) / "learner.json").read_text())["note"]
    assert note["key"] == there, "it was dropped, and computed again"


@pytest.mark.parametrize("note", [None, {}, {"key": 3}, "key", []], ids=str)
def test_a_shared_step_without_its_key_is_not_used(note: Any, tmp_path: Path) -> None:
    store = SharedSteps(tmp_path / "store")
    first, *_ = keys_of(small(steps=1))
    run(small(Standard(), steps=1), tmp_path / "one", store)
    file = store.find_entry(first) / "learner.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "note": note}))
    ear = Ear()
    assert run(small(steps=1), tmp_path / "two", store, watch=ear)["reused"] is None
    assert len(ear.said) == 1 and "computing a shared step again" in ear.said[0]


# What the key of a shared step is made of

SOURCES = ["engine/train", "losses", "step", "learner/step", "data/images", "nets/heads"]
"""files whose code computes"""
Keys = dict[str, list[str]]


def change_words(path: Path) -> None:
    """Change comments, docstrings and empty lines: nothing that is computed."""
    text = re.sub(r'^( *)"""(?=.)', r'\n\1"""More words. ', path.read_text(), flags=re.M)
    path.write_text(re.sub(r"^(.* -> .*:)$", r"\1  # one more comment", f"# {path.name}\n{text}", flags=re.M))


def change_code(path: Path) -> None:
    with path.open("a") as f:
        f.write("ONE_MORE = 1\n")


def keys_in(package: Path, patch: pytest.MonkeyPatch) -> Keys:
    """The keys of runs where the source is read from this copy of the package."""
    here = Path(equipoise.__file__).parent

    def getfile(kind: type) -> str:
        file = Path(inspect.getfile(kind))
        return str(package / file.relative_to(here) if file.is_relative_to(here) else file)

    patch.setattr(environment, "__file__", str(package / "runs" / "environment.py"))
    patch.setattr(environment, "inspect", types.SimpleNamespace(getfile=getfile))
    hash_code.cache_clear()
    runs = [brief(method, Recipe(epochs=1)) for method in (LUCIR(), ILBaseline(), ILBaseline(Balanced()))]
    return {one.method.name + one.method.remedy.name: keys_of(one) for one in runs}


@pytest.fixture(scope="module")
def keys_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    """The keys of runs by the package's source as it is, with other words in all files, with other code in one, or in
    those that compute nothing."""
    folder = tmp_path_factory.mktemp("source")
    names = ["as it is", "words", "nothing", "methods/lucir", *SOURCES]
    sources = {name: folder / name.replace("/", "-") for name in names}
    for name, source in sources.items():
        package = shutil.copytree(Path(equipoise.__file__).parent, source / "equipoise")
        if name == "nothing":
            (package / "methods" / "zzz.py").write_text(OUTSIDE.format(sign="").replace("outside", "zzz"))
            changed = [package / f"{name}.py" for name in ("runs/queue", "runs/workers", "files", "__main__")]
            rooms = [path for room in ("cli", "report", "paper") for path in sorted((package / room).glob("*.py"))]
            assert len(rooms) > 6
            for path in changed + rooms:
                change_code(path)
        elif name == "words":
            for path in package.rglob("*.py"):
                change_words(path)
        elif name != "as it is":
            change_code(package / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        keys = {name: keys_in(source / "equipoise", patch) for name, source in sources.items()}
    hash_code.cache_clear()
    plain = keys["as it is"]
    assert all(key for of_run in plain.values() for key in of_run)
    assert plain["il-baselinestandard"][0] == plain["il-baselinebalanced"][0] != plain["lucirstandard"][0]
    return keys


def test_what_computes_nothing_leaves_shared_steps_alone(keys_by: dict[str, Keys]) -> None:
    assert keys_by["nothing"] == keys_by["words"] == keys_by["as it is"]


@pytest.mark.parametrize("name", SOURCES)
def test_what_computes_changes_all_keys(name: str, keys_by: dict[str, Keys]) -> None:
    for of, before in keys_by["as it is"].items():
        assert not set(keys_by[name][of]) & set(before), of


def test_the_file_of_a_method_changes_its_own_keys(keys_by: dict[str, Keys]) -> None:
    keys, before = dict(keys_by["methods/lucir"]), dict(keys_by["as it is"])
    assert not set(keys.pop("lucirstandard")) & set(before.pop("lucirstandard"))
    assert keys == before


# The record, read back


def fits(method: type[Method], remedy: type[Remedy]) -> bool:
    return method.remedies is None or remedy.name in (*method.remedies, "standard")


ALL = [(m, r) for m in methods.find_built_in().values() for r in REMEDIES.values() if fits(m, r)]


def as_recorded(one: Run) -> Any:
    return json.loads(json.dumps(to_plain(one), allow_nan=False))


@pytest.mark.parametrize(("method", "remedy"), ALL, ids=lambda kind: kind.name)
def test_a_run_is_read_back_from_its_record(method: type[Method], remedy: type[Remedy]) -> None:
    made = method().with_remedy(remedy())
    given = Run(made, Data("digits", 0.1, 0.25), Protocol(4, 3, "natural", "total:30", "random"), RECIPE, 3)
    bare = Run(made, Data("digits"))
    for one in (given, bare, resolve(bare, 10, (1, 8, 8))):
        assert read_run(as_recorded(one)) == one
        plain = as_recorded(one)["method"]
        assert (plain["name"], find_remedy(plain)["name"]) == (method.name, remedy.name)
    assert None not in as_recorded(resolve(bare, 10, (1, 8, 8)))["protocol"].values()


def test_a_run_with_settings_of_its_own_is_read_back_from_its_record() -> None:
    for method in (
        LUCIR(Meta(0.5, 3, 0.25, "all"), K=3, m=0.25, finetune=Finetune(7, what="all", milestones=(0.25, 0.5))),
        ILBaseline(BalancedFinetuning(Finetune(3, distil=False)), T=3.0, distil="by-step"),
        ILBaseline(Relaxed(3)),
        ILBaseline(Relaxed("0.50%")),
    ):
        assert read_run(as_recorded(small(method=method))) == small(method=method)


def paths(plain: Any, *to: str) -> Iterator[tuple[str, ...]]:
    """The way to each field of a record."""
    for name, value in plain.items():
        yield (*to, name)
        if isinstance(value, dict):
            yield from paths(value, *to, name)


RECORDED = as_recorded(small(method=LUCIR(Balanced())))


@pytest.mark.parametrize("path", list(paths(RECORDED)), ids=".".join)
def test_a_missing_field_of_a_record_is_named(path: tuple[str, ...]) -> None:
    plain = copy.deepcopy(RECORDED)
    *outer, last = path
    inner = functools.reduce(lambda one, name: one[name], outer, plain)
    del inner[last]
    with pytest.raises(DataError, match=f"{last} is missing"):
        read_run(plain)


@pytest.mark.parametrize("path", [p for p in paths(RECORDED) if p[-1] != "name"], ids=".".join)
def test_an_unknown_field_of_a_record_is_named(path: tuple[str, ...]) -> None:
    plain = copy.deepcopy(RECORDED)
    *outer, last = path
    functools.reduce(lambda one, name: one[name], outer, plain)[f"{last}_of_old"] = 1
    with pytest.raises(DataError, match=f"{last}_of_old is unknown"):
        read_run(plain)


@pytest.mark.parametrize(("part", "near"), [("method", "lucyr"), ("method.remedy", "blanced"), ("method", None)])
def test_an_unknown_name_in_a_record_is_a_data_error_with_the_nearest(part: str, near: Any) -> None:
    plain: Any = copy.deepcopy(RECORDED)
    functools.reduce(lambda one, name: one[name], part.split("."), plain)["name"] = near
    with pytest.raises(DataError, match=f"'{near}'.*[cC]hoose from "):
        read_run(plain)


@pytest.mark.parametrize("value", [None, 3, "x", []], ids=str)
@pytest.mark.parametrize("part", ["", "method", "method.remedy", "data", "protocol"])
def test_a_record_of_another_shape_is_a_data_error(part: str, value: Any) -> None:
    plain: Any = copy.deepcopy(RECORDED)
    if part:
        *outer, last = part.split(".")
        functools.reduce(lambda one, name: one[name], outer, plain)[last] = value
    with pytest.raises(DataError):
        read_run(plain if part else value)
    if value is not None:  # None is the method's own
        with pytest.raises(DataError):
            read_run({**RECORDED, "recipe": value})


def test_what_is_not_among_the_choices_is_said_with_them() -> None:
    plain = copy.deepcopy(RECORDED)
    plain["protocol"]["select"] = "best"
    with pytest.raises(DataError, match="select is 'best', which is neither 'herding' nor 'random'"):
        read_run(plain)


def test_a_setting_that_cannot_be_is_a_data_error() -> None:
    for path, value in ((("seed",), -1), (("method", "K"), 0), (("recipe", "lr"), -1.0), (("data", "validation"), 2)):
        plain = copy.deepcopy(RECORDED)
        *outer, last = path
        functools.reduce(lambda one, name: one[name], outer, plain)[last] = value
        with pytest.raises(DataError, match=last):
            read_run(plain)


OWN = (
    *("steps", "memory", "seed", "base", "dataset", "order", "select", "device", "data", "augment"),
    *("name_of", "precision", "run", "machine", "protocol"),
)


def method_with(field: str) -> Any:
    """A user's method with a field of that name."""
    inside = {"name": f"with-{field}", "__module__": __name__}
    return make_dataclass(f"With_{field}", [(field, int, 1)], bases=(ILBaseline,), frozen=True, namespace=inside)


@pytest.mark.parametrize("field", OWN)
def test_a_field_of_a_method_is_taken_for_nothing_else(field: str, tmp_path: Path) -> None:
    kind = method_with(field)
    one, other = (small(method=kind(**{field: value}), steps=1) for value in (1, 2))
    assert as_recorded(one) != as_recorded(other)
    assert [read_run(as_recorded(a)) for a in (one, other)] == [one, other]
    assert name_folder(one) != name_folder(other)
    assert name_folder(one).startswith(f"with-{field}_standard_digits_memory-5_seed-0_")
    assert not set(keys_of(one)) & set(keys_of(other))
    result = run(replace(one, recipe=replace(RECIPE, epochs=1)), tmp_path)
    assert result["run"]["method"][field] == 1 and result["run"]["protocol"]["steps"] == 1
    with pytest.raises(RunError, match=rf"other settings: method\.{field} \(there 1, here 2\);"):
        run(replace(other, recipe=replace(RECIPE, epochs=1)), tmp_path)


def test_a_field_of_a_method_that_hides_a_function_is_refused() -> None:
    """Such as `recipe`, which every method has as a function."""
    with pytest.raises(UsageError, match="recipe"):
        Learner(method_with("recipe")())
    with pytest.raises(UsageError, match="recipe"):
        prepare(small(method=method_with("recipe")()))


# A user's method that derives from another

FAMILY = """
from dataclasses import dataclass
from equipoise import LUCIR

class Halved(LUCIR):
    def objective(self, s, b):
        return 0.5 * super().objective(s, b)

@dataclass(frozen=True)
class Deep(Halved):
    name = "lower"
    steps: int = 3
"""


def test_the_family_of_a_method_shares_steps_by_its_source(tmp_path: Path) -> None:
    module = module_of(tmp_path, "a_family", FAMILY)
    store = SharedSteps(tmp_path / "store")
    run(brief(LUCIR()), tmp_path / "lucir", store)
    for method, name in ((module.Halved(), "halved"), (module.Deep(), "lower"), (module.Deep(steps=5), "lower")):
        folder = tmp_path / f"{name}-{getattr(method, 'steps', 0)}"
        result = run(brief(method), folder / "first", store)
        assert result["reused"] is None and result["run"]["method"]["name"] == name
        again = run(brief(method), folder / "again", store)
        assert again["reused"]["steps"] == [0, 1] and again["confusion"] == result["confusion"]
        assert run(brief(method.with_remedy(Balanced())), folder / "other", store)["reused"]["steps"] == [0]
        assert read_run(result["run"]) == resolve(brief(method), 10, (1, 8, 8))
        assert Learner.load(folder / "first" / "model").method == method


class Own(ILBaseline):
    """Says itself what it shares."""

    def at_base(self) -> Method:
        return ILBaseline()


class Below(Own):
    pass


@pytest.mark.parametrize(("method", "shares"), [(Own(), True), (Own(Balanced()), True), (Below(), False)])
def test_what_a_method_says_of_its_base_step_holds_for_itself_alone(method: Method, shares: bool) -> None:
    mine, theirs = keys_of(small(method=method)), keys_of(small(method=ILBaseline()))
    assert (mine[0] == theirs[0]) is shares and not set(mine[1:]) & set(theirs)


# Exemplars, and the final model

LATER: dict[str, Method] = {
    "il-baseline": ILBaseline(Balanced()),
    "meta": ILBaseline(Meta(every=2)),
    "lucir": LUCIR(finetune=Finetune(2, batch=16)),
    "podnet": PODNet(finetune=Finetune(2, batch=16)),
    "balanced-finetuning": ILBaseline(BalancedFinetuning(Finetune(2, batch=16, distil=False))),
    "ncm": NCM(),
    "slda": SLDA(),
    "joint": Joint(),
}


def brought(plan: Prepared, t: int) -> tuple[Any, Any]:
    """The images and labels of a step, as a user has them."""
    mine = torch.tensor([plan.order.index(int(y)) for y in DIGITS.train.y])
    first, last = plan.edges(t)
    at = (mine >= first) & (mine < last)
    return DIGITS.train.x[at].numpy(), mine[at].tolist()


@pytest.mark.parametrize("memory", ["5", "total:30"])
@pytest.mark.parametrize("name", LATER)
def test_a_run_ends_where_a_learner_ends_that_is_given_the_images_by_hand(
    name: str, memory: str, tmp_path: Path
) -> None:
    one = small(method=LATER[name], memory="all" if name == "joint" else memory, recipe=replace(RECIPE, epochs=2))
    result = run(one, tmp_path)
    plan = prepare(one)
    settings: dict[str, Any] = {"recipe": one.recipe, "augment": plan.learner.augment, "precision": "fp32"}
    settings |= {"normalise": (DIGITS.mean, DIGITS.std), "device": "cpu"}
    by_hand = Learner(one.method, one.protocol.memory, **settings)
    for t in range(4):
        by_hand.learn(*brought(plan, t))
    assert by_hand.alphas_ == result["alpha"]
    by_hand.rename(dict(enumerate(plan.order))).save(tmp_path / "by hand")
    mine, theirs = tensors(tmp_path / "by hand"), tensors(tmp_path / "model")
    assert mine.keys() == theirs.keys() and "memory.x" in mine
    for tensor in mine:
        assert torch.equal(mine[tensor], theirs[tensor]), tensor
    assert Learner.load(tmp_path / "model").classes_ == by_hand.classes_


class Look(Watch):
    """Looks at each checkpoint, and stops at an epoch."""

    def __init__(self, folder: Path, *at: Any) -> None:
        self.folder, self.at, self.seen = folder, at, 0

    def end_epoch(self, e: Any) -> None:
        saved = tensors(self.folder / "checkpoint")
        assert not [name for name in saved if name in ("memory.x", "memory.y", "live.pixels")]
        assert ("memory.at" in saved) == (e.step > 0)
        assert ("live.chosen" in saved) == (e.stage == "refit")
        for name in ("memory.at", "live.chosen"):
            if name in saved:
                plan = prepare(small())
                classes = plan.edges(e.step - (name == "memory.at"))[1]
                assert plan.train.y[saved[name]].tolist() == [c for c in range(classes) for _ in range(5)]
        self.seen += 1
        if (e.step, e.stage, e.epoch) == self.at:
            raise StopError


@pytest.mark.parametrize("at", [(1, "train", 2), (2, "refit", 1)], ids=str)
def test_a_checkpoint_has_positions_and_the_final_model_pixels(at: Any, tmp_path: Path) -> None:
    one = small(method=ILBaseline(BalancedFinetuning(Finetune(2, batch=16))))
    with pytest.raises(StopError):
        run(one, tmp_path, watch=Look(tmp_path, *at), checkpoint=0.0)
    rest = Look(tmp_path)
    run(one, tmp_path, watch=rest, checkpoint=0.0)
    assert rest.seen > 3
    final = tensors(tmp_path / "model")
    assert "memory.at" not in final and final["memory.x"].dtype == torch.uint8
    assert final["memory.x"].shape == (50, 1, 8, 8)
    model = Learner.load(tmp_path / "model")
    assert model.exemplars_ is not None
    order = torch.tensor(model.classes_)
    pixels = {(int(y), x.numpy().tobytes()) for x, y in zip(DIGITS.train.x, DIGITS.train.y)}
    assert {(int(y), x.numpy().tobytes()) for x, y in zip(model.exemplars_.x, order[model.exemplars_.y])} <= pixels


@pytest.mark.parametrize("name", sorted(LATER.keys() - {"joint"}))
def test_the_final_model_learns_on(name: str, tmp_path: Path) -> None:
    """Without the data set: what it keeps is its own."""
    result = run(small(method=LATER[name], recipe=replace(RECIPE, epochs=2)), tmp_path)
    with digits_of(50):  # so many are told apart
        train = datasets.load("digits").train
    known = train.y < 2
    x, y = 255 - train.x[known], [("nought", "one")[label] for label in train.y[known]]
    learners = [Learner.load(tmp_path / "model") for _ in range(2)]
    for learner in learners:
        learner.recipe = replace(RECIPE, epochs=10)
        learner.learn(x, y)
    one, other = learners
    assert one.classes_ == [*result["class_order"], "nought", "one"] and one.sizes_ == (4, 2, 2, 2, 2)
    assert one.exemplars_ is not None and one.exemplars_.y.tolist() == [c for c in range(12) for _ in range(5)]
    assert torch.equal(one.logits(DIGITS.test.x), other.logits(DIGITS.test.x))
    if name == "il-baseline":
        assert (one.predict(x) == np.array(y, dtype=object)).mean() > 0.6, "of twelve classes"


# How many images there are to train on


class Doubled(ILBaseline):
    """An epoch has what is trained on, and all exemplars once more."""

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        return torch.cat([super().epoch(s, gen, batch), s.memory])


class Portions(ILBaseline):
    """Whole batches only, of what is new, which is half of it after the base step."""

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        new = s.where[s.y >= s.n_old]
        return new[torch.randperm(len(new), generator=gen)[: len(new) // batch * batch // (2 if s.t else 1)]]


class OnHeld(ILBaseline):
    """Stages on everything there is: what is held out, the memory before the choice and after it."""

    def hold(self, plan: Plan) -> int:
        return 2

    def stages(self, plan: Plan) -> Stages:
        train, choose = super().stages(plan)
        assert isinstance(train, Stage)
        brief = replace(train, recipe=replace(train.recipe, epochs=2))
        held, old, new = (replace(brief, name=name, images=images) for name, images in PARTS)
        return (train, held, old, choose, new) if plan.t else (train, held, choose)


PARTS: tuple[tuple[str, Any], ...] = (("on-held", "held"), ("on-old", "memory"), ("on-memory", "memory"))
BRIEF: dict[str, Any] = {"finetune": replace(PODNet().finetune, epochs=3)}
WORK: dict[str, tuple[Method, str]] = {
    **{name: (ILBaseline(kind()), "6") for name, kind in REMEDIES.items()},
    **{f"{name} of a budget": (ILBaseline(kind()), "total:50") for name, kind in REMEDIES.items()},
    **{f"podnet {r.name}": (PODNet(r(), **(BRIEF if r.keeps_finetuning else {})), "6") for m, r in ALL if m is PODNet},
    "lucir": (LUCIR(finetune=Finetune(3)), "6"),
    "lucir oversampling": (LUCIR(MemoryOversampling(0.75), finetune=Finetune(3)), "6"),
    "lucir without memory": (LUCIR(), "0"),
    "podnet without memory": (PODNet(), "0"),
    "podnet with less than one of each": (PODNet(**BRIEF), "total:7"),
    **{"ncm": (NCM(), "6"), "slda": (SLDA(), "0"), "joint": (Joint(), "all"), "fine-tuning": (FineTuning(), "0")},
    **{"doubled": (Doubled(), "6"), "portions": (Portions(), "6"), "held": (OnHeld(), "6")},
    "doubled and refined": (Doubled(BalancedFinetuning()), "6"),
    "all is kept": (ILBaseline(Meta()), "all"),
}


@pytest.mark.parametrize("name", WORK)
def test_the_work_of_a_run_is_what_it_trains_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short batch at the end of each epoch, to the image."""
    method, memory = WORK[name]
    one = small(method=method, memory=memory, steps=2, recipe=replace(RECIPE, epochs=2, batch=50, last="short"))
    counted: Counter[tuple[int, str]] = Counter()
    forward = Training.forward

    def counting(self: Training, source: Any, *more: Any) -> Any:
        if source in self.sources:
            counted[self.s.t, self.stage.name] += source.size
        return forward(self, source, *more)

    monkeypatch.setattr(Training, "forward", counting)
    work = prepare(one).list_work()
    result = run(one, tmp_path)
    assert counted == {(t, p.stage): p.epochs * p.images for t, step in enumerate(work) for p in step}
    assert [sum(counted[t, p.stage] for p in step) for t, step in enumerate(work)] == count_images(work)
    lines = metrics(tmp_path)
    for t, step in enumerate(work):
        of_step = [line for line in lines if line["step"] == t]
        stages = [(p.stage, e) for p in step for e in range(1, p.epochs + 1)]
        assert [(line["stage"], line["epoch"]) for line in of_step] == stages
        images = np.cumsum([p.images for p in step for _ in range(p.epochs)])
        np.testing.assert_allclose([line["done"] for line in of_step], images / max(1, *images[-1:], 1), atol=1e-6)
    assert [t for t, step in enumerate(work) if step] == sorted({line["step"] for line in lines})
    assert len(result["steps"]) == 3


OUTSIDE = """
from dataclasses import dataclass
from typing import ClassVar
from equipoise import ILBaseline

@dataclass(frozen=True)
class Mine(ILBaseline):
    name: ClassVar[str] = "outside"
    def objective(self, s, b):
        return {sign}self.classify(b.out.z, b.y, s)
"""


def module_of(folder: Path, name: str, text: str) -> Any:
    """A module of a user."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def outside(folder: Path, module: str, sign: str) -> Any:
    """A method in a user's own file."""
    return module_of(folder, module, OUTSIDE.format(sign=sign)).Mine()


def brief(method: Method, recipe: Recipe = RECIPE) -> Run:
    return Run(method, Data("digits"), Protocol(8, 1, memory="2"), recipe)


def test_whole_numbers_in_fields_for_floats_change_no_key() -> None:
    assert keys_of(brief(ILBaseline(Balanced(1), T=2))) == keys_of(brief(ILBaseline(Balanced(1.0), T=2.0)))
    assert keys_of(brief(ILBaseline(Balanced(1)))) != keys_of(brief(ILBaseline(Balanced(2))))


def test_methods_from_outside_do_not_share_what_they_compute(tmp_path: Path) -> None:
    """Two of one name with other code, and one whose code was edited: each computes its own states."""
    store = SharedSteps(tmp_path / "store")
    assert run(brief(ILBaseline()), tmp_path / "parent", store)["reused"] is None
    a, b = outside(tmp_path, "mine_a", ""), outside(tmp_path, "mine_b", "0.1 * ")
    assert a.name == b.name == "outside"
    first = run(brief(a), tmp_path / "a", store)
    assert first["reused"] is None, "what it inherits from says nothing of its base step"
    assert run(brief(b), tmp_path / "b", store)["reused"] is None
    assert run(brief(a), tmp_path / "a2", store)["reused"]["steps"] == [0, 1]
    assert run(brief(a.with_remedy(Balanced())), tmp_path / "a3", store)["reused"]["steps"] == [0]
    edited = outside(tmp_path, "mine_a", "2 * ")
    assert run(brief(edited), tmp_path / "c", store)["reused"] is None


# A user's remedy, and a user's method with a loss of its own where the remedy has none

LOSSES = """
from dataclasses import dataclass
from typing import ClassVar
from torch.nn import functional as F
from equipoise import Balanced, Method, Remedy

@dataclass(frozen=True)
class Focal(Remedy):
    name: ClassVar[str] = "focal"
    def ce(self, z, y, s):
        of_each = F.cross_entropy(z, y, reduction="none")
        return ((1 - (-of_each).exp()) ** 2 * of_each).mean()

@dataclass(frozen=True)
class Sharp(Balanced):
    name: ClassVar[str] = "sharp"
    def ce(self, z, y, s):
        return F.cross_entropy(3 * z, y)

@dataclass(frozen=True)
class Hinge(Method):
    name: ClassVar[str] = "hinge"
    def objective(self, s, b):
        Lc = self.remedy.ce(b.out.z, b.y, s)
        return F.multi_margin_loss(b.out.z, b.y) if Lc is None else Lc
"""


@dataclass(frozen=True)
class Wrapped(Around):
    """A host as it is."""


def test_other_losses_of_the_base_step_are_other_base_steps(tmp_path: Path) -> None:
    theirs = module_of(tmp_path, "own_losses", LOSSES)
    methods: list[Method] = [ILBaseline(), ILBaseline(theirs.Focal()), ILBaseline(theirs.Sharp())]
    methods += [theirs.Hinge(), theirs.Hinge(Balanced()), PODNet(), PODNet(Balanced())]
    methods += [Wrapped(PODNet()), Wrapped(PODNet(Balanced()))]
    keys = [keys_of(brief(method))[0] for method in methods]
    assert len(set(keys)) == len(keys)
    # One for all whose loss is the same.
    for method in (theirs.Hinge(), Wrapped(PODNet())):
        for some in ((Standard(), ClassOversampling()), (Balanced(), Balanced(0.5), Relaxed(), Meta())):
            assert len({keys_of(brief(method.with_remedy(remedy)))[0] for remedy in some}) == 1


def test_a_remedy_from_outside_takes_no_base_step_of_another(tmp_path: Path) -> None:
    store = SharedSteps(tmp_path / "store")
    run(brief(ILBaseline()), tmp_path / "standard", store)
    focal = ILBaseline(module_of(tmp_path, "own_loss", LOSSES).Focal())
    first = run(brief(focal), tmp_path / "focal", store)
    alone = run(brief(focal), tmp_path / "alone")
    assert first["reused"] is None and first["confusion"] == alone["confusion"]
    assert run(brief(focal), tmp_path / "again", store)["reused"]["steps"] == [0, 1]


def test_what_is_typed_at_a_prompt_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = types.ModuleType("a_prompt")
    monkeypatch.setitem(sys.modules, "a_prompt", prompt)
    exec(OUTSIDE.format(sign=""), vars(prompt))
    ear = Ear()
    run(brief(prompt.Mine()), tmp_path / "a", SharedSteps(tmp_path / "store"), watch=ear)
    assert ear.said == ["steps are not shared: the source of the method is not in a file"]
    assert not (tmp_path / "store").exists()


def test_what_is_left_of_a_shared_step_is_replaced(tmp_path: Path) -> None:
    store = SharedSteps(tmp_path)
    store.find_entry("ab" * 16).mkdir(parents=True)
    (store.find_entry("ab" * 16) / "learner-dead.safetensors").write_bytes(b"")
    learner = Learner(ILBaseline(), memory=2, recipe=RECIPE, device="cpu")
    store.put("ab" * 16, lambda folder: learner.save(folder, {"who": "new"}))
    assert store.has("ab" * 16)
    assert Learner(ILBaseline(), memory=2, device="cpu").restore(store.find_entry("ab" * 16)) == {"who": "new"}


def test_the_number_of_threads_is_part_of_what_determines_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(small())
    one = plan.compute_keys()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert not set(one) & set(plan.compute_keys())


def test_equal_settings_are_equal_however_they_are_written(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text(" ".join(map(str, range(10))))
    protocol = Protocol(8, 1, memory="0", order="natural")
    one = Run(ILBaseline(Relaxed(1)), Data("digits"), protocol, RECIPE)
    run(one, tmp_path / "a")
    other = replace(one, method=ILBaseline(Relaxed("1.0")), protocol=replace(protocol, order=str(order)))
    assert run(other, tmp_path / "a")["run"]["protocol"]["order"] == "natural"


def test_two_writers_of_one_shared_step_leave_one_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedSteps(tmp_path)
    learner = Learner(ILBaseline(), memory=2, recipe=RECIPE, device="cpu")

    def other(folder: Path) -> None:
        learner.save(folder, {"who": "first"})
        store.put("ab" * 16, lambda inner: learner.save(inner, {"who": "second"}))  # in the meantime

    # The second one is done before the first is renamed: it stays, and the first leaves nothing behind.
    monkeypatch.setattr(os, "getpid", functools.partial(next, itertools.count()))
    store.put("ab" * 16, other)
    assert Learner(ILBaseline(), memory=2, device="cpu").restore(store.find_entry("ab" * 16)) == {"who": "second"}
    assert [p.name for p in store.find_entry("ab" * 16).parent.iterdir()] == ["ab" * 16]


def test_the_peak_of_memory_outlives_a_new_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device, now = torch.device("cuda:3"), [5.0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now[0] * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.__setitem__(0, 1.0))
    monkeypatch.setattr(gpu, "_before", {})
    gpu.reset_peak_memory(device)
    assert (gpu.get_recent_peak_memory(device), gpu.get_peak_memory(device)) == (1.0, 5.0)
    now[0] = 4.0
    gpu.reset_peak_memory(device)
    assert (gpu.get_recent_peak_memory(device), gpu.get_peak_memory(device)) == (1.0, 5.0)
    now[0] = 7.0
    assert (gpu.get_recent_peak_memory(device), gpu.get_peak_memory(device)) == (7.0, 7.0)


@pytest.mark.parametrize("other", [{"seed": 1}, {"remedy": Standard()}, {"order": "0"}], ids=str)
def test_a_record_by_itself_is_refused_for_other_settings_too(
    other: dict[str, Any], done: Done, tmp_path: Path
) -> None:
    """As records are kept and passed on: without the settings of their folder beside them."""
    shutil.copy(done[0] / "result.json", tmp_path)
    with pytest.raises(RunError, match="belongs to a run with other settings"):
        run(small(**other), tmp_path)
    assert run(small(), tmp_path) == done[2]
    elsewhere = json.loads((tmp_path / "result.json").read_text())
    elsewhere["machine"] |= {"device": "cuda", "precision": "bf16"}
    (tmp_path / "result.json").write_text(json.dumps(elsewhere))
    assert run(small(), tmp_path)["confusion"] == done[2]["confusion"], "what is recorded is returned anywhere"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
