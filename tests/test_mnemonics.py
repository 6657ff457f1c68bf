"""Mnemonics: its losses and their gradients by pixels in float64, its frozen kernels, and what becomes of exemplars."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from steps import make_step, train
from torch import Tensor, nn

from equipoise import (
    LUCIR,
    Balanced,
    Batch,
    BiC,
    Crop,
    ICaRL,
    Learner,
    Meta,
    Method,
    Mnemonics,
    Out,
    Recipe,
    Stage,
    UsageError,
)
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine.predict import compute_features
from equipoise.engine.stand_ins import has_kernels
from equipoise.learner.state import new_net
from equipoise.methods.mnemonics import classify_some, step_rows
from equipoise.nets import Net
from equipoise.nets.backbones import LARGE, ResNet18, ResNet32, ScaledConv2d, add_scales
from equipoise.step import Plan

FAST = Recipe(epochs=2, lr=0.1, batch=32)
STEPS = ((0, 1), (2,), (3, 4))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def cross_entropy(z: list[float], label: int) -> float:
    return -z[label] + math.log(sum(math.exp(one) for one in z))


def slope_by_differences(f: Any, x: np.ndarray) -> np.ndarray:
    """df/dx, number by number."""
    found = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        found[i] = (f(up) - f(down)) / 2e-6
    return found


@pytest.fixture(scope="module")
def digits() -> Images:
    """Twenty images of each of five digits."""
    images = load("digits").train
    return images[torch.cat([images.find_positions(k, k + 1)[:20] for k in range(5)])]


def make_net(method: Method, classes: int) -> Net:
    net = new_net(method, (1, 8, 8), torch.tensor([70.0]), torch.tensor([80.0]), generator(0, "net"), None)
    net.head.widen(classes, generator(0, "rows"))
    return net.eval().requires_grad_(False)


# As released

Y, OWN_Y = [0, 3, 2, 4, 1], [3, 3, 3, 4, 4, 4]  # of a batch, and of the new exemplars


def released_by_hand(pixels: np.ndarray, A: np.ndarray, h: np.ndarray, old: np.ndarray) -> float:
    """Cross-entropy of unscaled cosines to class means; a net without layers, whose features are A times the pixels."""
    features = pixels @ A
    means = [*old, *(np.mean([f for f, y in zip(features, OWN_Y) if y == c], axis=0) for c in (3, 4))]
    return sum(cross_entropy([cosine(one, mean) for mean in means], y) for one, y in zip(h, Y)) / len(Y)


def test_the_released_loss_and_its_gradient_by_the_pixels() -> None:
    pixels, A, h, old = random(6, 7), random(7, 4), random(5, 4), random(3, 4)
    s = make_step((3, 2), n=[1] * 5, state={"means of old": old}, dtype=torch.float64)
    pixels.requires_grad_()
    b = Batch(torch.tensor(Y), out(h), None, Batch(torch.tensor(OWN_Y), out(pixels @ A)))
    loss = Mnemonics().pixel_objective(s, b)
    numbers = [one.numpy() for one in (A, h, old)]
    assert loss.item() == pytest.approx(released_by_hand(pixels.detach().numpy(), *numbers), rel=1e-10)
    (d,) = torch.autograd.grad(loss, pixels)
    by_hand = slope_by_differences(lambda x: released_by_hand(x, *numbers), pixels.detach().numpy())
    np.testing.assert_allclose(d.numpy(), by_hand, atol=1e-8)


def out(h: Tensor, rows: Tensor | None = None, scale: float = 1.0) -> Out:
    if rows is None:
        return Out(h, h, [], {})
    scales = torch.full((len(h),), scale, dtype=h.dtype)
    return Out(h, h, [], {"rows": rows.expand(len(h), -1, -1), "scale": scales})


# As in the paper

PART = [1, 2, 1, 2, 0, 0, 0]  # of seven exemplars: halves of the old ones, and new ones
PART_Y = [0, 0, 1, 1, 2, 3, 3]
QUERY_Y = [0, 2, 3, 3, 1]


def logits(W: np.ndarray, h: np.ndarray, scale: float) -> list[float]:
    return [scale * cosine(h, w) for w in W]


def mean_loss(W: np.ndarray, h: np.ndarray, y: list[int], scale: float) -> float:
    return sum(cross_entropy(logits(W, one, scale), label) for one, label in zip(h, y)) / len(y)


def one_step(W: np.ndarray, h: np.ndarray, y: list[int], scale: float, rate: float) -> np.ndarray:
    return W - rate * slope_by_differences(lambda rows: mean_loss(rows, h, y, scale), W)


def test_the_inner_step_is_one_of_gradient_descent_and_can_be_differentiated() -> None:
    W, h, y, some = random(4, 3), random(5, 3, seed=1), torch.tensor([0, 3, 2, 1, 3]), torch.tensor([1, 1, 0, 1, 1]) > 0
    h.requires_grad_()
    found = step_rows(W, torch.tensor(2.5, dtype=torch.float64), h, y, some, 0.7)
    by_hand = one_step(W.numpy(), h.detach().numpy()[some], y[some].tolist(), 2.5, 0.7)
    np.testing.assert_allclose(found.detach().numpy(), by_hand, atol=1e-8)
    rows = W.clone().requires_grad_()
    z = 2.5 * nn.functional.normalize(h, dim=1) @ nn.functional.normalize(rows, dim=1).T
    (d,) = torch.autograd.grad(nn.functional.cross_entropy(z[some], y[some]), rows, create_graph=True)
    weights = random(4, 3, seed=2)
    one, other = (torch.autograd.grad((ahead * weights).sum(), h)[0] for ahead in (found, rows - 0.7 * d))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    none = torch.zeros(5, dtype=torch.bool)
    assert torch.equal(step_rows(W, torch.tensor(2.5), h, y, none, 0.7), W)
    assert classify_some(W, torch.tensor(2.5), h, y, none).item() == 0


def paper_by_hand(pixels: np.ndarray, A: np.ndarray, h: np.ndarray, W: np.ndarray, fixed: np.ndarray) -> float:
    """The pixels act through the inner steps only: those that are judged are `fixed`."""
    features, judged = pixels @ A, fixed @ A
    ahead = []
    for k in range(3):
        of = [i for i, part in enumerate(PART) if part == k]
        ahead.append(one_step(W, features[of], [PART_Y[i] for i in of], 3.0, 0.5))
    new = [i for i, y in enumerate(QUERY_Y) if y >= 2]
    loss = mean_loss(ahead[0], h[new], [QUERY_Y[i] for i in new], 3.0)
    for k, other in ((1, 2), (2, 1)):
        of = [i for i, part in enumerate(PART) if part == other]
        loss += mean_loss(ahead[k], judged[of], [PART_Y[i] for i in of], 3.0)
    return loss


def test_the_papers_loss_and_its_gradient_by_the_pixels() -> None:
    pixels, A, h, W = random(7, 5), random(5, 3), random(5, 3, seed=1), random(4, 3)
    s = make_step((2, 2), n=[1] * 4, state={"part": torch.tensor(PART)}, dtype=torch.float64)
    pixels.requires_grad_()
    b = Batch(torch.tensor(QUERY_Y), out(h, W, 3.0), None, Batch(torch.tensor(PART_Y), out(pixels @ A)))
    loss = Mnemonics(mode="paper", inner_lr=0.5).pixel_objective(s, b)
    x = pixels.detach().numpy()
    numbers = [one.numpy() for one in (A, h, W)]
    assert loss.item() == pytest.approx(paper_by_hand(x, *numbers, x), rel=1e-7)
    (d,) = torch.autograd.grad(loss, pixels)
    some = [(0, 0), (1, 3), (2, 2), (4, 1), (6, 4)]  # differences of differences
    for i in some:
        up, down = x.copy(), x.copy()
        up[i], down[i] = up[i] + 1e-4, down[i] - 1e-4
        by_hand = (paper_by_hand(up, *numbers, x) - paper_by_hand(down, *numbers, x)) / 2e-4
        assert d[i].item() == pytest.approx(by_hand, abs=1e-6), i


# Pixels


@pytest.mark.parametrize("crop", [Crop(pad=1), Crop(pad=2, flip=True, brightness=0.3)])
def test_images_can_be_left_as_they_are(crop: Crop, digits: Images) -> None:
    which = torch.arange(9)
    assert torch.equal(crop(digits.x, which, crop.draw_nothing((9,), which.device)), digits.x[:9])
    u = random(4, 1, 8, 8).float()
    assert torch.equal(crop(u, which[:4], crop.draw_nothing((4,), which.device)), u)


@pytest.mark.parametrize("mirror", [True, False])
def test_a_step_of_the_pixels_is_one_of_sgd_in_normalised_units(mirror: bool, digits: Images) -> None:
    """The means of old classes are those by which the host predicts: with mirrored images, or without."""
    method = Mnemonics(host=ICaRL(mirror=mirror))
    net = make_net(method, 5)
    s = make_step((3, 2), digits, net=net, keep=20)
    plan_stage = stage_of(method, s)
    s = with_memory(s)
    method.enter(s, plan_stage)
    u = s.state["pixels"].clone()
    torch.testing.assert_close(u, (digits.x[s.memory].float() - 70) / 80)
    old = s.memory[: 3 * 20]
    views = (None, lambda x: x.flip(3)) if mirror else (None,)
    both = [compute_features(net, digits.x, old, view) for view in views]
    unit = sum(h.double() / h.double().norm(dim=1, keepdim=True) for h in both)
    assert isinstance(unit, Tensor)
    means = torch.stack([unit[k : k + 20].sum(0) for k in (0, 20, 40)])
    torch.testing.assert_close(s.state["means of old"].double(), means, rtol=1e-5, atol=1e-5)
    recipe = Recipe(1, 3.0, batch=100, weight_decay=0.01, momentum=0.5)
    own = u[60:].clone().requires_grad_()
    stage: dict[str, Any] = {"groups": plan_stage.groups, "objective": method.pixel_objective, "batch_norm": "eval"}
    train(method, s, recipe, Crop(pad=0, flip=False), name="mnemonics", **stage)
    order = torch.arange(100)  # one batch of all images: the order does not matter
    loss = method.pixel_objective(
        s, Batch(digits.y[order], net(digits.x), None, Batch(digits.y[s.memory[60:]], net(own * 80 + 70)))
    )
    (g,) = torch.autograd.grad(loss, own)
    torch.testing.assert_close(s.state["pixels"][60:], u[60:] - 3.0 * (g + 0.01 * u[60:]), rtol=1e-4, atol=1e-5)
    s.state["pixels"] = s.state["pixels"].detach() + 100
    s.state["pixels"][60, 0, 0, 0] = -50
    handed = method.leave(s, plan_stage)
    assert handed is not None and handed.dtype == torch.uint8 and s.state == {}
    assert torch.equal(handed[:60], digits.x[s.memory[:60]]), "old exemplars are as they were"
    assert (handed[60:].flatten()[1:] == 255).all() and handed[60, 0, 0, 0] == 0, "clipped and not wrapped"


def stage_of(method: Method, s: Any) -> Stage:
    plan = Plan(s.t, s.sizes, s.shape, (20,) * s.N, 20, 20)
    return next(stage for stage in method.stages(plan) if isinstance(stage, Stage) and stage.name == "mnemonics")


def with_memory(s: Any) -> Any:
    """After the choice: all images of all classes are exemplars, class by class."""
    return replace(s, memory=torch.argsort(s.images.y, stable=True))


def test_halves_are_disjoint_and_cover_the_old_exemplars(digits: Images) -> None:
    method = Mnemonics(host=LUCIR(), mode="paper")
    s = with_memory(make_step((3, 2), digits, net=make_net(method, 5)))
    method.enter(s, stage_of(method, s))
    part, y = s.state["part"], digits.y[s.memory]
    for c in range(3):
        assert torch.bincount(part[y == c], minlength=3).tolist() == [0, 10, 10]
    assert (part[y >= 3] == 0).all()
    low, high = (torch.tensor(limit - 70) / 80 for limit in (0, 255))
    s.state["pixels"] *= 100
    method.note(s, Batch(y, out(random(3, 4))))
    assert s.state["pixels"].min() == low and s.state["pixels"].max() == high


def test_recipes_of_the_pixels() -> None:
    own = Recipe(epochs=160, batch=64, last="short")
    released, paper = (Mnemonics(mode=mode).pixel_recipe(own) for mode in ("released", "paper"))  # type: ignore[arg-type]
    assert (released.epochs, released.lr, released.weight_decay, released.momentum) == (1, 1e-5, 5e-4, 0.9)
    assert (paper.epochs, paper.lr, paper.weight_decay, paper.batch, paper.last) == (10, 0.01, 0.0, 64, "short")
    longer = [Mnemonics(mode=mode, exemplar_epochs=30).pixel_recipe(own) for mode in ("released", "paper")]  # type: ignore[arg-type]
    assert [longer[0].lr_at(k) for k in range(3)] == [1e-5, 5e-6, 2.5e-6]
    assert [longer[1].lr_at(k) for k in (9, 10, 19, 20)] == [0.01, 0.005, 0.005, 0.0025]


# Nets


def test_scales_change_nothing_at_first_and_only_the_kernels_of_resnet_32_know_them() -> None:
    one, other = ResNet32(), add_scales(ResNet32())
    one.initialise(generator(1))
    other.initialise(generator(1))
    x = torch.randn(2, 3, 8, 8, generator=generator(0))
    torch.testing.assert_close(one.eval()(x)[0], other.eval()(x)[0])
    assert not any(isinstance(m, nn.Conv2d) for m in other.modules())
    assert has_kernels(one) and has_kernels(other)
    assert has_kernels(ResNet18(), LARGE) and not has_kernels(add_scales(ResNet18()), LARGE)
    scaled = next(m for m in other.modules() if isinstance(m, ScaledConv2d))
    with torch.no_grad():
        scaled.scale.normal_(generator=generator(2))
        scaled.shift.normal_(generator=generator(3))
    by_hand = torch.zeros(2, 16, 8, 8)
    for o in range(16):
        for i in range(3):
            plane = nn.functional.conv2d(x[:, i : i + 1], scaled.kernel[o : o + 1, i : i + 1], padding=1)
            by_hand[:, o] += scaled.scale[o, i, 0, 0] * plane[:, 0]
        by_hand[:, o] += scaled.shift[o]
    torch.testing.assert_close(scaled(x), by_hand, rtol=1e-4, atol=1e-5)


def learn(learner: Learner, images: Images, first: int = 0, callback: Any = None) -> Learner:
    for classes in STEPS[first:]:
        where = torch.cat([images.find_positions(c, c + 1) for c in classes])
        learner.learn(images.x[where], images.y[where].tolist(), callback)
    return learner


@pytest.mark.parametrize("mode", ["released", "paper"])
def test_kernels_rest_after_the_base_step_and_old_rows_always(mode: Any, digits: Images) -> None:
    learner, seen = Learner(Mnemonics(host=LUCIR(Balanced()), mode=mode), 4, recipe=FAST, device="cpu"), []

    def look(learner: Learner) -> None:
        assert learner._live is not None
        weights = learner._live.net.state_dict()
        if learner.stage_ == "train":
            seen.append({k: v.clone() for k, v in weights.items()})
        if learner.stage_ == "mnemonics":  # statistics of batch norms included
            assert all(torch.equal(seen[-1][k], v) for k, v in weights.items()), (
                "pixels are learned for the net as it is"
            )

    learn(learner, digits, callback=look)
    base, then, last = seen[0], seen[1], seen[-1]
    for name in base:
        kind = name.split(".")[-1]
        if kind == "kernel":
            assert not torch.equal(base[name], then[name]) and torch.equal(then[name], last[name]), name
        if kind in ("scale", "shift") and name.startswith("backbone"):
            assert (then[name] == (1 if kind == "scale" else 0)).all() and not torch.equal(then[name], last[name]), name
    rows = torch.cat([then["head.old"], then["head.new"]])
    assert torch.equal(rows, last["head.old"][:2]) and not torch.equal(then["head.scale"], last["head.scale"])


@dataclass(frozen=True)
class Quick(Mnemonics):
    """Exemplars that change within a few steps."""

    name: ClassVar[str] = "quick"

    def pixel_recipe(self, own: Recipe) -> Recipe:
        return replace(super().pixel_recipe(own), lr=100.0)


@pytest.mark.parametrize("host", [ICaRL(), LUCIR()], ids=lambda host: host.name)
def test_learned_exemplars_are_pixels_and_a_stopped_run_goes_on(host: Method, digits: Images, tmp_path: Path) -> None:
    method = Quick(host=host, mode="paper", exemplar_epochs=3)
    saved = []

    def save(learner: Learner) -> None:
        assert learner.progress_ is not None
        saved.append(tmp_path / f"{len(learner.sizes_) - 1}-{learner.stage_}-{learner.progress_.epoch}")
        if learner.stage_ == "mnemonics" or learner.progress_.epoch == 20:
            learner.save(saved[-1])

    straight = learn(Learner(method, 4, recipe=FAST, device="cpu"), digits, callback=save)
    assert [path.name for path in saved[:5]] == ["0-train-1", "0-train-2", *(f"0-mnemonics-{k}" for k in (1, 2, 3))]
    assert saved[-1].name == "2-balance-20"
    known = {image.numpy().tobytes() for image in digits.x}
    kept = straight.exemplars_
    assert kept is not None and kept.x.dtype == torch.uint8
    assert kept.y.tolist() == [c for c in range(5) for _ in range(4)]
    assert sum(image.numpy().tobytes() not in known for image in kept.x) > 15
    assert {*straight.state_.extra} == ({"means"} if host.name == "icarl" else set())
    for t, name in ((1, "1-mnemonics-2"), (2, "2-balance-20")):
        resumed = learn(Learner.load(tmp_path / name), digits, t)
        again = resumed.exemplars_
        assert again is not None and torch.equal(again.x, kept.x)
        assert torch.equal(resumed.logits(digits.x), straight.logits(digits.x))


def test_meta_holds_images_out_of_the_pixels_stage_too(digits: Images) -> None:
    learner = learn(Learner(Mnemonics(host=LUCIR(Meta(every=2)), mode="paper"), 4, recipe=FAST, device="cpu"), digits)
    assert learner.alphas_[0] is None and all(alpha is not None for alpha in learner.alphas_[1:])


def test_what_does_not_go_with_it_is_refused(digits: Images) -> None:
    with pytest.raises(UsageError, match=r"^mnemonics does not wrap bic: take lwf or icarl or lucir as its host$"):
        Learner(Mnemonics(host=BiC()))
    with pytest.raises(UsageError, match="mnemonics needs at least 1 image of every old class"):
        Learner(Mnemonics(host=LUCIR()), 0)
    with pytest.raises(UsageError, match=r"^mnemonics learns the pixels of all images in memory at once.*memory=20$"):
        Learner(Mnemonics(host=LUCIR()), "all")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    with pytest.raises(UsageError, match=r"stage train trains backbone\.\*\.kernel, which match no weight"):
        learn(Learner(Mnemonics(), 4, recipe=FAST, device="cpu", backbone=flat), digits)
