"""The paper's tables and figures as data: each cell is a run and the number that was published for it.

Jodelet, Liu and Murata, "Balanced softmax cross-entropy for incremental learning with and without memory",
Computer Vision and Image Understanding 225, 2022. Their numbers on CIFAR-100 are means of three runs. Rows that they
quote from other papers have no run here: such numbers are shown beside ours, and never mixed with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .datasets import PLANNED, SHAPES
from .errors import unknown
from .losses import Balanced, Meta, Relaxed, Standard
from .method import Method, Recipe
from .methods.bounds import FineTuning, Joint
from .methods.il_baseline import ILBaseline
from .methods.lucir import LUCIR
from .methods.ncm import NCM
from .methods.podnet import PODNet
from .methods.slda import SLDA
from .published import CONFUSION, EPSILONS, TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, numbers
from .run import Run

METRICS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "average": lambda result: result["average_incremental_accuracy"],
    "average top 5": lambda result: result["average_incremental_accuracy_top5"],
    "final": lambda result: result["final"]["top1"],
    "final base": lambda result: result["final"]["base"],
    "final new": lambda result: result["final"]["new"],
}
"""what is read off a result: averages are over the steps, `final` is after the last, on all, base or later classes"""

DATASETS = {"cifar100": "CIFAR-100", "imagenet-subset": "ImageNet-Subset", "imagenet": "ImageNet", "digits": "digits"}
"""how tables call the data sets; digits is not the paper's, but embedded: `rehearsed` takes it instead of CIFAR-100"""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    id: str
    group: str
    title: str
    dataset: str


@dataclass(frozen=True)
class Cell:
    """A number of the paper, and the run that it is the number of."""

    column: Column
    paper: float | None
    run: Run | None
    """None where the paper quotes somebody else, or has no such cell"""
    metric: str = "average"


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    name: str
    cells: tuple[Cell, ...]
    quoted: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the paper, or a figure's runs laid out as one."""

    id: str
    title: str
    caption: str
    rows: tuple[Row, ...]
    alone: bool = False
    """whether its runs are timed: one at a time, with nothing reused"""
    figure: bool = False
    """whether it is a figure's runs"""

    @property
    def columns(self) -> tuple[Column, ...]:
        """In the order in which the rows have them."""
        return tuple(dict.fromkeys(cell.column for row in self.rows for cell in row.cells))

    def on(self, *datasets: str) -> Table:
        """The part of the table that is about these data sets."""
        kept = ((row, tuple(c for c in row.cells if c.column.dataset in datasets)) for row in self.rows)
        return replace(self, rows=tuple(replace(row, cells=cells) for row, cells in kept if cells))


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


def cifar(method: Method, steps: int = 5, memory: str = "20") -> Run:
    """The protocol of most of the paper: CIFAR-100, half of its classes first."""
    return Run(method, "cifar100", steps=steps, memory=memory)


def set_for(method: Method, dataset: str, memory: str) -> tuple[Method, Recipe | None]:
    """The method as the cells of a data set have it, and its recipe where that is not the method's own.

    As in the originals, LUCIR and PODNet weigh the previous net more on ImageNet, LUCIR refits its classifier on the
    whole of it only, and PODNet refits with a smaller learning rate and smaller batches, both with the weight decay of
    a step; with another loss than the standard one, or without memory, there is no refit.
    """
    if not dataset.startswith("imagenet"):
        return method, None
    whole, refits = dataset == "imagenet", isinstance(method.loss, Standard) and memory != "0"
    own: dict[str, Any] = {"refit_weight_decay": 1e-4} if whole and refits else {}
    if isinstance(method, LUCIR):
        return replace(method, lambda_base=10.0, finetune=whole and refits, **own), None
    if isinstance(method, PODNet):
        own |= {"refit_lr": 0.01, "refit_batch": 64} if refits else {}
        recipe = replace(method.recipe(PLANNED[dataset]), weight_decay=1e-4) if whole else None
        return replace(method, lambda_c=8.0, lambda_f=10.0, **own), recipe
    return method, None


def with_short_batches(run: Run) -> Run:
    """The run with every epoch ended by what is left of it, as the loops of LUCIR's and PODNet's originals do."""
    usual = run.recipe or run.method.recipe((SHAPES | PLANNED)[run.dataset])
    return replace(run, recipe=replace(usual, last="short"))


