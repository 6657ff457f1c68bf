"""The learner: what it accepts, what it gives back, and that bad input or a failure costs nothing."""

from __future__ import annotations

import contextlib
import copy
import enum
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from equipoise import (
    LUCIR,
    NCM,
    Balanced,
    BalancedFinetuning,
    Batch,
    DataError,
    EquipoiseError,
    Finetune,
    ILBaseline,
    Learner,
    Meta,
    Method,
    Recipe,
    RunError,
    Step,
    UsageError,
    methods,
)
from equipoise.data import datasets
from equipoise.data.images import Images
from equipoise.data.memory import Budget
from equipoise.nets.backbones import Backbone

RECIPE = Recipe(epochs=2, lr=0.05, batch=32)
DIGITS = datasets.load("digits")
TEST = DIGITS.test.x.numpy()


def new(**settings: Any) -> Learner:
    return Learner(**{"method": ILBaseline(Balanced()), "memory": 3, "recipe": RECIPE, **settings})


def images_of(*classes: int, each: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """(n, 1, 8, 8) uint8 and labels, the classes mixed."""
    which = torch.cat([(DIGITS.train.y == c).nonzero()[:each, 0] for c in classes]).sort().values
    return DIGITS.train.x[which].numpy(), DIGITS.train.y[which].numpy()


def tensors(learner: Learner) -> dict[str, Tensor]:
    """Everything that was learned, exemplars included, as it is saved."""
    with tempfile.TemporaryDirectory() as folder:
        learner.save(folder)
        (file,) = Path(folder).glob("*.safetensors")
        return safetensors.torch.load(file.read_bytes())


def assert_identical(a: Learner, b: Learner) -> None:
    """Not a bit differs."""
    assert (a.classes_, a.sizes_, a.alphas_) == (b.classes_, b.sizes_, b.alphas_)
    one, two = tensors(a), tensors(b)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    if a.classes_:
        np.testing.assert_array_equal(a.predict_proba(TEST), b.predict_proba(TEST))


# Images


@pytest.mark.parametrize("channels", [1, 3])
def test_all_forms_of_images_give_the_same_learner(channels: int) -> None:
    first, more = images_of(0, 1), images_of(2)
    colours = np.array([1.0, 0.5, 0.2])[:channels, None, None]  # so that the order of the channels matters

    def nchw(x: np.ndarray) -> np.ndarray:
        return np.asarray(x * colours, np.uint8)

    def nhwc(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(nchw(x).transpose(0, 2, 3, 1))

    forms: dict[str, Callable[[np.ndarray], Any]] = {
        "numpy NCHW": nchw,
        "numpy NHWC": nhwc,
        "numpy NHWC, a view with strides": lambda x: nchw(x).transpose(0, 2, 3, 1),
        "numpy, read backwards": lambda x: nchw(x)[::-1].copy()[::-1],
        "torch NCHW": lambda x: torch.from_numpy(nchw(x)),
        "torch NHWC": lambda x: torch.from_numpy(nhwc(x)),
        "torch NCHW, channels last": lambda x: torch.from_numpy(nchw(x)).to(memory_format=torch.channels_last),
    }
    if channels == 1:
        forms["numpy (n, h, w)"] = lambda x: nchw(x)[:, 0]
        forms["torch (n, h, w)"] = lambda x: torch.from_numpy(nchw(x)[:, 0])
    learners = {}
    for name, form in forms.items():
        learner = new().learn(form(first[0]), first[1]).learn(form(more[0]), more[1])
        learners[name] = learner, learner.predict_proba(form(TEST)), tensors(learner)
    reference, p, saved = learners.pop("numpy NCHW")
    assert reference.exemplars_ is not None and reference.exemplars_.x.shape[1:] == (channels, 8, 8)
    for name, (learner, p_form, saved_form) in learners.items():
        assert learner.classes_ == reference.classes_, name
        np.testing.assert_array_equal(p, p_form, err_msg=name)
        assert all(torch.equal(saved[k], saved_form[k]) for k in saved), name


def test_grey_images_of_width_3_are_not_taken_for_colours() -> None:
    x, y = images_of(0, 1)
    narrow = np.ascontiguousarray(x[:, 0, :, 3:6])  # (n, 8, 3): three dimensions leave no doubt
    learner = new().learn(narrow, y)
    assert learner.exemplars_ is not None and learner.exemplars_.x.shape[1:] == (1, 8, 3)


def test_images_that_cannot_be_written_to_are_fine() -> None:
    x, y = images_of(0, 1)
    frozen = np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_identical(new().learn(frozen, y), new().learn(x, y))


def test_the_images_handed_over_stay_as_they_are_and_need_not_stay() -> None:
    x, y = images_of(0, 1)
    mine, copy = x.copy(), y.copy()
    learner = new().learn(mine, copy)
    np.testing.assert_array_equal(mine, x)
    np.testing.assert_array_equal(copy, y)
    mine[:] = 0
    assert_identical(learner, new().learn(x, y))


def test_images_larger_than_digits() -> None:
    """A CIFAR-sized image goes through the ResNet; a larger one is refused in words."""
    x, y = images_of(0, 1, each=4)
    large = np.repeat(np.repeat(x, 4, 2), 4, 3)
    learner = new(recipe=Recipe(epochs=1, batch=8)).learn(large, y)
    assert learner.predict_proba(large).shape == (8, 2)
    larger = np.repeat(np.repeat(x, 9, 2), 9, 3)  # 72 x 72: another net
    learner = new(recipe=Recipe(epochs=1, batch=8)).learn(larger, y)
    assert learner.predict_proba(larger).shape == (8, 2)


# Labels


NAMES: dict[str, tuple[list[Any], list[Any], str]] = {
    # what digits 0, 1, 2 and 3 are called, the classes in order, the kind of numpy array that predict returns
    "ints": ([5, -3, 12, 4], [-3, 5, 4, 12], "i"),
    "strings": (["cat", "ant", "dog", "bee"], ["ant", "cat", "bee", "dog"], "U"),
    "floats": ([0.5, -1.5, 2.0, 1.25], [-1.5, 0.5, 1.25, 2.0], "f"),
    "tuples": ([("a", 2), ("a", 1), ("b", ("c", 0)), ()], [("a", 1), ("a", 2), (), ("b", ("c", 0))], "O"),
    "tuples of one length": ([(1, 2), (0, 3), (4, 4), (3, 5)], [(0, 3), (1, 2), (3, 5), (4, 4)], "O"),
    "mixed kinds": (["one", 1, None, (1, "x")], ["one", 1, None, (1, "x")], "O"),
    "ints, then a string": ([3, 1, "x", "a"], [1, 3, "a", "x"], "O"),
    "booleans": ([True, False, 7, 6], [False, True, 6, 7], "O"),
    "numpy scalars": ([np.int16(5), np.int64(-3), np.uint8(12), np.int32(4)], [-3, 5, 4, 12], "i"),
    "numpy strings": ([np.str_(v) for v in "cadb"], ["a", "c", "b", "d"], "U"),
    "torch scalars": ([torch.tensor(v) for v in (5, -3, 12, 4)], [-3, 5, 4, 12], "i"),
    "large ints": ([2**40, 2**39, 1, 0], [2**39, 2**40, 0, 1], "i"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_labels_of_any_hashable_kind(kind: str, tmp_path: Path) -> None:
    names, classes, array = NAMES[kind]
    learner = new(recipe=Recipe(epochs=6, lr=0.05, batch=32))
    x, y = images_of(0, 1, each=100)
    learner.learn(x, [names[k] for k in y])
    assert learner.classes_ == classes[:2]
    assert np.mean([a == names[k] for a, k in zip(learner.predict(x).tolist(), y)]) > 0.9
    x, y = images_of(2, 3, each=20)
    learner.learn(x, [names[k] for k in y])
    assert learner.classes_ == classes
    # Plain Python values, not numpy's: they are what JSON and the user's own dictionaries know.
    assert {type(c).__module__ for c in learner.classes_} == {"builtins"}
    labels = learner.predict(x)
    assert isinstance(labels, np.ndarray) and labels.shape == (len(x),) and labels.dtype.kind == array
    assert labels.tolist() == [classes[k] for k in learner.predict_proba(x).argmax(1)]
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path)
    assert loaded.classes_ == learner.classes_ and list(map(type, loaded.classes_)) == list(map(type, learner.classes_))
    assert loaded.predict(x).dtype == labels.dtype and loaded.predict(x).tolist() == labels.tolist()


@pytest.mark.parametrize("form", [np.asarray, torch.tensor, tuple, list, lambda y: (v for v in y)])
def test_labels_in_any_container(form: Callable[[Any], Any]) -> None:
    x, y = images_of(3, 1)
    learner = new().learn(x, form(y.tolist()))
    assert learner.classes_ == [1, 3] and {type(c) for c in learner.classes_} == {int}
    assert_identical(learner, new().learn(x, y))


# Callbacks


def test_the_callback_comes_once_an_epoch_with_a_learner_that_predicts() -> None:
    calls: list[tuple[int, int, int, list[Any]]] = []
    losses = []

    def look(learner: Learner) -> None:
        e = learner.progress_
        assert e is not None and learner.unfinished_
        assert set(learner.predict(TEST).tolist()) <= set(learner.classes_)
        p = learner.predict_proba(TEST)
        assert p.shape[1] == len(learner.classes_)
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
        calls.append((e.step, e.epoch, e.epochs, learner.classes_))
        losses.append(e.loss)

    learner = new(recipe=Recipe(epochs=3, lr=0.05, batch=32))
    learner.learn(*images_of(0, 1), callback=look).learn(*images_of(2), callback=look)
    assert calls == [(0, k, 3, [0, 1]) for k in (1, 2, 3)] + [(1, k, 3, [0, 1, 2]) for k in (1, 2, 3)]
    assert losses[2] < losses[0]
    assert learner.progress_ is None and not learner.unfinished_


def test_ticks_come_after_every_batch() -> None:
    ticks: list[float] = []
    learner = new().learn(*images_of(0, 1), tick=ticks.append)
    assert len(ticks) == 80 * 2 // 32 and ticks == sorted(ticks) and 0 < ticks[0] < 1 and ticks[-1] == 2
    assert_identical(learner, new().learn(*images_of(0, 1)))


@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=2)])
def test_looking_changes_nothing(remedy: Any, tmp_path: Path) -> None:
    def look(learner: Learner) -> None:
        learner.predict(TEST)
        learner.predict_proba(TEST[:7])
        learner.logits(TEST[:1])
        learner.save(tmp_path)
        Learner.load(tmp_path).predict(TEST)
        torch.rand(3), np.random.rand(3)  # whatever else it does
        with pytest.raises(UsageError):
            learner.predict(TEST[:, :, :4])

    settings: dict[str, Any] = {"method": ILBaseline(remedy), "memory": 3, "recipe": Recipe(3, 0.05, batch=32)}
    watched, alone = Learner(**settings), Learner(**settings)
    for classes in ((0, 1, 2), (3,), (4, 5)):
        watched.learn(*images_of(*classes), callback=look)
        alone.learn(*images_of(*classes))
    assert_identical(watched, alone)


