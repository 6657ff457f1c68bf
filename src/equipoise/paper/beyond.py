"""Tables that are not in the paper: what its numbers depend on, their bounds and their costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..method import Method
from ..methods.bounds import FineTuning, Joint
from ..methods.il_baseline import ILBaseline
from ..methods.lucir import LUCIR
from ..methods.podnet import PODNet
from ..remedies import Balanced, BalancedFinetuning, Meta, Relaxed, SeparatedSoftmax
from ..runs.settings import Protocol
from .cells import (
    BALANCED,
    DATASETS,
    IL,
    META,
    RELAXED,
    ROWS,
    Cell,
    Column,
    Row,
    Table,
    make_cifar_run,
    make_column,
    make_run,
    make_three_cells,
    with_short_batches,
)
from .published import TABLE1, TABLE3, TABLE6, parse_numbers


def list_trained_rows(text: str) -> Iterator[tuple[str, Method, list[float | None]]]:
    """The authors' own rows of a table, with their methods and numbers, but those that train in the base step only."""
    for name, values in parse_numbers(text):
        if name in ROWS and name not in ("NCM", "SLDA"):
            yield name, ROWS[name], values


def batches() -> Table:
    """The effect of a short last batch, on which the paper's numbers depend."""
    rows = []
    for text, memory, steps, kept in ((TABLE1, "20", (5, 10, 25), "20 kept"), (TABLE3, "0", (5, 10), "no memory")):
        for name, method, values in list_trained_rows(text):
            cells = []
            for t, value in zip(steps, values):
                joined = make_cifar_run(method, t, memory)
                for last, run in (("joined", joined), ("short", with_short_batches(joined))):
                    column = Column(f"cifar100-{t}-{last}", f"CIFAR-100, {t} steps", last, "cifar100")
                    cells.append(Cell(column, value, run))
            rows.append(Row(f"{name}, {kept}", tuple(cells)))
    caption = (
        "What becomes of the images at the end of an epoch that fill no batch: joined with the next epoch's, as by "
        "default, or a short batch, as in the originals' loops and in all of the paper's own cells, whose statistics "
        "batch norms learn right before they are used. On CIFAR-100 without memory it has 8 images in 5 steps, and 68 "
        "in 10; with memory another number in every step, from none to 120"
    )
    return Table("batches", "What the last batch costs", caption, tuple(rows))


def separated() -> Table:
    """Variants of the separated softmax, of which the paper says little."""
    one_mean, as_there = SeparatedSoftmax(mean="all"), SeparatedSoftmax(share=0.2, mean="all")
    readings = {
        "a mean of old and one of new images": ILBaseline(SeparatedSoftmax()),
        "one mean of all images": ILBaseline(one_mean),
        "two means, a fifth old images": ILBaseline(SeparatedSoftmax(share=0.2)),
        "one mean, a fifth old images": ILBaseline(as_there),
        "one mean, both losses with weight 1": ILBaseline(one_mean, weights="ones"),
        "all of it as in SS-IL": ILBaseline(as_there, weights="ones", distil="by-step"),
    }
    (published,) = dict(parse_numbers(TABLE6))["separated softmax"]
    rows = [
        Row(name, make_three_cells(make_cifar_run(m), "CIFAR-100, 5 steps", published)) for name, m in readings.items()
    ]
    caption = (
        "IL-Baseline with a separated softmax, as the row of table 6 is (first) and by other readings: what its mean "
        "is over, how much of an epoch is old images (half, unless said), and what it and the distillation weigh; all "
        "with joined batches"
    )
    return Table("separated", "The separated softmax", caption, tuple(rows))


def anytime() -> Table:
    """Accuracy while a step is trained, with a fine-tuning at its end and without."""
    rows = {
        "PODNet": PODNet(),
        f"PODNet, {BALANCED}": PODNet(Balanced()),
        f"{IL}, balanced finetuning": ILBaseline(BalancedFinetuning()),
        f"{IL}, {BALANCED}": ILBaseline(Balanced()),
    }
    columns = [
        make_column(metric, "cifar100", "CIFAR-100, 5 steps")
        for metric in ("within steps", "training ends", "after steps")
    ]
    made = []
    for name, method in rows.items():
        run = make_run(method, "cifar100", Protocol(steps=5, memory="20"))
        made.append(Row(name, tuple(Cell(column, None, run) for column in columns)))
    caption = (
        "Accuracy on all classes so far, means over the steps after the base step: within steps every ten epochs of "
        "the training, when it ends, and after the step. The first and the third row are fine-tuned between the last "
        "two. 20 images of every class kept; measured on test images, by which nothing is chosen"
    )
    return Table("anytime", "Inference at any time", caption, tuple(made), look=10)


