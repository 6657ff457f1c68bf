"""A validation split: training images stand in for test images, so that settings are chosen without these."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise.runs.plan
from equipoise import Balanced, ILBaseline, Learner, Recipe, Remedy, RunError, Standard, UsageError
from equipoise.cli import run_command
from equipoise.data import datasets
from equipoise.data.datasets import Dataset, split
from equipoise.data.images import Images
from equipoise.runs.command import name_folder
from equipoise.runs.plan import Prepared, Training, count_images
from equipoise.runs.plan import prepare as prepared
from equipoise.runs.progress import Watch
from equipoise.runs.run import run as run_on
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.settings import to_plain

RECIPE = Recipe(epochs=2, lr=0.05, batch=32)
DIGITS = datasets.load("digits")
SECONDS = {f"{what}seconds" for what in ("", "training_", "preparing_", "refitting_", "evaluating_", "saving_")}
TIMES = SECONDS | {"images_per_second", "engine"}


CPU = Machine("cpu")


def small(
    remedy: Remedy | None = None, validation: float = 0.1, brightness: float = 0.0, seed: int = 0, **protocol: Any
) -> Run:
    of = Protocol(**{"base": 4, "steps": 2, "memory": "5", **protocol})
    return Run(ILBaseline(remedy or Balanced()), Data("digits", validation, brightness), of, RECIPE, seed)


def run(one: Run, out: Path, watch: Watch | None = None, **options: Any) -> dict[str, Any]:
    return run_on(one, out, CPU, Options(**options), watch)


def prepare(one: Run) -> Prepared:
    return prepared(one, CPU)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def unequal() -> Dataset:
    """As the digits, but class k has 10 + 7 k images, and no two images are alike."""
    y = torch.arange(10).repeat_interleave(10 + 7 * torch.arange(10))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    x = torch.arange(len(y))[:, None, None, None].expand(-1, 1, 8, 8) % torch.tensor([256, 251] * 4)
    return replace(DIGITS, train=Images(x.to(torch.uint8), y))


def rows(images: Images) -> list[bytes]:
    return [x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(images.x, images.y)]


# The split


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("data", [DIGITS, unequal()], ids=["digits", "unequal"])
def test_the_two_parts_are_all_training_images_and_share_none(data: Dataset, fraction: float) -> None:
    train, aside = split(data, fraction, 0)
    everything = rows(data.train)
    assert sorted(rows(train) + rows(aside)) == sorted(everything)
    if data is not DIGITS:  # of which some may be alike
        assert len(set(everything)) == len(everything) and not set(rows(train)) & set(rows(aside))
    counts, of_train = torch.bincount(data.train.y), torch.bincount(train.y)
    assert torch.bincount(aside.y).tolist() == [round(fraction * n) for n in counts.tolist()]  # of every class
    assert torch.equal(of_train + torch.bincount(aside.y), counts)


def test_the_split_is_drawn_by_the_seed_and_by_nothing_else() -> None:
    mine = split(DIGITS, 0.1, 0)
    torch.manual_seed(5)
    again = split(DIGITS, 0.1, 0)
    assert [part.fingerprint() for part in mine] == [part.fingerprint() for part in again]
    assert rows(mine[1]) != rows(split(DIGITS, 0.1, 1)[1])
    firsts = torch.cat([(DIGITS.train.y == k).nonzero()[:14, 0] for k in range(10)])
    assert sorted(rows(mine[1])) != sorted(rows(DIGITS.train[firsts]))  # not simply the first ones
    # A part of a larger one, and of each class by itself.
    assert set(rows(mine[1])) <= set(rows(split(DIGITS, 0.3, 0)[1]))
    without = DIGITS.train[DIGITS.train.y < 9]
    fewer = split(replace(DIGITS, train=without, classes=DIGITS.classes[:9]), 0.1, 0)[1]
    assert rows(fewer) == rows(mine[1][mine[1].find_positions(0, 9)])


def set_aside(plan: Prepared) -> list[bytes]:
    """What a plan measures on, in the data set's labels."""
    return rows(Images(plan.test.x, torch.tensor(plan.order)[plan.test.y]))


