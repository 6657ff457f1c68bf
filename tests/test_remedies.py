"""Remedies: each by its formula or its counts, in later steps only, what they keep, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from squares import images
from steps import Trained, make_step, note_trainings
from torch import Tensor

from equipoise import (
    LUCIR,
    NCM,
    Balanced,
    BalancedFinetuning,
    Batch,
    ClassOversampling,
    Finetune,
    ILBaseline,
    Learner,
    LossRescaling,
    MemoryOversampling,
    Meta,
    Method,
    Out,
    Plan,
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
from equipoise.cli import run_command
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.data.memory import EVERYTHING
from equipoise.data.randomness import generator
from equipoise.methods import KINDS, find_remedy
from equipoise.remedies import REMEDIES
from equipoise.runs.command import name_folder
from equipoise.runs.plan import Prepared, prepare
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run
from equipoise.settings import from_plain, no_flag, to_plain

OTHERS = (MemoryOversampling(), ClassOversampling(), LossRescaling(), BalancedFinetuning(), SeparatedSoftmax())
"""those without λ, which need images of old classes"""
OVERSAMPLING, HALVES = OTHERS[:2], (MemoryOversampling(), SeparatedSoftmax())
each_of_halves = pytest.mark.parametrize("remedy", HALVES, ids=lambda r: r.name)
N, N_OLD = [18, 20, 498, 500, 137], 2
Rows = list[list[float]]


def cross_entropy(z: list[float], y: int) -> float:
    return math.log(math.fsum(math.exp(v) for v in z)) - z[y]


def rescaled(z: Rows, y: list[int]) -> float:
    """Σ_i w_i ℓ_i / Σ_i w_i with w_i = 1 / n_{y_i}."""
    w = [1 / N[k] for k in y]
    return math.fsum(v * cross_entropy(row, k) for v, row, k in zip(w, z, y)) / math.fsum(w)


def separated(z: Rows, y: list[int]) -> float:
    """Old images among old classes, new ones among new classes; a mean over all of them."""
    old = [cross_entropy(row[:N_OLD], k) for row, k in zip(z, y) if k < N_OLD]
    new = [cross_entropy(row[N_OLD:], k - N_OLD) for row, k in zip(z, y) if k >= N_OLD]
    return math.fsum(old + new) / len(y)


def apart(z: Rows, y: list[int]) -> float:
    """The same, with a mean over old images and one over new ones, added; nothing for a kind that is not there."""
    kinds = [[i for i, k in enumerate(y) if (k < N_OLD) == old] for old in (True, False)]
    return math.fsum(separated([z[i] for i in kind], [y[i] for i in kind]) for kind in kinds if kind)


FORMULAS: dict[str, tuple[Remedy, Callable[[Rows, list[int]], float]]] = {
    "rescaled": (LossRescaling(), rescaled),
    "separated": (SeparatedSoftmax(mean="all"), separated),
    "apart": (SeparatedSoftmax(), apart),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(n: list[int], n_old: int) -> Step:
    """Labels in no order at all; images do not matter."""
    y = torch.tensor([k for k, count in enumerate(n) for _ in range(count)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))]
    sizes = (n_old, len(n) - n_old) if n_old else (len(n),)
    return make_step(sizes, Images(torch.empty(len(y), 1, 8, 8, dtype=torch.uint8), y))


STEPS = (range(3), range(3, 5))


def learner(method: Method, steps: int = 2, **settings: Any) -> Learner:
    made = Learner(method, 4, recipe=Recipe(epochs=2, lr=0.05, batch=16), device="cpu", **settings)
    for classes in STEPS[:steps]:
        made.learn(*images(classes))
    return made


# Losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("remedy", "formula"), FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("y", [[0, 1, 2, 3, 4, 3, 3], [2, 3, 4, 4], [1, 0, 1]], ids=["mixed", "new", "old"])
def test_the_loss_is_its_formula(remedy: Remedy, formula: Any, y: list[int]) -> None:
    z, s, method = 2 * noise(len(y), 5) - 40, step(N, N_OLD), ILBaseline(remedy)
    value = method.classify(z, torch.tensor(y), s)
    assert value.item() == pytest.approx(formula(z.tolist(), y), rel=1e-13)
    assert torch.autograd.gradcheck(lambda z: method.classify(z, torch.tensor(y), s), [z.requires_grad_()])


def test_a_separated_softmax_gives_exactly_no_gradient_to_the_other_kind() -> None:
    z, y = noise(6, 5).requires_grad_(), torch.tensor([0, 2, 1, 4, 3, 0])
    value = ILBaseline(SeparatedSoftmax()).classify(z, y, step(N, N_OLD))
    (gradient,) = torch.autograd.grad(value, z)
    for row, old in zip(gradient, (y < N_OLD).tolist()):
        assert ((row != 0) == torch.tensor([old, old, not old, not old, not old])).all()


@pytest.mark.parametrize(("remedy", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_the_rest_of_an_objective_is_as_it_was(remedy: Remedy, formula: Any) -> None:
    """IL-Baseline: ρ L_d + (1 − ρ) L_c with ρ = 2/5; LUCIR: all but L_c."""
    z, z_old, h, h_old, y = noise(6, 5), noise(6, 2, seed=1), noise(6, 3), noise(6, 3, seed=2), [0, 1, 2, 3, 4, 4]
    s, out, ref = step(N, N_OLD), Out(z, h, [], {"cos": z.tanh()}), Out(z_old, h_old, [], {})
    change = formula(z.tolist(), y) - math.fsum(cross_entropy(*pair) for pair in zip(z.tolist(), y)) / 6
    for method, factor in ((ILBaseline, 0.6), (LUCIR, 1.0)):
        both = method(), method(remedy)  # type: ignore[operator]
        plain, other = (m.objective(s, Batch(torch.tensor(y), out, ref)).item() for m in both)
        assert other - plain == pytest.approx(factor * change, rel=1e-10)


# Epochs -------------------------------------------------------------------------------------------------------


@each_of_halves
@pytest.mark.parametrize("n", [[3, 4, 30, 21], [2, 2, 7, 1], [40, 50, 9, 8], [4, 3, 4, 3]], ids=str)
def test_an_epoch_has_every_new_image_once_and_as_many_old_ones(remedy: Remedy, n: list[int]) -> None:
    s = step(n, 2)
    which = ILBaseline(remedy).epoch(s, generator(0), 16)
    new, old = n[2] + n[3], n[0] + n[1]
    times = torch.bincount(which, minlength=len(s.where))
    assert len(which) == 2 * new
    assert (times[s.y >= 2] == 1).all()
    assert set(times[s.y < 2].tolist()) <= {new // old, -(-new // old)}
    assert (s.images.y[which] < 2).sum() == new


@each_of_halves
@pytest.mark.parametrize(("share", "old"), [(0.2, 10), (0.5, 40), (0.8, 160), (0.01, 0)])
def test_old_images_are_the_share_of_an_epoch_that_is_asked_for(remedy: Any, share: float, old: int) -> None:
    """Beside 40 new images, of 12 old ones: fewer than there are, or each as often as the others."""
    s = step([5, 7, 22, 18], 2)
    method = ILBaseline(replace(remedy, share=share))
    times = torch.bincount(method.epoch(s, generator(0), 16), minlength=52)
    of_old = times[s.y < 2]
    assert of_old.sum() == old and set(of_old.tolist()) <= {old // 12, -(-old // 12)}
    assert (times[s.y >= 2] == 1).all()
    base = step([22, 18], 0)
    assert sorted(method.epoch(base, generator(0), 16).tolist()) == list(range(40)), "in the base step there are none"


@pytest.mark.parametrize("n", [[3, 4, 30, 21], [2, 2, 7, 1], [40, 50, 9, 8], [4, 4, 4, 4]], ids=str)
def test_an_epoch_has_as_many_images_of_each_class_as_the_largest_has(n: list[int]) -> None:
    s = step(n, 2)
    which = ILBaseline(ClassOversampling()).epoch(s, generator(0), 16)
    assert len(which) == 4 * max(n) and torch.bincount(s.images.y[which]).tolist() == [max(n)] * 4
    times = torch.bincount(which, minlength=len(s.where))
    for c, count in enumerate(n):
        assert set(times[s.y == c].tolist()) <= {max(n) // count, -(-max(n) // count)}


@pytest.mark.parametrize("remedy", [*OVERSAMPLING, SeparatedSoftmax()], ids=lambda r: r.name)
def test_an_epoch_depends_on_its_generator_alone_and_is_shuffled(remedy: Remedy) -> None:
    s, method = step([5, 6, 60, 70], 2), ILBaseline(remedy)
    first, same, other = (method.epoch(s, generator(seed), 16) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    extra = [Counter(which[s.images.y[which] < 2].tolist()) for which in (first, other)]
    assert extra[0] != extra[1], "which old images come once more is drawn too"
    old = (s.images.y[first] < 2).float()
    for part in old.chunk(4):
        assert part.mean().item() == pytest.approx(old.mean().item(), abs=0.2), "old images are everywhere"


def test_an_epoch_is_of_positions_in_all_images_whatever_is_held_out() -> None:
    """Indices of a remedy count the images that are trained on; a method's epoch names places among all pixels."""
    y = torch.tensor([0, 0, 0, 1, 1, 1, *[2] * 20])
    held = torch.tensor([0, 3, 6])
    s = make_step((2, 1), Images(torch.empty(26, 1, 8, 8, dtype=torch.uint8), y), held=held)
    for remedy in (Standard(), Meta(), *OVERSAMPLING):
        which = ILBaseline(remedy).epoch(s, generator(0), 16)
        assert set(which.tolist()) == set(range(26)) - {0, 3, 6}, remedy


