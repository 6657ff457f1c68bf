"""The parts of tables: cells, each a run and its published number, and the settings of such runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..data.folders import NAMES
from ..method import Method
from ..methods.around import Around
from ..methods.il_baseline import ILBaseline
from ..methods.lucir import LUCIR
from ..methods.ncm import NCM
from ..methods.podnet import PODNet
from ..methods.slda import SLDA
from ..remedies import Balanced, Meta, Relaxed
from ..runs.plan import read_run
from ..runs.settings import Data, Protocol, Run
from ..step import Recipe


def sum_steps(result: Mapping[str, Any], name: str) -> float:
    """The sum of a value over all steps after the base step."""
    return float(sum(step.get(name, 0.0) for step in result["steps"][1:]))


def scale_training(result: Mapping[str, Any]) -> float:
    """Seconds of training, scaled to the method's own number of epochs, plus those of later stages as measured."""
    run = read_run(result["run"])
    assert run.recipe is not None
    longer = run.default_recipe.epochs / run.recipe.epochs
    return sum_steps(result, "training_seconds") * longer + sum_steps(result, "refitting_seconds")


def average_looks(result: Mapping[str, Any], pick: Callable[[Sequence[float]], float]) -> float:
    """The mean over the steps after the base step of what is picked of the accuracies while a step is trained.

    Fine-tuning is not part of it. NaN if there are none in some step.
    """
    looks = [look for look in result.get("looks", ()) if look["stage"] == "train"]
    by_step = [[look["top1"] for look in looks if look["step"] == t] for t in range(1, len(result["steps"]))]
    return float(np.mean([pick(own) for own in by_step])) if by_step and all(by_step) else math.nan


METRICS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "average": lambda result: result["average_incremental_accuracy"],
    "average top 5": lambda result: result["average_incremental_accuracy_top5"],
    "final": lambda result: result["final"]["top1"],
    "final base": lambda result: result["final"]["base"],
    "final new": lambda result: result["final"]["new"],
    "base step": lambda result: result["steps"][0]["top1"],
    "first step": lambda result: result["steps"][1]["top1"],
    "first steps": lambda result: float(np.mean([step["top1"] for step in result["steps"][1:4]])),
    "within steps": lambda result: average_looks(result, np.mean),
    "training ends": lambda result: average_looks(result, lambda own: own[-1]),
    "after steps": lambda result: float(np.mean([step["top1"] for step in result["steps"][1:]])),
    "seconds": scale_training,
    "training MiB": lambda result: result["steps"][1].get("training_mib") or math.nan,
}
"""the values of a result: averages are over all steps, `final` is after the last, on all, base or later classes; the
first steps are those after the base step, one or three; within steps is while they are trained, and training ends
before fine-tuning; MiB are of a GPU at its peak"""

TIMED = ("seconds", "training MiB")
"""the metrics that depend on the machine"""

DATASETS = {
    "cifar100": "CIFAR-100",
    "imagenet-subset": "ImageNet-Subset",
    "imagenet": "ImageNet",
    "mini-imagenet": "mini-ImageNet",
    "digits": "digits",
}
"""the titles of the data sets

The last two are not in the paper: mini-ImageNet has a table of its own, and `rehearse_on_digits` puts digits in place
of CIFAR-100.
"""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    id: str
    group: str
    title: str
    dataset: str
    metric: str = "average"


THE_PAPER = "the paper"


@dataclass(frozen=True)
class Cell:
    """A run, and the number that the paper prints for it."""

    column: Column
    paper: float | None
    run: Run | None
    """None if the paper quotes another paper, or has no such cell, or its number is of other images than those here"""
    source: str = THE_PAPER
    """where the number is from"""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    name: str
    cells: tuple[Cell, ...]
    quoted: bool = False
    elsewhere: str = ""
    """the table that measures it, if it is quoted here"""