def test_a_prediction_does_not_depend_on_its_company() -> None:
    """Batch statistics would make it so; also more images than are computed at a time."""
    learner = new(recipe=Recipe(epochs=4, lr=0.05, batch=32)).learn(*images_of(0, 1, 2))
    many = np.concatenate([TEST] * 4)
    assert len(many) > 1000
    p = learner.predict_proba(many)
    np.testing.assert_allclose(p[: len(TEST)], learner.predict_proba(TEST), atol=1e-5)
    np.testing.assert_allclose(p[:1], learner.predict_proba(TEST[:1]), atol=1e-5)


class StopError(Exception):
    pass


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=2)])
def test_a_callback_that_raises_leaves_the_learner_as_it_was(
    remedy: Any, epoch: int, error: type[BaseException]
) -> None:
    settings: dict[str, Any] = {"method": ILBaseline(remedy), "memory": 3, "recipe": Recipe(3, 0.05, batch=32)}

    def stop(learner: Learner) -> None:
        assert learner.progress_ is not None
        if learner.progress_.epoch == epoch:
            raise error

    learner, never_stopped = Learner(**settings), Learner(**settings)
    with pytest.raises(error):
        learner.learn(*images_of(0, 1, 2), callback=stop)
    assert learner.classes_ == [] and learner.sizes_ == () and learner.exemplars_ is None
    assert not learner.unfinished_ and learner.progress_ is None
    with pytest.raises(UsageError, match="nothing has been learned yet"):
        learner.predict(TEST)
    for classes in ((0, 1, 2), (3, 4), (5,)):
        before = (learner.predict_proba(TEST), tensors(learner)) if learner.classes_ else None
        with pytest.raises(error):
            learner.learn(*images_of(*classes), callback=stop)
        if before is not None:
            assert learner.classes_ == never_stopped.classes_ and not learner.unfinished_
            np.testing.assert_array_equal(learner.predict_proba(TEST), before[0])
            assert all(torch.equal(v, before[1][k]) for k, v in tensors(learner).items())
            assert_identical(learner, never_stopped)
        learner.learn(*images_of(*classes))
        never_stopped.learn(*images_of(*classes))
        assert_identical(learner, never_stopped)


