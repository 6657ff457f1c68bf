"""PODNet: its trunk, head and losses with loops in float64, how proxies begin, what is clamped, and fine-tuning."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import make_step, note_trainings, train
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise import (
    Balanced,
    Batch,
    Finetune,
    Learner,
    Out,
    Plan,
    PODNet,
    Recipe,
    Relaxed,
    Remedy,
    Stage,
    Standard,
    Step,
    UsageError,
)
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.losses import nca, pooled_distance, printed_distance
from equipoise.nets import Net
from equipoise.nets.backbones import PODNetResNet32, SmallNet
from equipoise.nets.heads import ProxyHead
from equipoise.runs.plan import prepare
from equipoise.runs.settings import Data, Machine, Run
from equipoise.step import plan_for

Numbers = Sequence[float]
Rows = Sequence[Numbers]


def unit(a: Numbers) -> list[float]:
    return [v / math.sqrt(math.fsum(u * u for u in a)) for v in a]


def distance(a: Numbers, b: Numbers) -> float:
    return math.sqrt(math.fsum((u - v) ** 2 for u, v in zip(a, b)))


def similarity(h: Numbers, proxies: Rows) -> float:
    """Σ_k softmax_k(s_k) s_k with s_k = −‖ĥ − ŵ_k‖²."""
    s = [-(distance(unit(h), unit(w)) ** 2) for w in proxies]
    return math.fsum(math.exp(v) * v for v in s) / math.fsum(math.exp(v) for v in s)


def similarities(h: Tensor, head: ProxyHead) -> Rows:
    rows = [*head.old.tolist(), *head.new.tolist()]
    return [[similarity(one, rows[k : k + 10]) for k in range(0, len(rows), 10)] for one in h.tolist()]


def nca_of_the_code(near: Rows, y: Sequence[int], eta: float, margin: float) -> float:
    """s = η (sim − δ), less its maximum; in the denominator the own class counts as exp 0."""
    total = 0.0
    for row, own in zip(near, y):
        s = [eta * (v - margin) - max(eta * (u - margin) for u in row) for v in row]
        total += -s[own] + math.log(math.exp(0) + math.fsum(math.exp(v) for k, v in enumerate(s) if k != own))
    return total / len(y)


def nca_of_the_paper(near: Rows, y: Sequence[int], eta: float, margin: float) -> float:
    """[−log exp η (sim_y − δ) / Σ_{k≠y} exp η sim_k]₊."""
    total = 0.0
    for row, own in zip(near, y):
        others = math.fsum(math.exp(eta * v) for k, v in enumerate(row) if k != own)
        total += max(0.0, -math.log(math.exp(eta * (row[own] - margin)) / others))
    return total / len(y)


def cross_entropy(near: Rows, y: Sequence[int], eta: float, lam: Numbers) -> float:
    totals = [math.fsum(w * math.exp(eta * v) for w, v in zip(lam, row)) for row in near]
    return math.fsum(math.log(total / lam[k]) - eta * row[k] for row, k, total in zip(near, y, totals)) / len(y)


def pooled(image: Sequence[Rows]) -> list[float]:
    """Squares summed over the width, then over the height, as one unit vector."""
    across = [math.fsum(v**2 for v in row) for channel in image for row in channel]
    down = [math.fsum(v**2 for v in column) for channel in image for column in zip(*channel)]
    return unit(across + down)


def spatial(maps: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    far = [[distance(pooled(u), pooled(v)) for u, v in zip(a.tolist(), b.tolist())] for a, b in zip(maps, before)]
    return math.fsum(math.fsum(of) / len(of) for of in far) / len(far)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def proxy_head(*sizes: int, width: int = 5) -> ProxyHead:
    """A head that grew in steps of these sizes, with proxies of many lengths and a scale of 2.5."""
    head = ProxyHead(width)
    for t, new in enumerate(sizes):
        head.widen(new, generator(t))
    head.double().new.data *= torch.linspace(1, 9, len(head.new))[:, None]
    head.scale.data.fill_(2.5)
    return head


def images(classes: range, each: int = 12) -> Images:
    y = torch.tensor([c for c in classes for _ in range(each)])
    return Images((30 * y[:, None, None, None] + 20 * noise(len(y), 1, 8, 8).abs()).clamp(0, 255).byte(), y)


def step(remedy: Remedy, n: Numbers, sizes: tuple[int, ...], net: Any = None) -> Step:
    return make_step(sizes, images(range(3)), remedy, n=n, dtype=torch.float64, net=net)


def test_the_trunk_has_5_5_4_and_1_blocks_four_maps_and_no_weights_in_shortcuts() -> None:
    net: Any = PODNet().backbone((3, 32, 32))
    assert isinstance(net, PODNetResNet32) and [len(stage) for stage in net.stages] == [5, 5, 4, 1]
    h, maps = net(noise(2, 3, 32, 32).float())
    assert [tuple(m.shape[1:]) for m in maps] == [(16, 32, 32), (32, 16, 16), (64, 8, 8), (64, 8, 8)]
    torch.testing.assert_close(h, maps[3].flatten(2).mean(2))
    assert [m.kernel_size for m in net.modules() if isinstance(m, nn.Conv2d)] == [(3, 3)] * 31


@pytest.mark.parametrize("side", [6, 7])
def test_a_fresh_stage_is_every_other_pixel_and_zeros_for_new_channels(side: int) -> None:
    """Its shortcut: the second batch norm of each block starts at 0."""
    net: Any = PODNetResNet32().double()
    net.initialise(generator(0))
    for stage, inside, outside, stride in zip(net.stages, (16, 16, 32, 64), (16, 32, 64, 64), (1, 2, 2, 1)):
        x, after = noise(2, inside, side, side), -(-side // stride)
        expected = torch.zeros(2, outside, after, after, dtype=torch.float64)
        for b, c, i, j in itertools.product(range(2), range(inside), range(after), range(after)):
            expected[b, c, i, j] = x[b, c, stride * i, stride * j]
        assert torch.equal(stage(x), expected)


def test_no_relu_follows_a_sum() -> None:
    net: Any = PODNetResNet32().double().eval()
    for block in itertools.chain(*net.stages):
        x, first, second = noise(2, block.conv1.in_channels, 6, 6), block.conv1, block.conv2
        y = F.conv2d(x, first.weight, stride=first.stride, padding=1).relu() / math.sqrt(1 + 1e-5)
        y = F.conv2d(y, second.weight, padding=1) / math.sqrt(1 + 1e-5)
        y[:, : x.shape[1]] += x if y.shape == x.shape else x[:, :, ::2, ::2]
        torch.testing.assert_close(block(x), y)
    assert all((m < 0).any() for m in net(10 * noise(2, 3, 8, 8))[1]), "nor at the end of a stage"


def test_logits_are_soft_sums_over_ten_proxies() -> None:
    head, h = proxy_head(2, 1, 2), 3 * noise(4, 5)
    near, (z, extra) = torch.tensor(similarities(h, head), dtype=torch.float64), head(h, [])
    torch.testing.assert_close(z, 2.5 * near, rtol=1e-12, atol=0)
    torch.testing.assert_close(extra["similarity"], near, rtol=1e-12, atol=0)
    assert len(head.old) == 30 and {name for name, _ in head.named_parameters()} == {"old", "new", "scale"}
    (fresh := ProxyHead(16)).widen(50, generator(0))
    assert fresh.scale == 1 and fresh.new.std().item() == pytest.approx(1 / 4, rel=0.05), "He's spread"


def test_the_printed_similarity_is_the_cosine() -> None:
    """As a setting of the method, with a base step of its own."""
    h, plain = 3 * noise(4, 5), proxy_head(2, 1, 2)
    head = PODNet(similarity="paper").head(5)
    assert isinstance(head, ProxyHead) and not PODNet().head(5).cosine  # type: ignore[attr-defined]
    head.double().load_state_dict(plain.state_dict())
    rows = [*plain.old.tolist(), *plain.new.tolist()]
    expected = []
    for one in h.tolist():
        s = [math.fsum(a * b for a, b in zip(unit(one), unit(w))) for w in rows]
        parts = [s[k : k + 10] for k in range(0, len(s), 10)]
        soft = [math.fsum(math.exp(v) * v for v in part) / math.fsum(math.exp(v) for v in part) for part in parts]
        expected.append([2.5 * v for v in soft])
    torch.testing.assert_close(head(h, [])[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    bases = {PODNet(r, similarity=s).at_base() for r in (Standard(), Balanced()) for s in ("code", "paper")}  # type: ignore[arg-type]
    assert len(bases) == 4


def test_a_margin_that_cancels_is_no_other_base_step() -> None:
    assert PODNet(margin=2.0).at_base() == PODNet().at_base()
    assert PODNet(margin=2.0, nca="paper").at_base() != PODNet(nca="paper").at_base()


@pytest.mark.parametrize("margin", [0.0, 0.6, 5.0])
def test_nca_of_the_code_does_not_know_its_margin(margin: float) -> None:
    near, y, eta = -noise(7, 5).abs(), [0, 1, 2, 3, 4, 0, 2], 2.5
    assert {y[i] == near[i].argmax().item() for i in range(7)} == {True, False}, "both kinds of images"
    value = nca_of_the_code(near.tolist(), y, eta, margin)
    assert nca(eta * near, torch.tensor(y)).item() == pytest.approx(value, rel=1e-13)
    assert torch.autograd.gradcheck(lambda z: nca(z, torch.tensor(y)), [(eta * near).requires_grad_()])


def test_the_printed_nca_has_a_hinge_and_a_margin_on_the_own_class_alone() -> None:
    near, y, eta = -noise(7, 5).abs(), torch.tensor([0, 1, 2, 3, 4, 0, 2]), 2.5
    near[0] = torch.tensor([0.0, -4, -4, -4, -4])
    for m in (0.0, 0.6, 5.0):
        inputs = [(eta * near).requires_grad_(), torch.full((7,), eta * m, dtype=torch.float64).requires_grad_()]
        value = nca_of_the_paper(near.tolist(), y.tolist(), eta, m)
        assert nca(inputs[0], y, inputs[1]).item() == pytest.approx(value, rel=1e-13)
        assert torch.autograd.gradcheck(lambda z, margin: nca(z, y, margin), inputs)
    (gradient,) = torch.autograd.grad(nca(inputs[0], y, torch.zeros(7)), inputs[:1])
    assert (gradient[0] == 0).all() and (gradient[1:] != 0).any(), "what is near enough is left alone"


def test_pooled_distance_is_pod_spatial() -> None:
    maps, before = ([noise(3, 2, 4, 5, seed=k), noise(3, 4, 2, 3, seed=k + 1)] for k in (0, 7))
    assert pooled_distance(maps, before).item() == pytest.approx(spatial(maps, before), rel=1e-12)
    assert torch.autograd.gradcheck(lambda *m: pooled_distance(list(m), before), [m.requires_grad_() for m in maps])
    value = pooled_distance(maps, [m.detach() for m in maps])
    assert value == 0 and all((g == 0).all() for g in torch.autograd.grad(value, maps)), "no NaN where nets agree"


def spatial_as_printed(maps: list[Tensor], before: list[Tensor]) -> float:
    """Σ_c Σ_h (Σ_w x − Σ_w x̂)² + Σ_c Σ_w (Σ_h x − Σ_h x̂)², mean over images and stages, number by number."""
    total = 0.0
    for x, x_hat in zip(maps, before):
        n, channels, height, width = x.shape
        d = (x - x_hat).tolist()
        for i in range(n):
            for c in range(channels):
                rows = (math.fsum(d[i][c][j]) for j in range(height))
                columns = (math.fsum(d[i][c][j][k] for j in range(height)) for k in range(width))
                total += (math.fsum(v * v for v in rows) + math.fsum(v * v for v in columns)) / n / len(maps)
    return total


def test_the_printed_distance_is_of_plain_sums_and_squared() -> None:
    """The setting `spatial` chooses it; the base step is the same."""
    maps, before = ([noise(3, 2, 4, 5, seed=k), noise(3, 4, 2, 3, seed=k + 1)] for k in (0, 7))
    value = printed_distance(maps, before)
    assert value.item() == pytest.approx(spatial_as_printed(maps, before), rel=1e-12)
    assert torch.autograd.gradcheck(lambda *m: printed_distance(list(m), before), [m.requires_grad_() for m in maps])
    coarse = [[m.detach().bfloat16() for m in of] for of in (maps, before)]
    near, exact = printed_distance(*coarse), printed_distance(*([m.double() for m in of] for of in coarse))
    assert near.dtype == torch.float32 and near.item() == pytest.approx(exact.item(), rel=1e-6)
    out, ref = (Out(noise(3, 4), noise(3, 6, seed=k), m, {"scale": torch.ones(3)}) for k, m in ((2, maps), (3, before)))
    y, s = torch.tensor([0, 3, 1]), step(Standard(), [20, 20, 500, 500], (2, 2))
    code, printed = (PODNet(spatial=form).objective(s, Batch(y, out, ref)) for form in ("code", "paper"))  # type: ignore[arg-type]
    assert (printed - code).item() == pytest.approx(
        math.sqrt(4 / 2) * 3 * (value - pooled_distance(maps, before)).item(), rel=1e-12
    )
    assert PODNet(spatial="paper").at_base() == PODNet().at_base()


def test_pooled_distance_rounds_nothing_but_the_gradient() -> None:
    """Maps in bf16, laid out as a GPU likes them: the value as in fp32, and gradients rounded once, laid out alike."""
    maps, before = ([noise(3, 8, 4, 4, seed=k).bfloat16().to(memory_format=torch.channels_last)] for k in (0, 7))
    exact = maps[0].double().requires_grad_()
    truth = pooled_distance([exact], [before[0].double()])
    value = pooled_distance([maps[0].requires_grad_()], before)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(truth.item(), rel=1e-6)
    (d,), (d_exact,) = torch.autograd.grad(value, maps), torch.autograd.grad(truth, exact)
    assert d.dtype == torch.bfloat16 and d.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(d.double(), d_exact, rtol=2**-8, atol=1e-9)


KINDS = [PODNet(margin=5.0), PODNet(nca="paper"), PODNet(Balanced(0.5)), PODNet(Relaxed("0.2%"))]


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (2, 2, 1)], ids=["base", "step-1", "step-2"])
@pytest.mark.parametrize("method", KINDS, ids=["code", "paper", "balanced", "relaxed"])
def test_the_objective_adds_both_distances_after_the_base_step(method: PODNet, sizes: tuple[int, ...]) -> None:
    method = replace(method, lambda_c=4.0, lambda_f=1.5)
    n_old, y, h, h_old = sum(sizes[:-1]), [0, 1, 2, 3, 4, 4], noise(6, 5), noise(6, 5, seed=1)
    n = [20.0 + k for k in range(n_old)] + [500.0 - 7 * k for k in range(5 - n_old)]
    head, map_, before = proxy_head(*sizes), noise(6, 2, 3, 4, seed=2), noise(6, 2, 3, 4, seed=3)

    def whole(h: Tensor, map_: Tensor, new: Tensor, eta: Tensor) -> Tensor:
        z, extra = functional_call(head, {"new": new, "scale": eta}, (h, []))
        ref = Out(z[:, :n_old], h_old, [before], {}) if n_old else None
        return method.objective(step(method.remedy, n, sizes), Batch(torch.tensor(y), Out(z, h, [map_], extra), ref))

    near = similarities(h, head)
    expected = (nca_of_the_code if method.nca == "code" else nca_of_the_paper)(near, y, 2.5, method.margin)
    if not isinstance(method.remedy, Standard):
        old = [0.5 * k for k in n[:n_old]] if isinstance(method.remedy, Balanced) else [1.0] * n_old
        expected = cross_entropy(near, y, 2.5, old + n[n_old:])
    if n_old:
        flat = sum(1 - sum(u * v for u, v in zip(unit(a), unit(b))) for a, b in zip(h.tolist(), h_old.tolist())) / 6
        expected += math.sqrt(5 / sizes[-1]) * (4.0 * spatial([map_], [before]) + 1.5 * flat)
    inputs = [x.detach().requires_grad_() for x in (h, map_, head.new, head.scale)]
    assert whole(*inputs).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)


def test_new_proxies_begin_at_the_centres_of_clusters_as_long_as_old_proxies() -> None:
    """Each class has ten clusters: pairs of directions at an angle, so that a centre is shorter than 1."""
    head, angle, e = proxy_head(2, 2, width=32), 0.1, torch.eye(32, dtype=torch.float64)
    places = list(itertools.product(range(20), (-1, 1), (0.5, 3.0)))
    h = [length * (math.cos(angle) * e[k] + side * math.sin(angle) * e[31 - k // 2]) for k, side, length in places]
    PODNet().first_rows(head, torch.stack(h), torch.tensor([k % 2 for k, _, _ in places]), generator(0))
    length = math.fsum(distance(row, [0.0] * 32) for row in head.old.tolist()) / 20
    for c in range(2):
        centres = sorted((length * math.cos(angle) * e[k]).tolist() for k in range(c, 20, 2))
        for found, centre in zip(sorted(head.new[10 * c : 10 * c + 10].tolist()), centres):
            assert found == pytest.approx(centre, abs=1e-6)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_class_with_fewer_images_than_proxies_repeats_them(count: int) -> None:
    head, h = proxy_head(2, 2), noise(count + 12, 5)
    PODNet().first_rows(head, h, torch.tensor([0] * count + [1] * 12), generator(0))
    among = torch.cdist(head.new[:10] / head.old.norm(dim=1).mean(), F.normalize(h[:count], dim=1)) < 1e-5
    assert (among.sum(1) == 1).all(), "every proxy is one of the images"
    assert among.sum(0).min() >= 10 // count and among.sum(0).max() <= -(-10 // count)


def test_gradients_are_clamped_number_by_number_and_before_weight_decay() -> None:
    net = Net(SmallNet(1), proxy_head(3, width=64), torch.tensor([90.0]), torch.tensor([60.0])).double()
    s, twin = step(Standard(), [12.0] * 3, (3,), net), copy.deepcopy(net).train()
    PODNet().objective(s, Batch(s.y, twin(s.images.x))).backward()
    trained = dict(twin.named_parameters())
    assert trained.pop("head.old").numel() == 0, "there are no old classes"
    bound = torch.cat([w.grad.abs().flatten() for w in trained.values()]).median().item()
    train(PODNet(), s, Recipe(epochs=1, lr=0.5, batch=64, weight_decay=0.25, clamp=bound))
    for w, old in ((dict(net.named_parameters())[name], old) for name, old in trained.items()):
        pairs = zip(old.flatten().tolist(), old.grad.flatten().tolist())
        expected = [v - 0.5 * (max(-bound, min(bound, g)) + 0.25 * v) for v, g in pairs]
        assert bound > 0 and w.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_the_recipes_are_those_of_the_original() -> None:
    p, r = PODNet(), PODNet().recipe(plan_for((3, 32, 32)))
    assert (r.epochs, r.batch, r.momentum, r.weight_decay, r.clamp) == (160, 128, 0.9, 5e-4, 5)
    part = {0: 1.0, 40: (1 + math.sqrt(0.5)) / 2, 80: 0.5, 120: (1 - math.sqrt(0.5)) / 2, 160: 0.0}
    assert [r.lr_at(k) for k in part] == pytest.approx([0.1 * f for f in part.values()], abs=1e-15)
    *_, refit = p.stages(Plan(1, (50, 10), (3, 32, 32), (20,) * 50 + (500,) * 10, 20, 20))
    assert isinstance(refit, Stage) and refit.batch_norm == "train" and refit.teacher == "previous"
    r = refit.recipe
    assert {r.lr_at(k) for k in range(20)} == {0.05}
    assert (r.epochs, r.batch, r.momentum, r.weight_decay, r.clamp) == (20, 128, 0.9, 5e-4, 5)
    assert (p.lambda_c, p.lambda_f, p.nca, p.margin) == (3, 1, "code", 0.6)


ASKED = [(PODNet(), True), (PODNet(finetune=Finetune(0)), False), (PODNet(Balanced()), False)]


@pytest.mark.parametrize(("method", "refitted"), ASKED, ids=["standard", "not-asked", "balanced"])
def test_fine_tuning_after_the_base_step_moves_all_proxies_and_the_statistics_only(
    method: PODNet, refitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, rates = note_trainings(monkeypatch), []
    recipe = Recipe(2, 0.05, schedule="cosine", batch=16, weight_decay=0.05)
    learner: Any = Learner(method, 4, recipe=recipe, device="cpu")
    for classes in (range(3), range(3, 5), range(5, 7)):
        old = learner.state_.net.head.rows() if learner.classes_ else torch.empty(0, 64)
        learner.learn(images(classes).x, images(classes).y, lambda now: rates.append((now.stage_, now.progress_.lr)))
        net = seen[-1].net if seen[-1].stage.name == "refit" else learner.state_.net
        assert torch.equal(net.head.rows()[: len(old)], old), "in training, old proxies are frozen"
    later = [(t, name) for t in (1, 2) for name in ("train", "refit")[: 1 + refitted]]
    assert [(one.t, one.stage.name) for one in seen] == [(0, "train"), *later]
    assert [lr for stage, lr in rates if stage == "train"] == pytest.approx([0.05, 0.025] * 3)
    assert [lr for stage, lr in rates if stage == "refit"] == pytest.approx([0.05] * 20 * 2 * refitted)
    if refitted:
        before, after = seen[-1].net, learner.state_.net
        assert ((after.head.rows() - before.head.rows()).norm(dim=1) > 1e-5).all() and len(after.head.rows()) == 70
        moved = {k for k, v in after.state_dict().items() if not torch.equal(v, before.state_dict()[k])}
        assert moved == {"head.old", "head.new", *(k for k in after.state_dict() if "running" in k or "tracked" in k)}


def test_a_base_step_of_nca_is_not_taken_for_that_of_another_loss() -> None:
    runs = [Run(PODNet(remedy), Data("digits")) for remedy in (Standard(), Balanced())]
    one, other = (prepare(run, Machine("cpu")).compute_keys()[0] for run in runs)
    assert one is not None and one != other


@pytest.mark.parametrize(
    "bad",
    [
        {"lambda_c": -1},
        {"lambda_f": math.nan},
        {"margin": -0.1},
        {"nca": "printed"},
        {"similarity": "cos"},
        {"spatial": ""},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        PODNet(**bad)
