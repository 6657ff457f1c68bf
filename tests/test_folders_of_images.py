"""Runs on folders of images: what is loaded, what is recorded, and the command line."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import make_image, make_tree, write, write_bad
from PIL import Image

from equipoise import ILBaseline, Recipe
from equipoise.cli import run_command
from equipoise.data import cifar100
from equipoise.data.augment import Crop, ResizedCrop
from equipoise.data.datasets import load
from equipoise.data.folders import IMAGENET, MINI_IMAGES
from equipoise.data.images import Images, measure_channels
from equipoise.data.listing import choose_classes, list_folder
from equipoise.data.packing import Packing, pack
from equipoise.errors import DataError, UsageError
from equipoise.runs.plan import prepare, read_run
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.settings import to_plain

CPU = Machine("cpu", "fp32")
CIFAR100 = Path(__file__).parents[2] / "shared/data/cifar100"
MINI = Path(__file__).parents[2] / "shared/data/mini-imagenet"


def write_images(root: Path, train: Images, test: Images, classes: tuple[str, ...]) -> None:
    """Images as PNG files that are named by their position."""
    for part, images in (("train", train), ("test", test)):
        for k, (x, y) in enumerate(zip(images.x, images.y.tolist())):
            write(root / part / classes[y] / f"{k:05}.png", Image.fromarray(x.permute(1, 2, 0).numpy()))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[Images, Images]:
    """CIFAR-100 with few images of 8 classes, in a mixed order, as its own files would give them."""
    gen = torch.Generator().manual_seed(0)
    parts = []
    for of_each in (10, 3):
        y = torch.arange(8).repeat_interleave(of_each)[torch.randperm(8 * of_each, generator=gen)]
        x = torch.randint(0, 256, (len(y), 3, 8, 8), generator=gen, dtype=torch.uint8)
        x = torch.nn.functional.interpolate(x, scale_factor=4) // 2 + 10 * y[:, None, None, None].to(torch.uint8)
        parts.append(Images(x.contiguous(), y))
    monkeypatch.setattr(cifar100, "CLASSES", cifar100.CLASSES[:8])
    monkeypatch.setattr(cifar100, "read", lambda folder, progress: tuple(parts))
    return parts[0], parts[1]


def test_cifar_as_a_folder_of_png_gives_the_record_of_cifar(tmp_path: Path, few: tuple[Images, Images]) -> None:
    """Bit for bit on the CPU: the same images in the same order, classes, augmentation, net and recipe."""
    write_images(tmp_path / "png", *few, cifar100.CLASSES)
    settings = {"protocol": Protocol(4, 2, memory="3"), "recipe": Recipe(2, batch=16, lr=0.05)}
    assert_equal_records(tmp_path, settings)


def assert_equal_records(tmp_path: Path, settings: dict[str, Any], files: Path | None = None) -> None:
    """A run on CIFAR-100 from its own files, and one on the folder png, have equal records and equal weights."""
    own = run(Run(ILBaseline(), Data("cifar100"), **settings), tmp_path / "own", CPU, Options(files))
    png = Data("folder", normalise="cifar100")
    other = run(Run(ILBaseline(), png, **settings), tmp_path / "other", CPU, Options(tmp_path / "png"))
    assert other["run"].pop("data") == {
        "name": "folder", "validation": 0.0, "brightness": 0.0, "size": 32, "normalise": "cifar100",
    }  # fmt: skip
    assert own["run"].pop("data") == {"name": "cifar100", "validation": 0.0, "brightness": 0.0}
    for record in (own, other):
        record["resolved"].pop("data")
        drop_times(record)
    assert own == other
    for name in ("learner.json",):
        a, b = (json.loads((tmp_path / part / "model" / name).read_bytes()) for part in ("own", "other"))
        assert a["sha256"] == b["sha256"]  # of all weights


@pytest.mark.skipif(not CIFAR100.is_dir(), reason="the copy of CIFAR-100 for development is not here")
def test_real_images_of_cifar_as_png_give_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of its classes among its first images, read from files in its own layout, and from PNG."""
    parts = {}
    meta = np.load(CIFAR100 / "meta.npz")
    with zipfile.ZipFile(CIFAR100 / "part1.zip") as archive:
        labels = np.load(io.BytesIO(archive.read("labels.npz")))
        for part in ("train", "test"):
            first = min(name for name in archive.namelist() if name.startswith(f"{part}_"))
            at = 500 * int(re.sub(r"\D", "", first))
            x = np.asarray(Image.open(io.BytesIO(archive.read(first))).convert("RGB")).reshape(-1, 32, 32, 3)
            parts[part] = x.transpose(0, 3, 1, 2), labels[f"{part}_labels"][at : at + len(x)]
    common = sorted(np.bincount(parts["train"][1], minlength=100).argsort()[-4:].tolist())
    monkeypatch.setattr(cifar100, "CLASSES", tuple(str(meta["classes"][label]) for label in common))
    images = []
    for part, (x, y) in parts.items():
        x, y = x[np.isin(y, common)], np.searchsorted(common, y[np.isin(y, common)])
        table = np.concatenate([np.zeros((len(y), 1)), y[:, None], x.reshape(len(y), -1)], 1).astype(np.uint8)
        (tmp_path / f"{part}.bin").write_bytes(table.tobytes())
        monkeypatch.setitem(cifar100.MD5, f"{part}.bin", hashlib.md5(table.tobytes()).hexdigest())
        images.append(Images(torch.from_numpy(x.copy()), torch.from_numpy(y.astype(np.int64))))
    monkeypatch.setattr(cifar100, "RECORDS", tuple(map(len, images)))
    write_images(tmp_path / "png", images[0], images[1], cifar100.CLASSES)
    settings = {"protocol": Protocol(2, 2, memory="2"), "recipe": Recipe(2, batch=8, lr=0.05)}
    assert_equal_records(tmp_path, settings, tmp_path)


