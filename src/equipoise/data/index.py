"""The index of a packed folder: which image lies where, its size, class and checksum. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from .. import files
from ..errors import DataError, format_count
from ..settings import digest
from .decode import KINDS
from .listing import Listing

KIND = "packed images"
FORMAT = 1
"""version of packed folders"""
PACK, INDEX, REPORT = "pack.json", "index.safetensors", "report.txt"
FILES = (PACK, INDEX, REPORT, "shard-*.u8", "shard-*.json")
"""all files of a packed folder"""
COLUMNS = ("shard", "offset", "height", "width", "label", "test", "checksum")
"""the numbers that the index has of each image"""
NAMED = 20
"""names in the report of images that are used, though they are unusual"""

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Row(NamedTuple):
    """What is known of an image."""

    name: str
    """path relative to the folder of images"""
    label: int
    test: bool
    shard: int
    """number of its shard"""
    offset: int = 0
    """where it begins there, in bytes"""
    height: int = 0
    width: int = 0
    checksum: int = 0
    """CRC-32 of its pixels"""
    kinds: str = ""
    """what is unusual in it, as words of KINDS"""
    fault: str = ""
    """why it could not be decoded; it is in no shard then"""


@dataclass(frozen=True)
class Index:
    """What a packed folder holds."""

    classes: tuple[str, ...]
    columns: dict[str, Numbers]
    """COLUMNS, each with a number for every image"""
    names: bytes
    """paths relative to the folder of images, each with a line feed"""
    shards: list[int]
    """bytes of each shard"""
    info: dict[str, Any]
    """how it was packed: listing, split, packing, levels, faults"""

    def fingerprint(self, which: Numbers, label: Numbers) -> str:
        """A hash of these images, by their sizes and checksums, and of these labels."""
        h = hashlib.sha256()
        for column in (*(self.columns[name][which] for name in ("height", "width", "checksum")), label):
            h.update(np.ascontiguousarray(column, "<i8").data)
        return h.hexdigest()


def name_shard(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:05}.u8"


def write_index(
    folder: Path, listing: Listing, packing: Mapping[str, Any], rows: Sequence[Row], levels: Sequence[int]
) -> None:
    """Write the report, the index, and last the file that says that all is there."""
    good = [row for row in rows if not row.fault]
    files.write_file(folder / REPORT, write_report(listing, rows).encode(errors="replace"))
    check_rows(folder, listing, good, packing["size"] is None)
    tensors = {name: np.array([getattr(row, name) for row in good], np.int64) for name in COLUMNS}
    names = b"".join(os.fsencode(row.name) + b"\n" for row in good)
    data = safetensors.numpy.save({**tensors, "names": np.frombuffer(names, np.uint8)})
    files.write_file(folder / INDEX, data)
    shards = [0] * (1 + max(row.shard for row in rows))
    for row in good:
        shards[row.shard] += 3 * row.height * row.width
    info = {
        "format": FORMAT,
        "listing": listing.digest(),
        "split": listing.split,
        "packing": dict(packing),
        "classes": list(listing.classes),
        "images": {"train": sum(not row.test for row in good), "test": sum(row.test for row in good)},
        "left_out": len(rows) - len(good),
        "levels": list(levels),
        "shards": shards,
        "index": hashlib.sha256(data).hexdigest(),
    }
    files.write_json(folder / PACK, {"seal": digest(info), **info})


def check_rows(folder: Path, listing: Listing, good: Sequence[Row], as_they_are: bool) -> None:
    """Refuse a class that has no image left, and images of several sizes where they should have one."""
    for test in (False, True):
        left = {row.label for row in good if row.test == test}
        if missing := [one for label, one in enumerate(listing.classes) if label not in left]:
            what = "testing" if test else "training"
            raise DataError(f"no image of the class {missing[0]} for {what} can be decoded: see {folder / REPORT}")
    sizes = {(row.height, row.width): row.name for row in good}
    if as_they_are and len(sizes) > 1:
        (h, w), name = max(sizes.items())
        raise DataError(f"{name} has {w} x {h} pixels, and others have fewer: choose a --size")


def write_report(listing: Listing, rows: Sequence[Row]) -> str:
    """Which images were left out and why, and which are unusual."""
    bad = [row for row in rows if row.fault]
    lines = [f"{len(rows) - len(bad):,} of {format_count(len(rows), 'image')} packed; {listing.split}"]
    if bad:
        lines += ["", f"{format_count(len(bad), 'image')} left out, which cannot be decoded:"]
        lines += [f"  {row.name}: {row.fault}" for row in bad]
    for kind, words in KINDS.items():
        names = [row.name for row in rows if kind in row.kinds.split()]
        if names:
            lines += ["", f"{format_count(len(names), 'image')} {words}:", *(f"  {name}" for name in names[:NAMED])]
            lines += [f"  and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    if listing.others:
        others = listing.others
        lines += ["", f"{format_count(len(others), 'file')} not named like images, and not looked at:"]
        lines += [f"  {name}" for name in others[:NAMED]]
        lines += [f"  and {len(others) - NAMED:,} more"] if len(others) > NAMED else []
    return "\n".join(lines) + "\n"


def read_info(folder: Path) -> dict[str, Any]:
    """What the last file of a packed folder says; refuses one that is not whole."""
    if not (folder / PACK).is_file():
        raise DataError(f"{folder} is not packed to the end: repeat the equipoise pack that began it")
    info = files.read_json(folder / PACK)
    if not isinstance(info, dict) or info.get("seal") != digest({k: v for k, v in info.items() if k != "seal"}):
        raise make_damage(folder / PACK)
    if info["format"] != FORMAT:
        raise DataError(f"{folder} was packed by another version of Equipoise: delete it and pack again")
    return info


def read_index(folder: Path) -> Index:
    """The index of a packed folder, if no shard is missing or of another length."""
    info = read_info(folder)
    try:
        data = files.read_bytes(folder / INDEX)
    except OSError:
        data = b""
    if hashlib.sha256(data).hexdigest() != info["index"]:
        raise make_damage(folder / INDEX)
    tensors = safetensors.numpy.load(data)
    for number, size in enumerate(info["shards"]):
        path = folder / name_shard(number)
        if not path.is_file() or path.stat().st_size != size:
            raise make_damage(path)
    columns = {name: tensors[name] for name in COLUMNS}
    return Index(tuple(info["classes"]), columns, tensors["names"].tobytes(), info["shards"], info)


def make_damage(path: Path) -> DataError:
    """The error for a file of a packed folder that is missing or not as it was written."""
    return DataError(f"{path} is damaged: delete the folder {path.parent} and pack again")
