"""Images that stay where they are: what is refused, since exemplars are positions in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from equipoise import Balanced, BalancedFinetuning, Learner, Meta, Method, Recipe, RunError, Stage, Step, UsageError
from equipoise.data.datasets import load
from equipoise.data.images import Images
from equipoise.methods.around import Around
from equipoise.methods.bic import BiC
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.ss_il import SSIL
from equipoise.nets.heads import LinearHead
from equipoise.runs.folder import find_result
from equipoise.runs.plan import prepare
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.step import Plan, Stages

FAST = Recipe(epochs=1, lr=0.05, batch=32)


def digits() -> Images:
    train = load("digits").train
    return train[torch.cat([train.find_positions(k, k + 1)[:20] for k in range(6)])]


def learner(method: Method | None = None) -> Learner:
    return Learner(method or ILBaseline(), 4, recipe=FAST, device="cpu")


def test_positions_are_never_taken_for_those_in_other_images(tmp_path: Path) -> None:
    images = digits()
    made = learner().learn(images, range(2))
    where = images.find_positions(2, 4)
    with pytest.raises(UsageError, match="positions in other images"):
        made.learn(images.x[where], images.y[where].tolist())
    with pytest.raises(UsageError, match="positions in other images"):
        made.learn(Images(255 - images.x, images.y), range(2, 4))
    made.save(tmp_path / "saved")
    loaded = Learner.load(tmp_path / "saved").learn(images, range(2, 4))
    made.own_exemplars(images)
    owned = made.exemplars_
    assert owned is not None and len(owned) == 8
    made.learn(images.x[where], images.y[where].tolist())
    assert torch.equal(made.logits(images.x), loaded.logits(images.x)), "either way the same"


@pytest.mark.parametrize("classes", [range(1), range(1, 3), [1, 0], [0, 2]])
def test_labels_count_the_classes_in_learning_order(classes: list[int]) -> None:
    with pytest.raises(UsageError, match="order of their labels"):
        learner().learn(digits(), classes)
    made = learner().learn(digits(), range(2))
    with pytest.raises(UsageError, match="next is 2"):
        made.learn(digits(), range(2))


@dataclass(frozen=True)
class Wrapped(Around):
    """Changes nothing."""

    name: ClassVar[str] = "wrapped"


@pytest.mark.parametrize("host", [BiC(), SSIL(), ILBaseline(Meta()), ILBaseline(Balanced())])
def test_a_host_keeps_all_its_ways(host: Method) -> None:
    images, logits = digits(), []
    for method in (host, Wrapped(host=host)):
        made = learner(method)
        for first in (0, 2, 4):
            made.learn(images, range(first, first + 2))
        logits.append(made.logits(images.x))
    assert torch.equal(*logits)
    assert [Wrapped(host=host).overrides(name) for name in ("views", "first_rows", "epoch")] == [
        host.overrides(name) for name in ("views", "first_rows", "epoch")
    ]


def test_what_the_stages_of_a_host_would_ignore_is_refused() -> None:
    for name in ("recipe", "finetuning", "refinements", "trained"):
        with pytest.raises(UsageError, match=f"Own overrides {name}, which has no effect: override stages too"):
            type("Own", (Around,), {name: getattr(ILBaseline, name)})
    type("Own", (Around,), {"name": "own", "recipe": ILBaseline.recipe, "stages": ILBaseline.stages})


def test_a_method_around_another_has_needs_of_its_own() -> None:
    class Hungry(Around):
        least_memory = 4

    class Plain(Around):
        remedies, reason = (), "it is its own"

    with pytest.raises(UsageError, match="hungry needs at least 4 image"):
        Learner(Hungry(host=ILBaseline()), memory=3)
    Learner(Hungry(host=ILBaseline()), memory=4)
    with pytest.raises(UsageError, match="plain does not support the remedy balanced"):
        Learner(Plain(host=ILBaseline(Balanced())))


def test_meta_counts_held_images_without_a_sum_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum waits for its result, which a CUDA graph cannot."""
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Looking(ILBaseline):
        name: ClassVar[str] = "looking"

        def lam(self, s: Step) -> Tensor:
            if s.t:
                with monkeypatch.context() as patch:
                    patch.setattr(torch, "bincount", None)
                    seen.append(super().lam(s))
                held = torch.bincount(s.images.y[s.held], minlength=s.N)
                alpha = s.state.get("alpha", torch.ones(()))
                assert torch.equal(seen[-1], torch.where(s.past, alpha * (s.n + held), s.n + held))
            return super().lam(s)

    made = Learner(Looking(Meta(count="all", every=2)), 4, recipe=replace(FAST, epochs=2), device="cpu")
    made.learn(digits(), range(2)).learn(digits(), range(2, 4))
    assert len(seen) > 3


