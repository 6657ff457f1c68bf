"""Which images a folder has, of which classes, and which of them are for testing. Opens no image."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import DataError, UsageError, format_count
from ..files import MANIFEST

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""files with these names are taken for images, whatever is in them"""
TEST = ("val", "validation", "valid", "test")
"""names of the folder of test images, the first one found"""
LABELS = (
    "val_labels.txt", "val.txt", "val_annotations.txt", "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt", "ILSVRC2012_validation_ground_truth.txt",
)  # fmt: skip
"""names of the file that labels test images without class folders: in the folder, beside them or in a devkit"""
EVERY = 5
"""every fifth image of each class is for testing where nothing else says which"""
WNID = re.compile(r"n\d{8}")
"""the name of a class of ImageNet"""
Subset = Literal["first100", "seed1993"]
SUBSETS: dict[Subset, str] = {
    "first100": "the first 100 classes of ImageNet in sorted order",
    "seed1993": "100 classes of ImageNet drawn with NumPy's seed 1993",
}
"""the two definitions of ImageNet-Subset"""
DEFAULT_SUBSET: Subset = "first100"
"""that of BiC and PODNet, and by its words of the paper; LUCIR and what is built on it have the other"""
FIRST_100 = ("n01440764", "n01855672")
"""first and last class of the first definition"""
DRAWN = frozenset(("n01729322", "n01514668", "n04550184", "n03109150", "n01990800"))
"""the first five classes that the second definition draws"""
MINI_CLASSES = "b9498a19cb394a2bbc630cf247e8f8a425974348160d122c35081d783273a576"
"""SHA-256 of the names of mini-ImageNet's 100 classes in sorted order, with a space between two"""

Files = list[tuple[str, int]]
"""path relative to the folder, and label"""


@dataclass(frozen=True)
class Listing:
    """The images of a folder, by file name and then by class, and the names of its classes in sorted order."""

    root: Path
    classes: tuple[str, ...]
    train: Files
    test: Files
    split: str
    """how the test images are known, in words"""
    others: tuple[str, ...] = ()
    """files that are not named like images"""

    def digest(self) -> str:
        """A hash of the names of all images, with their labels."""
        h = hashlib.sha256()
        for part in (self.train, self.test):
            h.update(b"".join(b"%b\0%d\n" % (os.fsencode(name), label) for name, label in part) + b"\f")
        return h.hexdigest()


