"""The rows that tables 1, 2 and 3 quote, on ImageNet and its subset, each with a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..data.folders import NAMES
from ..method import Method
from ..methods.bic import BiC
from ..methods.dde import DDE
from ..methods.eeil import EEIL
from ..methods.icarl import ICaRL
from ..methods.lucir import LUCIR
from ..methods.mnemonics import Mnemonics
from ..methods.podnet import PODNet
from ..methods.spb import SPB
from ..methods.spb_i import SPBI
from ..methods.spb_m import SPBM
from ..methods.ss_il import SSIL
from ..methods.tpcil import TPCIL
from .cells import Cell, Row, Table
from .published import TABLE1, TABLE2, TABLE3
from .tables import KEPT, NONE, build_rows, name_columns, name_equal_columns

JOINED = (BiC, SSIL)
"""methods whose authors' code ends no epoch with a short batch"""


def quoted() -> Table:
    """The systems that the paper quotes, with the settings of their authors on ImageNet."""
    learned = Mnemonics(host=LUCIR(), mode="paper")
    kept: dict[str, Method] = {
        "iCaRL": ICaRL(), "BiC": BiC(), "LUCIR w/ Mnemonics": learned, "LUCIR w/ DDE": DDE(),
        "PODNet w/ DDE": DDE(host=PODNet()), "TPCIL": TPCIL(),
    }  # fmt: skip
    equal: dict[str, Method] = {"iCaRL": ICaRL(), "EEIL": EEIL(), "BiC": BiC(), "SS-IL": SSIL()}
    none: dict[str, Method] = {"SPB": SPB(), "SPB-I": SPBI(), "SPB-M": SPBM(), "DDE": DDE()}
    rows = (
        *choose_rows(build_rows(TABLE1, name_columns("20", **KEPT), kept.get)),
        *choose_rows(build_rows(TABLE3, name_columns("0", **NONE), none.get), ", no memory"),
        *choose_rows(build_rows(TABLE2, name_equal_columns(), equal.get), ", ten equal steps"),
    )
    caption = (
        "What tables 1, 2 and 3 quote of other papers, on ImageNet and its subset: average incremental accuracy, half "
        "of the classes first, 20 images of every class kept; without memory where a row says so, or in ten steps of "
        "100 classes with 20,000 images kept in all. Settings are those of the authors on ImageNet. Numbers on the "
        "subset may be of either of its definitions. LUCIR w/ Mnemonics is reconstructed, and not offered on the whole "
        "of ImageNet, whose images do not fit a GPU"
    )
    return Table("quoted", "The quoted systems on ImageNet", caption, rows).map(choose_cell)


def choose_rows(rows: Sequence[Row], which: str = "") -> list[Row]:
    """The rows that have a method, under names that say what they are of."""
    return [replace(row, name=f"{row.name}{which}") for row in rows if not row.quoted]


def choose_cell(cell: Cell) -> Cell | None:
    """A cell on ImageNet or its subset; without a run where a method cannot learn from images on the disk."""
    if cell.column.dataset not in NAMES:
        return None
    run = cell.run
    if run is not None and run.recipe is not None and isinstance(run.method, JOINED):
        run = replace(run, recipe=replace(run.recipe, last="joined"))
    if run is not None and run.data.name == "imagenet" and isinstance(run.method, Mnemonics):
        run = None
    return replace(cell, run=run)
