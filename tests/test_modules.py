"""A torch module of the user's as a backbone: learned, saved, loaded and resumed like the library's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import (
    LUCIR,
    Balanced,
    DataError,
    ILBaseline,
    Joint,
    Learner,
    Meta,
    Method,
    PODNet,
    Recipe,
    UsageError,
)
from equipoise.data import datasets

RECIPE = Recipe(epochs=6, lr=0.05, batch=32)
TRAIN, TEST = datasets.load("digits").train, datasets.load("digits").test


class Small(nn.Sequential):
    """What somebody may have: convolutions, batch norm, an activation of another kind."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, width, 3, 2, 1), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip


class WithMaps(nn.Module):
    """The same, with what PODNet compares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        a = self.first(x).relu()
        b = self.second(a).relu()
        return b.mean((2, 3)), [a, b]


def part(*classes: int) -> tuple[Tensor, Tensor]:
    where = TRAIN.find_positions(classes[0], classes[-1] + 1)
    return TRAIN.x[where], TRAIN.y[where]


def new(backbone: Any = Small, method: Method | None = None, **settings: Any) -> Learner:
    method = ILBaseline(Balanced()) if method is None else method
    return Learner(method, **{"memory": 10, "recipe": RECIPE, "device": "cpu", "backbone": backbone, **settings})


def weights(learner: Learner) -> dict[str, Tensor]:
    assert learner.state_.net is not None
    return {name: value.clone() for name, value in learner.state_.net.backbone.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


METHODS: dict[str, Method] = {
    "Balanced": ILBaseline(Balanced()),
    "Meta": ILBaseline(Meta(every=2)),
    "LUCIR": LUCIR(),
    "LUCIR, Balanced": LUCIR(Balanced()),
}
SOURCES: dict[str, Any] = {"class": Small, "function": lambda: Small(16), "module": Small(32), "with maps": WithMaps}


# What a module is made from is nothing that a method knows: each of the one goes with one of the other.
PAIRS = [*((source, "Balanced") for source in SOURCES), *zip(("class", "module", "with maps"), list(METHODS)[1:])]


@pytest.mark.parametrize(("source", "name"), PAIRS)
def test_it_learns_and_is_saved_resumed_and_loaded(source: str, name: str, tmp_path: Path) -> None:
    backbone, method = SOURCES[source], METHODS[name]

    def save(now: Learner) -> None:
        if now.progress_ and now.progress_.epoch == 2:
            now.save(tmp_path / "halfway")

    torch.manual_seed(1)
    learner = new(backbone, method).learn(*part(0, 4))
    assert learner.score(*part(0, 4)) > 0.7
    learner.learn(*part(5, 6), callback=save)
    assert learner.score(*part(0, 6)) > 0.5 and learner.classes_ == list(range(7))
    learner.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model", backbone=backbone)
    np.testing.assert_array_equal(loaded.predict_proba(TEST.x), learner.predict_proba(TEST.x))
    torch.manual_seed(2)  # of which nothing depends
    resumed = Learner.load(tmp_path / "halfway", backbone=backbone).learn(*part(5, 6))
    assert_equal(weights(resumed), weights(learner))
    np.testing.assert_array_equal(resumed.predict_proba(TEST.x), learner.predict_proba(TEST.x))


def test_podnet_wants_stage_outputs() -> None:
    learner = new(Small, PODNet())
    with pytest.raises(UsageError, match="podnet compares the outputs of stages, and the backbone gives features only"):
        learner.learn(*part(0, 4))
    assert learner.classes_ == []
    learner = new(WithMaps, PODNet(Balanced()), recipe=Recipe(20, 0.1, batch=32)).learn(*part(0, 4)).learn(*part(5, 6))
    assert learner.score(*part(0, 6)) > 0.5


def test_its_first_weights_are_of_the_seed_and_the_global_generator_is_left_alone() -> None:
    def first(seed: int) -> dict[str, Tensor]:
        seen: list[dict[str, Tensor]] = []
        learner = new(seed=seed, recipe=Recipe(epochs=1, lr=1e-30, batch=32, weight_decay=0))
        return weights(learner.learn(*part(0, 4), callback=lambda now: seen.append({})))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = first(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    b, c = first(0), first(1)
    assert_equal(a, b)
    assert not torch.equal(a["module.0.weight"], c["module.0.weight"])


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: lambda: module], ids=["module", "function"])
def test_a_module_that_is_given_is_copied_and_begins_as_it_is(wrap: Any, tmp_path: Path) -> None:
    """Also by a function that returns the same one again: no two nets share weights."""
    module = Small()
    before = copy.deepcopy(module.state_dict())
    source = wrap(module)
    still = Recipe(epochs=1, lr=1e-30, batch=32)
    assert torch.equal(weights(new(source, recipe=still).learn(*part(0, 4)))["module.0.weight"], before["0.weight"])
    learner = new(source).learn(*part(0, 4))
    learner.learn(*part(5, 6), callback=lambda now: now.save(tmp_path))
    assert_equal(module.state_dict(), before)
    live = Learner.load(tmp_path, backbone=source)
    old, coming = live.state_.net, live._live.state.net if live._live else None
    assert old is not None and coming is not None
    assert not torch.equal(*(net.backbone.state_dict()["module.0.weight"] for net in (old, coming)))
    joint = new(source, Joint(), memory="all", recipe=still).learn(*part(0, 4)).learn(*part(5, 6))
    assert torch.equal(weights(joint)["module.0.weight"], before["0.weight"]), "every step begins with a fresh copy"


def test_weights_that_need_no_gradient_stay_and_so_do_their_batch_norms(tmp_path: Path) -> None:
    module = Small()
    for layer in list(module)[:2]:
        layer.requires_grad_(False)
    before = {f"module.{name}": value.clone() for name, value in module.state_dict().items()}
    learner = new(module, LUCIR()).learn(*part(0, 4))
    learner.save(tmp_path)
    learner.learn(*part(5, 6))
    loaded = Learner.load(tmp_path, backbone=module).learn(*part(5, 6))
    for name, value in weights(learner).items():
        assert torch.equal(value, before[name]) == (not name.startswith("module.3")), name
    assert_equal(weights(loaded), weights(learner))
    frozen = new(Small().requires_grad_(False)).learn(*part(0, 4))  # what is left is a linear classifier
    assert frozen.score(*part(0, 4)) > 0.3


def test_a_lazy_module_learns() -> None:
    lazy = new(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(20), nn.ReLU())).learn(*part(0, 4))
    assert lazy.score(*part(0, 4)) > 0.7


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("wants 224 x 224\nand more")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x.flatten(1)))
        return h


class Extra(Small):
    def get_extra_state(self) -> str:
        return "more"

    def set_extra_state(self, state: Any) -> None:
        pass


class Gives(nn.Module):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def forward(self, x: Tensor) -> Any:
        return self.found


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (Fails, r"the backbone fails on images of 8 x 8 with 1 channel: wants 224 x 224$"),
    "maps": (lambda: nn.Conv2d(1, 4, 3), r"it gives \(2, 4, 6, 6\).*nn.Flatten"),
    "a dict": (lambda: Gives({"features": 1}), "it gives a dict"),
    "three": (lambda: Gives((torch.zeros(2, 3),) * 3), "it gives a tuple"),
    "whole numbers": (lambda: Gives(torch.zeros(2, 3, dtype=torch.long)), r"it gives \(2, 3\)"),
    "no features": (lambda: Gives(torch.zeros(2, 0)), r"it gives \(2, 0\)"),
    "other images": (lambda: Gives(torch.zeros(5, 3)), r"it gives \(5, 3\)"),
    "flat maps": (lambda: Gives((torch.zeros(2, 3), [torch.zeros(2, 3)])), "stage outputs of a backbone must be"),
    "no module": (lambda: 3, "backbone must make a torch module, not a int"),
    "meta": (lambda: nn.Linear(64, 4, device="meta"), "meta device, where weights have no numbers: make it on the CPU"),
    "tied": (Tied, "the same weights in two places"),
    "extra": (Extra, "keeps _extra_state, which is no tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_gives_no_features_is_refused_before_anything_is_learned(name: str) -> None:
    backbone, message = WRONG[name]
    learner = new(backbone)
    with pytest.raises(UsageError, match=message):
        learner.learn(*part(0, 4))
    assert not learner.unfinished_ and learner.classes_ == []


def test_what_is_no_module_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="a torch module or a function that makes one, not 'resnet18'"):
        new("resnet18")


def test_loading_wants_the_same_backbone(tmp_path: Path) -> None:
    new().learn(*part(0, 4)).save(tmp_path / "own")
    new(None).learn(*part(0, 4)).save(tmp_path / "usual")
    with pytest.raises(UsageError, match=r"own was learned with a backbone of its own, Small: load it with"):
        Learner.load(tmp_path / "own")
    with pytest.raises(UsageError, match=r"usual was learned with the method's own backbone: load it without"):
        Learner.load(tmp_path / "usual", backbone=Small)
    with pytest.raises(DataError, match=r"is not the one that was given: they differ in backbone.module.3"):
        Learner.load(tmp_path / "own", backbone=lambda: Small(25))
    with pytest.raises(UsageError, match="backbone must be a torch module"):
        Learner.load(tmp_path / "own", backbone="Small")  # type: ignore[arg-type]
    assert "backbone=Small, " in repr(Learner.load(tmp_path / "own", backbone=Small))
