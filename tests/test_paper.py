"""The paper as data, records that fill its cells, and the button that makes the rest."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import make_record
from squares import digits_of

from equipoise import Balanced, ILBaseline, Meta, Recipe, UsageError, methods, paper
from equipoise.cli import reproduce, run_command
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import COUNTS, SHAPES, load
from equipoise.data.memory import Budget
from equipoise.errors import make_unknown_error
from equipoise.methods.around import Around
from equipoise.paper import Cell, match
from equipoise.paper.cells import make_run
from equipoise.paper.match import NONE, FilledRow, fill, find_missing_runs, list_runs, load_records, make_key
from equipoise.remedies import BalancedFinetuning
from equipoise.report import grid
from equipoise.report.collect import collect_cell
from equipoise.report.tables import make_grid, show_cell
from equipoise.runs import estimate
from equipoise.runs.command import name_folder
from equipoise.runs.command import write_command as words_of
from equipoise.runs.plan import count_images, prepare, read_run, resolve
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Protocol, Run
from equipoise.runs.workers import Local
from equipoise.settings import to_plain
from equipoise.step import Adapt, Finetune, plan_for

ROOT = Path(__file__).parent.parent
NUMBERS = ROOT.parent / "shared" / "docs" / "paper-numbers.json"
OURS = {" w/ BalancedS-CE": ", Balanced", " w/ Meta BalancedS-CE": ", Meta", " w/ Relaxed BalancedS-CE": ", Relaxed"}


def every_run() -> list[Run]:
    both = [t for table in paper.make_tables() for t in (table, paper.rehearse_on_digits(table))]
    return list({c.run: c.run for t in both for row in t.rows for c in row.cells if c.run is not None})


def resolved(run: Run) -> Run:
    return resolve(run, len(COUNTS[run.data.name]), run.data.shape)


def our_name(name: str) -> str:
    for theirs, ours in OURS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


@pytest.mark.skipif(not NUMBERS.is_file(), reason="the list of the paper's numbers is not here")
def test_every_number_is_the_papers() -> None:
    published: dict[str, Any] = json.loads(NUMBERS.read_text())
    for id in ("table1", "table3"):
        rows = {row.name: row for row in paper.make_table(id).rows}
        assert rows.keys() == {our_name(name) for name in published[id]["rows"]}
        for name, cells in published[id]["rows"].items():
            row = rows[our_name(name)]
            assert row.quoted == (name in published[id]["quoted"])
            assert {c.column.id: c.paper for c in row.cells} == {
                f"{c['dataset']}-{c['steps']}": c["value"] for c in cells
            }
            for mine, theirs in zip(row.cells, cells):
                assert row.quoted or (
                    mine.run and (mine.run.data.name, mine.run.protocol.steps) == (theirs["dataset"], theirs["steps"])
                )
                assert row.quoted or (mine.run and mine.run.protocol.memory == ("20" if id == "table1" else "0"))
    two = {row.name: [c.paper for c in row.cells] for row in paper.make_table("table2").rows}
    assert two == {our_name(n): [v["top1"], v["top5"]] for n, v in published["table2"]["rows"].items()}
    four = {row.name: [c.paper for c in row.cells] for row in paper.make_table("table4").rows}
    assert four == {our_name(n): v for n, v in published["table4"]["rows"].items()}
    assert [c.run and c.run.protocol.memory for c in paper.make_table("table4").rows[0].cells] == [
        str(m) for m in published["table4"]["memory"]
    ]
    for steps, at in ((5, 0), (10, 3)):
        for row, theirs in zip(paper.make_table("table5").rows, published["table5"][f"steps{steps}"]):
            got = {c.column.metric: c.paper for c in row.cells[at : at + 3]}
            assert got == {"final base": theirs["final_base"], "final": theirs["final"], "average": theirs["average"]}
            remedy = row.cells[at].run.method.remedy  # type: ignore[union-attr]
            assert remedy == (Meta() if theirs["alpha"] == "meta" else Balanced(theirs["alpha"]))
            assert all(c.run and c.run.protocol.steps == steps for c in row.cells[at : at + 3])
    six = [row.cells[0].paper for row in paper.make_table("table6").rows]
    assert six == list(published["table6"]["rows"].values())
    shown = {row.name: row.cells[0].paper for row in paper.make_table("confusion").rows}
    assert shown == {our_name(n): v for n, v in published["figures"]["confusion"].items() if n != "what"}


def test_a_command_asks_for_the_run_that_it_is_of() -> None:
    runs = every_run()
    assert {r.data.name for r in runs} == {*SHAPES} and len(runs) > 200
    protocol = Protocol(4, 3, order="natural", memory="total:40", select="random")
    odd = Run(ILBaseline(Meta(every=3, count="all"), T=4.0), Data("digits"), protocol, seed=7)
    odd = replace(odd, recipe=Recipe(epochs=3, milestones=(0.5, 0.75), batch=16))
    remedy = ILBaseline(BalancedFinetuning(Finetune(7, 0.02, 64, 1e-3, distil=False)))
    others = [odd, replace(odd, method=remedy, data=Data("digits", brightness=0.25))]
    for one in [*runs, *others]:
        words = shlex.split(words_of(one))
        assert words[:2] == ["equipoise", "run"]
        parsed = parse_request(words[2:], "run", Request).run
        assert resolved(parsed) == resolved(one), words


def test_a_record_gives_its_run_back() -> None:
    found = sorted((ROOT / "results").rglob("result.json"))
    assert len(found) >= 160
    for path in found:
        settings = json.loads(path.read_text())["run"]
        again = read_run(settings)
        assert to_plain(again) == settings and resolved(again) == again


def test_what_is_planned_without_data_is_what_the_data_say() -> None:
    digits = load("digits")
    assert COUNTS["digits"] == tuple((digits.train.y == c).sum().item() for c in range(10))
    for one in (r for r in every_run() if r.data.name == "digits"):
        assert estimate.count_step_images(one) == count_images(prepare(one, loaded=digits).list_work())


def test_runs_are_the_same_whatever_does_not_change_a_result() -> None:
    one = Run(ILBaseline(Balanced()), Data("digits"), Protocol(memory="20"))
    assert make_key(one) == make_key(replace(one, protocol=Protocol(base=5, steps=5, memory="20"), seed=3))
    others = (replace(one, protocol=Protocol(memory="5")), replace(one, protocol=Protocol(steps=1)))
    others += (replace(one, method=ILBaseline(Balanced(0.5))), replace(one, data=Data("digits", brightness=0.25)))
    for other in others:
        assert make_key(other) != make_key(one)
    assert make_key(replace(one, recipe=one.method.recipe(plan_for(SHAPES["digits"])))) == make_key(one)


def result(value: float, asked_for: Run) -> dict[str, Any]:
    """A made-up record of a run, in which every accuracy is the same."""
    return make_record(asked_for, value, value, value, value)


def recorded_with(folder: Path, values: dict[int, float], asked_for: Run) -> match.Records:
    for seed, value in values.items():
        (folder / str(seed)).mkdir(parents=True)
        text = json.dumps(result(value, replace(asked_for, seed=seed)))
        (folder / str(seed) / "result.json").write_text(text)
    return load_records(folder)


@pytest.mark.parametrize(
    ("row", "values", "state"),
    [
        ("IL-Baseline", {0: 43.8 + 1.49}, "close"),
        ("IL-Baseline", {0: 43.8 + 1.51}, "near"),
        ("IL-Baseline", {0: 43.8 - 3.01}, "off"),
        ("IL-Baseline, Balanced", {0: 62.22 + 1.6}, "better"),
        ("IL-Baseline, Balanced", {0: 62.22 - 1.6}, "near"),
        ("IL-Baseline, Balanced", {0: 61.0, 1: 61.1, 2: 61.2}, "near"),
        ("IL-Baseline, Balanced", {0: 61.0, 1: 61.3, 2: 61.6}, "close"),
        ("IL-Baseline, Balanced", {}, "missing"),
    ],
)
def test_a_cell_says_how_far_it_is_from_the_papers(
    row: str, values: dict[int, float], state: str, tmp_path: Path
) -> None:
    table = paper.make_table("table1")
    cell = next(r for r in table.rows if r.name == row).cells[0]
    assert cell.run is not None
    records = recorded_with(tmp_path / "records", values, cell.run) if values else NONE
    filled = next(r for r in fill(table, records) if r.row.name == row).cells[0]
    assert filled.state == state
    assert filled.values == [values[k] for k in sorted(values)]
    if values:
        mean = sum(values.values()) / len(values)
        assert filled.ours == pytest.approx(mean) and filled.difference == pytest.approx(mean - (cell.paper or 0))
        spread = (sum((v - mean) ** 2 for v in values.values()) / max(1, len(values) - 1)) ** 0.5
        assert filled.std == (pytest.approx(spread) if len(values) > 1 else None)
        assert fill(table, records, seeds=1)[0].row.quoted
        few = next(r for r in fill(table, records, seeds=1) if r.row.name == row).cells[0]
        assert few.values == [values[0]]


def test_joined_batches_stand_in_where_short_ones_are_not_recorded_yet(tmp_path: Path) -> None:
    """In the paper's own tables: marked, and still wanted."""
    table, beyond = paper.make_table("table6"), paper.make_table("batches")
    asked_for = next(row.cells[0].run for row in table.rows if row.name == "Balanced")
    assert asked_for is not None and asked_for.recipe is not None and asked_for.recipe.last == "short"
    joined = Run(ILBaseline(Balanced()), protocol=Protocol(steps=5))

    def balanced(records: match.Records, seeds: int | None = None) -> match.Filled:
        return next(row.cells[0] for row in fill(table, records, seeds) if row.row.name == "Balanced")

    def both_ways(records: match.Records) -> list[list[float]]:
        rows = {row.row.name: row.cells for row in fill(beyond, records)}
        return [cell.values for cell in rows["IL-Baseline, Balanced, 20 kept"][:2]]

    records = recorded_with(tmp_path / "joined", {0: 62.0, 1: 63.0}, joined)
    cell = balanced(records)
    assert cell.joined and cell.last == "joined" and cell.values == [62.0, 63.0] and cell.command == words_of(asked_for)
    assert balanced(records, seeds=1).values == [62.0]
    assert find_missing_runs([asked_for], records) == [asked_for], "it is to be measured all the same"
    assert both_ways(records) == [[62.0, 63.0], []], "what compares the two ways takes neither for the other"
    timed = next(row.cells[0] for row in fill(replace(table, alone=True), records) if row.row.name == "Balanced")
    assert timed.state == "missing" and not timed.joined
    shown = make_grid(table, [FilledRow(table.rows[0], (cell,))])
    assert grid.render_markdown(shown).count("ʲ") == 2 and "ʲ measured with joined" in grid.render_markdown(shown)
    assert grid.render_latex(shown).count("$^{j}$") == 2 and "ʲ" not in grid.render_latex(shown)
    assert grid.colour_cell(show_cell(cell)).plain == "62.50 ± 0.71 (62.22, +0.28ʲ, 2 seeds)"
    assert collect_cell(cell)["why"] == "measured with joined batches: with short ones there is no record yet"
    unpublished = replace(cell, cell=replace(cell.cell, paper=None))
    assert grid.colour_cell(show_cell(unpublished)).plain == "62.50 ± 0.71 (ʲ, 2 seeds)"

    recorded_with(tmp_path / "short", {0: 61.0}, asked_for)
    records = load_records(tmp_path)
    cell = balanced(records)
    assert cell.values == [61.0] and not cell.joined and cell.last == "short", "never both in one mean"
    assert find_missing_runs([asked_for], records) == [] and both_ways(records) == [[62.0, 63.0], [61.0]]
    shown = make_grid(table, [FilledRow(table.rows[0], (cell,))])
    assert "ʲ" not in grid.render_markdown(shown) and collect_cell(cell)["why"] is None
    assert balanced(NONE).last == "short" and not balanced(NONE).joined