def test_the_split_is_the_same_whatever_is_learned_on_it() -> None:
    mine = set_aside(prepare(small()))
    assert mine == rows(split(DIGITS, 0.1, 0)[1])
    for other in (small(order="natural"), small(Standard(), memory="0"), small(base=5, steps=5)):
        assert set_aside(prepare(other)) == mine
    assert set_aside(prepare(small(seed=1))) != mine
    assert set_aside(prepare(small(validation=0.0))) == rows(DIGITS.test)


@pytest.mark.parametrize("fraction", [0.0, 0])
def test_no_validation_is_the_data_set_as_it_is(fraction: float) -> None:
    assert split(DIGITS, fraction, 0) == (DIGITS.train, DIGITS.test)
    assert to_plain(prepare(small(validation=fraction)).run.data)["validation"] == 0.0


def test_the_smallest_and_the_largest_that_can_be() -> None:
    for fraction, count in ((1 / 140, 1), (138 / 140, 138)):
        assert torch.bincount(split(DIGITS, fraction, 0)[1].y).tolist() == [count] * 10
    for fraction, words in ((0.003, "0 of the 140"), (139 / 140, "139 of the 140")):
        with pytest.raises(UsageError, match=f"sets aside {words} training images of '0'"):
            split(DIGITS, fraction, 0)
    with pytest.raises(UsageError, match="sets aside 0 of the 10 training images of '0'"):
        split(unequal(), 0.04, 0)  # enough of every other class


# A run with it


def test_the_images_to_train_on_are_counted_without_those_set_aside() -> None:
    each = 140 - 14
    plan = prepare(small())
    images = [n * each + old * 5 for n, old in ((4, 0), (3, 4), (3, 7))]
    assert plan.list_work() == [[Training("train", 2, n)] for n in images]
    assert count_images(plan.list_work()) == [2 * n for n in images]
    assert len(plan.train) == 10 * each and len(plan.test) == 140


def test_the_accuracies_are_of_the_images_set_aside(tmp_path: Path) -> None:
    result = run(small(), tmp_path)
    assert result["run"]["data"] == {"name": "digits", "validation": 0.1, "brightness": 0.0}
    assert json.loads((tmp_path / "run.json").read_text())["run"] == result["run"]
    train, aside = split(DIGITS, 0.1, 0)
    model = Learner.load(tmp_path / "model")
    assert result["final"]["top1"] == pytest.approx(100 * np.mean(model.predict(aside.x) == aside.y.numpy()))
    assert np.sum(result["confusion"]) == 140
    assert model.exemplars_ is not None
    assert not {x.numpy().tobytes() for x in model.exemplars_.x} - {x.numpy().tobytes() for x in train.x}


def test_the_test_images_are_never_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [run(small(validation=v), tmp_path / f"true-{v}", evaluate_every=1) for v in (0.1, 0.0)]
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, DIGITS.test.x.shape, dtype=torch.uint8, generator=gen)
    garbage = replace(DIGITS, test=Images(x, DIGITS.test.y))
    monkeypatch.setattr(equipoise.runs.plan, "load", lambda *_, **__: garbage)
    again = [run(small(validation=v), tmp_path / f"garbage-{v}", evaluate_every=1) for v in (0.1, 0.0)]
    assert timeless(again[0]) == timeless(results[0])
    assert timeless(again[1]) != timeless(results[1])  # where they are to be looked at, it shows
    lines = [(tmp_path / f"{name}-0.1" / "metrics.jsonl").read_text().splitlines() for name in ("true", "garbage")]
    assert timeless([json.loads(m) for m in lines[0]]) == timeless([json.loads(m) for m in lines[1]])


class StopAt(Watch):
    def __init__(self, step: int, epoch: int) -> None:
        self.at = (step, epoch)

    def end_epoch(self, e: Any) -> None:
        if (e.step, e.epoch) == self.at:
            raise KeyboardInterrupt


def test_a_run_with_validation_goes_on(tmp_path: Path) -> None:
    straight = run(small(), tmp_path / "straight")
    for at in ((0, 1), (1, 2)):
        with pytest.raises(KeyboardInterrupt):
            run(small(), tmp_path / "run", watch=StopAt(*at), checkpoint=0.0)
    for other, here in ((0.2, "0.2"), (0.0, "0.0")):
        with pytest.raises(RunError, match=rf"settings: data.validation \(there 0.1, here {here}\);"):
            run(small(validation=other), tmp_path / "run")
    result = run(small(), tmp_path / "run")
    assert timeless(result) == timeless(straight)
    assert run(small(), tmp_path / "run") == result


