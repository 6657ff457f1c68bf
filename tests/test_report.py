"""Tables, figures and the page, made from records."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import pytest

from equipoise import paper
from equipoise.cli import command
from equipoise.compare import Filled, FilledRow, fill, recorded
from equipoise.report import report, tables
from equipoise.report.collect import collected
from equipoise.report.pictures import numbers

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    began = time.monotonic()
    report(RESULTS, out)
    assert time.monotonic() - began < 60
    return out


def test_the_committed_report_is_what_the_records_give(made: Path) -> None:
    committed = RESULTS / "report"
    ours = {p.relative_to(committed) for p in committed.rglob("*") if p.is_file() and p.name != "index.html"}
    assert ours == {p.relative_to(made) for p in made.rglob("*") if p.is_file() and p.name != "index.html"}
    assert len(ours) > 20
    for path in ours:
        if path.suffix != ".png":  # pixels depend on the fonts of a machine: of a picture, its numbers are compared
            assert (made / path).read_bytes() == (committed / path).read_bytes(), f"{path}: equipoise report results"


@pytest.mark.parametrize("id", ["table1", "table3"])
def test_the_readme_shows_what_is_recorded(id: str) -> None:
    table = paper.table(id).on("cifar100")
    own = [row for row in fill(table, recorded(RESULTS)) if not row.row.quoted]
    text = "\n".join(tables.markdown(table, own).splitlines()[2:])
    assert text in (RESULTS.parent / "README.md").read_text()


def test_it_is_the_same_again(made: Path, tmp_path: Path) -> None:
    report(RESULTS, tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (made / "index.html").read_bytes()
    assert len((made / "index.html").read_bytes()) < 5_000_000


def test_every_picture_of_the_text_is_there(made: Path) -> None:
    links = re.findall(r"!\[.*?\]\((.*?)\)", (made / "README.md").read_text())
    assert links and all((made / link).read_bytes()[:4] == b"\x89PNG" for link in links)


def test_a_table_says_the_same_in_every_format(made: Path) -> None:
    filled = fill(paper.table("table5"), recorded(RESULTS))
    rows = list(csv.DictReader((made / "tables" / "table5.csv").open()))
    assert len(rows) == sum(len(row.cells) for row in filled)
    flat = [(row.row.name, cell) for row in filled for cell in row.cells]
    for line, (name, cell) in zip(rows, flat):
        assert (line["row"], line["column"], line["state"]) == (name, cell.cell.column.id, cell.state)
        assert float(line["paper"]) == cell.cell.paper and line["command"] == cell.command
        assert line["ours"] == ("" if cell.ours is None else f"{cell.ours:.4f}")
    text, typeset = ((made / "tables" / f"table5.{ending}").read_text() for ending in ("md", "tex"))
    for name, cell in flat:
        (line,) = (one for one in text.splitlines() if one.startswith(f"| {name} |"))
        assert f"{cell.cell.paper:.2f}" in line and (cell.ours is None or f"**{cell.ours:.2f}** (" in line)
        (line,) = (one for one in typeset.splitlines() if one.strip().startswith(tables.escaped(name) + " &"))
        assert f"{cell.cell.paper:.2f}" in line and (cell.ours is None or f"{cell.ours:.2f} " in line)
    assert typeset.count(r"\\") == 2 + len(filled)
    assert all(line.count("&") == 6 for line in typeset.splitlines() if line.endswith(r"\\") and "multi" not in line)


def test_several_seeds_are_a_mean_and_a_deviation() -> None:
    table = paper.table("table6")
    by_name = {row.row.name: row for row in fill(table, recorded(RESULTS))}
    one, other = (by_name[name].cells[0].found[0] for name in ("Balanced", "Meta"))
    cell = Filled(by_name["Balanced"].cells[0].cell, (one, other))
    a, b = (found.result["average_incremental_accuracy"] for found in (one, other))
    expected = f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f}"
    row = FilledRow(by_name["Balanced"].row, (cell,))
    assert f"**{expected}** (62.22, +" in tables.markdown(table, [row])
    assert expected.replace(" ± ", r"$\pm$") in tables.latex(table, [row])
    assert "2 seeds" in tables.titled(table, [row])


def test_quoted_numbers_are_marked_and_have_no_command() -> None:
    table = paper.table("table1")
    filled = [row for row in fill(table, recorded(RESULTS)) if row.row.quoted]
    assert len(filled) == 8
    for line in tables.markdown(table, filled).splitlines()[6:]:
        assert line.startswith("| *") and "(quoted)" in line and "**" not in line
    assert {line["command"] for line in csv.DictReader(tables.comma_separated(table, filled).splitlines())} == {""}


def test_latex_is_not_broken_by_names() -> None:
    assert tables.escaped("5% & α_ε #1 $") == r"5\% \& $\alpha$\_$\varepsilon$ \#1 \$"


def test_curves_are_those_of_the_records() -> None:
    data = collected(recorded(RESULTS))
    figure = next(f for f in data["figures"] if f["id"] == "steps-table1-cifar100-5")
    balanced = next(s for s in figure["series"] if s["name"] == "IL-Baseline, Balanced")
    (path,) = RESULTS.glob("cifar100/il-baseline_balanced_*_71bc5c/result.json")
    steps = json.loads(path.read_text())["steps"]
    assert balanced["x"] == [s["classes"] for s in steps] and balanced["y"] == [s["top1"] for s in steps]
    assert balanced["spread"] is None
    lines = numbers(figure).splitlines()
    assert lines[0] == "series,x,y,spread" and len(lines) == 1 + sum(len(s["x"]) for s in figure["series"])
    weights = next(f for f in data["figures"] if f["id"] == "alpha-5")
    by_name = {s["name"]: s for s in weights["series"]}
    assert by_name["final base"]["x"] == [0.1, 0.25, 0.5, 1.0]
    assert by_name["final base, the paper"]["y"] == [68.38, 63.99, 58.78, 52.08]
    assert by_name["final base, the paper"]["dashed"] and "final latest, the paper" not in by_name
    for i, (base, latest) in enumerate(zip(by_name["final base"]["y"], by_name["final latest"]["y"])):
        assert (base + latest) / 2 == pytest.approx(by_name["final"]["y"][i])  # half of the classes each


def test_what_was_rehearsed_is_no_number_of_the_paper_and_nor_is_a_strangers(tmp_path: Path) -> None:
    (source,) = RESULTS.glob("cifar100/*_71bc5c/result.json")
    result = json.loads(source.read_text())
    own = {"digits": {"dataset": "digits", "base": 5, "increment": 1}, "mine": {"method": "mine"}, "odd": {"base": 999}}
    for name, changed in own.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({**result, "run": {**result["run"], **changed}}))
    data = collected(recorded(tmp_path))
    assert [run["id"] for run in data["runs"]] == ["digits", "mine", "odd"]  # they have their sections all the same
    assert data["runs"][1]["command"] is None
    cells = [c for t in data["tables"] for row in t["rows"] for c in row["cells"]]
    assert cells and not any(c["runs"] for c in cells) and data["figures"] == [] and data["costs"] is None
    report(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere"], 1, "nowhere is not there"),
        (["file"], 1, "file is not a folder"),
        (["empty"], 1, "empty holds no result of a run"),
        (["broken"], 1, "broken/a/result.json is corrupt"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "result.json").write_text("{")
    assert command(["report", *words]) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