def run_of(method: Method, dataset: str, memory: str, steps: int | None = None, classes: int | None = None) -> Run:
    """The run of a method on a data set: half of the classes and then that many steps, or so many classes at a time.

    LUCIR and PODNet have short batches without memory: in 5 steps of CIFAR-100 the last one has 8 images, which decides
    the rows of the standard loss. With memory batches are joined, which is the default: in 5 steps the short one moved
    rows by less than 0.4 points (`batches`).
    """
    method, recipe = set_for(method, dataset, memory)
    run = Run(method, dataset, base=classes, increment=classes, steps=steps, memory=memory, recipe=recipe)
    return with_short_batches(run) if memory == "0" and isinstance(method, (LUCIR, PODNet)) else run


def old_and_new(run: Run, group: str, average: float | None = None, which: str = "") -> tuple[Cell, ...]:
    """Three cells of a run: its average, for which the paper may have a number, and what old and new classes end at.

    Where a row has several runs on a data set, `which` tells their columns apart.
    """
    cells = []
    for metric, value in (("average", average), ("final base", None), ("final new", None)):
        column = Column(f"{run.dataset}-{which}{metric.replace(' ', '-')}", group, metric, run.dataset)
        cells.append(Cell(column, value, run, metric))
    return tuple(cells)


def by_steps(text: str, steps: Mapping[str, Sequence[int]], memory: str) -> tuple[Row, ...]:
    """A table whose columns are data sets and numbers of steps, after a base step with half of the classes."""
    columns = [Column(f"{d}-{t}", DATASETS[d], f"{t} steps", d) for d, ts in steps.items() for t in ts]

    rows = []
    for name, values in numbers(text):
        method = ROWS.get(name)
        cells = []
        for column, value in zip(columns, values):
            t = int(column.title.split()[0])
            run = None if method is None else run_of(method, column.dataset, memory, steps=t)
            cells.append(Cell(column, value, run))
        rows.append(Row(name, tuple(cells), quoted=method is None))
    return tuple(rows)


def table1() -> Table:
    """The main table: with memory."""
    steps = {"cifar100": (5, 10, 25), "imagenet-subset": (5, 10, 25), "imagenet": (5, 10)}
    caption = "Average incremental accuracy: half of the classes, then 5, 10 or 25 steps; 20 images of every class kept"
    return Table("table1", "Table 1", caption, by_steps(TABLE1, steps, "20"))


def table2() -> Table:
    """Ten equal steps on ImageNet."""
    metrics = ("average", "average top 5")
    columns = [Column(f"imagenet-{metric.replace(' ', '-')}", "ImageNet", metric, "imagenet") for metric in metrics]
    rows = []
    for name, values in numbers(TABLE2):
        method = ROWS.get(name)
        run = None if method is None else run_of(method, "imagenet", "total:20000", classes=100)
        cells = tuple(Cell(c, v, run, c.title) for c, v in zip(columns, values))
        rows.append(Row(name, cells, quoted=method is None))
    caption = "ImageNet in ten steps of 100 classes, 20,000 images kept in all"
    return Table("table2", "Table 2", caption, tuple(rows))


def table3() -> Table:
    """Without memory."""
    steps = {"cifar100": (5, 10), "imagenet-subset": (5, 10), "imagenet": (5, 10)}
    caption = (
        "Average incremental accuracy without memory: half of the classes, then 5 or 10 steps; LUCIR and PODNet end "
        "every epoch with a short batch, as their originals do (in the report: The last batch)"
    )
    return Table("table3", "Table 3", caption, by_steps(TABLE3, steps, "0"))


def table4() -> Table:
    """By the size of the memory."""
    sizes = (1, 5, 10, 20, 50)
    rows = []
    for name, values in numbers(TABLE4):
        cells = []
        for m, value in zip(sizes, values):
            column = Column(f"cifar100-memory-{m}", "CIFAR-100", f"{m} per class", "cifar100")
            possible = m > 1 or not isinstance(ROWS[name].loss, Meta)
            cells.append(Cell(column, value, cifar(ROWS[name], memory=str(m)) if possible else None))
        rows.append(Row(name, tuple(cells)))
    caption = "Average incremental accuracy by the images kept of every class: half of the classes, then 5 steps"
    return Table("table4", "Table 4", caption, tuple(rows))


