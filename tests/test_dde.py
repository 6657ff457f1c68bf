"""DDE: its mixture of softmaxes, its neighbours and what it removes from predictions, written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import make_step, train
from torch import Tensor

from equipoise import (
    DDE,
    LUCIR,
    Balanced,
    BalancedFinetuning,
    Batch,
    BiC,
    Crop,
    ILBaseline,
    Learner,
    LossRescaling,
    Method,
    Out,
    PODNet,
    Recipe,
    Relaxed,
    Remedy,
    SeparatedSoftmax,
    Stage,
    Standard,
    Step,
    UsageError,
)
from equipoise.cli.request import Request, parse_request
from equipoise.data.augment import AugmentedEpoch
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine.predict import compute_features
from equipoise.learner.state import new_net
from equipoise.losses import colliding_cross_entropy, margin_ranking, weighted_cross_entropy
from equipoise.nets import Net
from equipoise.report.words import describe_changes, find_method_title, format_remedy, write_method
from equipoise.runs.command import write_command
from equipoise.runs.plan import find_base_method, read_run, resolve
from equipoise.runs.settings import Data, Run
from equipoise.settings import to_plain
from equipoise.step import Learned, More

LAMBDAS = ([1.0] * 5, [20.0, 20.0, 20.0, 500.0, 480.0], [0.0, 0.0, 0.0, 7.0, 9.0])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def mixture_by_hand(z: np.ndarray, near: np.ndarray, y: list[int], lam: list[float]) -> tuple[float, np.ndarray]:
    """The loss and its gradient by z, image by image."""
    loss, d = 0.0, np.zeros_like(z)
    k = len(near) // len(z)
    for i, label in enumerate(y):
        p = np.array(lam) * np.exp(z[i]) / (np.array(lam) * np.exp(z[i])).sum()
        around = [np.array(lam) * np.exp(z_k) for z_k in near[i * k : (i + 1) * k]]
        mean = np.mean([one / one.sum() for one in around], axis=0)
        q = (p + mean) / 2
        loss -= math.log(q[label]) / len(y)
        d[i] = -(p[label] / (2 * q[label])) * (np.eye(len(lam))[label] - p) / len(y)
    return loss, d


@pytest.mark.parametrize("lam", LAMBDAS, ids=["standard", "balanced", "without memory"])
def test_softmaxes_are_weighted_and_then_mixed(lam: list[float]) -> None:
    z, near, y = random(4, 5), random(12, 5, seed=1), [3, 4, 4, 3] if lam[0] == 0 else [0, 4, 2, 3]
    expected, by_hand = mixture_by_hand(z.numpy(), near.numpy(), y, lam)
    z.requires_grad_()
    loss = colliding_cross_entropy(z, near, torch.tensor(y), torch.tensor(lam, dtype=torch.float64))
    (d,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(d.numpy(), by_hand, atol=1e-14)


def test_neighbours_that_are_the_image_itself_change_nothing() -> None:
    z, y, lam = random(4, 5), torch.tensor([0, 4, 2, 3]), torch.tensor(LAMBDAS[1])
    found = colliding_cross_entropy(z, z.repeat_interleave(3, 0), y, lam)
    assert found.item() == pytest.approx(weighted_cross_entropy(z, y, lam).item(), rel=1e-12)
    assert colliding_cross_entropy(200 * z, -200 * z, y, lam).isfinite(), "where softmaxes underflow"


def as_out(z: Tensor, seed: int) -> Out:
    maps = [random(len(z), 2, 3, 3, seed=seed)]
    extra = {"cos": z / 10, "similarity": z / 3, "scale": torch.full((len(z),), 3.0, dtype=torch.float64)}
    return Out(z, random(len(z), 6, seed=seed), maps, extra)


@pytest.mark.parametrize("remedy", [Standard(), Balanced(0.5), Relaxed(2.0)], ids=lambda r: r.name)
def test_only_the_classification_loss_of_the_host_is_replaced(remedy: Any) -> None:
    y = torch.tensor([0, 1, 3, 4])
    b = Batch(y, as_out(random(4, 5), 2), as_out(random(4, 3), 3), Batch(y, as_out(random(8, 5, seed=4), 5)))
    s = make_step((3, 2), n=[4, 4, 4, 30, 30], remedy=remedy, dtype=torch.float64)
    assert b.more is not None and b.ref is not None
    Lc, _ = mixture_by_hand(b.out.z.numpy(), b.more.out.z.numpy(), y.tolist(), s.lam.tolist())
    far = 1 - torch.nn.functional.cosine_similarity(b.out.h, b.ref.h).mean()
    rank = margin_ranking(b.out.extra["cos"], y, 3, 2, 0.5)
    found = DDE(host=LUCIR(remedy)).objective(s, b)
    assert found.item() == pytest.approx((Lc + 5 * math.sqrt(3 / 2) * far + rank).item(), rel=1e-9)
    host = PODNet(remedy)
    known = host.objective(s, b) - (host.remedy.ce(b.out.z, y, s) or nca_by_hand(b.out.z, y))
    assert DDE(host=host).objective(s, b).item() == pytest.approx((Lc + known).item(), rel=1e-9)
    alone = b._replace(more=None)
    assert DDE(host=host).objective(s, alone).item() == host.objective(s, alone).item()


def nca_by_hand(z: Tensor, y: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(z, y):
        row = row - row.max()
        others = torch.cat([row[:label], row[label + 1 :]])
        loss += (-row[label] + (others.exp().sum() + 1).log()) / len(y)
    return loss


# Neighbours


@pytest.fixture(scope="module")
def digits() -> Images:
    """Twenty images of each of five digits."""
    images = load("digits").train
    return images[torch.cat([images.find_positions(k, k + 1)[:20] for k in range(5)])]


def make_net(method: Method, classes: int) -> Net:
    net = new_net(method, (1, 8, 8), torch.tensor([70.0]), torch.tensor([80.0]), generator(0, "net"), None)
    net.head.widen(classes, generator(0, "rows"))
    return net


def make_epoch(where: Tensor, crop: Crop, first: int = 0) -> AugmentedEpoch:
    return AugmentedEpoch(crop, where, crop.draw((len(where),), generator(0, "crop")), first)


@pytest.mark.parametrize("first", [0, 30])
def test_neighbours_are_the_nearest_new_images_as_they_are_augmented(digits: Images, first: int) -> None:
    net, crop = make_net(LUCIR(), 3), Crop(pad=1, flip=True)
    where = torch.randperm(len(digits), generator=generator(0, "order"))
    where[41] = where[40] = digits.find_positions(4, 5)[3]  # comes twice: two neighbours of each other
    epoch = make_epoch(where, crop, first)
    epoch.drawn[41] = epoch.drawn[40]
    s = replace(make_step((3, 2), digits, net=net, teacher=net), epoch=epoch)
    found = DDE(neighbours=4).find_neighbours(s, 50)
    pixels = crop(digits.x, where, epoch.drawn)
    h = compute_features(net, pixels, torch.arange(len(where))).double().numpy()
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    for row, own in zip(found.tolist(), range(first, first + 50)):
        far = {i: np.linalg.norm(h[own] - h[i]) for i in range(len(where)) if i != own and digits.y[where[i]] >= 3}
        np.testing.assert_allclose([far[i] for i in row], sorted(far.values())[:4], atol=1e-4)
        assert own not in row and (digits.y[where[row]] >= 3).all()
    assert found[40 - first, 0] == 41 and found[41 - first, 0] == 40
    more = DDE(neighbours=4).more(s, where[first : first + 50].view(5, 10), generator(0))
    assert more is not None and not more.gradient and not more.teacher and more.drawn is not None
    assert torch.equal(more.where, where[found].view(5, 40)) and torch.equal(
        more.drawn.view(50, 4, 3), epoch.drawn[found]
    )


def test_few_new_images_repeat(digits: Images) -> None:
    net, crop = make_net(LUCIR(), 4), Crop(pad=1)
    few = torch.cat([torch.arange(6), digits.find_positions(4, 5)[:3]])
    s = make_step((4, 1), digits, net=net, teacher=net)
    found = DDE().find_neighbours(replace(s, epoch=make_epoch(few, crop)), 9)
    assert found.shape == (9, 10) and all(len({*row}) == 2 and min(row) >= 6 for row in found.tolist())
    none = replace(s, epoch=make_epoch(few[:6], crop))
    assert DDE().find_neighbours(none, 6).shape == (6, 10)


def test_there_are_none_in_the_base_step_and_in_fine_tuning(digits: Images) -> None:
    net, which = make_net(LUCIR(), 3), torch.arange(10)[None]
    s = make_step((3, 2), digits, net=net, teacher=net)
    s = replace(s, epoch=make_epoch(torch.arange(len(digits)), Crop(pad=1)))
    assert DDE().more(s, which, generator(0)) is not None
    assert DDE().more(replace(s, teacher=None), which, generator(0)) is None
    assert DDE().more(replace(s, where=s.memory), which, generator(0)) is None


@dataclass(frozen=True)
class Twice(Method):
    """Every image twice, the second time as what stands at its place in the epoch."""

    seen: list[int] = field(default_factory=list)

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        assert s.epoch is not None
        part = slice(s.epoch.first, s.epoch.first + which.numel())
        assert torch.equal(s.epoch.where[part].view_as(which), which)
        torch.testing.assert_close(s.embed(s.net, s.epoch)[part].view(*which.shape, -1)[0, 0], embedded(s, part.start))
        return More(which, gradient=False, drawn=s.epoch.drawn[part].view(*which.shape, -1))

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None and torch.equal(b.more.y, b.y) and torch.equal(b.more.out.h, b.out.h)
        self.seen.append(len(b.y))
        return self.classify(b.out.z, b.y, s)


def embedded(s: Step, k: int) -> Tensor:
    """h of one image of the epoch."""
    assert s.epoch is not None
    pixels = s.epoch.crop(s.images.x, s.epoch.where[k : k + 1], s.epoch.drawn[k : k + 1])
    return compute_features(s.net, pixels, torch.arange(1))[0]


@pytest.mark.parametrize(("last", "sizes"), [("joined", [32] * 6), ("short", [32, 32, 32, 4] * 2)])
def test_a_second_stream_can_be_augmented_as_the_first(digits: Images, last: Any, sizes: list[int]) -> None:
    method = Twice()
    s = make_step((5,), digits, net=make_net(method, 5))
    recipe = Recipe(epochs=2, lr=0.01, batch=32, last=last)
    train(method, s, recipe, Crop(pad=1), batch_norm="eval")
    assert method.seen == sizes


@pytest.mark.parametrize("last", ["joined", "short"])
def test_an_epoch_is_embedded_once(digits: Images, last: Any) -> None:
    """A short last batch finds its neighbours among the same images."""
    net, seen = make_net(LUCIR(), 5), []
    s = make_step((3, 2), digits, net=net, teacher=make_net(LUCIR(), 3).eval().requires_grad_(False))

    def embed(*given: Any) -> Tensor:
        seen.append(len(given[1]))
        return s.embed(*given)

    method, watched = DDE(), replace(s, embed=embed)
    method.enter(watched, Stage("train", Recipe()))
    train(method, watched, Recipe(epochs=2, lr=0.01, batch=32, last=last), Crop(pad=1))
    assert len(seen) == 2 and (last == "joined" or seen == [100, 100])


# The momentum effect


def test_the_direction_is_a_moving_sum_of_mean_features() -> None:
    method, h = DDE(), [random(4, 64, seed=k).float() for k in range(3)]
    s = make_step((3, 2), n=[1] * 5, net=make_net(LUCIR(), 5))
    more = Batch(torch.zeros(8), as_out(random(8, 5), 0))
    s.state["direction"] = torch.full((64,), 7.0)
    method.enter(s, Stage("refit", Recipe()))
    assert (s.state["direction"] == 7).all(), "fine-tuning leaves it as it is"
    method.enter(s, Stage("train", Recipe()))
    before = s.state["direction"]
    for one in h:
        method.note(s, Batch(torch.zeros(4), Out(one, one, [], {}), None, more))
    method.note(s, Batch(torch.zeros(4), Out(h[0], h[0], [], {})))  # of a fine-tuning
    expected = 0.81 * h[0].double().mean(0) + 0.9 * h[1].double().mean(0) + h[2].double().mean(0)
    assert s.state["direction"] is before, "a captured step updates it in place"
    torch.testing.assert_close(before.double(), expected, rtol=1e-5, atol=1e-5)
    base = make_step((3,), n=[1] * 3, net=make_net(LUCIR(), 3))
    method.enter(base, Stage("train", Recipe()))
    method.after(base)
    assert base.state == {}


@pytest.mark.parametrize("host", [LUCIR(), PODNet()], ids=lambda host: host.name)
def test_what_the_classifier_makes_of_the_direction_is_removed(host: Method) -> None:
    net, method = make_net(host, 5).requires_grad_(False), DDE(host=host, effect=0.7)
    s = make_step((3, 2), n=[1] * 5, net=net, state={"direction": 3 * random(64).float()})
    d = s.state["direction"].double()
    d /= d.norm()
    method.after(s)
    h = random(6, 64, seed=9).float()
    z, extra = net.head(h, [])
    found = method.scores(Out(z, h, [], extra), Learned((3, 2), s.state))
    head: Any = net.head
    w = head.rows().double() / head.rows().double().norm(dim=1, keepdim=True)
    z_of_d = head.scale.double() * w @ d
    if host.name == "podnet":
        near = (2 * w @ d - 2).view(5, 10)
        z_of_d = head.scale.double() * (near.exp() / near.exp().sum(1, keepdim=True) * near).sum(1)
    cos = h.double() @ d / h.double().norm(dim=1)
    torch.testing.assert_close(found.double(), z.double() - 0.7 * cos[:, None] * z_of_d, rtol=1e-5, atol=1e-5)
    under_way = torch.cat([z, z[:, :2]], 1)
    assert torch.equal(method.scores(Out(under_way, h, [], extra), Learned((3, 2, 2), s.state)), under_way)


# Around its host


@pytest.mark.parametrize("host", [LUCIR(Balanced()), PODNet()], ids=lambda host: host.name)
def test_it_learns_and_its_base_step_is_that_of_its_host(digits: Images, host: Method) -> None:
    recipe, accuracy = Recipe(epochs=15, lr=0.1, batch=16), {}
    for method in (host, DDE(host=host)):
        learner = Learner(method, 5, recipe=recipe, device="cpu")
        for classes in ((0, 1, 2), (3, 4)):
            where = torch.cat([digits.find_positions(c, c + 1) for c in classes])
            learner.learn(digits.x[where], digits.y[where].tolist())
            found = learner.logits(digits.x)
            if len(classes) == 3:
                torch.testing.assert_close(accuracy.setdefault("base", found), found, rtol=0, atol=0)
        accuracy[method.name] = learner.score(digits.x, digits.y.tolist())
    assert learner.state_.extra["effect"].abs().sum() > 0
    assert accuracy["dde"] > {"lucir": 0.6, "podnet": 0.8}[host.name], accuracy
    assert find_base_method(DDE(host=host)) == find_base_method(host)


@pytest.mark.parametrize("host", [BiC(), ILBaseline(), DDE()], ids=lambda host: host.name)
def test_other_hosts_are_refused(host: Method) -> None:
    with pytest.raises(UsageError, match=rf"^dde does not wrap {host.name}: take lucir or podnet as its host$"):
        Learner(DDE(host=host))


@dataclass(frozen=True)
class MyLUCIR(LUCIR):
    """A host of the user's."""

    name = "my-lucir"


