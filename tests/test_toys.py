"""Proof that the frame carries what is to come: a toy of each kind of method, stopped and resumed at every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise import LUCIR, Balanced, Batch, Group, Learner, Method, Out, PODNet, Recipe, Stage, Step
from equipoise.data.datasets import load
from equipoise.data.images import Images, sum_by_class
from equipoise.losses import distillation
from equipoise.methods.around import Around
from equipoise.methods.bic import BiC
from equipoise.methods.ss_il import SSIL
from equipoise.nets.heads import Head, LinearHead
from equipoise.step import Learned, More, Plan, Stages

FAST = Recipe(epochs=2, lr=0.05, batch=32)


@dataclass(frozen=True)
class Distilled(Method):
    """What most of the toys have in common."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        loss = self.classify(b.out.z, b.y, s)
        return loss if b.ref is None else loss + distillation(b.out.z, b.ref.z, 2.0)

    def at_base(self) -> Method:
        return self


def mirrored(x: Tensor) -> Tensor:
    return x.flip(3)


@dataclass(frozen=True)
class MeansOfExemplars(Distilled):
    """As iCaRL: the class whose mean is nearest, of exemplars and their mirror images."""

    def after(self, s: Step) -> None:
        y = s.images.y[s.memory]
        h = sum(F.normalize(s.embed(s.net, s.memory, view), dim=1) for view in (None, mirrored))
        assert isinstance(h, Tensor)
        s.state["means"] = F.normalize(sum_by_class(h, y, s.N), dim=1)

    def scores(self, out: Out, known: Learned) -> Tensor:
        means = known.state.get("means")
        if means is None or len(means) < sum(known.sizes):  # while a step is under way
            return out.z
        return F.normalize(out.h, dim=1) @ means.T


@dataclass(frozen=True)
class SecondStage(Distilled):
    """As BiC: something small is learned on held-out images, the net at rest."""

    def hold(self, plan: Plan) -> int:
        return 1 if plan.t else 0

    def stages(self, plan: Plan) -> Stages:
        (train, choose) = super().stages(plan)
        small = (Group(("state.temperature",), lr=0.5, decay=0.0),)
        own = Stage("temperature", FAST, small, "held", self.warm, teacher=None, batch_norm="eval")
        return (train, own, choose) if plan.t else (train, choose)

    def warm(self, s: Step, b: Batch) -> Tensor:
        return F.cross_entropy(b.out.z / s.state["temperature"], b.y)

    def enter(self, s: Step, stage: Stage) -> None:
        if stage.name == "temperature":
            s.state["temperature"] = torch.ones(())


@dataclass(frozen=True)
class BalancedLater(Distilled):
    """As EEIL: noise on gradients; then the memory alone, taught by the net as that stage began."""

    def stages(self, plan: Plan) -> Stages:
        train, choose = super().stages(plan)
        assert isinstance(train, Stage)
        balanced = Stage("balance", FAST, images="memory", teacher="as this stage began")
        return (replace(train, gradient_noise=0.3), choose, balanced)


@dataclass(frozen=True)
class TwoKinds(Distilled):
    """As SS-IL: batches of new and old images, and a learning rate that falls from step to step."""

    def recipe(self, plan: Plan) -> Recipe:
        return replace(FAST, lr=0.05 / (plan.t + 1))

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        new, old = s.where[s.y >= s.n_old], s.where[s.y < s.n_old]
        if not len(old):
            return super().epoch(s, gen, batch)
        rows = len(new) // (batch - 8)
        shuffled = new[torch.randperm(len(new), generator=gen)][: rows * (batch - 8)].view(rows, -1)
        drawn = old[torch.randint(len(old), (rows, 8), generator=gen)]
        return torch.cat([shuffled, drawn], 1).flatten()


