"""The tables and figures that the paper has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..method import Method
from ..methods import find_remedy
from ..methods.bounds import Joint
from ..methods.il_baseline import ILBaseline
from ..methods.lucir import LUCIR
from ..methods.podnet import PODNet
from ..remedies import Balanced, Meta, Relaxed
from ..runs.settings import Protocol, Run
from .cells import (
    DATASETS,
    IL,
    META,
    ROWS,
    Cell,
    Column,
    Row,
    Table,
    make_cifar_run,
    make_column,
    make_run,
    make_three_cells,
)
from .published import CONFUSION, EPSILONS, TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TEXT, parse_numbers


def build_rows(
    text: str, columns: Mapping[Column, Protocol], find: Callable[[str], Method | None] = ROWS.get, elsewhere: str = ""
) -> tuple[Row, ...]:
    """The rows that the paper prints. Rows without a method are quoted, and cells without a number have no run.

    What is quoted is measured in the table `elsewhere`, but for the reported numbers of methods that have a row here.
    """
    rows = []
    for name, values in parse_numbers(text):
        method, cells = find(name), []
        for (column, protocol), value in zip(columns.items(), values):
            run = None if method is None or value is None else make_run(method, column.dataset, protocol)
            cells.append(Cell(column, value, run))
        measured = elsewhere if method is None and not name.endswith(REPORTED) else ""
        rows.append(Row(name, tuple(cells), quoted=method is None, elsewhere=measured))
    return tuple(rows)


REPORTED = "(reported)"
"""ends the names of rows with the numbers of a method's own paper, beside a row of the same method"""


def name_columns(memory: str, **steps: Sequence[int]) -> dict[Column, Protocol]:
    """Columns of data sets and numbers of steps, after a base step with half of the classes."""
    each = ((dataset.replace("_", "-"), t) for dataset, ts in steps.items() for t in ts)
    return {Column(f"{d}-{t}", DATASETS[d], f"{t} steps", d): Protocol(steps=t, memory=memory) for d, t in each}


KEPT = {"cifar100": (5, 10, 25), "imagenet_subset": (5, 10, 25), "imagenet": (5, 10)}
NONE = {"cifar100": (5, 10), "imagenet_subset": (5, 10), "imagenet": (5, 10)}
"""numbers of steps of tables 1 and 3, with memory and without"""


def name_equal_columns() -> dict[Column, Protocol]:
    """The columns of table 2."""
    protocol = Protocol(base=100, steps=9, memory="total:20000")
    return {make_column(metric, "imagenet", "ImageNet"): protocol for metric in ("average", "average top 5")}


def table1() -> Table:
    """The main table: with memory."""
    columns = name_columns("20", **KEPT)
    caption = "Average incremental accuracy: half of the classes, then 5, 10 or 25 steps; 20 images of every class kept"
    return Table("table1", "Table 1", caption, build_rows(TABLE1, columns, elsewhere="comparators"))


def table2() -> Table:
    """Ten equal steps on ImageNet."""
    caption = "ImageNet in ten steps of 100 classes, 20,000 images kept in all"
    return Table("table2", "Table 2", caption, build_rows(TABLE2, name_equal_columns()))


def table3() -> Table:
    """Without memory."""
    columns = name_columns("0", **NONE)
    caption = "Average incremental accuracy without memory: half of the classes, then 5 or 10 steps"
    return Table("table3", "Table 3", caption, build_rows(TABLE3, columns, elsewhere="comparators"))


def table4() -> Table:
    """By the size of the memory; Meta needs two images, one to hold out."""
    columns = {
        Column(f"cifar100-memory-{m}", "CIFAR-100", f"{m} per class", "cifar100"): Protocol(steps=5, memory=str(m))
        for m in (1, 5, 10, 20, 50)
    }
    caption = "Average incremental accuracy by the images kept of every class: half of the classes, then 5 steps"
    return Table("table4", "Table 4", caption, build_rows(TABLE4, columns))


def table5() -> Table:
    """By the weight α of old classes."""
    columns = {
        make_column(metric, "cifar100", f"CIFAR-100, {t} steps", f"{t}-"): Protocol(steps=t, memory="20")
        for t in (5, 10)
        for metric in ("final base", "final", "average")
    }

    def find(name: str) -> Method:
        return ILBaseline(Meta() if name == META else Balanced(float(name.split()[1])))

    caption = "IL-Baseline, Balanced, by the weight α of old classes: half of the classes, then 5 or 10 steps, 20 kept"
    return Table("table5", "Table 5", caption, build_rows(TABLE5, columns, find))


