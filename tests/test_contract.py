"""The contract: what every method owes its user, with every remedy and every kind of memory."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from equipoise import (
    Balanced,
    BalancedFinetuning,
    ClassOversampling,
    Crop,
    Finetune,
    Learner,
    LossRescaling,
    MemoryOversampling,
    Meta,
    Method,
    Recipe,
    Relaxed,
    Remedy,
    SeparatedSoftmax,
    Stage,
    Standard,
    UsageError,
    methods,
)
from equipoise.data import datasets
from equipoise.methods.around import Around
from equipoise.remedies import REMEDIES
from equipoise.step import Plan

METHODS = methods.find_built_in()
SHORT = Finetune(epochs=2, batch=16)
KINDS: dict[str, Remedy] = {
    "standard": Standard(),
    "balanced": Balanced(alpha=0.5),
    "relaxed": Relaxed(),
    "relaxed-0": Relaxed(0),
    "meta": Meta(every=2),
    "meta-all": Meta(every=3, hold_out=0.5, count="all"),
    "memory-oversampling": MemoryOversampling(share=0.3),
    "class-oversampling": ClassOversampling(),
    "loss-rescaling": LossRescaling(),
    "balanced-finetuning": BalancedFinetuning(SHORT),
    "separated-softmax": SeparatedSoftmax(),
}
MEMORIES: dict[str, dict[str, Any]] = {
    "per-class": {"memory": 4},
    "budget": {"memory": "total:21", "select": "random"},
    "none": {"memory": 0},
    "all": {"memory": "all"},
}
SLOW = {"geodl", "spb-i", "spb-m", "tpcil"}
"""methods that take long, in fewer of the tests"""
STEPS = ((7, 2, 5), (0, 9), (4,))  # the last one brings a single class
RECIPE = Recipe(epochs=3, lr=0.1, batch=16)
ONCE = replace(RECIPE, epochs=1)

EACH = {c: 56 if c in STEPS[0] else 24 for c in range(10)}
"""images of every class to learn from; of the first ones so many that they are told apart"""
FEW = dict.fromkeys(EACH, 10)
"""the same, where many cells are gone through"""

DIGITS = datasets.load("digits")
TEST = DIGITS.test.x[::16].numpy()


def images_of(classes: tuple[int, ...], each: dict[int, int] = EACH) -> tuple[np.ndarray, list[int]]:
    """Images and labels, the classes mixed."""
    which = torch.cat([(DIGITS.train.y == c).nonzero()[: each[c], 0] for c in classes]).sort().values
    return DIGITS.train.x[which].numpy(), DIGITS.train.y[which].tolist()


def tensors(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """Everything that was learned, exemplars included, as it is saved."""
    learner.save(folder)
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def assert_identical(a: Learner, b: Learner, tmp: Path) -> None:
    """Not a bit differs."""
    assert (a.classes_, a.sizes_, a.alphas_) == (b.classes_, b.sizes_, b.alphas_)
    one, two = tensors(a, tmp / "a"), tensors(b, tmp / "b")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    np.testing.assert_array_equal(a.predict_proba(TEST), b.predict_proba(TEST))


BY_LAMBDA = {"standard", "balanced", "relaxed", "meta"}
TAKES: dict[str, set[str]] = {
    **{name: set(REMEDIES) for name in ("fine-tuning", "geodl", "il-baseline", "lucir", "lwf", "tpcil")},
    "podnet": BY_LAMBDA | {"memory-oversampling", "class-oversampling"},
    **{name: set(REMEDIES) - {"balanced-finetuning"} for name in ("eeil", "icarl")},
    **dict.fromkeys(("ncm", "slda"), BY_LAMBDA),
    **dict.fromkeys(("spb", "spb-i", "spb-m"), BY_LAMBDA),
    **{name: {"standard"} for name in ("bic", "joint", "ss-il")},
    "mnemonics": set(REMEDIES) - {"balanced-finetuning"},
    "dde": BY_LAMBDA | {"memory-oversampling", "class-oversampling", "balanced-finetuning"},
}
"""the remedies that go with each method"""


def refused(method: str, remedy: Remedy, memory: Any) -> str | None:
    """What the refusal of this combination speaks of, if it is one."""
    none = memory in (0, "total:0")
    if method == "mnemonics" and none:
        return r"needs at least [12] image"
    if remedy.name not in TAKES[method]:
        return f"{'icarl' if method == 'mnemonics' else method} does not support the remedy {remedy.name} "
    if isinstance(remedy, Meta) and (none or memory in (1, "total:1")):
        return "remedy meta needs at least 2 image"
    if remedy == Relaxed(0) and not none:
        return "epsilon 0"
    if method in ("eeil", "icarl", "tpcil") and none:
        return "at least 1 image of every old class"
    if none and remedy.name not in BY_LAMBDA:
        return f"remedy {remedy.name} needs at least 1 image"
    if method == "joint" and memory != "all":
        return "joint needs all images"
    if method == "bic" and none:
        return "at least 2 image"
    if method.startswith("spb") and remedy == Standard() and not none:
        return f"the loss of {method} is among new classes"
    if method == "mnemonics" and memory == "all":
        return "mnemonics learns the pixels of all images in memory at once"
    return None


def made(method: str, remedy: Remedy, **settings: Any) -> Method:
    """The method, with short fine-tuning where it has some and this would be done."""
    found: Any = METHODS[method]().with_remedy(remedy)
    if not remedy.keeps_finetuning or settings.get("memory") == 0:
        return found
    if isinstance(found, Around):
        return replace(found, host=shorten(found.host))
    return shorten(found)


def shorten(method: Any) -> Any:
    """The method with short fine-tuning, if it has some."""
    return replace(method, finetune=SHORT) if any(f.name == "finetune" for f in fields(method)) else method


def test_no_method_and_no_remedy_is_left_out() -> None:
    assert METHODS.keys() == TAKES.keys() and {remedy.name for remedy in KINDS.values()} == set(REMEDIES)


def test_the_documents_table_of_remedies_is_the_contract() -> None:
    lines = (Path(__file__).parents[1] / "docs/methods.md").read_text().splitlines()
    (head,) = (k for k, line in enumerate(lines) if line.startswith("| | `standard`"))
    rows = [re.findall(r"[a-z–][a-z0-9-]*", line) for line in itertools.takewhile(bool, lines[head:])]
    remedies, found = rows[0], {name: dict(zip(rows[0], cells)) for name, *cells in rows[2:]}
    words = {(True, True): "both", (True, False): "with", (False, True): "without", (False, False): "–"}
    assert found.keys() == METHODS.keys() and set(remedies) == set(REMEDIES)
    for name, cells in found.items():
        for remedy, said in cells.items():
            some = "all" if name == "joint" else 4
            with_some, with_none = (refused(name, KINDS[remedy], m) is None for m in (some, 0))
            assert said == words[with_some, with_none], (name, remedy)


def test_the_document_has_the_reason_of_every_refusal() -> None:
    lines = (Path(__file__).parents[1] / "docs/methods.md").read_text().splitlines()
    (head,) = (k for k, line in enumerate(lines) if line.startswith("| | since |"))
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(bool, lines[head + 2 :])]
    said = {name: reason for names, reason in rows for name in re.findall("`(.*?)`", names)}
    some = [kind() for name, kind in METHODS.items() if TAKES[name] < set(REMEDIES)]
    assert said == {m.name: m.reason or getattr(m, "host", m).reason for m in some}


# What Meta holds out and counts, a budget and a memory of all images do not see: they go with one Meta.
CELLS = list(itertools.product(KINDS, MEMORIES))
CELLS = [cell for cell in CELLS if cell not in (("meta-all", "budget"), ("meta-all", "all"))]


@pytest.mark.parametrize(("remedy", "memory"), CELLS)
@pytest.mark.parametrize("method", METHODS)
def test_every_cell_is_learned_or_refused_before_anything_is_computed(
    method: str, remedy: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings: a straight one, and one that goes on unobserved from what was saved in the midst of step 2, or of
    the base step where no other is trained."""
    mode = MEMORIES[memory]
    settings = {"method": made(method, KINDS[remedy], **mode), "recipe": ONCE, "seed": 3, **mode}
    if reason := refused(method, KINDS[remedy], mode["memory"]):
        with pytest.raises(UsageError, match=reason) as caught:
            Learner(**settings)
        assert "\n" not in str(caught.value) and len(str(caught.value).split()) > 5
        return
    learner, stages, begin = Learner(**settings), [], 0 if method in ("ncm", "slda") else 2

    def save_and_look(learner: Learner) -> None:
        assert learner.unfinished_ and learner.progress_ is not None
        stages.append((learner.progress_.step, learner.stage_, learner.progress_.epoch))
        if stages[-1] in ((begin, "train", 1), (2, "refit", 1)):
            learner.save(tmp_path / "{}-{}-{}".format(*stages[-1]))
        learner.predict_proba(TEST)

    for t, classes in enumerate(STEPS):
        assert learner.learn(*images_of(classes, FEW), save_and_look) is learner
        check_predictions(learner, t)
        check_memory(learner, t, FEW)
    assert stages == expected_stages(learner)
    resumed = Learner.load(tmp_path / f"{begin}-train-1")
    assert resumed.unfinished_
    assert_identical(learner, learn_steps(resumed, STEPS[begin:], FEW), tmp_path)
    if stages[-1][1] == "refit":  # from the middle of fine-tuning
        resumed = Learner.load(tmp_path / "2-refit-1")
        assert resumed._live is not None and resumed._live.at.stage == 2
        assert_identical(learner, learn_steps(resumed, STEPS[2:], FEW), tmp_path)