def test_orders_that_agree_at_first_share_the_base_step(tmp_path: Path) -> None:
    """And nothing later; the images of a step are known by themselves, whatever comes after them."""
    order = [*range(10)]
    results = []
    for k, tail in enumerate((order[6:], order[:5:-1])):
        file = tmp_path / f"order-{k}.txt"
        file.write_text(" ".join(map(str, order[:6] + tail)))
        asked = Run(ILBaseline(), Data("digits"), Protocol(6, 4, str(file), "4"), FAST)
        results.append(run(asked, tmp_path / str(k), Machine("cpu"), Options(store=tmp_path / "store")))
    assert results[0]["reused"] is None and results[1]["reused"]["steps"] == [0]
    assert results[0]["steps"][0]["top1"] == results[1]["steps"][0]["top1"]


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    asked, machine = Run(ILBaseline(), Data("digits"), Protocol(6, 4, memory="4"), FAST), Machine("cpu")
    run(asked, tmp_path / "run", machine)
    settings = prepare(asked, machine).settings
    assert find_result(tmp_path / "run", settings) is not None
    with pytest.raises(RunError, match="fingerprint of the data"):
        find_result(tmp_path / "run", {**settings, "data": "another"})


def test_a_name_that_is_taken_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(UsageError, match="is named 'bic' like an existing method"):
        type("BiC", (Method,), {"__module__": "elsewhere"})


class NamedRows(LinearHead):
    """A linear head whose rows have another name."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.prototypes = torch.nn.Parameter(torch.zeros(()))
        del self.weight, self.bias

    def widen(self, new: int, gen: torch.Generator) -> None:
        pass

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return h[:, :4] + self.prototypes, {}


@dataclass(frozen=True)
class Named(ILBaseline):
    name: ClassVar[str] = "named"

    def head(self, width: int) -> NamedRows:
        return NamedRows(width)


def test_a_stage_without_weights_is_refused_before_its_step_is_trained() -> None:
    made, seen = learner(Named(BalancedFinetuning())).learn(digits(), range(2)), []
    with pytest.raises(UsageError, match=r"stage refit trains head\.weight, .*, which match no weight"):
        made.learn(digits(), range(2, 4), seen.append)
    assert not seen


@dataclass(frozen=True)
class Staged(ILBaseline):
    """Two stages of which the second is on what is held out, in every step."""

    name: ClassVar[str] = "staged"
    second: str = "held"
    h: int = 0

    def hold(self, plan: Plan) -> int:
        return self.h if plan.t else 0

    def stages(self, plan: Plan) -> Stages:
        train, choose = super().stages(plan)
        return (train, Stage(self.second, FAST, images="held"), choose)


def test_a_stage_on_held_out_images_is_left_out_where_none_are(tmp_path: Path) -> None:
    for h, stages in ((0, ["train"] * 2), (2, ["train", "train", "held"])):
        protocol, seen = Protocol(8, 1, memory="5"), tmp_path / str(h)
        asked = Run(Staged(h=h), Data("digits"), protocol, replace(FAST, epochs=1))
        run(asked, seen, Machine("cpu"), Options(store=tmp_path / "store"))
        lines = [json.loads(line) for line in (seen / "metrics.jsonl").read_text().splitlines()]
        assert [line["stage"] for line in lines] == stages and lines[-1]["done"] == 1
        again = run(asked, tmp_path / f"{h} again", Machine("cpu"), Options(store=tmp_path / "store"))
        assert again["reused"]["steps"] == [0, 1], "each step is shared when what comes before the choice is trained"


def test_two_stages_of_one_name_are_refused() -> None:
    """They would draw the same random numbers, and the record would have the seconds of one of them."""
    made = learner(Staged(second="train", h=1)).learn(digits(), range(2))
    with pytest.raises(UsageError, match=r"^staged has stages called train, train: give each a name of its own"):
        made.learn(digits(), range(2, 4))


@pytest.mark.parametrize("host", ["podnet", ILBaseline, Balanced()], ids=str)
def test_a_host_that_is_no_method_is_refused(host: Any) -> None:
    with pytest.raises(UsageError, match=r"^the host of around must be a Method such as PODNet\(\), not "):
        type("Around", (Around,), {"name": "around"})(host=host)