def drop_times(record: Any) -> None:
    """Leave out of a record what differs between two runs of the same."""
    for value in [*record.values()] if isinstance(record, dict) else record if isinstance(record, list) else []:
        drop_times(value)
    for name in [name for name in record if "seconds" in name] if isinstance(record, dict) else []:
        del record[name]


def test_small_images_are_loaded_as_they_are_and_measured(tmp_path: Path, few: tuple[Images, Images]) -> None:
    write_images(tmp_path, *few, cifar100.CLASSES)
    data = load("folder", tmp_path, progress=False)
    for found, expected in zip((data.train, data.test), few):
        assert torch.equal(found.x, expected.x) and torch.equal(found.y, expected.y)
    mean, std = measure_channels(few[0].x)
    assert data.mean == pytest.approx((mean / 255).tolist(), abs=1e-12)
    assert data.std == pytest.approx((std / 255).tolist(), abs=1e-12)
    assert data.augment == Crop(4) and data.shape == (3, 32, 32) and data.classes == cifar100.CLASSES
    assert load("folder", tmp_path, normalise="cifar100").mean == cifar100.MEAN
    again = load("folder", tmp_path / "packed")
    assert again.fingerprint == data.fingerprint and torch.equal(again.test.x, data.test.x)


def test_settings_of_folders_are_recorded_where_they_apply_and_read_again() -> None:
    assert to_plain(Data()) == {"name": "cifar100", "validation": 0.0, "brightness": 0.0}
    plain = to_plain(Run(data=Data("imagenet-subset", subset="seed1993")))
    assert plain["data"] == {
        "name": "imagenet-subset", "validation": 0.0, "brightness": 0.0, "size": None, "subset": "seed1993",
    }  # fmt: skip
    assert read_run(plain | {"recipe": None}).data == Data("imagenet-subset", subset="seed1993")
    assert Data("imagenet-subset").resolve((3, 224, 224)) == Data("imagenet-subset", size=224, subset="first100")
    assert Data("folder").resolve((3, 20, 30)) == Data("folder", normalise="measured")
    del plain["data"]["subset"]
    with pytest.raises(DataError, match="subset is missing"):
        read_run(plain)
    for wrong in ({"size": 84}, {"subset": "first100"}, {"normalise": "imagenet"}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} belongs to the data sets .*, not to digits"):
            Data("digits", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="size must be a whole number of 8 or more and at most 4096, not 3"):
        Data("folder", size=3)
    with pytest.raises(UsageError, match="its recipe depends on the size of its images: choose a size"):
        _ = Run(data=Data("folder")).default_recipe