# What a callback saved


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """A learner saved in the second step, after the first of two epochs."""

    def save(learner: Learner) -> None:
        if learner.progress_ and learner.progress_.epoch == 1:
            learner.save(tmp_path)

    new().learn(*images_of(0, 1)).learn(*images_of(2, 3), callback=save)
    return tmp_path


def test_an_unfinished_step_goes_on_with_its_own_data_only(halfway: Path) -> None:
    learner = Learner.load(halfway)
    assert learner.unfinished_ and learner.classes_ == [0, 1, 2, 3]
    p = learner.predict_proba(TEST)
    x, y = images_of(2, 3)
    others: dict[str, tuple[Any, Any]] = {
        "another class": images_of(4),
        "one class less": images_of(2),
        "old classes": images_of(0, 1),
        "one image less": (x[1:], y[1:]),
        "another order": (x[::-1], y[::-1]),
        "labels exchanged": (x, 5 - y),
    }
    for name, data in others.items():
        with pytest.raises(UsageError, match="step 1 is not finished"):
            learner.learn(*data)
        assert learner.unfinished_, name
        np.testing.assert_array_equal(learner.predict_proba(TEST), p, err_msg=name)
    assert_identical(learner.learn(x, y), new().learn(*images_of(0, 1)).learn(x, y))


def test_going_on_can_be_interrupted_as_well(halfway: Path) -> None:
    def stop(_: Learner) -> None:
        raise StopError

    learner = Learner.load(halfway)
    p = learner.predict_proba(TEST)
    for _ in range(2):
        with pytest.raises(StopError):
            learner.learn(*images_of(2, 3), callback=stop)
        assert learner.unfinished_
        np.testing.assert_array_equal(learner.predict_proba(TEST), p)
    assert_identical(learner.learn(*images_of(2, 3)), new().learn(*images_of(0, 1)).learn(*images_of(2, 3)))


def test_what_was_saved_goes_on_from_there_and_not_from_the_start(halfway: Path) -> None:
    epochs = []
    Learner.load(halfway).learn(*images_of(2, 3), callback=lambda one: epochs.append(one.progress_.epoch))  # type: ignore[union-attr]
    assert epochs == [2]


# Normalisation


def statistics(learner: Learner) -> tuple[np.ndarray, np.ndarray]:
    saved = tensors(learner)
    return saved["net.mean"].flatten().numpy(), saved["net.std"].flatten().numpy()


def test_normalisation_is_measured_on_the_first_images_and_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scale = np.array([255, 120, 40])[:, None, None]  # every channel has its own statistics
    x = (rng.random((60, 3, 8, 8)) * scale).astype(np.uint8)
    y = np.arange(60) % 2
    learner = new().learn(x, y)
    mean, std = statistics(learner)
    as_float = x.astype(np.float64)
    np.testing.assert_allclose(mean, as_float.mean((0, 2, 3)), rtol=2e-7)
    np.testing.assert_allclose(std, as_float.std((0, 2, 3)), rtol=2e-7)
    learner.save(tmp_path)
    for one in (learner, Learner.load(tmp_path)):
        one.learn(255 - x, y + 2)  # far brighter
        for now, then in zip(statistics(one), (mean, std)):
            np.testing.assert_array_equal(now, then)


def test_normalisation_can_be_given() -> None:
    x, y = images_of(0, 1)
    z = x.astype(np.float64) / 255
    measured, given = new().learn(x, y), new(normalise=([z.mean()], [z.std()])).learn(x, y)
    np.testing.assert_allclose(statistics(given), statistics(measured), rtol=2e-7)
    other = new(normalise=([0.5], [0.25])).learn(x, y)
    np.testing.assert_allclose(statistics(other), [[127.5], [63.75]], rtol=2e-7)
    assert not np.array_equal(other.predict_proba(TEST), measured.predict_proba(TEST))


def test_images_of_one_colour_are_no_division_by_zero() -> None:
    x, y = images_of(0, 1)
    flat = np.concatenate([x, np.full_like(x, 7), x], 1)  # the second channel is all 7
    learner = new().learn(flat, y)
    assert statistics(learner)[1][1] == 1
    assert np.isfinite(learner.predict_proba(flat)).all()


@pytest.mark.parametrize("bad", [([0.5, 0.5], [0.2, 0.2]), ([0.5], [0.0]), ([0.5], [-1.0]), ([0.5], [float("nan")])])
def test_bad_normalisation_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"a positive standard deviation for each|has 2 channels"):
        new(normalise=bad).learn(*images_of(0, 1))


# Randomness


def test_learning_leaves_the_global_generators_alone_and_ignores_them() -> None:
    learners = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
        learner = Learner(ILBaseline(Meta(every=2)), memory=3, select="random", recipe=RECIPE)
        learners.append(learner.learn(*images_of(0, 1)).learn(*images_of(2)))
        learner.predict(TEST)
        assert torch.equal(before[0], torch.get_rng_state())
        np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
        assert before[2] == random.getstate()
    assert_identical(*learners)


def test_a_step_does_not_depend_on_what_was_done_in_between(tmp_path: Path) -> None:
    """Random streams are named by seed and step: trying something else first changes nothing."""
    straight = new().learn(*images_of(0, 1)).learn(*images_of(2))
    wandering = new().learn(*images_of(0, 1))
    wandering.save(tmp_path)
    wandering.learn(*images_of(5, 6))
    assert_identical(Learner.load(tmp_path).learn(*images_of(2)), straight)
    assert not np.array_equal(wandering.predict_proba(TEST)[:, :2], straight.predict_proba(TEST)[:, :2])


def test_the_seed_is_in_everything_that_is_drawn() -> None:
    """With a learning rate of nearly 0 the weights stay what they were drawn to be."""
    still: dict[str, Any] = {"recipe": Recipe(epochs=1, lr=1e-12, batch=32), "select": "random"}
    one, two, same = (
        tensors(new(seed=seed, **still).learn(*images_of(0, 1)).learn(*images_of(2, 3))) for seed in (1, 2, 1)
    )
    drawn = [name for name in one if name.endswith(".weight") and one[name].ndim > 1]
    assert len(drawn) == 4  # three convolutions and the head
    for name in drawn:
        assert torch.equal(one[name], same[name])
        assert ((one[name] - two[name]).abs() > 1e-3).float().mean() > 0.8, name
        assert len(set(one[name].flatten()[:100].tolist())) > 90
    rows = one["net.head.weight"]
    assert not torch.allclose(rows[:2], rows[2:], atol=1e-3), "every step draws the same rows"
    assert not torch.equal(one["memory.x"], two["memory.x"])


# Bad input


