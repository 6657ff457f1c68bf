"""α and ε that change in the course of a training, against the formula, epoch by epoch."""

from __future__ import annotations

import copy
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import make_step, train
from torch import Tensor

from equipoise import NCM, SLDA, Balanced, ILBaseline, Joint, Learner, Meta, Method, Recipe, Relaxed, UsageError
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine.train import Position
from equipoise.methods import KINDS
from equipoise.nets import Batch, Net
from equipoise.nets.backbones import SmallNet
from equipoise.nets.heads import LinearHead
from equipoise.remedies import Remedy
from equipoise.report.words import format_remedy
from equipoise.runs.command import write_command
from equipoise.runs.settings import Data, Run
from equipoise.settings import from_plain, to_plain
from equipoise.step import Step

DONE = (0.0, 0.25, 0.5, 1.0)


def half_cosine(first: float, last: float, done: float) -> float:
    return first + (last - first) * 0.5 * (1 - math.cos(math.pi * done))


@pytest.mark.parametrize(
    ("remedy", "old"),
    [
        (Balanced("0.1:1"), [[a * 4, a * 2] for a in (0.1, 0.325, 0.55, 1.0)]),
        (Balanced("1:0.1"), [[a * 4, a * 2] for a in (1.0, 0.775, 0.55, 0.1)]),
        (Balanced("0.1:1:cosine"), [[a * 4, a * 2] for a in (half_cosine(0.1, 1, d) for d in DONE)]),
        (Relaxed("2%:0.2%"), [[e, e] for e in (1.0, 0.775, 0.55, 0.1)]),
        (Relaxed("0:10%"), [[e, e] for e in (0.0, 1.25, 2.5, 5.0)]),
        (Relaxed("0.5:10%"), [[e, e] for e in (0.5, 1.625, 2.75, 5.0)]),
        (Relaxed("2%:0.2%:cosine"), [[e, e] for e in (half_cosine(1, 0.1, d) for d in DONE)]),
    ],
    ids=str,
)
def test_lambda_of_old_classes_goes_from_one_number_to_the_other(remedy: Remedy, old: list[list[float]]) -> None:
    """The largest new class has 50 images, of which a percentage is taken."""
    s = make_step((2, 2), n=[4, 2, 30, 50], dtype=torch.float64)
    for done, expected in zip(DONE, old, strict=True):
        lam = remedy.lam(s.n, s.past, replace(s, done=done))
        torch.testing.assert_close(lam, torch.tensor([*expected, 30, 50], dtype=torch.float64), rtol=1e-14, atol=0)
    first, last = next(text for text in vars(remedy).values()).split(":")[:2]
    for done, end in ((0.0, first), (1.0, last)):
        ended = remedy.lam(s.n, s.past, replace(s, done=done))
        assert torch.equal(ended, type(remedy)(end).lam(s.n, s.past, s)), "to the bit"  # type: ignore[call-arg]