SEEN: list[Tensor] = []


class Listening(ILBaseline):
    """Notes the labels that it is trained on."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        SEEN.append(b.y)
        return super().objective(s, b)


@pytest.mark.parametrize(
    ("remedy", "labels", "share"),
    [(MemoryOversampling(), 48, 1 / 2), (ClassOversampling(), 60, 3 / 5), (Standard(), 36, 1 / 3)],
    ids=["memory-oversampling", "class-oversampling", "standard"],
)
def test_training_goes_through_such_epochs(remedy: Remedy, labels: int, share: float) -> None:
    """Two epochs: 24 new images and 12 of the memory, with halves of 24, with five classes of 12, or as they are."""
    made = learner(Listening(remedy), 1)
    SEEN.clear()
    made.learn(*images(STEPS[1]))
    counts = torch.bincount(torch.cat(SEEN)).tolist()
    assert sum(counts) == pytest.approx(2 * labels, abs=8), "batches of 16, to the nearest"
    old = sum(counts[:3]) / sum(counts)
    assert old == pytest.approx(share, abs=0.1)


# What is held out, learned and trained besides ------------------------------------------------------------------

PLAN = Plan(1, (3, 2), (1, 8, 8), (10, 10, 10, 140, 140), 10, 10)


def test_only_meta_holds_out_and_learns_besides_the_net() -> None:
    for name, kind in REMEDIES.items():
        s = make_step((3, 2), n=PLAN.counts)
        kind().enter(s)
        learned = kind().adapt()
        assert kind().hold(PLAN) == (name == "meta") and s.state.keys() == ({"alpha"} if name == "meta" else set())
        assert (learned is not None) == (name == "meta")
        base = make_step((5,), n=[140] * 5)
        kind().enter(base)
        assert not base.state and kind().hold(replace(PLAN, t=0, sizes=(5,))) == 0, "not in the base step"
    learned = Meta(alpha_lr=3.0, every=7).adapt()
    assert learned == ("alpha", 3.0, 1e-3, 7, 128)


@pytest.mark.parametrize("remedy", OTHERS, ids=lambda r: r.name)
def test_without_lambda_it_is_one_for_every_class(remedy: Remedy) -> None:
    assert step(N, N_OLD).lam.tolist() == [1.0] * 5
    assert make_step((2, 3), n=N, remedy=remedy).lam.tolist() == [1.0] * 5


def test_a_loss_of_its_own_or_none() -> None:
    """Where there is none, and in the base step of what acts later only, a method's own loss stands."""
    z, y = noise(4, 5), torch.tensor([0, 4, 2, 1])
    for name, kind in REMEDIES.items():
        later, base = kind().ce(z, y, step(N, N_OLD)), kind().ce(z, y, step(N, 0))
        weighted = name in ("balanced", "relaxed", "meta")
        assert (later is not None) == (weighted or name in ("loss-rescaling", "separated-softmax")), name
        assert (base is not None) == weighted, name