def bad_inputs() -> dict[str, tuple[Any, Any, str]]:
    x, y = images_of(5, 6)
    labels = y.tolist()
    square = x[:, 0]
    return {
        "empty": (x[:0], [], "no images"),
        "fewer labels": (x, labels[:-1], "80 images but 79 labels"),
        "more labels": (x, [*labels, 5], "80 images but 81 labels"),
        "no labels": (x, [], "80 images but 0 labels"),
        "labels are None": (x, None, "labels"),
        "one label for all": (x, 5, "labels"),
        "labels in two dimensions": (x, y[:, None], r"a label must be.*the ndarray \[5\]"),
        "float images": (x / 255, y, "uint8.* not float64"),
        "float32 torch images": (torch.from_numpy(x).float(), y, "uint8.* not float32"),
        "NaN images": (np.full(x.shape, np.nan, np.float32), y, "uint8.* not float32"),
        "int images": (x.astype(np.int64), y, "uint8.* not int64"),
        "images are None": (None, y, "uint8"),
        "images of several sizes": ([image[0, : 4 + k % 2] for k, image in enumerate(x)], y, "equal-sized"),
        "one image": (square[0], [5] * 8, r"not \(8, 8\)|height"),
        "flat images": (x.reshape(80, 64), y, r"height.*\(80, 64\)"),
        "5 dimensions": (x[None], y, r"\(1, 80, 1, 8, 8\)"),
        "2 channels": (np.concatenate([x, x], 1), y, r"1 or 3 channels.*\(80, 2, 8, 8\)"),
        "no pixels": (x[..., :0], y, r"\(80, 1, 8, 0\)"),
        "another size": (x[:, :, :6], y, "6 x 8 .*8 x 8"),
        "colours": (np.repeat(x, 3, 1), y, r"3 channel.*1 channel"),
        "NaN label": (x, [float("nan"), *labels[1:]], "label is NaN"),
        "NaN labels in numpy": (x, np.where(y == 5, np.nan, y), "label is NaN"),
        "NaN in a tuple": (x, [(float("nan"),), *labels[1:]], "NaN"),
        "unhashable label": (x, [[5], *labels[1:]], r"a label must be.*the list \[5\]"),
        "unhashable inside": (x, [([5],), *labels[1:]], r"a label must be.*the list \[5\]"),
        "a class already learned": (x, [1, *labels[1:]], "already learned: 1;"),
        "all classes already learned": (*images_of(0, 1), "already learned: 0, 1;"),
    }


@pytest.fixture(scope="module")
def two_steps() -> Learner:
    """What a learner that never met bad input has learned."""
    return new().learn(*images_of(0, 1)).learn(*images_of(2, 3))


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_refused_and_nothing_is_lost(name: str, two_steps: Learner) -> None:
    x, y, message = bad_inputs()[name]
    learner = new()
    needs_first_step = ("another size", "colours", "a class already learned", "all classes already learned")
    if name not in needs_first_step:
        with pytest.raises(UsageError, match=message):
            learner.learn(x, y)
        assert learner.classes_ == [] and not learner.unfinished_
    learner.learn(*images_of(0, 1))
    p = learner.predict_proba(TEST)
    with pytest.raises(UsageError, match=message):
        learner.learn(x, y)
    assert learner.classes_ == [0, 1] and learner.sizes_ == (2,) and not learner.unfinished_
    np.testing.assert_array_equal(learner.predict_proba(TEST), p)
    assert_identical(learner.learn(*images_of(2, 3)), two_steps)


def test_usage_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="no images"):
        new().learn(TEST[:0], [])


def test_the_first_step_needs_two_classes() -> None:
    learner = new()
    with pytest.raises(UsageError, match="first step needs at least two classes"):
        learner.learn(*images_of(0))
    assert learner.classes_ == []
    assert_identical(learner.learn(*images_of(0, 1)), new().learn(*images_of(0, 1)))


