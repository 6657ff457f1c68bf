"""Packs the images of a folder: each is decoded once, to bytes that a run reads without decoding.

A packed folder has shards (pixels of some images, one after the other) and an index. Each shard is written under a
temporary name, synchronised and renamed, and then a note says what is in it. Whatever is killed, these shards are not
written again; the result does not depend on it, nor on the number of processes. The file that says that all is there
comes last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .. import files
from ..errors import DataError, UsageError, check, format_count
from .decode import FORMATS, Fit
from .index import FILES, KIND, PACK, read_info, write_index
from .listing import Files, Listing
from .writing import Task, read_note, read_notes, write_shards

IMAGES = 1024
"""most images in a shard: 270 MB of ImageNet's"""
SMALL = 64
"""largest size of images that are learned by a small net, with shifts instead of crops"""
LARGE = 224
"""the size of larger images, if none is chosen"""
SAMPLE = 500
"""images whose headers are read before packing, to know how large they are"""
SPARE = 2**26
"""bytes of a disk to leave free"""


@dataclass(frozen=True)
class Packing:
    """How images are stored."""

    size: int | None
    """side of the squares that a net is to see; None for images of one size as they are"""
    short_side: int | None = None
    """short side of larger training images; smaller ones are not enlarged; None for 8/7 of the size, as 256 for 224"""
    square: bool = False
    """whether only the centre square of training images is stored"""

    def __post_init__(self) -> None:
        if self.size is not None:
            check("size", self.size, least=8, most=4096, whole=True)
        if self.short_side is not None:
            check("short-side", self.short_side, least=self.size or 8, most=65535, whole=True)
        if (self.size or 0) <= SMALL and (self.square or self.short_side is not None):
            raise UsageError(f"--short-side and --square have no effect on images of up to {SMALL} pixels: remove them")

    @property
    def train(self) -> Fit:
        """How training images are stored."""
        if self.size is None or self.size <= SMALL:
            return Fit(self.size, square=self.size is not None, enlarge=True)
        return Fit(self.short_side or round(self.size * 8 / 7), self.square)

    @property
    def test(self) -> Fit:
        """How test images are stored: squares, of which a net sees the middle, 224 of 256 pixels.

        Files that are squares of the size itself are seen as they are.
        """
        if self.size is None or self.size <= SMALL:
            return self.train
        return Fit(round(self.size * 8 / 7), square=True, enlarge=True, keep=self.size)

    def name(self, subset: str | None) -> str:
        """The name of the packed folder."""
        words = ["packed", *([str(self.size)] if self.size else []), *([subset] if subset else [])]
        words += [f"short-{self.short_side}"] if self.short_side else []
        return "-".join(words + ["square"] * self.square)


def choose_packing(listing: Listing, size: int | None, short_side: int | None = None, square: bool = False) -> Packing:
    """How to store the images. Without a size, small images of one size stay as they are, and others are large."""
    if size is None:
        sides = set(sample_sizes(listing.root, [*listing.train, *listing.test]))
        size = None if len(sides) == 1 and max(next(iter(sides))) <= SMALL and short_side is None else LARGE
    return Packing(size, short_side, square)


def sample_sizes(root: Path, images: Files) -> list[tuple[int, int]]:
    """Width and height of some of these images, evenly spaced, from their headers."""
    found = []
    for name, _ in images[:: max(1, len(images) // SAMPLE)]:
        with contextlib.suppress(Exception), Image.open(root / name, formats=FORMATS) as image:
            found.append(image.size)
    return found


def find_packed(listing: Listing, packing: Packing, subset: str | None = None) -> Path:
    """The packed folder, beside the images unless another is named."""
    return listing.root / packing.name(subset)


def pack(
    listing: Listing,
    folder: Path,
    packing: Packing,
    workers: int | None = None,
    tell: Callable[[int], None] = lambda images: None,
) -> None:
    """Pack the images into `folder`, or go on with it; nothing is done where all is there already.

    `tell` is called with the number of images that are packed.
    """
    tasks = make_tasks(listing, folder, packing)
    files.claim_folder(folder, KIND, FILES)
    with files.Lease(folder / files.LOCK).hold():
        if (folder / PACK).is_file():
            check_same(folder, listing, packing)
            return
        known = {path for task in tasks if read_note(task) is not None for path in (task.shard, task.note)}
        for path in [*folder.glob("shard-*"), *folder.glob(f".*{files.PARTIAL}")]:
            if path not in known:
                path.unlink()
        left = [task for task in tasks if task.shard not in known]
        check_space(folder, listing, packing, len(left) / max(1, len(tasks)))
        done = len(listing.train) + len(listing.test) - sum(len(task.names) for task in left)
        tell(done)
        for task in write_shards(left, workers or count_cores()):
            done += len(task.names)
            tell(done)
        rows, levels = read_notes(listing, tasks)
        write_index(folder, listing, asdict(packing), rows, levels)
        for task in tasks:
            task.note.unlink()


def check_same(folder: Path, listing: Listing, packing: Packing) -> None:
    """Refuse a packed folder of other images, or of the same ones packed otherwise."""
    info = read_info(folder)
    if info["listing"] != listing.digest():
        raise DataError(
            f"{folder} was packed from other images than {listing.root} has now: delete it to pack again, or name it "
            "in place of that folder to use what it holds"
        )
    if info["packing"] != asdict(packing):
        raise UsageError(f"{folder} is packed otherwise ({info['packing']}): choose another --out")


@contextlib.contextmanager
def show_progress(listing: Listing) -> Iterator[Callable[[int], None]]:
    """How many images are packed, on standard error: as a bar in a terminal, else in a line every minute."""
    console, total = Console(stderr=True), len(listing.train) + len(listing.test)
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.description} packed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, said = bar.add_task("", total=total), time.monotonic()

        def tell(images: int) -> None:
            nonlocal said
            words = f"{images:,} of {format_count(total, 'image')}"
            bar.update(task, completed=images, description=words)
            if bar.disable and time.monotonic() - said >= 60:
                said = time.monotonic()
                print(f"{words} packed", file=sys.stderr, flush=True)

        yield tell


def make_tasks(listing: Listing, folder: Path, packing: Packing) -> list[Task]:
    """The shards: training images, then test images."""
    tasks: list[Task] = []
    for part, fit in ((listing.train, packing.train), (listing.test, packing.test)):
        names = [name for name, _ in part]
        for first in range(0, len(names), IMAGES):
            tasks.append(Task(listing.root, folder, len(tasks), names[first : first + IMAGES], fit))
    return tasks


def check_space(folder: Path, listing: Listing, packing: Packing, part: float) -> None:
    """Refuse a disk that is too small for this part of the images, by the sizes of some of them."""
    needed = 0.0
    for images, fit in ((listing.train, packing.train), (listing.test, packing.test)):
        sizes = [fit.count_bytes(*size) for size in sample_sizes(listing.root, images)]
        needed += part * len(images) * sum(sizes) / max(1, len(sizes))
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise DataError(
            f"packing needs about {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB left: free some space, or "
            "name another disk with equipoise pack --out"
        )


def count_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
