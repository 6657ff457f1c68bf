"""The data sets: digits, which comes with scikit-learn, and CIFAR-100, from a folder or by a download."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError, make_unknown_error
from . import cifar100
from .augment import Crop
from .images import Images, measure_channels
from .randomness import generator

SHAPES = {"digits": (1, 8, 8), "cifar100": (3, 32, 32)}
"""image shapes (channels, height, width) of the data sets that `load` supports"""
PLANNED = {"imagenet-subset": (3, 224, 224), "imagenet": (3, 224, 224)}
"""those of the paper that `load` does not support yet"""
COUNTS = {"digits": (140,) * 10, "cifar100": (500,) * 100}
"""number of training images of each class, for planning runs without loading data"""

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
    augment: Crop
    """label-preserving augmentation"""
    mean: tuple[float, ...]
    """mean of each channel over the training images, for pixels from 0 to 1"""
    std: tuple[float, ...]
    """standard deviation of each channel"""
    fingerprint: str
    """a hash of every pixel and label"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        return SHAPES[self.name]


def load(name: str, folder: Path | None = None, progress: bool = True) -> Dataset:
    """Load a data set by name.

    CIFAR-100 is read from its official files or archives in `folder` (default: $EQUIPOISE_DATA or
    ~/.cache/equipoise/data), and downloaded if missing; `progress` shows a progress bar. Digits needs no folder.
    """
    if name == "digits":
        return _load_digits()
    if name == "cifar100":
        return _load_cifar100(folder, progress)
    raise make_unknown_error("data set", name, SHAPES)


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
    return data.train[~aside], data.train[aside]


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
        mean=(0.5071, 0.4866, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        fingerprint=_fingerprint(train, test),
    )


def _fingerprint(train: Images, test: Images) -> str:
    return hashlib.sha256(f"{train.fingerprint()} {test.fingerprint()}".encode()).hexdigest()