def test_predicting_before_learning() -> None:
    learner = new()
    for ask in (learner.predict, learner.predict_proba, learner.logits):
        with pytest.raises(UsageError, match="nothing has been learned yet: call learn"):
            ask(TEST)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (TEST[:, :, :7], "7 x 8 .*8 x 8"),
        (np.repeat(TEST, 3, 1), "3 channel.*1 channel"),
        (TEST / 255, "uint8.*float64"),
        (TEST.reshape(-1, 64), "height"),
        (TEST[:0], "no images"),
        ("images.png", "uint8"),
    ],
)
def test_predicting_bad_images(images: Any, message: str, two_steps: Learner) -> None:
    p = two_steps.predict_proba(TEST)
    for ask in (two_steps.predict, two_steps.predict_proba):
        with pytest.raises(UsageError, match=message):
            ask(images)
    np.testing.assert_array_equal(two_steps.predict_proba(TEST), p)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"memory": m}, "memory must be a number") for m in ("many", "", "total:", "total:x", "-3", -3, 2.5, "2.5")),
        ({"select": "best"}, "select must be 'herding' or 'random', not 'best'"),
        *(({"seed": v}, "seed must be a whole number of 0 or more") for v in (1.5, "a", None, -1)),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, not 'tpu'"),
        ({"device": "cuda:x"}, "device must be auto, cpu or cuda, not 'cuda:x'"),
        ({"engine": "steam"}, "engine must be auto, .*eager, not 'steam'"),
        ({"engine": "captured", "device": "cpu"}, "engine captured needs a GPU: use auto or eager"),
        ({"precision": "fp16"}, "precision must be auto, fp32 or bf16, not 'fp16'"),
        ({"method": "il-baseline"}, "method must be a Method such as ILBaseline"),
        ({"method": ILBaseline}, "method must be a Method such as ILBaseline"),
        ({"method": Balanced()}, "method must be a Method such as ILBaseline"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Learner(**settings)


def test_memory_may_be_said_in_several_ways() -> None:
    for memory in (7, "7", " 7 ", Budget(7)):
        assert Learner(memory=memory).budget_ == Budget(7)
        assert Learner(memory=memory).memory is memory
    assert Learner(memory="total:70").budget_ == Budget(total=70) == Learner(memory=Budget(total=70)).budget_


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_that_is_not_there(device: str) -> None:
    with pytest.raises(RunError, match=f"device {device} was not found: .*; use device='cpu'$"):
        Learner(device=device)
    assert Learner(device="auto").device_.type == "cpu"


def test_training_that_diverges_is_said_and_undone() -> None:
    learner, same = (new().learn(*images_of(0, 1)) for _ in range(2))
    learner.recipe = Recipe(epochs=3, lr=1e20, batch=32)
    with pytest.raises(RunError, match=r"training diverged.*step 1, epoch .*lower Recipe\(lr=\.\.\.\)$"):
        learner.learn(*images_of(2, 3))
    learner.recipe = RECIPE
    assert_identical(learner.learn(*images_of(2, 3)), same.learn(*images_of(2, 3)))


def test_meta_needs_an_image_of_every_class_to_train_on() -> None:
    learner, same = (Learner(ILBaseline(Meta()), 3, recipe=RECIPE).learn(*images_of(0, 1)) for _ in range(2))
    with pytest.raises(UsageError, match=r"holds 1 image.* but 4 has only 1"):
        x, y = map(np.concatenate, zip(images_of(3), images_of(4, each=1)))
        learner.learn(x, y)
    assert_identical(learner, same)


SEEN: list[Step] = []


@dataclass(frozen=True)
class Spy(ILBaseline):
    """Sees what a method sees."""

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        SEEN.append(s)
        return super().epoch(s, gen, batch)


@pytest.mark.parametrize("count", ["train", "all"])
@pytest.mark.parametrize(("memory", "share"), [(4, 4), ("total:18", 6)])
def test_meta_holds_out_the_same_number_of_every_class(memory: int | str, share: int, count: Any) -> None:
    """B_t is held out of D_t for this step only; n counts D_t, or all; the exemplars are chosen from all of X_t."""
    SEEN.clear()
    remedy = Meta(every=2, hold_out=0.5, count=count)
    learner = Learner(Spy(remedy), memory, recipe=RECIPE).learn(*images_of(0, 1, 2))
    assert {len(s.held) for s in SEEN} == {0}
    exemplars = learner.exemplars_
    assert exemplars is not None
    learner.learn(*images_of(3, 4))
    s = SEEN[-1]
    assert s.t == 1 and s.n_old == 3
    h = share // 2
    assert s.images.y[s.held].bincount().tolist() == [h] * 5
    assert s.y.bincount().tolist() == [share - h] * 3 + [40 - h] * 2
    assert s.n.tolist() == s.y.bincount().tolist()
    counted = s.n if count == "train" else s.n + h
    assert s.lam.tolist() == pytest.approx((counted * torch.tensor([learner.alphas_[-1]] * 3 + [1, 1])).tolist())
    there = sorted(x.numpy().tobytes() for x in s.images.x[torch.cat([s.where, s.held])])
    assert there == sorted(x.tobytes() for x in [*images_of(3, 4)[0], *exemplars.x.numpy()])
    all_kept = Learner(Spy(remedy), 40, recipe=RECIPE).learn(*images_of(0, 1, 2)).learn(*images_of(3, 4))
    assert all_kept.exemplars_ is not None and all_kept.exemplars_.y.bincount().tolist() == [40] * 5


class Colour(enum.IntEnum):
    RED = 0
    BLUE = 1


class Place(NamedTuple):
    row: int
    column: int


def nested(depth: int) -> Any:
    return (nested(depth - 1),) if depth else 0


REFUSED: dict[str, tuple[Any, str]] = {
    "frozensets": ([frozenset({1}), frozenset({1, 2})], "not the frozenset"),
    "bytes": ([b"a", b"b"], "not the bytes b'a'"),
    "fractions": ([Fraction(1, 2), 3], "not the Fraction 1/2"),
    "bytes in a tuple": ([(1, b"x"), 2], "not the bytes b'x'"),
    "decimals": ([Decimal("nan"), Decimal(1)], "not the Decimal NaN"),
    "days": (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), "not the datetime64 2020-01-01"),
    "nanoseconds": (np.array(["2020-01-01", "2020-01-02"], "M8[ns]"), "not the datetime64 2020-01-01T"),
    "no time": ([np.datetime64("NaT"), np.datetime64("2020")], "not the datetime64 NaT"),
    "spans of time": (np.array([1, 2], "m8[ns]"), "not the timedelta64 1 nanoseconds"),
    "a character in halves": (["\ud83d\ude42", "\U0001f642"], "in two halves"),
    "members of an enumeration": ([Colour.RED, Colour.BLUE], "not the Colour"),
    "named tuples": ([Place(1, 2), Place(2, 3)], "not the Place"),
    "complex numbers": (np.array([1j, 2]), "not the complex"),
    "4,400 digits": ([10**4400, 1], "more than 1000 digits"),
    "tuples in tuples": ([nested(950), 1], "more than 20 deep"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_could_not_be_saved_are_refused_at_once(name: str) -> None:
    labels, message = REFUSED[name]
    x, y = images_of(0, 1)
    learner = new()
    with pytest.raises(UsageError, match=message):
        learner.learn(x, [labels[k] for k in y])
    assert learner.classes_ == []
    learner.learn(x, y)
    with pytest.raises(UsageError, match=message):
        learner.rename({1: labels[0]})
    assert learner.classes_ == [0, 1]


@pytest.mark.parametrize("labels", [{0, 1}, {0: 1, 1: 0}, frozenset({0, 1}), {0: 1}.keys()])
def test_labels_without_an_order_are_refused(labels: Any) -> None:
    with pytest.raises(UsageError, match="in the order of the images"):
        new().learn(images_of(0, 1)[0][:2], labels)


EXACT: dict[str, list[Any]] = {
    "beyond the whole numbers of a float": [2**53 + 1, 2**53],
    "beyond 64 bits": [2**63, 5],
    "mixed signs": [-1, 2**63],
    "a NUL at the end": ["a", "a\0"],
    "two NULs": ["b\0", "c\0\0"],
    "a lone surrogate": ["\udcff", "name"],
    "emoji and an empty string": ["", "\U0001f600"],
    "zeros": [0.0, 1e-320],
    "infinities": [float("inf"), -float("inf")],
    "a thousand digits": [10**999, -(10**999)],
}


@pytest.mark.parametrize("name", EXACT)
def test_labels_come_back_as_they_went_in(name: str, tmp_path: Path) -> None:
    labels = EXACT[name]
    x, y = images_of(0, 1)
    learner = new(recipe=Recipe(epochs=6, lr=0.05, batch=32)).learn(x, [labels[k] for k in y])
    learner.save(tmp_path)
    for one in (learner, Learner.load(tmp_path)):
        found = one.predict(x)
        assert {*found.tolist()} == {*labels} == {*one.classes_}
        assert {type(label) for label in found.tolist()} == {type(labels[0])}
        kinds = {one.predict(x[k : k + 1]).dtype for k in range(8)}
        assert kinds == {found.dtype}, "the kind depends on what is in the batch"


def test_a_memory_that_is_too_small_to_keep_anything_says_so(caplog: pytest.LogCaptureFixture) -> None:
    new(memory="total:1").learn(*images_of(0, 1))
    assert caplog.messages == ["memory total:1 is less than an image for each of 2 classes: no images are kept"]
    caplog.clear()
    for memory in (0, "total:0", "total:2"):
        new(memory=memory).learn(*images_of(0, 1))
    assert caplog.messages == []


# What the caller is in the middle of


def test_images_given_as_a_tensor_are_copied() -> None:
    x, y = images_of(0, 1)
    given = torch.from_numpy(x.copy())
    learner = new().learn(given, y, callback=lambda learner: [given.zero_()].clear())
    assert_identical(learner, new().learn(x, y))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("inside", [torch.inference_mode, lambda: default_dtype(torch.float64), torch.no_grad])
def test_learning_and_loading_are_the_same_inside(inside: Callable[[], Any], tmp_path: Path) -> None:
    plain, learner = new().learn(*images_of(0, 1)), new()
    with inside():
        learner.learn(torch.from_numpy(images_of(0, 1)[0]), images_of(0, 1)[1])
        np.testing.assert_array_equal(learner.predict_proba(TEST), plain.predict_proba(TEST))
        learner.save(tmp_path)
        loaded = Learner.load(tmp_path)
    assert_identical(loaded, plain)
    after = [one.learn(*images_of(2, 3)) for one in (loaded, learner, plain)]
    assert_identical(after[0], after[2])
    assert_identical(after[1], after[2])


def test_two_threads_cannot_teach_one_learner() -> None:
    learner, told = new(), []

    def teach() -> None:
        try:
            learner.learn(*images_of(2, 3))
        except UsageError as error:
            told.append(str(error))

    def callback(learner: Learner) -> None:
        thread = threading.Thread(target=teach)
        thread.start()
        thread.join()

    learner.learn(*images_of(0, 1), callback=callback)
    assert len(told) == 2 and "another thread" in told[0]
    assert_identical(learner, new().learn(*images_of(0, 1)))


@pytest.mark.parametrize("name", ["callback", "tick"])
def test_what_cannot_be_called_is_refused_before_anything_is_learned(name: str) -> None:
    learner = new()
    with pytest.raises(UsageError, match=f"{name} must be a function, not 3"):
        learner.learn(*images_of(0, 1), **{name: 3})
    assert learner.classes_ == []


ODD_IMAGES: dict[str, tuple[Any, str]] = {
    "sparse": (torch.zeros(4, 1, 8, 8, dtype=torch.uint8).to_sparse(), "sparse"),
    "meta": (torch.zeros(4, 1, 8, 8, dtype=torch.uint8, device="meta"), "meta"),
    "an array of objects": (np.array([None, 1, 2, 3]), r"np\.stack.*an array of objects"),
    "a string": ("images", "uint8"),
}


@pytest.mark.parametrize("name", ODD_IMAGES)
def test_what_holds_no_pixels_is_refused(name: str) -> None:
    images, message = ODD_IMAGES[name]
    with pytest.raises(UsageError, match=message):
        new().learn(images, [0, 0, 1, 1])


@pytest.mark.parametrize("labels", [torch.zeros(4).to_sparse(), torch.zeros(4, device="meta")])
def test_labels_that_hold_no_values_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="labels must be an ordinary tensor"):
        new().learn(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), labels)


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", "auto"])
def test_a_device_is_named_or_given(device: Any, tmp_path: Path) -> None:
    learner = new(device=device).learn(*images_of(0, 1))
    assert learner.device is device and learner.device_ == torch.device("cpu")
    learner.save(tmp_path)
    assert Learner.load(tmp_path, device=device).device_ == torch.device("cpu")
    with pytest.raises(UsageError, match=r"^device must be auto, cpu or cuda, not 'cup'"):
        Learner.load(tmp_path, device="cup")


