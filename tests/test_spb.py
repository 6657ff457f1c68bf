"""SPB, SPB-I and SPB-M against their formulas, written out in float64 with numpy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from steps import make_step, note_trainings
from torch import Tensor
from torch.nn import functional as F

from equipoise import SPB, SPBI, SPBM, Balanced, Learner, Meta, Method, Recipe, Relaxed, Stage, UsageError
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine import meta
from equipoise.engine.predict import CHUNK, compute_features
from equipoise.learner.state import new_net
from equipoise.methods.spb_i import rotate
from equipoise.nets import Batch, Net, Out
from equipoise.nets.heads import PerspectiveHead, RotationHead
from equipoise.step import Learned, Plan

SIZES = (3, 2, 2)
Y = [5, 6, 5, 5, 6, 6]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def batch(copies: int = 1, y: list[int] = Y) -> Batch:
    rows = copies * len(y)
    out = Out(random(rows, 7), random(rows, 4, seed=1), [], {"turns": random(rows, 4, seed=2)})
    ref = Out(random(rows, 5, seed=3), random(rows, 4, seed=4), [], {})
    return Batch(torch.tensor(y * copies), out, ref)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(z: Tensor, y: list[int]) -> tuple[float, np.ndarray]:
    """Its mean and its gradient."""
    p = softmax(z.numpy())
    rows = np.arange(len(y))
    d = p.copy()
    d[rows, y] -= 1
    return -np.log(p[rows, y]).mean(), d / len(y)


def squared_distance(h: Tensor, h_hat: Tensor) -> tuple[float, np.ndarray]:
    """mean ‖h̄ − ĥ̄‖² = mean (2 − 2 cos), and its gradient by h: −2 (ĥ̄ − cos h̄) / ‖h‖, over the number of images."""
    total, d = 0.0, np.zeros(h.shape)
    for i, (a, b) in enumerate(zip(h.numpy(), h_hat.numpy())):
        length = math.sqrt(sum(a * a))
        u, v = a / length, b / math.sqrt(sum(b * b))
        total += sum((u - v) ** 2)
        d[i] = -2 * (v - (u @ v) * u) / length / len(h)
    return total / len(h), d


def value_and_gradients(method: Method, b: Batch, s: Any) -> tuple[float, dict[str, np.ndarray]]:
    leaves = {"z": b.out.z, "h": b.out.h, **b.out.extra}
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    out = Out(leaves["z"], leaves["h"], [], {"turns": leaves["turns"]})
    loss = method.objective(s, b._replace(out=out))
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return loss.item(), {name: g.numpy() for name, g in zip(leaves, grads)}


def step(sizes: tuple[int, ...] = SIZES, **more: Any) -> Any:
    return make_step(sizes, n=[0] * sum(sizes[:-1]) + [500] * sizes[-1], dtype=torch.float64, **more)


@pytest.mark.parametrize("weights", ["reciprocal", "ones"])
@pytest.mark.parametrize("classes", ["new", "all"])
def test_spb_weighs_its_losses_by_the_numbers_of_classes(classes: Any, weights: Any) -> None:
    b = batch()
    assert b.ref is not None
    found, grads = value_and_gradients(SPB(classes=classes, weights=weights), b, step())
    w = 2 / 5 if weights == "reciprocal" else 1.0
    first = 5 if classes == "new" else 0
    Lc, dz = cross_entropy(b.out.z[:, first:], [y - first for y in Y])
    Lem, dh = squared_distance(b.out.h, b.ref.h)
    assert found == pytest.approx(w * Lc + Lem / w, rel=1e-12)
    np.testing.assert_allclose(grads["z"][:, first:], w * dz, rtol=1e-10, atol=1e-14)
    assert (grads["z"][:, :first] == 0).all(), "an old prototype feels nothing"
    np.testing.assert_allclose(grads["h"], dh / w, rtol=1e-10, atol=1e-14)


def test_the_base_step_is_a_cross_entropy_of_cosines() -> None:
    b = batch(y=[0, 6, 5, 2, 3, 1])._replace(ref=None)
    found, grads = value_and_gradients(SPB(), b, step((7,)))
    Lc, dz = cross_entropy(b.out.z, b.y.tolist())
    assert found == pytest.approx(Lc, rel=1e-12)
    np.testing.assert_allclose(grads["z"], dz, rtol=1e-10, atol=1e-14)


def test_balanced_without_memory_is_the_loss_as_printed_and_relaxed_is_between() -> None:
    b = batch()
    losses = []
    for method in (SPB(), SPB(Balanced()), SPB(Relaxed("1%")), SPB(classes="all")):
        losses.append(value_and_gradients(method, b, step(remedy=method.remedy))[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[1] < losses[2] < losses[3]


def test_spb_i_classifies_what_is_not_rotated_and_tells_rotations_apart() -> None:
    b = batch(copies=4)
    assert b.ref is not None
    found, grads = value_and_gradients(SPBI(), b, step())
    w, k = 2 / 5, len(Y)
    Lc, dz = cross_entropy(b.out.z[:k, 5:], [y - 5 for y in Y])
    Lem, dh = squared_distance(b.out.h, b.ref.h)
    turns = [0] * k + [1] * k + [2] * k + [3] * k
    Lin, dt = cross_entropy(b.out.extra["turns"], turns)
    assert found == pytest.approx(w * Lc + Lem / w + Lin, rel=1e-12)
    np.testing.assert_allclose(grads["z"][:k, 5:], w * dz, rtol=1e-10, atol=1e-14)
    assert (grads["z"][k:] == 0).all() and (grads["z"][:, :5] == 0).all()
    np.testing.assert_allclose(grads["h"], dh / w, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(grads["turns"], dt, rtol=1e-10, atol=1e-14)
    base = b._replace(y=b.y - 5, out=b.out._replace(z=b.out.z[:, 5:]), ref=None)
    assert SPBI().objective(step((2,)), base).item() == pytest.approx(Lc + Lin, rel=1e-12), "in the base step too"


def test_the_blocks_of_spb_i_are_computed_as_the_stages_before_them_are() -> None:
    """In bf16 where that is in force, with classifiers in fp32, which see nearly the same."""
    net = new_net(SPBI(), (1, 8, 8), torch.full((1,), 128.0), torch.full((1,), 64.0), generator(0))
    net.head.widen(3, generator(1))
    assert isinstance(net.head, RotationHead)
    x, seen = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8, generator=generator(2)), []
    net.head.blocks.register_forward_hook(lambda _, given, out: seen.append((given[0].dtype, out.dtype)))
    exact = net(x)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        near = net(x)
    assert seen == [(torch.float32,) * 2, (torch.bfloat16,) * 2]
    for out in (exact, near):
        assert out.z.dtype == out.extra["turns"].dtype == torch.float32
    apart = (near.extra["turns"] - exact.extra["turns"]).norm() / exact.extra["turns"].norm()
    assert 1e-5 < apart < 0.02


def test_spb_m_is_the_mean_of_four_classifiers() -> None:
    b = batch(copies=4)
    assert b.ref is not None
    found, grads = value_and_gradients(SPBM(), b, step())
    w, k = 2 / 5, len(Y)
    parts = [cross_entropy(b.out.z[v * k : (v + 1) * k, 5:], [y - 5 for y in Y]) for v in range(4)]
    Lem, dh = squared_distance(b.out.h, b.ref.h)
    assert found == pytest.approx(w * sum(L for L, _ in parts) / 4 + Lem / w, rel=1e-12)
    np.testing.assert_allclose(grads["z"][:, 5:], w * np.concatenate([d for _, d in parts]) / 4, rtol=1e-10)
    np.testing.assert_allclose(grads["h"], dh / w, rtol=1e-10, atol=1e-14)


def test_spb_m_adds_up_its_four_predictions() -> None:
    out, known = batch(copies=4).out, Learned(SIZES, {})
    z = out.z.numpy().reshape(4, len(Y), 7)
    p = sum(softmax(z[v]) for v in range(4)) / 4
    np.testing.assert_allclose(SPBM().scores(out, known).exp().numpy(), p, rtol=1e-12)
    np.testing.assert_allclose(SPBM(vote="logits").scores(out, known).numpy(), z.mean(0), rtol=1e-12)
    assert torch.equal(SPBI().scores(out, known), out.z[: len(Y)])


def test_rotations_are_counter_clockwise_quarter_turns() -> None:
    x = torch.arange(2 * 1 * 3 * 3).view(2, 1, 3, 3)
    copies = rotate(x)
    for v in range(4):
        for i in range(2):
            np.testing.assert_array_equal(copies[2 * v + i, 0], np.rot90(x[i, 0], v))


@pytest.mark.parametrize("each", [False, True])
def test_each_rotation_has_a_classifier_of_its_own(each: bool) -> None:
    head = PerspectiveHead(5, 10.0, each).double()
    head.widen(2, generator(0))
    head.widen(1, generator(1))
    assert head.old.shape == (8, 5) and head.new.shape == (4, 5)
    if each:
        with torch.no_grad():
            head.scale.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1))
    h = random(8, 5)
    z, _ = head(h, [])
    rows = head.rows().detach()
    for v in range(4):
        for i in range(2):
            for c in range(3):
                a, w = h[2 * v + i], rows[4 * c + v]
                scale = float(v + 1) if each else 10.0
                expected = scale * (a @ w) / (a.norm() * w.norm())
                assert z[2 * v + i, c].item() == pytest.approx(expected.item(), rel=1e-12)


def test_rotations_are_told_apart_by_the_last_map_through_two_blocks() -> None:
    head = RotationHead(6, 10.0).double().eval()
    head.widen(3, generator(0))
    before = {name: value.clone() for name, value in head.state_dict().items() if "old" not in name}
    maps, h = [random(2, 6, 4, 4)], random(2, 6)
    z, extra = head(h, maps)
    seen = head.blocks[1](head.blocks[0](maps[0])).mean((2, 3)).detach()
    for i in range(2):
        for turn in range(4):
            w = head.turns[turn].detach()
            expected = 10 * (seen[i] @ w) / (seen[i].norm() * w.norm())
            assert extra["turns"][i, turn].item() == pytest.approx(expected.item(), rel=1e-12)
    assert z.shape == (2, 3) and head.scale.item() == 10
    head.widen(2, generator(9))
    after = head.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != "new"), "the task stays"


def digits(first: int, last: int) -> Images:
    train = load("digits").train
    return train[train.find_positions(first, last)]


def make_net(method: Method, classes: int) -> Net:
    net = new_net(method, (1, 8, 8), torch.zeros(1), torch.ones(1) * 100, generator(0))
    net.head.widen(classes, generator(0))
    return net.eval()


def test_features_of_stacked_copies_come_copy_by_copy() -> None:
    images = load("digits").train
    assert len(images) > CHUNK // 32**2, "more than a chunk"
    net, where = make_net(SPB(), 2), torch.arange(len(images)).flip(0)
    found = compute_features(net, images.x, where, rotate)
    for v, h in enumerate(found.view(4, len(images), -1)):
        alone = compute_features(net, images.x, where, lambda x, v=v: torch.rot90(x, v, (2, 3)))
        torch.testing.assert_close(h, alone)


@pytest.mark.parametrize("method", [SPB(), SPBI(), SPBM()], ids=lambda m: m.name)
def test_new_rows_begin_at_the_mean_normalised_embedding_by_the_old_net(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rotation by itself in SPB-M; of images as they are in SPB-I."""
    trainings = note_trainings(monkeypatch)
    learner = Learner(method, 0, recipe=Recipe(epochs=1, lr=0.05, batch=32), device="cpu")
    for first, last in ((0, 3), (3, 5)):
        part = digits(first, last)
        learner.learn(part.x, part.y.tolist())
    _, training = trainings
    old, new, part = training.s.teacher, training.net.head.new.detach(), digits(3, 5)
    assert old is not None
    rows = []
    for c in (3, 4):
        for v in range(4 if method.name == "spb-m" else 1):
            x = torch.rot90(part.x[part.y == c], v, (2, 3))
            h = old(torch.cat([x] * 4) if method.name == "spb-m" else x).h[: len(x)].double()
            rows.append((h / h.norm(dim=1, keepdim=True)).mean(0))
    torch.testing.assert_close(new.double(), torch.stack(rows), rtol=1e-4, atol=1e-5)