def expected_stages(learner: Learner) -> list[tuple[int, str, int]]:
    """What is trained, epoch by epoch: in all steps or in the first; after the base step, and where it is done,
    the correction of BiC and fine-tuning."""
    method, name, memory = learner.method, learner.method.remedy.name, learner.memory != 0
    found = []
    for t in range(len(STEPS)):
        if t == 0 or method.name not in ("ncm", "slda"):
            found.append((t, "train", 1))
        if method.name == "mnemonics":
            found.append((t, "mnemonics", 1))
        if t and method.name == "bic":
            found += [(t, "bias", k) for k in (1, 2)]
        keeps = name in ("standard", "memory-oversampling", "class-oversampling")
        own = method.name in ("dde", "eeil", "geodl", "lucir", "podnet") and keeps
        if t and memory and (own or name == "balanced-finetuning"):
            found += [(t, "refit", k) for k in (1, 2)]
    return found


@pytest.mark.parametrize("remedy", ["standard", "meta"])
@pytest.mark.parametrize("method", METHODS)
def test_contract(method: str, remedy: str, tmp_path: Path) -> None:
    memory = {"joint": "all"}.get(method, 0 if method.startswith("spb") and remedy == "standard" else 4)
    if KINDS[remedy].name in TAKES[method] and (remedy == "standard" or method not in SLOW):
        settings = {"method": made(method, KINDS[remedy]), "recipe": RECIPE, "seed": 3, "memory": memory}
        check_contract(settings, tmp_path)


