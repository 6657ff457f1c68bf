"""The data sets: digits, which comes with scikit-learn, and CIFAR-100, found in a folder or downloaded.

Every file of CIFAR-100 is compared with its published checksum before anything in it is believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import DataError, UsageError, unknown
from ..randomness import generator
from .augment import Crop
from .images import Images, channel_statistics

SHAPES = {"digits": (1, 8, 8), "cifar100": (3, 32, 32)}
"""The data sets that `load` knows, and the shape of their images: channels, height, width."""
PLANNED = {"imagenet-subset": (3, 224, 224), "imagenet": (3, 224, 224)}
"""those that the paper has besides, and that `load` does not know yet"""
COUNTS = {"digits": (140,) * 10, "cifar100": (500,) * 100}
"""how many training images each of their classes has: to plan runs without reading any"""

# The official files of CIFAR-100: where a person finds them, what is downloaded where there are none, the two
# forms (the archive's name, then its files for training and testing) and the published checksums.
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
LAYOUTS = {"cifar-100-binary": ("train.bin", "test.bin"), "cifar-100-python": ("train", "test")}
MD5 = {
    "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
    "test.bin": "4499cfba6c016c1be1438163640a0898",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
RECORDS = (50_000, 10_000)  # images for training and for testing
SHAPE = (3, 32, 32)  # a plane each for red, green and blue, row by row
TIMEOUT = 30.0  # seconds without a byte after which a download is given up

_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES: tuple[str, ...] = tuple(_CIFAR100.split())
"""The names of the fine labels 0 to 99, which are in alphabetical order."""

DIGITS_TRAIN = COUNTS["digits"][0]
"""Training images of each digit: equally many, and at least 34 of each are left for testing."""


@dataclass(frozen=True)
class Dataset:
    """Images to learn and images to be tested on, with what a recipe needs to know about them."""

    name: str
    """what `load` calls it"""
    train: Images
    """on the CPU; the labels are the data set's own, from 0"""
    test: Images
    """likewise"""
    classes: tuple[str, ...]
    """the names of the labels"""
    augment: Crop
    """the augmentation that leaves these images what they are"""
    mean: tuple[float, ...]
    """of each channel over the training images, where black is 0 and white is 1"""
    std: tuple[float, ...]
    """likewise, the standard deviation"""
    fingerprint: str
    """a hash of every pixel and label"""


def load(name: str, folder: Path | None = None, progress: bool = True) -> Dataset:
    """The data set of that name.

    CIFAR-100 is looked for in `folder`, by default $EQUIPOISE_DATA or else ~/.cache/equipoise/data, as the
    official files or archives; where there are none they are downloaded, with a progress bar on stderr unless
    `progress` is false. Digits needs no folder.
    """
    if name == "digits":
        return _digits()
    if name == "cifar100":
        return _cifar100(folder, progress)
    raise unknown("data set", name, SHAPES)