def table5() -> Table:
    """By the weight α of old classes."""
    metrics = ("final base", "final", "average")
    rows = []
    for name, values in numbers(TABLE5):
        loss = Meta() if name == META else Balanced(float(name.split()[1]))
        cells = []
        for t, published in ((5, values[:3]), (10, values[3:])):
            for metric, value in zip(metrics, published):
                title = f"CIFAR-100, {t} steps"
                column = Column(f"cifar100-{t}-{metric.replace(' ', '-')}", title, metric, "cifar100")
                cells.append(Cell(column, value, cifar(ILBaseline(loss), t), metric))
        rows.append(Row(name, tuple(cells)))
    caption = "IL-Baseline, Balanced, by the weight α of old classes: half of the classes, then 5 or 10 steps, 20 kept"
    return Table("table5", "Table 5", caption, tuple(rows))


def table6() -> Table:
    """The paper's losses against other remedies."""
    rows = []
    column = Column("cifar100-5", "CIFAR-100", "5 steps", "cifar100")
    for name, (value,) in numbers(TABLE6):
        if name == IL or name in (BALANCED, META):
            method = ROWS[name if name == IL else f"{IL}, {name}"]
        else:
            method = ILBaseline(mitigation=name.replace(" ", "-"))  # type: ignore[arg-type]
        rows.append(Row(name, (Cell(column, value, cifar(method)),)))
    caption = "IL-Baseline by remedy: average incremental accuracy, half of the classes, then 5 steps, 20 images kept"
    return Table("table6", "Table 6", caption, tuple(rows))


def confusion() -> Table:
    """The figure of confusion matrices."""
    column = Column("cifar100-final", "CIFAR-100", "final", "cifar100")
    published = numbers(CONFUSION)
    rows = [Row(name, (Cell(column, value, cifar(ROWS[name]), "final"),)) for name, (value,) in published]
    caption = "Final accuracy of the three confusion matrices: half of the classes, then 5 steps, 20 images kept"
    return Table("confusion", "Confusion matrices", caption, tuple(rows), figure=True)


def epsilon() -> Table:
    """The figure of ε, without memory."""
    rows = []
    for name, t, percent in itertools.product(("LUCIR", "PODNet"), (5, 10), EPSILONS):
        # Without memory, ε = 0 is the balanced loss: the same equation, and a run that is wanted anyway.
        method = replace(ROWS[name], loss=Balanced() if percent == "0" else Relaxed(f"{percent}%"))
        here, there = (run_of(method, dataset, "0", steps=t) for dataset in ("cifar100", "imagenet-subset"))
        cells = [*old_and_new(here, DATASETS[here.dataset])]
        if t == 5:  # where what ends an epoch matters most
            cells += old_and_new(cifar(method, t, "0"), "CIFAR-100, joined batches", which="joined-")
        cells += old_and_new(there, DATASETS[there.dataset])
        rows.append(Row(f"{name}, {t} steps, ε {percent}%", tuple(cells)))
    caption = (
        "LUCIR and PODNet without memory, Relaxed, by ε in percent of the images of a class; every epoch ends with a "
        "short batch, but for the columns of joined batches, which are of 5 steps"
    )
    return Table("epsilon", "The figure of ε", caption, tuple(rows), figure=True)


def batches() -> Table:
    """What ends an epoch: not in the paper, but what its rows without memory depend on."""
    rows = []
    for text, memory, steps, kept in ((TABLE3, "0", (5, 10), "no memory"), (TABLE1, "20", (5, 10, 25), "20 kept")):
        for name, values in numbers(text):
            method = ROWS.get(name)
            if not isinstance(method, (LUCIR, PODNet)):
                continue
            cells = []
            for t, value in zip(steps, values):
                usual = cifar(method, t, memory)
                for last, run in (("joined", usual), ("short", with_short_batches(usual))):
                    column = Column(f"cifar100-{t}-{last}", f"CIFAR-100, {t} steps", last, "cifar100")
                    cells.append(Cell(column, value, run))
            rows.append(Row(f"{name}, {kept}", tuple(cells)))
    caption = (
        "What becomes of the images at the end of an epoch that fill no batch: joined with the next epoch's, or a "
        "short batch, as in the originals' loops, whose statistics batch norms learn right before they are used. On "
        "CIFAR-100 without memory it has 8 images in 5 steps and 68 in 10. LUCIR and PODNet have short batches in "
        "table 3 and in the figure of ε, joined ones in table 1"
    )
    return Table("batches", "The last batch", caption, tuple(rows))