@pytest.mark.parametrize("remedy", ["balanced", "meta"])
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"joint", "bic", "ss-il"} - SLOW))
def test_contract_in_bf16(method: str, remedy: str, tmp_path: Path) -> None:
    check_contract(
        {"method": made(method, KINDS[remedy]), "memory": 4, "recipe": RECIPE, "precision": "bf16"}, tmp_path
    )


@pytest.mark.parametrize("method", ["bic", "ss-il"])
def test_contract_in_bf16_of_what_takes_no_remedy(method: str, tmp_path: Path) -> None:
    check_contract({"method": METHODS[method](), "memory": 4, "recipe": RECIPE, "precision": "bf16"}, tmp_path)


def check_contract(settings: dict[str, Any], tmp: Path) -> None:
    learner = Learner(**settings)
    given = {**{k: p.default for k, p in inspect.signature(Learner).parameters.items()}, **settings}
    for name, value in given.items():
        assert getattr(learner, name) is value, f"{name} was not stored as it was given"

    during: dict[tuple[int, str, int], np.ndarray] = {}

    def save_and_look(learner: Learner) -> None:
        assert learner.unfinished_ and learner.progress_ is not None
        at = learner.progress_.step, learner.progress_.stage, learner.progress_.epoch
        learner.save(tmp / "{}-{}-{}".format(*at))
        during[at] = learner.predict_proba(TEST)

    for t, classes in enumerate(STEPS):
        x, y = images_of(classes)
        assert learner.learn(x, y, save_and_look) is learner
        check_predictions(learner, t)
        if t == 0:  # told apart far better than by chance, so the columns are those of the classes
            assert (learner.predict(x) == y).mean() > 0.6
        check_memory(learner, t, EACH)
        check_round_trip(learner, tmp / f"after-{t}")
    for name, value in given.items():
        assert getattr(learner, name) is value, f"learning changed {name}"

    # The same seed is the same learner, looked at or not; another seed is another one from the first epoch on. (In the
    # later steps, those that go on below are not looked at.)
    base, again, other = Learner.load(tmp / "after-0"), Learner(**settings), Learner(**{**settings, "seed": 4})
    assert_identical(base, again.learn(*images_of(STEPS[0])), tmp)

    def look_once(learner: Learner) -> None:
        assert not np.array_equal(learner.predict_proba(TEST), during[0, "train", 1])
        raise InterruptedError

    with pytest.raises(InterruptedError):
        other.learn(*images_of(STEPS[0]), look_once)

    # From any epoch of any stage of any step, the rest leads to the same end of the step, to the last bit, from where
    # one goes on to the last step.
    far = (1, "train", 2) if (1, "train", 2) in during else (0, "train", 1)
    for at in ((0, "train", 1), (1, "train", 2), (2, "train", 3), (1, "refit", 1), (2, "refit", 2), (1, "bias", 6)):
        t, stage, _ = at
        names = {one.name for one in stages_of(learner.method, t) if isinstance(one, Stage)}
        if stage not in names:
            assert at not in during
            continue
        resumed = Learner.load(tmp / "{}-{}-{}".format(*at))
        assert resumed.unfinished_
        np.testing.assert_array_equal(resumed.predict_proba(TEST), during[at])
        last = len(STEPS) if at == far else t + 1
        assert_identical(Learner.load(tmp / f"after-{last - 1}"), learn_steps(resumed, STEPS[t:last]), tmp)


