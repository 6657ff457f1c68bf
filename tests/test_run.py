"""A run: what it records, that the record is true, and what it shares with other runs."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import itertools
import json
import os
import shutil
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

import equipoise.runs.run
from equipoise import Balanced, DataError, ILBaseline, Learner, Meta, Recipe, Relaxed, RunError, Standard, UsageError
from equipoise.data import datasets
from equipoise.data.images import Images
from equipoise.engine import gpu
from equipoise.files import MANIFEST
from equipoise.losses import Loss
from equipoise.runs.folder import read_result
from equipoise.runs.metrics import forgetting
from equipoise.runs.progress import Watch
from equipoise.runs.run import Run, prepare, run
from equipoise.runs.shared_steps import Store

RECIPE = Recipe(epochs=3, lr=0.05, batch=32)
DIGITS = datasets.load("digits")

FIELDS = {
    *("average_incremental_accuracy", "average_incremental_accuracy_top5", "steps", "final", "forgetting"),
    *("confusion", "class_order", "alpha", "run", "refit", "in_full", "reused", "versions", "hardware", "seconds"),
}
STEP_FIELDS = {"step", "classes", "top1", "top5", "base", "new", "latest", "by_step", "training_mib"}
SETTINGS = {"method", "loss", "alpha", "epsilon", "dataset", "base", "steps", "memory", "order", "seed"}
SECONDS = {f"{what}seconds" for what in ("", "training_", "preparing_", "refitting_", "evaluating_", "saving_")}
TIMES = SECONDS | {"images_per_second", "engine"}  # the engine is null where nothing was trained


def small(loss: Loss | None = None, **settings: Any) -> Run:
    """A run of a second: 4 digits, then 3 times 2."""
    usual = {"dataset": "digits", "base": 4, "steps": 3, "memory": "5", "recipe": RECIPE, "device": "cpu"}
    return Run(ILBaseline(loss=loss or Balanced()), **{**usual, "precision": "fp32", **settings})


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


def entries(store: Store) -> list[Path]:
    return sorted(p.parent for p in store.folder.rglob("learner.json"))


class Ear(Watch):
    """Hears what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.reuse: list[tuple[int, float]] = []
        self.trained: list[tuple[int, int]] = []
        self.steps: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def reused(self, t: int, seconds: float) -> None:
        self.reuse.append((t, seconds))

    def epoch(self, e: Any) -> None:
        self.trained.append((e.step, e.epoch))

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store, dict[str, Any]]:
    """A finished run, the store it filled, and what it returned."""
    folder = tmp_path_factory.mktemp("done")
    store = Store(folder / "store")
    return folder / "run", store, run(small(), folder / "run", store=store)


Done = tuple[Path, Store, dict[str, Any]]

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
    assert result["versions"].keys() >= {"equipoise", "python", "torch", "numpy"}
    assert result["hardware"]["device"] == "cpu" and result["hardware"]["cpu"]
    assert set(result["run"]) >= SETTINGS
    expected = {
        "method": "il-baseline",
        "loss": "balanced",
        "alpha": 1.0,
        "epsilon": None,
        "dataset": "digits",
        "base": 4,
        "steps": 3,
        "memory": "5",
        "order": "1993",
        "seed": 0,
    }
    assert {k: result["run"][k] for k in SETTINGS} == expected
    assert result["run"]["recipe"]["epochs"] == 3
    ids = np.arange(10)
    np.random.RandomState(1993).shuffle(ids)
    assert result["class_order"] == ids.tolist()


def test_the_accuracies_are_true(done: Done) -> None:
    """Every number again, from the nets that were saved and the test images alone."""
    folder, store, result = done
    position = np.argsort(result["class_order"])
    x, y = DIGITS.test.x.numpy(), position[DIGITS.test.y.numpy()]
    plan = prepare(small())
    top1, by_step = [], []
    for t, now in enumerate((4, 6, 8, 10)):
        learner = Learner.load(store.entry(plan.keys()[t]))  # as it was when step t had been trained
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
    assert {m["epochs"] for m in lines} == {3}
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
    assert result["run"]["loss"] == "meta" and result["run"]["alpha"] is None and result["run"]["every"] == 4


