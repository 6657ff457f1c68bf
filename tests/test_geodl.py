"""GeoDL against its formulas, written out in float64, and its closed form against numerical integration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from steps import make_step
from torch import Tensor

from equipoise import LUCIR, Balanced, GeoDL
from equipoise.data.randomness import generator
from equipoise.losses import margin_ranking
from equipoise.methods.geodl import geodesic_distance, pool
from equipoise.nets import Batch, Out, subspaces
from equipoise.nets.subspaces import find_bases, find_subspace, join_bases, join_subspaces

SIZES = (3, 2)


@pytest.fixture(params=["decompositions", "products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As a CPU finds the geodesic, and as a GPU does."""
    if request.param == "products":
        monkeypatch.setattr(subspaces, "find_by_decompositions", subspaces.find_by_products)
    return request.param


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def unit(z: Tensor) -> np.ndarray:
    return (z / z.norm(dim=1, keepdim=True)).numpy()


def basis(z: np.ndarray, rank: int) -> np.ndarray:
    """Of the rows, each less its own mean, by an SVD of the matrix itself."""
    _, _, Vt = np.linalg.svd(z - z.mean(1, keepdims=True), full_matrices=False)
    return Vt[:rank].T


def integrate(old: np.ndarray, new: np.ndarray, nodes: int = 64) -> np.ndarray:
    """∫ Π(v) Π(v)ᵀ dv by Gauss's rule, where Π(v) walks the geodesic of Grassmann's manifold by its exponential map."""
    r = old.shape[1]
    tangent = (np.eye(len(old)) - old @ old.T) @ new @ np.linalg.inv(old.T @ new)
    Q, s, Wt = np.linalg.svd(tangent, full_matrices=False)
    angles = np.arctan(s)
    G = np.zeros((len(old), len(old)))
    for x, weight in zip(*np.polynomial.legendre.leggauss(nodes)):
        v = (x + 1) / 2
        at = old @ Wt.T @ np.diag(np.cos(v * angles)) + Q @ np.diag(np.sin(v * angles))
        assert np.allclose(at.T @ at, np.eye(r), atol=1e-8)
        G += weight / 2 * at @ at.T
    return G


def distance(z: np.ndarray, z_old: np.ndarray, G: np.ndarray, form: str) -> tuple[float, np.ndarray]:
    """The loss and its gradient by z, of unit vectors, G constant."""
    total, gradient = 0.0, np.zeros(z.shape)
    for i, (a, b) in enumerate(zip(z, z_old)):
        if form == "difference":
            total += (b - a) @ G @ (b - a)
            gradient[i] = -2 * G @ (b - a)
        else:
            ab, aa, bb = a @ G @ b, a @ G @ a, b @ G @ b
            total += 1 - ab / math.sqrt(aa * bb)
            gradient[i] = -(G @ b) / math.sqrt(aa * bb) + ab * (G @ a) / math.sqrt(aa**3 * bb)
    return total / len(z), gradient / len(z)


@pytest.mark.parametrize(("rows", "width"), [(6, 20), (12, 12), (30, 9)])
@pytest.mark.parametrize("form", ["difference", "cosine"])
def test_the_closed_form_is_the_integral_along_the_geodesic(rows: int, width: int, form: str, way: str) -> None:
    """Fewer rows than features, as many, and more."""
    z, z_old = random(rows, width, seed=1), random(rows, width, seed=2)
    z = z_old + 0.5 * z  # the net has not moved far
    rank = min(rows, width) - 2
    G = integrate(basis(unit(z_old), rank), basis(unit(z), rank))
    expected, by_unit = distance(unit(z), unit(z_old), G, form)
    leaf = z.clone().requires_grad_()
    found = geodesic_distance(leaf, z_old, form)
    assert found.item() == pytest.approx(expected, rel=1e-7)
    (gradient,) = torch.autograd.grad(found, leaf)
    lengths = z.norm(dim=1, keepdim=True).numpy()
    by_hand = (by_unit - (by_unit * unit(z)).sum(1, keepdims=True) * unit(z)) / lengths
    np.testing.assert_allclose(gradient.numpy(), by_hand, rtol=1e-6, atol=1e-10)


def test_subspaces_are_those_of_an_svd_and_each_row_loses_its_own_mean() -> None:
    for rows, width in ((5, 11), (11, 5), (8, 8)):
        z = random(rows, width, seed=3)
        own, Q = z - z.mean(1, keepdim=True), basis(z.numpy(), min(rows, width) - 2)
        P, V = find_subspace(own).numpy(), find_bases(own[None])[0].numpy()
        assert P.shape == (width, min(rows, width) - 2)
        np.testing.assert_allclose(P @ P.T, Q @ Q.T, atol=1e-8)
        np.testing.assert_allclose(V.T @ V, Q @ Q.T, atol=1e-8)
        np.testing.assert_allclose(P.T @ P, np.eye(P.shape[1]), atol=1e-9)
        np.testing.assert_allclose(P.sum(0), 0, atol=1e-9, err_msg="vectors of mean 0 span it")


def test_equal_subspaces_are_projected_on(way: str) -> None:
    """All angles are 0: G = P Pᵀ, and a net that has not moved has no loss and no gradient."""
    z = random(6, 20, seed=4)
    own = z - z.mean(1, keepdim=True)
    P, G = find_subspace(own), subspaces.find_geodesic(z, z)
    x, y = random(3, 20, seed=5), random(3, 20, seed=6)
    torch.testing.assert_close(G.multiply(x, y), ((x @ P) * (y @ P)).sum(1), rtol=1e-9, atol=1e-12)
    for form in ("difference", "cosine"):
        leaf = z.clone().requires_grad_()
        loss = geodesic_distance(leaf, z, form)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert loss.item() == pytest.approx(0, abs=1e-12) and gradient.abs().max() < 1e-9


