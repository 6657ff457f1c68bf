"""Folders of images: which there are, how they are decoded, and what is packed of them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import make_image, make_tree, write, write_bad, write_odd
from PIL import Image

from equipoise.cli import run_command
from equipoise.data import decode, packing
from equipoise.data.decode import BadImageError, Fit
from equipoise.data.index import FILES, PACK, read_index, read_info
from equipoise.data.listing import choose_subset, list_folder
from equipoise.data.packing import Packing, choose_packing, pack
from equipoise.errors import DataError, UsageError

WNIDS = [f"n{8 * k + 10_000_000:08}" for k in range(1000)]


def read(folder: Path, row: int) -> np.ndarray[Any, Any]:
    """The pixels of an image of a packed folder."""
    c = {name: int(column[row]) for name, column in read_index(folder).columns.items()}
    data = (folder / f"shard-{c['shard']:05}.u8").read_bytes()
    part = data[c["offset"] : c["offset"] + 3 * c["height"] * c["width"]]
    assert zlib.crc32(part) == c["checksum"]
    return np.frombuffer(part, np.uint8).reshape(c["height"], c["width"], 3)


def names(folder: Path) -> list[str]:
    return read_index(folder).names.decode().splitlines()


# Which images there are


def test_images_are_listed_by_name_across_classes(tmp_path: Path) -> None:
    """So images that are numbered across the classes keep their order, and ImageNet's are class by class."""
    for k, c in enumerate("abcacb"):
        write(tmp_path / "train" / c / f"{k}.png", make_image(k))
        write(tmp_path / "test" / c / f"{c}_{k}.png", make_image(k))
    write(tmp_path / "train/a/.hidden.png", make_image(0))
    (tmp_path / "train/a/Thumbs.db").write_bytes(b"")
    found = list_folder(tmp_path)
    assert found.classes == ("a", "b", "c")
    assert found.train == [(f"train/{c}/{k}.png", "abc".index(c)) for k, c in enumerate("abcacb")]
    assert [label for _, label in found.test] == [0, 0, 1, 1, 2, 2]
    assert found.split == "test images are those of test" and found.others == ("train/a/Thumbs.db",)


def test_without_a_split_every_fifth_image_is_for_testing(tmp_path: Path) -> None:
    for c, count in (("a", 12), ("b", 5)):
        for k in range(count):
            write(tmp_path / c / f"{c}{k:02}.png", make_image(k))
    found = list_folder(tmp_path)
    assert [name for name, _ in found.test] == ["a/a04.png", "a/a09.png", "b/b04.png"]
    assert len(found.train) == 14 and not {*found.train} & {*found.test}
    assert "every fifth image of each class" in found.split


LABEL_FILES = {
    "val_labels.txt": "v2.png a\nv0.png b\nv1.png c\nv3.png a\n",
    "val.txt": "val/v2.png 0\nval/v0.png 1\nval/v1.png 2\nval/v3.png 0\n",
    "LOC_val_solution.csv": "ImageId,PredictionString\nv2,a 1 2 3 4\nv0,b 1 2 3 4\nv1,c 1 1 1 1 c 2 2 2\nv3,a 1 1 1 1",
    "imagenet_2012_validation_synset_labels.txt": "b\nc\na\na\n",
    "val_annotations.txt": "v2.png\ta\t0\t0\nv0.png\tb\t1\t1\nv1.png\tc\t0\t0\nv3.png\ta\t0\t0\n",
}