NO_STATISTICS = (
    3, ([float("nan")], [1.0]), ("a", "b"), ([0.5], [0.0]), ([0.5],), ([0.5, 0.5], [1.0]), ([10**400], [1.0])
)  # fmt: skip


@pytest.mark.parametrize("bad", NO_STATISTICS)
def test_normalisation_of_a_wrong_kind_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(UsageError, match="normalise must be a mean and a positive standard deviation"):
        new(normalise=bad)


@pytest.mark.parametrize(("names", "message"), [({7: "seven"}, "no class 7"), (["p"], "a dict"), ({0: [1]}, "list")])
def test_names_that_make_no_sense_are_refused(names: Any, message: str) -> None:
    learner = new().learn(*images_of(0, 1))
    with pytest.raises(UsageError, match=message):
        learner.rename(names)
    assert learner.classes_ == [0, 1]


def test_one_image_is_predicted_in_any_layout() -> None:
    learner = new().learn(*images_of(0, 1))
    expected = learner.predict(TEST[:1])
    for image in (TEST[0], TEST[0, 0], TEST[0].transpose(1, 2, 0), torch.from_numpy(TEST[0, 0]), TEST[0, 0].tolist()):
        image = np.array(image, np.uint8) if isinstance(image, list) else image
        np.testing.assert_array_equal(learner.predict(image), expected)
    x, y = images_of(0, 1)
    colour = np.repeat(x, 3, 1)
    learner = new().learn(colour, y)
    for image in (colour[0], colour[0].transpose(1, 2, 0)):
        np.testing.assert_array_equal(learner.predict_proba(image), learner.predict_proba(colour[:1]))


def test_an_infinite_label_is_saved_or_refused_in_words(tmp_path: Path) -> None:
    x, y = images_of(0, 1)
    learner = new().learn(x, [float("inf") if k else 0.5 for k in y])
    try:
        learner.save(tmp_path / "model")
    except EquipoiseError:
        assert not (tmp_path / "model").exists()
    else:
        assert Learner.load(tmp_path / "model").classes_ == [0.5, float("inf")]


