"""The systems that the paper compares with, each measured in the setting of its published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..method import Method
from ..methods.bic import BiC
from ..methods.dde import DDE
from ..methods.eeil import EEIL
from ..methods.geodl import GeoDL
from ..methods.icarl import ICaRL
from ..methods.lucir import LUCIR
from ..methods.lwf import LwF
from ..methods.mnemonics import Mnemonics
from ..methods.podnet import PODNet
from ..methods.spb import SPB
from ..methods.spb_i import SPBI
from ..methods.spb_m import SPBM
from ..methods.ss_il import SSIL
from ..methods.tpcil import TPCIL
from ..remedies import Balanced
from ..runs.settings import Protocol
from .cells import BALANCED, DATASETS, THE_PAPER, Cell, Column, Row, Table, make_cifar_run, make_run
from .published import GEODL, MNEMONICS, SPB_ABLATION, TABLE1, TABLE3, parse_numbers

Numbers = Mapping[int, float | None]
"""the published number of each number of steps; None for a run that has none"""

WITH_MEMORY, WITHOUT, ONCE = (5, 10, 25), (5, 10), (5,)
"""numbers of steps, as the columns of a text of published numbers have them"""


def comparators() -> Table:
    """All rows: those with memory first."""
    kept, none = read_numbers(TABLE1, WITH_MEMORY), read_numbers(TABLE3, WITHOUT)
    geodl, ablation = read_numbers(GEODL, WITH_MEMORY)["GeoDL"], read_numbers(SPB_ABLATION, ONCE)
    dde, dde_podnet, learned = DDE(), DDE(host=PODNet()), Mnemonics(host=LUCIR(), mode="paper")
    rows = [
        compare("iCaRL", ICaRL(), kept["iCaRL"]),
        compare("EEIL", EEIL(), dict.fromkeys((5, 10))),
        compare("BiC", BiC(), kept["BiC"], last="joined"),
        compare("SS-IL", SSIL(), dict.fromkeys((5, 10)), last="joined"),
        *compare_balanced("LUCIR w/ DDE", dde, kept["LUCIR w/ DDE"]),
        compare(f"LUCIR w/ DDE, {PODNET_ORDER}", dde, kept["LUCIR w/ DDE"], source=PERHAPS, order="podnet"),
        *compare_balanced("PODNet w/ DDE", dde_podnet, kept["PODNet w/ DDE"]),
        compare("TPCIL", TPCIL(), kept["TPCIL"]),
        *compare_balanced("LUCIR w/ GeoDL", GeoDL(), geodl, source="GeoDL's paper"),
        *compare_balanced("LUCIR w/ Mnemonics", learned, kept["LUCIR w/ Mnemonics"]),
    ]
    for memory, words in (("total:2000", "2,000 in all"), ("20", "20 kept")):
        rows += compare_released(memory, words)
    rows += [
        compare("LUCIR w/ DDE, no memory", dde, none["DDE"], "0"),
        compare("SPB", SPB(), none["SPB"], "0"),
        compare("SPB without its weights", SPB(weights="ones"), ablation["SPB"], "0", source="SPB's paper"),
        compare("SPB-I", SPBI(), none["SPB-I"], "0"),
        compare("SPB-M", SPBM(), none["SPB-M"], "0"),
    ]
    return Table("comparators", "The comparators, measured", CAPTION, tuple(rows))


PODNET_ORDER, PERHAPS = "order of PODNet", "perhaps the paper's"
"""words for the order of the classes in DDE's released script, and for numbers that may be of it"""
CAPTION = (
    "Average incremental accuracy of what tables 1 and 3 quote, and of EEIL and SS-IL: half of the classes, then 5, 10 "
    "or 25 steps; 20 images of every class kept, 2,000 in all where a row says so, or none. Published numbers are "
    "those that the paper quotes, but for GeoDL and SPB without its weights (their own papers) and for LwF and iCaRL "
    "as hosts, without and with Mnemonics (the README of its code, which does not say which memory they are of; its "
    "commands keep 2,000 in all, rounded up for each class, where ours are rounded down: at most one image of a class "
    "less). The script that DDE's authors released for CIFAR-100, around LUCIR, learns the classes in the first of "
    "PODNet's orders, not in that of seed 1993 as all other rows: its numbers may be of that order, in which it is "
    "measured too. LUCIR w/ Mnemonics is the scheme of its paper, reconstructed, and the hosts with "
    "Mnemonics are the released code. Settings are the defaults of equipoise run, but every epoch ends with a short "
    "batch, as in the originals' loops. Epochs of BiC are joined and those of SS-IL leave out what fills no batch, "
    "both as in their authors' code, but for the base step of SS-IL, which is joined"
)


