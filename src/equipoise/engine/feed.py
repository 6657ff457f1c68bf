"""Where batches read their images: in memory, or in a window on the device that moves over images on the disk.

A training step reads an image where `x.start` says that it lies. For images in memory that never changes. For those on
the disk, threads read ahead into a few buffers, pinned on a GPU's host, and copy what they read to one of two halves of
the window while batches are made of the other; before a batch that needs a new half, `x.start` is brought up to date.
So a step has the same tensors at the same addresses, as a CUDA graph needs them, and does not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data import shards, stored
from ..data.index import Numbers
from ..data.ragged import Ragged
from ..data.stored import Stored
from ..errors import RunError, UsageError, is_gpu_full
from ..step import Step
from .reading import Buffer, Reading

T = TypeVar("T")
Ahead = Callable[[], Sequence[Tensor]]
"""gives the positions of batches, if they are known yet"""

PIECE = 2**23
"""bytes of a buffer: what a thread reads before it copies it to the device"""
NEAR = 2**35
"""bytes of exemplars up to which they stay on the device"""


class Resident:
    """Images in memory."""

    def __init__(self, x: Tensor | Ragged) -> None:
        self.x = x

    def arrange(self, which: Tensor, gen: torch.Generator) -> Tensor:
        """Positions in an order in which they can be read: any."""
        return which

    def lay_out(self, parts: Sequence[Tensor], ahead: Ahead = list) -> None:
        """Say which images the next batches have."""

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Each of the batches that are laid out, when its images are at hand."""
        return iter(batches)

    def close(self) -> None:
        """Nothing more is read."""