KEEPING = ("standard", "memory-oversampling", "class-oversampling")


@pytest.mark.parametrize("name", REMEDIES)
def test_the_standard_loss_and_oversampling_keep_a_methods_own_fine_tuning(name: str) -> None:
    """The others have a loss or a fine-tuning of their own."""
    remedy, finetune = REMEDIES[name](), Finetune(7, what="all")
    method = LUCIR(remedy, finetune=finetune)
    stages = method.stages(PLAN)
    train, choose, *rest = stages
    assert isinstance(train, Stage) and (train.name, choose, train.images) == ("train", "choose", "all")
    assert train.remedy is None and train.recipe == method.recipe(PLAN) and train.groups == LUCIR.trained
    own = finetune.stage(train.recipe, Standard())
    assert remedy.keeps_finetuning == (name in KEEPING)
    if name == "balanced-finetuning":
        assert rest == [Finetune(distil=False).stage(train.recipe, Standard())]
    else:
        assert rest == ([own] if name in KEEPING else [])
    assert method.stages(replace(PLAN, t=0, sizes=(5,))) == stages[:2], "nothing follows the base step"
    assert method.stages(replace(PLAN, keep=0)) == stages[:2], "nor where there is no memory"


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    return note_trainings(monkeypatch)


@pytest.mark.parametrize("method", [ILBaseline, LUCIR])
def test_balanced_finetuning_trains_the_classifier_on_the_memory(method: Any, trainings: list[Trained]) -> None:
    made: Any = learner(method(BalancedFinetuning()))
    assert [one.stage.name for one in trainings] == ["train", "train", "refit"]
    last = trainings[-1]
    before, data, recipe = last.net, last.s.images[last.s.where], last.stage.recipe
    assert torch.bincount(data.y).tolist() == [4] * 5 and torch.equal(data.x, made.exemplars_.x)
    assert last.method == method() and last.s.teacher is None and last.s.lam.tolist() == [1.0] * 5
    assert recipe.epochs == 20 and [recipe.lr_at(k) for k in (0, 9, 10, 19)] == pytest.approx([1e-2] * 2 + [1e-3] * 2)
    rows = [net.head.weight if method is ILBaseline else net.head.rows() for net in (before, made.state_.net)]
    assert ((rows[1] - rows[0]).norm(dim=1) > 1e-5).all() and len(rows[1]) == 5
    for name, value in made.state_.net.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, before.state_dict()[name]), f"{name}, batch statistics included, is frozen"