def test_right_angles_and_small_angles() -> None:
    """Between directions at a right angle there are two geodesics: one is taken, or by products the mean of both."""
    e = torch.eye(6, dtype=torch.float64)
    for angle in (math.pi / 2, math.pi / 2 - 1e-4, 1e-3, 1e-7):
        new = torch.stack([e[0], math.cos(angle) * e[1] + math.sin(angle) * e[2]], 1)
        s, c = math.sin(2 * angle) / (2 * angle), (1 - math.cos(2 * angle)) / (4 * angle)
        for G, across in (
            (join_subspaces(e[:, :2], new), c),
            (join_bases(e[:2], new.T.contiguous()), 0 if angle == math.pi / 2 else c),
        ):
            dense = torch.stack([G.multiply(e, one.expand(6, -1)) for one in e])
            expected = torch.zeros(6, 6, dtype=torch.float64)
            expected[0, 0], expected[1, 1], expected[2, 2] = 1, (1 + s) / 2, (1 - s) / 2
            expected[1, 2] = expected[2, 1] = across
            torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-7)


def test_images_that_come_twice_and_features_that_diverge_break_nothing(way: str) -> None:
    z = random(8, 20, seed=7)
    twice = torch.cat([z[:4], z[:4], z[4:]]).requires_grad_()
    loss = geodesic_distance(twice, random(12, 20, seed=8), "difference")
    (gradient,) = torch.autograd.grad(loss, twice)
    assert loss.isfinite() and gradient.isfinite().all()
    for few in (1, 2, 3):
        assert geodesic_distance(z[:few], z[4 : 4 + few], "difference").isfinite()
    assert geodesic_distance(z * math.nan, z, "difference").isnan(), "which the loop reports as divergence"


def draw_features(spread: float, move: float) -> tuple[Tensor, Tensor]:
    """Features of 128 images in two nets, (128, 256): on top of a common mean, directions from 1 down to `spread`."""
    sizes = torch.logspace(0, math.log10(spread), 256, dtype=torch.float64)
    turn = torch.linalg.qr(random(256, 256, seed=1))[0]
    old, moved = (random(128, 256, seed=seed) * sizes @ turn for seed in (2, 3))
    return 0.3 + old, 0.3 + old + move * moved


@pytest.mark.parametrize(
    ("spread", "move", "twice"), [(1.0, 0.5, 0), (1e-2, 2.0, 0), (1e-4, 0.05, 0), (1e-2, 0.3, 1), (1e-2, 0.3, 5)]
)
@pytest.mark.parametrize("form", ["difference", "cosine"])
def test_products_find_what_decompositions_find(
    spread: float, move: float, twice: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches as of CIFAR-100, where images may come twice, so that a subspace lacks directions; gradients as exact as
    those of a net in float32."""
    old, new = draw_features(spread, move)
    new[:twice] = new[twice : 2 * twice]
    found = []
    for _ in range(2):
        leaf = new.clone().requires_grad_()
        loss = geodesic_distance(leaf, old, form)
        found.append((loss.item(), *torch.autograd.grad(loss, leaf)))
        monkeypatch.setattr(subspaces, "find_by_decompositions", subspaces.find_by_products)
    (loss_by, by), (loss_other, other) = found
    assert loss_other == pytest.approx(loss_by, rel=1e-11) and loss_other != loss_by
    assert (other - by).norm() < 5e-7 * by.norm()


@pytest.mark.parametrize("form", ["difference", "cosine"])
def test_it_replaces_what_lucir_distils(form: Any, way: str) -> None:
    """λ is LUCIR's; the ranking is added if it is asked for; in the base step there is nothing else."""
    new, old = random(5, 3, 4, 4, seed=9), random(5, 3, 4, 4, seed=10)
    new = old + 0.3 * new
    y, z = torch.tensor([0, 4, 3, 2, 1]), random(5, 5)
    cos = random(5, 5, seed=1).tanh()
    b = Batch(y, Out(z, random(5, 6), [new], {"cos": cos}), Out(random(5, 3), random(5, 6), [old], {}))
    s = make_step(SIZES, n=[20] * 3 + [500] * 2, dtype=torch.float64)
    Lc = -(z - z.exp().sum(1, keepdim=True).log())[torch.arange(5), y].mean().item()
    quarters = [[x[i, k, r : r + 2, c : c + 2].mean().item() for k in range(3) for r in (0, 2) for c in (0, 2)]
                for x in (new, old) for i in range(5)]  # fmt: skip
    pooled = torch.tensor(quarters, dtype=torch.float64)
    torch.testing.assert_close(pool(new), pooled[:5])
    a, b_old = unit(pooled[:5]), unit(pooled[5:])
    Lg, _ = distance(a, b_old, integrate(basis(b_old, 3), basis(a, 3)), form)
    found = GeoDL(form=form).objective(s, b).item()
    assert found == pytest.approx(Lc + 5 * math.sqrt(3 / 2) * Lg, rel=1e-7)
    ranked = GeoDL(form=form, K=2, lambda_base=10.0, ratio="paper").objective(s, b).item()
    ranking = margin_ranking(cos, y, 3, 2, 0.5).item()
    assert ranked == pytest.approx(Lc + 10 * math.sqrt(2 / 3) * Lg + ranking, rel=1e-7)
    base = make_step((5,), n=[500] * 5, dtype=torch.float64)
    assert GeoDL().objective(base, b._replace(ref=None)).item() == pytest.approx(Lc, rel=1e-12)
    assert GeoDL(Balanced()).at_base() == LUCIR() == GeoDL(form="cosine").at_base()