def list_folder(root: Path, name: str = "folder", subset: str | None = None) -> Listing:
    """The images of a folder for the data set `name`, one of `folders.NAMES`."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: name the one that holds the images")
    others: list[str] = []
    train, trained = (root / "train", True) if (root / "train").is_dir() else (root, False)
    found = list_classes(train, root, others)
    if len(found) < 2:
        raise DataError(
            f"{train} has {format_count(len(found), 'class', 'classes')} with images: it must hold a folder for each "
            "class, or such folders in train and val"
        )
    classes = choose_classes(tuple(sorted(found)), train, name, subset)
    if trained:
        tests, split = list_tests(root, tuple(sorted(found)), others)
    else:
        tests = {one: sort_files(found[one])[EVERY - 1 :: EVERY] for one in classes}
        found = {one: sorted({*found[one]} - {*tests[one]}) for one in classes}
        split = "there are no folders train and val: every fifth image of each class, by name, is for testing"
    for one in classes:
        if not found[one] or not tests.get(one):
            what = "testing" if found[one] else "training"
            raise DataError(f"the class {one} of {root} has no images for {what}: add some, or take its folder away")
    return Listing(root, classes, join(found, classes), join(tests, classes), split, tuple(sorted(others)))


def join(found: dict[str, list[str]], classes: tuple[str, ...]) -> Files:
    """The images of these classes by file name, then by class.

    Images that are numbered across the classes keep their order; ImageNet's are class by class.
    """
    files = [(name, label) for label, one in enumerate(classes) for name in found[one]]
    return sorted(files, key=lambda file: (file[0].rpartition("/")[2], file[1], file[0]))


def sort_files(names: list[str]) -> list[str]:
    """Paths by their file name."""
    return sorted(names, key=lambda name: (name.rpartition("/")[2], name))


def list_classes(place: Path, root: Path, others: list[str]) -> dict[str, list[str]]:
    """The images of each folder in `place`; `others` receives the files that are none."""
    found = {}
    for folder in sorted(place.iterdir()):
        packed = (folder / MANIFEST).is_file()  # what we wrote there ourselves
        if folder.is_dir() and not folder.name.startswith(".") and not packed:
            images = list_images(folder, root, others)
            if images:
                found[folder.name] = images
    return found


def list_images(folder: Path, root: Path, others: list[str]) -> list[str]:
    """The images in a folder and in its folders, relative to the root; hidden files are left out."""
    images: list[str] = []
    for place, _, names in os.walk(folder):
        inside = Path(place).relative_to(root).as_posix()
        for name in names:
            if not name.startswith("."):
                (images if name.lower().endswith(SUFFIXES) else others).append(f"{inside}/{name}")
    return images


def list_tests(root: Path, classes: tuple[str, ...], others: list[str]) -> tuple[dict[str, list[str]], str]:
    """The test images of each class of a folder that has one named train, and how they are known."""
    place = next((root / name for name in TEST if (root / name).is_dir()), None)
    if place is None:
        raise DataError(f"{root} has a folder train but none named val or test: add one, or name {root / 'train'}")
    found = list_classes(place, root, others)
    if set(found) & set(classes):
        if strange := sorted(set(found) - set(classes)):
            raise DataError(f"{place / strange[0]} is a class without a folder in {root / 'train'}")
        return found, f"test images are those of {place.name}"
    file = find_label_file(root, place)
    labels = read_labels(file, sort_files(list_images(place, root, [])), classes)
    return labels, f"test images are those of {place.name}, labelled by {file.name}"


def find_label_file(root: Path, place: Path) -> Path:
    """The file that labels test images without class folders."""
    for folder in (root, place, *sorted(root.glob("*devkit*/data")), *sorted(root.glob("*devkit*"))):
        for name in LABELS:
            if (folder / name).is_file():
                return folder / name
    raise DataError(
        f"{place} has no folder for each class, and no file labels its images: put {LABELS[0]} into {root}, with the "
        "name and the class of an image in each line"
    )


def read_labels(file: Path, images: list[str], classes: tuple[str, ...]) -> dict[str, list[str]]:
    """The images of each class, by a file with a class in each line, in their order, or a name and a class.

    A class is its name, or its position in sorted order from 0.
    """
    lines = [
        re.split(r"[\s,]+", line.strip()) for line in file.read_text(errors="replace").splitlines() if line.strip()
    ]
    by_stem = {Path(name).stem: name for name in images}
    if all(len(words) == 1 for words in lines):
        if all(words[0].isdecimal() for words in lines):
            raise DataError(
                f"{file} numbers classes in an order of its own: put a file with their names beside it, as {LABELS[0]}"
            )
        if len(lines) != len(images):
            raise DataError(f"{file} labels {format_count(len(lines), 'image')}, and there are {len(images)}")
        lines = [[name, *words] for name, words in zip(images, lines)]
    elif Path(lines[0][0]).stem not in by_stem and lines[0][1] not in classes:
        lines = lines[1:]  # a header
    numbers = [int(words[1]) for words in lines if words[1:] and words[1] not in classes and words[1].isdecimal()]
    if numbers and (max(numbers) >= len(classes) or (len(numbers) == len(lines) and min(numbers) > 0)):
        raise DataError(
            f"{file} has labels from {min(numbers)} to {max(numbers)}: classes are their names, or numbers from 0 to "
            f"{len(classes) - 1} in sorted order"
        )
    found: dict[str, list[str]] = {}
    for words in lines:
        name, label = by_stem.pop(Path(words[0]).stem, None), words[1] if len(words) > 1 else ""
        one = label if label in classes else classes[int(label)] if label.isdecimal() else None
        if name is None or one is None:
            wrong = f"{words[0]}, which is not there or comes twice" if name is None else f"the class {label!r}"
            raise DataError(f"{file} names {wrong}: it must name an image and one of the classes in each line")
        found.setdefault(one, []).append(name)
    if by_stem:
        raise DataError(f"{file} does not label {min(by_stem.values())}")
    return found


# ImageNet


def choose_classes(found: tuple[str, ...], train: Path, name: str, subset: str | None) -> tuple[str, ...]:
    """The classes of a data set among those of a folder, in sorted order."""
    if name == "folder":
        return found
    if strange := [one for one in found if not WNID.fullmatch(one)]:
        raise DataError(
            f"{train / strange[0]} is not named like a class of ImageNet, such as {FIRST_100[0]}: use --dataset folder"
        )
    expected = {"imagenet": (1000,), "mini-imagenet": (100,)}.get(name, (1000, 100))
    if len(found) not in expected:
        raise DataError(
            f"{train} has {format_count(len(found), 'class', 'classes')} where {name} has {expected[-1]}: complete it, "
            "or use --dataset folder"
        )
    if name == "mini-imagenet" and hashlib.sha256(" ".join(found).encode()).hexdigest() != MINI_CLASSES:
        raise DataError(f"{train} has other classes than mini-ImageNet: use --dataset folder")
    if name != "imagenet-subset":
        return found
    subset = subset or DEFAULT_SUBSET
    if len(found) == 1000:
        return choose_subset(found, subset)
    other = "seed1993" if {*found} >= DRAWN else "first100" if (found[0], found[-1]) == FIRST_100 else subset
    if other != subset:
        raise UsageError(f"the classes in {train} are ImageNet-Subset as --subset {other} defines it, not {subset}")
    return found


def choose_subset(classes: tuple[str, ...], subset: str) -> tuple[str, ...]:
    """The 100 classes of ImageNet-Subset of these 1,000, in sorted order.

    The second definition is that of LUCIR's authors: the first 100 of a permutation with NumPy's seed 1993.
    """
    if subset == "first100":
        return classes[:100]
    drawn = np.random.RandomState(1993).permutation(len(classes))[:100]
    return tuple(sorted(classes[k] for k in drawn))