@pytest.mark.parametrize("file", LABEL_FILES)
@pytest.mark.parametrize("inside", ["", "val", "devkit/data"])
def test_flat_test_images_are_labelled_by_a_file(tmp_path: Path, file: str, inside: str) -> None:
    for c in "abc":
        write(tmp_path / "train" / c / "0.png", make_image(0))
    for k in range(4):
        write(tmp_path / f"val/v{k}.png", make_image(k))
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    (tmp_path / inside / file).write_text(LABEL_FILES[file])
    found = list_folder(tmp_path)
    assert found.test == [("val/v0.png", 1), ("val/v1.png", 2), ("val/v2.png", 0), ("val/v3.png", 0)]
    assert found.split == f"test images are those of val, labelled by {file}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("v0.png a\n", "does not label val/v1.png"),
        ("v0.png a\nv1.png z\n", "names the class 'z'"),
        ("v0.png a\nv1.png b\nv9.png b", "names v9.png, which is not there"),
        ("v0.png a\nv0.png b\n", "names v0.png, which is not there or comes twice"),
        ("v0.png 1\nv1.png 2\n", "labels from 1 to 2: classes are their names, or numbers from 0 to 1"),
        ("490\n361\n", "numbers classes in an order of its own"),
        ("a\n", "labels 1 image, and there are 2"),
    ],
)
def test_a_label_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, why: str) -> None:
    for c in "ab":
        write(tmp_path / "train" / c / "0.png", make_image(0))
    for k in range(2):
        write(tmp_path / f"val/v{k}.png", make_image(k))
    with pytest.raises(DataError, match=r"no file labels its images: put val_labels.txt"):
        list_folder(tmp_path)
    (tmp_path / "val_labels.txt").write_text(text)
    with pytest.raises(DataError, match=why):
        list_folder(tmp_path)


