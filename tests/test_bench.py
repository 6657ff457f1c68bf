"""The benchmark measures what it says; how fast this machine is, no test can know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from equipoise.cli import run_command
from equipoise.cli.large import list_large_rows, make_large_images
from equipoise.cli.speed import (
    PerImage,
    Row,
    Setting,
    Stretch,
    combine,
    count_work,
    list_rows,
    make_images,
    make_step,
    run_our_loop,
)
from equipoise.cli.systems import list_methods, prepare_step
from equipoise.data.ragged import Ragged
from equipoise.errors import UsageError
from equipoise.methods import find_built_in
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.spb import SPB
from equipoise.methods.ss_il import SSIL
from equipoise.remedies import Balanced
from equipoise.step import Stage


def test_flops_are_those_of_resnet_32_counted_by_hand() -> None:
    # Multiply-adds of the convolutions, stage by stage; the last is the linear layer.
    stage1 = 10 * 16 * 16 * 9 * 32 * 32
    stage2 = (16 * 32 * 9 + 9 * 32 * 32 * 9 + 16 * 32) * 16 * 16
    stage3 = (32 * 64 * 9 + 9 * 64 * 64 * 9 + 32 * 64) * 8 * 8
    forward = 3 * 16 * 9 * 32 * 32 + stage1 + stage2 + stage3 + 64 * 60
    flops, moved = count_work(torch.device("cpu"), False)
    assert flops == 3 * 2 * forward
    outputs = 11 * 16 * 32 * 32 + 11 * 32 * 16 * 16 + 11 * 64 * 8 * 8
    assert moved == 6 * 4 * outputs


def test_the_peers_data_set_crops_mirrors_and_normalises() -> None:
    images = make_images(4)
    torch.manual_seed(0)
    seen = torch.stack([PerImage(images)[1][0] for _ in range(50)])
    assert seen.shape == (50, 3, 32, 32)
    assert len({tuple(x.flatten()[:50].tolist()) for x in seen}) > 20
    assert seen.min() < -1.5 and seen.max() > 1.5


def test_rows_on_a_gpu_have_every_engine_and_packing() -> None:
    rows = list_rows(torch.device("cuda"), (2, 4))
    assert [str(r) for r in rows if not r.teacher] == [
        "DataLoader, PIL, eager, fp32",
        "ours, eager",
        "ours, captured",
        "ours, compiled",
        "ours, fused",
        "ours, fused, 2 at once",
        "ours, fused, 4 at once",
    ]
    assert len(rows) == 14 and rows[7] == Row(None, True)


def test_runs_at_once_are_counted_from_the_first_to_the_last() -> None:
    assert combine([Stretch(600, 10.0, 14.0), Stretch(600, 11.0, 16.0)]) == 200.0
    found = run_our_loop(Row("eager", False), Setting(torch.device("cpu"), False, 40, 16))
    # Batches of 16 from a stream of epochs of 40: two or three in each, five in the last two.
    assert found.images == 80 and found.ended > found.began


def test_a_row_with_a_teacher_is_a_step_after_the_base_step() -> None:
    data = make_images(300)
    method = ILBaseline(Balanced())
    with_teacher, without = (make_step(method, data, taught) for taught in (True, False))
    assert (with_teacher.t, with_teacher.n_old, with_teacher.N) == (1, 50, 60)
    assert (without.t, without.n_old, without.N, without.teacher) == (0, 0, 60, None)
    assert with_teacher.teacher is not None and len(with_teacher.teacher.head.weight) == 50
    assert (
        torch.equal(with_teacher.lam, torch.bincount(data.y, minlength=60).float()) and int(with_teacher.n.sum()) == 300
    )


@pytest.mark.usefixtures("forked")
def test_the_command_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert run_command(["bench", "--images", "16", "--batch", "8", "--packed", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    said = capsys.readouterr().out
    assert [r["packed"] for r in record["rows"]] == [1, 1, 2] * 2
    for row in record["rows"]:
        assert row["images_per_second"] > 0
        assert f"{row['images_per_second']:,.0f}" in said
    assert record["rows"][0]["ratio"] == record["rows"][3]["ratio"] == 1
    assert record["hardware"]["cpu"] and record["versions"]["torch"] == torch.__version__
    assert run_command(["bench", "--images", "8", "--batch", "16"]) == 2
    assert "images must be a whole number of 32 or more" in capsys.readouterr().err
    for where, code in ((tmp_path, 2), (out / "record.json", 1)):  # a folder; and a file where a folder is needed
        assert run_command(["bench", "--images", "32", "--batch", "16", "--out", str(where)]) == code
        assert capsys.readouterr().out == "", "said before anything is measured"


# Large images


def test_flops_of_large_images_are_those_of_resnet_18_counted_by_hand() -> None:
    # Multiply-adds: the first convolution, four stages of four 3×3 convolutions, the last three of which begin by a
    # stride and have a shortcut, and the linear layer.
    forward = 3 * 64 * 49 * 112**2 + 4 * 64 * 64 * 9 * 56**2 + 512 * 60
    for wide, side in ((128, 28), (256, 14), (512, 7)):
        forward += (wide // 2 * wide * 9 + 3 * wide * wide * 9 + wide // 2 * wide) * side**2
    flops, moved = count_work(torch.device("cpu"), True, ILBaseline(), (3, 224, 224))
    assert flops == 3 * 2 * forward
    assert moved == 6 * 2 * (64 * 112**2 + 4 * 64 * 56**2 + 5 * (128 * 28**2 + 256 * 14**2 + 512 * 7**2))


def test_rows_of_large_images_are_chosen_by_name() -> None:
    gpu = torch.device("cuda")
    assert len(list_large_rows(gpu, None)) == 13
    assert list(map(str, list_large_rows(gpu, "crop, resnet18 comp*"))) == [
        "crop",
        "resnet18 compiled",
        "resnet18 compiled teacher",
    ]
    with pytest.raises(UsageError, match="unknown row 'eager': choose from crop, podnet captured,"):
        list_large_rows(gpu, "eager")


def test_large_images_are_like_photographs() -> None:
    images = make_large_images(Setting(torch.device("cpu"), False, 4, 2), 70)
    assert isinstance(images.x, Ragged)
    assert images.x.size.tolist() == [[80, 106], [106, 80]] * 2 and images.x.shape == (4, 3, 70, 70)
    assert len(images.x.pixels) == 4 * 3 * 80 * 106 and images.x.pixels.float().std() > 70


@pytest.mark.usefixtures("forked")
def test_training_on_large_images_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "large.json"
    words = ["bench", "--size", "65", "--images", "4", "--batch", "2", "--device", "cpu"]
    assert run_command([*words, "--rows", "crop, teacher", "--out", str(out)]) == 0
    record, said = json.loads(out.read_text()), capsys.readouterr().out
    assert [r["row"] for r in record["rows"]] == ["crop", "resnet18 eager teacher", "podnet eager teacher"]
    crop, resnet, podnet = record["rows"]
    for row in record["rows"]:
        assert row["images_per_second"] > 0 and f"{row['images_per_second']:,.0f}" in said
        assert row["fraction_of_limit"] > 0
    assert 3 * 65**2 < crop["bytes_per_image"] < 3 * 65**2 + 3 * 74 * 98, "a square, and at most the whole image"
    assert resnet["engine"] == "eager" and podnet["flops_per_image"] > 3 * resnet["flops_per_image"]
    assert run_command([*words, "--limit", "1e-9"]) == 0
    assert "crop: left out, 0 seconds are over" in capsys.readouterr().out
    assert run_command(["bench", "--rows", "crop"]) == 2
    assert (
        "--rows chooses among the rows for large images or of methods: add --size 224 or --methods"
        in capsys.readouterr().err
    )
    assert run_command(["bench", "--size", "32"]) == 2
    assert "size must be" in capsys.readouterr().err


# Methods


def test_every_method_that_trains_with_a_teacher_has_a_row() -> None:
    rows = list_methods(None)
    without = {"fine-tuning", "joint", "ncm", "slda"}
    assert {method.name for method in rows.values()} == find_built_in().keys() - without
    assert next(iter(rows)) == "il-baseline" and {"dde, lucir", "dde, podnet", "mnemonics, icarl"} <= rows.keys()
    assert list(list_methods("dde, podnet")) == ["dde, podnet"] and len(list_methods("dde, spb-?")) == 4
    costs = [method.cost for method in rows.values()]
    assert costs == sorted(costs)


def test_a_method_is_measured_in_a_step_as_of_cifar_100() -> None:
    on = Setting(torch.device("cpu"), False, 25_600, 128)
    before = prepare_step(SSIL(), on)
    plan = before.plan
    assert (plan.t, plan.sizes, plan.m, plan.keep) == (1, (50, 10), 20, 20)
    assert plan.counts == (20,) * 50 + (500,) * 10 and (len(before.data), len(before.memory)) == (5000, 1000)
    (train, _) = before.stages
    assert isinstance(train, Stage) and (train.recipe.batch, train.recipe.lr) == (160, 0.05)
    alone = prepare_step(SPB(), on)
    assert (alone.plan.m, alone.plan.keep, len(alone.memory)) == (0, 0, 0)


@pytest.mark.usefixtures("forked")
def test_methods_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "methods.json"
    words = ["bench", "--methods", "--images", "32", "--batch", "16", "--device", "cpu"]
    assert run_command([*words, "--rows", "il-baseline, geodl", "--out", str(out)]) == 0
    record, said = json.loads(out.read_text()), capsys.readouterr().out
    first, second = record["rows"]
    assert (first["row"], second["row"]) == ("il-baseline", "geodl") and first["cost"] == 1
    assert second["cost"] == pytest.approx(first["images_per_second"] / second["images_per_second"])
    for row in record["rows"]:
        assert (row["engine"], row["kept"], row["batch"]) == ("eager", 2, 16)
        assert row["images_in_an_epoch"] == 120 and f"{row['images_per_second']:,.0f}" in said
    assert run_command([*words, "--size", "224"]) == 2
    assert "--methods trains on images of CIFAR's size: remove --size" in capsys.readouterr().err
    assert run_command([*words, "--limit", "1e-9"]) == 0
    assert "spb-m: left out, 0 seconds are over" in capsys.readouterr().out
