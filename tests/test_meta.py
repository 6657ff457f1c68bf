"""Meta (Algorithm 1): the gradient by α against a double backward and finite differences, and the order of things."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from steps import make_step, train
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F

from equipoise import Balanced, Batch, Group, ILBaseline, Meta, Out, Recipe, Stage, Step
from equipoise.data.images import Images, join_images
from equipoise.data.randomness import generator
from equipoise.engine import meta
from equipoise.engine import train as loop
from equipoise.engine.sgd import Trained, compute_gradient, look_ahead, select_weights, sgd_
from equipoise.engine.train import Epoch, Position
from equipoise.nets import Net
from equipoise.nets.backbones import SmallNet
from equipoise.nets.heads import LinearHead

Weights = dict[str, Tensor]
OLD, CLASSES, T = 3, 5, 2.0
RHO = OLD / CLASSES
RECIPE = Recipe(momentum=0.9, weight_decay=2e-3, batch=8)
HALVES = (Group(("backbone.*",), lr=0.5, decay=0.05), Group(("head.*",), lr=2.0))


# A small step, in float64 -------------------------------------------------------------------------------------


def images(count: int, classes: list[int], seed: int) -> Images:
    """Noise with a bright corner that tells the class."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.tensor([classes[i % len(classes)] for i in range(count)])
    x = torch.randint(0, 120, (count, 1, 8, 8), generator=gen, dtype=torch.uint8)
    for i, k in enumerate(y.tolist()):
        x[i, 0, k : k + 3, 2:5] += 100
    return Images(x, y)


def small_step(remedy: Meta | Balanced, dtype: torch.dtype = torch.float64, batches: int = 5, held: int = 10) -> Step:
    """Three old classes with few images, two new ones with many; the net grew from its teacher and moved a little."""
    net = Net(SmallNet(1), LinearHead(64), torch.tensor([90.0]), torch.tensor([60.0]))
    net.backbone.initialise(generator(0, "backbone"))
    net.head.widen(OLD, generator(0, "old"))
    teacher = copy.deepcopy(net).to(dtype).eval().requires_grad_(False)
    net.head.widen(CLASSES - OLD, generator(0, "new"))
    gen = torch.Generator().manual_seed(5)
    net.to(dtype)
    with torch.no_grad():
        for w in net.parameters():
            w += 0.1 * torch.randn(w.shape, generator=gen, dtype=torch.float64)
    data = join_images(
        images(8 * batches + 4, [0, 3, 4, 1, 4, 3, 3, 2, 4, 3], seed=1), images(held, list(range(CLASSES)), seed=2)
    )
    net.train()
    state = {"alpha": torch.ones((), dtype=dtype)} if isinstance(remedy, Meta) else {}
    held_out = torch.arange(len(data) - held, len(data))
    return make_step(
        (OLD, CLASSES - OLD), data, remedy, held=held_out, net=net, teacher=teacher, state=state, dtype=dtype
    )


@dataclass
class Problem:
    """One update of α: a training batch, a balanced batch, momentum in full swing."""

    s: Step
    method: ILBaseline
    x: Tensor
    y: Tensor
    ref: Out
    x_bar: Tensor
    y_bar: Tensor
    weights: Weights
    momentum: Weights
    lr: Tensor
    groups: tuple[Group, ...]


@pytest.fixture(params=[ILBaseline.trained, HALVES], ids=["one-group", "two-groups"])
def problem(request: pytest.FixtureRequest) -> Problem:
    method = ILBaseline(Meta(), T=T)
    s = small_step(Meta())
    s.state["alpha"].fill_(0.7)
    s.lam.copy_(method.lam(s))
    x, y = s.images.x[s.where[:8]], s.y[:8]
    assert len(s.held) and s.teacher is not None
    gen = torch.Generator().manual_seed(9)
    weights = {k: w.detach() for k, w in s.net.named_parameters()}
    momentum = {k: 0.05 * torch.randn(w.shape, generator=gen, dtype=w.dtype) for k, w in weights.items()}
    held, lr = s.images[s.held], torch.tensor(0.1).double()
    return Problem(s, method, x, y, s.teacher(x), held.x, held.y, weights, momentum, lr, request.param)


