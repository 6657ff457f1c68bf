"""Reads the official files of CIFAR-100 from a folder, or downloads them.

Checksums are verified before a file is parsed.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import socket
import sys
import tarfile
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import numpy.typing as npt
import torch.hub

from ..errors import DataError
from ..files import Lease, write_file
from .images import Images

# The web page, the archive to download, the two published layouts (archive name: training and test file), and the
# published checksums.
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
RECORDS = (50_000, 10_000)  # training and test images
SHAPE = (3, 32, 32)  # red, green and blue plane, row by row
MEAN, STD = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)  # of each channel, for pixels from 0 to 1
TIMEOUT = 30.0  # seconds without data until a download fails

_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CLASSES: tuple[str, ...] = tuple(_NAMES.split())
"""names of the fine labels 0 to 99"""


def read(folder: Path | None, progress: bool) -> tuple[Images, Images]:
    """The training and test images, labelled from 0."""
    paths = _find(folder, progress)
    train, test = (_read(path, records) for path, records in zip(paths, RECORDS))
    return train, test


# Finding the files of CIFAR-100


def _find(folder: Path | None, progress: bool) -> tuple[Path, Path]:
    """Find the training and test file: extracted, in an archive, or by a download."""
    if folder is None:
        folder = Path(os.environ.get("EQUIPOISE_DATA") or "~/.cache/equipoise/data").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
        # Creating it would turn a typing error into a download to the wrong place.
        raise DataError(f"--data {folder} is not a folder: create it, or name the one that holds CIFAR-100")
    # Concurrent runs must not write the same file. No lock is taken if the files exist.
    if paths := _find_layout(folder):
        return paths
    with Lease(folder / ".equipoise.lock").hold():
        archives = [path for layout in LAYOUTS if (path := folder / f"{layout}.tar.gz").is_file()]
        return _find_layout(folder) or _unpack(archives[0] if archives else _download(folder, progress))


def _find_layout(folder: Path) -> tuple[Path, Path] | None:
    for layout, (train, test) in LAYOUTS.items():
        for place in (folder / layout, folder):
            if (place / train).is_file() and (place / test).is_file():
                return place / train, place / test
    return None


def _unpack(archive: Path) -> tuple[Path, Path]:
    """Extract the two expected files next to the archive, and nothing else."""
    layout = archive.name.removesuffix(".tar.gz")
    train, test = (archive.parent / layout / name for name in LAYOUTS[layout])
    with tarfile.open(fileobj=io.BytesIO(_read_checked(archive))) as tar:
        for path in (train, test):
            # Paths come from LAYOUTS, never from the archive: it cannot choose where to write.
            member = next((m for m in tar if m.name == f"{layout}/{path.name}" and m.isreg()), None)
            content = tar.extractfile(member) if member else None
            if content is None:
                raise _make_file_error(archive, f"does not hold the file {layout}/{path.name}")
            write_file(path, content.read())
    return train, test


# Reading them


def _read(path: Path, records: int) -> Images:
    """The images of one file, whose size and checksum are verified first."""
    size = 2 + int(np.prod(SHAPE))  # a record: coarse label, fine label, pixels
    if path.suffix == ".bin" and (found := path.stat().st_size) != records * size:
        raise _make_file_error(path, f"has {found} bytes where {records * size} are expected")
    data = _read_checked(path)
    if path.suffix == ".bin":
        table = np.frombuffer(data, np.uint8).reshape(records, size)
        pixels, labels = table[:, 2:], table[:, 1]
    else:
        pixels, labels = _unpickle(path, data)
    if pixels.dtype != np.uint8 or pixels.shape != (records, size - 2) or labels.shape != (records,):
        raise _make_file_error(path, f"does not hold {records} labelled images of 32x32 pixels")
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise _make_file_error(path, f"has labels from {labels.min()} to {labels.max()}, outside 0 to 99")
    x = torch.from_numpy(pixels.reshape(records, *SHAPE).copy())
    return Images(x, torch.from_numpy(labels.astype(np.int64)))


class _ArrayUnpickler(pickle.Unpickler):
    """Loads dicts, lists, strings, numbers and NumPy arrays; refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # its module differs between NumPy versions
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def _unpickle(path: Path, data: bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Pixels and fine labels of the official Python layout; Python 2 wrote its keys, as bytes."""
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        return np.asarray(content[b"data"]), np.asarray(content[b"fine_labels"], np.int64)
    except Exception as e:  # a malformed pickle can raise almost anything
        raise _make_file_error(path, f"is not a valid pickle ({e})") from e


def _read_checked(path: Path) -> bytes:
    """Read a file and verify its checksum. It is read once: the verified bytes are those used."""
    data = path.read_bytes()
    if (md5 := _compute_md5(data)) != MD5[path.name]:
        raise _make_file_error(path, f"has md5 {md5} where {MD5[path.name]} is expected")
    return data


def _compute_md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _make_file_error(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: delete it and put a good copy in its place, from {PAGE}")


# Downloading them


def _download(folder: Path, progress: bool) -> Path:
    """Download the archive and verify its checksum."""
    archive = folder / "cifar-100-binary.tar.gz"
    received = archive.with_name(f"{archive.name}.received")
    for left in folder.glob(f"{received.name}*"):  # left by a killed process
        left.unlink()
    if progress:
        print(f"downloading CIFAR-100 from {URL}", file=sys.stderr, flush=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        torch.hub.download_url_to_file(URL, str(received), progress=progress)
    except (URLError, HTTPException, ConnectionError, TimeoutError) as e:  # not an error of the file system
        reason = e if isinstance(e, HTTPError) else getattr(e, "reason", e)
        words = f"CIFAR-100 is not in {folder} and could not be downloaded from {URL} ({reason})"
        raise _make_download_error(folder, words) from e
    finally:
        socket.setdefaulttimeout(before)
    data = received.read_bytes()
    if (md5 := _compute_md5(data)) != MD5[
        archive.name
    ]:  # or part of it: a closed connection looks like the end of the file
        received.unlink()
        words = f"{URL} sent {len(data)} bytes with md5 {md5} where {MD5[archive.name]} is expected"
        raise _make_download_error(folder, f"{words}; they were discarded")
    return received.replace(archive)


def _make_download_error(folder: Path, what: str) -> DataError:
    archives = " or ".join(f"{layout}.tar.gz" for layout in LAYOUTS)
    remedy = f"put {archives}, from {PAGE}, into {folder}, or name a folder that holds one with --data DIR"
    return DataError(f"{what}: run again, or {remedy}")