@pytest.mark.parametrize("path", [None, 3, b"model"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match="must be a string or a Path, not"):
        new().save(path)
    with pytest.raises(UsageError, match="must be a string or a Path, not"):
        Learner.load(path)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("note", [object(), {"mean": np.float32(0.5)}, float("nan"), {1, 2}, CIRCLE])
def test_a_note_that_is_no_json_is_refused_and_nothing_is_written(note: Any, tmp_path: Path) -> None:
    new().save(tmp_path / "model", note={"epochs": 3})
    with pytest.raises(UsageError, match="note must be"):
        new(seed=1).save(tmp_path / "model", note=note)
    assert Learner.load(tmp_path / "model").seed == 0


def test_a_learner_that_learned_nothing_can_be_saved(tmp_path: Path) -> None:
    new(seed=7).save(tmp_path)
    assert_identical(Learner.load(tmp_path).learn(*images_of(0, 1)), new(seed=7).learn(*images_of(0, 1)))
    with pytest.raises(DataError, match="holds no saved learner"):
        Learner.load(tmp_path / "elsewhere")


def test_a_callers_autocast_and_no_grad_change_nothing() -> None:
    """Somebody who works in bf16, or without gradients, gets the same learner, bit for bit."""
    data = DIGITS.train[DIGITS.train.find_positions(0, 3)]
    recipe = Recipe(epochs=2, lr=0.05, batch=32)
    plain = Learner(ILBaseline(), memory=2, recipe=recipe, device="cpu").learn(data.x, data.y)
    inside = Learner(ILBaseline(), memory=2, recipe=recipe, device="cpu")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        inside.learn(data.x, data.y)
        assert torch.equal(inside.logits(data.x), plain.logits(data.x))
    assert torch.equal(inside.logits(data.x), plain.logits(data.x))
    assert inside.exemplars_ is not None and plain.exemplars_ is not None
    assert torch.equal(inside.exemplars_.x, plain.exemplars_.x)


def test_a_copy_made_in_a_callback_can_learn() -> None:
    data = DIGITS.train
    first, second = data[data.find_positions(0, 3)], data[data.find_positions(3, 5)]
    copies: list[Learner] = []
    learner = Learner(ILBaseline(), memory=2, recipe=Recipe(epochs=1, lr=0.05, batch=32), device="cpu")

    def twice(one: Learner) -> None:
        copies.append(copy.deepcopy(one))
        with pytest.raises(UsageError, match="callback"):
            one.learn(second.x, second.y)

    learner.learn(first.x, first.y, twice)
    (other,) = copies
    assert other.learn(first.x, first.y).classes_ == learner.classes_


class Noisy(ILBaseline):
    """A method from outside, whose net keeps what it last computed, as many do."""

    def backbone(self, shape: tuple[int, int, int]) -> Backbone:
        net = super().backbone(shape)

        def note(module: torch.nn.Module, given: Any, out: Any) -> None:
            module.last = out[0]  # type: ignore[assignment]

        net.register_forward_hook(note)
        return net


def test_predicting_goes_through_the_net_itself_whatever_it_holds() -> None:
    x, y = images_of(0, 1, 2)
    seen: list[int] = []
    learner = Learner(Noisy(), memory=2, recipe=RECIPE, device="cpu")
    learner.learn(x, y, lambda learner: seen.append(len(learner.predict(x[:3]))))
    assert learner.state_.net is not None
    learner.state_.net.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    learner.predict(x[:5])
    assert seen == [3, 3, 5]


@pytest.mark.parametrize(("side", "sizes"), [(8, [1000, 200]), (32, [1000, 200]), (64, [250] * 4 + [200])])
def test_large_images_are_predicted_fewer_at_a_time(side: int, sizes: list[int]) -> None:
    x = torch.zeros(1, 3, side, side, dtype=torch.uint8).expand(sum(sizes), -1, -1, -1)
    learner = Learner(Noisy(), memory=2, recipe=RECIPE, device="cpu")
    learner.learn(x[:8], torch.arange(8) % 2)
    seen: list[int] = []
    net = learner.state_.net
    assert net is not None
    net.forward = lambda part, *more: seen.append(len(part))  # type: ignore[method-assign,assignment,return-value]
    assert len(list(learner.outputs(x))) == len(sizes) and seen == sizes


def test_predicting_computes_with_channels_first_and_leaves_weights_and_modes_alone() -> None:
    x, y = torch.randint(0, 256, (180, 3, 12, 12), dtype=torch.uint8), torch.arange(180) % 3
    learner = Learner(ILBaseline(), memory=2, recipe=RECIPE, device="cpu").learn(x, y)
    net = learner.state_.net
    assert net is not None
    before = learner.logits(x)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    (few,) = learner.outputs(x[:100])
    assert not any(m.is_contiguous() for m in few.maps), "a few images are not worth laying weights out for"
    assert torch.allclose(few.z, before[:100], atol=1e-4)
    outputs = learner.outputs(x, chunk=50)
    first = next(outputs)
    assert torch.is_grad_enabled() and not first.z.requires_grad, "whoever takes a chunk is not inside of ours"
    assert all(m.is_contiguous() for m in first.maps)
    assert torch.equal(torch.cat([first.z, *(out.z for out in outputs)]), before)
    assert net.training
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert convolutions and all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions)


# Methods that derive from others


BRIEF = Finetune(2, batch=16, weight_decay=5e-4)


class Mine(LUCIR):
    """Without a name of its own."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        return 0.5 * super().objective(s, b)


@dataclass(frozen=True)
class Named(LUCIR):
    name = "my-own"
    steps: float = 0.25
    """a field like one of a protocol's"""
    finetune: Finetune = BRIEF


class Deep(Mine):
    pass


@dataclass(frozen=True)
class Deeper(Deep):
    share: float = 0.75


