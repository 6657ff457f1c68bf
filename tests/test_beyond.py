"""Tables beyond the paper: other orders of the classes, the choice of Meta's rate, α and ε that change."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from records import make_record

from equipoise import Balanced, Meta, Relaxed, paper
from equipoise.paper.match import fill, load_records, make_key
from equipoise.report import grid
from equipoise.report.collect import collect_table
from equipoise.report.figures import draw, plt
from equipoise.report.gaps import make_gaps
from equipoise.report.page import render_paper_table
from equipoise.report.series import chart_memory, list_points
from equipoise.report.tables import make_grid
from equipoise.runs.settings import Run


def record(folder: Path, run: Run | None, average: float) -> None:
    """Write a made-up record of a run with this average accuracy."""
    assert run is not None
    out = folder / make_key(run) / str(run.seed)
    out.mkdir(parents=True)
    (out / "result.json").write_text(json.dumps(make_record(run, average, average - 5, average, average)))


def test_the_orders_differ_in_nothing_else() -> None:
    main = {row.name: row.cells[0].run for row in paper.make_table("table1").rows}
    rows = paper.make_table("orders").rows
    assert len(rows) == 7
    for row in rows:
        first, *others = (cell.run for cell in row.cells)
        assert first is not None and first.recipe == main[row.name].recipe  # type: ignore[union-attr]
        assert make_key(first) == make_key(main[row.name])  # type: ignore[arg-type]
        assert [run.protocol.order for run in others if run] == ["1", "2", "3", "4"]
        assert all(run and replace(run, protocol=first.protocol) == first for run in others)


def test_a_row_of_orders_ends_with_its_mean(tmp_path: Path) -> None:
    """Over the orders that are measured, each of them the mean of its seeds."""
    table = paper.make_table("orders")
    numbers = [60.0, 62.0, 61.0]
    for cell, number in zip(table.rows[1].cells, numbers):
        record(tmp_path, cell.run, number)
    record(tmp_path, replace(table.rows[1].cells[0].run, seed=1), 61.0)  # type: ignore[type-var]
    for cell in table.rows[2].cells:
        record(tmp_path, cell.run, 63.0)
    filled = fill(table, load_records(tmp_path))
    lines = make_grid(table, filled).rows
    spread = statistics.stdev([60.5, 62.0, 61.0])
    assert [cell.text for cell in lines[1].cells] == [
        "60.50 ± 0.71",
        "62.00",
        "61.00",
        "–",
        "–",
        f"61.17 ± {spread:.2f}",
    ]
    assert [line.cells[-1].beside for line in lines[:3]] == ["", "of 3", ""]
    assert [line.cells[-1].text for line in (lines[0], lines[2])] == ["–", "63.00 ± 0.00"]
    assert "mean of the orders |" in grid.render_markdown(make_grid(table, filled))
    record(tmp_path, table.rows[0].cells[3].run, 44.0)
    filled = fill(table, load_records(tmp_path))
    assert make_grid(table, filled).rows[0].cells[-1].text == "–", "one number has no mean"
    values = collect_table(table, filled)
    assert values["rows"][0]["cells"][-1]["ours"] is None
    cell = values["rows"][1]["cells"][-1]
    assert (cell["ours"], cell["std"]) == (pytest.approx(61.1667, abs=1e-4), pytest.approx(spread))
    page = str(render_paper_table(values, {}))
    assert "mean of the orders" in page and "61.17" in page


def test_the_rate_is_chosen_without_test_images_and_on_another_order() -> None:
    table = paper.make_table("choice")
    deciding = [cell.run for row in table.rows for cell in row.cells if cell.column.id.endswith("aside")]
    tests = [cell for row in table.rows for cell in row.cells if not cell.column.id.endswith("aside")]
    assert len(deciding) == 8 and {run.protocol.steps for run in deciding if run} == {5, 25}
    for run in deciding:
        assert run is not None and run.recipe is not None and run.recipe.last == "short"
        assert (run.protocol.order, run.data.validation) == ("0", 0.1)
    assert {run.method.remedy.alpha_lr for run in deciding} >= {1.0, Meta().alpha_lr}  # type: ignore[union-attr]
    assert [cell.paper for cell in tests] == [49.63, 49.63]
    assert [cell.run.method.remedy for cell in tests if cell.run] == [Meta(alpha_lr=1.0), Meta()]
    assert {(cell.run.protocol.order, cell.run.data.validation) for cell in tests if cell.run} == {("1993", 0.0)}


def test_what_is_further_than_a_point_is_listed_once_and_the_rest_counted(tmp_path: Path) -> None:
    """Table 1, 5 and 6 have one and the same number; the captions of the matrices another final accuracy."""
    main = {row.name: row.cells[0].run for row in paper.make_table("table1").rows}
    tables = [paper.make_table(name) for name in ("table1", "table5", "table6", "confusion", "orders")]
    for seed, average in ((0, 60.0), (1, 61.0)):
        record(tmp_path, replace(main["IL-Baseline, Balanced"], seed=seed), average)  # type: ignore[type-var]
    record(tmp_path, main["LUCIR"], 63.0)  # 63.37
    record(tmp_path, main["PODNet"], 65.4)  # 64.46
    made = make_gaps((table, fill(table, load_records(tmp_path))) for table in tables)
    shown = [[line.name, *(cell.text for cell in line.cells)] for line in made.rows]
    assert shown == [
        ["α 1", "Table 5, CIFAR-100, 5 steps, final base", "52.08", "60.50 ± 0.71", "2", "+8.42"],
        ["IL-Baseline, Balanced", "Table 1, CIFAR-100, 5 steps", "62.22", "60.50 ± 0.71", "2", "−1.72"],
    ]
    # Its final accuracy is 55.50: 54.55 in table 5 and 54.76 in the captions.
    assert made.caption.startswith("Of 6 numbers of the paper that are measured here, 1 are within 0.5 points")
    assert "and 4 within 1;" in made.caption and len(made.commands) == len(made.numbers) - 1 == 2


def test_what_changes_stands_beside_constants() -> None:
    table = paper.make_table("schedules")
    runs = {row.name: row.cells[0].run for row in table.rows}
    assert len(runs) == len({make_key(run) for run in runs.values() if run}) == 18
    remedies = {name: run.method.remedy for name, run in runs.items() if run}
    assert remedies["IL-Baseline, Balanced α 1 to 0.1, cosine"] == Balanced("1:0.1:cosine")
    assert remedies["IL-Baseline, Balanced α 0.1 to 1"] == Balanced("0.1:1")
    assert remedies["PODNet, Relaxed ε 2% to 0.02%"] == Relaxed("2%:0.02%")
    others = {
        make_key(cell.run)
        for id in ("table5", "epsilon")
        for row in paper.make_table(id).rows
        for cell in row.cells
        if cell.run and cell.run.data.name == "cifar100"
    }
    constant = [name for name, run in runs.items() if run and make_key(run) in others]
    assert constant == [name for name in runs if " to " not in name] and len(constant) == 6


def test_a_line_has_deviations_where_there_are_several_seeds(tmp_path: Path) -> None:
    """Beside points of one seed, whose deviation nobody knows."""
    table = paper.make_table("table4")
    (row,) = (row for row in table.rows if row.name == "IL-Baseline, Balanced")
    for cell, seeds in zip(row.cells, (1, 3, 1, 2), strict=False):
        for seed in range(seeds):
            record(tmp_path, replace(cell.run, seed=seed), 60.0 + seed)  # type: ignore[type-var]
    (figure,) = chart_memory(fill(table, load_records(tmp_path)))
    (line,) = (line for line in figure["series"] if line["name"] == "IL-Baseline, Balanced")
    assert line["x"] == [1, 5, 10, 20] and line["y"] == [60, 61, 60, 60.5]
    assert line["spread"] == [None, pytest.approx(1.0), None, pytest.approx(0.5**0.5)]
    (drawn,) = draw(figure).axes[0].collections
    ends = [path.vertices.tolist() for path in drawn.get_paths()]
    assert ends == [[[5, 60], [5, 62]], [[20, pytest.approx(60.5 - 0.5**0.5)], [20, pytest.approx(60.5 + 0.5**0.5)]]]
    points = [text for text in list_points(figure).splitlines() if text.startswith('"IL-Baseline, Balanced",')]
    assert [text.split(",")[-1] for text in points] == ["", "1.0000", "", "0.7071"]
    plt.close("all")
