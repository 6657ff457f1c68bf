"""The paper's cells on ImageNet and ImageNet-Subset."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from records import make_record

from equipoise import paper
from equipoise.cli import run_command
from equipoise.cli.request import Request, parse_request
from equipoise.data.augment import ResizedCrop
from equipoise.data.datasets import COUNTS
from equipoise.method import Method
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.lucir import LUCIR
from equipoise.paper.match import NONE, fill, list_runs, load_records
from equipoise.remedies import Meta
from equipoise.report.tables import make_grid
from equipoise.runs import estimate
from equipoise.runs.plan import compute_sizes, resolve
from equipoise.runs.settings import Data, Protocol, Run

WITH_CELLS = {"table1": 35, "table2": 7, "table3": 32, "quoted": 39, "epsilon": 36, "text": 8}
"""tables that have cells on ImageNet or its subset, and their numbers of runs there"""


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is measured, and classes have a fiftieth of their images, which are counted one by one."""
    monkeypatch.setattr(estimate, "find_speed", lambda *words: estimate.Speed(1e4, 1e4, 1.0))
    for name in ("imagenet", "imagenet-subset"):
        monkeypatch.setitem(COUNTS, name, tuple(count // 50 for count in COUNTS[name]))
    estimate.count_step_images.cache_clear()
    yield
    estimate.count_step_images.cache_clear()


@pytest.mark.usefixtures("isolated", "known_speed")
@pytest.mark.parametrize("id", WITH_CELLS)
def test_every_cell_is_a_run_with_an_estimate(id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before one has the images, too."""
    found = set()
    for dataset in ("imagenet-subset", "imagenet"):
        table = paper.make_table(id).on(dataset)
        if not table.rows:
            continue
        assert run_command(["paper", id, "--dataset", dataset, "--dry-run"]) == 0
        *lines, total = capsys.readouterr().out.splitlines()
        assert total.startswith(f"{len(lines)} runs, ")
        for line in lines:
            command, words = line.split("  # ")
            assert "million images, " in words and words.endswith(" MiB")
            found.add(parse_request(shlex.split(command)[2:], "run", Request).run)
    resolved = {resolve(run, len(COUNTS[run.data.name]), run.data.shape) for run in found}
    assert len(resolved) == len(found) == WITH_CELLS[id]
    wanted = list_runs([paper.make_table(id)], 1, folders=True)
    assert resolved == {
        resolve(run, len(COUNTS[run.data.name]), run.data.shape) for run in wanted if run.data.name != "cifar100"
    }
    for run in resolved:
        assert run.recipe is not None
        assert run.recipe.last == ("joined" if run.method.name in ("bic", "ss-il") else "short")
        assert run.data.size == 224 and run.protocol.order == "1993"
        sizes = compute_sizes(run, len(COUNTS[run.data.name]))
        assert sizes in EQUAL_STEPS or sizes[0] == sum(sizes[1:]) == sum(sizes) // 2
        if sizes in EQUAL_STEPS:
            assert run.data.name == "imagenet" and run.protocol.memory == "total:20000"
        else:
            assert run.protocol.memory in ("0", "20", "all") and len(sizes) in (6, 11, 26)


EQUAL_STEPS = ((100,) * 10,)


def test_every_number_on_imagenet_in_the_main_tables_is_that_of_a_run() -> None:
    """Of its own rows in these tables, and of what they quote in another."""
    quoted = {row.name: row for row in paper.make_table("quoted").rows}
    for id, which in (("table1", ""), ("table2", ", ten equal steps"), ("table3", ", no memory")):
        for row in paper.make_table(id).on("imagenet", "imagenet-subset").rows:
            if "(reported)" in row.name:
                continue
            shown = quoted[f"{row.name}{which}"] if row.quoted else row
            numbers = {cell.column.id: cell.paper for cell in row.cells if cell.paper is not None}
            if row.name == "LUCIR w/ Mnemonics":
                numbers = {id: number for id, number in numbers.items() if "subset" in id}
            assert {cell.column.id: cell.paper for cell in shown.cells if cell.run is not None} == numbers


def test_numbers_of_images_are_those_of_imagenet() -> None:
    assert sum(COUNTS["imagenet"]) == 1_281_167 and len(COUNTS["imagenet"]) == 1000
    assert sum(COUNTS["imagenet-subset"]) == 129_395 and len(COUNTS["imagenet-subset"]) == 100
    run = next(r for r in list_runs([paper.make_table("table1")], 1, folders=True) if r.data.name == "imagenet-subset")
    base, *later = estimate.count_step_images(run)
    assert (run.method.name, run.protocol.steps) == ("il-baseline", 5)
    assert base == 100 * sum(COUNTS["imagenet-subset"][:50])
    assert later == [100 * (sum(COUNTS["imagenet-subset"][k : k + 10]) + 20 * k) for k in (50, 60, 70, 80, 90)]


def test_time_on_imagenet_counts_no_base_step_of_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes have different numbers of images there, by which the balanced loss weighs them in every step."""
    monkeypatch.setattr(estimate, "find_speed", lambda *words: estimate.Speed(100.0, 100.0, 1.0))
    both = [
        run
        for run in list_runs([paper.make_table("table1").on("imagenet-subset")], 1, folders=True)
        if run.method.name == "lucir" and run.protocol.steps == 5
    ]
    alone = sum(estimate.estimate([run], "cpu").seconds for run in both)
    assert len(both) == 2 and estimate.estimate(both, "cpu").seconds == pytest.approx(alone)
    twice = [both[0], replace(both[0], protocol=Protocol(steps=10))]
    assert estimate.estimate(twice, "cpu").seconds < sum(estimate.estimate([run], "cpu").seconds for run in twice)


@pytest.mark.parametrize("method", [LUCIR(), ILBaseline(Meta(every=1))], ids=lambda method: method.name)
def test_a_speed_is_measured_on_boxes_cut_out_of_photographs(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 x 341 pixels for 224; of all images, only what is on the device counts as memory."""
    assert estimate.find_stored_size((3, 224, 224)) == (256, 341)
    monkeypatch.setattr(estimate, "SMALL", 8)
    cut: list[tuple[int, ...]] = []
    crop = ResizedCrop.cut
    monkeypatch.setattr(ResizedCrop, "cut", lambda self, *words: (cut.append(self.size), crop(self, *words))[1])
    found = estimate.measure_speed(method, "imagenet", "cpu", 12)
    assert found.base > 0 and found.later > 0 and {*cut} == {12}
    monkeypatch.setattr(estimate, "ROOM", 0)
    monkeypatch.setattr(estimate, "measure_process_memory", lambda: 0.0)
    least = estimate.measure_speed(method, "imagenet", "cpu", 12).mib
    assert least == pytest.approx((20 * 1000 * 3 * 12 * 16 + 2 * estimate.WINDOW) / 2**20)


def test_a_record_on_imagenet_fills_its_cell_by_the_same_definition_only(tmp_path: Path) -> None:
    table = paper.make_table("table1")
    cells = next(row.cells for row in table.rows if row.name == "IL-Baseline")
    cell = next(cell for cell in cells if cell.column.id == "imagenet-subset-5")
    assert cell.run is not None and cell.paper is not None
    drawn = replace(cell.run, data=Data("imagenet-subset", subset="seed1993"))
    for name, run, value in (("own", cell.run, cell.paper), ("drawn", drawn, cell.paper - 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(make_record(run, value, value, value, value)))
    records = load_records(tmp_path)

    def find(run: Run | None, records=records):
        shown = replace(table, rows=tuple(replace(r, cells=(replace(cell, run=run),)) for r in table.rows[-1:]))
        return fill(shown, records)[0].cells[0]

    assert find(cell.run).state == "close" and find(cell.run).values == [cell.paper] and find(cell.run).needs is None
    assert find(drawn).values == [cell.paper - 5]
    assert (find(cell.run, NONE).state, find(cell.run, NONE).needs) == ("needs data", "imagenet")


@pytest.mark.usefixtures("isolated", "known_speed")
def test_what_is_listed_is_that_of_the_definition_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["paper", "table3", "--dataset", "imagenet-subset", "--rows", "NCM", "--dry-run"]
    Path("my images").mkdir()
    drawn = "100 classes of ImageNet drawn with NumPy's seed 1993 (seed1993)"
    for more, said, flags in (
        ([], "the first 100 classes of ImageNet in sorted order (first100)", ""),
        (["--subset", "first100"], "the first 100 classes of ImageNet in sorted order (first100)", ""),
        (["--subset", "seed1993"], drawn, "--subset seed1993 "),
    ):
        assert run_command([*words, "--data", "my images", *more]) == 0
        out, err = capsys.readouterr()
        assert f"ImageNet-Subset is {said}\n" in err
        line = next(line for line in out.splitlines() if " --steps 5 " in line)
        assert f"--dataset imagenet-subset {flags}--steps 5 " in line and " --data 'my images'  # " in line
    assert run_command([*words, "--images-on", "disk"]) == 0
    assert capsys.readouterr().out.count("--dataset imagenet-subset --images-on disk --steps") == 2
    assert run_command(["paper", "table6", "--dry-run", "--images-on", "disk"]) == 2
    assert "--images-on belongs to --dataset imagenet or imagenet-subset" in capsys.readouterr().err
    assert run_command(["paper", "--dataset", "imagenet-subset", "--data", "my images"]) == 0
    overview = capsys.readouterr().out
    assert "runs need" not in overview and "table3" in overview
    assert run_command(["paper", "table3", "--dataset", "imagenet-subset", "--no-run", "--subset", "seed1993"]) == 0
    assert "ImageNet-Subset (seed1993)" in capsys.readouterr().out


@pytest.mark.usefixtures("isolated", "known_speed")
def test_a_table_is_of_mini_imagenet_and_the_papers_numbers_of_the_subset_stand_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the settings for ImageNet-Subset; a record of another folder, whatever it holds, fills no cell."""
    table, subset = paper.make_table("mini-imagenet"), {}
    for one, part in (("table1", "20 kept"), ("table3", "no memory")):
        for row in paper.make_table(one).rows:
            subset |= {f"{row.name}, {part}": c for c in row.cells if c.column.id == "imagenet-subset-5"}
    assert len(table.rows) == 13
    for row in table.rows:
        own, theirs = row.cells[0].run, subset[row.name]
        assert own is not None and theirs.run is not None
        assert own == replace(theirs.run, data=Data("mini-imagenet")) and own.data.shape == (3, 84, 84)
        assert [(cell.paper, cell.run) for cell in row.cells[3:]] == [(theirs.paper, None)]

    run = table.rows[1].cells[0].run
    assert run is not None
    record = make_record(run, 50.0, 40.0, 45.0, 35.0)
    for name, more in (("folder", {"normalise": "imagenet"}), ("mini-imagenet", {})):
        (tmp_path / name).mkdir()
        there = {**record, "run": {**record["run"], "data": {**record["run"]["data"], "name": name, **more}}}
        (tmp_path / name / "result.json").write_text(json.dumps(there))
        cells = fill(table, load_records(tmp_path))[1].cells
        assert [len(cell.found) for cell in cells] == [int(name != "folder")] * 3 + [0]
    assert [cell.state for cell in cells] == ["measured"] * 3 + ["quoted"]
    assert cells[0].difference is None and cells[3].ours is None
    made = make_grid(table, fill(table, load_records(tmp_path)))
    assert [cell.text for cell in made.rows[1].cells] == ["50.00", "45.00", "35.00", "72.57"]
    assert "In brackets" not in made.caption and "Not measured: needs mini-imagenet" in made.caption

    assert run_command(["paper", "mini-imagenet", "--dry-run"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and all("--dataset mini-imagenet --steps 5" in line for line in lines)
    assert total.startswith("13 runs, ")
    for words, said in (
        ([], "these cells need the images of mini-ImageNet, which no download gives: name their folder: --data"),
        (["--data", "nowhere"], "nowhere does not exist"),
    ):
        assert run_command(["paper", "mini-imagenet", *words]) != 0
        assert said in capsys.readouterr().err