def stages_of(method: Method, t: int) -> Any:
    return method.stages(Plan(t, tuple(map(len, STEPS[: t + 1])), (1, 8, 8), (4,) * 6, 4, 4))


def learn_steps(learner: Learner, steps: tuple[tuple[int, ...], ...], each: dict[int, int] = EACH) -> Learner:
    for classes in steps:
        learner.learn(*images_of(classes, each))
    return learner


def check_predictions(learner: Learner, t: int) -> None:
    # Classes come step after step, sorted within one.
    assert learner.classes_ == [c for step in STEPS[: t + 1] for c in sorted(step)]
    assert learner.sizes_ == tuple(len(step) for step in STEPS[: t + 1])
    assert not learner.unfinished_ and learner.progress_ is None
    p, labels = learner.predict_proba(TEST), learner.predict(TEST)
    assert p.shape == (len(TEST), len(learner.classes_)) and labels.shape == (len(TEST),)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert set(labels.tolist()) <= set(learner.classes_)
    np.testing.assert_array_equal(labels, np.array(learner.classes_)[p.argmax(1)])
    # α belongs to Meta, and to the steps after the first.
    learned = [a is not None for a in learner.alphas_]
    trained = [k > 0 and learner.method.name not in ("ncm", "slda") for k in range(t + 1)]
    assert learned == [isinstance(learner.method.remedy, Meta) and one for one in trained]


