"""TPCIL against its formulas, written out in float64 with numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import make_step, note_trainings
from torch import Tensor

from equipoise import TPCIL, Learner, Meta, Recipe, UsageError
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.memory import fit_vertices, take_nearest
from equipoise.data.randomness import generator
from equipoise.nets import Batch, Out

SIZES = (3, 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def out(z: Tensor, h: Tensor) -> Out:
    return Out(z, h, [], {})


def batch(h: Tensor, h_old: Tensor) -> Batch:
    k = len(h)
    beside = Batch(torch.zeros(k), out(random(k, 5), h), out(random(k, 3), h_old))
    return Batch(torch.tensor([0, 4, 3, 2]), out(random(4, 5), random(4, 6)), out(random(4, 3), random(4, 6)), beside)


def similarity(h: np.ndarray, i: int, j: int, edges: str) -> float:
    dot = sum(a * b for a, b in zip(h[i], h[j]))
    return dot if edges == "dot" else dot / math.sqrt(sum(h[i] ** 2)) / math.sqrt(sum(h[j] ** 2))


def pearson(a: list[float], b: list[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    both = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b))
    return both / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


def topology_loss(h: np.ndarray, h_old: np.ndarray, m: TPCIL) -> float:
    """1 − r, over all pairs together or mean over rows."""
    rows = []
    for i in range(len(h)):
        pairs = []
        for j in range(len(h)):
            old = similarity(h_old, i, j, m.edges)
            if (m.diagonal or i != j) and (old > 0 or not m.positive):
                pairs.append((similarity(h, i, j, m.edges), old))
        rows.append(pairs)
    rows = [[pair for row in rows for pair in row]] if m.pool == "global" else rows
    return sum(1 - pearson([a for a, _ in row], [b for _, b in row]) for row in rows) / len(rows)


def log_softmax(z: Tensor) -> Tensor:
    return z - z.exp().sum(1, keepdim=True).log()


CASES: list[Any] = [
    TPCIL(),
    TPCIL(edges="dot", diagonal=True),
    TPCIL(pool="global", lambda_tpl=15.0),
    TPCIL(pool="global", positive=True, edges="dot"),
    TPCIL(positive=True),
]


@pytest.mark.parametrize("m", CASES)
def test_the_loss_is_one_minus_the_correlation_of_similarities(m: TPCIL) -> None:
    h, h_old = random(7, 6, seed=5) + 0.8, random(7, 6, seed=6) + 0.8
    s, b = make_step(SIZES, n=[20] * 3 + [500] * 2, dtype=torch.float64), batch(h, h_old)
    Lc = -log_softmax(b.out.z)[torch.arange(4), b.y].mean().item()
    leaf = h.clone().requires_grad_()
    assert b.more is not None
    loss = m.objective(s, b._replace(more=b.more._replace(out=out(b.more.out.z, leaf))))
    expected = topology_loss(h.numpy(), h_old.numpy(), m)
    assert loss.item() == pytest.approx(Lc + m.lambda_tpl * expected, rel=1e-10)
    (gradient,) = torch.autograd.grad(loss, leaf)
    for i, k in ((0, 0), (3, 5), (6, 2)):
        move = np.zeros(h.shape)
        move[i, k] = 1e-5
        ends = [topology_loss(h.numpy() + sign * move, h_old.numpy(), m) for sign in (1, -1)]
        assert gradient[i, k].item() == pytest.approx(m.lambda_tpl * (ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_only_the_pattern_counts_and_only_the_current_net_feels_it() -> None:
    h, old = random(7, 6, seed=5).requires_grad_(), random(7, 6, seed=6)
    s = make_step(SIZES, n=[20] * 3 + [500] * 2, dtype=torch.float64)
    Lc = TPCIL().objective(s, batch(h, old)._replace(more=None)).item()

    def loss(a: Tensor, b: Tensor, m: TPCIL) -> float:
        return (m.objective(s, batch(a, b)).item() - Lc) / m.lambda_tpl

    for m in CASES:
        assert loss(h, h.detach(), m) == pytest.approx(0, abs=1e-12), "no loss where nothing moved"
        assert loss(3.7 * h, old, m) == pytest.approx(loss(h, old, m), rel=1e-9)
        order = torch.randperm(7, generator=generator(0))
        assert loss(h[order], old[order], m) == pytest.approx(loss(h, old, m), rel=1e-9)
    assert loss(h, old, TPCIL()) > 0.1


def test_anchors_that_are_all_alike_harm_nothing() -> None:
    """Neither side varies: no correlation, and no NaN in the gradient."""
    h = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    s = make_step(SIZES, n=[20] * 3 + [500] * 2, dtype=torch.float64)
    loss = TPCIL(positive=True).objective(s, batch(h, -torch.ones(4, 6, dtype=torch.float64)))
    (gradient,) = torch.autograd.grad(loss, h)
    assert loss.isfinite() and (gradient == 0).all()


@pytest.mark.parametrize(("each", "anchors", "batches"), [(20, 100, 9), (5, 4, 11), (3, 100, 5)])
def test_anchors_are_the_memory_dealt_out_again_and_again(each: int, anchors: int, batches: int) -> None:
    y = torch.tensor([k for k in range(7) for _ in range(each)] + [7] * 40)
    net: Any = object()
    s = make_step((7, 1), Images(torch.zeros(len(y), 1, 8, 8, dtype=torch.uint8), y), teacher=net)
    m = TPCIL(anchors=anchors)
    mores = [m.more(s, torch.zeros(batches, 32), generator(0, k)) for k in (0, 0, 1)]
    drawn = [more.where for more in mores if more is not None]
    size = min(anchors, 7 * each)
    assert drawn[0].shape == (batches, size)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    deals = 7 * each // size
    for first in range(0, batches, deals):
        dealt = drawn[0][first : first + deals].flatten().tolist()
        assert len(set(dealt)) == len(dealt) and (y[dealt] < 7).all(), "each at most once in a deal, all from memory"
    assert m.more(replace(s, where=s.memory), torch.zeros(3, 32), generator(0)) is None, "while fine-tuning on it"
    first_step = make_step((7,), Images(torch.zeros(len(y), 1, 8, 8, dtype=torch.uint8), y))
    assert m.more(first_step, torch.zeros(3, 32), generator(0)) is None


def test_images_that_meta_holds_out_are_no_anchors() -> None:
    """B_t is for α alone: a net that keeps its topology has seen it."""
    y = torch.tensor([k for k in range(7) for _ in range(5)] + [7] * 40)
    net: Any = object()
    images, held = Images(torch.zeros(len(y), 1, 8, 8, dtype=torch.uint8), y), torch.arange(0, len(y), 5)
    more = TPCIL(Meta()).more(make_step((7, 1), images, held=held, teacher=net), torch.zeros(9, 32), generator(0))
    assert more is not None and more.where.shape == (9, 28)
    assert set(more.where.flatten().tolist()) == set(range(35)) - set(held.tolist())


def test_competitive_hebbian_learning_is_the_rule() -> None:
    points = random(30, 4, seed=1).numpy()
    points /= np.sqrt((points**2).sum(1))[:, None]
    order = [k % 30 for k in range(0, 7 * 40, 7)]
    found = fit_vertices(points, points[:5], order)
    v = [row.copy() for row in points[:5]]
    for i, k in enumerate(order):
        eps = 0.3 * (0.01 / 0.3) ** (i / 40)
        alpha = 10 * (0.1 / 10) ** (i / 40)
        by_distance = sorted(range(5), key=lambda a: sum((points[k] - v[a]) ** 2))
        for rank, a in enumerate(by_distance):
            v[a] = v[a] + eps * math.exp(-rank / alpha) * (points[k] - v[a])
            v[a] = v[a] / math.sqrt(sum(v[a] ** 2))
    np.testing.assert_allclose(found, np.stack(v), rtol=1e-10)
    taken: list[int] = []
    for vertex in v:
        free = [k for k in range(30) if k not in taken]
        taken.append(min(free, key=lambda k: sum((points[k] - vertex) ** 2)))
    assert take_nearest(points, found) == taken


def test_hebbian_exemplars_lie_closer_to_the_rest_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean squared distance of the images of a class to the nearest exemplar is what vertices bring down."""
    data, distances = load("digits").train, {}
    part = data[data.find_positions(0, 3)]
    for vertices in ("herding", "hebbian"):
        m = TPCIL(vertices=vertices)  # type: ignore[arg-type]
        learner = Learner(m, 5, recipe=Recipe(epochs=2, lr=0.05, batch=32), device="cpu")
        learner.learn(part.x, part.y.tolist())
        kept = learner.exemplars_
        assert kept is not None and kept.y.tolist() == [c for c in range(3) for _ in range(5)]
        h, own = (torch.cat([o.h for o in learner.outputs(x)]) for x in (part.x, kept.x))
        h, own = (x / x.norm(dim=1, keepdim=True) for x in (h, own))
        far = [torch.cdist(h[part.y == c], own[kept.y == c]).min(1).values.square().mean() for c in range(3)]
        distances[vertices] = torch.stack(far).mean().item()
        assert len({x.numpy().tobytes() for x in kept.x}) == 15, "distinct images"
    assert distances["hebbian"] < distances["herding"]


def test_all_rows_are_trained_and_nothing_is_imprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings, data = note_trainings(monkeypatch), load("digits").train
    learner = Learner(TPCIL(), 5, recipe=Recipe(epochs=1, lr=0.05, batch=32), device="cpu")
    for first, last in ((0, 3), (3, 5)):
        where = data.find_positions(first, last)
        learner.learn(data.x[where], data.y[where].tolist())
    before, net = trainings[1].net.head, learner.state_.net
    assert net is not None
    after = net.head
    assert not torch.equal(before.old, after.old) and not torch.equal(before.new, after.new)
    assert before.new.abs().max() <= 1 / 8 and before.new.std() > 0.05, "drawn from U(±1/√64)"


def test_it_needs_a_memory() -> None:
    with pytest.raises(UsageError, match="tpcil needs at least 1 image of every old class"):
        Learner(TPCIL(), 0)
