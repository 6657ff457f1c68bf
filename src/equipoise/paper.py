"""The paper's tables and figures as data: each cell is a run and the number that was published for it.

Jodelet, Liu and Murata, "Balanced softmax cross-entropy for incremental learning with and without memory",
Computer Vision and Image Understanding 225, 2022. Their numbers on CIFAR-100 are means of three runs. Rows that they
quote from other papers have no run here: such numbers are shown beside ours, and never mixed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .datasets import SHAPES
from .errors import unknown
from .losses import Balanced, Meta, Relaxed, Standard
from .method import Method
from .methods.il_baseline import ILBaseline
from .methods.lucir import LUCIR
from .methods.ncm import NCM
from .methods.podnet import PODNet
from .methods.slda import SLDA
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

TABLE1 = """
                   CIFAR-100         | ImageNet-Subset   | ImageNet
iCaRL              57.17 52.57     – | 65.04 59.53     – | 51.36 46.72
BiC                59.36 54.20 50.00 | 70.07 64.96 57.73 | 62.65 58.72
LUCIR (reported)   63.42 60.18     – | 70.47 68.09     – | 64.34 61.28
LUCIR w/ Mnemonics 63.34 62.28 60.96 | 72.58 71.37 69.74 | 64.54 63.01
LUCIR w/ DDE       65.27 62.36     – | 72.34 70.20     – | 67.51 65.77
PODNet (reported)  64.83 63.19 60.72 | 75.54 74.33 68.31 | 66.95 64.13
PODNet w/ DDE      65.42 64.12     – | 76.71 75.41     – | 66.42 64.71
TPCIL              65.34 63.58     – | 76.27 74.81     – | 64.89 62.88
IL-Baseline        43.80 37.00 30.57 | 51.52 42.22 30.96 | 43.23 36.70
IL-Baseline, Balanced  62.22 58.32 52.10 | 72.57 68.25 61.49 | 66.45 62.14
IL-Baseline, Meta  64.11 60.08 49.63 | 72.88 69.26 60.70 | 66.15 61.59
LUCIR              63.37 60.88 57.07 | 70.25 67.84 63.23 | 66.69 64.06
LUCIR, Balanced    64.83 62.36 58.38 | 71.18 70.66 65.10 | 67.81 66.47
PODNet             64.46 62.69 60.63 | 74.97 71.57 62.67 | 65.20 62.87
PODNet, Balanced   67.77 66.57 64.64 | 76.08 74.93 69.46 | 69.67 68.65
"""
"""after 5, 10 and 25 steps (ImageNet: 5 and 10); – where the paper has none"""

TABLE2 = """
iCaRL                  – 63.70
EEIL                   – 72.20
BiC                    – 84.00
SS-IL                  65.20 86.70
IL-Baseline            46.65 68.74
IL-Baseline, Balanced  64.15 85.65
IL-Baseline, Meta      63.57 85.43
LUCIR                  60.40 82.31
LUCIR, Balanced        60.75 84.31
PODNet                 62.58 83.50
PODNet, Balanced       64.08 85.71
"""

TABLE3 = """
                   CIFAR-100   | ImageNet-Subset | ImageNet
SPB                60.90 60.40 | 68.70 67.20 | 57.80     –
SPB-I              62.60 62.70 | 70.10 69.80 | 58.00     –
SPB-M              65.50 65.20 | 71.70 70.60 | 59.70     –
DDE                59.11 55.31 | 69.22 65.51 |     –     –
NCM                59.80 59.52 | 65.91 65.71 | 59.92 59.59
SLDA               60.20 60.13 | 67.07 66.84 | 61.69 61.47
LUCIR              43.71 32.08 | 60.70 47.97 | 51.19 39.72
LUCIR, Balanced    54.68 50.87 | 58.63 57.71 | 63.29 62.90
LUCIR, Relaxed     59.43 54.93 | 66.27 65.12 | 67.07 65.07
PODNet             41.85 35.87 | 66.61 55.14 | 47.65 37.22
PODNet, Balanced   63.31 62.39 | 63.94 61.98 | 55.00 54.62
PODNet, Relaxed    65.66 63.82 | 72.56 70.99 | 68.50 67.38
"""

TABLE4 = """
IL-Baseline            24.83 30.59 37.27 43.80 52.99
IL-Baseline, Balanced  51.55 56.93 60.11 62.22 64.44
IL-Baseline, Meta      –     62.13 63.02 64.11 65.60
"""
"""with 1, 5, 10, 20 and 50 images of every class; Meta needs two"""

TABLE5 = """
α 0.1    68.38 51.54 62.68 | 63.43 44.71 57.68
α 0.25   63.99 54.88 64.09 | 60.28 47.86 59.40
α 0.5    58.78 55.44 63.80 | 56.48 49.62 59.52
α 1      52.08 54.55 62.22 | 51.01 49.57 58.32
Meta     61.20 55.21 64.11 | 60.39 49.65 60.08
"""
"""final on base classes, final, average incremental: after 5 steps, then after 10"""

TABLE6 = """
IL-Baseline            43.80
memory oversampling    49.75
class oversampling     55.95
loss rescaling         57.01
balanced finetuning    59.46
separated softmax      61.21
Balanced               62.22
Meta                   64.11
"""

CONFUSION = """
IL-Baseline            31.25
IL-Baseline, Balanced  54.76
IL-Baseline, Meta      55.35
"""
"""final accuracy, in the captions of the confusion matrices"""

EPSILONS = ("0", "0.02", "0.1", "0.2", "0.5", "1", "2", "10", "100")
"""ε in percent of the images of a class; the paper's figure prints no numbers"""


