"""The systems that the paper only quotes: their numbers, their runs, and what such a run costs."""

from __future__ import annotations

import re

import pytest

from equipoise import Balanced, methods, paper
from equipoise.data.datasets import COUNTS, SHAPES
from equipoise.engine.stand_ins import has_kernels
from equipoise.method import COMPILED, EAGER
from equipoise.methods.dde import DDE
from equipoise.methods.eeil import EEIL
from equipoise.methods.geodl import GeoDL
from equipoise.methods.mnemonics import Mnemonics
from equipoise.methods.spb import SPB
from equipoise.methods.spb_i import SPBI
from equipoise.methods.spb_m import SPBM
from equipoise.methods.tpcil import TPCIL
from equipoise.paper.cells import THE_PAPER
from equipoise.paper.match import NONE, fill, list_runs
from equipoise.report import grid
from equipoise.report.collect import collect_cell, collect_table
from equipoise.report.page import describe_cell, render_paper_table
from equipoise.report.tables import make_grid
from equipoise.runs import estimate
from equipoise.runs.command import write_command

TABLE = paper.make_table("comparators")
ROWS = {row.name: row for row in TABLE.rows}
KEPT, ALONE = ("cifar100-5", "cifar100-10", "cifar100-25"), ("cifar100-5-none", "cifar100-10-none")
LWF, LWF_WITH = (52.44, 48.47, 45.75), (54.21, 52.72, 51.59)
ICARL, ICARL_WITH = (58.03, 53.01, 48.47), (60.01, 57.37, 54.13)


@pytest.mark.parametrize(
    ("name", "columns", "numbers", "source"),
    [
        ("iCaRL", KEPT, (57.17, 52.57), THE_PAPER),
        ("EEIL", KEPT, (None, None), THE_PAPER),
        ("BiC", KEPT, (59.36, 54.20, 50.00), THE_PAPER),
        ("SS-IL", KEPT, (None, None), THE_PAPER),
        ("LUCIR w/ DDE", KEPT, (65.27, 62.36), THE_PAPER),
        ("LUCIR w/ DDE, Balanced", KEPT, (None, None), THE_PAPER),
        ("LUCIR w/ DDE, order of PODNet", KEPT, (65.27, 62.36), "perhaps the paper's"),
        ("PODNet w/ DDE", KEPT, (65.42, 64.12), THE_PAPER),
        ("PODNet w/ DDE, Balanced", KEPT, (None, None), THE_PAPER),
        ("TPCIL", KEPT, (65.34, 63.58), THE_PAPER),
        ("LUCIR w/ GeoDL", KEPT, (65.14, 65.03, 63.12), "GeoDL's paper"),
        ("LUCIR w/ GeoDL, Balanced", KEPT, (None, None), THE_PAPER),
        ("LUCIR w/ Mnemonics", KEPT, (63.34, 62.28, 60.96), THE_PAPER),
        ("LUCIR w/ Mnemonics, Balanced", KEPT, (None, None), THE_PAPER),
        ("LwF as host, 2,000 in all", KEPT, LWF, "Mnemonics' README"),
        ("LwF w/ Mnemonics, 2,000 in all", KEPT, LWF_WITH, "Mnemonics' README"),
        ("iCaRL as host, 2,000 in all", KEPT, ICARL, "Mnemonics' README"),
        ("iCaRL w/ Mnemonics, 2,000 in all", KEPT, ICARL_WITH, "Mnemonics' README"),
        ("LwF as host, 20 kept", KEPT, LWF, "Mnemonics' README"),
        ("LwF w/ Mnemonics, 20 kept", KEPT, LWF_WITH, "Mnemonics' README"),
        ("iCaRL as host, 20 kept", KEPT, ICARL, "Mnemonics' README"),
        ("iCaRL w/ Mnemonics, 20 kept", KEPT, ICARL_WITH, "Mnemonics' README"),
        ("LUCIR w/ DDE, no memory", ALONE, (59.11, 55.31), THE_PAPER),
        ("SPB", ALONE, (60.9, 60.4), THE_PAPER),
        ("SPB without its weights", ALONE, (36.4,), "SPB's paper"),
        ("SPB-I", ALONE, (62.6, 62.7), THE_PAPER),
        ("SPB-M", ALONE, (65.5, 65.2), THE_PAPER),
    ],
)
def test_a_row_has_the_published_numbers(
    name: str, columns: tuple[str, ...], numbers: tuple[float | None, ...], source: str
) -> None:
    cells = ROWS[name].cells
    assert [(c.column.id, c.paper, c.source) for c in cells] == [(at, n, source) for at, n in zip(columns, numbers)]
    for cell in cells:
        assert cell.run is not None and cell.run.protocol.steps == int(cell.column.id.split("-")[1])
        memory = "0" if columns == ALONE else "total:2000" if "2,000 in all" in name else "20"
        assert cell.run.protocol.memory == memory
        assert cell.run.protocol.order == ("podnet" if "order of" in name else "1993")
        assert (cell.run.method.remedy == Balanced()) == name.endswith("Balanced")


def test_these_are_all_rows_and_their_columns_lie_side_by_side() -> None:
    assert len(ROWS) == len(TABLE.rows) == 27
    assert [column.id for column in TABLE.columns] == [*KEPT, *ALONE]


OTHERWISE = {"LUCIR w/ Mnemonics": "--mode paper", "SPB without its weights": "--weights ones"}
"""what the commands of some rows set besides"""