def test_steps_are_shared_only_with_runs_that_set_the_same_aside(tmp_path: Path) -> None:
    plans = [prepare(small(validation=v)).compute_keys() for v in (0.0, 0.1, 0.2)]
    assert len({key for keys in plans for key in keys}) == 9
    assert prepare(small(validation=0)).compute_keys() == plans[0]
    store = tmp_path / "store"
    run(small(validation=0.0), tmp_path / "whole", store=store)
    assert run(small(), tmp_path / "a", store=store)["reused"] is None
    assert run(small(Standard()), tmp_path / "b", store=store)["reused"]["steps"] == [0]


def test_the_name_of_a_folder_says_that_there_is_validation() -> None:
    names = [name_folder(small(validation=v)) for v in (0.0, 0.1, 0.25)]
    assert len({name.rsplit("_", 1)[1] for name in names}) == 3
    for name, part in zip(names, ("", "_validation-0.1", "_validation-0.25")):
        assert name.rsplit("_", 1)[0] == f"il-baseline_balanced_digits_memory-5_seed-0{part}"


def test_brightness_is_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bright = small(validation=0.0), small(validation=0.0, brightness=0.25)
    plans = [prepare(one) for one in (plain, bright)]
    augment = [plan.describe_stages()["augment"] for plan in plans]
    assert augment == [{"pad": 1, "flip": False, "brightness": b} for b in (0.0, 0.25)]
    assert not set(plans[0].compute_keys()) & set(plans[1].compute_keys()) and name_folder(plain) != name_folder(bright)
    result = run(plain, tmp_path)
    monkeypatch.setattr("equipoise.learner.fit", None)
    assert run(plain, tmp_path) == result
    with pytest.raises(RunError, match=r"settings: data.brightness \(there 0.0, here 0.25\);"):
        run(bright, tmp_path)


# The command


@pytest.fixture
def recorded(tmp_path: Path, isolated: None) -> Path:
    """Two seeds measured on validation images, and one on test images."""
    for name, settings in {"a": {}, "b": {"seed": 1}, "test": {"validation": 0.0}}.items():
        run(small(**settings), tmp_path / "runs" / name)
    return Path("runs")


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert run_command(["show", *map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_tables_say_which_images_were_measured(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "seed 0, measured on validation images (0.1): accuracy" in shown(capsys, recorded / "a")
    assert "measured on" not in shown(capsys, recorded / "test")
    seeds = shown(capsys, recorded / "a", recorded / "b")
    assert "measured on validation images (0.1): average incremental" in seeds and "Balanced 2 " in seeds
    both = shown(capsys, recorded)
    assert "remedy measured on seeds" in both
    assert "Balanced validation images (0.1) 2 " in both and "Balanced test images 1 " in both
    run(small(validation=0.0, seed=1), recorded / "new")
    assert "Balanced 2 " in shown(capsys, recorded / "test", recorded / "new")


def test_the_flag_reaches_the_run(isolated: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "il-baseline", "--dataset", "digits", "--epochs", "1", "--steps", "1", "--out", "run"]
    assert run_command([*words, "--validation", "0.2"]) == 0
    assert "measured on validation images (0.2)" in " ".join(capsys.readouterr().out.split())
    result = json.loads(Path("run/result.json").read_text())
    assert result["run"]["data"]["validation"] == 0.2 and np.sum(result["confusion"]) == 280
    assert run_command(words) == 1
    assert "data.validation (there 0.2, here 0.0)" in capsys.readouterr().err


def test_the_flag_of_the_brightness_reaches_training(isolated: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "il-baseline", "--dataset", "digits", "--epochs", "1", "--steps", "1"]
    assert run_command([*words, "--out", "plain"]) == 0
    assert run_command([*words, "--brightness", "0.25", "--out", "bright"]) == 0
    plain, bright = (json.loads(Path(name, "result.json").read_text()) for name in ("plain", "bright"))
    assert [one["run"]["data"]["brightness"] for one in (plain, bright)] == [0.0, 0.25]
    assert [one["resolved"]["augment"]["brightness"] for one in (plain, bright)] == [0.0, 0.25]
    assert bright["reused"] is None and bright["confusion"] != plain["confusion"]
    model = Learner.load("bright/model")
    assert model.augment is not None and model.augment.brightness == 0.25
    assert "brightness" in shown(capsys, "plain", "bright")
