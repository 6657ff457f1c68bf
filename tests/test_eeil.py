"""EEIL against its formulas, written out in float64; its stages, and its augmentation."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from squares import digits_of
from steps import make_step, note_trainings
from torch import Tensor

from equipoise import (
    EEIL,
    Balanced,
    BalancedFinetuning,
    ClassOversampling,
    Crop,
    Finetune,
    ILBaseline,
    Learner,
    Recipe,
    Stage,
    UsageError,
)
from equipoise.data.augment import Jitter
from equipoise.data.datasets import load
from equipoise.data.randomness import generator
from equipoise.nets import Batch, Out
from equipoise.paper.cells import make_run
from equipoise.runs.plan import find_base_method
from equipoise.runs.settings import Protocol
from equipoise.step import Plan

SIZES, LABELS = (3, 2, 2), [0, 3, 6, 5, 2, 6]
QUICK = Recipe(epochs=2, lr=0.05, batch=16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("taught", [5, 7], ids=["by the net of the step before", "by the net just trained"])
@pytest.mark.parametrize("T", [2.0, 3.0])
def test_every_head_of_the_teacher_is_distilled_within_its_classes(taught: int, T: float) -> None:
    """The most recent old head too, which a port leaves out, and the whole of the first, which another cuts; in the
    fine-tuning the newest as well. Targets are probabilities to the power of 1 / T, as in the original."""
    z, old = random(6, 7).requires_grad_(), random(6, taught, seed=1)
    s = make_step(SIZES, n=[1] * 7, dtype=torch.float64)
    loss = EEIL(T=T).objective(s, Batch(torch.tensor(LABELS), Out(z, z, [], {}), Out(old, old, [], {})))
    (d,) = torch.autograd.grad(loss, z)
    x, one_hot = z.detach().numpy(), np.eye(7)[LABELS]
    expected = -np.log((softmax(x) * one_hot).sum(1)).mean()
    by_hand = (softmax(x) - one_hot) / 6
    for first, last in ((0, 3), (3, 5), (5, 7))[: 2 if taught == 5 else 3]:
        target = softmax(old.numpy()[:, first:last]) ** (1 / T)
        target /= target.sum(1, keepdims=True)
        p = softmax(x[:, first:last] / T)
        expected -= (target * np.log(p)).sum(1).mean()
        by_hand[:, first:last] += (p - target) / T / 6
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(d.numpy(), by_hand, atol=1e-12)


def test_the_base_step_is_the_plain_one() -> None:
    z = random(4, 7)
    b, s = Batch(torch.tensor([0, 3, 6, 5]), Out(z, z, [], {})), make_step((7,), n=[1] * 7, dtype=torch.float64)
    assert torch.equal(EEIL().objective(s, b), ILBaseline().objective(s, b))
    assert find_base_method(EEIL(noise=0.1, T=3.0)) == ILBaseline()
    assert find_base_method(EEIL(Balanced(), T=3.0, contrast=0.5)) == EEIL(contrast=0.5)


# Stages


def stages(method: EEIL, t: int = 1, keep: int = 20) -> Any:
    return method.stages(Plan(t, (50, 10)[: t + 1], (3, 32, 32), (20,) * 50 + (500,) * 10, 20, keep))


def test_a_step_is_a_noisy_training_and_a_noisy_balanced_fine_tuning() -> None:
    train, choose, refit = stages(EEIL())
    assert choose == "choose" and (train.name, refit.name) == ("train", "refit")
    # The noise is on the sum of the gradients of 128 images: on their mean, its variance is a 128² th.
    assert train.gradient_noise == refit.gradient_noise == pytest.approx(0.3 / 128**2)
    assert (train.teacher, train.images) == ("previous", "all")
    assert (refit.teacher, refit.images, refit.batch_norm) == ("as this stage began", "memory", "train")
    assert [group.names for group in refit.groups] == [("backbone.*", "head.*")]
    assert refit.remedy.name == "standard"
    # Twelve epochs of ours are one of the original's 40 and 30.
    assert (train.recipe.epochs, refit.recipe.epochs) == (12 * 40, 12 * 30)
    assert [train.recipe.lr_at(12 * k) for k in (0, 9, 10, 20, 30)] == pytest.approx([0.1, 0.1, 0.01, 1e-3, 1e-4])
    assert [refit.recipe.lr_at(12 * k) for k in (0, 9, 10, 20)] == pytest.approx([0.01, 0.01, 1e-3, 1e-4])
    assert {stage.recipe.weight_decay for stage in (train, refit)} == {1e-4}


def test_the_base_step_has_no_noise_and_a_remedy_with_its_own_loss_no_fine_tuning() -> None:
    base, _ = stages(EEIL(), t=0)
    assert base.gradient_noise == 0
    for method, names in ((EEIL(Balanced()), ["train"]), (EEIL(ClassOversampling()), ["train", "refit"])):
        assert [stage.name for stage in stages(method) if isinstance(stage, Stage)] == names
    large = make_run(EEIL(), "imagenet", Protocol())
    assert large.recipe is not None and isinstance(large.method, EEIL)
    assert (large.recipe.epochs, large.method.finetune.epochs) == (40, 30)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="eeil needs at least 1 image of every old class in memory, which keeps 0"):
        Learner(EEIL(), 0)
    with pytest.raises(UsageError, match=r"balanced-finetuning \(it fine-tunes on the balanced memory already"):
        Learner(EEIL(BalancedFinetuning()), 5)
    with pytest.raises(UsageError, match="contrast must be a number of 0 or more and at most 1"):
        EEIL(contrast=1.8)


def test_the_fine_tuning_is_balanced_and_taught_by_the_net_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, found = load("digits"), note_trainings(monkeypatch)
    method = EEIL(finetune=replace(EEIL().finetune, epochs=2, batch=16))
    learner = Learner(method, 3, recipe=QUICK, augment=digits.augment, device="cpu")
    previous = []
    for first, last in ((0, 3), (3, 5)):
        where = digits.train.find_positions(first, last)[::3]
        learner.learn(digits.train.x[where], digits.train.y[where].tolist())
        previous.append(copy.deepcopy(learner.state_.net))
    assert [(one.t, one.stage.name) for one in found] == [(0, "train"), (1, "train"), (1, "refit")]
    train, refit = found[1:]
    assert torch.bincount(refit.s.y).tolist() == [3] * 5 and refit.s.N == 5
    assert train.s.teacher is not None and refit.s.teacher is not None and previous[0] is not None
    for teacher, net in ((train.s.teacher, previous[0]), (refit.s.teacher, refit.net)):
        ours, theirs = teacher.state_dict(), net.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Brightness and contrast


def batch_of(count: int, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator(3))


def test_a_third_of_the_images_changes_in_brightness_and_a_third_in_contrast() -> None:
    """As the original's list of versions of an image, without crops: brightness ±63, contrast 0.2 to 1.8."""
    x, jitter = batch_of(600), Jitter(0, False, shift=63, contrast=0.8)
    which, drawn = torch.arange(600).flip(0), jitter.draw((600,), generator(5))
    found = jitter(x, which, drawn).double().numpy()
    kinds, shifts, factors = [0, 0, 0], [], []
    for one, k, numbers in zip(found, which.tolist(), drawn.tolist()):
        image, share = x[k].double().numpy(), numbers[-1] / 2**24
        kinds[numbers[-2]] += 1
        expected = image
        if numbers[-2] == 1:
            shifts.append(-63 + 126 * share)
            expected = image + shifts[-1]
        if numbers[-2] == 2:
            factors.append(0.2 + 1.6 * share)
            mean = image.mean((1, 2), keepdims=True)  # of each channel
            expected = (image - mean) * factors[-1] + mean
        assert np.abs(one - expected.clip(0, 255)).max() <= 0.5 + 1e-4
    assert min(kinds) > 150
    assert -63 <= min(shifts) < -55 and 55 < max(shifts) <= 63
    assert 0.2 <= min(factors) < 0.3 and 1.7 < max(factors) <= 1.8