def read_numbers(text: str, steps: tuple[int, ...]) -> dict[str, Numbers]:
    """The published numbers of each row, by steps; those that are not published are left out."""
    columns = ((name, zip(steps, values)) for name, values in parse_numbers(text))
    return {name: {t: value for t, value in cells if value is not None} for name, cells in columns}


def compare(
    name: str,
    method: Method,
    numbers: Numbers,
    memory: str = "20",
    last: str = "short",
    source: str = THE_PAPER,
    order: str = "1993",
) -> Row:
    """The row of a method: a run for each number of steps."""
    which, words = ("-none", "no memory") if memory == "0" else ("", "with memory")
    cells = []
    for t, number in numbers.items():
        column = Column(f"cifar100-{t}{which}", f"{DATASETS['cifar100']}, {words}", f"{t} steps", "cifar100")
        protocol = Protocol(steps=t, memory=memory, order=order)
        run = make_run(method, "cifar100", protocol) if last == "short" else make_cifar_run(method, t, memory)
        cells.append(Cell(column, number, run, source))
    return Row(name, tuple(cells))


def compare_balanced(name: str, method: Method, numbers: Numbers, source: str = THE_PAPER) -> tuple[Row, Row]:
    """The row of a method, and one with Balanced in 5 and 10 steps, of which nothing is published."""
    new = compare(f"{name}, {BALANCED}", method.with_remedy(Balanced()), dict.fromkeys((5, 10)))
    return compare(name, method, numbers, source=source), new


def compare_released(memory: str, words: str) -> list[Row]:
    """The rows of Mnemonics' released code: each host without it and with it."""
    readme, rows = read_numbers(MNEMONICS, WITH_MEMORY), []
    for host in (LwF(), ICaRL()):
        for name, method in ((host.title, host), (f"{host.title} w/ Mnemonics", Mnemonics(host=host))):
            shown = f"{name} as host" if method is host else name
            rows.append(compare(f"{shown}, {words}", method, readme[name], memory, source="Mnemonics' README"))
    return rows


def unprinted() -> Table:
    """What the publications of the comparators leave open, chosen on training images that are set aside."""
    methods: dict[str, tuple[Method, str]] = {
        "SPB, softmax over new classes": (SPB(), "0"),
        "SPB, softmax over all classes": (SPB(classes="all"), "0"),
        "TPCIL, herded vertices": (TPCIL(), "20"),
        "TPCIL, Hebbian vertices": (TPCIL(vertices="hebbian"), "20"),
        "LUCIR w/ GeoDL, λ 5, as LUCIR": (GeoDL(), "20"),
        "LUCIR w/ GeoDL, λ 10, as for ImageNet": (GeoDL(lambda_base=10.0), "20"),
    }
    rows, column = [], Column("cifar100-5-aside", "CIFAR-100, set aside", "5 steps", "cifar100")
    for name, (method, memory) in methods.items():
        run = make_run(method, "cifar100", Protocol(steps=5, order="0", memory=memory))
        rows.append(Row(name, (Cell(column, None, replace(run, data=replace(run.data, validation=0.1))),)))
    caption = (
        "What the publications of three comparators leave open, each way: average incremental accuracy, half of the "
        "classes first, then 5 steps; 20 images of every class kept, or none for SPB. All of it is set aside: another "
        "order of the classes (seed 0), measured on a tenth of the training images, which are not trained on"
    )
    return Table("unprinted", "What is not printed of comparators", caption, tuple(rows))
