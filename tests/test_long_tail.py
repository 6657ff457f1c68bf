"""Long-tailed new classes: how many images there are of each, which, and that a run records and reports it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import Balanced, ILBaseline, Meta, Method, Recipe, UsageError, paper
from equipoise.cli import run_command
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import COUNTS, load
from equipoise.data.images import Images
from equipoise.data.long_tail import count_long_tail, drop_surplus
from equipoise.runs import estimate
from equipoise.runs.command import name_folder, write_command
from equipoise.runs.plan import Prepared, count_images, prepare, read_run
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.settings import to_plain
from equipoise.step import Batch, Step

DIGITS = load("digits")
CPU = Machine("cpu")


def tailed(imbalance: float = 10.0, method: Method | None = None, seed: int = 0, **protocol: Any) -> Run:
    of = Protocol(**{"base": 4, "steps": 2, "memory": "20", **protocol})
    recipe = Recipe(epochs=2, lr=0.05, batch=32)
    return Run(method or ILBaseline(Balanced()), Data("digits", imbalance=imbalance), of, recipe, seed)


def plan(one: Run) -> Prepared:
    return prepare(one, CPU, loaded=DIGITS)


@pytest.mark.parametrize(
    ("imbalance", "expected"),
    [
        (1, [500] * 10),
        (10, [500, 387, 300, 232, 180, 139, 108, 83, 65, 50]),
        (100, [500, 300, 180, 108, 65, 39, 23, 14, 8, 5]),
    ],
)
def test_each_step_has_an_exponential_profile(imbalance: float, expected: list[int]) -> None:
    counts, sizes = COUNTS["cifar100"], (50, 10, 10, 10, 10, 10)
    used = count_long_tail(counts, sizes, imbalance)
    assert used == [500] * 50 + expected * 5
    assert count_long_tail(counts, (50, *[2] * 25), imbalance) == [500] * 50 + [500, 500 // imbalance] * 25
    unequal = count_long_tail([100, 40, 7, 90, 200, 300], (2, 2, 2), imbalance)
    assert unequal == [100, 40, 7, round(90 / imbalance), 200, 300 // imbalance], "fractions of what there is"


@pytest.mark.parametrize(
    ("imbalance", "protocol", "words"),
    [
        (10, {"base": 5, "steps": 5}, "each step after the base step brings one class: take fewer steps"),
        (1000, {}, "leaves no image of the last class of a step, which has 140: it must be smaller"),
    ],
)
def test_what_makes_no_sense_is_refused(imbalance: float, protocol: dict[str, int], words: str) -> None:
    one = tailed(imbalance, **protocol)
    for refuse in (plan, estimate.count_step_images):
        with pytest.raises(UsageError, match=words):
            refuse(one)
    with pytest.raises(UsageError, match=r"imbalance must be a number of 1 or more, not 0\.5"):
        tailed(0.5)


def list_used(of: Prepared) -> list[set[int]]:
    """The positions of the images of each class, by the data set's labels."""
    places = {label: place for place, label in enumerate(of.order)}
    return [set(of.train.find_positions(places[c], places[c] + 1).tolist()) for c in range(10)]


def test_sizes_follow_the_order_of_the_classes_and_images_are_drawn_by_the_seed() -> None:
    first = plan(tailed())
    counts = torch.bincount(first.train.y, minlength=11).tolist()
    assert counts[:10] == [140] * 4 + [140, 44, 14] * 2 and counts[10] == 2 * (96 + 126)
    used, all_of = list_used(first), [set((DIGITS.train.y == c).nonzero()[:, 0].tolist()) for c in range(10)]
    assert all(some <= every for some, every in zip(used, all_of)) and torch.equal(first.train.x, DIGITS.train.x)
    assert list_used(plan(tailed())) == used != list_used(plan(tailed(seed=1)))
    lasts = [first.order[6], first.order[9]]
    assert all(used[label] != set(sorted(all_of[label])[:14]) for label in lasts), "not simply the first ones"
    # Another order, other sizes; of a class that is rarer, a part of the same images.
    other = plan(tailed(order="0"))
    assert [len(list_used(other)[label]) for label in other.order] == counts[:10] and other.order != first.order
    rarer = list_used(plan(tailed(100.0)))
    assert all(fewer <= some for fewer, some in zip(rarer, used)) and len(rarer[lasts[0]]) == 1
    assert len(first.test) == len(DIGITS.test) and torch.bincount(first.test.y).min() >= 34
    assert plan(tailed(1.0)).train.y.max() == 9


def test_the_work_is_counted_as_it_is_done() -> None:
    one = tailed()
    new, old = 140 + 44 + 14, [4 * 20, 6 * 20 + 14]
    assert count_images(plan(one).list_work()) == [2 * 4 * 140, *(2 * (new + kept) for kept in old)]
    assert estimate.count_step_images(one) == count_images(plan(one).list_work())


