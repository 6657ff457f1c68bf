"""A saved learner is one sealed thing: not a bit of it changes unnoticed, and nothing outside its folder is opened."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise import Balanced, DataError, ILBaseline, Learner, Recipe
from equipoise.data import datasets
from equipoise.learner.saved import INFO, seal

sys.path.insert(0, str(Path(__file__).parent))
import fuzz

DIGITS = datasets.load("digits")
TEST = DIGITS.test.x[:5].numpy()
WHICH = (DIGITS.train.y < 2).nonzero()[:60, 0]
IMAGES = DIGITS.train.x[WHICH].numpy(), [("zero", "one")[y] for y in DIGITS.train.y[WHICH].tolist()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed") / "model"
    Learner(ILBaseline(Balanced()), memory=3, recipe=Recipe(epochs=1, lr=0.05, batch=32)).learn(*IMAGES).save(folder)
    return folder


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def tensor_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def test_no_flipped_bit_goes_unnoticed(copy: Path) -> None:
    """Of every byte of the JSON a bit, the lowest, the next, and so on in turn."""
    original = (copy / INFO).read_bytes()
    assert len(original) > 600
    for at in range(len(original)):
        changed = bytearray(original)
        changed[at] ^= 1 << at % 8
        (copy / INFO).write_bytes(changed)
        with pytest.raises(DataError, match=str(copy)):
            Learner.load(copy)
    (copy / INFO).write_bytes(original)
    assert Learner.load(copy).classes_ == ["one", "zero"]


def test_no_flipped_bit_of_the_tensors_goes_unnoticed(copy: Path) -> None:
    path, rng = tensor_file(copy), random.Random(0)
    original = path.read_bytes()
    for at in (*range(0, 64, 7), *rng.sample(range(len(original)), 40)):
        changed = bytearray(original)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(DataError, match="checksum differs"):
            Learner.load(copy)


def test_files_of_two_learners_cannot_be_mixed(copy: Path, tmp_path: Path) -> None:
    Learner(ILBaseline(), memory=3, recipe=Recipe(epochs=1, batch=32)).learn(*IMAGES).save(tmp_path / "other")
    shutil.copy(tensor_file(tmp_path / "other"), tensor_file(copy))
    with pytest.raises(DataError, match="checksum differs"):
        Learner.load(copy)


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def become_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def become_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["json", "safetensors"])
@pytest.mark.parametrize(
    "become", [become_pipe, become_folder, become_link, become_link_to_nowhere, become_device, Path.unlink]
)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes among the files of this system")
def test_what_is_no_file_is_not_opened(become: Callable[[Path], None], name: str, copy: Path) -> None:
    (path,) = copy.glob(f"*.{name}")
    become(path)
    with pytest.raises(DataError, match=str(copy)) as caught:
        Learner.load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.safetensors", "", ".", "learner.json", None, 3, ["a"]])
def test_tensors_lie_in_the_same_folder(name: Any, copy: Path) -> None:
    info = json.loads((copy / INFO).read_text())
    info.pop("seal")
    (copy / INFO).write_bytes(seal({**info, "tensors": name}))
    with pytest.raises(DataError, match="not the description of a learner"):
        Learner.load(copy)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[]", "null", '{"seal": "' + "0" * 64 + '", "a": 1}', ""]
)
def test_json_that_is_no_learner_is_refused(text: str, copy: Path) -> None:
    (copy / INFO).write_text(text)
    with pytest.raises(DataError, match=str(copy / INFO)):
        Learner.load(copy)


UNFIT: dict[str, tuple[str, Any]] = {
    "classes in another number": ("classes", ["one"]),
    "a class twice": ("classes", ["one", "one"]),
    "classes as lists": ("classes", [["one"], ["zero"]]),
    "a class of many tuples": ("classes", ["one", fuzz.nested(400)]),
    "sizes that do not add up": ("sizes", [3]),
    "a step of no classes": ("sizes", [2, 0]),
    "a negative step": ("sizes", [3, -1]),
    "no α": ("alphas", []),
    "an α that is a word": ("alphas", ["1"]),
    "an image without height": ("shape", [1, 0, 8]),
    "another height": ("shape", [1, 9, 8]),
    "two dimensions": ("shape", [1, 8]),
    "a state that is a list": ("", []),
}


@pytest.mark.parametrize("name", UNFIT)
def test_numbers_that_do_not_fit_together_are_refused_in_one_sentence(name: str, copy: Path) -> None:
    key, value = UNFIT[name]
    info = json.loads((copy / INFO).read_text())
    info.pop("seal")
    info["state"] = {**info["state"], key: value} if key else value
    (copy / INFO).write_bytes(seal(info))
    with pytest.raises(DataError, match=str(copy)) as caught:
        Learner.load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [3, {"name": "lucir"}, ["x"], True])
def test_a_backbone_that_is_no_name_is_refused(name: Any, copy: Path) -> None:
    info = json.loads((copy / INFO).read_text())
    info.pop("seal")
    info["learner"]["backbone"] = name
    (copy / INFO).write_bytes(seal(info))
    with pytest.raises(DataError, match="its backbone is no name"):
        Learner.load(copy)


@pytest.mark.filterwarnings("ignore")
def test_some_hundred_models_changed_at_random(tmp_path: Path) -> None:
    """As `tests/fuzz.py` does ten thousand times."""
    outcomes = fuzz.fuzz(300, 7, tmp_path)
    assert sum(outcomes.values()) == 300 and len(outcomes) > 3
    assert not [outcome for outcome in outcomes if "!" in outcome or outcome == "change_bytes: another learner"]


def test_what_was_loaded_is_what_was_saved(model: Path) -> None:
    first, second = Learner.load(model), Learner.load(model)
    np.testing.assert_array_equal(first.predict_proba(TEST), second.predict_proba(TEST))