def table6() -> Table:
    """The paper's remedies, which are losses, against others."""

    def find(name: str) -> Method:
        return ILBaseline(find_remedy("standard" if name == IL else name.lower().replace(" ", "-"))())

    columns = {Column("cifar100-5", "CIFAR-100", "5 steps", "cifar100"): Protocol(steps=5, memory="20")}
    caption = "IL-Baseline by remedy: average incremental accuracy, half of the classes, then 5 steps, 20 images kept"
    return Table("table6", "Table 6", caption, build_rows(TABLE6, columns, find))


def confusion() -> Table:
    """The figure of confusion matrices."""
    columns = {make_column("final", "cifar100", "CIFAR-100"): Protocol(steps=5, memory="20")}
    caption = "Final accuracy of the three confusion matrices: half of the classes, then 5 steps, 20 images kept"
    return Table("confusion", "Confusion matrices", caption, build_rows(CONFUSION, columns), figure=True)


def text() -> Table:
    """What the text says of runs, and no table has."""
    columns = [
        make_column(metric, dataset, DATASETS[dataset])
        for dataset, metrics in (
            ("imagenet-subset", ("base step", "final base", "final new", "final", "average")),
            ("imagenet", ("final", "average")),
        )
        for metric in metrics
    ]
    without, kept, all_kept = (Protocol(steps=5, memory=memory) for memory in ("0", "20", "all"))
    ten = Protocol(base=100, steps=9, memory="total:20000")
    runs = {
        "LUCIR, 5 steps, no memory": make_run(LUCIR(), "imagenet-subset", without),
        "LUCIR, Balanced, 5 steps, no memory": make_run(LUCIR(Balanced()), "imagenet-subset", without),
        "PODNet, Relaxed ε 1%, 5 steps, no memory": make_run(PODNet(Relaxed("1%")), "imagenet-subset", without),
        "PODNet, Balanced, 5 steps, 20 kept": make_run(PODNet(Balanced()), "imagenet", kept),
        "LUCIR, ten equal steps": make_run(LUCIR(), "imagenet", ten),
        "LUCIR, Balanced, ten equal steps": make_run(LUCIR(Balanced()), "imagenet", ten),
        "LUCIR without fine-tuning, ten equal steps": without_finetuning(make_run(LUCIR(), "imagenet", ten)),
    }
    rows = [
        Row(name, tuple(Cell(c, value, runs[name]) for c, value in zip(columns, values) if value is not None))
        for name, values in parse_numbers(TEXT)
    ]
    final = next(column for column in columns if column.id == "imagenet-final")  # it says by how much that is higher
    rows.append(Row("joint training, 5 steps", (Cell(final, None, make_run(Joint(), "imagenet", all_kept)),)))
    caption = "What the paper's text says of runs, and no table has; ten equal steps are those of table 2"
    return Table("text", "Numbers of the text", caption, tuple(rows))


def without_finetuning(run: Run) -> Run:
    """The run of LUCIR or PODNet without fine-tuning."""
    assert isinstance(run.method, LUCIR | PODNet)
    return replace(run, method=replace(run.method, finetune=replace(run.method.finetune, epochs=0)))


def epsilon() -> Table:
    """The figure of ε, without memory."""
    rows = []
    for name, t, percent in itertools.product(("LUCIR", "PODNet"), (5, 10), EPSILONS):
        # Without memory, ε = 0 is the balanced loss: the same equation, and a run that the tables have anyway.
        method = ROWS[name].with_remedy(Balanced() if percent == "0" else Relaxed(f"{percent}%"))
        protocol = Protocol(steps=t, memory="0")
        cells = [*make_three_cells(make_run(method, "cifar100", protocol), DATASETS["cifar100"])]
        if t == 5:  # where what ends an epoch matters most
            cells += make_three_cells(make_cifar_run(method, t, "0"), "CIFAR-100, joined batches", which="joined-")
        cells += make_three_cells(make_run(method, "imagenet-subset", protocol), DATASETS["imagenet-subset"])
        rows.append(Row(f"{name}, {t} steps, ε {percent}%", tuple(cells)))
    caption = (
        "LUCIR and PODNet without memory, Relaxed, by ε in percent of the images of a class; the columns of joined "
        "batches, which are of 5 steps, have no short batch at the end of an epoch"
    )
    return Table("epsilon", "The figure of ε", caption, tuple(rows), figure=True)