def numbers(text: str) -> Iterator[tuple[str, list[float | None]]]:
    """The rows of a text above: a name and its numbers. A headline, which has none, is left out."""
    for line in text.replace("|", " ").strip().splitlines():
        words = line.split()
        values = [w for w in words if w == "–" or _is_number(w)]
        name = " ".join(words[: len(words) - len(values)])
        if values:
            yield name, [None if w == "–" else float(w) for w in values]


def _is_number(word: str) -> bool:
    return word.count(".") == 1 and len(word) == 5 and word.replace(".", "").isdigit()


def cifar(method: Method, steps: int = 5, memory: str = "20") -> Run:
    """The protocol of most of the paper: CIFAR-100, half of its classes first."""
    return Run(method, "cifar100", steps=steps, memory=memory)


def by_steps(text: str, steps: Mapping[str, Sequence[int]], memory: str) -> tuple[Row, ...]:
    """A table whose columns are data sets and numbers of steps, after a base step with half of the classes."""
    columns = [Column(f"{d}-{t}", DATASETS[d], f"{t} steps", d) for d, ts in steps.items() for t in ts]

    rows = []
    for name, values in numbers(text):
        method = ROWS.get(name)
        cells = []
        for column, value in zip(columns, values):
            t = int(column.title.split()[0])
            run = None if method is None else Run(method, column.dataset, steps=t, memory=memory)
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
        if isinstance(method, LUCIR) and isinstance(method.loss, Standard):
            method = replace(method, finetune=True)  # the original does so on the whole of ImageNet
        run = None if method is None else Run(method, "imagenet", base=100, increment=100, memory="total:20000")
        cells = tuple(Cell(c, v, run, c.title) for c, v in zip(columns, values))
        rows.append(Row(name, cells, quoted=method is None))
    caption = "ImageNet in ten steps of 100 classes, 20,000 images kept in all"
    return Table("table2", "Table 2", caption, tuple(rows))


def table3() -> Table:
    """Without memory."""
    steps = {"cifar100": (5, 10), "imagenet-subset": (5, 10), "imagenet": (5, 10)}
    caption = (
        "Average incremental accuracy without memory: half of the classes, then 5 or 10 steps; "
        "in 5 steps on CIFAR-100, LUCIR and PODNet depend on what ends an epoch (in the report: The last batch)"
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
    for dataset, steps in (("cifar100", (5, 10)), ("imagenet-subset", (5, 10))):
        for name in ("LUCIR", "PODNet"):
            for t in steps:
                for percent in EPSILONS:
                    # Without memory, ε = 0 is the balanced loss: the same equation, and a run that is wanted anyway.
                    loss = Balanced() if percent == "0" else Relaxed(f"{percent}%")
                    run = Run(replace(ROWS[name], loss=loss), dataset, steps=t, memory="0")
                    cells = []
                    for metric in ("average", "final base", "final new"):
                        column = Column(f"{dataset}-{metric.replace(' ', '-')}", DATASETS[dataset], metric, dataset)
                        cells.append(Cell(column, None, run, metric))
                    rows.append(Row(f"{name}, {t} steps, ε {percent}%", tuple(cells)))
    caption = "LUCIR and PODNet without memory, Relaxed, by ε in percent of the images of a class"
    return Table("epsilon", "The figure of ε", caption, tuple(rows), figure=True)


def batches() -> Table:
    """What ends an epoch: not in the paper, but why rows of its table without memory are off in 5 steps."""
    published = dict(numbers(TABLE3))
    rows = []
    for name in ROWS:
        if not name.startswith(("LUCIR", "PODNet")):
            continue
        usual = cifar(ROWS[name], memory="0")
        short = replace(usual, recipe=replace(ROWS[name].recipe(SHAPES["cifar100"]), last="short"))
        cells = []
        for last, run in (("joined", usual), ("short", short)):
            column = Column(f"cifar100-{last}", "CIFAR-100, 5 steps", last, "cifar100")
            cells.append(Cell(column, published[name][0], run))
        rows.append(Row(name, tuple(cells)))
    caption = (
        "Without memory, by what becomes of the images at the end of an epoch that fill no batch (8 of 5,000 on "
        "CIFAR-100): joined with the next epoch's, or a short batch, as in the originals' loops, whose statistics "
        "batch norms learn"
    )
    return Table("batches", "The last batch", caption, tuple(rows))


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
    make.__name__: make for make in (table1, table2, table3, table4, table5, table6, confusion, epsilon, batches, costs)
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
