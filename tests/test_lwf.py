"""LwF against its formulas, written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from steps import make_step
from torch import Tensor

from equipoise import Balanced, ICaRL, ILBaseline, Learner, LwF, Recipe
from equipoise.data.datasets import load
from equipoise.data.randomness import generator
from equipoise.nets import Batch, Out
from equipoise.runs.plan import find_base_method
from equipoise.step import Plan

SIZES, LABELS = (3, 2, 2), [5, 6, 6, 5, 5, 6]
"""seven classes; images of the two new ones only"""


def random(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize(("T", "lambda_o"), [(2.0, 1.0), (3.0, 0.4)])
@pytest.mark.parametrize("original", [False, True])
def test_old_logits_are_kept_without_the_factor_of_the_temperature(T: float, lambda_o: float, original: bool) -> None:
    """Balanced without memory leaves the old classes out of L_c, as a head of their own does."""
    z, old = random(6, 7).requires_grad_(), random(6, 5, seed=1)
    b = Batch(torch.tensor(LABELS), Out(z, z, [], {}), Out(old, old, [], {}))
    method = LwF(Balanced() if original else ILBaseline().remedy, lambda_o, T)
    s = make_step(SIZES, remedy=method.remedy, n=[0] * 5 + [4, 4], dtype=torch.float64)
    loss = method.objective(s, b)
    (d,) = torch.autograd.grad(loss, z)
    x, one_hot = z.detach().numpy(), np.eye(7)[LABELS]
    chosen = slice(5, 7) if original else slice(0, 7)
    p, q = softmax(x[:, :5] / T), softmax(old.numpy() / T)
    own = softmax(x[:, chosen])
    expected = -np.log((own * one_hot[:, chosen]).sum(1)).mean() - lambda_o * (q * np.log(p)).sum(1).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    by_hand = np.zeros((6, 7))
    by_hand[:, chosen] = (own - one_hot[:, chosen]) / 6
    by_hand[:, :5] += lambda_o * (p - q) / T / 6
    np.testing.assert_allclose(d.numpy(), by_hand, atol=1e-12)


def test_the_base_step_is_the_plain_one() -> None:
    z = random(4, 7)
    b = Batch(torch.tensor([0, 3, 6, 5]), Out(z, z, [], {}))
    s = make_step((7,), n=[1] * 7, dtype=torch.float64)
    assert torch.equal(LwF().objective(s, b), ILBaseline().objective(s, b))
    assert find_base_method(LwF(lambda_o=3.0)) == ILBaseline()


def test_with_a_memory_it_trains_as_icarl_does() -> None:
    """So Mnemonics' two hosts are one training, and two predictions."""
    for side in (32, 224):
        assert LwF().recipe(Plan(0, (2,), (3, side, side))) == ICaRL().recipe(Plan(0, (2,), (3, side, side)))
    digits, found = load("digits"), []
    for method in (LwF(), ICaRL()):
        learner = Learner(method, 3, recipe=Recipe(epochs=2, lr=0.05, batch=32), augment=digits.augment, device="cpu")
        for first, last in ((0, 3), (3, 5)):
            where = digits.train.find_positions(first, last)[::3]
            learner.learn(digits.train.x[where], digits.train.y[where].tolist())
        found.append(torch.cat([out.z for out in learner.outputs(digits.test.x)]))
    torch.testing.assert_close(*found)