def separated() -> Table:
    """What the separated softmax may mean: not in the paper, which says little of it."""
    readings: dict[str, dict[str, Any]] = {
        "a mean of old and one of new images": {},
        "one mean of all images": {"separated_mean": "all"},
        "two means, a fifth old images": {"old_share": 0.2},
        "one mean, a fifth old images": {"old_share": 0.2, "separated_mean": "all"},
        "one mean, both losses with weight 1": {"separated_mean": "all", "weights": "ones"},
        "all of it as in SS-IL": {"separated_mean": "all", "old_share": 0.2, "weights": "ones", "distil": "by-step"},
    }
    (published,) = dict(numbers(TABLE6))["separated softmax"]
    rows = []
    for name, settings in readings.items():
        run = cifar(ILBaseline(mitigation="separated-softmax", **settings))
        rows.append(Row(name, old_and_new(run, "CIFAR-100, 5 steps", published)))
    caption = (
        "IL-Baseline with a separated softmax, as the row of table 6 is (first) and by other readings: what its mean "
        "is over, how much of an epoch is old images (half, unless said), and what it and the distillation weigh"
    )
    return Table("separated", "The separated softmax", caption, tuple(rows))


def bounds() -> Table:
    """What forgetting is, and what it would be without: not in the paper, but what every reader looks for."""
    rows = []
    for name, method, memory in (
        ("fine-tuning, no memory", FineTuning(), "0"),
        ("fine-tuning, 20 kept", FineTuning(), "20"),
        ("joint training", Joint(), "all"),
    ):
        rows.append(Row(name, old_and_new(cifar(method, memory=memory), "CIFAR-100, 5 steps")))
    caption = (
        "The two bounds, with the net and the recipe of IL-Baseline: plain fine-tuning, and a new net in each step "
        "that is trained on all images of all classes so far"
    )
    return Table("bounds", "Bounds", caption, tuple(rows))


def costs() -> Table:
    """What a loss costs; the paper says that Balanced costs nothing, Meta much, and that fine-tuning is saved."""
    # The rate of α costs nothing, and neither does it matter here: the shorter a run, the less it has to move.
    rows = {
        IL: ILBaseline(),
        f"{IL}, {BALANCED}": ILBaseline(Balanced()),
        f"{IL}, {META}": ILBaseline(Meta(alpha_lr=1.0)),
        f"{IL}, balanced finetuning": ILBaseline(mitigation="balanced-finetuning"),
        f"LUCIR, {BALANCED}": LUCIR(Balanced()),
        "LUCIR with finetuning": LUCIR(finetune=True),
        "PODNet": PODNet(),
        f"PODNet, {BALANCED}": PODNet(Balanced()),
    }
    made = []
    column = Column("cifar100-cost", "CIFAR-100", "average", "cifar100")
    for name, method in rows.items():
        recipe = replace(method.recipe(SHAPES["cifar100"]), epochs=8 if name.startswith(IL) else 4)
        made.append(Row(name, (Cell(column, None, replace(cifar(method), recipe=recipe)),)))
    caption = "Training seconds of the steps after the base step, and peak memory: one run at a time, nothing reused"
    return Table("costs", "What a loss costs", caption, tuple(made), alone=True)


MAKERS: dict[str, Callable[[], Table]] = {
    make.__name__: make
    for make in (table1, table2, table3, table4, table5, table6, confusion, epsilon, batches, separated, bounds, costs)
}


def table(name: str) -> Table:
    """The table of that name."""
    if name not in MAKERS:
        raise unknown("table or figure", name, MAKERS)
    return MAKERS[name]()


def tables() -> list[Table]:
    """All of them."""
    return [make() for make in MAKERS.values()]


def rehearsed(table: Table) -> Table:
    """The table with digits in the place of CIFAR-100 in 5 steps, and without the rest: minutes on any machine."""

    def cell(c: Cell) -> Cell | None:
        if c.run is None or c.run.dataset != "cifar100" or c.run.steps != 5:
            return None
        column = replace(
            c.column,
            id=c.column.id.replace("cifar100", "digits"),
            group=c.column.group.replace("CIFAR-100", "digits"),
            dataset="digits",
        )
        recipe = c.run.recipe
        if recipe is not None:
            usual, now = (asdict(r) for r in (c.run.method.recipe(SHAPES["cifar100"]), recipe))
            changed = {name: value for name, value in now.items() if value != usual[name]}
            recipe = replace(c.run.method.recipe(SHAPES["digits"]), **changed)
        return Cell(column, None, replace(c.run, dataset="digits", recipe=recipe), c.metric)

    kept = ((row, tuple(filter(None, map(cell, row.cells)))) for row in table.rows)
    return replace(table, rows=tuple(replace(row, cells=cells) for row, cells in kept if cells))