def test_counts_are_those_of_each_class(tmp_path: Path) -> None:
    """What cannot be decoded is in no class's count, nor in λ."""
    root = make_tree(tmp_path, classes=4, train=6)
    bad = write_bad(root / "train/class2")
    for k in range(3):
        write(root / "train/class1" / f"more{k}.png", make_image(k))
    plan = prepare(Run(data=Data("folder", size=16), protocol=Protocol(2, 2, order="natural")), CPU, root)
    assert torch.bincount(plan.train.y).tolist() == [6, 9, 6, 6]
    assert [p.counts for p in plan.make_plans()] == [(6, 9), (6, 9, 6), (6, 9, 6, 6)]
    assert f"{len(bad)} images left out" in (root / "packed-16/report.txt").read_text()


QUICK = "--epochs 1 --base 2 --steps 1 --memory 2 --device cpu --store none"


def test_a_folder_is_packed_at_its_first_use_and_said_so(tmp_path: Path, isolated: None, capsys: Any) -> None:
    root = make_tree(tmp_path / "data", train=6)
    (root / "train/class0/bad.png").write_bytes(b"")
    words = f"run il-baseline --dataset folder --data {root} {QUICK}"
    assert run_command([*words.split(), "--out", "one"]) == 0
    err = capsys.readouterr().err
    assert f"packing 25 images of {root} into {root / 'packed'}, once; test images are those of val\n" in err
    assert f"1 image left out, which cannot be decoded: see {root / 'packed/report.txt'}\n" in err
    assert run_command([*words.split(), "--out", "one"]) == 0
    assert "packing" not in capsys.readouterr().err
    record = json.loads(Path("one/result.json").read_text())
    assert record["run"]["data"] == {
        "name": "folder", "validation": 0.0, "brightness": 0.0, "size": None, "normalise": "measured",
    }  # fmt: skip
    assert record["resolved"]["data"] == load("folder", root / "packed").fingerprint
    write(root / "train/class0/more.png", make_image(5))
    assert run_command([*words.split(), "--out", "two"]) == 1
    err = capsys.readouterr().err
    assert f"{root / 'packed'} was packed from other images than {root} has now: delete it to pack again" in err
    packed = words.replace(str(root), str(root / "packed"))
    assert run_command([*packed.split(), "--out", "two"]) == 0


def test_what_was_packed_as_it_is_is_not_packed_again(tmp_path: Path, isolated: None, capsys: Any) -> None:
    """Though a run takes the size of square images for a chosen one."""
    root = make_tree(tmp_path / "data", train=6, width=16, height=16)
    assert run_command(["pack", str(root)]) == 0
    for more in ("", " --size 16"):
        words = f"run il-baseline --dataset folder --data {root}{more} {QUICK} --out one"
        assert run_command(words.split()) == 0
    err = capsys.readouterr().err
    assert [path.name for path in root.glob("packed*")] == ["packed"] and "packing" not in err
    assert json.loads(Path("one/result.json").read_text())["run"]["data"]["size"] == 16
    assert run_command([*words.replace(" --size 16", " --size 12").split()[:-1], "other"]) == 0
    assert (root / "packed-12").is_dir() and "packing" in capsys.readouterr().err


def test_a_sweep_loads_each_choice_of_images_once(tmp_path: Path, isolated: None, monkeypatch: Any) -> None:
    root, calls = make_tree(tmp_path / "data", train=6), []
    monkeypatch.setattr("equipoise.runs.plan.load", lambda *a, **b: calls.append(b["size"]) or load(*a, **b))
    from equipoise.cli.request import parse_request
    from equipoise.cli.sweep import Many, plan_jobs

    words = f"il-baseline --dataset folder --data {root} {QUICK}".split()
    requests = [parse_request([*words, "--size", s, "--seed", k], "sweep", Many) for s in ("16", "20") for k in "01"]
    jobs = plan_jobs(requests, Path("runs"))
    assert [job.run.data.size for job in jobs] == [16, 16, 20, 20] and calls == [16, 20]