def trained(p: Problem) -> list[Trained]:
    """The weights by group, with learning rates in float64."""
    groups = select_weights(p.s, Stage("train", RECIPE, p.groups))
    for group, given in zip(groups, p.groups):
        group.lr = p.lr * given.lr
    return groups


def sgd_of(p: Problem, name: str) -> tuple[Tensor, float]:
    """Learning rate and L2 penalty of a weight, by the pattern's first word."""
    group = next(g for g in p.groups if f"{name.split('.')[0]}.*" in g.names)
    return p.lr * group.lr, RECIPE.weight_decay if group.decay is None else group.decay


# The oracle: the same step written out, and differentiated through ---------------------------------------------


def forward(net: Net, w: Weights, x: Tensor) -> Tensor:
    buffers = {k: b.clone() for k, b in net.named_buffers()}
    return functional_call(net, (w, buffers), (x,)).z


def train_loss(z: Tensor, z_old: Tensor, y: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Eqs. 1, 2 and 5 with sums and exponentials."""
    rows = range(len(y))
    weight = torch.cat([alpha * n[:OLD], n[OLD:]])
    Lc = sum(-(weight[y[i]] * z[i, y[i]].exp() / (weight * z[i].exp()).sum()).log() for i in rows) / len(y)
    p_hat = (z_old / T).exp() / (z_old / T).exp().sum(1, keepdim=True)
    old = (z[:, :OLD] / T).exp()
    Ld = -(T**2) * (p_hat * (old / old.sum(1, keepdim=True)).log()).sum() / len(y)
    return RHO * Ld + (1 - RHO) * Lc


def star(
    net: Net, p: Problem, alpha: Tensor, momentum: float = 0.9, decay: float | None = None, clamp: float = math.inf
) -> Weights:
    """θ*, as a function of α that can be differentiated."""
    g = grad(lambda w: train_loss(forward(net, w, p.x), p.ref.z, p.y, p.s.n, alpha))(p.weights)
    g = {k: one.clamp(-clamp, clamp) for k, one in g.items()}
    ahead = {}
    for k, w in p.weights.items():
        lr, own = sgd_of(p, k)
        ahead[k] = w - lr * (momentum * p.momentum[k] + g[k] + (own if decay is None else decay) * w)
    return ahead


def validation_loss(p: Problem, alpha: Tensor, **sgd: float) -> Tensor:
    z = forward(p.s.net, star(p.s.net, p, alpha, **sgd), p.x_bar)
    return -(z - z.logsumexp(1, keepdim=True))[torch.arange(len(z)), p.y_bar].mean()


def slope_of(p: Problem) -> Tensor:
    """What the module computes, from its parts."""
    weights, b, groups = dict(p.s.net.named_parameters()), Batch(p.y, p.s.net(p.x), p.ref), trained(p)
    adapt, objective = p.method.remedy.adapt(), p.method.objective
    assert adapt is not None
    grads = compute_gradient(objective(p.s, b), weights, again=True)
    ahead = look_ahead(groups, grads, p.momentum, RECIPE)
    v = dict(zip(ahead, meta.validation_gradient(p.s.net, ahead, p.x_bar, p.y_bar)))
    d_alpha = dict(zip(weights, meta.influence(adapt, p.method, objective, p.s, b, weights)))
    return meta.hyper_gradient(d_alpha, v, groups)


# The gradient by α --------------------------------------------------------------------------------------------


def test_the_gradient_by_alpha_is_that_of_a_double_backward(problem: Problem) -> None:
    slope = slope_of(problem)
    expected = grad(lambda a: validation_loss(problem, a))(problem.s.state["alpha"])
    assert abs(expected) > 1e-5
    assert slope.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_gradient_by_alpha_is_that_of_finite_differences(problem: Problem) -> None:
    alpha, h = problem.s.state["alpha"], 1e-4
    ahead, behind = (validation_loss(problem, alpha + d).item() for d in (h, -h))
    assert slope_of(problem).item() == pytest.approx((ahead - behind) / (2 * h), rel=1e-5)


@pytest.mark.parametrize("sgd", [{"momentum": 0.0}, {"decay": 0.0}])
def test_momentum_and_weight_decay_move_the_point_looked_at(problem: Problem, sgd: dict[str, float]) -> None:
    """Leaving either out of θ* is another gradient, which the tests above would tell from the right one."""
    other = grad(lambda a: validation_loss(problem, a, **sgd))(problem.s.state["alpha"])
    assert slope_of(problem).item() != pytest.approx(other.item(), rel=1e-6)


def test_the_distillation_weight_is_part_of_the_gradient(problem: Problem) -> None:
    """The closed form −η mean⟨∂q/∂α, J z v⟩ is that of the plain balanced loss: eq. 1 brings a factor 1 − ρ."""
    p, s = problem, problem.s
    alpha = s.state["alpha"]
    v = grad(lambda w: F.cross_entropy(forward(s.net, w, p.x_bar), p.y_bar))(star(s.net, p, alpha))
    v = {k: sgd_of(p, k)[0] * one for k, one in v.items()}  # each by its own learning rate
    z, Jz_v = jvp(lambda w: forward(s.net, w, p.x), (p.weights,), (v,))
    weight = torch.cat([alpha * s.n[:OLD], s.n[OLD:]])
    q = weight * z.exp() / (weight * z.exp()).sum(1, keepdim=True)
    old = (torch.arange(CLASSES) < OLD).double()
    dq = q * (old - (q * old).sum(1, keepdim=True)) / alpha
    closed = (-(dq * Jz_v).sum(1).mean()).item()
    slope = slope_of(p).item()
    assert slope == pytest.approx((1 - RHO) * closed, rel=1e-9)
    assert slope != pytest.approx(closed, rel=0.1)


@pytest.mark.parametrize("clamp", [0.0, 0.5])
def test_lookahead_is_where_sgd_goes(problem: Problem, clamp: float) -> None:
    p, recipe = problem, replace(RECIPE, clamp=clamp)
    gen = torch.Generator().manual_seed(3)
    grads = {k: torch.randn(w.shape, generator=gen, dtype=w.dtype) for k, w in p.weights.items()}
    before = {k: w.clone() for k, w in p.weights.items()}
    ahead = look_ahead(trained(p), grads, p.momentum, recipe)
    if clamp:
        grads = {k: g.clamp(-clamp, clamp) for k, g in grads.items()}
    assert all(torch.equal(w, before[k]) for k, w in p.weights.items()), "looking is not going"
    sgd_(trained(p), grads, p.momentum, RECIPE)
    for k, w in p.weights.items():
        torch.testing.assert_close(ahead[k], w, rtol=1e-13, atol=1e-15)
        assert not torch.equal(w, before[k])


def test_validation_is_the_plain_cross_entropy_in_train_mode(problem: Problem) -> None:
    p = problem
    v = meta.validation_gradient(p.s.net, p.weights, p.x_bar, p.y_bar)
    twin = copy.deepcopy(p.s.net).train()
    twin.zero_grad()
    F.cross_entropy(twin(p.x_bar).z, p.y_bar).backward()
    for mine, w in zip(v, twin.parameters()):
        torch.testing.assert_close(mine, w.grad, rtol=1e-10, atol=1e-14)


# One update ---------------------------------------------------------------------------------------------------


class Balance:
    """B_t, all of it in every batch."""

    def __init__(self, p: Problem) -> None:
        self.p = p

    def next_batch(self) -> tuple[Tensor, Tensor]:
        return self.p.x_bar, self.p.y_bar


def update(p: Problem, alpha_lr: float, recipe: Recipe = RECIPE) -> None:
    """An update of α, which leaves the gradients that it is given as they are."""
    weights, b = dict(p.s.net.named_parameters()), Batch(p.y, p.s.net(p.x), p.ref)
    objective, adapt = p.method.objective, Meta(alpha_lr=alpha_lr).adapt()
    assert adapt is not None
    grads = compute_gradient(objective(p.s, b), weights, again=True)
    kept, held = {k: g.clone() for k, g in grads.items()}, Balance(p)
    ahead = meta.Ahead(trained(p), p.momentum, recipe, held, False, None)  # type: ignore[arg-type]
    meta.update(adapt, p.method, objective, p.s, b, grads, ahead)
    assert all(torch.equal(grads[k], kept[k]) for k in grads)


def test_an_update_follows_the_gradient_and_lambda_follows_alpha(problem: Problem) -> None:
    p = problem
    before = p.s.state["alpha"].clone()
    expected = before - 3.0 * grad(lambda a: validation_loss(p, a))(before)
    alpha, lam = p.s.state["alpha"], p.s.lam
    update(p, 3.0)
    assert p.s.state["alpha"] is alpha and p.s.lam is lam, "in place: a recorded graph reads these very tensors"
    assert alpha.item() == pytest.approx(expected.item(), rel=1e-12) and alpha != before
    n = p.s.n.tolist()
    assert lam.tolist() == pytest.approx([alpha.item() * k for k in n[:OLD]] + n[OLD:], rel=1e-14)


def test_what_is_clamped_does_not_follow_alpha(problem: Problem) -> None:
    p, clamp = problem, 0.01
    before = p.s.state["alpha"].clone()
    slope = grad(lambda a: validation_loss(p, a, clamp=clamp))(before)
    unclamped = grad(lambda a: validation_loss(p, a))(before)
    assert abs(slope - unclamped) > 0.1 * abs(unclamped), "the clamp reaches many numbers"
    update(p, 3.0, replace(RECIPE, clamp=clamp))
    assert p.s.state["alpha"].item() == pytest.approx((before - 3.0 * slope).item(), rel=1e-12)


def test_an_update_leaves_the_net_and_the_momentum_as_they_are(problem: Problem) -> None:
    p = problem
    momentum = {k: v.clone() for k, v in p.momentum.items()}
    twin = copy.deepcopy(p.s.net)
    twin(p.x)  # the training batch moves the batch-norm statistics once; the balanced batch does not
    assert "backbone.stages.0.1.running_mean" in twin.state_dict()
    update(p, 1.0)
    for k, v in p.s.net.state_dict().items():
        assert torch.equal(v, twin.state_dict()[k]), k
    assert all(torch.equal(p.momentum[k], momentum[k]) for k in momentum)
    assert p.s.net.training and all(w.grad is None for w in p.s.net.parameters())


@pytest.mark.parametrize(("slope", "alpha"), [(0.4, 0.5), (-0.4, 0.9), (1.4, 1e-3), (1e6, 1e-3), (0.0, 0.7)])
def test_alpha_stays_positive(problem: Problem, monkeypatch: pytest.MonkeyPatch, slope: float, alpha: float) -> None:
    monkeypatch.setattr(meta, "hyper_gradient", lambda *_: torch.tensor(slope).double())
    update(problem, 0.5)
    assert problem.s.state["alpha"].item() == pytest.approx(alpha, rel=1e-6)
    assert problem.s.lam[0].item() == pytest.approx(alpha * problem.s.n[0].item(), rel=1e-6)
    assert problem.s.lam[-1].item() == problem.s.n[-1].item()


# In the training loop -----------------------------------------------------------------------------------------


def by_hand(s: Step, recipe: Recipe, alpha_lr: float, every: int, seed: int) -> tuple[Net, Tensor, Weights]:
    """Algorithm 1 as printed, one line after the other, with torch's optimiser and a double backward."""
    net, alpha = copy.deepcopy(s.net).train(), torch.ones((), dtype=torch.float64)
    sgd = torch.optim.SGD(net.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    assert len(s.held) and s.teacher is not None
    orders = {}
    for purpose, positions in (("train", s.where), ("held", s.held)):
        gens = (generator(seed, s.t, purpose, "order", k) for k in range(50))
        orders[purpose] = torch.cat([positions[torch.randperm(len(positions), generator=gen)] for gen in gens])
    batch, batch_bar = recipe.batch, min(128, len(s.held))
    done = 0
    for epoch in range(recipe.epochs):
        for group in sgd.param_groups:
            group["lr"] = recipe.lr_at(epoch)
        until = math.floor((epoch + 1) * len(s.where) / batch + 0.5)
        for i in range(done, until):
            which = orders["train"][i * batch : (i + 1) * batch]
            x, y = s.images.x[which], s.images.y[which]
            z_old = s.teacher(x).z
            if i % every == 0:
                j = i // every
                which = orders["held"][j * batch_bar : (j + 1) * batch_bar]
                weights = {k: w.detach() for k, w in net.named_parameters()}
                momentum = {
                    k: sgd.state[w].get("momentum_buffer", torch.zeros_like(w)).clone()
                    for k, w in net.named_parameters()
                }
                none: Any = None
                p = Problem(
                    replace(s, net=net), none, x, y, Out(z_old, z_old, [], {}), s.images.x[which], s.images.y[which],
                    weights, momentum, torch.tensor(recipe.lr_at(epoch), dtype=torch.float64), ILBaseline.trained,
                )  # fmt: skip
                sgd_terms = {"momentum": recipe.momentum, "decay": recipe.weight_decay}
                slope = grad(lambda a, p=p, m=sgd_terms: validation_loss(p, a, **m))(alpha)
                alpha = (alpha - alpha_lr * slope).clamp_min(1e-3)
            sgd.zero_grad()
            train_loss(net(x).z, z_old, y, s.n, alpha).backward()
            sgd.step()
        done = until
    return net, alpha, {k: sgd.state[w]["momentum_buffer"] for k, w in net.named_parameters()}


# Learning rates that fp32, in which the loop keeps them, holds exactly.
EXACT = Recipe(epochs=3, lr=0.0625, milestones=(0.67,), decay=0.5, batch=8, momentum=0.9, weight_decay=2e-3)


def test_training_is_algorithm_1_line_by_line() -> None:
    """α is learned on the batch that follows, before the step on it, which uses the new α."""
    method = ILBaseline(Meta(alpha_lr=80.0, every=3), T=T)
    s, at = small_step(Meta()), Position()
    assert len(s.where) % EXACT.batch != 0
    net, alpha, momentum = by_hand(s, EXACT, alpha_lr=80.0, every=3, seed=4)
    epochs = train(method, s, EXACT, seed=4, at=at)
    assert abs(alpha - 1) > 0.05, "α must move, or nothing is tested"
    assert s.state["alpha"].item() == pytest.approx(alpha.item(), rel=1e-9)
    assert epochs[-1].alpha == s.state["alpha"].item()
    for (k, w), expected in zip(s.net.state_dict().items(), net.state_dict().values()):
        torch.testing.assert_close(w, expected, rtol=1e-8, atol=1e-10, msg=k)
    for k in momentum:
        torch.testing.assert_close(at.momentum[k], momentum[k], rtol=1e-8, atol=1e-10, msg=k)


@pytest.mark.parametrize("every", [1, 4, 10])
def test_alpha_is_updated_at_every_tenth_step_before_the_net(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    events: list[str] = []
    update, sgd_ = meta.update, loop.sgd_
    monkeypatch.setattr(meta, "update", lambda *a: (events.append("alpha"), update(*a)))
    monkeypatch.setattr(loop, "sgd_", lambda *a: (events.append("net"), sgd_(*a)))
    s = small_step(Meta(), batches=7, held=70)
    assert len(s.where) == 60
    train(ILBaseline(Meta() if every == 10 else Meta(every=every)), s, replace(EXACT, epochs=4))
    expected = []
    for i in range(30):  # 4 epochs of 60 images in batches of 8
        expected += ["alpha", "net"] if i % every == 0 else ["net"]
    assert events == expected


@pytest.mark.parametrize(("held", "every"), [(5, 1), (5, 2), (10, 1)])
def test_a_small_hold_out_serves_many_updates_in_an_epoch(held: int, every: int) -> None:
    """B_t is small (two images of every class) and an epoch long: B_t is gone through several times in one epoch."""
    method = ILBaseline(Meta(alpha_lr=1.0, every=every), T=T)
    s = small_step(Meta(), batches=12, held=held)
    recipe = replace(EXACT, epochs=2)
    net, alpha, _ = by_hand(s, recipe, alpha_lr=1.0, every=every, seed=4)
    train(method, s, recipe, seed=4)
    assert s.state["alpha"].item() == pytest.approx(alpha.item(), rel=1e-9)
    for (k, w), expected in zip(s.net.state_dict().items(), net.state_dict().values()):
        torch.testing.assert_close(w, expected, rtol=1e-8, atol=1e-10, msg=k)


def test_alpha_that_does_not_learn_is_the_balanced_loss_bit_for_bit() -> None:
    remedies = Meta(alpha_lr=0.0, every=2), Balanced(1.0), Meta(alpha_lr=20.0, every=2)
    steps = [small_step(remedy, torch.float32) for remedy in remedies]
    for remedy, s in zip(remedies, steps):
        train(ILBaseline(remedy), s, EXACT)
    assert steps[0].state["alpha"].item() == 1.0
    same, plain, other = (s.net.state_dict() for s in steps)
    assert all(torch.equal(same[k], plain[k]) for k in plain)
    assert not all(torch.equal(other[k], plain[k]) for k in plain), "or the comparison says nothing"


def test_without_a_hold_out_nothing_is_learned_besides_the_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base step: there is no B_t, and Meta is the balanced loss."""
    monkeypatch.setattr(meta, "update", lambda *_: pytest.fail("there is no α in the base step"))
    s = small_step(Balanced())
    epochs = train(ILBaseline(Meta()), replace(s, held=s.held[:0]), EXACT)
    assert [e.alpha for e in epochs] == [None] * 3


def test_a_step_that_goes_on_learns_the_same_alpha() -> None:
    """Stopped after an epoch and continued from copies: the same bits, α and batches of B_t included."""
    method = ILBaseline(Meta(alpha_lr=20.0, every=4))
    whole, at = small_step(Meta(), torch.float32), Position()
    kept: dict[int, tuple[Step, Position]] = {}

    def keep(e: Epoch) -> None:
        kept[e.epoch] = copy.deepcopy((whole, at))

    train(method, whole, EXACT, at=at, on_epoch=keep)
    for epoch in (1, 2):
        s, position = kept[epoch]
        assert position.epoch == epoch and s.state["alpha"] != whole.state["alpha"]
        train(method, s, EXACT, at=position)
        assert torch.equal(s.state["alpha"], whole.state["alpha"])
        assert all(torch.equal(v, whole.net.state_dict()[k]) for k, v in s.net.state_dict().items())


def test_alpha_is_learned_in_bf16_too() -> None:
    """The net computes in bf16, α and its gradient are fp32: about the same α as without."""
    found = []
    for bf16 in (False, True):
        s = small_step(Meta(), torch.float32, batches=1)
        train(ILBaseline(Meta(alpha_lr=5.0, every=1)), s, replace(EXACT, epochs=1), seed=4, bf16=bf16)
        assert s.state["alpha"].dtype == torch.float32
        found.append(s.state["alpha"].item())
    assert found[0] != found[1], "bf16 must have been used"
    assert found[1] - 1 == pytest.approx(found[0] - 1, rel=0.25)  # bf16 has 8 bits