def check_memory(learner: Learner, t: int, each: dict[int, int]) -> None:
    kept, classes = learner.exemplars_, len(learner.classes_)
    assert kept is not None and kept.x.dtype == torch.uint8 and len(kept.x) == len(kept.y)
    share = {4: 4, "total:21": 21 // classes, 0: 0}
    shares = each if learner.memory == "all" else dict.fromkeys(each, share[learner.memory])
    assert kept.y.tolist() == [c for c, label in enumerate(learner.classes_) for _ in range(shares[label])]
    for c, label in enumerate(learner.classes_):
        theirs = {image.tobytes() for image in images_of((label,), each)[0]}  # type: ignore[arg-type]
        mine = [image.numpy().tobytes() for image in kept.x[kept.y == c]]
        assert set(mine) <= theirs and len(set(mine)) == len(mine), f"exemplars of {label} are not its own"


def check_round_trip(learner: Learner, folder: Path) -> None:
    learner.save(folder)
    loaded = Learner.load(folder)
    for name in ("method", "select", "recipe", "augment", "normalise", "seed", "device", "precision"):
        assert getattr(loaded, name) == getattr(learner, name)
    assert loaded.budget_ == learner.budget_
    assert_identical(learner, loaded, folder)


def test_augmentation_and_statistics_survive_saving(tmp_path: Path) -> None:
    learner = Learner(
        memory=2, recipe=Recipe(epochs=1, milestones=(0.5,)), augment=Crop(2, True), normalise=([0.3], [0.4])
    )
    learner.learn(*images_of((1, 2))).save(tmp_path)
    loaded = Learner.load(tmp_path)
    assert (loaded.augment, loaded.recipe) == (Crop(2, True), Recipe(epochs=1, milestones=(0.5,)))
    again, straight = (one.learn(*images_of((3,))) for one in (loaded, learner))
    assert_identical(again, straight, tmp_path / "both")


@pytest.mark.parametrize("memory", [0, 1, "total:0", "total:1"])
@pytest.mark.parametrize("method", sorted(name for name, takes in TAKES.items() if "meta" in takes))
def test_meta_is_refused_without_two_exemplars_per_class(method: str, memory: int | str) -> None:
    with pytest.raises(UsageError, match="at least 2 image"):
        Learner(METHODS[method]().with_remedy(Meta()), memory)
    Learner(METHODS[method]().with_remedy(Meta()), 2)


@pytest.mark.parametrize("epsilon", [0, 0.0, "0", "0%", "0.0 %"])
@pytest.mark.parametrize("method", sorted(name for name, takes in TAKES.items() if "relaxed" in takes))
def test_relaxed_0_is_refused_with_memory(method: str, epsilon: float | str) -> None:
    for memory in (1, "total:10"):
        with pytest.raises(UsageError, match="epsilon 0"):
            Learner(METHODS[method]().with_remedy(Relaxed(epsilon)), memory)
    if not METHODS[method]().least_memory:
        Learner(METHODS[method]().with_remedy(Relaxed(epsilon)), 0)


@pytest.mark.parametrize("name", ["il-baseline", "bic"])
def test_a_step_whose_share_is_too_small_is_refused(name: str, tmp_path: Path) -> None:
    """A budget of 9 leaves 3 for each of 3 classes, but 1 for each of 5."""
    method: Method = METHODS[name](Meta() if name == "il-baseline" else Standard())
    learner = Learner(method, "total:9", recipe=RECIPE).learn(*images_of(STEPS[0])).learn(*images_of(STEPS[1]))
    before = Learner(method, "total:9", recipe=RECIPE).learn(*images_of(STEPS[0])).learn(*images_of(STEPS[1]))
    with pytest.raises(UsageError, match=r"at least 2 image.* 1\b"):
        learner.learn(*images_of(STEPS[2]))
    assert_identical(learner, before, tmp_path)
