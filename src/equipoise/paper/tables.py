"""The tables and figures that the paper has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ..methods import remedy_named
from ..methods.il_baseline import ILBaseline
from ..remedies import Balanced, Meta, Relaxed
from .cells import DATASETS, IL, META, ROWS, Cell, Column, Row, Table, cell_of, cifar, old_and_new, run_of
from .published import CONFUSION, EPSILONS, TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, numbers


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
        run = None if method is None else run_of(method, "imagenet", "total:20000", steps=9, base=100)
        cells = tuple(Cell(c, v, run, c.title) for c, v in zip(columns, values))
        rows.append(Row(name, cells, quoted=method is None))
    caption = "ImageNet in ten steps of 100 classes, 20,000 images kept in all"
    return Table("table2", "Table 2", caption, tuple(rows))


def table3() -> Table:
    """Without memory."""
    steps = {"cifar100": (5, 10), "imagenet-subset": (5, 10), "imagenet": (5, 10)}
    caption = "Average incremental accuracy without memory: half of the classes, then 5 or 10 steps"
    return Table("table3", "Table 3", caption, by_steps(TABLE3, steps, "0"))


def table4() -> Table:
    """By the size of the memory."""
    sizes = (1, 5, 10, 20, 50)
    rows = []
    for name, values in numbers(TABLE4):
        cells = []
        for m, value in zip(sizes, values):
            column = Column(f"cifar100-memory-{m}", "CIFAR-100", f"{m} per class", "cifar100")
            possible = m > 1 or ROWS[name].remedy.adapt() is None  # with one image, none can be held out
            cells.append(Cell(column, value, cell_of(ROWS[name], memory=str(m)) if possible else None))
        rows.append(Row(name, tuple(cells)))
    caption = "Average incremental accuracy by the images kept of every class: half of the classes, then 5 steps"
    return Table("table4", "Table 4", caption, tuple(rows))


def table5() -> Table:
    """By the weight α of old classes."""
    metrics = ("final base", "final", "average")
    rows = []
    for name, values in numbers(TABLE5):
        remedy = Meta() if name == META else Balanced(float(name.split()[1]))
        cells = []
        for t, published in ((5, values[:3]), (10, values[3:])):
            for metric, value in zip(metrics, published):
                title = f"CIFAR-100, {t} steps"
                column = Column(f"cifar100-{t}-{metric.replace(' ', '-')}", title, metric, "cifar100")
                cells.append(Cell(column, value, cell_of(ILBaseline(remedy), t), metric))
        rows.append(Row(name, tuple(cells)))
    caption = "IL-Baseline, Balanced, by the weight α of old classes: half of the classes, then 5 or 10 steps, 20 kept"
    return Table("table5", "Table 5", caption, tuple(rows))


def table6() -> Table:
    """The remedies that are losses, which are the paper's, against the others."""
    rows = []
    column = Column("cifar100-5", "CIFAR-100", "5 steps", "cifar100")
    for name, (value,) in numbers(TABLE6):
        remedy = remedy_named("standard" if name == IL else name.lower().replace(" ", "-"))
        rows.append(Row(name, (Cell(column, value, cell_of(ILBaseline(remedy()))),)))
    caption = "IL-Baseline by remedy: average incremental accuracy, half of the classes, then 5 steps, 20 images kept"
    return Table("table6", "Table 6", caption, tuple(rows))


def confusion() -> Table:
    """The figure of confusion matrices."""
    column = Column("cifar100-final", "CIFAR-100", "final", "cifar100")
    published = numbers(CONFUSION)
    rows = [Row(name, (Cell(column, value, cell_of(ROWS[name]), "final"),)) for name, (value,) in published]
    caption = "Final accuracy of the three confusion matrices: half of the classes, then 5 steps, 20 images kept"
    return Table("confusion", "Confusion matrices", caption, tuple(rows), figure=True)


def epsilon() -> Table:
    """The figure of ε, without memory."""
    rows = []
    for name, t, percent in itertools.product(("LUCIR", "PODNet"), (5, 10), EPSILONS):
        # Without memory, ε = 0 is the balanced loss: the same equation, and a run that the tables have anyway.
        method = ROWS[name].with_remedy(Balanced() if percent == "0" else Relaxed(f"{percent}%"))
        here, there = (run_of(method, dataset, "0", steps=t) for dataset in ("cifar100", "imagenet-subset"))
        cells = [*old_and_new(here, DATASETS[here.data.name])]
        if t == 5:  # where what ends an epoch matters most
            cells += old_and_new(cifar(method, t, "0"), "CIFAR-100, joined batches", which="joined-")
        cells += old_and_new(there, DATASETS[there.data.name])
        rows.append(Row(f"{name}, {t} steps, ε {percent}%", tuple(cells)))
    caption = (
        "LUCIR and PODNet without memory, Relaxed, by ε in percent of the images of a class; the columns of joined "
        "batches, which are of 5 steps, have no short batch at the end of an epoch"
    )
    return Table("epsilon", "The figure of ε", caption, tuple(rows), figure=True)