def test_the_subset_is_read_out_of_a_packed_imagenet(tmp_path: Path, capsys: Any) -> None:
    """By either definition: the same images, labels and fingerprint as where only the subset is packed."""
    wnids = [f"n{8 * k + 10_000_000:08}" for k in range(1000)]
    for k, one in enumerate(wnids):
        for part in ("train", "val"):
            write(tmp_path / part / one / f"{one}_{k}.JPEG", make_image(k % 50, 8, 8))
    alone = load("imagenet-subset", tmp_path, size=16, subset="seed1993")
    assert f"into {tmp_path / 'packed-16-seed1993'}, once" in capsys.readouterr().err
    whole = load("imagenet", tmp_path, progress=False, size=16)
    assert len(whole.classes) == len(whole.train) == 1000 and whole.mean == IMAGENET[0]
    shutil.rmtree(tmp_path / "packed-16-seed1993")
    for folder in (tmp_path, tmp_path / "packed-16"):
        found = load("imagenet-subset", folder, size=16, subset="seed1993")
        assert torch.equal(found.train.x, alone.train.x) and torch.equal(found.train.y, torch.arange(100))
        assert found.classes == alone.classes and found.fingerprint == alone.fingerprint
        first = load("imagenet-subset", folder, size=16)
        assert first.classes == tuple(wnids[:100]) and torch.equal(first.train.x, whole.train.x[:100])
        assert first.fingerprint != found.fingerprint
    assert "packing" not in capsys.readouterr().err


def test_mini_imagenet_is_known_by_its_classes_and_their_numbers_of_images(tmp_path: Path, monkeypatch: Any) -> None:
    """So no record by its name is of another folder; another part of the same classes is none either."""
    wnids = [f"n{8 * k + 10_000_000:08}" for k in range(100)]
    for k, one in enumerate(wnids):
        for part, count in (("train", 2), ("val", 1)):
            for i in range(count):
                write(tmp_path / part / one / f"{one}_{i}.JPEG", make_image(k, 84, 84))
    with pytest.raises(DataError, match="train has other classes than mini-ImageNet: use --dataset folder"):
        load("mini-imagenet", tmp_path)
    digest = hashlib.sha256(" ".join(wnids).encode()).hexdigest()
    monkeypatch.setattr("equipoise.data.listing.MINI_CLASSES", digest)
    with pytest.raises(DataError, match="not the mini-ImageNet that has 200 training and 50 test images of each class"):
        load("mini-imagenet", tmp_path, progress=False)
    monkeypatch.setattr("equipoise.data.folders.MINI_IMAGES", (2, 1))
    found = load("mini-imagenet", tmp_path, progress=False)
    assert found.shape == (3, 84, 84) and found.mean == IMAGENET[0] and found.augment == ResizedCrop(84)
    assert found.fingerprint == load("folder", tmp_path / "packed-84").fingerprint


@pytest.mark.skipif(not MINI.is_dir(), reason="no mini-ImageNet here")
def test_the_names_of_mini_imagenet_are_those_of_its_files() -> None:
    names = [name for path in MINI.glob("*.zip") for name in zipfile.ZipFile(path).namelist() if name[-1] != "/"]
    counts = Counter(name.rpartition("/")[0] for name in names)
    wnids = sorted({name.split("/")[1] for name in counts})
    assert counts == {f"{part}/{one}": n for part, n in zip(("train", "val"), MINI_IMAGES) for one in wnids}
    assert choose_classes(tuple(wnids), MINI, "mini-imagenet", None) == tuple(wnids)