def test_what_derives_from_a_host_is_one() -> None:
    assert Learner(DDE(host=MyLUCIR())).method == DDE(host=MyLUCIR()), "it is not refused"


def test_a_host_and_its_flags_on_the_command_line() -> None:
    words = "dde --host podnet --remedy balanced --alpha 0.5 --lambda-c 4 --neighbours 3 --dataset digits --memory 0"
    run = parse_request(words.split(), "run", Request).run
    assert run.method == DDE(host=PODNet(Balanced(0.5), lambda_c=4.0), neighbours=3)
    command = write_command(run)
    assert command.startswith(
        "equipoise run dde --host podnet --remedy balanced --alpha 0.5 --neighbours 3 --lambda-c 4.0"
    )
    assert parse_request(command.split()[2:], "run", Request).run == run
    plain = to_plain(run)
    assert plain["method"]["name"] == "dde" and plain["method"]["host"]["remedy"] == {"name": "balanced", "alpha": 0.5}
    assert read_run(plain) == run


def test_reports_name_the_host_and_its_own_settings() -> None:
    hosts = (LUCIR(), PODNet(), PODNet(lambda_c=4.0), LUCIR(Balanced()))
    plain = [to_plain(resolve(Run(DDE(host=host), Data("digits")), 10, (1, 8, 8))) for host in hosts]
    assert [write_method(run["method"]) for run in plain] == ["dde on lucir", *["dde on podnet"] * 2, "dde on lucir"]
    assert find_method_title(plain[1]) == "DDE on PODNet" and format_remedy(plain[3]) == "Balanced"
    changes = [[*describe_changes({"run": run, "machine": {"device": "cpu"}})] for run in plain]
    assert changes == [[], [], ["4 λ c"], []]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dde --host bic", "dde does not wrap bic: take lucir or podnet"),
        ("dde --host nothing", "unknown method 'nothing'"),
        ("dde --host", "--host needs a value"),
        ("lucir --host podnet", "--host belongs to the method dde or mnemonics, not to the method lucir"),
        ("dde --lambda-c 3", "--lambda-c belongs to --host podnet, not to --host lucir"),
    ],
)
def test_what_cannot_be_a_host_is_refused(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_request(words.split(), "run", Request)


@pytest.mark.parametrize(
    ("host", "remedy", "who"),
    [
        (LUCIR(), LossRescaling(), "dde"),
        (LUCIR(), SeparatedSoftmax(), "dde"),
        (PODNet(), BalancedFinetuning(), "podnet"),
    ],
)
def test_a_remedy_must_go_with_both(host: Method, remedy: Remedy, who: str) -> None:
    with pytest.raises(UsageError, match=f"^{who} does not support the remedy {remedy.name} "):
        Learner(DDE(host=host.with_remedy(remedy)))
