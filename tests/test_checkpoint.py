"""Saved learners: whole or absent, checked when read, and never executed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import Balanced, Crop, DataError, ILBaseline, Learner, Recipe
from equipoise.data import datasets
from equipoise.learner import saved as saved_files

RECIPE = Recipe(epochs=2, lr=0.05, batch=32)
DIGITS = datasets.load("digits")
TEST = DIGITS.test.x.numpy()
INFO = "learner.json"


def images_of(*classes: int) -> tuple[np.ndarray, np.ndarray]:
    which = torch.cat([(DIGITS.train.y == c).nonzero()[:40, 0] for c in classes])
    return DIGITS.train.x[which].numpy(), DIGITS.train.y[which].numpy()


@pytest.fixture
def learner() -> Learner:
    settings: dict[str, Any] = {"recipe": RECIPE, "augment": Crop(1, False), "normalise": ([0.3], [0.4])}
    return Learner(ILBaseline(Balanced()), 3, **settings).learn(*images_of(0, 1))


@pytest.fixture
def saved(learner: Learner, tmp_path: Path) -> Path:
    learner.save(tmp_path / "model")
    return tmp_path / "model"


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def reseal(folder: Path, info: dict[str, Any]) -> None:
    """Write the JSON of a learner as somebody would who knows how it is sealed."""
    (folder / INFO).write_bytes(saved_files.seal({k: v for k, v in info.items() if k != "seal"}))


def tensor_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


# What is there


def test_a_save_is_two_files_safetensors_and_json(saved: Path) -> None:
    assert sorted(p.suffix for p in saved.iterdir()) == [".json", ".safetensors"]
    info = json.loads((saved / INFO).read_text())
    assert info["format"] == 1 and info["tensors"] == tensor_file(saved).name


def test_saving_again_replaces_what_was_there(learner: Learner, saved: Path) -> None:
    old = tensor_file(saved)
    learner.learn(*images_of(2)).save(saved)
    assert len(list(saved.iterdir())) == 2 and not old.exists()
    assert Learner.load(saved).classes_ == [0, 1, 2]
    np.testing.assert_array_equal(Learner.load(saved).predict_proba(TEST), learner.predict_proba(TEST))
    before = content(saved)
    learner.save(str(saved))
    assert content(saved) == before


def test_saving_makes_the_folders_it_needs(learner: Learner, tmp_path: Path) -> None:
    learner.save(tmp_path / "a" / "b" / "c")
    assert Learner.load(tmp_path / "a" / "b" / "c").classes_ == [0, 1]


def test_saving_leaves_the_files_of_others_alone(learner: Learner, tmp_path: Path) -> None:
    other = tmp_path / "somebody-elses-model.safetensors"
    other.write_bytes(b"precious")
    learner.save(tmp_path)
    learner.learn(*images_of(2)).save(tmp_path)
    assert other.read_bytes() == b"precious"


# A full disk


class FullDisk:
    """A file on a disk that is full after half of what is written to it."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From now on files whose name has `what` in it cannot be written."""
    true_open = Path.open

    def open_(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        file = true_open(path, mode, *args, **more)
        return FullDisk(file) if what in path.name and set(mode) & set("wax+") else file

    monkeypatch.setattr(Path, "open", open_)


@pytest.mark.parametrize("what", [".safetensors", INFO])
def test_a_full_disk_leaves_the_earlier_save_and_no_trace(
    what: str, learner: Learner, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, p = content(saved), learner.predict_proba(TEST)
    learner.learn(*images_of(2))
    with monkeypatch.context() as patch:
        fill_the_disk(patch, what)
        with pytest.raises(OSError) as error:
            learner.save(saved)
        assert error.value.errno == errno.ENOSPC
    assert content(saved) == before
    np.testing.assert_array_equal(Learner.load(saved).predict_proba(TEST), p)
    # The learner in memory is none the worse for it.
    learner.save(saved)
    assert Learner.load(saved).classes_ == learner.classes_ == [0, 1, 2]


@pytest.mark.parametrize("what", [".safetensors", INFO])
def test_a_full_disk_leaves_a_new_folder_empty(
    what: str, learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_the_disk(patch, what)
        with pytest.raises(OSError):
            learner.save(tmp_path / "model")
    assert content(tmp_path) == {}
    with pytest.raises(DataError, match="holds no saved learner"):
        Learner.load(tmp_path / "model")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failure_at_the_last_moment(
    call: str, nth: int, learner: Learner, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say that they are full only when asked to have written."""
    before = content(saved)
    learner.learn(*images_of(2))
    true, calls = getattr(os, call), []

    def fails(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError):
            learner.save(saved)
    assert len(calls) == nth
    assert content(saved) == before


# Damage


def cut(to: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * to)])

    return damage


def flip(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(0.001), cut(0.5), cut(0.9999), flip(0), flip(0.001), flip(0.5), flip(1), Path.unlink],
    ids=["empty", "header cut", "half", "nearly all", "first byte", "header", "middle", "last byte", "missing"],
)
def test_damaged_tensors_are_found_and_named(damage: Callable[[Path], None], saved: Path) -> None:
    file = tensor_file(saved)
    damage(file)
    with pytest.raises(DataError, match=file.name):
        Learner.load(saved)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", "5", '"learner"', '{"a": 1}', "\0\0", "\udcff"])
def test_json_that_is_no_learner_is_found_and_named(text: str, saved: Path) -> None:
    (saved / INFO).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=INFO):
        Learner.load(saved)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_truncated_json_is_found_and_named(part: float, saved: Path) -> None:
    cut(part)(saved / INFO)
    with pytest.raises(DataError, match=INFO):
        Learner.load(saved)


def test_a_folder_without_a_learner_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=f"{folder} holds no saved learner"):
            Learner.load(folder)


@pytest.mark.parametrize("number", [0, 2, 99, "1", None])
def test_another_format_is_refused_and_named(number: Any, saved: Path) -> None:
    change(saved, "format", number)
    with pytest.raises(DataError, match=f"(?s){saved}.*format"):
        Learner.load(saved)


def change(folder: Path, key: str, value: Any) -> None:
    info = json.loads((folder / INFO).read_text())
    *outer, last = key.split(".")
    place = info
    for name in outer:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    reseal(folder, info)


def test_a_place_that_a_step_does_not_have_is_refused_when_it_is_loaded(learner: Learner, tmp_path: Path) -> None:
    """Of a step in which two epochs are trained, and then exemplars are chosen."""
    learner.learn(*images_of(2, 3), lambda now: now.save(tmp_path))
    assert Learner.load(tmp_path)._live is not None
    for stage, epoch in ((0, 3), (0, 99), (1, 1), (2, 0), (99, 0), (99, 99)):
        change(tmp_path, "live.stage", stage)
        change(tmp_path, "live.epoch", epoch)
        with pytest.raises(DataError, match=f"{tmp_path} .*: epoch {epoch} of stage {stage} is none of its step"):
            Learner.load(tmp_path)
    change(tmp_path, "live.epoch", 2)
    change(tmp_path, "live.stage", 0)
    assert Learner.load(tmp_path).learn(*images_of(2, 3)).classes_ == [0, 1, 2, 3]


KEYS = tuple(
    """
format learner state tensors sha256 note learner.method learner.memory learner.select learner.recipe learner.augment
learner.normalise learner.seed learner.device learner.precision learner.method.name learner.method.remedy
learner.method.remedy.name learner.method.remedy.alpha learner.method.T learner.recipe.epochs learner.recipe.lr
learner.recipe.milestones learner.augment.pad state.classes state.sizes state.shape state.alphas
""".split()  # noqa: SIM905
)


@pytest.mark.parametrize("key", KEYS)
def test_json_that_was_tampered_with_is_no_traceback(key: str, saved: Path) -> None:
    """Whatever is changed: either it still is a learner, or a DataError says which one is not."""
    original = (saved / INFO).read_bytes()
    values: tuple[Any, ...] = (..., None, [], {}, "?", -1, [1])
    for value in values:
        (saved / INFO).write_bytes(original)
        change(saved, key, value)
        try:
            Learner.load(saved)
        except DataError as error:
            assert str(saved) in str(error), value


@pytest.mark.parametrize("key", [key for key in KEYS if key != "note"])
def test_a_missing_entry_is_an_error(key: str, saved: Path) -> None:
    change(saved, key, ...)
    with pytest.raises(DataError, match=str(saved)):
        Learner.load(saved)


@pytest.mark.parametrize("key", ["learner.method.T", "learner.method.remedy.alpha", "learner.recipe.lr"])
@pytest.mark.parametrize("what", ["missing", "unknown"])
def test_a_setting_of_another_version_is_named(what: str, key: str, saved: Path) -> None:
    *_, name = key.split(".")
    change(saved, key if what == "missing" else f"{key}_new", ... if what == "missing" else 1)
    name = name if what == "missing" else f"{name}_new"
    with pytest.raises(DataError, match=f"(?s){saved}.*of this version of Equipoise: {name} is {what}"):
        Learner.load(saved)


@pytest.mark.parametrize(("key", "near"), [("method", "il-basline"), ("method.remedy", "blanced")])
def test_method_and_remedy_of_another_version_are_named(key: str, near: str, saved: Path) -> None:
    change(saved, f"learner.{key}.name", near)
    with pytest.raises(DataError, match=f"(?s){saved}.*{near}.*did you mean"):
        Learner.load(saved)


# No code


def test_loading_executes_nothing(learner: Learner, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    np.testing.assert_array_equal(Learner.load(saved).predict_proba(TEST), learner.predict_proba(TEST))


def test_a_pickle_is_not_opened(learner: Learner, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    learner.save(tmp_path / "model")
    file = tensor_file(tmp_path / "model")
    torch.save({"net": Bomb()}, file)
    renamed = file.rename(file.with_name(saved_files.name_tensors(hashlib.sha256(file.read_bytes()).hexdigest())))
    change(tmp_path / "model", "sha256", hashlib.sha256(renamed.read_bytes()).hexdigest())
    change(tmp_path / "model", "tensors", renamed.name)
    with pytest.raises(DataError, match="not a safetensors file"):
        Learner.load(tmp_path / "model")
    assert not (tmp_path / "executed").exists()