def test_quoted_rows_and_missing_data_are_never_measured() -> None:
    rows = {row.row.name: row.cells for row in fill(paper.make_table("table1"), load_records(ROOT / "results"))}
    assert {c.state for c in rows["TPCIL"]} == {"quoted"} and all(not c.found for c in rows["TPCIL"])
    needs = [c.needs for c in rows["PODNet"]]
    assert needs == [None] * 3 + ["imagenet"] * 5
    assert fill(paper.make_table("table4"), NONE)[2].cells[0].state == "none"  # Meta with one image: no such run


def test_each_run_is_wanted_once_and_what_is_recorded_is_not_missing(tmp_path: Path) -> None:
    tables = [paper.make_table(name) for name in ("table1", "table4", "table6")]
    runs = list_runs(tables, 2)
    assert len({(make_key(r), r.seed) for r in runs}) == len(runs)
    assert {r.data.name for r in runs} == {"cifar100"} and {r.seed for r in runs} == {0, 1}
    one = runs[0]
    records = recorded_with(tmp_path, {0: 41.0}, one)
    left = find_missing_runs(runs, records)
    assert len(left) == len(runs) - 1
    assert [r.seed for r in left if make_key(r) == make_key(one)] == [1]


# The button -------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_STORE", str(tmp_path / "cache" / "store"))
    with digits_of(40):
        yield tmp_path