@dataclass(frozen=True)
class Table:
    """A table of the paper, or a figure's runs laid out as one."""

    id: str
    title: str
    caption: str
    rows: tuple[Row, ...]
    alone: bool = False
    """whether its runs are timed: one at a time, with nothing reused"""
    look: int = 0
    """epochs between the accuracies that its runs measure within their steps; 0 for none"""
    figure: bool = False
    """whether it is a figure's runs"""
    mean: str = ""
    """title of a last column with the mean over the cells of each row; empty for none"""

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, in order of first appearance."""
        return tuple(dict.fromkeys(cell.column for row in self.rows for cell in row.cells))

    def map(self, change: Callable[[Cell], Cell | None]) -> Table:
        """The table with every cell changed; cells that become None and rows without cells are left out."""
        kept = ((row, tuple(filter(None, map(change, row.cells)))) for row in self.rows)
        return replace(self, rows=tuple(replace(row, cells=cells) for row, cells in kept if cells))

    def on(self, *datasets: str) -> Table:
        """The part of the table for these data sets."""
        return self.map(lambda cell: cell if cell.column.dataset in datasets else None)


IL, BALANCED, META, RELAXED = "IL-Baseline", "Balanced", "Meta", "Relaxed"

ROWS: dict[str, Method] = {
    IL: ILBaseline(),
    f"{IL}, {BALANCED}": ILBaseline(Balanced()),
    f"{IL}, {META}": ILBaseline(Meta()),
    "LUCIR": LUCIR(),
    f"LUCIR, {BALANCED}": LUCIR(Balanced()),
    f"LUCIR, {RELAXED}": LUCIR(Relaxed()),
    "PODNet": PODNet(),
    f"PODNet, {BALANCED}": PODNet(Balanced()),
    f"PODNet, {RELAXED}": PODNet(Relaxed()),
    "NCM": NCM(),
    "SLDA": SLDA(),
}
"""the authors' own rows, under our names for their losses"""


def make_cifar_run(method: Method, steps: int = 5, memory: str = "20") -> Run:
    """The protocol of most of the paper with the defaults of a run: CIFAR-100, half of its classes first."""
    return Run(method, Data("cifar100"), Protocol(steps=steps, memory=memory))


def adapt_method(method: Method, recipe: Recipe, whole: bool) -> tuple[Method, Recipe]:
    """The method and its recipe with the settings of the originals on ImageNet; first those of its host, if any."""
    if isinstance(method, Around):
        host, recipe = adapt_method(method.host, recipe, whole)
        method = replace(method, host=host)
    for changes in (method.imagenet, method.whole_imagenet if whole else {}):
        recipe = replace(recipe, **changes.get("recipe", {}))
        method = set_fields(method, {name: value for name, value in changes.items() if name != "recipe"})
    return method, recipe


def set_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """A dataclass with other values; a mapping changes the fields of a field."""
    inside = {k: set_fields(getattr(value, k), v) for k, v in changes.items() if isinstance(v, Mapping)}
    return replace(value, **{**changes, **inside})


def with_short_batches(run: Run) -> Run:
    """The run with every epoch ended by a short batch of what is left of it, as in the original code."""
    return replace(run, recipe=replace(run.recipe or run.default_recipe, last="short"))


def make_run(method: Method, dataset: str, protocol: Protocol) -> Run:
    """The run of the paper's cell.

    Its epochs end with a short batch, as in the loops that the paper's code was built on. What joined batches, which
    are the default of a run, change is the table `batches`.
    """
    recipe = Run(method, Data(dataset)).default_recipe
    if dataset in NAMES:
        method, recipe = adapt_method(method, recipe, whole=dataset == "imagenet")
        method = method.reset_finetuning(memory=protocol.memory != "0")
    return with_short_batches(Run(method, Data(dataset), protocol, recipe))


def find_images_needed(run: Run) -> str | None:
    """The data set of a run, if someone must have its images, which no download gives; a subset needs ImageNet."""
    return run.data.name.removesuffix("-subset") if run.data.name in NAMES else None


def make_column(metric: str, dataset: str, group: str, which: str = "") -> Column:
    """A column of a metric, and called so; `which` tells columns of several runs on a data set apart."""
    return Column(f"{dataset}-{which}{metric.replace(' ', '-')}", group, metric, dataset, metric)


def make_three_cells(run: Run, group: str, average: float | None = None, which: str = "") -> tuple[Cell, ...]:
    """Three cells of a run: its average, which the paper may print, and the final accuracies of old and new classes."""
    published = {"average": average, "final base": None, "final new": None}
    return tuple(Cell(make_column(m, run.data.name, group, which), value, run) for m, value in published.items())