def plan(t: int, shape: tuple[int, int, int] = (3, 32, 32), recipe: Recipe | None = None) -> Plan:
    sizes = (50, *[10] * t)
    return Plan(t, sizes, shape, (0,) * (sum(sizes) - 10) + (500,) * 10, 0, 0, recipe)


def test_later_steps_are_shorter_and_the_backbone_is_slower() -> None:
    base, later = SPB().recipe_for(plan(0)), SPB().recipe_for(plan(2))
    assert (base.epochs, base.lr, base.batch, base.weight_decay) == (160, 0.1, 128, 5e-4)
    assert [base.lr_at(k) for k in (79, 80, 119, 120)] == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert (later.epochs, later.lr, later.batch, later.weight_decay) == (50, 0.01, 128, 5e-4)
    assert [later.lr_at(k) for k in (29, 30, 49)] == pytest.approx([0.01, 0.001, 0.001])
    large = SPB().recipe_for(plan(1, (3, 224, 224)))
    assert (large.epochs, large.lr, large.batch, large.weight_decay) == (50, 0.01, 64, 1e-4)
    for t, factors in ((0, [1.0]), (1, [0.1, 1.0])):
        train, choose = SPB().stages(plan(t))
        assert isinstance(train, Stage) and choose == "choose"
        assert [group.lr for group in train.groups] == factors
    mine = SPB().recipe_for(plan(1, recipe=Recipe(epochs=3, lr=0.2, milestones=(0.5, 0.75), weight_decay=5e-4)))
    assert (mine.epochs, mine.lr, mine.milestones) == (3, pytest.approx(0.02), (0.6,)), "a changed rate is scaled"