class Plain(Method):
    """Cross-entropy alone; what λ is in each batch is noted."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        return self.classify(b.out.z, b.y, s)

    def note(self, s: Step, b: Batch) -> None:
        s.state["seen"].copy_(s.lam)


RECIPE = Recipe(epochs=5, lr=0.125, milestones=(0.5,), decay=0.5, batch=8, momentum=0.9, weight_decay=1e-2)


def later_step(dtype: torch.dtype = torch.float64) -> Step:
    """Two old classes with four images each, two new ones with eight."""
    gen = generator(1, "images")
    x = torch.randint(0, 256, (24, 1, 8, 8), generator=gen, dtype=torch.uint8)
    y = torch.tensor([0] * 4 + [1] * 4 + [2] * 8 + [3] * 8)
    net = Net(SmallNet(1), LinearHead(64), torch.tensor([120.0]), torch.tensor([70.0]))
    net.backbone.initialise(generator(0))
    net.head.widen(4, generator(1))
    state = {"seen": torch.zeros(4, dtype=dtype)}
    return make_step((2, 2), Images(x, y), net=net.to(dtype), dtype=dtype, state=state)


@pytest.mark.parametrize(
    ("remedy", "weights"),
    [
        (Balanced("0.25:1"), [0.25 + 0.75 * e / 4 for e in range(5)]),
        (Balanced("4:0.5:cosine"), [half_cosine(4, 0.5, e / 4) for e in range(5)]),
        (Relaxed("100%:10%"), [2 * (1 - 0.9 * e / 4) for e in range(5)]),  # 8 images, that is, twice 4
    ],
    ids=str,
)
def test_training_is_that_with_another_lambda_in_every_epoch_by_hand(remedy: Remedy, weights: list[float]) -> None:
    s = later_step()
    net, seen = copy.deepcopy(s.net).train(), list[list[float]]()
    sgd = torch.optim.SGD(net.parameters(), RECIPE.lr, RECIPE.momentum, weight_decay=RECIPE.weight_decay)
    for epoch, w in enumerate(weights):
        sgd.param_groups[0]["lr"] = RECIPE.lr_at(epoch)
        order = torch.randperm(24, generator=generator(0, 1, "train", "order", epoch))
        for which in order.split(8):
            q = torch.tensor([4 * w, 4 * w, 8, 8], dtype=torch.float64) * net(s.images.x[which]).z.exp()
            loss = -(q[torch.arange(8), s.images.y[which]] / q.sum(1)).log().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    train(Plain(remedy), s, RECIPE, on_epoch=lambda _: seen.append(s.state["seen"].tolist()))
    for k, v in net.state_dict().items():
        torch.testing.assert_close(s.net.state_dict()[k], v, rtol=1e-9, atol=1e-11, msg=k)
    assert seen == [pytest.approx([4 * w, 4 * w, 8, 8], rel=1e-12) for w in weights]


def test_a_training_of_one_epoch_has_the_first_number() -> None:
    s = later_step()
    train(Plain(Balanced("0.25:1")), s, replace(RECIPE, epochs=1))
    assert s.state["seen"].tolist() == [1, 1, 8, 8]


@pytest.mark.parametrize("remedy", [Balanced("0.1:1"), Relaxed("0.2%:20%:cosine")], ids=str)
def test_what_goes_on_in_the_middle_ends_at_the_same_bits(remedy: Remedy) -> None:
    s, at, kept = later_step(torch.float32), Position(), list[Any]()
    train(Plain(remedy), s, RECIPE, at=at, on_epoch=lambda _: kept.append(copy.deepcopy((s, at))))
    for other, position in kept[:-1]:
        other.lam.fill_(1.0)  # a checkpoint does not hold it
        train(Plain(remedy), other, RECIPE, at=position)
        assert all(torch.equal(v, s.net.state_dict()[k]) for k, v in other.net.state_dict().items())


def test_a_learner_that_was_saved_in_the_middle_ends_at_the_same_bits(tmp_path: Path) -> None:
    data = load("digits").train
    parts = [(data.x[where], data.y[where]) for where in (data.find_positions(0, 3), data.find_positions(3, 5))]
    recipe = Recipe(epochs=4, lr=0.05, batch=32)

    def save(learner: Learner) -> None:
        if learner.progress_ is not None and (learner.progress_.step, learner.progress_.epoch) == (1, 2):
            learner.save(tmp_path / "middle")

    straight = Learner(ILBaseline(Balanced("0.1:2:cosine")), memory=4, recipe=recipe, device="cpu")
    straight.learn(*parts[0]).learn(*parts[1], callback=save)
    resumed = Learner.load(tmp_path / "middle")
    assert resumed.method == straight.method
    resumed.learn(*parts[1])
    assert torch.equal(straight.logits(data.x[:50]), resumed.logits(data.x[:50]))
    constant = Learner(ILBaseline(Balanced(0.1)), memory=4, recipe=recipe, device="cpu")
    constant.learn(*parts[0]).learn(*parts[1])
    assert not torch.equal(straight.logits(data.x[:50]), constant.logits(data.x[:50]))


def test_equal_settings_have_one_spelling() -> None:
    spelled = {"0.1:1", " 0.10 : 1.0 ", "0.1:1:linear", ".1:1.:linear"}
    assert {Balanced(text).alpha for text in spelled} == {"0.1:1"}
    assert Balanced("1:.1 :cosine").alpha == "1:0.1:cosine" and Balanced("0.5") == Balanced(0.5)
    assert Relaxed("2 %:0.20%").epsilon == "2%:0.2%" and Relaxed("1.0:2%").epsilon == "1:2%"
    assert Relaxed("0.0%:2%") == Relaxed("0:2%") and Relaxed("2%:-0 %") == Relaxed("2%:0")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Balanced("0.1:0.10"), "alpha 0.1:0.10 does not change: use 0.1"),
        (lambda: Relaxed("1%:1%:cosine"), "epsilon 1%:1%:cosine does not change: use 1%"),
        (lambda: Relaxed("0:0%"), "epsilon 0:0% does not change: use 0"),
        (lambda: Balanced("0.1:1:2"), "alpha changes from one number to another as in 0.1:1 or 0.1:1:cosine"),
        (lambda: Balanced("0.1:1:cosine:linear"), "alpha changes from one number to another as in"),
        (lambda: Balanced("0.1:"), "alpha must be a number, or two as in 0.1:1, not ''"),
        (lambda: Balanced("0.1:few"), "alpha must be a number, or two as in 0.1:1, not 'few'"),
        (lambda: Balanced("0:1"), "alpha must be a number of 1e-06 or more"),
        (lambda: Balanced("1:10%"), "alpha must be a number, or two as in 0.1:1, not '10%'"),
        (lambda: Relaxed("1%:-1"), "epsilon must be a number of 0 or more"),
        (lambda: Meta(alpha_lr="1:10"), "alpha-lr must be a number"),  # type: ignore[arg-type]
        (lambda: NCM(Balanced("0.1:1")).check(0), "ncm trains in the base step only, where 0.1:1 has no effect"),
        (lambda: SLDA(Relaxed("0.1:1")).check(0), "slda trains in the base step only, where 0.1:1 has no effect"),
        (lambda: Joint(Balanced("0.1:1")).check(0), "joint does not support the remedy balanced"),
        (lambda: Learner(ILBaseline(Relaxed("1%:0")), memory=20), "epsilon 0 leaves old classes out"),
        (lambda: Learner(ILBaseline(Relaxed("0:1%")), memory=20), "epsilon 0 leaves old classes out"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        make()
    assert words in str(refused.value)


def test_it_is_a_flag_and_a_setting_of_the_record() -> None:
    for remedy, words in (
        (Balanced("0.1:1:cosine"), "--alpha 0.1:1:cosine"),
        (Relaxed("2%:0.2%"), "--epsilon 2%:0.2%"),
    ):
        run = Run(ILBaseline(remedy), Data("digits"))
        command = write_command(run)
        assert words in command and parse_request(shlex.split(command)[2:], "run", Request).run.method == run.method
        assert from_plain(Run, to_plain(run), KINDS) == run
    assert format_remedy(to_plain(run)) == "Relaxed ε 2%:0.2%"


def test_numbers_that_do_not_change_are_recorded_as_before() -> None:
    """So that keys of records and of shared steps are the same."""
    assert [to_plain(Balanced(v)) for v in (1.0, 0.5)] == [{"name": "balanced", "alpha": v} for v in (1.0, 0.5)]
    assert to_plain(Relaxed()) == {"name": "relaxed", "epsilon": "0.2%"}
    assert to_plain(Relaxed("2")) == {"name": "relaxed", "epsilon": 2.0}