def schedules() -> Table:
    """α and ε that change in the course of a step, beside constants: the default, and about the mean of the ends."""
    alphas = {"α 1": "1", "α 0.5": "0.5"} | name_ramps("α", "0.1", "1")
    rows = []
    for words, alpha in alphas.items():
        run = make_run(ILBaseline(Balanced(alpha)), "cifar100", Protocol(steps=5, memory="20"))
        rows.append(Row(f"{IL}, {BALANCED} {words}", make_three_cells(run, "CIFAR-100, 5 steps")))
    epsilons = {"ε 0.2%": "0.2%", "ε 1%": "1%"} | name_ramps("ε", "0.02%", "2%")
    for method, (words, epsilon) in itertools.product((LUCIR(), PODNet()), epsilons.items()):
        run = make_run(method.with_remedy(Relaxed(epsilon)), "cifar100", Protocol(steps=5, memory="0"))
        rows.append(Row(f"{method.title}, {RELAXED} {words}", make_three_cells(run, "CIFAR-100, 5 steps")))
    caption = (
        "α and ε that go from one number in the first epoch of every step to another in its last, linearly or as half "
        "a cosine, beside constants: half of the classes, then 5 steps; 20 images of a class kept with α, none with ε"
    )
    return Table("schedules", "α and ε that change", caption, tuple(rows))


def name_ramps(letter: str, low: str, high: str) -> dict[str, str]:
    """Both ways between two numbers, linearly and as half a cosine, by how they are called."""
    ways = itertools.product(((low, high), (high, low)), (("", ""), (":cosine", ", cosine")))
    return {f"{letter} {a} to {b}{words}": f"{a}:{b}{shape}" for (a, b), (shape, words) in ways}


def tails() -> Table:
    """Long-tailed new classes, which the paper leaves to future work."""
    rows = []
    for name in (IL, "LUCIR", "PODNet"):
        for row in (name, f"{name}, {BALANCED}"):
            run = make_run(ROWS[row], "cifar100", Protocol(steps=5, memory="20"))
            cells: tuple[Cell, ...] = ()
            for x in (10.0, 100.0):
                tailed = replace(run, data=replace(run.data, imbalance=x))
                cells += make_three_cells(tailed, f"CIFAR-100, imbalance {x:g}", which=f"{x:g}-")
            rows.append(Row(row, cells))
    caption = (
        "The ten classes of each later step have exponentially fewer training images in the order in which they are "
        "learned, from 500 down to 50 (imbalance 10) or 5 (100); half of the classes first, then 5 steps, at most 20 "
        "images kept of every class. Balanced weighs every class by its true count; all have 100 test images"
    )
    return Table("tails", "Long-tailed new classes", caption, tuple(rows))


def orders() -> Table:
    """Other orders of the classes, for the authors' own rows of table 1."""
    rows = []
    for name in (name for name, _ in parse_numbers(TABLE1) if name in ROWS):
        cells = []
        for order in ORDERS:
            protocol = Protocol(steps=5, order=order, memory="20")
            column = Column(f"cifar100-order-{order}", "CIFAR-100, order of the classes", order, "cifar100")
            cells.append(Cell(column, None, make_run(ROWS[name], "cifar100", protocol)))
        rows.append(Row(name, tuple(cells)))
    caption = (
        "Average incremental accuracy by the order of the classes, which a NumPy seed draws: half of them, then 5 "
        "steps; 20 images of every class kept. 1993 is the order of the paper's cells; the last column has mean and "
        "deviation over the orders. Nothing was chosen on the other four"
    )
    return Table("orders", "Five class orders", caption, tuple(rows), mean="mean of the orders")


ORDERS = ("1993", "1", "2", "3", "4")
"""of the table above; seed 0 is the order on which settings are chosen"""