class Counting(ILBaseline):
    """IL-Baseline that notes what the loss is given."""

    name = "counting-long-tail"
    seen: dict[int, list[float]] = {}  # noqa: RUF012

    def objective(self, s: Step, b: Batch) -> torch.Tensor:
        """As IL-Baseline's."""
        self.seen[s.t] = s.lam.tolist()
        return super().objective(s, b)


def test_balanced_is_given_the_true_counts(tmp_path: Path) -> None:
    result = run(tailed(method=Counting(Balanced())), tmp_path / "run", CPU, Options(store=None))
    assert Counting.seen[1] == [20] * 4 + [140, 44, 14]
    assert Counting.seen[2] == [20] * 6 + [14, 140, 44, 14], "of a class with fewer than 20 images, all are kept"
    assert result["run"]["data"] == {"name": "digits", "validation": 0.0, "brightness": 0.0, "imbalance": 10.0}
    assert sum(map(sum, result["confusion"])) == len(DIGITS.test)


def test_it_is_recorded_where_it_is_not_the_default_and_told_apart(tmp_path: Path) -> None:
    long, plain = tailed(), tailed(1.0)
    assert "imbalance" not in to_plain(plain)["data"] and read_run(to_plain(plain)) == plain
    assert read_run(to_plain(long)) == long and to_plain(long)["data"]["imbalance"] == 10.0
    assert name_folder(long).startswith("il-baseline_balanced_digits_memory-20_seed-0_imbalance-10_")
    assert "imbalance" not in name_folder(plain)
    command = write_command(long).split()
    assert command[command.index("--imbalance") + 1] == "10.0"
    assert parse_request(command[2:], "run", Request).run.data == long.data
    keys = [plan(one).compute_keys() for one in (long, plain, tailed(steps=1))]
    assert not {*keys[0]} & {*keys[1]} and keys[0][0] == keys[2][0] and keys[0][1] != keys[2][1]


def test_runs_with_other_steps_share_the_base_step(tmp_path: Path) -> None:
    """Exemplars are positions, which are the same images whatever a later step leaves out."""
    options = Options(store=tmp_path / "store")
    run(tailed(), tmp_path / "two", CPU, options)
    shared = run(tailed(steps=1), tmp_path / "one", CPU, options)
    alone = run(tailed(steps=1), tmp_path / "alone", CPU, Options(store=None))
    assert shared["reused"]["steps"] == [0] and shared["confusion"] == alone["confusion"]


def test_which_images_are_left_out_does_not_depend_on_other_classes() -> None:
    y = torch.arange(4).repeat(30)
    some = drop_surplus(y, [30, 10, 30, 5], [7, 3, 1, 0], 0)
    fewer = drop_surplus(y, [30, 30, 2, 5], [7, 3, 1, 0], 0)
    assert torch.bincount(some).tolist() == [30, 10, 30, 5, 45] and torch.equal(some == 3, fewer == 3)
    assert torch.equal(y, torch.arange(4).repeat(30)), "the labels that were given stay"
    assert len(Images(torch.zeros(120, 1, 1, 1), some).find_positions(1, 2)) == 10


def test_a_class_that_is_too_rare_for_a_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"of every class out of training, but .* has only 1"):
        run(tailed(100.0, ILBaseline(Meta())), tmp_path / "run", CPU, Options(store=None))


def test_the_command_takes_it(isolated: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "il-baseline", "--dataset", "digits", "--base", "4", "--steps", "2", "--epochs", "1"]
    assert run_command([*words, "--imbalance", "10", "--store", "none", "--out", "run"]) == 0
    assert json.loads(Path("run/result.json").read_text())["run"]["data"]["imbalance"] == 10.0
    assert run_command([*words, "--store", "none", "--out", "plain"]) == 0
    capsys.readouterr()
    assert run_command(["show", "run", "plain"]) == 0
    assert "imbalance" in capsys.readouterr().out


def test_the_table_has_both_losses_at_both_imbalances() -> None:
    table = paper.make_table("tails")
    for row in table.rows:
        runs = list(dict.fromkeys(cell.run for cell in row.cells))
        assert [one.data.imbalance for one in runs if one] == [10.0, 100.0] and len(row.cells) == 6
        standard = next(r for r in table.rows if r.name == row.name.split(",")[0]).cells[0].run
        assert standard and runs[0] and runs[0].method in (standard.method, standard.method.with_remedy(Balanced()))
        same = next(r for r in paper.make_table("table1").rows if r.name == row.name).cells[0].run
        assert runs[0] and runs[0] == replace(same, data=runs[0].data)  # type: ignore[type-var]
    assert len(table.rows) == 6