@pytest.mark.parametrize("name", ROWS)
def test_a_run_is_that_of_the_defaults_but_for_the_end_of_an_epoch(name: str) -> None:
    last = "" if name in ("BiC", "SS-IL") else "--last short"
    for cell in ROWS[name].cells:
        assert cell.run is not None
        command = write_command(cell.run)
        said = re.sub(r"--(host|remedy|dataset|steps|memory|order|seed) \S+ ?", "", command).split()[3:]
        assert " ".join(said) == f"{OTHERWISE.get(name.removesuffix(', Balanced'), '')} {last}".strip(), command


def test_what_tables_1_and_3_quote_is_measured_here() -> None:
    found = set()
    for id in ("table1", "table3"):
        for row in paper.make_table(id).rows:
            assert row.elsewhere == ("comparators" if row.quoted and "(reported)" not in row.name else "")
            if row.elsewhere:
                quoted = [c.paper for c in row.cells if c.column.dataset == "cifar100" and c.paper is not None]
                same = next(name for name, own in ROWS.items() if [c.paper for c in own.cells] == quoted)
                found.add(same)
    assert {row.name for row in TABLE.rows if row.cells[0].paper and row.cells[0].source == THE_PAPER} == found
    assert not any(row.elsewhere for row in paper.make_table("table2").rows), "nothing here is of ImageNet"


def test_quoted_rows_lead_to_the_table_that_measures_them() -> None:
    table = paper.make_table("table1")
    filled = fill(table, NONE)
    words = "What is quoted is measured, on CIFAR-100, in the table comparators."
    assert words in make_grid(table, filled).caption
    assert words not in make_grid(table, [row for row in filled if not row.row.quoted]).caption
    page = str(render_paper_table(collect_table(table, filled), {}))
    assert words in page and page.count('href="#table-comparators"') == 6


def test_a_number_is_shown_with_its_source() -> None:
    filled = fill(TABLE, NONE)
    cells = {row.row.name: row.cells[0] for row in filled}
    for name, words in (
        ("iCaRL", "paper 57.17"),
        ("LUCIR w/ GeoDL", "GeoDL's paper 65.14"),
        ("LwF as host, 20 kept", "Mnemonics' README 52.44"),
    ):
        assert describe_cell(collect_cell(cells[name])) == f"not measured; {words}"
    head, *lines = make_grid(TABLE, filled).numbers
    sources = {(line[head.index("row")], line[head.index("source")]) for line in lines}
    assert {("EEIL", ""), ("SPB", "the paper"), ("LUCIR w/ GeoDL", "GeoDL's paper")} <= sources
    shown = grid.render_markdown(make_grid(TABLE, filled))
    assert "| EEIL | – | – |  |  |  |" in shown, "a cell that nobody asks for is empty"


def test_a_total_is_rehearsed_with_as_many_images_of_each_class() -> None:
    small = {row.name: row.cells[0].run for row in paper.rehearse_on_digits(TABLE).rows}
    assert small.keys() == ROWS.keys()
    run = small["LUCIR w/ DDE, order of PODNet"]
    assert run is not None and run.protocol.order == "natural", "digits are ten"
    run = small["LwF as host, 2,000 in all"]
    assert run is not None and run.protocol.memory == "total:200"


def test_what_is_not_printed_is_chosen_without_test_images_and_on_another_order() -> None:
    table = paper.make_table("unprinted")
    runs = {row.name: row.cells[0].run for row in table.rows}
    for name, run in runs.items():
        assert run is not None and run.recipe is not None and run.recipe.last == "short"
        assert (run.protocol.order, run.protocol.steps, run.data.validation) == ("0", 5, 0.1)
        assert run.protocol.memory == ("0" if name.startswith("SPB") else "20")
    methods = [run.method for run in runs.values() if run is not None]
    open_choices = [SPB(), SPB(classes="all"), TPCIL(), TPCIL(vertices="hebbian"), GeoDL(), GeoDL(lambda_base=10.0)]
    assert methods == open_choices and all(row.cells[0].paper is None for row in table.rows)
    assert paper.rehearse_on_digits(table).rows


def test_the_order_of_a_queue_knows_what_has_no_kernels() -> None:
    """A method whose steps are compiled, or launched one by one, costs that much more."""
    for kind in methods.find_built_in().values():
        method = kind()
        compiled = not has_kernels(method.backbone((3, 32, 32)))
        least = EAGER if not method.capturable else COMPILED if compiled else 1.0
        assert least <= method.cost < 30, method.name
    assert EAGER > COMPILED > 1
    assert SPBM().cost >= 4 and SPBI().cost > SPBM().cost, "four copies of every image"
    assert DDE().cost >= 3.5, "it forwards ten more images for each, where four or so passes are made of one"
    assert Mnemonics(mode="paper").cost > Mnemonics().cost > Mnemonics().host.cost


def test_long_stages_count_by_their_images() -> None:
    """EEIL's fine-tuning, and the second training of BiC, which is on few images."""
    eeil = ROWS["EEIL"].cells[0].run
    assert eeil is not None
    first = 480 * (5000 + 50 * 20) + 360 * 60 * 20
    assert estimate.count_step_images(eeil)[:2] == [480 * 25_000, first]
    runs = list_runs([TABLE], 1)
    assert len(runs) == 62 and all(len(COUNTS[run.data.name]) == 100 for run in runs)


def test_a_speed_is_measured_without_a_fine_tuning_of_hundreds_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate.without_finetuning(EEIL()).finetuning().epochs == 0  # type: ignore[union-attr]
    hosted = estimate.without_finetuning(DDE(host=EEIL()))
    assert hosted == DDE(host=estimate.without_finetuning(EEIL()))
    assert SHAPES["digits"] == (1, 8, 8)
    for name in ("spb", "lwf", "eeil"):
        assert estimate.measure_speed(methods.find_method(name)(), "digits", "cpu").later > 0
