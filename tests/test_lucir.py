"""LUCIR: its equations with loops in float64, how rows begin, what learns and what is frozen, and fine-tuning."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from squares import images
from steps import Trained, make_step, note_trainings
from torch import Tensor
from torch.func import functional_call

from equipoise import (
    LUCIR,
    Balanced,
    BalancedFinetuning,
    Batch,
    Crop,
    Finetune,
    Learner,
    Meta,
    Out,
    Plan,
    Recipe,
    Relaxed,
    Remedy,
    Stage,
    Standard,
    Step,
    UsageError,
)
from equipoise.data.randomness import generator
from equipoise.engine.sgd import select_weights
from equipoise.losses import margin_ranking
from equipoise.nets import Net
from equipoise.nets.backbones import SmallNet
from equipoise.nets.heads import CosineHead
from equipoise.step import plan_for

Numbers = list[float]
Rows = list[Numbers]
TUNED = LUCIR(finetune=Finetune(weight_decay=5e-4))


def cosine(a: Numbers, b: Numbers) -> float:
    dot, aa, bb = (math.fsum(x * y for x, y in zip(*pair)) for pair in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(aa * bb)


def cross_entropy(z: Rows, y: list[int], lam: Numbers) -> float:
    totals = [math.fsum(w * math.exp(v) for w, v in zip(lam, row)) for row in z]
    return math.fsum(math.log(total / lam[k]) - row[k] for row, k, total in zip(z, y, totals)) / len(y)


def ranking(cos: Rows, y: list[int], n_old: int, K: int, m: float) -> float:
    terms = []
    for row, own in zip(cos, y):
        if own < n_old:
            terms += [max(0.0, m - row[own] + rival) for rival in sorted(row[n_old:], reverse=True)[:K]]
    return math.fsum(terms) / len(terms) if terms else 0.0


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(remedy: Remedy, n: Numbers, sizes: tuple[int, ...]) -> Step:
    return make_step(sizes, remedy=remedy, n=n, dtype=torch.float64)


def cosine_head(*sizes: int, width: int = 6) -> CosineHead:
    """A head that grew in steps of these sizes, with rows of many lengths and a scale of 1.7."""
    head = CosineHead(width)
    for t, new in enumerate(sizes):
        head.widen(new, generator(t))
    head.double()
    with torch.no_grad():
        head.new.mul_(torch.arange(1.0, 1 + len(head.new))[:, None])
        head.scale.fill_(1.7)
    return head


FAST = Recipe(epochs=2, lr=0.05, batch=16, weight_decay=0.05)


def learner(method: LUCIR, steps: int, recipe: Recipe = FAST, memory: int = 4, **settings: Any) -> Learner:
    """After a base step of three classes and steps of two."""
    made = Learner(method, memory, recipe=recipe, device="cpu", **settings)
    for classes in (range(3), range(3, 5), range(5, 7))[:steps]:
        made.learn(*images(classes))
    return made


def net_of(made: Learner) -> Any:
    return copy.deepcopy(made.state_.net)


def begun(made: Learner, x: Tensor, y: list[int]) -> Any:
    """The head as the next step begins with it."""
    _, live = made._open(x, y)
    return live.net.head


def test_logits_are_cosines_times_a_scale() -> None:
    head, h = cosine_head(3, 2, 2), 5 * noise(4, 6)
    z, extra = head(h, [])
    rows = [*head.old.tolist(), *head.new.tolist()]
    assert len(head.old) == 5 and len(rows) == 7
    expected = torch.tensor([[cosine(one, row) for row in rows] for one in h.tolist()], dtype=torch.float64)
    torch.testing.assert_close(extra["cos"], expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(z, 1.7 * expected, rtol=1e-13, atol=1e-15)


def test_new_rows_and_the_scale_have_gradients_and_old_rows_are_frozen() -> None:
    """Old rows are parameters, so that fine-tuning may train them, but in no group of a step's training."""
    head = cosine_head(3, 2)
    assert {name for name, _ in head.named_parameters()} == {"old", "new", "scale"} == set(head.state_dict())
    s = make_step((3, 2), net=Net(SmallNet(1), head, torch.zeros(1), torch.ones(1)))
    (group,) = select_weights(s, Stage("train", Recipe(), LUCIR.trained))
    assert {name for name in group.weights if name.startswith("head.")} == {"head.new", "head.scale"}
    assert not head.old.requires_grad and all(w.requires_grad for w in group.weights.values())
    assert {f"backbone.{name}" for name, _ in SmallNet(1).named_parameters()} < group.weights.keys()
    z, extra = head(noise(4, 6), [])
    z[:, :3].sum().backward()
    assert head.scale.grad.item() == pytest.approx(math.fsum(extra["cos"][:, :3].flatten().tolist()), rel=1e-12)
    assert (head.new.grad == 0).all(), "a new row is no part of an old logit"