def test_it_keeps_no_images_unless_told_and_refuses_where_they_have_no_class() -> None:
    for kind in (SPB, SPBI, SPBM):
        assert parse_request((kind.name,), "run", Request).run.protocol.memory == "0"
        with pytest.raises(UsageError, match="images from memory have no class"):
            Learner(kind(), 5)
        for method in (kind(classes="all"), kind(Balanced()), kind(Meta())):
            Learner(method, 5)
        with pytest.raises(UsageError, match="at least 2 image"):
            Learner(kind(Meta()), 0)


class Narrow(torch.nn.Module):
    """Fewer channels than features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Linear(16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.conv(x)
        return self.linear(x.mean((2, 3))), [x]


def test_what_cannot_be_rotated_is_refused() -> None:
    part, quick = digits(0, 2), Recipe(epochs=1, batch=32)
    for kind in (SPBI, SPBM):
        with pytest.raises(UsageError, match=f"{kind.name} rotates images, which must be square, not 8 x 5 pixels"):
            Learner(kind(), 0, recipe=quick).learn(part.x[..., :5], part.y.tolist())
    Learner(SPB(), 0, recipe=quick).learn(part.x[:50, ..., :5], part.y[:50].tolist())
    with pytest.raises(UsageError, match="the last stage output has 16 channels, and there are 32 features"):
        Learner(SPBI(), 0, recipe=quick, backbone=Narrow).learn(part.x, part.y.tolist())


def test_base_steps_are_shared_by_what_acts_later() -> None:
    for kind in (SPB, SPBI, SPBM):
        assert kind(Balanced(), classes="all", weights="ones").at_base() == kind()
        assert kind(eta=3.0).at_base() != kind().at_base() != kind(last_relu=True).at_base()


def test_the_last_relu_is_a_choice() -> None:
    for relu in (False, True):
        _, maps = SPB(last_relu=relu).backbone((3, 32, 32))(random(4, 3, 32, 32).float())
        assert (maps[-1].min() >= 0).item() is relu


@pytest.mark.parametrize("method", [SPBI(Meta()), SPBM(Meta())], ids=lambda m: m.name)
def test_meta_validates_the_prediction_that_copies_make_together(method: Any) -> None:
    """v is the gradient of the cross-entropy of the mean probability; of the plain copies in SPB-I."""
    net, images = make_net(method, 5), digits(0, 5)
    x, y = images.x[::20], images.y[::20]
    weights = {name: w for name, w in net.named_parameters() if name != "head.old"}
    scores = partial(method.scores, known=Learned((5,), {}))
    found = meta.validation_gradient(net, weights, method.views(x), y, scores=scores)
    z = net(torch.cat([torch.rot90(x, v, (2, 3)) for v in range(4)])).z
    parts = z.softmax(1).view(4, len(x), 5)
    p = parts.mean(0) if method.name == "spb-m" else parts[0]
    expected = torch.autograd.grad(F.nll_loss(p.log(), y), list(weights.values()), materialize_grads=True)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_recorded_accuracy_on_digits() -> None:
    """What a wrong sign or weight would break: 84.38 when recorded."""
    data = load("digits")
    learner = Learner(SPB(), 0, device="cpu")
    for first, last in ((0, 5), (5, 10)):
        where = data.train.find_positions(first, last)
        learner.learn(data.train.x[where], data.train.y[where].tolist())
    assert learner.score(data.test.x, data.test.y.tolist()) > 0.8
