"""Runs of the paper's cells on ImageNet and ImageNet-Subset, to their end: a made tree, small images, one epoch."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pictures import encode, make_image

from equipoise import paper
from equipoise.cli import reproduce, run_command
from equipoise.data.listing import list_folder
from equipoise.data.packing import Packing, pack
from equipoise.methods.podnet import PODNet
from equipoise.nets.backbones import PODNetResNet18
from equipoise.paper import Cell, Table
from equipoise.runs.run import run
from equipoise.runs.settings import Machine, Options, Run

SIZE = 8
WNIDS = [f"n{8 * k + 10_000_000:08}" for k in range(1000)]
"""names as those of ImageNet's classes, in sorted order"""
FULL = 100
"""classes with three images, of which Meta holds two out; the others have one"""

ROWS = {
    "table1": ("imagenet-subset-5", ["IL-Baseline, Meta", "LUCIR, Balanced", "PODNet"]),
    "table2": ("imagenet-average", ["IL-Baseline", "LUCIR", "PODNet, Balanced"]),
    "table3": ("imagenet-subset-5", ["NCM", "SLDA", "LUCIR, Relaxed", "PODNet, Relaxed"]),
    "quoted": ("imagenet-subset-5", ["iCaRL", "BiC", "LUCIR w/ DDE", "TPCIL", "SPB-M, no memory"]),
    "epsilon": ("imagenet-subset-final-base", ["PODNet, 5 steps, ε 1%"]),
}
"""of each table one row of each method that it has, and a column"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet's 1,000 classes, with few small images of different sizes, packed."""
    root = tmp_path_factory.mktemp("imagenet")
    files = [encode(make_image(k, 16 + k % 5, 16 + k % 7), "JPEG") for k in range(40)]
    for k, one in enumerate(WNIDS):
        for part, count in (("train", 3 if k < FULL else 1), ("val", 1)):
            (root / part / one).mkdir(parents=True)
            for i in range(count):
                (root / part / one / f"{one}_{i}.JPEG").write_bytes(files[(7 * k + i) % len(files)])
    pack(list_folder(root, "imagenet"), root / f"packed-{SIZE}", Packing(SIZE), workers=1)
    return root


def shorten(own: Run) -> Run:
    """The run on small images, with one epoch of each of its trainings.

    Of all classes, only IL-Baseline learns ten steps.
    """
    method, protocol = own.method, own.protocol
    if own.data.name == "imagenet" and method.name in ("lucir", "podnet"):
        protocol = replace(protocol, base=900, steps=1)
    if (finetune := getattr(method, "finetune", None)) is not None and finetune.epochs > 1:
        method = replace(method, finetune=replace(finetune, epochs=1))  # type: ignore[call-arg]
        method = method.reset_finetuning(memory=own.protocol.memory != "0")
    one = replace(own, method=method, data=replace(own.data, size=SIZE), protocol=protocol)
    assert own.recipe is not None
    return replace(one, recipe=replace(one.default_recipe, epochs=1, batch=256, last=own.recipe.last))


def choose_tables(*words: Any) -> list[Table]:
    """The rows of ROWS, shortened."""

    def change(cell: Cell) -> Cell | None:
        return cell if cell.run is None else replace(cell, run=shorten(cell.run))

    tables = []
    for id, (column, rows) in ROWS.items():
        table = paper.make_table(id)
        cells = table.map(lambda cell, column=column: cell if cell.column.id == column else None)  # type: ignore[misc]
        table = replace(cells, rows=tuple(row for row in cells.rows if row.name in rows)).map(change)
        assert [row.name for row in table.rows] == sorted(rows, key=[row.name for row in cells.rows].index)
        tables.append(table)
    return tables


@pytest.mark.usefixtures("isolated", "forked")
def test_every_method_runs_on_imagenet_from_the_command_to_the_table(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "choose_tables", choose_tables)
    words = ["paper", *ROWS, "--data", str(tree), "--device", "cpu", "--results", "records", "--format", "csv"]
    assert run_command([*words, "--checkpoint", "1000"]) == 0
    out, err = capfd.readouterr()
    assert "ImageNet-Subset is the first 100 classes of ImageNet in sorted order (first100)\n" in err
    lines = list(csv.DictReader(out.splitlines()))
    assert [(line["table"], line["row"]) for line in lines] == [
        (t, row) for t, (_, rows) in ROWS.items() for row in rows
    ]
    assert all(line["ours"] and line["seeds"] == "1" for line in lines)
    assert {line["row"] for line in lines if line["last"] == "joined"} == {"BiC"}
    made = [json.loads(path.read_text()) for path in Path("records").rglob("result.json")]
    assert len(made) == len(lines)
    assert run_command(["show", "records/imagenet-subset"]) == 0
    assert "imagenet-subset (first100)" in capfd.readouterr().out
    for record in made:
        subset = record["run"]["data"]["name"] == "imagenet-subset"
        assert len(record["class_order"]) == (100 if subset else 1000)
        assert record["run"]["data"].get("subset") == ("first100" if subset else None)
        assert record["class_order"][:4] == ([68, 56, 78, 8] if subset else [54, 7, 894, 512])
        assert record["average_incremental_accuracy_top5"] >= record["average_incremental_accuracy"]
        steps = [step["classes"] for step in record["steps"]]
        ten = list(range(100, 1001, 100)) if record["run"]["method"]["name"] == "il-baseline" else [900, 1000]
        assert steps == (list(range(50, 101, 10)) if subset else ten)

    monkeypatch.setitem(globals(), "ROWS", {"table3": ("imagenet-subset-5", ["NCM"])})
    words = ["paper", "table3", "--data", str(tree), "--device", "cpu", "--results", "drawn", "--subset", "seed1993"]
    assert run_command([*words, "--format", "csv", "--images-on", "device"]) == 0
    (line,) = csv.DictReader(capfd.readouterr().out.splitlines())
    assert line["ours"] and "--subset seed1993" in line["command"]
    (path,) = Path("drawn").rglob("result.json")
    assert json.loads(path.read_text())["run"]["data"]["subset"] == "seed1993"
    assert run_command(["show", "drawn"]) == 0
    assert "imagenet-subset (seed1993)" in capfd.readouterr().out


def test_the_net_of_large_images_runs_on_imagenet(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PODNet's, though the images are small."""
    cells = next(one.cells for one in paper.make_table("table1").rows if one.name == "PODNet")
    own = next(cell.run for cell in cells if cell.column.id == "imagenet-subset-5")
    assert own is not None
    monkeypatch.setitem(PODNet.backbones, "tiny", PODNetResNet18)
    nets: list[Any] = []
    do = PODNetResNet18.initialise
    monkeypatch.setattr(PODNetResNet18, "initialise", lambda self, gen: (nets.append(self), do(self, gen)))
    one = shorten(replace(own, protocol=replace(own.protocol, steps=1, memory="1")))
    result = run(one, tmp_path / "one", Machine("cpu", "fp32"), Options(tree, checkpoint=1000))
    assert len(nets) == 1 and [step["classes"] for step in result["steps"]] == [50, 100]
