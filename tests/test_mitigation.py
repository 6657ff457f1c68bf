"""Other remedies than a loss: each by its formula or its counts, in later steps only, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from squares import images
from torch import Tensor

from equipoise import (
    Balanced,
    ILBaseline,
    Learner,
    Meta,
    Method,
    Out,
    Recipe,
    Relaxed,
    Step,
    UsageError,
    remedies,
    settings,
)
from equipoise.cli import command
from equipoise.data.images import Images
from equipoise.learner import record
from equipoise.learner import step as step_module
from equipoise.methods.lucir import LUCIR
from equipoise.methods.ncm import NCM
from equipoise.methods.podnet import PODNet
from equipoise.randomness import generator
from equipoise.remedies import MITIGATIONS
from equipoise.runs.run import Run, prepare, run, run_name

KINDS = ("memory-oversampling", "class-oversampling", "loss-rescaling", "balanced-finetuning", "separated-softmax")
OVERSAMPLING, HALVES = KINDS[:2], ("memory-oversampling", "separated-softmax")
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


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Rows, list[int]], float]]] = {
    "rescaled": ({"mitigation": "loss-rescaling"}, rescaled),
    "separated": ({"mitigation": "separated-softmax", "separated_mean": "all"}, separated),
    "apart": ({"mitigation": "separated-softmax"}, apart),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(n: list[int], n_old: int) -> Step:
    """Labels in no order at all; images do not matter."""
    y = torch.tensor([k for k, count in enumerate(n) for _ in range(count)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))]
    data = Images(torch.empty(len(y), 1, 8, 8, dtype=torch.uint8), y)
    counts, sizes = torch.tensor(n).float(), (n_old, len(n) - n_old) if n_old else (len(n),)
    return Step(len(sizes) - 1, n_old, sizes, counts, torch.ones(len(n)), data, None, None, None)  # type: ignore[arg-type]


STEPS = (range(3), range(3, 5))


def learner(method: Method, steps: int = 2, **settings: Any) -> Learner:
    made = Learner(method, 4, recipe=Recipe(epochs=2, lr=0.05, batch=16), device="cpu", **settings)
    for classes in STEPS[:steps]:
        made.learn(*images(classes))
    return made


# Losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "formula"), FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("y", [[0, 1, 2, 3, 4, 3, 3], [2, 3, 4, 4], [1, 0, 1]], ids=["mixed", "new", "old"])
def test_the_loss_is_its_formula(settings: Any, formula: Any, y: list[int]) -> None:
    z, s, method = 2 * noise(len(y), 5) - 40, step(N, N_OLD), ILBaseline(**settings)
    value = method.classify(z, torch.tensor(y), s)
    assert value.item() == pytest.approx(formula(z.tolist(), y), rel=1e-13)
    assert torch.autograd.gradcheck(lambda z: method.classify(z, torch.tensor(y), s), [z.requires_grad_()])


def test_a_separated_softmax_gives_exactly_no_gradient_to_the_other_kind() -> None:
    z, y = noise(6, 5).requires_grad_(), torch.tensor([0, 2, 1, 4, 3, 0])
    value = ILBaseline(mitigation="separated-softmax").classify(z, y, step(N, N_OLD))
    (gradient,) = torch.autograd.grad(value, z)
    for row, old in zip(gradient, (y < N_OLD).tolist()):
        assert ((row != 0) == torch.tensor([old, old, not old, not old, not old])).all()


@pytest.mark.parametrize(("settings", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_the_rest_of_an_objective_is_as_it_was(settings: Any, formula: Any) -> None:
    """IL-Baseline: ρ L_d + (1 − ρ) L_c with ρ = 2/5; LUCIR: all but L_c."""
    z, z_old, h, h_old, y = noise(6, 5), noise(6, 2, seed=1), noise(6, 3), noise(6, 3, seed=2), [0, 1, 2, 3, 4, 4]
    s, out, ref = step(N, N_OLD), Out(z, h, [], {"cos": z.tanh()}), Out(z_old, h_old, [], {})
    change = formula(z.tolist(), y) - math.fsum(cross_entropy(*pair) for pair in zip(z.tolist(), y)) / 6
    for method, factor in ((ILBaseline, 0.6), (LUCIR, 1.0)):
        plain, other = (m.objective(s, torch.tensor(y), out, ref).item() for m in (method(), method(**settings)))
        assert other - plain == pytest.approx(factor * change, rel=1e-10)


# Epochs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("n", [[3, 4, 30, 21], [2, 2, 7, 1], [40, 50, 9, 8], [4, 3, 4, 3]], ids=str)
def test_an_epoch_has_every_new_image_once_and_as_many_old_ones(kind: Any, n: list[int]) -> None:
    s = step(n, 2)
    which = ILBaseline(mitigation=kind).epoch(s, generator(0))
    new, old = n[2] + n[3], n[0] + n[1]
    times = torch.bincount(which, minlength=len(s.data))
    assert len(which) == 2 * new
    assert (times[s.data.y >= 2] == 1).all()
    assert set(times[s.data.y < 2].tolist()) <= {new // old, -(-new // old)}
    assert (s.data.y[which] < 2).sum() == new


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize(("share", "old"), [(0.2, 10), (0.5, 40), (0.8, 160), (0.01, 0)])
def test_old_images_are_the_share_of_an_epoch_that_is_asked_for(kind: Any, share: float, old: int) -> None:
    """Beside 40 new images, of 12 old ones: fewer than there are, or each as often as the others."""
    s = step([5, 7, 22, 18], 2)
    method = ILBaseline(mitigation=kind, old_share=share)
    times = torch.bincount(method.epoch(s, generator(0)), minlength=52)
    of_old = times[s.data.y < 2]
    assert of_old.sum() == old and set(of_old.tolist()) <= {old // 12, -(-old // 12)}
    assert (times[s.data.y >= 2] == 1).all()
    assert remedies.length(kind, [5, 7], [22, 18], share) == 40 + old
    assert remedies.length(kind, [], [22, 18], share) == 40, "in the base step there are none"


@pytest.mark.parametrize("n", [[3, 4, 30, 21], [2, 2, 7, 1], [40, 50, 9, 8], [4, 4, 4, 4]], ids=str)
def test_an_epoch_has_as_many_images_of_each_class_as_the_largest_has(n: list[int]) -> None:
    s = step(n, 2)
    which = ILBaseline(mitigation="class-oversampling").epoch(s, generator(0))
    assert len(which) == 4 * max(n) and torch.bincount(s.data.y[which]).tolist() == [max(n)] * 4
    times = torch.bincount(which, minlength=len(s.data))
    for c, count in enumerate(n):
        assert set(times[s.data.y == c].tolist()) <= {max(n) // count, -(-max(n) // count)}


@pytest.mark.parametrize("kind", [*OVERSAMPLING, "separated-softmax"])
def test_an_epoch_depends_on_its_generator_alone_and_is_shuffled(kind: Any) -> None:
    s, method = step([5, 6, 60, 70], 2), ILBaseline(mitigation=kind)
    first, same, other = (method.epoch(s, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    extra = [Counter(which[s.data.y[which] < 2].tolist()) for which in (first, other)]
    assert extra[0] != extra[1], "which old images come once more is drawn too"
    old = (s.data.y[first] < 2).float()
    for part in old.chunk(4):
        assert part.mean().item() == pytest.approx(old.mean().item(), abs=0.2), "old images are everywhere"


SEEN: list[Tensor] = []


class Listening(ILBaseline):
    """Notes the labels that it is trained on."""

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        SEEN.append(y)
        return super().objective(s, y, out, ref)


@pytest.mark.parametrize(("kind", "labels"), [("memory-oversampling", 48), ("class-oversampling", 60), ("none", 36)])
def test_training_goes_through_such_epochs(kind: Any, labels: int) -> None:
    """Two epochs: 24 new images and 12 of the memory, with halves of 24, with five classes of 12, or as they are."""
    made = learner(Listening(mitigation=kind), 1)
    SEEN.clear()
    made.learn(*images(STEPS[1]))
    counts = torch.bincount(torch.cat(SEEN)).tolist()
    assert sum(counts) == pytest.approx(2 * labels, abs=8), "batches of 16, to the nearest"
    old = sum(counts[:3]) / sum(counts)
    assert old == pytest.approx(
        {"memory-oversampling": 1 / 2, "class-oversampling": 3 / 5, "none": 1 / 3}[kind], abs=0.1
    )


# The refit ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Step, Recipe]]:
    """Each training: its name, the net before it, its step and its recipe."""
    found, fit = [], step_module.fit

    def spy(method: Any, s: Step, recipe: Recipe, *args: Any, **more: Any) -> Any:
        found.append((more.get("stage", "train"), copy.deepcopy(s.net), s, recipe))
        return fit(method, s, recipe, *args, **more)

    monkeypatch.setattr(step_module, "fit", spy)
    return found


@pytest.mark.parametrize("method", [ILBaseline, LUCIR])
def test_balanced_finetuning_trains_the_classifier_on_the_memory(method: type[Method], trainings: list[Any]) -> None:
    made: Any = learner(method(mitigation="balanced-finetuning"))
    assert [name for name, *_ in trainings] == ["train", "train", "refit"]
    _, before, s, recipe = trainings[-1]
    assert torch.bincount(s.data.y).tolist() == [4] * 5 and torch.equal(s.data.x, made.exemplars_.x)
    assert recipe.epochs == 20 and [recipe.lr_at(k) for k in (0, 9, 10, 19)] == pytest.approx([1e-2] * 2 + [1e-3] * 2)
    rows = [net.head.weight if method is ILBaseline else net.head.rows() for net in (before, made.state_.net)]
    assert ((rows[1] - rows[0]).norm(dim=1) > 1e-5).all() and len(rows[1]) == 5
    for name, value in made.state_.net.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, before.state_dict()[name]), f"{name}, batch statistics included, rests"


@pytest.mark.parametrize("method", [PODNet, LUCIR])
def test_a_refit_goes_through_the_balanced_memory_whatever_training_went_through(
    method: Any, trainings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, epoch = [], method.epoch

    def spy(self: Method, s: Step, gen: torch.Generator) -> Tensor:
        orders.append(epoch(self, s, gen))
        return orders[-1]

    monkeypatch.setattr(method, "epoch", spy)
    learner(method(mitigation="memory-oversampling", finetune=True))
    name, _, s, _ = trainings[-1]
    assert name == "refit" and torch.bincount(s.data.y).tolist() == [4] * 5
    assert torch.bincount(s.data.y[orders[-1]]).tolist() == [4] * 5, "every image once, as the memory has them"


# In the base step, and what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ILBaseline, LUCIR, PODNet])
def test_nothing_acts_in_the_base_step_and_something_does_later(method: Any) -> None:
    """Not a bit differs after the base step, whose classes have unequal counts."""
    nets: dict[str, list[dict[str, Tensor]]] = {}
    for kind in ("none", *(k for k in KINDS if k in method.mitigations)):
        made = Learner(method(mitigation=kind), 4, recipe=Recipe(epochs=1, lr=0.05, batch=16), device="cpu")
        nets[kind] = []
        for classes in STEPS:
            x, y = images(classes)
            made.learn(x[5:], y[5:])
            nets[kind].append(copy.deepcopy(made.state_.net).state_dict())
    plain = nets.pop("none")
    assert len(nets) >= 2
    for kind, (base, later) in nets.items():
        assert all(torch.equal(base[k], plain[0][k]) for k in plain[0]), kind
        assert any(not torch.equal(later[k], plain[1][k]) for k in plain[1]), kind


REFUSED: list[tuple[Any, dict[str, Any], Any, str]] = [
    *((ILBaseline, {"mitigation": k, "loss": Balanced()}, 4, "balanced loss") for k in KINDS),
    *((LUCIR, {"mitigation": k, "loss": loss}, 4, "loss") for k in KINDS[:2] for loss in (Relaxed(), Meta())),
    *((ILBaseline, {"mitigation": k}, memory, "memory above 0") for k in KINDS for memory in (0, "total:0")),
    *((PODNet, {"mitigation": k}, 4, "podnet, which takes .* or class-oversampling: its own loss") for k in KINDS[2:]),
    *((NCM, {"mitigation": k}, 4, "ncm, which takes none: nothing is trained") for k in KINDS),
    *((m, {"mitigation": "oversampling"}, 4, "memory-oversampling") for m in (ILBaseline, LUCIR, PODNet)),
    *((ILBaseline, {"mitigation": k, "old_share": 0.2}, 4, "old-share goes with") for k in ("none", *KINDS[1:4])),
    *((ILBaseline, {"mitigation": k, "separated_mean": "all"}, 4, "goes with .* separated-softmax") for k in KINDS[:4]),
]


@pytest.mark.parametrize(("method", "settings", "memory", "says"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(method: Any, settings: Any, memory: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Learner(method(**settings), memory)
    said = str(caught.value)
    assert "\n" not in said and settings["mitigation"] in said and len(said.split()) > 5
    assert set(MITIGATIONS) == {"none", *KINDS}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        *(({"old_share": v}, "old-share must be .* above 0 and at most 0.99") for v in (0.0, 1.0, -0.5, math.nan)),
        ({"separated_mean": "both"}, "'each' or 'all'"),
    ],
    ids=str,
)
def test_settings_of_a_remedy_that_cannot_be_are_refused(setting: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Learner(ILBaseline(mitigation="separated-softmax", **setting), 4)


@pytest.mark.parametrize(
    "words",
    [
        ("il-baseline", "--mitigation", "loss-rescaling", "--loss", "balanced"),
        ("lucir", "--mitigation", "class-oversampling", "--memory", "0"),
        ("il-baseline", "--mitigation", "separated-softmax", "--memory", "total:4"),
        ("podnet", "--mitigation", "loss-rescaling"),
    ],
    ids=lambda words: "-".join(words),
)
@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_it_with_exit_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", *words, "--dataset", "digits", "--epochs", "1", "--out", "run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("equipoise: mitigation ") and said.err.count("\n") == 1


@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_an_unknown_remedy_and_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "il-baseline", "--mitigation", "oversampling", "--dataset", "digits"]) == 2
    assert "memory-oversampling" in capsys.readouterr().err


@pytest.mark.parametrize("method", [ILBaseline, LUCIR])
def test_settings_of_a_remedy_name_other_runs_with_the_same_base_step(method: Any) -> None:
    """And the defaults name none, so that older records are found again, but for the mean, which was another before."""

    def keys(**settings: Any) -> tuple[str, list[str]]:
        asked = Run(method(mitigation="separated-softmax", **settings), "digits", base=6, steps=2, device="cpu")
        return run_name(asked), prepare(asked).keys()

    usual = keys()
    assert keys(old_share=0.5, separated_mean="each") == usual
    for more in ({"old_share": 0.2}, {"separated_mean": "all"}):
        name, (_, *later) = keys(**more)
        assert name != usual[0] and not set(later) & set(usual[1])
        assert method(mitigation="separated-softmax", **more).at_base() == method().at_base()
    plain = record.describe(method(mitigation="separated-softmax"))
    assert "old_share" not in plain and plain.pop("separated_mean") == "each"
    assert record.method_from(plain) == method(mitigation="separated-softmax", separated_mean="all"), "as it was before"
    assert "separated_mean" not in record.describe(method(mitigation="memory-oversampling"))


@pytest.mark.usefixtures("isolated")
def test_an_older_folder_of_a_separated_softmax_had_one_mean(capsys: pytest.CaptureFixture[str]) -> None:
    words = "run il-baseline --mitigation separated-softmax --dataset digits --memory 4 --base 8 --steps 1 --epochs 1"
    again = [*words.split(), "--device", "cpu", "--out", "run"]
    assert command([*again, "--separated-mean", "all"]) == 0
    for name in ("run.json", "result.json"):
        path = Path("run") / name
        found = json.loads(path.read_text())
        del found.get("run", found)["separated_mean"]
        path.write_text(json.dumps(found))
    assert command([*again, "--separated-mean", "all"]) == 0, "what it was"
    capsys.readouterr()
    assert command(again) == 1
    assert "other settings: separated_mean (there all, here each);" in capsys.readouterr().err
    assert command([*again, "--separated-mean", "all", "--weights", "ones"]) == 1
    assert "other settings: weights (there rho, here ones);" in capsys.readouterr().err


@pytest.mark.usefixtures("isolated")
def test_settings_of_a_remedy_reach_the_record() -> None:
    remedy = "--mitigation separated-softmax --old-share 0.2 --separated-mean all"
    words = f"run il-baseline {remedy} --dataset digits --memory 4 --base 8 --steps 1 --epochs 1 --device cpu --out run"
    assert command(words.split()) == 0
    result = json.loads(Path("run/result.json").read_text())
    for found in (result["run"], result["in_full"]["method"]):
        assert found["old_share"] == 0.2 and found["separated_mean"] == "all"
    assert result["in_full"]["method"]["distil"] == "together" and "distil" not in result["run"], "a default"
    assert result["in_full"]["recipe"]["last"] == "joined" and result["in_full"]["augment"]["brightness"] == 0
    asked = ILBaseline(mitigation="separated-softmax", old_share=0.2, separated_mean="all")
    assert Learner.load("run/model").method == asked


def test_the_time_left_counts_the_share_of_old_images() -> None:
    method = ILBaseline(mitigation="memory-oversampling", old_share=0.2)
    plan = prepare(Run(method, "digits", base=5, steps=1, memory="8", device="cpu"))
    new = int((plan.train.y >= 5).sum())
    assert plan.images_to_train()[1] == 20 * (new + round(new / 4))


@pytest.mark.parametrize("kind", ["none", "memory-oversampling", "class-oversampling"])
def test_the_time_left_counts_the_epochs_as_they_are(kind: Any) -> None:
    plan = prepare(Run(ILBaseline(mitigation=kind), "digits", base=5, steps=1, memory="8", device="cpu"))
    counts = torch.bincount(plan.train.y).tolist()
    new = sum(counts[5:])
    expected = {"none": new + 40, "memory-oversampling": 2 * new, "class-oversampling": 10 * max(counts[5:])}[kind]
    assert plan.images_to_train() == [20 * sum(counts[:5]), 20 * expected]


@dataclass(frozen=True)
class Odd(ILBaseline):
    """Somebody's own method, whose settings are no JSON."""

    words: frozenset[str] = settings.later(frozenset({"a"}))
    cuts: tuple[float, ...] = settings.later((0.5,))
    mine: int = field(default=3, kw_only=True, metadata={"later": True})


def test_a_record_has_words_for_what_json_has_not(tmp_path: Path) -> None:
    asked = Run(Odd(), "digits", base=8, steps=1, memory="2", recipe=Recipe(epochs=1), device="cpu")
    found = run(asked, tmp_path)["in_full"]["method"]
    assert (found["words"], found["cuts"], found["mine"]) == ("frozenset({'a'})", [0.5], 3)
    assert found["loss"] == {"name": "standard"} and run(asked, tmp_path)["run"]["mine"] == 3