def test_a_table_is_rehearsed_and_a_second_time_nothing_is_left(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["paper", "confusion", "--dataset", "digits", "--rows", "il-baseline,nothing", "--results", "records"]
    assert run_command(words) == 2
    assert "unknown row 'nothing'" in capfd.readouterr().err
    words[words.index("--rows") + 1] = "IL-Baseline, Balanced"
    assert run_command([*words, "--dry-run"]) == 0
    listed = capfd.readouterr().out
    asked_for = (
        "equipoise run il-baseline --remedy balanced --dataset digits --steps 5 --memory 20 --seed 0 --last short"
    )
    assert asked_for in listed and "1 run," in listed and not (here / "records").exists()
    assert (here / "cache" / "speed.json").is_file()

    assert run_command([*words, "--workers", "1"]) == 0
    out, err = capfd.readouterr()
    assert "1 of 1 done" in err and "done" not in out
    (made,) = (here / "records").rglob("result.json")
    final = json.loads(made.read_text())["final"]["top1"]
    assert f"{final:.2f}" in out and made.parent.parent == here / "records" / "digits"
    written = made.stat().st_mtime_ns
    assert run_command([*words, "--format", "csv"]) == 0
    again = capfd.readouterr()
    assert made.stat().st_mtime_ns == written and "running" not in again.out + again.err
    assert f"{final:.4f}" in again.out and asked_for in again.out
    assert run_command([*words, "--dry-run"]) == 0
    assert "nothing is missing" in capfd.readouterr().out
    # What the table asks for and what `run` does are one and the same.
    shutil.rmtree(here / "cache")
    alone = run(parse_request(shlex.split(asked_for)[2:], "run", Request).run, here / "alone")
    assert alone["final"]["top1"] == final


def test_tables_are_done_in_the_order_in_which_they_are_named(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run once, the longest of a table first; all with the first seed before the next one."""
    done: list[tuple[int, str, str]] = []

    def note(self: Local, work: Any, jobs: list[Any], tell: Any) -> None:
        done.extend((job.run.seed, job.run.method.remedy.name, job.run.protocol.memory) for job in jobs)

    monkeypatch.setattr(Local, "do", note)
    words = ["paper", "confusion", "table4", "--dataset", "digits", "--rows", "IL-Baseline,meta", "--seeds", "2"]
    assert run_command(words) == 0
    by_memory = [(remedy, memory) for _, remedy, memory in done]
    assert by_memory[:2] == [("meta", "20"), ("standard", "20")], "an update of α takes time"
    assert [memory for _, memory in by_memory[2:9]] == ["50"] * 2 + ["10"] * 2 + ["5"] * 2 + ["1"]
    assert by_memory[9:] == by_memory[:9] and [seed for seed, _, _ in done] == [0] * 9 + [1] * 9
    assert "18 runs left for another time: repeat the command" in capfd.readouterr().err
    done.clear()
    assert run_command(["paper", "table4", "confusion", *words[3:]]) == 0
    assert [memory for _, _, memory in done[:4]] == ["50"] * 2 + ["20"] * 2


def test_after_some_minutes_no_run_is_started(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["paper", "confusion", "--dataset", "digits", "--workers", "1", "--minutes"]
    assert run_command([*words, "1e-9"]) == 0
    assert "3 runs left for another time: repeat the command" in capfd.readouterr().err
    assert not list(here.rglob("run.json"))
    assert run_command([*words, "0"]) == 2 and "minutes must be a number above 0, not 0" in capfd.readouterr().err


def test_timed_runs_reuse_nothing_and_show_seconds(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of: list[int] = []
    do = Local.do

    def noting(self: Local, *words: Any) -> None:
        asked_of.append(self.workers)
        do(self, *words)

    monkeypatch.setattr(Local, "do", noting)
    words = ["paper", "costs", "--dataset", "digits", "--rows", "meta", "--results", "records", "--format", "csv"]
    assert run_command([*words, "--workers", "2"]) == 0
    assert asked_of == [1]  # one at a time, whatever was said
    (made,) = (here / "records" / "alone").rglob("result.json")
    result = json.loads(made.read_text())
    assert result["reused"] is None and not (here / "cache" / "store").exists()
    lines = list(csv.reader(capfd.readouterr().out.strip().splitlines()))  # nothing but the table
    seconds = sum(step["training_seconds"] for step in result["steps"][1:])
    assert lines[0][:3] == ["name", "epochs", "training, s"]
    assert lines[1][:3] == ["IL-Baseline, Meta", "8", f"{seconds:.2f}"] and len(lines) == 2


def test_several_tables_have_one_head_in_csv(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["paper", "table1", "table6", "--format", "csv", "--no-run", "--results", str(ROOT / "results")]
    assert run_command([*words, "--commands"]) == 0
    lines = list(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert {line["table"] for line in lines} == {"table1", "table6"}
    assert run_command(["paper", "table6", "--no-run", "--commands", "--results", str(ROOT / "results")]) == 0
    out = capfd.readouterr().out
    assert "\nloss rescaling, CIFAR-100, 5 steps: equipoise run il-baseline --remedy loss-rescaling" in out
    assert not list(here.rglob("run.json"))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("LUCIR", {"LUCIR"}),
        ("lucir, balanced", {"LUCIR, Balanced"}),
        ("podnet,LUCIR", {"PODNet", "LUCIR"}),
        ("balanc", {"LUCIR, Balanced", "PODNet, Balanced"}),
        ("podnet*", {"PODNet", "PODNet, Balanced"}),
        ("LUCIR,*net", {"LUCIR", "PODNet"}),
        ("PODNet , balanc", {"PODNet", "LUCIR, Balanced", "PODNet, Balanced"}),
    ],
)
def test_rows_are_meant_by_their_names_or_parts_of_them(said: str, meant: set[str]) -> None:
    assert reproduce.match_rows(said, ["LUCIR", "LUCIR, Balanced", "PODNet", "PODNet, Balanced"]) == meant


@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=1)], ids=lambda remedy: remedy.name)
def test_a_speed_is_measured_with_as_few_images_as_it_allows(remedy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(estimate.SHAPES, "few", (3, 20, 20))  # not tiny: trained by ResNet-32
    monkeypatch.setitem(estimate.COUNTS, "few", [30] * 10)
    found = estimate.measure_speed(ILBaseline(remedy), "few", "cpu")
    assert found.base > 0 and found.later > 0 and found.mib > 0


@pytest.mark.usefixtures("here")
def test_the_speed_of_every_run_of_the_tables_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joint training too, which takes no memory but all."""
    monkeypatch.setattr(estimate, "measure_in_process", estimate.measure_speed)
    runs = list_runs([paper.rehearse_on_digits(table) for table in paper.make_tables()], 1)
    said: list[str] = []
    assert estimate.estimate(runs, "cpu", said.append).seconds > 0
    assert {words.split()[4] for words in said} >= {"il-baseline", "lucir", "podnet", "fine-tuning", "joint"}


def test_time_and_memory_are_estimated_from_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(method: Any, *rest: Any) -> estimate.Speed:
        slow = isinstance(method.remedy, Meta)
        assert not slow or method.remedy.every == 1
        return estimate.Speed(1000.0, 50.0 if slow else 100.0, 700.0 if slow else 500.0)

    monkeypatch.setattr(estimate, "find_speed", known)
    balanced = Run(
        ILBaseline(Balanced()), Data("digits"), Protocol(steps=5, memory="20")
    )  # 20 epochs: 700 images, then 240 to 320
    base, later = 20 * 700 / 1000, 20 * (240 + 260 + 280 + 300 + 320) / 100
    assert estimate.estimate([balanced], "cpu") == (pytest.approx(base + later), 500.0)
    standard = replace(balanced, method=ILBaseline())
    assert estimate.estimate([balanced, standard], "cpu").seconds == pytest.approx(base + 2 * later)
    assert estimate.estimate([balanced, standard], "cpu", shared=False).seconds == pytest.approx(2 * (base + later))
    assert estimate.estimate([balanced, replace(standard, seed=1)], "cpu").seconds == pytest.approx(2 * (base + later))
    # An update of α doubles the time of one batch in ten.
    learned = replace(balanced, method=ILBaseline(Meta()))
    held = 20 * 2 * (6 + 7 + 8 + 9 + 10) / 100  # two images of each class are not trained on
    assert estimate.estimate([learned], "cpu") == (pytest.approx(base + 1.1 * (later - held)), 700.0)
    refitted = replace(balanced, method=ILBaseline(BalancedFinetuning()))
    refits = [20 * 20 * classes for classes in (6, 7, 8, 9, 10)]
    more = [a - b for a, b in zip(estimate.count_step_images(refitted), estimate.count_step_images(standard))]
    assert more == [0, *refits]
    assert estimate.estimate([refitted], "cpu").seconds == pytest.approx(base + later + sum(refits) / 100)


def test_the_speed_of_a_remedy_that_adapts_needs_no_field_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tuned(Balanced):
        name = "tuned"

        def adapt(self) -> Adapt:
            return Adapt("alpha", 1.0, 0.1, 5, 8)

    def known(method: Any, *rest: Any) -> estimate.Speed:
        return estimate.Speed(1000.0, 100.0 if method.remedy.adapt() is None else 50.0, 500.0)

    monkeypatch.setattr(estimate, "find_speed", known)
    for remedy, later in ((Tuned(), 50.0), (Meta(every=1), 50.0), (Meta(every=4), 80.0)):
        run = Run(ILBaseline(remedy), Data("digits"))
        assert estimate.estimate_speed(run, "cpu", print).later == pytest.approx(later)


def test_a_failing_run_is_named_at_the_end_and_blocks_nothing(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = paper.rehearse_on_digits(paper.make_table("confusion"))
    good, bad, _ = table.rows
    run_of = bad.cells[0].run
    assert run_of is not None and good.cells[0].run is not None
    short = Recipe(epochs=1, batch=32, lr=0.05)
    cells = (replace(good.cells[0], run=replace(good.cells[0].run, recipe=short)),)
    broken = (replace(bad.cells[0], run=replace(run_of, recipe=replace(short, lr=1e9))),)
    made = replace(table, rows=(replace(bad, cells=broken), replace(good, cells=cells)))
    monkeypatch.setattr(reproduce, "choose_tables", lambda *words: [made])
    assert run_command(["paper", "confusion", "--workers", "1"]) == 1
    said = capfd.readouterr()
    assert "diverged" in said.err and "1 of 2 runs failed" in said.err
    assert len(list((here / "results").rglob("result.json"))) == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["tabel1"], 2, "did you mean 'table1'"),
        (["table1", "--dataset", "cifar10"], 2, "did you mean 'cifar100'"),
        (["table2", "--dataset", "cifar100"], 2, "table2 has nothing on cifar100"),
        (["table1", "--rows", ","], 2, "names no row"),
        (["table2"], 2, "need the images of ImageNet, which no download gives: name their folder: --data"),
        (["table1", "--dataset", "imagenet"], 2, "name their folder: --data"),
        (
            ["table1", "--dataset", "imagenet", "--data", "nowhere"],
            1,
            "nowhere does not exist: name the one",
        ),
        (["table2", "--dry-run", "--data", "nowhere"], 1, "nowhere does not exist"),
        (["table6", "--subset", "seed1993"], 2, "--subset belongs to --dataset imagenet-subset"),
        (["claims", "--dataset", "imagenet-subset", "--subset", "seed1993"], 2, "leave out --subset"),
        (["table1", "--seeds", "0"], 2, "seeds must be a whole number of 1 or more"),
        (["table1", "--dataset", "digits", "--workers", "0"], 2, "workers must be 1 or more"),
        (["table1", "--dataset", "digits", "--device", "gpu"], 2, "device"),
        (["table6", "--dataset", "cifar100", "--data", "nowhere"], 1, "nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    words: list[str], code: int, says: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["paper", *words]) == code
    err = capfd.readouterr().err
    assert says in err and "Traceback" not in err
    assert not list(here.rglob("run.json"))


@pytest.mark.parametrize(
    ("id", "row", "column", "words"),
    [
        ("table1", "LUCIR", "imagenet-subset-5", "--lambda-base 10.0 --last short"),
        (
            "table1",
            "LUCIR",
            "imagenet-10",
            "--lambda-base 10.0 --finetune-epochs 20 --finetune-weight-decay 0.0001 --last short",
        ),
        (
            "table2",
            "LUCIR",
            "imagenet-average",
            "--lambda-base 10.0 --finetune-epochs 20 --finetune-weight-decay 0.0001 --last short",
        ),
        ("table1", "LUCIR, Balanced", "imagenet-5", "--lambda-base 10.0 --last short"),
        ("table3", "LUCIR", "imagenet-5", "--lambda-base 10.0 --last short"),
        (
            "table1",
            "PODNet",
            "imagenet-subset-25",
            "--lambda-c 8.0 --lambda-f 10.0 --finetune-lr 0.01 --finetune-batch 64 --last short",
        ),
        (
            "table1",
            "PODNet",
            "imagenet-5",
            "--lambda-c 8.0 --lambda-f 10.0 --finetune-lr 0.01 --finetune-batch 64 --finetune-weight-decay 0.0001 "
            "--weight-decay 0.0001 --last short",
        ),
        ("table3", "PODNet", "imagenet-subset-5", "--lambda-c 8.0 --lambda-f 10.0 --last short"),
        ("table3", "PODNet", "imagenet-5", "--lambda-c 8.0 --lambda-f 10.0 --weight-decay 0.0001 --last short"),
        ("table3", "LUCIR, Relaxed", "cifar100-10", "--last short"),
        ("table3", "NCM", "cifar100-10", "--last short"),
        ("epsilon", "PODNet, 5 steps, ε 1%", "cifar100-average", "--epsilon 1% --last short"),
        ("table1", "PODNet", "cifar100-5", "--last short"),
        ("table1", "IL-Baseline, Meta", "imagenet-5", "--last short"),
        ("table4", "IL-Baseline, Meta", "cifar100-memory-5", "--last short"),
        ("table5", "Meta", "cifar100-10-final", "--last short"),
        ("table6", "class oversampling", "cifar100-5", "--last short"),
        ("confusion", "IL-Baseline", "cifar100-final", "--last short"),
        ("batches", "PODNet, 20 kept", "cifar100-25-joined", ""),
    ],
)
def test_methods_are_set_as_the_originals_set_them(id: str, row: str, column: str, words: str) -> None:
    cells = next(one.cells for one in paper.make_table(id).rows if one.name == row)
    run = next(cell.run for cell in cells if cell.column.id == column)
    assert run is not None
    said = re.sub(r"--(remedy|dataset|steps|memory|seed|base) \S+", "", words_of(run)).split()[3:]
    assert said == words.split()
    if id == "table6":
        assert f"--remedy {row.replace(' ', '-')} " in words_of(run)
    run.method.check(20 if run.protocol.memory != "0" else 0)


def test_every_method_has_its_settings_for_imagenet_and_so_has_its_host() -> None:
    wrapped = type("Kept", (Around,), {"name": "kept"})
    for kind in methods.find_built_in().values():
        memory = kind().default_memory
        for dataset in ("imagenet-subset", "imagenet"):
            run, around = (make_run(m, dataset, Protocol(memory=memory)) for m in (kind(), wrapped(host=kind())))
            run.method.check(Budget.parse(memory).share(100))
            assert isinstance(around.method, wrapped)
            assert (around.method.host, around.recipe) == (run.method, run.recipe)  # type: ignore[attr-defined]


def test_the_overview_names_every_table(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "find_speed", lambda *words: estimate.Speed(1e4, 1e4, 1.0))
    assert run_command(["paper", "--dataset", "digits"]) == 0
    out = capfd.readouterr().out
    assert all((table.id in out) == bool(paper.rehearse_on_digits(table).rows) for table in paper.make_tables())
    assert "table2" not in out, "it is of ImageNet alone"


def test_the_overview_measures_no_speed_unless_the_time_is_asked_for(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "find_speed", None)
    assert run_command(["paper", "--dataset", "digits"]) == 0
    assert "one at a time" not in capfd.readouterr().out
    monkeypatch.setattr(estimate, "find_speed", lambda *words: estimate.Speed(1e4, 1e4, 1.0))
    assert run_command(["paper", "--dataset", "digits", "--dry-run"]) == 0
    out = capfd.readouterr().out
    (line,) = (line for line in out.splitlines() if line.strip().startswith("table6"))
    assert "one at a time" in out and re.search(r"\d (s|min)\b", line)


def test_the_overview_counts_what_is_recorded_and_what_is_not_here(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "find_speed", lambda *words: estimate.Speed(1e6, 1e6, 1.0))
    assert run_command(["paper", "--results", str(ROOT / "results")]) == 0
    out = capfd.readouterr().out
    runs = list_runs([paper.make_table("table1")], 1)
    left = find_missing_runs(runs, load_records(ROOT / "results"))
    (line,) = (line for line in out.splitlines() if line.strip().startswith("table1"))
    assert f" {len(runs)} " in line and f" {len(left)} " in line and "35 runs need" in line
    (line,) = (line for line in out.splitlines() if line.strip().startswith("table2"))
    assert "7 runs need imagenet" in line


def test_a_rehearsal_has_every_row_that_has_a_run() -> None:
    for table in paper.make_tables():
        could = [(row.name, c.run) for row in table.rows for c in row.cells if c.run and c.run.data.name == "cifar100"]
        small = paper.rehearse_on_digits(table)
        assert {row.name for row in small.rows} == {name for name, run in could if run.protocol.steps == 5}
        assert all(c.paper is None and c.run and c.run.data.name == "digits" for row in small.rows for c in row.cells)
        for row in small.rows:
            for cell in row.cells:
                assert cell.run is not None
                prepare(cell.run, loaded=DIGITS)
    for row in paper.rehearse_on_digits(paper.make_table("batches")).rows:
        joined, short = (cell.run for cell in row.cells)
        assert joined and short and joined.recipe is None
        assert short.recipe == replace(short.method.recipe(plan_for(SHAPES["digits"])), last="short")


def test_a_run_has_one_folder_whichever_table_asks_for_it() -> None:
    """So that one that was stopped goes on, whoever asks."""
    folders: dict[str, set[str]] = {}
    for each in every_run():
        if each.data.name == "cifar100":
            folders.setdefault(make_key(each), set()).add(name_folder(each))
    assert len(folders) > 100 and all(len(names) == 1 for names in folders.values())


DIGITS = load("digits")


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(UsageError, match="table7"):
        paper.make_table("table7")


def test_of_very_many_rows_the_nearest_are_named() -> None:
    said = str(make_unknown_error("row", "lucir, 5 step, ε 7", [row.name for row in paper.make_table("epsilon").rows]))
    assert said.startswith("unknown row 'lucir, 5 step, ε 7': did you mean 'LUCIR, 5 steps, ε ")
    assert said.endswith("; and 28 more") and said.count(";") == 8


def test_what_is_recorded_is_printed_with_all_its_seeds(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded_with(
        here / "results", {0: 60.0, 1: 61.0, 2: 62.0}, Run(ILBaseline(Balanced()), protocol=Protocol(steps=5))
    )
    words = ["paper", "table6", "--dataset", "cifar100", "--rows", "Balanced", "--no-run", "--format", "csv"]
    for more, said in (([], ["61.0000", "1.0000", "3"]), (["--seeds", "1"], ["60.0000", "", "1"])):
        assert run_command([*words, *more]) == 0
        (line,) = csv.DictReader(capfd.readouterr().out.splitlines())
        assert [line["ours"], line["std"], line["seeds"]] == said and line["last"] == "joined"
    assert run_command([*words[:-1], "latex"]) == 0
    assert r"$^{j}$, 3 seeds)" in capfd.readouterr().out


def test_what_is_printed_without_running(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Nothing is measured for it, and what this version cannot load has its published numbers."""
    monkeypatch.setattr(estimate, "measure_speed", None)
    assert run_command(["paper", "--no-run"]) == 0
    said = capfd.readouterr()
    assert "table1" in said.out and said.err == "results does not exist: nothing is recorded yet\n"
    assert run_command(["paper", "table1", "--dataset", "imagenet", "--no-run", "--format", "csv"]) == 0
    assert ",needs imagenet," in capfd.readouterr().out
    assert run_command(["paper", "costs", "--no-run", "--commands"]) == 0
    said = capfd.readouterr().out
    assert "IL-Baseline, Meta: equipoise run il-baseline --remedy meta --alpha-lr 1" in said
    assert said.count(" --store none\n") == 8, "a timing reuses nothing"
    assert run_command(["paper", "table1", "--no-run", "--dry-run"]) == 2
    assert "ask for one of them" in capfd.readouterr().err


def test_a_timing_is_found_beside_a_record_that_reused_a_step(tmp_path: Path) -> None:
    timed = next(row.cells[0].run for row in paper.make_table("costs").rows)
    assert timed is not None
    recorded_with(tmp_path / "a", {0: 41.0}, timed)
    (file,) = (tmp_path / "a").rglob("result.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reused": {"steps": [0], "seconds": 1.0}}))
    assert find_missing_runs([timed], load_records(tmp_path), alone=True) == [timed]
    recorded_with(tmp_path / "b", {0: 42.0}, timed)
    assert find_missing_runs([timed], load_records(tmp_path), alone=True) == []


def test_what_looks_within_its_steps_is_done_once_and_serves_other_tables(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a record of the same run that did not look, and without steps that others shared."""
    short = Recipe(epochs=2, batch=32, lr=0.05)

    def shorten(cell: Cell) -> Cell | None:
        return None if cell.run is None else replace(cell, run=replace(cell.run, recipe=short))

    looking = paper.rehearse_on_digits(paper.make_table("anytime"))
    looking = replace(looking, look=1, rows=looking.rows[-1:]).map(shorten)
    plain = replace(looking, id="plain", look=0)
    monkeypatch.setattr(reproduce, "choose_tables", lambda *words: [plain, looking])
    words = ["paper", "plain", "anytime", "--workers", "1"]
    assert run_command([*words, "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "1 run," in said and said.count("--evaluate-every 1 --store none  #") == 1
    assert run_command(words) == 0
    (made,) = (here / "results").rglob("result.json")
    assert made.parent.parent.name == "looked" and not (here / "cache" / "store").exists()
    looks = json.loads(made.read_text())["looks"]
    assert [(look["step"], look["done"]) for look in looks] == [(t, done) for t in range(6) for done in (0.5, 1.0)]

    run = plain.rows[0].cells[0].run
    assert run is not None
    recorded_with(here / "results" / "a", {0: 41.0}, run)  # first by name
    records = load_records(here / "results")
    for table in (plain, looking):
        cells = fill(table, records)[0].cells
        assert [cell.found[0].id for cell in cells] == [made.parent.relative_to(here / "results").as_posix()] * 3
        assert cells[0].ours == pytest.approx(sum(look["top1"] for look in looks[2:]) / 10)
        assert cells[1].ours == pytest.approx(sum(look["top1"] for look in looks[3::2]) / 5) == cells[2].ours
    made.unlink()
    records = load_records(here / "results")
    assert fill(plain, records)[0].cells[0].found and not fill(looking, records)[0].cells[0].found
    assert find_missing_runs([run], records) == [] and find_missing_runs([run], records, looks=True) == [run]


def test_the_memory_of_a_table_is_one_that_runs_take() -> None:
    assert {str(Budget.parse(r.protocol.memory)) for r in every_run()} == {
        "0",
        "1",
        "5",
        "10",
        "20",
        "50",
        "all",
        "total:200",
        "total:2000",
        "total:20000",
    }