def test_a_fresh_head_has_scale_1_and_rows_within_one_over_the_root_of_the_width() -> None:
    head = CosineHead(25)
    head.widen(400, generator(0))
    assert head.scale == 1 and 0.195 < head.new.max() <= 0.2 and -0.2 <= head.new.min() < -0.195
    assert head.new.std().item() == pytest.approx(0.2 / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("K", [1, 2, 3, 9])
@pytest.mark.parametrize(("n_old", "classes"), [(4, 5), (3, 5), (4, 9), (1, 5)])
def test_margin_ranking_is_a_mean_over_old_images_and_their_rivals(n_old: int, classes: int, K: int) -> None:
    cos, y = noise(8, classes).tanh(), torch.tensor([0, 4, 0, n_old - 1, n_old, 0, n_old - 1, n_old])
    value = margin_ranking(cos, y, n_old, K, 0.5)
    expected = ranking(cos.tolist(), y.tolist(), n_old, K, 0.5)
    assert expected > 0 and value.item() == pytest.approx(expected, rel=1e-13)
    assert torch.autograd.gradcheck(lambda c: margin_ranking(c, y, n_old, K, 0.5), [cos.requires_grad_()])


@pytest.mark.parametrize("y", [[0, 3, 1, 4, 3, 2], [3, 4, 3, 4, 3, 3]], ids=["some-old", "no-old"])
def test_images_of_new_classes_are_not_ranked_and_a_batch_of_them_gives_exactly_0(y: list[int]) -> None:
    cos, old = noise(6, 5).tanh().requires_grad_(), torch.tensor(y) < 3
    value = margin_ranking(cos, torch.tensor(y), 3, 2, m=2.0)
    (gradient,) = torch.autograd.grad(value, cos)
    assert (value > 0) if old.any() else (value == 0)
    assert (gradient[~old] == 0).all() and (gradient[old] != 0).any(1).all()


LATER = [((5, 2), [0, 1, 5, 6, 4, 5]), ((3, 2, 1), [0, 5, 3, 4, 5, 5]), ((4, 3), [4, 5, 6, 6, 5, 4])]


@pytest.mark.parametrize(("sizes", "y"), LATER, ids=["two-new", "one-new", "no-old-images"])
@pytest.mark.parametrize("ratio", ["code", "paper"])
@pytest.mark.parametrize("remedy", [Standard(), Balanced(0.5), Relaxed("0.2%")], ids=lambda r: r.name)
def test_the_objective_adds_less_forget_and_ranking(
    remedy: Remedy, ratio: Any, sizes: tuple[int, ...], y: list[int]
) -> None:
    n_old, classes, method = sum(sizes[:-1]), sum(sizes), LUCIR(remedy, lambda_base=4.0, m=0.6, ratio=ratio)
    n = [20.0 + k for k in range(n_old)] + [500.0 - 7 * k for k in range(sizes[-1])]
    head, h, h_old, s = cosine_head(*sizes), noise(6, 6), noise(6, 6, seed=1), step(remedy, n, sizes)

    def whole(h: Tensor, new: Tensor, sigma: Tensor) -> Tensor:
        z, extra = functional_call(head, {"new": new, "scale": sigma}, (h, []))
        return method.objective(s, Batch(torch.tensor(y), Out(z, h, [], extra), Out(z[:, :n_old], h_old, [], {})))

    weights = {Standard: [1.0] * classes, Balanced: [0.5 * k for k in n[:n_old]] + n[n_old:]}
    lam = weights.get(type(remedy), [1.0] * n_old + n[n_old:])  # 0.2 % of 500 is 1
    rows = [*head.old.tolist(), *head.new.tolist()]
    cos = [[cosine(one, row) for row in rows] for one in h.tolist()]
    far = math.fsum(1 - cosine(a, b) for a, b in zip(h.tolist(), h_old.tolist())) / 6
    expected = cross_entropy([[1.7 * c for c in row] for row in cos], y, lam)
    root = math.sqrt(n_old / sizes[-1] if ratio == "code" else sizes[-1] / n_old)
    expected += 4.0 * root * far + ranking(cos, y, n_old, 2, 0.6)
    inputs = [x.detach().requires_grad_() for x in (h, head.new, head.scale)]
    assert whole(*inputs).item() == pytest.approx(expected, rel=1e-13)
    assert torch.autograd.gradcheck(whole, inputs)


@pytest.mark.parametrize("remedy", [Standard(), Balanced(0.5), Relaxed()], ids=lambda r: r.name)
def test_the_base_step_is_the_classification_loss_alone(remedy: Remedy) -> None:
    n, y, (z, extra) = [3.0, 5.0, 7.0, 11.0], [0, 1, 2, 3, 3], cosine_head(4)(noise(5, 6), [])
    value = LUCIR(remedy).objective(step(remedy, n, (4,)), Batch(torch.tensor(y), Out(z, noise(5, 6), [], extra)))
    lam = [1.0] * 4 if remedy == Standard() else n
    assert value.item() == pytest.approx(cross_entropy(z.tolist(), y, lam), rel=1e-13)


def test_new_rows_begin_at_the_mean_direction_and_as_long_as_old_rows() -> None:
    """By the previous net in eval mode, of images that are not augmented, whatever the training does with them."""
    made = learner(LUCIR(), 2, augment=Crop(pad=3, flip=True))
    x, y = images(range(5, 8))
    before = net_of(made)
    with torch.no_grad():
        h = before.eval()(x).h.double().tolist()
    made.state_.net.train()  # type: ignore[union-attr]
    head, rows = begun(made, x, y), before.head.rows()
    assert torch.equal(head.old, rows) and len(rows) == 5
    length = math.fsum(math.sqrt(math.fsum(v * v for v in row)) for row in rows.tolist()) / 5
    for k, row in enumerate(head.new.tolist()):
        own = [[v / math.sqrt(math.fsum(u * u for u in one)) for v in one] for one, c in zip(h, y) if c == 5 + k]
        mean = [math.fsum(column) / len(own) for column in zip(*own)]
        norm = math.sqrt(math.fsum(v * v for v in mean))
        assert norm < 0.999, "or the mean would be as long as its direction"
        assert row == pytest.approx([v / norm * length for v in mean], rel=1e-4, abs=1e-6)
    for name, value in net_of(made).state_dict().items():
        assert torch.equal(value, before.state_dict()[name]), name


def test_without_imprinting_new_rows_are_drawn() -> None:
    rows = begun(learner(LUCIR(imprint=False), 1), *images(range(3, 5))).new
    assert torch.equal(rows, torch.empty(2, 64).uniform_(-1 / 8, 1 / 8, generator=generator(0, 1, "rows")))


def test_old_rows_do_not_move_in_training_while_new_rows_and_the_scale_do() -> None:
    made, (x, y) = learner(LUCIR(), 1), images(range(3, 5))
    before, first = net_of(made).head, begun(made, x, y)
    after = net_of(made.learn(x, y)).head
    assert torch.equal(after.old, before.new) and len(after.new) == 2
    assert ((after.new - first.new).norm(dim=1) > 1e-3).all() and after.scale != before.scale


class Idle(LUCIR):
    """Nothing but weight decay."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        return 0 * b.out.z.sum()


def test_weight_decay_shrinks_new_rows_and_the_scale_but_not_old_rows() -> None:
    """One step of SGD: θ ← θ − lr · wd · θ = 0.75 θ."""
    made = learner(Idle(), 1, Recipe(epochs=1, lr=0.5, batch=128, weight_decay=0.5, momentum=0.0))
    first = begun(made, *images(range(3, 5)))
    after = net_of(made.learn(*images(range(3, 5)))).head
    assert first.scale.item() == 0.75 and after.scale.item() == 0.75**2 and torch.equal(after.old, first.old)
    torch.testing.assert_close(after.new, 0.75 * first.new.detach(), rtol=1e-6, atol=0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    return note_trainings(monkeypatch)


@pytest.mark.parametrize("epochs", [2, 0])
def test_it_fine_tunes_only_if_asked_and_after_the_base_step(epochs: int, seen: list[Trained]) -> None:
    learner(LUCIR(finetune=Finetune(epochs)), 3, Recipe(epochs=1, batch=32), 4)
    later = ["train", "refit"] if epochs else ["train"]
    assert [(one.t, one.stage.name) for one in seen] == [(0, "train"), *((t, k) for t in (1, 2) for k in later)]
    assert {one.stage.recipe.epochs for one in seen if one.stage.name == "refit"} == ({2} if epochs else set())


@pytest.mark.parametrize(
    ("remedy", "memory"), [(Balanced(), 4), (Relaxed(), 4), (Meta(), 4), (BalancedFinetuning(), 4), (Standard(), 0)]
)
def test_fine_tuning_that_would_not_be_done_is_refused(remedy: Remedy, memory: int) -> None:
    with pytest.raises(UsageError, match=r"^fine-tuning has no effect here: .*memory above 0$"):
        Learner(LUCIR(remedy, finetune=Finetune(20)), memory)
    Learner(LUCIR(remedy), memory)


def test_fine_tuning_moves_all_rows_and_nothing_else(seen: list[Trained]) -> None:
    made = learner(TUNED, 2)
    _, stage, s, before, *_ = seen[-1]
    after, data = net_of(made), s.images[s.where]
    assert stage.name == "refit" and torch.bincount(data.y).tolist() == [4] * 5
    assert torch.equal(data.x, made.exemplars_.x)
    rows = [net.head.rows() for net in (before, after)]
    assert rows[1].shape == (5, 64) and ((rows[1] - rows[0]).norm(dim=1) > 1e-4).all()
    assert torch.equal(after.head.scale, before.head.scale)
    assert len(before.backbone.state_dict()) > len(list(before.backbone.parameters())), "running statistics too"
    for key, value in after.backbone.state_dict().items():
        assert torch.equal(value, before.backbone.state_dict()[key]), key
    made.learn(*images(range(5, 7)))
    train = seen[-2]
    assert (train.t, train.stage.name) == (2, "train"), "where the next step begins"
    assert torch.equal(train.net.head.old, rows[1])


def test_the_recipes_are_those_of_the_original() -> None:
    recipe = LUCIR().recipe(plan_for((3, 32, 32)))
    assert (recipe.epochs, recipe.batch, recipe.momentum, recipe.weight_decay, recipe.clamp) == (160, 128, 0.9, 5e-4, 0)
    assert [recipe.lr_at(k) for k in (0, 79, 80, 119, 120, 159)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
    plan = Plan(1, (50, 10), (3, 32, 32), (20,) * 50 + (500,) * 10, 20, 20)
    assert [one if isinstance(one, str) else one.name for one in LUCIR().stages(plan)] == ["train", "choose"]
    refit = TUNED.stages(plan)[-1]
    assert isinstance(refit, Stage) and refit.batch_norm == "eval" and refit.teacher == "previous"
    again = refit.recipe
    assert (again.epochs, again.batch, again.momentum, again.weight_decay) == (20, 128, 0.9, 5e-4)
    assert [again.lr_at(k) for k in (0, 9, 10, 19)] == pytest.approx([0.01, 0.01, 1e-3, 1e-3])
    method = LUCIR()
    assert (method.lambda_base, method.K, method.m, method.imprint) == (5.0, 2, 0.5, True)
    assert TUNED.finetune == Finetune(20, 0.01, 128, 5e-4) and method.finetune == Finetune(0, weight_decay=5e-4)


def test_the_last_relu_is_absent() -> None:
    net = LUCIR().backbone((3, 32, 32)).eval()
    x, kept = noise(2, 3, 32, 32).float(), []
    block = net.stages[-1][-1]  # type: ignore[index]
    block.register_forward_hook(lambda module, given, _: kept.append(given[0]))
    h, maps = net(x)
    y = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(kept[0])))))
    torch.testing.assert_close(maps[-1], y + kept[0])
    assert (maps[-1] < 0).any() and all((m >= 0).all() for m in maps[:-1])
    torch.testing.assert_close(h, maps[-1].mean((2, 3)))


@pytest.mark.parametrize(
    "bad", [{"lambda_base": -1}, {"K": 0}, {"K": 1.5}, {"m": -0.1}, {"m": math.nan}, {"ratio": "other"}]
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        LUCIR(**bad)


def test_a_scale_that_turns_predictions_round_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = learner(LUCIR(), 1)
    assert "scale" not in caplog.text

    def turn(learner: Learner) -> None:
        assert learner._live is not None and learner._live.state.net is not None
        learner._live.state.net.head.scale.data.fill_(-0.1)  # type: ignore[union-attr]

    made.learn(*images(range(3, 5)), turn)
    assert "the scale of the head is -0.1 after step 1" in caplog.text
