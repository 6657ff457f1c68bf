"""Tables, figures and the page, made from records."""

from __future__ import annotations

import copy
import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from records import make_record

from equipoise import Balanced, DataError, ILBaseline, paper
from equipoise.cli import run_command
from equipoise.paper.match import (
    Filled,
    FilledRow,
    Found,
    Records,
    fill,
    find_missing_runs,
    list_runs,
    load_records,
    make_key,
)
from equipoise.report import grid, report
from equipoise.report.collect import collect_data, collect_run
from equipoise.report.figures import draw, plt
from equipoise.report.series import chart_relaxations, list_points
from equipoise.report.tables import make_grid, show_cell
from equipoise.runs.settings import Data, Protocol, Run

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(scope="module")
def committed() -> Records:
    return load_records(RESULTS)


@pytest.fixture(scope="module")
def few(committed: Records, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of table 5: half of the figures, and a tenth of the runs."""
    folder = tmp_path_factory.mktemp("records")
    cells = (cell for row in fill(paper.make_table("table5"), committed) for cell in row.cells)
    for id in {found.id for cell in cells for found in cell.found}:
        shutil.copytree(RESULTS / id, folder / id)
    return folder


@pytest.fixture(scope="module")
def made(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    report(few, out)
    return out


def test_the_headline_says_what_the_tables_say(everything: Everything) -> None:
    records = everything.records
    cells = [
        row.cells[0] for id in ("table1", "table3") for row in fill(paper.make_table(id), records) if row.cells[0].found
    ]
    headline = everything.data["headline"]
    assert [(row["ours"], row["paper"], row["state"]) for row in headline] == [
        (cell.ours, cell.cell.paper, cell.state) for cell in cells
    ]
    assert {row["state"] for row in headline} == {"off"}, "and what is off is not passed over"


def test_runs_that_differ_have_titles_that_differ(committed: Records) -> None:
    runs = collect_data(committed)["runs"]
    commands: dict[str, set[str]] = {}
    for one in runs:
        commands.setdefault(one["title"], set()).add(one["command"])
    assert len(commands) > 40 and all(len(found) == 1 for found in commands.values()), commands
    titles = " ".join(commands)
    assert "LUCIR, Standard, no imprint, CIFAR-100" in titles and "PODNet, Standard, short last, CIFAR-100" in titles


def test_it_is_the_same_again(few: Path, made: Path, tmp_path: Path) -> None:
    report(few, tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (made / "index.html").read_bytes()


def test_every_picture_of_the_text_is_there(made: Path) -> None:
    links = re.findall(r"!\[.*?\]\((.*?)\)", (made / "README.md").read_text())
    assert links and all((made / link).read_bytes()[:4] == b"\x89PNG" for link in links)


def test_a_table_says_the_same_in_every_format(few: Path, made: Path) -> None:
    filled = fill(paper.make_table("table5"), load_records(few))
    rows = list(csv.DictReader((made / "tables" / "table5.csv").open()))
    assert len(rows) == sum(len(row.cells) for row in filled)
    flat = [(row.row.name, cell) for row in filled for cell in row.cells]
    for line, (name, cell) in zip(rows, flat):
        assert (line["row"], line["column"], line["state"]) == (name, cell.cell.column.id, cell.state)
        assert float(line["paper"]) == cell.cell.paper and line["command"] == cell.command
        assert line["ours"] == ("" if cell.ours is None else f"{cell.ours:.4f}") and line["last"] == cell.last
    text, typeset = ((made / "tables" / f"table5.{ending}").read_text() for ending in ("md", "tex"))
    for name, cell in flat:
        (line,) = (one for one in text.splitlines() if one.startswith(f"| {name} |"))
        assert f"{cell.cell.paper:.2f}" in line and (cell.ours is None or f"**{cell.ours:.2f}** (" in line)
        (line,) = (one for one in typeset.splitlines() if one.strip().startswith(grid.escape(name) + " &"))
        assert f"{cell.cell.paper:.2f}" in line and (cell.ours is None or f"{cell.ours:.2f} " in line)
    assert typeset.count(r"\\") == 2 + len(filled)
    assert all(line.count("&") == 6 for line in typeset.splitlines() if line.endswith(r"\\") and "multi" not in line)
    assert all(f"`{cell.command}`" in text and f": {cell.command}" in typeset for _, cell in flat)


def test_several_seeds_are_a_mean_and_a_deviation(committed: Records) -> None:
    table = paper.make_table("table6")
    by_name = {row.row.name: row for row in fill(table, committed)}
    one, other = (by_name[name].cells[0].found[0] for name in ("Balanced", "Meta"))
    cell = Filled(by_name["Balanced"].cells[0].cell, (one, other))
    a, b = (found.result["average_incremental_accuracy"] for found in (one, other))
    expected = f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f}"
    row = FilledRow(by_name["Balanced"].row, (cell,))
    assert f"**{expected}** (62.22, +" in grid.render_markdown(make_grid(table, [row]))
    assert expected.replace(" ± ", r"$\pm$") in grid.render_latex(make_grid(table, [row]))
    assert "2 seeds" in make_grid(table, [row]).caption


def test_quoted_numbers_are_marked_and_have_no_command(committed: Records) -> None:
    table = paper.make_table("table1")
    filled = [row for row in fill(table, committed) if row.row.quoted]
    assert len(filled) == 8
    for line in grid.render_markdown(make_grid(table, filled)).splitlines()[6:]:
        assert line.startswith("| *") and "(quoted)" in line and "**" not in line
    assert {
        line["command"] for line in csv.DictReader(grid.write_csv(make_grid(table, filled).numbers).splitlines())
    } == {""}


def test_latex_is_not_broken_by_names() -> None:
    assert grid.escape("5% & α_ε #1 $") == r"5\% \& $\alpha$\_$\varepsilon$ \#1 \$"


def test_curves_are_those_of_the_records(committed: Records) -> None:
    data = collect_data(committed)
    figure = next(f for f in data["figures"] if f["id"] == "steps-table1-cifar100-5")
    balanced = next(s for s in figure["series"] if s["name"] == "IL-Baseline, Balanced")
    (path,) = RESULTS.glob("cifar100/il-baseline_balanced_*_09d74c/result.json")
    steps = json.loads(path.read_text())["steps"]
    assert balanced["x"] == [s["classes"] for s in steps] and balanced["y"] == [s["top1"] for s in steps]
    assert balanced["spread"] is None
    lines = list_points(figure).splitlines()
    assert lines[0] == "series,x,y,spread" and len(lines) == 1 + sum(len(s["x"]) for s in figure["series"])
    weights = next(f for f in data["figures"] if f["id"] == "alpha-5")
    by_name = {s["name"]: s for s in weights["series"]}
    assert by_name["final base"]["x"] == [0.1, 0.25, 0.5, 1.0]
    assert by_name["final base, the paper"]["y"] == [68.38, 63.99, 58.78, 52.08]
    assert by_name["final base, the paper"]["dashed"] and "final new, the paper" not in by_name
    for i, (base, latest) in enumerate(zip(by_name["final base"]["y"], by_name["final new"]["y"])):
        assert (base + latest) / 2 == pytest.approx(by_name["final"]["y"][i])  # half of the classes each


def test_what_was_rehearsed_is_no_number_of_the_paper_and_nor_is_a_strangers(tmp_path: Path) -> None:
    (source,) = RESULTS.glob("cifar100/*_71bc5c/result.json")
    result = json.loads(source.read_text())
    run = result["run"]
    own = {
        "digits": {"data": {**run["data"], "name": "digits"}},
        "mine": {"method": {"name": "of-a-stranger", "remedy": {"name": "own", "x": 1}}},
        "odd": {"protocol": {**run["protocol"], "order": "7"}},
    }
    for name, changed in own.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({**result, "run": {**run, **changed}}))
    data = collect_data(load_records(tmp_path))
    assert [run["id"] for run in data["runs"]] == ["digits", "mine", "odd"]  # they have their sections all the same
    assert data["runs"][1]["command"] is None
    assert data["runs"][1]["title"].startswith("of-a-stranger, Own, 250 epochs, CIFAR-100, 50 + 5 × 10, ")
    assert data["runs"][1]["settings"]["method.remedy.x"] == "1"
    cells = [c for t in data["tables"] for row in t["rows"] for c in row["cells"]]
    assert cells and not any(c["runs"] for c in cells) and data["figures"] == [] and data["costs"] is None
    report(tmp_path, tmp_path / "out")


# Made-up records of everything on CIFAR-100, three seeds each, in which every number is another -------------------


def made_up(run: Run, i: int) -> dict[str, Any]:
    """Numbers that tell the run (i), the seed, the metric and the step."""
    at = round(20 + i / 10 + (0.0, 0.3, 1.2)[run.seed], 1)
    record = make_record(run, at, round(at + 1, 1), round(at + 2, 1), round(at + 3, 1))
    times = {"seconds": 10.0 + i, "training_seconds": 4.0 + i, "training_mib": 500.2 + i}
    finetune = run.method.finetuning()
    refits = run.method.remedy.name == "balanced-finetuning" or (finetune is not None and finetune.epochs > 0)
    times["refitting_seconds"] = 1.0 if refits else 0.0
    record["steps"] = [step | times for step in record["steps"]]
    looks = [{"step": t, "stage": "train", "done": k / 2, "top1": at + 2 * k + 2} for t in range(6) for k in (1, 2)]
    record["looks"] = [*looks, {"step": 5, "stage": "refit", "done": 1.0, "top1": at}]
    return record | {"versions": {"torch": "2.11.0"}, "machine": {"gpu": "Made up", "peak_memory_mib": 1000 + i}}


class Everything(NamedTuple):
    """The records, what the page shows of them, and the number of each run by its key."""

    records: Records
    data: dict[str, Any]
    number: dict[str, int]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    folder = tmp_path_factory.mktemp("everything")
    tables_of = [table.on("cifar100") for table in paper.make_tables()]
    number: dict[str, int] = {}
    for run in list_runs(tables_of, 3):
        i = number.setdefault(make_key(run), len(number))
        (folder / f"{i:03}-{run.seed}").mkdir()
        (folder / f"{i:03}-{run.seed}" / "result.json").write_text(json.dumps(made_up(run, i)))
    assert len(number) > 90
    records = load_records(folder)
    return Everything(records, collect_data(records), number)


def test_every_cell_is_filled_by_its_own_records(everything: Everything) -> None:
    more = {"average": 0, "final": 1, "final base": 2, "final new": 3}
    more |= {"within steps": 5, "training ends": 6, "after steps": -0.36}  # of six steps, without the first
    for table in (t.on("cifar100") for t in paper.make_tables()):
        for row in fill(table, everything.records):
            for cell in (c for c in row.cells if c.cell.run is not None):
                assert cell.cell.run is not None
                at = (
                    20 + everything.number[make_key(cell.cell.run)] / 10 + 0.5 + more[cell.cell.column.metric]
                )  # 0.5: the mean of the seeds
                assert cell.ours == pytest.approx(at) and cell.std == pytest.approx(0.6244998)
                assert len(cell.found) == 3 and not cell.joined and cell.state not in ("missing", "none", "quoted")


def test_what_is_unlike_the_paper_is_in_the_title_and_in_the_command() -> None:
    result = made_up(Run(ILBaseline(Balanced()), Data("cifar100"), Protocol(steps=5)), 0)
    result["machine"] |= {"device": "cuda", "precision": "bf16", "engine": "fused"}
    plain = collect_run(Found("a", result))
    for changes, title, flags in (
        ({"data": {"validation": 0.1}}, "measured on 0.1 of the training images, set aside", "--validation 0.1"),
        ({"protocol": {"order": "0"}}, "class order 0", "--order 0"),
        ({"protocol": {"select": "random"}}, "random exemplars", "--select random"),
        ({"data": {"brightness": 0.247}}, "brightness 0.247", "--brightness 0.247"),
        ({"recipe": {"last": "short"}}, "short last", "--last short"),
        ({"method": {"T": 4.0}}, "Balanced, 4 T, ", "--T 4.0"),
        ({"method": {"remedy": {"name": "balanced", "alpha": 0.5}}}, "Balanced α 0.5, ", "--alpha 0.5"),
        ({"machine": {"precision": "fp32"}}, "fp32, fused", "--precision fp32 --engine fused"),
    ):
        ((part, values),) = changes.items()
        whole = result if part == "machine" else result["run"]
        changed = {part: {**whole[part], **values}}
        other = collect_run(
            Found("b", {**result, **(changed if part == "machine" else {"run": {**result["run"], **changed}})})
        )
        assert title in other["title"] and title not in plain["title"], title
        assert flags in other["command"] and flags not in plain["command"], flags
    result["machine"] |= {"engine": None, "precision": "fp32"}  # nothing was trained
    assert (
        ", fp32, " in collect_run(Found("c", result))["title"]
        and "None" not in collect_run(Found("c", result))["command"]
    )


def test_every_figure_shows_its_own_records(everything: Everything) -> None:
    number = everything.number
    figures = {figure["id"]: figure for figure in everything.data["figures"]}
    relaxed = [f"epsilon-cifar100-{method}-{t}" for method in ("lucir", "podnet") for t in (5, 10)]
    curves_of = [f"steps-table1-cifar100-{t}" for t in (5, 10, 25)] + [f"steps-table3-cifar100-{t}" for t in (5, 10)]
    assert figures.keys() == {*relaxed, *curves_of, "confusion", "alpha-5", "alpha-10", "memory", "anytime"}
    for id in relaxed:
        method, t = id.split("-")[2:]
        start = f"{'LUCIR' if method == 'lucir' else 'PODNet'}, {t} steps, ε "
        rows = [row for row in paper.make_table("epsilon").on("cifar100").rows if row.name.startswith(start)]
        at = [20.5 + number[make_key(row.cells[0].run)] / 10 for row in rows if row.cells[0].run is not None]
        series = {s["name"]: s for s in figures[id]["series"]}
        assert series.keys() == {"average", "final base", "final new"}
        for name, more in (("average", 0), ("final base", 2), ("final new", 3)):
            assert series[name]["x"] == [0, 0.02, 0.1, 0.2, 0.5, 1, 2, 10, 100]
            assert series[name]["y"] == pytest.approx([v + more for v in at])
        assert figures[id]["x"]["scale"] == "symlog" and figures[id]["x"]["threshold"] == 0.1
    for id in curves_of:
        assert len({s["group"] for s in figures[id]["series"]}) == len(figures[id]["series"]) > 6
        for s in figures[id]["series"]:
            steps = int(id.split("-")[-1]) + 1
            assert s["spread"] == pytest.approx([0.6244998] * steps)
            assert [round(a - b, 6) for a, b in zip(s["y"], s["y"][1:-1])] == [1.0] * (steps - 2)
    memory = {s["name"]: s for s in figures["memory"]["series"]}
    assert memory["IL-Baseline, Meta"]["x"] == [5, 10, 20, 50]
    assert memory["IL-Baseline, Meta, the paper"]["y"] == [62.13, 63.02, 64.11, 65.6]
    assert len(figures["confusion"]["panels"]) == 3
    looks = {s["name"]: s for s in figures["anytime"]["series"]}
    assert looks.keys() == {row.name for row in paper.make_table("anytime").rows}
    assert looks["PODNet"]["x"] == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5] and len(looks["PODNet"]["y"]) == 11


def test_what_is_drawn_is_what_is_written(everything: Everything) -> None:
    for figure in (f for f in everything.data["figures"] if f["kind"] == "lines"):
        axis = draw(figure).axes[0]
        told = list(csv.DictReader(list_points(figure).splitlines()))
        shown = [(line.get_label(), x, y) for line in axis.lines for x, y in zip(*line.get_data())]
        assert [(t["series"], float(t["x"]), float(t["y"])) for t in told] == [
            (name, pytest.approx(x), pytest.approx(y, abs=1e-4)) for name, x, y in shown
        ]
        assert len(axis.collections) == sum(s["spread"] is not None for s in figure["series"])
        assert axis.get_xscale() == figure["x"]["scale"]
    plt.close("all")


def test_confusion_is_told_in_numbers(everything: Everything) -> None:
    figure = next(f for f in everything.data["figures"] if f["kind"] == "confusion")
    lines = list_points(figure).splitlines()
    asked_for = next(row.cells[0].run for row in paper.make_table("confusion").rows if row.name == "IL-Baseline")
    assert asked_for is not None
    i = everything.number[make_key(asked_for)]
    first = [f"IL-Baseline,0,0,{2100 + 10 * i}", f"IL-Baseline,0,1,{7900 - 10 * i}"]
    assert lines[0] == "panel,true,predicted,images" and lines[1 : 1 + len(first)] == first


def test_costs_are_seconds_and_compared_on_one_machine(everything: Everything) -> None:
    number, table = everything.number, paper.make_table("costs")
    its_own = {make_key(row.cells[0].run) for row in table.rows if row.cells[0].run is not None}
    by_run = {key: found for key, found in everything.records.by_run.items() if key in its_own}
    records = Records([], copy.deepcopy(by_run))  # changed below
    made = make_grid(table, fill(table, records, 1))
    rows = {row.name: [cell.text for cell in row.cells] for row in made.rows}
    assert list(rows) == [row.name for row in table.rows]

    def five(name: str) -> tuple[float, int]:
        i = number[make_key(next(r.cells[0].run for r in table.rows if r.name == name))]  # type: ignore[arg-type]
        return 5 * (4.0 + i), i  # training of five steps; there is a second of refitting in each

    for name, rival in {
        "IL-Baseline, Meta": "IL-Baseline, Balanced",
        "LUCIR with finetuning": "LUCIR, Balanced",
    }.items():
        (training, i), (other, _) = five(name), five(rival)
        longer = 250 / 8 if name.startswith("IL") else 160 / 4
        refits = "5.00" if "finetuning" in name else "–"
        epochs = "8" if name.startswith("IL") else "4"
        told = [
            epochs,
            f"{training:.2f}",
            refits,
            f"{(longer * training + 5) / (longer * other + 5):.2f}",
            f"{5 * (10 + i):.2f}",
            f"{500 + i}",
            f"{1000 + i:,}",
            "Made up",
        ]
        assert rows[name] == told
    # A record that reused something is no timing, and another machine is no comparison.
    balanced = next(r.cells[0].run for r in table.rows if r.name == "IL-Baseline, Balanced")
    meta = next(r.cells[0].run for r in table.rows if r.name == "IL-Baseline, Meta")
    assert balanced is not None and meta is not None
    records.by_run[make_key(balanced)][0].result["machine"]["gpu"] = "Another"
    records.by_run[make_key(meta)][0].result["reused"] = {"steps": [0]}
    changed = make_grid(table, fill(table, records, 1))
    rows = {row.name: [cell.text for cell in row.cells] for row in changed.rows}
    assert rows["IL-Baseline"][3] == "–" and rows["IL-Baseline, Meta"] == ["–"] * 8
    assert find_missing_runs([meta], records) == [] and find_missing_runs([meta], records, alone=True) == [meta]
    for form in (grid.render_markdown, grid.render_latex):
        assert all(cell.text in form(made) for row in made.rows for cell in row.cells[:2])
    first, second = ({line[0]: line[1:-1] for line in one.numbers} for one in (made, changed))
    for row in made.rows:
        told = [cell.text.replace(",", "").replace("–", "") for cell in row.cells]
        assert list(first[row.name]) == told, "plain numbers, and nothing for none"
    assert made.rows[0].cells[6].text.startswith("1,") and set(second["IL-Baseline, Meta"]) == {""}


def test_two_points_are_no_curve(everything: Everything) -> None:
    table = paper.make_table("epsilon").on("cifar100")
    rows = [row for row in fill(table, everything.records) if row.row.name.startswith("LUCIR, 5 steps")]
    assert [f["id"] for f in chart_relaxations(rows[:3])] == ["epsilon-cifar100-lucir-5"]
    assert list(chart_relaxations(rows[:2])) == []


def test_a_metric_has_one_colour_by_alpha_and_by_epsilon(everything: Everything) -> None:
    figures = [f for f in everything.data["figures"] if f["id"].startswith(("alpha", "epsilon"))]
    groups = {(s["name"].removesuffix(", the paper"), s["group"]) for f in figures for s in f["series"]}
    assert len({f["id"].split("-")[0] for f in figures}) == 2 and len(groups) == len({name for name, _ in groups}) == 4


def test_colours_say_how_far(everything: Everything) -> None:
    filled = fill(paper.make_table("table1").on("cifar100"), everything.records)
    cells = [cell for row in filled for cell in row.cells if cell.found]
    for cell in cells:
        shown = grid.colour_cell(show_cell(cell))
        colour = {"close": "green", "better": "cyan", "near": "yellow", "off": "red"}[cell.state]
        assert colour in str(shown.spans[0].style) and shown.plain.startswith(f"{cell.ours:.2f} ± 0.62 (")
        assert shown.plain.endswith(", 3 seeds)") and ("‡" in shown.plain) == (cell.state == "off")
    assert {cell.state for cell in cells} >= {"off"}


LOOK = {"step": 1, "stage": "train", "done": 0.5, "top1": 50.0}
ODD_LOOKS = [{"looks": [LOOK | odd]} for odd in ({"step": True}, {"stage": None}, {"done": 2}, {"top1": 101.0})]
ODD_LOOKS += [{"looks": LOOK}, {"looks": [1]}]


@pytest.mark.parametrize("broken", [{"run": []}, {"final": {}}, {"run": {"recipe": None}}, {"steps": []}, *ODD_LOOKS])
def test_odd_records_are_named(broken: dict[str, Any], tmp_path: Path) -> None:
    (source,) = RESULTS.glob("cifar100/*_71bc5c/result.json")
    result = json.loads(source.read_text())
    for name, value in broken.items():
        result[name] = {**result[name], **value} if name == "run" and isinstance(value, dict) else value
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text(json.dumps(result))
    with pytest.raises(DataError, match=r"a/result.json is not the result of a run"):
        load_records(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere"], 1, "nowhere does not exist"),
        (["file"], 1, "file is not a folder"),
        (["empty"], 1, "empty holds no result of a run"),
        (["broken"], 1, "broken/a/result.json is damaged"),
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
    assert run_command(["report", *words]) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