def test_a_finished_folder_holds_no_leftovers(done: Done) -> None:
    kept = {"run.json", "metrics.jsonl", "result.json", "model"}
    assert {p.name for p in done[0].iterdir()} == {".lock", MANIFEST, *kept}


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
    for folder, one in ((tmp_path, result), (tmp_path / "every", every)):
        assert timeless(one) == timeless(done[2])
        mine, theirs = tensors(folder / "model"), tensors(done[0] / "model")
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# The same folder


def test_the_same_run_again_comes_from_the_record(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it trains again")

    monkeypatch.setattr("equipoise.learner.step.fit", refuse)
    before = {p: p.stat().st_mtime_ns for p in done[0].rglob("*") if p.name != ".lock"}
    for store in (None, done[1]):
        assert run(small(), done[0], store=store) == done[2]
    assert {p: p.stat().st_mtime_ns for p in done[0].rglob("*") if p.name != ".lock"} == before


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (small(seed=1), ["seed (there 0, here 1)"]),
        (small(memory="6"), ["memory (there 5, here 6)"]),
        (small(memory="total:5", select="random"), ["memory (there 5, here total:5)", "select"]),
        (small(Balanced(0.5)), ["alpha (there 1.0, here 0.5)"]),
        (small(Relaxed()), ["alpha", "epsilon (there None, here 0.2%)", "loss (there balanced, here relaxed)"]),
        (small(recipe=replace(RECIPE, lr=0.04)), ["lr (there 0.05, here 0.04)"]),
        (small(order="natural"), ["class_order", "order (there 1993, here natural)"]),
        (small(steps=2), ["increment (there 2, here 3)", "steps (there 3, here 2)"]),
        (small(precision="bf16"), ["precision (there fp32, here bf16)"]),
        (replace(small(), method=ILBaseline(loss=Balanced(), T=3.0)), ["T (there 2.0, here 3.0)"]),
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
    if all("(" in name for name in differ):
        assert named.strip(", ") == "", "a setting is named that does not differ"
    assert {p: p.read_bytes() for p in done[0].rglob("*") if p.is_file()} == before


def test_settings_that_are_spelled_differently_agree(done: Done) -> None:
    assert run(small(memory="05", steps=None, increment=2), done[0]) == done[2]


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=f"another process is at work in {tmp_path}.*--out"):
            run(small(), tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {".lock"}


def test_the_lock_is_held_while_a_run_works(tmp_path: Path) -> None:
    refused = []

    class Intruder(Watch):
        def epoch(self, e: Any) -> None:
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


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"steps": []}'])
@pytest.mark.parametrize("name", ["result.json", "run.json"])
def test_a_broken_record_is_named_and_kept(name: str, text: str, done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder)
    (folder / name).write_text(text)
    with pytest.raises((DataError, RunError), match=str(folder)):
        run(small(), folder)
    assert (folder / name).read_text() == text