def split(data: Dataset, validation: float, seed: int) -> tuple[Images, Images]:
    """The images to learn and those to measure on: the data set's own, or two parts of its training images.

    `validation` is the fraction of every class that is set aside to measure on, so that settings can be chosen without
    the test images. It is drawn from each of the data set's own labels by itself, so of one seed it is the same
    whatever the order of the classes. Normalisation stays the data set's.
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


def _table_of_digits() -> npt.NDArray[np.float64]:
    """A row of 64 grey levels and the label for each image; from the file itself, since scikit-learn starts slowly."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # wherever a version of it keeps them

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def _digits() -> Dataset:
    """The 8x8 handwritten digits of scikit-learn."""
    table = _table_of_digits()
    # Grey levels go from 0 to 16; 15 is the largest whole factor that keeps them all in a byte.
    x = torch.from_numpy((table[:, :-1] * 15).astype(np.uint8).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    # The images come writer by writer, so taking the first ones leaves those of later writers for testing.
    for_training = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        for_training[(y == label).nonzero()[:DIGITS_TRAIN]] = True
    train, test = Images(x[for_training], y[for_training]), Images(x[~for_training], y[~for_training])
    mean, std = channel_statistics(train.x)
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


def _cifar100(folder: Path | None, progress: bool) -> Dataset:
    """CIFAR-100 (Krizhevsky, 2009) with its 100 fine labels."""
    paths = _find(folder, progress)
    train, test = (_read(path, records) for path, records in zip(paths, RECORDS))
    return Dataset(
        name="cifar100",
        train=train,
        test=test,
        classes=CIFAR100_CLASSES,
        augment=Crop(pad=4, flip=True),
        mean=(0.5071, 0.4866, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        fingerprint=_fingerprint(train, test),
    )


def _fingerprint(train: Images, test: Images) -> str:
    return hashlib.sha256(f"{train.fingerprint()} {test.fingerprint()}".encode()).hexdigest()


# Finding the files of CIFAR-100


def _find(folder: Path | None, progress: bool) -> tuple[Path, Path]:
    """The files for training and testing: as they lie there, else out of an archive, else downloaded."""
    if folder is None:
        folder = Path(os.environ.get("EQUIPOISE_DATA") or "~/.cache/equipoise/data").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
        # Making it would turn a typing error into a download to the wrong place.
        raise DataError(f"--data {folder} is not a folder: create it, or name the one that holds CIFAR-100")
    # Runs started together must not write the same file; where nothing is to be written nothing is locked.
    if paths := _in_layout(folder):
        return paths
    with _alone(folder):
        return _in_layout(folder) or _unpack(_archive(folder) or _download(folder, progress))


def _in_layout(folder: Path) -> tuple[Path, Path] | None:
    for layout, (train, test) in LAYOUTS.items():
        for place in (folder / layout, folder):
            if (place / train).is_file() and (place / test).is_file():
                return place / train, place / test
    return None


def _archive(folder: Path) -> Path | None:
    archives = (folder / f"{layout}.tar.gz" for layout in LAYOUTS)
    return next((path for path in archives if path.is_file()), None)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process fills the folder; the lock ends with its process, however that ends."""
    with (folder / ".equipoise.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(archive: Path) -> tuple[Path, Path]:
    """Writes the two expected members next to the archive, and nothing else that it may hold."""
    if (md5 := _md5(archive)) != MD5[archive.name]:
        raise _bad(archive, f"has md5 {md5} where {MD5[archive.name]} is expected")
    layout = archive.name.removesuffix(".tar.gz")
    train, test = (archive.parent / layout / name for name in LAYOUTS[layout])
    train.parent.mkdir(exist_ok=True)
    with tarfile.open(archive) as tar:
        for path in (train, test):
            # The names come from our table, never from the archive, so it cannot choose where to write.
            member = next((m for m in tar if m.name == f"{layout}/{path.name}" and m.isreg()), None)
            content = tar.extractfile(member) if member else None
            if content is None:
                raise _bad(archive, f"does not hold the file {layout}/{path.name}")
            part = path.with_name(path.name + ".part")
            part.write_bytes(content.read())
            part.replace(path)  # a file under its final name is always whole
    return train, test


# Reading them


def _read(path: Path, records: int) -> Images:
    """The images of one file, after its size and checksum were found to be right."""
    size = 2 + int(np.prod(SHAPE))  # a record: coarse label, fine label, pixels
    if path.suffix == ".bin" and (found := path.stat().st_size) != records * size:
        raise _bad(path, f"has {found} bytes where {records * size} are expected")
    data = path.read_bytes()
    # The bytes that are checked are the bytes that are used: the file is not opened again.
    if (md5 := hashlib.md5(data, usedforsecurity=False).hexdigest()) != MD5[path.name]:
        raise _bad(path, f"has md5 {md5} where {MD5[path.name]} is expected")
    if path.suffix == ".bin":
        table = np.frombuffer(data, np.uint8).reshape(records, size)
        pixels, labels = table[:, 2:], table[:, 1]
    else:
        pixels, labels = _unpickle(path, data)
    if pixels.dtype != np.uint8 or pixels.shape != (records, size - 2) or labels.shape != (records,):
        raise _bad(path, f"does not hold {records} labelled images of 32x32 pixels")
    if labels.min() < 0 or labels.max() >= len(CIFAR100_CLASSES):
        raise _bad(path, f"has labels from {labels.min()} to {labels.max()}, outside 0 to 99")
    x = torch.from_numpy(pixels.reshape(records, *SHAPE).copy())
    return Images(x, torch.from_numpy(labels.astype(np.int64)))


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings, numbers and NumPy arrays; whatever else a pickle asks for is refused."""

    reconstruct = np.empty(0).__reduce__()[0]  # its module has moved between versions of NumPy
    allowed: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.allowed[module, name]


def _unpickle(path: Path, data: bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Pixels and fine labels of the official Python form, whose keys are bytes since Python 2 wrote it."""
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        return np.asarray(content[b"data"]), np.asarray(content[b"fine_labels"], np.int64)
    except Exception as e:  # a pickle that is not what it should be can raise almost anything
        raise _bad(path, f"is not the pickle it should be ({e})") from e


def _md5(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _bad(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: delete it and put a good copy in its place, from {PAGE}")


# Downloading them


def _download(folder: Path, progress: bool) -> Path:
    """The archive, downloaded; what is there of it from an earlier attempt is not fetched again."""
    archive = folder / "cifar-100-binary.tar.gz"
    part = archive.with_name(archive.name + ".part")
    if not (part.is_file() and _md5(part) == MD5[archive.name]):
        _fetch(part, progress)
        if (md5 := _md5(part)) != MD5[archive.name]:
            part.unlink()
            raise DataError(
                f"what {URL} sent has md5 {md5} where {MD5[archive.name]} is expected, and was deleted: "
                f"run again to start over, or {_by_hand(folder)}"
            )
    part.replace(archive)
    return archive


def _fetch(part: Path, progress: bool) -> None:
    """Downloads the rest of the file, or all of it from a server that cannot send a rest."""
    have = part.stat().st_size if part.is_file() else 0
    with _network(part.parent):
        response = _request(have)
    if response.status != 206:
        have = 0
    length = response.headers["Content-Length"]
    total = have + int(length) if length else None
    columns = (TextColumn("CIFAR-100"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
    with response, part.open("ab" if have else "wb") as out, bar:
        task = bar.add_task("", total=total, completed=have)
        while True:
            with _network(part.parent):  # around reading only: a full disk is not the network's fault
                chunk = response.read(1 << 16)
            if not chunk:
                break
            out.write(chunk)
            bar.advance(task, len(chunk))
    with _network(part.parent):
        # A connection that closes early looks to the loop like the end of the file.
        if total is not None and (got := part.stat().st_size) < total:
            raise ConnectionError(f"the connection closed after {got} of {total} bytes")


def _request(start: int) -> HTTPResponse:
    try:
        request = Request(URL, headers={"Range": f"bytes={start}-"} if start else {})
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT)
        return response
    except HTTPError as e:
        if start and e.code == 416:  # we have more than the file is long, so that cannot be a part of it
            return _request(0)
        raise


@contextlib.contextmanager
def _network(folder: Path) -> Iterator[None]:
    """Says in one sentence what the network did and what to do without it."""
    try:
        yield
    except (OSError, HTTPException) as e:
        reason = e if isinstance(e, HTTPError) else getattr(e, "reason", e)
        raise DataError(
            f"CIFAR-100 is not in {folder} and could not be downloaded from {URL} ({reason}): "
            f"run again to go on with the download, or {_by_hand(folder)}"
        ) from e


def _by_hand(folder: Path) -> str:
    archives = " or ".join(f"{layout}.tar.gz" for layout in LAYOUTS)
    return f"put {archives}, from {PAGE}, into {folder}, or name a folder that holds one with --data DIR"