class Feed:
    """Images on the disk, brought to the device while others are trained on; those at the positions `near` stay."""

    def __init__(self, x: Stored, near: Tensor, old: Tensor | None = None, window: int = 0) -> None:
        """`old` is a mask of images of old classes, which `arrange` keeps apart from the others. `window` is the least
        size of a half of the window in bytes, by default that in which an epoch is shuffled."""
        device, self.stored = x.device, x
        self.row, self.count = x.row.cpu().numpy(), x.bytes.cpu().numpy()
        self.near = torch.zeros(len(x), dtype=torch.bool, device=device).index_fill(0, near, True)
        self.far = ~self.near.cpu().numpy()
        self.old = torch.zeros_like(self.near) if old is None else old
        self.largest = int(self.count.max(initial=0))
        self.least = window or stored.WINDOW
        self.step = max(PIECE - self.largest, self.largest)
        """bytes of a piece, but for its last image"""
        self.begin = int(self.count[~self.far].sum())
        """where the window begins, after the images that stay"""
        self.window = self.half = 0
        """bytes of a part, and those that a half of the window has for it; 0 until there is room"""
        self.buffers: list[list[Buffer]] = []
        with torch.inference_mode(False):  # threads write to it, which are in no such mode
            pixels = torch.empty(0, dtype=torch.uint8, device=device)
            self.x = Ragged(pixels, torch.zeros(len(x), dtype=torch.long, device=device), x.size, x.side)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.reading: Reading | None = None
        self.ahead: Layout | None = None
        """batches that are read already, though others are laid out"""

    def arrange(self, which: Tensor, gen: torch.Generator) -> Tensor:
        """Positions in an order in which they can be read: those on the disk are shuffled in blocks, where they are.

        An image of an old class takes the place of one, since a method may give a batch so many of them.
        """
        arranged = which.flatten().clone()
        far = (~self.near[arranged]).nonzero()[:, 0]
        is_old = self.old[arranged[far]]
        shuffled = stored.shuffle_blocks(self.stored, arranged[far], gen)
        for kind in (False, True):
            arranged[far[is_old == kind]] = shuffled[self.old[shuffled] == kind]
        return arranged.view_as(which)

    def lay_out(self, parts: Sequence[Tensor], ahead: Ahead = list) -> None:
        """Say which images the next batches have: tensors of positions (batches, images).

        `ahead` gives those of the batches that are laid out next, or none: they are read as soon as there is room.
        """
        if not len(self.x.pixels):
            self.make_room(parts)
        layout = Layout(self, parts)
        if self.ahead is not None and layout.is_same(self.ahead):
            layout = self.ahead
        else:
            self.close()
        coming = ahead()
        self.layout, self.ahead = layout, Layout(self, coming) if coming else None

    def make_room(self, parts: Sequence[Tensor]) -> None:
        """Read the images that stay, and make a window of which a half holds any batch as large as these.

        There is none if all images of these are near, as in a stage on the memory.
        """
        if self.far[list_images(parts)].any():
            far = np.sort(self.count[self.far])
            self.window = max(self.least, int(far[-max(part.shape[1] for part in parts) :].sum()))
            self.half = min(self.window + self.largest, int(far.sum()))
        try:
            self.x.pixels.resize_(max(self.begin + 2 * self.half, 3))
        except Exception as error:
            if not self.begin or not is_gpu_full(error):
                raise
            words = f"{self.begin / 1e9:.1f} GB of exemplars, beside {2 * self.half / 1e9:.1f} GB for images that are "
            words += "read from the disk, do not fit the GPU: lower"
            in_python = f"{words} Learner(memory=...) or Recipe(batch=...)"
            raise RunError(in_python, f"{words} --memory or --batch") from None
        kept = np.flatnonzero(~self.far)
        at = self.count[kept].cumsum() - self.count[kept]
        self.x.start[torch.from_numpy(kept).to(self.x.device)] = torch.from_numpy(at).to(self.x.device)
        self.stored.shards.read_to(self.row[kept], self.x.pixels)
        if self.half:
            size = self.step + self.largest
            self.buffers = [[Buffer(size, self.x.device) for _ in range(2)] for _ in range(shards.THREADS)]

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Each of the batches that are laid out, when its images are at hand; they are until the next one is due."""
        try:
            if self.reading is None:
                self.reading = Reading(self)
                self.reading.add(self.layout)
            if self.ahead is not None:
                self.reading.add(self.ahead)
            for k, batch in enumerate(batches):
                self.reading.bring(*self.layout.find_parts(k))
                yield batch
        except BaseException:
            self.close()
            raise
        if self.ahead is None:
            self.close()

    def close(self) -> None:
        """Nothing more is read, until batches are laid out again."""
        if self.reading is not None:
            self.reading.stop()
        self.reading = self.ahead = None


class Layout:
    """The images of batches that are on the disk, in order. Those that are in half of the window at once are a part."""

    def __init__(self, feed: Feed, batches: Sequence[Tensor]) -> None:
        which, count = list_images(batches), len(feed.far)
        sizes = np.repeat([part.shape[1] for part in batches], [len(part) for part in batches])
        far, batch = feed.far[which], np.repeat(np.arange(len(sizes)), sizes)
        # An image that a batch has several times is read once: so its distinct images have to fit, and no more.
        batch, self.which = np.divmod(np.unique(batch[far] * count + which[far]), count)
        self.edges = np.searchsorted(batch, np.arange(len(sizes) + 1))
        """how many come before each batch"""
        ends = np.concatenate([[0], feed.count[self.which].cumsum()])
        if (most := int(np.diff(ends[self.edges]).max(initial=0))) > feed.window:
            raise UsageError(
                f"a batch reads {most / 1e6:.0f} MB from the disk, and in the first epoch none could read more than "
                f"{feed.window / 1e6:.0f} MB: a method must read as many images in every epoch of a stage"
            )
        self.part = ends[:-1] // feed.window
        """the number of each one's part"""
        self.first = 0
        """the number of its first part among all that are read"""

    def is_same(self, other: Layout) -> bool:
        """Whether these are the same batches."""
        return np.array_equal(self.which, other.which) and np.array_equal(self.edges, other.edges)

    def split(self) -> list[Numbers]:
        """The images of each part."""
        return np.split(self.which, np.flatnonzero(np.diff(self.part)) + 1) if len(self.which) else []

    def find_parts(self, k: int) -> tuple[int, int]:
        """The numbers of the first and last part that batch k has images of; of none, if all its images are near."""
        first, last = self.edges[k : k + 2]
        if first == last:
            return 0, -1
        return self.first + int(self.part[first]), self.first + int(self.part[last - 1])


def list_images(batches: Sequence[Tensor]) -> Numbers:
    """The positions of batches, one after the other."""
    return torch.cat([part.flatten() for part in batches]).cpu().numpy()


Source = Resident | Feed


def open_source(s: Step) -> Source:
    """Where the batches of a training are read; exemplars and images held out stay at hand where others do not."""
    x = s.images.x
    if not isinstance(x, Stored):
        return Resident(x)
    near = torch.cat([s.held, s.memory])
    return Feed(x, near if int(x.bytes[near].sum()) <= NEAR else s.held, s.images.y < s.n_old)
