"""The live view: what TensorBoard reads is what the run recorded, also after an interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from equipoise.cli import run_command
from equipoise.runs.progress import HOOKS, Both, Watch
from equipoise.runs.tensorboard import TensorBoard

WORDS = ["il-baseline", "--dataset", "digits", "--base", "8", "--steps", "2", "--memory", "4", "--epochs", "3"]


def seen(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def check(folder: Path) -> None:
    """All epochs and steps of the run, each once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    events = seen(folder)
    for stage, name in (("train", "training"), ("refit", "refit")):
        mine = [line for line in lines if line["stage"] == stage]
        assert (f"{name}/loss" in events.Tags()["scalars"]) == bool(mine)
        loss = [(e.step, e.value) for e in events.Scalars(f"{name}/loss")] if mine else []
        at = [line["epochs"] * line["step"] + line["epoch"] for line in mine]
        assert loss == [(k, pytest.approx(line["loss"], rel=1e-4)) for k, line in zip(at, mine)]
    for name in ("top1", "base", "latest"):
        values = [(e.step, e.value) for e in events.Scalars(f"accuracy/{name}")]
        assert values == [(s["classes"], pytest.approx(s[name], rel=1e-6)) for s in result["steps"]]
    assert len(events.Scalars("accuracy/new")) == 2  # there is nothing new in the base step
    assert events.Images("confusion")[-1].step == 10


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_shows_what_is_recorded(here: Path) -> None:
    assert run_command(["run", *WORDS, "--remedy", "meta", "--out", "a", "--store", "store", "--tensorboard"]) == 0
    check(here / "a")
    alpha = [e.value for e in seen(here / "a").Scalars("training/alpha")]
    lines = [json.loads(line) for line in (here / "a" / "metrics.jsonl").read_text().splitlines()]
    assert alpha == pytest.approx([line["alpha"] for line in lines if line["alpha"] is not None], rel=1e-5)
    import io

    picture = np.array(Image.open(io.BytesIO(seen(here / "a").Images("confusion")[-1].encoded_image_string)))
    counts = np.array(json.loads((here / "a" / "result.json").read_text())["confusion"])
    grey = picture[..., 0] if picture.ndim == 3 else picture
    assert grey.shape == counts.shape and ((grey > 0) == (counts > 0)).all()
    # Another run takes over the base step, and shows it too.
    assert run_command(["run", *WORDS, "--remedy", "balanced", "--out", "b", "--store", "store", "--tensorboard"]) == 0
    assert json.loads((here / "b" / "result.json").read_text())["reused"]["steps"] == [0]
    check(here / "b")


def test_a_run_that_goes_on_shows_nothing_twice(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", *WORDS, "--out", "a", "--store", "none", "--checkpoint", "0", "--tensorboard"]
    epochs = 0

    def stop(self: TensorBoard, e: Any) -> None:
        nonlocal epochs
        epochs += 1
        if epochs == 5:
            raise KeyboardInterrupt
        told(self, e)

    told = TensorBoard.end_epoch
    monkeypatch.setattr(TensorBoard, "end_epoch", stop)
    assert run_command(words) == 1
    monkeypatch.setattr(TensorBoard, "end_epoch", told)
    assert run_command(words) == 0
    check(here / "a")


def test_fine_tuning_has_scalars_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetuned = ["--remedy", "balanced-finetuning", "--finetune-epochs", "2"]
    words = ["run", *WORDS, *finetuned, "--out", "a", "--store", "none", "--checkpoint", "0", "--tensorboard"]

    def stop(self: TensorBoard, e: Any) -> None:
        told(self, e)
        if (e.step, e.stage, e.epoch) == (1, "refit", 1):
            raise KeyboardInterrupt

    told = TensorBoard.end_epoch
    monkeypatch.setattr(TensorBoard, "end_epoch", stop)
    assert run_command(words) == 1
    monkeypatch.setattr(TensorBoard, "end_epoch", told)
    assert run_command(words) == 0
    check(here / "a")
    assert len(seen(here / "a").Scalars("refit/loss")) == 4


@pytest.mark.usefixtures("forked")
def test_a_queue_writes_it_for_every_run(here: Path) -> None:
    words = ["sweep", *WORDS, "--seed", "0,1", "--workers", "1", "--out", "runs", "--store", "none", "--tensorboard"]
    assert run_command(words) == 0
    folders = [path.parent for path in here.glob("runs/*/result.json")]
    assert len(folders) == 2
    for folder in folders:
        check(folder)


def test_without_the_flag_there_is_none(here: Path) -> None:
    assert run_command(["run", *WORDS, "--out", "a", "--store", "none"]) == 0
    assert not (here / "a" / "tensorboard").exists()


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_missing_package_is_said_before_anything_is_computed(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run_command([verb, *WORDS, "--out", "a", "--tensorboard"]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not list(here.rglob("run.json"))


def test_both_are_told_of_everything() -> None:
    told: list[tuple[str, str]] = []

    class Noting(Watch):
        def __init__(self, name: str) -> None:
            for hook in HOOKS:
                setattr(self, hook, lambda *words, hook=hook: told.append((name, hook)))

    public = {name for name in vars(Watch) if not name.startswith("_")} - {"estimate_time_left", "describe_epoch"}
    assert public == set(HOOKS)  # a new hook is told to both as well
    both = Both(Noting("one"), Noting("other"))
    for hook in HOOKS:
        getattr(both, hook)()
    assert told == [(name, hook) for hook in HOOKS for name in ("one", "other")]