def test_images_are_changed_before_they_are_cropped() -> None:
    x, which = batch_of(40), torch.arange(40)
    jitter = Jitter(2, True, shift=63, contrast=0.8)
    drawn = jitter.draw((40,), generator(1))
    assert drawn.shape == (40, jitter.random_numbers) == (40, 5)
    changed = Jitter(0, False, shift=63, contrast=0.8)(x, which, torch.cat([0 * drawn[:, :3], drawn[:, 3:]], 1))
    assert torch.equal(jitter(x, which, drawn), Crop(2, True)(changed, which, drawn[:, :3]))
    nothing = Jitter(2, True)
    assert torch.equal(nothing(x, which, drawn), Crop(2, True)(x, which, drawn[:, :3]))


def test_they_are_off_by_default_and_in_every_training_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    crop, calls = Crop(1, False), []
    assert EEIL().augmentation(crop) is crop
    assert EEIL(shift=63, contrast=0.8).augmentation(crop) == Jitter(1, False, shift=63, contrast=0.8)
    draw = Jitter.draw

    def spy(self: Jitter, *given: Any) -> Tensor:
        calls.append(self)
        return draw(self, *given)

    monkeypatch.setattr(Jitter, "draw", spy)
    digits, answers = load("digits"), []
    for method in (EEIL(noise=0.0), EEIL(noise=0.0, shift=63.0), EEIL(noise=0.0, shift=63.0)):
        one = replace(method, finetune=Finetune(2, batch=16))
        learner = Learner(one, 2, recipe=QUICK, augment=digits.augment, device="cpu")
        for first, last in ((0, 2), (2, 4)):
            where = digits.train.find_positions(first, last)[::4]
            learner.learn(digits.train.x[where], digits.train.y[where].tolist())
        answers.append(learner.logits(digits.test.x))
        assert learner.augment == digits.augment
    assert len(calls) == 2 * 3 * 2 and {jitter.shift for jitter in calls} == {63.0}
    assert torch.equal(answers[1], answers[2]) and not torch.equal(answers[0], answers[1])


def test_recorded_accuracy_on_digits() -> None:
    """What a wrong sign would break: 93.54, and 71.88 without the fine-tuning, when recorded."""
    with digits_of(80):
        digits = load("digits")
    found = []
    for finetune in (replace(EEIL().finetune, epochs=60), replace(EEIL().finetune, epochs=0)):
        learner = Learner(EEIL(finetune=finetune), 5, augment=digits.augment, device="cpu")
        for first, last in itertools.pairwise((0, 4, 7, 10)):
            where = digits.train.find_positions(first, last)
            learner.learn(digits.train.x[where], digits.train.y[where].tolist())
        found.append(100 * learner.score(digits.test.x, digits.test.y.tolist()))
    assert found[0] > 86 and found[0] > found[1] + 10