class HeadOfViews(Head):
    """Four linear classifiers, one for each quarter of the batch, on the last map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 0, width))

    def widen(self, new: int, gen: torch.Generator) -> None:
        rows = torch.randn(4, new, self.weight.shape[2], generator=gen) / 8
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows], 1))

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        parts = maps[-1].amax((2, 3)).float().view(4, -1, self.weight.shape[2])
        return torch.einsum("vbd,vkd->vbk", parts, self.weight).flatten(0, 1), {}


@dataclass(frozen=True)
class FourViews(Distilled):
    """As SPB-M: rotated copies with heads of their own, in training and prediction, and a slower backbone."""

    def head(self, width: int) -> Head:
        return HeadOfViews(width)

    trained: ClassVar[tuple[Group, ...]] = (Group(("backbone.*",), lr=0.1), Group(("head.*",), decay=0.0))

    def views(self, x: Tensor) -> Tensor:
        return torch.cat([torch.rot90(x, k, (2, 3)) for k in range(4)])

    def scores(self, out: Out, known: Learned) -> Tensor:
        return out.z.view(4, -1, out.z.shape[1]).mean(0)


@dataclass(frozen=True)
class Anchors(Distilled):
    """As TPCIL: images from memory pass both nets beside every batch, and their similarities are kept."""

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        if not len(s.memory):
            return None
        return More(s.memory[torch.randint(len(s.memory), (len(which), 6), generator=gen)])

    def objective(self, s: Step, b: Batch) -> Tensor:
        loss = super().objective(s, b)
        if b.more is None or b.more.ref is None:
            return loss
        new, old = (F.normalize(out.h, dim=1) for out in (b.more.out, b.more.ref))
        return loss + (new @ new.T - old @ old.T).square().mean()


@dataclass(frozen=True)
class Neighbours(Around):
    """As DDE around a host: each image beside its nearest neighbour by the frozen net; a moving average of features."""

    def at_base(self) -> Method:
        return self

    def enter(self, s: Step, stage: Stage) -> None:
        s.state["average"] = torch.zeros(64)

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        if s.teacher is None or s.where is s.memory:
            return None
        h = F.normalize(s.embed(s.teacher, s.where), dim=1)
        nearest = s.where[(h @ h.T - 2 * torch.eye(len(h))).argmax(1)]
        place = torch.zeros(len(s.images), dtype=torch.long).index_put((s.where,), torch.arange(len(s.where)))
        return More(nearest[place[which]], gradient=False, teacher=False)

    def objective(self, s: Step, b: Batch) -> Tensor:
        loss: Tensor = self.host.objective(s, b)
        if b.more is not None:
            mixed = (b.out.z.softmax(1) + b.more.out.z.softmax(1)) / 2
            loss = loss + F.nll_loss(mixed.log(), b.y)
        return loss

    def note(self, s: Step, b: Batch) -> None:
        s.state["average"].lerp_(b.out.h.mean(0), 0.1)

    def scores(self, out: Out, known: Learned) -> Tensor:
        direction = F.normalize(known.state["average"], dim=0)
        return out.z - 0.1 * (out.h @ direction)[:, None] * torch.linspace(0, 1, out.z.shape[1])


class HeadWithRows(LinearHead):
    """A linear head that shows its rows, for an inner step."""

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return super().forward(h, maps)[0], {"rows": self.weight.expand(len(h), -1, -1)}


@dataclass(frozen=True)
class LearnedPixels(Distilled):
    """As Mnemonics: pixels of exemplars from which one step of the classifier does well on the data; handed back."""

    def head(self, width: int) -> Head:
        return HeadWithRows(width)

    def stages(self, plan: Plan) -> Stages:
        pixels = (Group(("state.pixels",), lr=1e7, decay=0.0),)
        own = Stage("pixels", FAST, pixels, objective=self.outer, teacher=None, batch_norm="eval")
        return (*super().stages(plan), own)

    def enter(self, s: Step, stage: Stage) -> None:
        if stage.name == "pixels":
            s.state["pixels"] = s.images.x[s.memory].float()

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        if "pixels" not in s.state:
            return None
        return More(torch.arange(len(s.memory)).repeat(len(which), 1), teacher=False, pixels="pixels")

    def outer(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None
        own, W = b.more.out, b.out.extra["rows"][0]
        wrong = own.z.softmax(1) - F.one_hot(b.more.y, s.N)
        ahead = W - wrong.T @ own.h / len(own.h)  # one step of gradient descent on the classifier's rows
        return F.cross_entropy(b.out.h @ ahead.T, b.y)

    def leave(self, s: Step, stage: Stage) -> Tensor | None:
        return s.state.pop("pixels").round().clamp(0, 255).byte() if stage.name == "pixels" else None


@dataclass(frozen=True)
class Derived(LUCIR):
    """Another's method, with a name of its own."""

    name: ClassVar[str] = "derived"
    steps: int = 3
    """a field called like one of the protocol"""