@pytest.mark.parametrize("method", [PODNet, LUCIR])
def test_fine_tuning_goes_through_the_balanced_memory_whatever_training_went_through(
    method: Any, trainings: list[Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, epoch = [], method.epoch

    def spy(self: Method, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        which = epoch(self, s, gen, batch)
        orders.append(s.images.y[which])
        return which

    monkeypatch.setattr(method, "epoch", spy)
    learner(method(MemoryOversampling(), finetune=Finetune(3)))
    last = trainings[-1]
    assert last.stage.name == "refit" and torch.bincount(last.s.y).tolist() == [4] * 5
    assert torch.bincount(orders[-1]).tolist() == [4] * 5, "every image once, as the memory has them"


# In the base step, and what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ILBaseline, LUCIR, PODNet])
def test_nothing_acts_in_the_base_step_and_something_does_later(method: Any) -> None:
    """Not a bit differs after the base step, whose classes have unequal counts."""
    nets: dict[str, list[dict[str, Tensor]]] = {}
    for remedy in (Standard(), *(r for r in OTHERS if method.remedies is None or r.name in method.remedies)):
        made = Learner(method(remedy), 4, recipe=Recipe(epochs=1, lr=0.05, batch=16), device="cpu")
        nets[remedy.name] = []
        for classes in STEPS:
            x, y = images(classes)
            made.learn(x[5:], y[5:])
            nets[remedy.name].append(copy.deepcopy(made.state_.net).state_dict())
    plain = nets.pop("standard")
    assert len(nets) >= 2
    for kind, (base, later) in nets.items():
        assert all(torch.equal(base[k], plain[0][k]) for k in plain[0]), kind
        assert any(not torch.equal(later[k], plain[1][k]) for k in plain[1]), kind


REFUSED: list[tuple[Any, Remedy, Any, str]] = [
    *((ILBaseline, r, memory, f"{r.name} needs at least 1 image") for r in OTHERS for memory in (0, "total:0")),
    *((PODNet, r, 4, "podnet does not support .*its own loss.* or class-oversampling") for r in OTHERS[2:]),
    *((NCM, r, 4, "ncm does not support .*nothing is trained.* or meta") for r in OTHERS),
    *((method, Meta(), 1, "meta needs at least 2 image") for method in (ILBaseline, LUCIR, PODNet)),
    *((method, Relaxed(0), 4, "epsilon 0 leaves old classes out") for method in (ILBaseline, LUCIR, PODNet)),
]


@pytest.mark.parametrize(("method", "remedy", "memory", "says"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(method: Any, remedy: Remedy, memory: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Learner(method(remedy), memory)
    assert "\n" not in str(caught.value) and len(str(caught.value).split()) > 5


def test_an_unknown_remedy_is_refused_with_the_nearest_known() -> None:
    assert all(find_remedy(name) is kind for name, kind in REMEDIES.items())
    with pytest.raises(UsageError, match=r"unknown remedy 'oversampling': did you mean '.*-oversampling'"):
        find_remedy("oversampling")
    with pytest.raises(UsageError, match="must be a Remedy such as"):
        Learner(ILBaseline("balanced"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        ("lucir", "--remedy", "class-oversampling", "--memory", "0"),
        ("il-baseline", "--remedy", "separated-softmax", "--memory", "total:4"),
        ("podnet", "--remedy", "loss-rescaling"),
    ],
    ids=lambda words: "-".join(words),
)
@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_it_with_exit_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", *words, "--dataset", "digits", "--epochs", "1", "--out", "run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("equipoise: ") and "remedy " in said.err and said.err.count("\n") == 1


@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_an_unknown_remedy_and_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "il-baseline", "--remedy", "oversampling", "--dataset", "digits"]) == 2
    assert "memory-oversampling" in capsys.readouterr().err


# Records, keys and the time left --------------------------------------------------------------------------------


@pytest.mark.parametrize("remedy", [kind() for kind in REMEDIES.values()], ids=lambda r: r.name)
def test_a_remedy_is_recorded_whole_and_read_again(remedy: Remedy) -> None:
    plain = json.loads(json.dumps(to_plain(ILBaseline(remedy))))
    assert plain["remedy"]["name"] == remedy.name and plain["remedy"].keys() == {"name", *vars(remedy)}
    assert from_plain(Method, plain, KINDS) == ILBaseline(remedy)


@dataclass(frozen=True)
class Rooted(Balanced):
    """Another's remedy, without a name of its own."""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        return super().lam(n, past, s).sqrt()


def test_a_remedy_that_derives_from_another_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    method = ILBaseline(Rooted(0.5))
    assert Rooted.name == "rooted" and find_remedy("rooted") is Rooted and "rooted" not in REMEDIES
    assert from_plain(Method, json.loads(json.dumps(to_plain(method))), KINDS) == method
    usual, (base, *later) = prepared(method, base=6, steps=2).settings, prepared(method, base=6, steps=2).compute_keys()
    parent = prepared(ILBaseline(Balanced(0.5)), base=6, steps=2)
    assert usual != parent.settings and base is not None and not {base, *later} & set(parent.compute_keys())
    images = load("digits").train[torch.arange(30)]
    Learner(method, 2, recipe=Recipe(1, batch=16)).learn(images.x, images.y.tolist()).save(tmp_path)
    assert Learner.load(tmp_path).method == method


@pytest.mark.parametrize("kind", [Balanced, Rooted, Remedy])
def test_a_remedy_with_the_name_of_another_is_refused(kind: type[Remedy]) -> None:
    for name in {"balanced", "meta", kind.name} - {""}:
        with pytest.raises(UsageError, match=f"is named '{name}' like an existing remedy: give it another name"):
            type("Other", (kind,), {"name": name, "__module__": __name__})


def prepared(method: Method, **protocol: Any) -> Prepared:
    return prepare(Run(method, Data("digits"), Protocol(**protocol)), Machine("cpu"))


@pytest.mark.parametrize("method", [ILBaseline, LUCIR])
def test_settings_of_a_remedy_name_other_runs_with_the_same_base_step(method: Any) -> None:
    def keys(remedy: Remedy) -> tuple[str, list[str | None]]:
        one = prepared(method(remedy), base=6, steps=2)
        return name_folder(one.run), one.compute_keys()

    usual = keys(SeparatedSoftmax())
    for other in (SeparatedSoftmax(share=0.2), SeparatedSoftmax(mean="all"), MemoryOversampling()):
        name, (base, *later) = keys(other)
        assert name != usual[0] and base == usual[1][0] is not None and not set(later) & set(usual[1])
        assert method(other).at_base() == method().at_base()


@pytest.mark.usefixtures("isolated")
def test_settings_of_a_remedy_reach_the_record() -> None:
    remedy = "--remedy separated-softmax --share 0.2 --mean all"
    words = f"run il-baseline {remedy} --dataset digits --memory 4 --base 8 --steps 1 --epochs 1 --device cpu --out run"
    assert run_command(words.split()) == 0
    method = json.loads(Path("run/result.json").read_text())["run"]["method"]
    assert method["remedy"] == {"name": "separated-softmax", "share": 0.2, "mean": "all"}
    assert method["distil"] == "together", "defaults are there too"
    assert Learner.load("run/model").method == ILBaseline(SeparatedSoftmax(share=0.2, mean="all"))


def test_the_time_left_counts_the_share_of_old_images() -> None:
    plan = prepared(ILBaseline(MemoryOversampling(share=0.2)), base=5, steps=1, memory="8")
    new = int((plan.train.y >= 5).sum())
    assert [(one.stage, one.epochs, one.images) for one in plan.list_work()[1]] == [("train", 20, new + round(new / 4))]


COUNTED = (Standard(), MemoryOversampling(), ClassOversampling(), Meta(), BalancedFinetuning())


@pytest.mark.parametrize("remedy", COUNTED, ids=lambda r: r.name)
def test_the_time_left_counts_the_epochs_as_they_are(remedy: Remedy) -> None:
    """As many as a training goes through, found out from labels alone."""
    plan = prepared(ILBaseline(remedy), base=5, steps=1, memory="8")
    counts = torch.bincount(plan.train.y).tolist()
    base, new = sum(counts[:5]), sum(counts[5:])
    images = {"memory-oversampling": 2 * new, "class-oversampling": 10 * max(counts[5:]), "meta": new + 40 - 10}
    later = [("train", 20, images.get(remedy.name, new + 40))]
    later += [("refit", 20, 80)] if remedy.name == "balanced-finetuning" else []
    assert [[tuple(one) for one in step] for step in plan.list_work()] == [[("train", 20, base)], later]


def test_the_time_left_of_meta_where_everything_is_kept_knows_what_is_held_out() -> None:
    plan = prepared(ILBaseline(Meta()), base=5, steps=1, memory="all")
    assert plan.make_plans()[1].m == EVERYTHING
    counts = torch.bincount(plan.train.y).tolist()
    assert plan.list_work()[1][0].images == sum(counts) - 10 * (min(counts) // 10)


@dataclass(frozen=True)
class Odd(ILBaseline):
    """Somebody's own method, whose settings are no JSON."""

    words: frozenset[str] = no_flag(frozenset({"a"}))
    cuts: tuple[float, ...] = no_flag((0.5,))
    mine: int = field(default=3, kw_only=True, metadata={"flag": False})


def test_a_record_has_words_for_what_json_has_not(tmp_path: Path) -> None:
    one = Run(Odd(), Data("digits"), Protocol(base=8, steps=1, memory="2"), Recipe(epochs=1))
    found = run(one, tmp_path, Machine("cpu"))["run"]["method"]
    assert (found["words"], found["cuts"], found["mine"]) == ("frozenset({'a'})", [0.5], 3)
    assert found["remedy"] == {"name": "standard"} and run(one, tmp_path, Machine("cpu"))["run"]["method"] == found