REFUSALS = {
    "no folder": ("--dataset folder", 2, "the data set folder needs a folder of images: name it with --data"),
    "no such folder": ("--dataset folder --data nowhere", 1, "nowhere is not a folder: name the one that holds"),
    "size": ("--dataset digits --size 84", 2, "--size belongs to --dataset folder or imagenet or imagenet-subset"),
    "subset": ("--dataset folder --data DIR --subset first100", 2, "--subset belongs to --dataset imagenet-subset"),
    "no number": ("--dataset folder --data DIR --size big", 2, "--size: 'big' is not a whole number"),
    "small": ("--dataset folder --data DIR --size 2", 2, "size must be a whole number of 8 or more"),
    "no imagenet": ("--dataset imagenet --data DIR", 1, "use --dataset folder"),
    "packed": (
        "--dataset folder --data DIR/packed --size 30",
        1,
        "is packed for images of 20 x 16 pixels",
    ),
    "name": ("--dataset folders", 2, "unknown data set 'folders': did you mean 'folder'?"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_words_are_refused_in_a_sentence(tmp_path: Path, isolated: None, capsys: Any, case: str) -> None:
    words, code, why = REFUSALS[case]
    files = list_folder(make_tree(tmp_path / "DIR"))
    if case == "packed":
        pack(files, tmp_path / "DIR/packed", Packing(None))
    assert run_command(["run", "il-baseline", *words.split(), "--base", "2", "--steps", "1"]) == code
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1


def test_the_help_has_the_flags_of_the_data_set(isolated: None, capsys: Any) -> None:
    for name, flags in (
        ("cifar100", []),
        ("folder", ["--size", "--normalise"]),
        ("imagenet-subset", ["--size", "--subset"]),
    ):
        assert run_command(["run", "il-baseline", "--dataset", name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert [flag for flag in ("--size", "--subset", "--normalise") if f"\n  {flag} " in shown] == flags


def test_what_cannot_be_augmented_is_refused_before_anything_is_computed(
    tmp_path: Path, isolated: None, capsys: Any
) -> None:
    root = make_tree(tmp_path / "data", width=100, height=80)
    words = f"run eeil --dataset folder --data {root} --size 72 --shift 63 {QUICK} --out one"
    assert run_command(words.split()) == 2
    assert "eeil cannot change brightness and contrast of images that are cropped at random sizes" in (
        capsys.readouterr().err
    )
    assert not Path("one/run.json").exists()


def test_large_images_are_cropped_in_training_and_seen_in_the_middle(tmp_path: Path, isolated: None) -> None:
    root = make_tree(tmp_path / "data", train=5, width=120, height=90)
    words = f"run il-baseline --dataset folder --data {root} --size 72 {QUICK} --batch 5 --out large"
    assert run_command(words.split()) == 0
    record = json.loads(Path("large/result.json").read_text())
    assert record["run"]["data"]["size"] == 72 and record["run"]["recipe"]["epochs"] == 1
    assert record["resolved"]["augment"] == to_plain(ResizedCrop(72))
    data = load("folder", root, size=72)
    assert data.train.x.size.tolist() == [[82, 109]] * 15 and data.test.x.size.tolist() == [[82, 82]] * 6
    assert data.train.x.side == data.test.x.side == 72 and data.shape == (3, 72, 72)
    seen = data.test.take_squares(torch.arange(6))
    image = Image.open(root / "val/class0/000.png").resize((109, 82), Image.Resampling.BILINEAR).crop((14, 0, 96, 82))
    np.testing.assert_array_equal(seen[0].permute(1, 2, 0).numpy(), np.asarray(image)[5:77, 5:77])


@pytest.mark.skipif(not MINI.is_dir(), reason="there is no mini-ImageNet beside the repository")
def test_mini_imagenet_from_its_files_to_a_report(tmp_path: Path, isolated: None, capsys: Any) -> None:
    """Four classes of it, few images of each, through folder, pack, run and show."""
    with zipfile.ZipFile(MINI / "part0.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        classes = sorted({name.split("/")[1] for name in names})[:4]
        few = {part: 12 if part == "train" else 4 for part in ("train", "val")}
        for part, count in few.items():
            for c in classes:
                archive.extractall("mini", [name for name in names if name.startswith(f"{part}/{c}/")][:count])
    assert run_command(["pack", "mini", "--size", "84"]) == 0
    assert "4 classes: 48 images for training, 16 images for testing" in capsys.readouterr().out
    words = f"run il-baseline --dataset folder --data mini --size 84 {QUICK} --batch 8 --out one"
    assert run_command(words.split()) == 0
    result = json.loads(Path("one/result.json").read_text())
    assert [step["classes"] for step in result["steps"]] == [2, 4] and np.sum(result["confusion"]) == 16
    data = load("folder", Path("mini"), size=84)
    assert {tuple(size) for x in (data.train.x, data.test.x) for size in x.size.tolist()} == {(84, 84)}
    assert data.classes == tuple(classes) and data.mean == pytest.approx(IMAGENET[0], abs=0.1)
    assert run_command(["show", "one"]) == 0
    assert "folder" in capsys.readouterr().out