TOYS: dict[str, Method] = {
    "means of exemplars": MeansOfExemplars(),
    "second stage": SecondStage(),
    "balanced later": BalancedLater(),
    "two kinds": TwoKinds(),
    "four views": FourViews(),
    "anchors": Anchors(Balanced()),
    "neighbours around LUCIR": Neighbours(host=LUCIR(Balanced())),
    "neighbours around PODNet": Neighbours(host=PODNet(finetune=replace(PODNet().finetune, epochs=3))),
    "learned pixels": LearnedPixels(),
    "derived": Derived(),
    "BiC": BiC(),
    "SS-IL": SSIL(),
}
STAGES = {
    "second stage": {"train", "temperature"},
    "balanced later": {"train", "balance"},
    "neighbours around PODNet": {"train", "refit"},
    "learned pixels": {"train", "pixels"},
    "BiC": {"train", "bias"},
}


@pytest.fixture(scope="module")
def digits() -> Images:
    """Forty images of each of six digits."""
    train = load("digits").train
    return train[torch.cat([train.find_positions(k, k + 1)[:40] for k in range(6)])]


def parts(images: Images) -> Iterator[tuple[Tensor, list[int]]]:
    for first, last in ((0, 2), (2, 4), (4, 6)):
        where = images.find_positions(first, last)
        yield images.x[where], images.y[where].tolist()


def learner(method: Method) -> Learner:
    return Learner(method, 4, recipe=FAST, device="cpu", seed=1)


def tensors(learner: Learner) -> dict[str, Tensor]:
    """All that a learner has learned."""
    state = learner.state_
    assert state.net is not None and state.exemplars is not None
    found = {f"net.{k}": v for k, v in state.net.state_dict().items()} | {
        f"extra.{k}": v for k, v in state.extra.items()
    }
    return found | {"x": state.exemplars.x, "y": state.exemplars.y}


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_resumes_at_every_epoch_of_every_stage(name: str, digits: Images, tmp_path: Path) -> None:
    digits = digits[torch.arange(len(digits)) % 40 < 24]  # of each digit
    straight, saved, seen = learner(TOYS[name]), [], set()
    for t, (x, y) in enumerate(parts(digits)):

        def save(now: Learner, t: int = t) -> None:
            assert now.progress_ is not None
            where = tmp_path / f"{t}-{now.progress_.stage}-{now.progress_.epoch}"
            now.save(where)
            saved.append((t, where))
            seen.add(now.progress_.stage)
            now.predict(digits.x[:3])  # which changes nothing

        straight.learn(x, y, save)
    assert seen == STAGES.get(name, {"train"})
    expected = tensors(straight)
    z = straight.logits(digits.x)
    assert z.isfinite().all() and len(set(straight.predict(digits.x).tolist())) > 1
    for t, where in saved:
        resumed = Learner.load(where)
        for x, y in [*parts(digits)][t:]:
            resumed.learn(x, y)
        found = tensors(resumed)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected), where.name
        assert torch.equal(resumed.logits(digits.x), z)
    straight.save(tmp_path / "done")
    assert torch.equal(Learner.load(tmp_path / "done").logits(digits.x), z)


def test_each_toy_does_what_it_is_for(digits: Images) -> None:
    """What tells a toy from the method without its part."""
    made: dict[str, Any] = {}
    for name, method in TOYS.items():
        made[name] = learner(method)
        for x, y in parts(digits):
            made[name].learn(x, y)
    plain = learner(Distilled())
    for x, y in parts(digits):
        plain.learn(x, y)
    z = plain.logits(digits.x)
    for name in ("means of exemplars", "balanced later", "two kinds", "four views", "anchors"):
        assert not torch.equal(made[name].logits(digits.x), z), name
    assert made["second stage"].state_.extra["temperature"].item() != 1
    assert made["BiC"].state_.extra["bias"].shape == (2, 2) and (made["BiC"].state_.extra["bias"] != 1).all()
    pixels = made["learned pixels"].exemplars_.x
    known = {image.numpy().tobytes() for image in digits.x}
    assert pixels.dtype == torch.uint8 and sum(image.numpy().tobytes() in known for image in pixels) < len(pixels) / 2
    assert made["neighbours around LUCIR"].state_.extra["average"].abs().sum() > 0
