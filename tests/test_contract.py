"""The contract: what every method owes its user, with every loss and every kind of memory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from equipoise import Balanced, Crop, Learner, Meta, Method, Recipe, Relaxed, Standard, UsageError, methods
from equipoise.data import datasets
from equipoise.losses import LOSSES, Loss

# Those of this package: another test may define a toy method of its own.
METHODS = {name: kind for name, kind in methods.known().items() if kind.__module__.startswith("equipoise.")}
KINDS: dict[str, Loss] = {
    "standard": Standard(),
    "balanced": Balanced(alpha=0.5),
    "relaxed": Relaxed(),
    "relaxed-0": Relaxed(0),
    "meta": Meta(every=2),
    "meta-all": Meta(every=3, hold=0.5, count="all"),
}
MEMORIES: dict[str, dict[str, Any]] = {
    "per-class": {"memory": 4},
    "budget": {"memory": "total:21", "select": "random"},
    "none": {"memory": 0},
    "all": {"memory": "all"},
}
STEPS = ((7, 2, 5), (0, 9), (4,))  # the last one brings a single class
RECIPE = Recipe(epochs=3, lr=0.1, batch=16)

EACH = 56
"""images of every class to learn from"""

DIGITS = datasets.load("digits")
TEST = DIGITS.test.x[::4].numpy()


def images_of(classes: tuple[int, ...], each: int = EACH) -> tuple[np.ndarray, list[int]]:
    """Images and labels, the classes mixed."""
    which = torch.cat([(DIGITS.train.y == c).nonzero()[:each, 0] for c in classes]).sort().values
    return DIGITS.train.x[which].numpy(), DIGITS.train.y[which].tolist()


def tensors(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """Everything that was learned, exemplars included, as it is saved."""
    learner.save(folder)
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def assert_identical(a: Learner, b: Learner, tmp: Path) -> None:
    """Not a bit differs."""
    assert (a.classes_, a.sizes_, a.alphas_) == (b.classes_, b.sizes_, b.alphas_)
    one, two = tensors(a, tmp / "a"), tensors(b, tmp / "b")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    np.testing.assert_array_equal(a.predict_proba(TEST), b.predict_proba(TEST))


def refused(method: str, loss: Loss, memory: Any) -> str | None:
    """What the refusal of this combination speaks of, if it is one."""
    if isinstance(loss, Meta) and memory in (0, 1, "total:0", "total:1"):
        return "memory of at least 2"
    if loss == Relaxed(0) and memory not in (0, "total:0"):
        return "epsilon 0"
    if method == "joint" and loss != Standard():
        return "use the standard loss"
    if method == "joint" and memory != "all":
        return "use memory all"
    return None


def test_no_method_and_no_loss_is_left_out() -> None:
    assert METHODS, "no method is known"
    assert {loss.name for loss in KINDS.values()} == set(LOSSES)


@pytest.mark.parametrize(
    ("method", "loss", "memory"),
    # Everything is kept for joint training only: it would take long for all.
    [(a, b, c) for a in METHODS for b in KINDS for c in MEMORIES if c != "all" or a == "joint"],
)
def test_contract(method: str, loss: str, memory: str, tmp_path: Path) -> None:
    settings = {"method": METHODS[method](loss=KINDS[loss]), "recipe": RECIPE, "seed": 3, **MEMORIES[memory]}
    if reason := refused(method, KINDS[loss], settings["memory"]):
        with pytest.raises(UsageError, match=reason):
            Learner(**settings)
        return
    check_contract(settings, tmp_path)


@pytest.mark.parametrize("loss", ["balanced", "meta"])
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"joint"}))
def test_contract_in_bf16(method: str, loss: str, tmp_path: Path) -> None:
    check_contract(
        {"method": METHODS[method](loss=KINDS[loss]), "memory": 4, "recipe": RECIPE, "precision": "bf16"}, tmp_path
    )


def check_contract(settings: dict[str, Any], tmp: Path) -> None:
    learner = Learner(**settings)
    given = {**{k: p.default for k, p in inspect.signature(Learner).parameters.items()}, **settings}
    for name, value in given.items():
        assert getattr(learner, name) is value, f"{name} was not stored as it was given"

    during: dict[tuple[int, int], np.ndarray] = {}

    def save_and_look(learner: Learner) -> None:
        assert learner.unfinished_ and learner.progress_ is not None
        at = learner.progress_.step, learner.progress_.epoch
        learner.save(tmp / "{}-{}".format(*at))
        during[at] = learner.predict_proba(TEST)

    for t, classes in enumerate(STEPS):
        x, y = images_of(classes)
        assert learner.learn(x, y, save_and_look) is learner
        check_predictions(learner, t)
        check_memory(learner, t)
        check_round_trip(learner, tmp / f"after-{t}")
    for name, value in given.items():
        assert getattr(learner, name) is value, f"learning changed {name}"

    # The same seed is the same learner, looked at or not; another seed is another one.
    assert_identical(learner, learn_all(Learner(**settings)), tmp)
    other = learn_all(Learner(**{**settings, "seed": 4}))
    assert not np.array_equal(learner.predict_proba(TEST), other.predict_proba(TEST))

    # From any epoch of any step, the rest leads to the same end.
    for at in ((0, 1), (1, 2), (2, 3)):
        if not learner.method.learns(at[0]):
            assert at not in during
            continue
        resumed = Learner.load(tmp / "{}-{}".format(*at))
        assert resumed.unfinished_
        np.testing.assert_array_equal(resumed.predict_proba(TEST), during[at])
        assert_identical(learner, learn_all(resumed, at[0]), tmp)


def learn_all(learner: Learner, first: int = 0) -> Learner:
    for classes in STEPS[first:]:
        learner.learn(*images_of(classes))
    return learner


def check_predictions(learner: Learner, t: int) -> None:
    # Classes come step after step, sorted within one.
    assert learner.classes_ == [c for step in STEPS[: t + 1] for c in sorted(step)]
    assert learner.sizes_ == tuple(len(step) for step in STEPS[: t + 1])
    assert not learner.unfinished_ and learner.progress_ is None
    p, labels = learner.predict_proba(TEST), learner.predict(TEST)
    assert p.shape == (len(TEST), len(learner.classes_)) and labels.shape == (len(TEST),)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert set(labels.tolist()) <= set(learner.classes_)
    np.testing.assert_array_equal(labels, np.array(learner.classes_)[p.argmax(1)])
    # Training images are told apart far better than by chance, so the columns are those of the classes.
    x, y = images_of(STEPS[t])
    if t == 0:
        assert (learner.predict(x) == y).mean() > 0.6
    # α belongs to Meta, and to the steps after the first.
    learned = [a is not None for a in learner.alphas_]
    trained = [k > 0 and learner.method.learns(k) for k in range(t + 1)]
    assert learned == [isinstance(learner.method.loss, Meta) and one for one in trained]


def check_memory(learner: Learner, t: int) -> None:
    kept, classes = learner.exemplars_, len(learner.classes_)
    assert kept is not None and kept.x.dtype == torch.uint8 and len(kept.x) == len(kept.y)
    share = {4: 4, "total:21": 21 // classes, 0: 0, "all": EACH}[learner.memory]  # type: ignore[index]
    assert kept.y.tolist() == [c for c in range(classes) for _ in range(share)]
    for c, label in enumerate(learner.classes_):
        theirs = {image.tobytes() for image in images_of((label,))[0]}  # type: ignore[arg-type]
        mine = [image.numpy().tobytes() for image in kept.x[kept.y == c]]
        assert set(mine) <= theirs and len(set(mine)) == len(mine), f"exemplars of {label} are not its own"


def check_round_trip(learner: Learner, folder: Path) -> None:
    learner.save(folder)
    loaded = Learner.load(folder)
    for name in ("method", "select", "recipe", "augment", "normalise", "seed", "device", "precision"):
        assert getattr(loaded, name) == getattr(learner, name)
    assert loaded.budget_ == learner.budget_
    assert_identical(learner, loaded, folder)


def test_augmentation_and_statistics_survive_saving(tmp_path: Path) -> None:
    learner = Learner(
        memory=2, recipe=Recipe(epochs=1, milestones=(0.5,)), augment=Crop(2, True), normalise=([0.3], [0.4])
    )
    learner.learn(*images_of((1, 2))).save(tmp_path)
    loaded = Learner.load(tmp_path)
    assert (loaded.augment, loaded.recipe) == (Crop(2, True), Recipe(epochs=1, milestones=(0.5,)))
    again, straight = (one.learn(*images_of((3,))) for one in (loaded, learner))
    assert_identical(again, straight, tmp_path / "both")


@pytest.mark.parametrize("memory", [0, 1, "total:0", "total:1"])
@pytest.mark.parametrize("method", METHODS)
def test_meta_is_refused_without_two_exemplars_per_class(method: str, memory: int | str) -> None:
    with pytest.raises(UsageError, match="memory of at least 2"):
        Learner(METHODS[method](loss=Meta()), memory)
    if method != "joint":
        Learner(METHODS[method](loss=Meta()), 2)


@pytest.mark.parametrize("epsilon", [0, 0.0, "0", "0%", "0.0 %"])
@pytest.mark.parametrize("method", METHODS)
def test_relaxed_0_is_refused_with_memory(method: str, epsilon: float | str) -> None:
    for memory in (1, "total:10"):
        with pytest.raises(UsageError, match="epsilon 0"):
            Learner(METHODS[method](loss=Relaxed(epsilon)), memory)
    if method != "joint":
        Learner(METHODS[method](loss=Relaxed(epsilon)), 0)


def test_meta_is_refused_in_the_step_whose_share_is_too_small(tmp_path: Path) -> None:
    """A budget of 9 leaves 3 for each of 3 classes, but 1 for each of 5."""
    method: Method = METHODS["il-baseline"](loss=Meta())
    learner = Learner(method, "total:9", recipe=RECIPE).learn(*images_of(STEPS[0])).learn(*images_of(STEPS[1]))
    before = Learner(method, "total:9", recipe=RECIPE).learn(*images_of(STEPS[0])).learn(*images_of(STEPS[1]))
    with pytest.raises(UsageError, match=r"memory of at least 2 .* has 1\b"):
        learner.learn(*images_of(STEPS[2]))
    assert_identical(learner, before, tmp_path)