@pytest.mark.parametrize(
    ("remove", "why"),
    [
        (["val"], "has a folder train but none named val or test"),
        (["train/class1"], "class1 is a class without a folder in"),
        (["val/class1/000.png", "val/class1/001.png"], "the class class1 of .* has no images for testing"),
        (["train/class1", "train/class2", "val/class1", "val/class2"], "has 1 class with images"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, remove: list[str], why: str) -> None:
    make_tree(tmp_path, train=1)
    for name in remove:
        subprocess.run(["rm", "-r", tmp_path / name], check=True)
    with pytest.raises(DataError, match=why):
        list_folder(tmp_path)
    with pytest.raises(DataError, match="is not a folder: name the one"):
        list_folder(tmp_path / "nowhere")


# ImageNet


def make_wnids(root: Path, wnids: list[str]) -> Path:
    for part in ("train", "val"):
        for one in wnids:
            (root / part / one).mkdir(parents=True)
            (root / part / one / f"{one}_1.JPEG").touch()
    return root


def test_both_definitions_of_the_subset(tmp_path: Path) -> None:
    """Positions in the sorted list: the first 100, or those that NumPy's legacy generator draws by choice."""
    root = make_wnids(tmp_path, WNIDS)
    drawn = np.random.RandomState(1993).choice(WNIDS, 100, replace=False)
    for subset, expected in (("first100", WNIDS[:100]), ("seed1993", sorted(drawn)), (None, WNIDS[:100])):
        found = list_folder(root, "imagenet-subset", subset)
        assert found.classes == tuple(expected) and len(found.train) == len(found.test) == 100
        assert {label: name.split("/")[1] for name, label in found.train} == dict(enumerate(expected))
    assert list_folder(root, "imagenet").classes == tuple(WNIDS) == list_folder(root).classes
    both = {*choose_subset(tuple(WNIDS), "first100")} & {*choose_subset(tuple(WNIDS), "seed1993")}
    assert len(both) == 9


def test_a_folder_of_100_classes_is_the_definition_that_it_is(tmp_path: Path) -> None:
    drawn = sorted(["n01729322", "n01514668", "n04550184", "n03109150", "n01990800", *WNIDS[:95]])
    first = ["n01440764", *(f"n{k:08}" for k in range(1_500_000, 1_500_098)), "n01855672"]
    for wnids, right, wrong in ((drawn, "seed1993", "first100"), (first, "first100", "seed1993")):
        root = make_wnids(tmp_path / right, wnids)
        assert list_folder(root, "imagenet-subset", right).classes == tuple(wnids)
        with pytest.raises(UsageError, match=f"as --subset {right} defines it, not {wrong}"):
            list_folder(root, "imagenet-subset", wrong)


def test_what_is_not_imagenet_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not named like a class of ImageNet, such as n01440764: use --dataset fold"):
        list_folder(make_tree(tmp_path / "a"), "imagenet")
    with pytest.raises(DataError, match="has 3 classes where imagenet has 1000: complete it"):
        list_folder(make_wnids(tmp_path / "b", WNIDS[:3]), "imagenet")
    with pytest.raises(DataError, match="has 3 classes where imagenet-subset has 100"):
        list_folder(tmp_path / "b", "imagenet-subset")


# How they are decoded


def test_images_are_decoded_as_pillow_does_and_described(tmp_path: Path) -> None:
    for name, kinds in write_odd(tmp_path).items():
        data = (tmp_path / name).read_bytes()
        image, found = decode.decode(data, name, Fit())
        assert sorted(found.split()) == sorted(kinds.split()), name
        assert image.mode == "RGB" and image.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes(), name


def test_images_that_cannot_be_decoded_say_why(tmp_path: Path) -> None:
    for name, why in write_bad(tmp_path).items():
        with pytest.raises(BadImageError, match=why):
            decode.decode((tmp_path / name).read_bytes(), name, Fit(8))


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (300, 300), (100, 60), (333, 257), (256, 999), (40, 1)])
def test_images_are_resized_as_torchvision_would(size: tuple[int, int]) -> None:
    """Resize: the long side is int(side · long / short). CenterCrop: offsets are round((long − side) / 2)."""
    image, (w, h) = make_image(5, *size), size
    short, long = min(size), max(size)
    whole = Fit(256)(image)
    if short <= 256:
        assert whole is image
    else:
        assert (
            whole.tobytes() == image.resize((256 * w // short, 256 * h // short), Image.Resampling.BILINEAR).tobytes()
        )
    square = Fit(256, square=True, enlarge=True)(image)
    wide = int(256 * long / short)
    resized = image.resize((wide, 256) if w > h else (256, wide), Image.Resampling.BILINEAR)
    left, top = (round((side - 256) / 2) for side in resized.size)
    assert square.size == (256, 256)
    if short == 256:
        resized = image
    assert square.tobytes() == resized.crop((left, top, left + 256, top + 256)).tobytes()
    kept = Fit(256, True, True, keep=300)(image)
    assert kept is image if size == (300, 300) else kept.tobytes() == square.tobytes()
    for fit in (Fit(), Fit(256), Fit(256, True), Fit(256, True, True)):
        assert fit.count_bytes(w, h) == len(fit(image).tobytes())


def test_simplejpeg_is_used_where_it_can_and_pillow_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []

    class Fake:
        @staticmethod
        def decode_jpeg(data: bytes, colours: str) -> Any:
            calls.append(colours)
            if len(data) < 500:
                raise ValueError("it is broken")
            image = np.asarray(Image.open(io.BytesIO(data)).convert("L" if colours == "GRAY" else "RGB"))
            return image[..., None] if colours == "GRAY" else image

    kinds = write_odd(tmp_path)
    expected = {name: decode.decode((tmp_path / name).read_bytes(), name, Fit()).image.tobytes() for name in kinds}
    monkeypatch.setattr(decode, "simplejpeg", Fake)
    for name in kinds:
        assert decode.decode((tmp_path / name).read_bytes(), name, Fit()).image.tobytes() == expected[name]
    assert sorted(calls) == ["GRAY", "RGB", "RGB"]


# What is packed


def test_a_packed_folder_has_every_image_as_pillow_gives_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", width=300, height=200)
    packed = tmp_path / "packed"
    pack(list_folder(root), packed, Packing(84))
    first = ["train/class0/000.png", "train/class1/000.png", "train/class2/000.png", "train/class0/001.png"]
    assert names(packed)[:4] == first
    index = read_index(packed)
    assert index.columns["label"].tolist() == [0, 1, 2] * 6
    assert index.columns["test"].tolist() == [0] * 12 + [1] * 6
    for row, name in enumerate(names(packed)):
        image = Image.open(root / name).convert("RGB").resize((144, 96), Image.Resampling.BILINEAR)
        image = image.crop((24, 0, 120, 96)) if name.startswith("val") else image
        np.testing.assert_array_equal(read(packed, row), np.asarray(image))
    pixels = np.concatenate([read(packed, row).reshape(-1, 3) for row in range(12)])
    levels = np.array(read_info(packed)["levels"]).reshape(3, 256)
    np.testing.assert_array_equal(levels, [np.bincount(pixels[:, c], minlength=256) for c in range(3)])


def test_smaller_training_images_are_not_enlarged_and_squares_are_cut(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", width=90, height=70)
    for made, train in ((Packing(84), (70, 90)), (Packing(84, None, True), (70, 70))):
        packed = tmp_path / made.name(None)
        pack(list_folder(root), packed, made)
        assert read(packed, 0).shape[:2] == train and read(packed, 15).shape[:2] == (96, 96)


def test_small_images_of_one_size_stay_as_they_are_and_others_become_squares(tmp_path: Path) -> None:
    small, mixed = make_tree(tmp_path / "small"), make_tree(tmp_path / "mixed")
    write(mixed / "train/class0/more.png", make_image(1, 40, 64))
    assert choose_packing(list_folder(small), None) == Packing(None)
    assert choose_packing(list_folder(mixed), None) == Packing(224)
    for root, made, shape in ((small, Packing(None), (16, 20)), (mixed, Packing(32), (32, 32))):
        packed = tmp_path / f"packed-{root.name}"
        pack(list_folder(root), packed, made)
        assert {read(packed, row).shape[:2] for row in range(len(names(packed)))} == {shape}
    with pytest.raises(DataError, match=r"more.png has 40 x 64 pixels, and others have fewer: choose a --size"):
        pack(list_folder(mixed), tmp_path / "refused", Packing(None))


def test_bad_images_are_left_out_and_all_odd_ones_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_tree(tmp_path / "data")
    odd, bad = write_odd(root / "train/class1"), write_bad(root / "train/class1")
    (root / "val/class2/gone.png").symlink_to("nowhere")
    assert run_command(["pack", str(root), "--size", "32"]) == 0
    packed, out = root / "packed-32", capsys.readouterr().out
    assert f"3 classes: {12 + len(odd)} images for training, 6 images for testing" in out
    assert f"{len(bad) + 1} images left out, which cannot be decoded: see {packed / 'report.txt'}" in out
    report = (packed / "report.txt").read_text()
    assert report.startswith(f"{18 + len(odd)} of {19 + len(odd) + len(bad)} images packed; ")
    for name, why in bad.items():
        assert any(name in line and re.search(why, line) for line in report.splitlines()), name
        assert f"train/class1/{name}" not in names(packed)
    assert "  val/class2/gone.png: no such file or directory" in report
    for name, kinds in odd.items():
        assert ("train/class1/" + name in report) == bool(kinds) and f"train/class1/{name}" in names(packed)
    assert "1 image to be turned by EXIF, which is ignored:\n  train/class1/rotated.jpg\n" in report


def test_a_class_without_a_good_image_is_refused_by_name(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", test=1)
    (root / "val/class1/000.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"no image of the class class1 for testing can be decoded: see .*report.txt"):
        pack(list_folder(root), tmp_path / "packed", Packing(32))
    with pytest.raises(DataError, match="is not packed to the end"):
        read_index(tmp_path / "packed")
    assert "000.png: the file is empty" in (tmp_path / "packed/report.txt").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_result_does_not_depend_on_processes_nor_on_kills(tmp_path: Path, monkeypatch: Any) -> None:
    """A process that packs is killed once it has written a shard; another goes on, and writes no shard twice."""
    root = make_tree(tmp_path / "data", train=40, width=300, height=200)
    monkeypatch.setattr(packing, "IMAGES", 10)
    listing = list_folder(root)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    pack(listing, straight, Packing(84), workers=1)
    code = (
        "from pathlib import Path; from equipoise.data import packing; from equipoise.data.listing import list_folder\n"
        "packing.IMAGES = 10\n"
        f"packing.pack(list_folder(Path({str(root)!r})), Path({str(killed)!r}), packing.Packing(84), workers=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 60
    while not [*killed.glob("shard-*.json")] and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while is_group_alive(process.pid) and time.monotonic() < deadline:  # its workers end with it
        time.sleep(0.01)
    assert not is_group_alive(process.pid)
    assert not (killed / PACK).exists()
    with pytest.raises(DataError, match="is not packed to the end: repeat"):
        read_index(killed)
    (killed / ".shard-00003.u8.123.partial").write_bytes(b"half")
    done = {path: path.with_suffix(".u8").stat().st_mtime_ns for path in killed.glob("shard-*.json")}
    told: list[int] = []
    pack(listing, killed, Packing(84), tell=told.append, workers=1)
    assert done and told == sorted(told) and told[0] >= 10 * len(done) - 9 and told[-1] == 126
    assert all(path.with_suffix(".u8").stat().st_mtime_ns == when for path, when in done.items())
    assert contents(killed) == contents(straight)
    assert sorted(contents(straight)) == sorted(
        [".equipoise.json", ".lock", PACK, "index.safetensors", "report.txt", *(f"shard-{k:05}.u8" for k in range(13))]
    )


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_packed_is_not_packed_again_and_what_changed_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    assert run_command(["pack", str(root), "--size", "32"]) == 0
    packed = root / "packed-32"
    before = {path: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert run_command(["pack", str(root), "--size", "32"]) == 0  # the packed folder is no class of it
    assert before == {path: path.stat().st_mtime_ns for path in packed.iterdir()}
    with pytest.raises(UsageError, match=r"is packed otherwise .*choose another --out"):
        pack(list_folder(root), packed, Packing(33))
    write(root / "train/class0/more.png", make_image(9))
    with pytest.raises(DataError, match=r"was packed from other images than .* has now: delete it to pack again"):
        pack(list_folder(root), packed, Packing(32))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("shard-00000.u8", cut, "shard-00000.u8 is damaged: delete the folder"),
        ("shard-00001.u8", Path.unlink, "shard-00001.u8 is damaged"),
        ("index.safetensors", flip, "index.safetensors is damaged"),
        ("index.safetensors", Path.unlink, "index.safetensors is damaged"),
        (PACK, flip, "pack.json is damaged"),
        (PACK, Path.unlink, "is not packed to the end"),
    ],
)
def test_damage_to_a_packed_folder_is_noticed(
    tmp_path: Path, name: str, change: Callable[[Path], None], why: str
) -> None:
    packed = tmp_path / "packed"
    pack(list_folder(make_tree(tmp_path / "data")), packed, Packing(32))
    change(packed / name)
    with pytest.raises(DataError, match=why):
        read_index(packed)


def test_a_folder_with_foreign_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = make_tree(tmp_path / "data"), tmp_path / "out"
    out.mkdir()
    (out / "shard-00000.u8").write_bytes(b"mine")
    assert run_command(["pack", str(root), "--out", str(out)]) == 2
    assert "out holds shard-00000.u8, which equipoise did not write" in capsys.readouterr().err
    assert (out / "shard-00000.u8").read_bytes() == b"mine"


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    root = make_tree(tmp_path / "data", width=300, height=200)
    usage = type("Usage", (), {"free": packing.SPARE + 900_000})
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"packing needs about 0.0 GB and .* has 0.1 GB left: free some space"):
        pack(list_folder(root), tmp_path / "out", Packing(224))
    assert not [*(tmp_path / "out").glob("shard-*")]
    usage.free += 4_000_000  # type: ignore[attr-defined]
    pack(list_folder(root), tmp_path / "out", Packing(224))
    assert FILES[0] in contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--size 32 --square", "--short-side and --square have no effect on images of up to 64 pixels"),
        ("--size 84 --short-side 70", "short-side must be a whole number of 84 or more"),
        ("--size 4", "size must be a whole number of 8 or more"),
        ("--workers 0", "workers must be a whole number of 1 or more"),
        ("--subset second", "'second' is neither 'first100' nor 'seed1993'"),
    ],
)
def test_flags_without_sense_are_refused(tmp_path: Path, flags: str, why: str, capsys: Any) -> None:
    assert run_command(["pack", str(make_tree(tmp_path)), *flags.split()]) == 2
    assert why in capsys.readouterr().err
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["train", "val"]'