FAMILY: dict[str, Any] = {
    "mine": Mine(K=1),
    "my-own": Named(steps=0.5),
    "deep": Deep(Meta(every=2)),
    "deeper": Deeper(),
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_method_that_derives_from_another_learns_and_is_loaded_as_what_it_is(name: str, tmp_path: Path) -> None:
    method = FAMILY[name]
    assert (type(method).name, method.title) == (name, type(method).__name__) and methods.find_method(name) is type(
        method
    )
    learner = new(method=method).learn(*images_of(0, 1)).learn(*images_of(2, 3))
    learner.save(tmp_path / "done")
    loaded = Learner.load(tmp_path / "done")
    assert type(loaded.method) is type(method) and loaded.method == method
    assert_identical(loaded, learner)
    saved: list[tuple[str, int]] = []

    def halfway(one: Learner) -> None:
        assert one.progress_ is not None
        one.save(tmp_path / f"{one.progress_.stage}-{one.progress_.epoch}")
        saved.append((one.progress_.stage, one.progress_.epoch))

    assert_identical(loaded.learn(*images_of(4, 5), callback=halfway), learner.learn(*images_of(4, 5)))
    assert saved == [("train", 1), ("train", 2)] + [("refit", 1), ("refit", 2)] * (name == "my-own")
    for stage, epoch in saved:
        half = Learner.load(tmp_path / f"{stage}-{epoch}")
        assert half.unfinished_ and half.method == method
        assert_identical(half.learn(*images_of(4, 5)), learner)


def test_it_does_what_it_says() -> None:
    """A subclass is not taken for what it derives from."""
    parent, child = (new(method=kind()).learn(*images_of(0, 1)) for kind in (LUCIR, Mine))
    assert not np.array_equal(parent.predict_proba(TEST), child.predict_proba(TEST))


@pytest.mark.parametrize("kind", [LUCIR, Mine, Deep, Named])
def test_a_subclass_with_its_parents_name_is_refused(kind: type[Method]) -> None:
    words = f"is named '{kind.name}' like an existing method: give it another name"
    with pytest.raises(UsageError, match=words):
        type("Other", (kind,), {"name": kind.name, "__module__": __name__})
    if kind.name == kind.__name__.lower():
        with pytest.raises(UsageError, match=words):
            type(kind.__name__, (kind,), {"__module__": __name__})
    if kind in (Deep, Named):
        with pytest.raises(UsageError, match="is named 'lucir' like an existing method"):
            type("Other", (kind,), {"name": "lucir", "__module__": __name__})


# Stages


@pytest.mark.parametrize("method", [Named(), ILBaseline(BalancedFinetuning(BRIEF))], ids=type)
def test_a_callback_is_called_in_every_stage(method: Method) -> None:
    seen: list[tuple[int, str, int, int]] = []
    ticks: list[tuple[str, float]] = []

    def look(one: Learner) -> None:
        e = one.progress_
        assert e is not None and one.unfinished_ and one.stage_ == e.stage
        assert one.chooses_next_ == (e.stage == "train" and e.epoch == e.epochs)
        seen.append((e.step, e.stage, e.epoch, e.epochs))
        with pytest.raises(UsageError, match="callback"):
            one.learn(*images_of(7))

    learner = new(method=method)
    learner.learn(*images_of(0, 1), callback=look, tick=lambda epochs: ticks.append((learner.stage_, epochs)))
    assert learner.stage_ == ""
    learner.learn(*images_of(2), callback=look, tick=lambda epochs: ticks.append((learner.stage_, epochs)))
    both = [(stage, k) for stage in ("train", "refit") for k in (1, 2)]
    assert seen == [(0, "train", k, 2) for k in (1, 2)] + [(1, stage, k, 2) for stage, k in both]
    for stage in ("train", "refit"):
        assert [epochs for name, epochs in ticks if name == stage].count(2.0) == (2 if stage == "train" else 1)
    alone = new(method=method).learn(*images_of(0, 1)).learn(*images_of(2))
    assert_identical(learner, alone)


@pytest.mark.parametrize("stage", ["train", "refit"])
@pytest.mark.parametrize("method", [Named(), ILBaseline(BalancedFinetuning(BRIEF))], ids=type)
def test_a_callback_that_raises_in_any_stage_leaves_the_learner_as_it_was(method: Method, stage: str) -> None:
    def stop(one: Learner) -> None:
        assert one.progress_ is not None
        if one.progress_.stage == stage:
            raise StopError

    learner, never_stopped = (new(method=method).learn(*images_of(0, 1)) for _ in range(2))
    before = tensors(learner)
    with pytest.raises(StopError):
        learner.learn(*images_of(2, 3), callback=stop)
    assert not learner.unfinished_ and learner.classes_ == [0, 1] and learner.stage_ == ""
    assert all(torch.equal(v, before[k]) for k, v in tensors(learner).items())
    assert_identical(learner.learn(*images_of(2, 3)), never_stopped.learn(*images_of(2, 3)))


def test_images_on_the_device_are_not_copied_and_exemplars_are_positions_in_them(tmp_path: Path) -> None:
    order = DIGITS.train.y.argsort(stable=True)
    source = Images(DIGITS.train.x[order], DIGITS.train.y[order])
    positions, by_hand = new(normalise=([0.3], [0.4])), new(normalise=([0.3], [0.4]))
    for first, last in ((0, 3), (3, 5), (5, 6)):
        positions.learn(source, range(first, last))
        part = source[source.find_positions(first, last)]
        by_hand.learn(part.x, part.y)
        kept = positions.state_.kept
        assert kept is not None and positions.exemplars_ is None
        assert by_hand.exemplars_ is not None and torch.equal(source.x[kept], by_hand.exemplars_.x)
        saved = tensors(positions)
        assert torch.equal(saved["memory.at"], kept) and "memory.x" not in saved
        positions.save(tmp_path)
        positions = Learner.load(tmp_path)
    assert_identical(positions.own_exemplars(source), by_hand)
    assert_identical(positions.learn(*images_of(7, 8)), by_hand.learn(*images_of(7, 8)))
    assert source.x.data_ptr() != DIGITS.train.x.data_ptr() and torch.equal(source.x, DIGITS.train.x[order])


# In words and in one number


def test_a_learner_is_shown_in_two_lines(tmp_path: Path) -> None:
    learner, seen = new(device="cpu"), []
    settings = "Learner(ILBaseline(Balanced()), memory=3, recipe=Recipe(epochs=2, lr=0.05, batch=32), device='cpu')"
    assert repr(learner) == f"{settings}\nnothing learned yet"
    learner.learn(*images_of(0, 1)).learn(*images_of(2), callback=lambda now: seen.append(repr(now)))
    known = "3 classes in 2 steps (0, 1, 2)"
    under_way = f"{settings}\n{known}, 6 images in memory; step 1 is under way: train, epoch"
    assert seen == [f"{under_way} 1 of 2", f"{under_way} 2 of 2"]
    assert repr(learner) == f"{settings}\n{known}, 9 images in memory"
    learner.save(tmp_path / "model")
    assert repr(Learner.load(tmp_path / "model")) == repr(learner)


def test_settings_are_shown_as_one_would_type_them() -> None:
    method = LUCIR(BalancedFinetuning(Finetune(3, batch=16)), K=3)
    learner = Learner(method, "total:60", seed=4, normalise=([0.5], [0.25]), device="cpu")
    assert repr(learner).splitlines()[0] == (
        "Learner(LUCIR(BalancedFinetuning(finetune=Finetune(epochs=3, batch=16)), K=3), memory='total:60', "
        "normalise=([0.5], [0.25]), seed=4, device='cpu')"
    )
    many = new(method=NCM()).learn(*images_of(*range(10)))
    many.rename({0: "nought"})
    assert repr(many).endswith("10 classes in 1 step ('nought', 1, 2, 3, 4, 5, 6, 7, ...), 30 images in memory")


def test_a_step_that_was_begun_is_shown_after_loading(halfway: Path) -> None:
    assert "; step 1 is under way" in repr(Learner.load(halfway))


def test_the_score_is_the_fraction_that_is_right(two_steps: Learner) -> None:
    x, y = images_of(0, 1, 2)
    right = two_steps.predict(x) == y
    assert right.sum() > 0 and two_steps.score(x, y) == right.mean()
    assert two_steps.score(x[right], torch.from_numpy(y[right])) == 1.0
    more_x, more_y = images_of(0, 7)  # 7 was never learned: it cannot be right
    assert two_steps.score(more_x, more_y) == np.mean(two_steps.predict(more_x) == more_y) <= 0.5
    assert two_steps.score(x[0], [two_steps.predict(x[0])[0]]) == 1.0


def test_a_score_that_can_only_be_0_is_refused(two_steps: Learner) -> None:
    x, y = images_of(0, 1)
    with pytest.raises(UsageError, match="none of these labels was learned, such as '0': the classes are 0, 1, 2"):
        two_steps.score(x, y.astype(str))
    with pytest.raises(UsageError, match="80 images but 3 labels"):
        two_steps.score(x, y[:3])
    with pytest.raises(UsageError, match="call learn first"):
        new().score(x, y)
