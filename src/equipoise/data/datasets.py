"""The data sets: digits, which comes with scikit-learn; CIFAR-100, from its files or by a download; and folders."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError, make_unknown_error
from . import cifar100, folders
from .augment import Crop, ResizedCrop
from .images import Images, measure_channels
from .randomness import generator

SHAPES = {
    "digits": (1, 8, 8),
    "cifar100": (3, 32, 32),
    **{name: (3, size, size) for name, size in folders.SIZES.items()},
}
"""image shapes (channels, height, width) of the data sets that are the same everywhere, unless a size is chosen"""
COUNTS = {
    "digits": (140,) * 10,
    "cifar100": (500,) * 100,
    "imagenet-subset": (1294,) * 95 + (1293,) * 5,
    "imagenet": (1282,) * 167 + (1281,) * 833,
    "mini-imagenet": (folders.MINI_IMAGES[0],) * 100,
}
"""number of training images of each class, for planning runs without loading data

A class of ImageNet has 732 to 1,300; here all have the mean, which gives the sums 129,395 and 1,281,167.
"""

DIGITS_TRAIN = COUNTS["digits"][0]
"""training images of each digit; at least 34 of each are left for testing"""


@dataclass(frozen=True)
class Dataset:
    """Training and test images, with their statistics and augmentation."""

    name: str
    """its name for `load`"""
    train: Images
    """on the CPU; labels count from 0"""
    test: Images
    classes: tuple[str, ...]
    """class names"""
    augment: Crop | ResizedCrop
    """label-preserving augmentation"""
    mean: tuple[float, ...]
    """mean of each channel over the training images, for pixels from 0 to 1"""
    std: tuple[float, ...]
    """standard deviation of each channel"""
    fingerprint: str
    """a hash of every pixel and label"""
    shape: tuple[int, int, int]
    """(channels, height, width) of an image as a net sees it"""


STATISTICS = ("measured", "imagenet", "cifar100")
"""which mean and standard deviation images of a folder are normalised with: their own, or those of a data set"""


def load(
    name: str,
    folder: Path | None = None,
    progress: bool = True,
    *,
    size: int | None = None,
    subset: str | None = None,
    normalise: str | None = None,
    images_on: str | None = None,
) -> Dataset:
    """Load a data set by name.

    CIFAR-100 is read from its official files or archives in `folder` (default: $EQUIPOISE_DATA or
    ~/.cache/equipoise/data), and downloaded if missing; `progress` shows a progress bar. Digits needs no folder.
    For the data sets of `folders.NAMES`, `folder` has the images, or is what `equipoise pack` made of them:
    `size` is the side of the squares that a net sees, `subset` the definition of ImageNet-Subset, `normalise` one of
    STATISTICS, and `images_on` where images are while a net is trained on them: `device` or, read from their shards,
    `disk`. By default those of more than 64 GiB are on the disk.
    """
    if name in folders.NAMES:
        return _load_folder(name, folders.read_folder(name, folder, size, subset, images_on, progress), normalise)
    if name == "digits":
        return _load_digits()
    if name == "cifar100":
        return _load_cifar100(folder, progress)
    raise make_unknown_error("data set", name, (*SHAPES, "folder"))


def split(data: Dataset, validation: float, seed: int) -> tuple[Images, Images]:
    """The images to train and to evaluate on.

    With `validation`, this fraction of the training images of every class is set aside for evaluation, in place of the
    test images. The split depends on the seed, not on the class order. Normalisation does not change.
    """
    if not validation:
        return data.train, data.test
    aside = torch.zeros(len(data.train), dtype=torch.bool)
    for label, name in enumerate(data.classes):
        which = (data.train.y == label).nonzero()[:, 0]
        count = round(validation * len(which))
        if count < 1 or len(which) - count < 2:
            raise UsageError(
                f"validation {validation:g} sets aside {count} of the {len(which)} training images of {name!r}: "
                "it must be at least 1, and leave at least 2"
            )
        drawn = torch.randperm(len(which), generator=generator(seed, "validation", label))
        aside[which[drawn[:count]]] = True
    return data.train[(~aside).nonzero()[:, 0]], data.train[aside.nonzero()[:, 0]]


def _read_digits() -> npt.NDArray[np.float64]:
    """A row for each image: 64 grey levels and the label. Read from the file: importing scikit-learn is slow."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # another version may store them elsewhere

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def _load_digits() -> Dataset:
    """The 8x8 handwritten digits of scikit-learn."""
    table = _read_digits()
    # Grey levels go from 0 to 16; 15 is the largest integer factor that fits them into a byte.
    x = torch.from_numpy((table[:, :-1] * 15).astype(np.uint8).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    # The images are ordered by writer, so the test images are those of other writers.
    for_training = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        for_training[(y == label).nonzero()[:DIGITS_TRAIN]] = True
    train, test = Images(x[for_training], y[for_training]), Images(x[~for_training], y[~for_training])
    mean, std = measure_channels(train.x)
    return Dataset(
        name="digits",
        train=train,
        test=test,
        classes=tuple("0123456789"),
        augment=Crop(pad=1, flip=False),
        mean=(mean.item() / 255,),
        std=(std.item() / 255,),
        fingerprint=_fingerprint(train, test),
        shape=SHAPES["digits"],
    )


def _load_cifar100(folder: Path | None, progress: bool) -> Dataset:
    """CIFAR-100 (Krizhevsky, 2009) with its 100 fine labels."""
    train, test = cifar100.read(folder, progress)
    return Dataset(
        name="cifar100",
        train=train,
        test=test,
        classes=cifar100.CLASSES,
        augment=Crop(pad=4, flip=True),
        mean=cifar100.MEAN,
        std=cifar100.STD,
        fingerprint=_fingerprint(train, test),
        shape=SHAPES["cifar100"],
    )


def _load_folder(name: str, found: folders.Folder, normalise: str | None) -> Dataset:
    """A folder of images. Small ones are shifted, like CIFAR's; out of large ones boxes are cut, like ImageNet's."""
    known = {"imagenet": folders.IMAGENET, "cifar100": (cifar100.MEAN, cifar100.STD)}
    mean, std = known.get(str(normalise), (found.mean, found.std))
    side = max(found.shape[1:])
    augment = ResizedCrop(side) if side > folders.SMALL else Crop(side // 8) if side > 16 else Crop(1, flip=False)
    return Dataset(
        name=name,
        train=found.train,
        test=found.test,
        classes=found.classes,
        augment=augment,
        mean=mean,
        std=std,
        fingerprint=found.fingerprint,
        shape=found.shape,
    )


def _fingerprint(train: Images, test: Images) -> str:
    return hashlib.sha256(f"{train.fingerprint()} {test.fingerprint()}".encode()).hexdigest()