def choice() -> Table:
    """The learning rate of Meta's α, chosen on training images that are set aside."""
    published = dict(parse_numbers(TABLE1))[f"{IL}, {META}"]
    rows = []
    for rate in (1.0, 3.0, 10.0, 30.0):
        method, cells = ILBaseline(Meta(alpha_lr=rate)), []
        for t in (5, 25):
            aside = make_run(method, "cifar100", Protocol(steps=t, order="0", memory="20"))
            column = Column(f"cifar100-{t}-aside", "CIFAR-100, set aside", f"{t} steps", "cifar100")
            cells.append(Cell(column, None, replace(aside, data=replace(aside.data, validation=0.1))))
        if rate in (1.0, Meta().alpha_lr):
            column = Column("cifar100-25-test", "CIFAR-100, test images", "25 steps", "cifar100")
            cells.append(Cell(column, published[2], make_run(method, "cifar100", Protocol(steps=25, memory="20"))))
        rows.append(Row(f"rate {rate:g}" + (", as printed" if rate == 1 else ""), tuple(cells)))
    caption = (
        "IL-Baseline, Meta, by the learning rate of α, which the paper does not print, so that it reads as 1: average "
        "incremental accuracy, half of the classes first, 20 images of every class kept. The rate is chosen by the "
        "columns set aside: another order of the classes (seed 0), measured on a tenth of the training images, which "
        "are not trained on. The column of test images shows what the choice means there, and decides nothing"
    )
    return Table("choice", "The choice of Meta's rate", caption, tuple(rows))


def mini_imagenet() -> Table:
    """The paper's rows on a small set of real photographs, beside its numbers on ImageNet-Subset."""
    dataset, rows = "mini-imagenet", []
    # A column of the table's own data set, so that it is shown beside the measured ones whatever is chosen.
    published = Column("paper-on-subset", DATASETS["imagenet-subset"], "average, the paper", dataset)
    for text, place, memory, kept in ((TABLE1, 3, "20", "20 kept"), (TABLE3, 2, "0", "no memory")):
        for name, method, values in list_trained_rows(text):
            run = make_run(method, dataset, Protocol(steps=5, memory=memory))
            cells = make_three_cells(run, DATASETS[dataset])
            rows.append(Row(f"{name}, {kept}", (*cells, Cell(published, values[place], None))))
    caption = (
        "100 classes of ImageNet, 200 photographs of 84 pixels of each for training and 50 for testing; "
        "half of the classes, then 5 steps; 20 images of every class kept, or none. Nets, recipes and weights are "
        "those for ImageNet-Subset, with boxes of a random size and shape (0.08 to 1 of a photograph) resized to 84 "
        "pixels for training, and whole photographs for testing. Beside it is what the paper has for ImageNet-Subset "
        "in 5 steps, whose 1,300 images a class are of 224 pixels: compare which row is above which, not the numbers"
    )
    return Table(dataset, DATASETS[dataset], caption, tuple(rows))


def bounds() -> Table:
    """Lower and upper bounds on accuracy, which the paper does not print."""
    runs = {
        "fine-tuning, no memory": make_run(FineTuning(), "cifar100", Protocol(steps=5, memory="0")),
        "fine-tuning, 20 kept": make_run(FineTuning(), "cifar100", Protocol(steps=5, memory="20")),
        "joint training": make_run(Joint(), "cifar100", Protocol(steps=5, memory="all")),
    }
    rows = [Row(name, make_three_cells(run, "CIFAR-100, 5 steps")) for name, run in runs.items()]
    caption = (
        "The two bounds, with the net and the recipe of IL-Baseline: plain fine-tuning, and a new net in each step "
        "that is trained on all images of all classes so far"
    )
    return Table("bounds", "Bounds", caption, tuple(rows))


def costs() -> Table:
    """The costs of a loss; the paper says that Balanced is free, Meta is expensive, and fine-tuning is not needed."""
    # The learning rate of α does not change what a run costs; in so short a run, a small one is enough.
    rows = {
        IL: ILBaseline(),
        f"{IL}, {BALANCED}": ILBaseline(Balanced()),
        f"{IL}, {META}": ILBaseline(Meta(alpha_lr=1.0)),
        f"{IL}, balanced finetuning": ILBaseline(BalancedFinetuning()),
        f"LUCIR, {BALANCED}": LUCIR(Balanced()),
        "LUCIR with finetuning": LUCIR(finetune=replace(LUCIR().finetune, epochs=20)),
        "PODNet": PODNet(),
        f"PODNet, {BALANCED}": PODNet(Balanced()),
    }
    made = []
    column = Column("cifar100-cost", "CIFAR-100", "average", "cifar100")
    for name, method in rows.items():
        run = make_cifar_run(method)
        recipe = replace(run.default_recipe, epochs=8 if name.startswith(IL) else 4)
        made.append(Row(name, (Cell(column, None, replace(run, recipe=recipe)),)))
    caption = "Training seconds of the steps after the base step, and peak memory: one run at a time, nothing reused"
    return Table("costs", "What a loss costs", caption, tuple(made), alone=True)