def test_reading_a_result_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run's folder"):
        read_result(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match="not finished"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (small(dataset="digit"), "did you mean 'digits'"),
        (small(base=10), "--base 10 must be from 2 to 9"),
        (small(steps=4), "--steps 4 does not divide the 6 classes"),
        (small(memory="lots"), "memory must be a number"),
        (small(select="best"), "select"),
        (small(order="no-such-file"), "--order no-such-file"),
        (small(seed=-1), "seed must be .*0 or more, not -1"),
        (small(precision="half"), "precision"),
        (small(Meta(), memory="1"), "memory of at least 2"),
        (small(Meta(), memory="total:15"), "memory of at least 2 .* has 1"),
        (small(Relaxed(0)), "epsilon 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(bad: Run, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Shared prefixes


def key(run: Run, t: int = 0) -> str:
    return prepare(run).keys()[t]


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
        small(precision="bf16"),
        small(brightness=0.25),
    ]
    recipe: dict[str, Any] = {"epochs": 4, "lr": 0.04, "milestones": (0.5,), "decay": 0.5, "batch": 31}
    recipe |= {"momentum": 0.8, "weight_decay": 0.0, "clamp": 1.0, "schedule": "cosine", "last": "short"}
    assert recipe.keys() == vars(RECIPE).keys()
    others += [small(recipe=replace(RECIPE, **{k: v})) for k, v in recipe.items()]
    assert len({key(small()), *map(key, others)}) == 1 + len(others)
    # The same order, said in another way, is the same.
    (tmp_path / "order").write_text(" ".join(map(str, prepare(small()).order)))
    assert prepare(small(order=str(tmp_path / "order"))).keys() == prepare(small()).keys()


def test_what_changes_later_steps_splits_from_there() -> None:
    mine = prepare(small()).keys()
    assert len(set(mine)) == 4
    for other in (small(Balanced(0.5)), small(memory="6"), small(select="random"), small(Standard())):
        theirs = prepare(other).keys()
        assert theirs[0] == mine[0] and not set(theirs[1:]) & set(mine[1:])


def unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the digits have 40 images less of the first class of the order."""
    first = prepare(small()).order[0]
    keep = torch.ones(len(DIGITS.train), dtype=torch.bool)
    keep[(DIGITS.train.y == first).nonzero()[:40, 0]] = False
    train = Images(DIGITS.train.x[keep], DIGITS.train.y[keep])
    data = replace(DIGITS, train=train, fingerprint="unequal")
    monkeypatch.setattr(equipoise.runs.run, "load", lambda *_, **__: data)


def test_unequal_counts_are_not_shared_across_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    short = replace(RECIPE, epochs=1)
    losses = (Standard(), Balanced())
    for loss in losses:
        run(small(loss, steps=1, recipe=short), tmp_path / f"equal-{loss.name}", store=store)
    equal = [tensors(store.entry(key(small(loss, steps=1, recipe=short)))) for loss in losses]
    assert len(entries(store)) == 3

    unequal(monkeypatch)
    keys = [key(small(loss, steps=1, recipe=short)) for loss in losses]
    assert len(set(keys)) == 2 and key(small(Standard(), steps=2, recipe=short)) == keys[0]
    for loss in losses:
        assert run(small(loss, steps=1, recipe=short), tmp_path / loss.name, store=store)["reused"] is None
    assert len(entries(store)) == 7
    # And that is right: with these counts the losses differ, with equal ones they do not.
    standard, balanced = (tensors(store.entry(k)) for k in keys)
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
    shared = run(other, tmp_path / "shared", store=done[1], watch=ear)
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
    ((t, seconds),) = ear.reuse
    assert t == steps[-1] and seconds == pytest.approx(shared["reused"]["seconds"], abs=0.001)
    assert all(s["seconds"] > 0 for s in shared["steps"])
    assert_same_run(tmp_path / "shared", tmp_path / "alone")
    assert read_result(tmp_path / "shared") == shared


def test_a_run_fills_the_store_with_each_step_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert run(small(), tmp_path / "one", store=store)["reused"] is None
    assert [p.name for p in entries(store)] == sorted(prepare(small()).keys())
    run(small(Standard()), tmp_path / "two", store=store)
    assert len(entries(store)) == 4 + 3
    before = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*") if p.is_file()}
    run(small(), tmp_path / "three", store=store)
    assert {p: p.stat().st_mtime_ns for p in store.folder.rglob("*") if p.is_file()} == before


def test_without_a_store_nothing_is_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run(small(steps=1), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "no tensors", "broken json", "no learner"])
def test_a_corrupt_entry_is_computed_again_and_said(damage: str, done: Done, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    run(small(), tmp_path / "one", store=store)
    keys = prepare(small()).keys()
    for t in (3, 1):  # the longest prefix and one in between; step 2 is good
        entry = store.entry(keys[t])
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
    result = run(small(), tmp_path / "two", store=store, watch=ear)
    assert len(ear.said) == 1 and "again" in ear.said[0] and keys[3] in ear.said[0]
    assert result["reused"]["steps"] == [0, 1, 2] and {t for t, _ in ear.trained} == {3}
    assert_same_run(tmp_path / "two", done[0])
    assert Learner.load(store.entry(keys[3])).sizes_ == (4, 2, 2, 2)


# Recorded: what a wrong sign would break


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], float]:
    """Average incremental accuracy on digits, 5 classes and then 5 times one, 10 epochs a step."""
    folder = tmp_path_factory.mktemp("recorded")
    cells: list[tuple[Loss, str]] = [(Standard(), "5"), (Balanced(), "5")]
    cells += [(Standard(), "0"), (Balanced(), "0"), (Relaxed(), "0")]
    ten = Recipe(epochs=10, lr=0.05, batch=32)
    return {
        (loss.name, memory): run(
            small(loss, base=5, steps=5, memory=memory, recipe=ten),
            folder / f"{loss.name}-{memory}",
            store=Store(folder / "store"),
        )["average_incremental_accuracy"]
        for loss, memory in cells
    }


def test_balanced_beats_standard_with_a_small_memory(recorded: dict[tuple[str, str], float]) -> None:
    assert recorded["balanced", "5"] >= recorded["standard", "5"] + 15
    assert recorded["balanced", "5"] > 65


def test_balanced_and_relaxed_beat_standard_without_memory(recorded: dict[tuple[str, str], float]) -> None:
    assert recorded["balanced", "0"] > recorded["standard", "0"] + 5
    assert recorded["relaxed", "0"] > recorded["standard", "0"] + 5


OUTSIDE = """
from dataclasses import dataclass
from typing import ClassVar
from equipoise import ILBaseline

@dataclass(frozen=True)
class Mine(ILBaseline):
    name: ClassVar[str] = "mine"
    def objective(self, s, y, out, ref):
        return {sign}self.loss(out.z, y, s)
"""


def outside(folder: Path, module: str, sign: str) -> Any:
    """A method in a user's own file."""
    path = folder / f"{module}.py"
    path.write_text(OUTSIDE.format(sign=sign))
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[module] = found
    spec.loader.exec_module(found)
    return found.Mine()


def test_methods_from_outside_do_not_share_what_they_compute(tmp_path: Path) -> None:
    """Two of one name with other code, and one whose code was edited: each computes its own states."""
    store = Store(tmp_path / "store")
    settings: dict[str, Any] = {"dataset": "digits", "base": 8, "steps": 1, "memory": "2", "recipe": RECIPE}
    a, b = outside(tmp_path, "mine_a", ""), outside(tmp_path, "mine_b", "0.1 * ")
    assert a.name == b.name == "mine"
    first = run(Run(a, **settings), tmp_path / "a", store=store)
    second = run(Run(b, **settings), tmp_path / "b", store=store)
    assert second["reused"] is None
    assert run(Run(a, **settings), tmp_path / "a2", store=store)["reused"] is not None
    with pytest.raises(RunError, match="method_code"):
        run(Run(b, **settings), tmp_path / "a", store=store)
    edited = outside(tmp_path, "mine_a", "2 * ")
    third = run(Run(edited, **settings), tmp_path / "c", store=store)
    assert third["reused"] is None
    assert first["steps"][0]["top1"] is not None


def test_what_is_typed_at_a_prompt_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = types.ModuleType("a_prompt")
    monkeypatch.setitem(sys.modules, "a_prompt", prompt)
    exec(OUTSIDE.format(sign=""), vars(prompt))
    store = Store(tmp_path / "store")
    settings: dict[str, Any] = {"dataset": "digits", "base": 8, "steps": 1, "memory": "2", "recipe": RECIPE}
    run(Run(prompt.Mine(), **settings), tmp_path / "a", store=store)
    assert not list((tmp_path / "store").rglob("learner.json"))


def test_what_is_left_of_a_shared_step_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.entry("ab" * 16).mkdir(parents=True)
    (store.entry("ab" * 16) / "learner-dead.safetensors").write_bytes(b"")
    learner = Learner(ILBaseline(), memory=2, recipe=RECIPE, device="cpu")
    store.put("ab" * 16, lambda folder: learner.save(folder, {"who": "new"}))
    assert store.has("ab" * 16)
    assert Learner(ILBaseline(), memory=2, device="cpu").restore(store.entry("ab" * 16)) == {"who": "new"}


def test_the_number_of_threads_is_part_of_what_determines_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(Run(ILBaseline(), dataset="digits", device="cpu"))
    one = plan.keys()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert not set(one) & set(plan.keys())


def test_equal_settings_are_equal_however_they_are_written(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text(" ".join(map(str, range(10))))
    settings: dict[str, Any] = {"dataset": "digits", "base": 8, "steps": 1, "memory": "0", "recipe": RECIPE}
    run(Run(ILBaseline(Relaxed(1)), order="natural", **settings), tmp_path / "a")
    again = run(Run(ILBaseline(Relaxed("1.0")), order=str(order), **settings), tmp_path / "a")
    assert again["run"]["order"] == "natural"


def test_a_method_field_named_like_a_recipes_is_refused() -> None:
    @dataclass(frozen=True)
    class Clash(ILBaseline):
        momentum: float = 1.0

    with pytest.raises(UsageError, match="momentum"):
        prepare(Run(Clash(), dataset="digits"))


def test_two_writers_of_one_shared_step_leave_one_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    learner = Learner(ILBaseline(), memory=2, recipe=RECIPE, device="cpu")

    def other(folder: Path) -> None:
        learner.save(folder, {"who": "first"})
        store.put("ab" * 16, lambda inner: learner.save(inner, {"who": "second"}))  # in the meantime

    # The second one is done before the first is renamed: it stays, and the first leaves nothing behind.
    monkeypatch.setattr(os, "getpid", functools.partial(next, itertools.count()))
    store.put("ab" * 16, other)
    assert Learner(ILBaseline(), memory=2, device="cpu").restore(store.entry("ab" * 16)) == {"who": "second"}
    assert [p.name for p in store.entry("ab" * 16).parent.iterdir()] == ["ab" * 16]


def test_the_peak_of_memory_outlives_a_new_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device, now = torch.device("cuda:3"), [5.0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now[0] * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.__setitem__(0, 1.0))
    monkeypatch.setattr(gpu, "_before", {})
    gpu.count_memory_anew(device)
    assert (gpu.recent_peak_memory(device), gpu.peak_memory(device)) == (1.0, 5.0)
    now[0] = 4.0
    gpu.count_memory_anew(device)
    assert (gpu.recent_peak_memory(device), gpu.peak_memory(device)) == (1.0, 5.0)
    now[0] = 7.0
    assert (gpu.recent_peak_memory(device), gpu.peak_memory(device)) == (7.0, 7.0)


@pytest.mark.parametrize("other", [{"seed": 1}, {"loss": Standard()}, {"order": "0"}], ids=str)
def test_a_record_by_itself_is_refused_for_other_settings_too(
    other: dict[str, Any], done: Done, tmp_path: Path
) -> None:
    """As records are kept and passed on: without the settings of their folder beside them."""
    shutil.copy(done[0] / "result.json", tmp_path)
    with pytest.raises(RunError, match="belongs to a run with other settings"):
        run(small(**other), tmp_path)
    assert run(small(), tmp_path) == done[2]
    elsewhere = json.loads((tmp_path / "result.json").read_text())
    elsewhere["run"] |= {"device": "cuda", "precision": "bf16"}
    (tmp_path / "result.json").write_text(json.dumps(elsewhere))
    assert run(small(), tmp_path)["confusion"] == done[2]["confusion"], "what is recorded is returned anywhere"
