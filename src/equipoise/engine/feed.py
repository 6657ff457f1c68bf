"""Where batches read their images: in memory, or in a window on the device that moves over images on the disk.

A training step reads an image where `x.start` says that it lies. For images in memory that never changes. For those on
the disk, threads read ahead into a few buffers, pinned on a GPU's host, and copy what they read to one of two halves of
the window while batches are made of the other; before a batch that needs a new half, `x.start` is brought up to date.
So a step has the same tensors at the same addresses, as a CUDA graph needs them, and does not know the difference.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data import shards, stored
from ..data.index import Numbers
from ..data.ragged import Ragged
from ..data.stored import Stored
from ..errors import UsageError
from ..step import Step

T = TypeVar("T")

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

    def lay_out(self, parts: Sequence[Tensor]) -> None:
        """Say which images the next batches have."""

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Each of the batches that are laid out, when its images are at hand."""
        return iter(batches)


class Feed:
    """Images on the disk, brought to the device while others are trained on; those at the positions `near` stay."""

    def __init__(self, x: Stored, near: Tensor, window: int = 0) -> None:
        """`window` is the size of its halves in bytes, by default that in which an epoch is shuffled."""
        device, self.stored = x.device, x
        self.row, self.count = x.row.cpu().numpy(), x.bytes.cpu().numpy()
        self.near = torch.zeros(len(x), dtype=torch.bool, device=device).index_fill(0, near, True)
        self.far = ~self.near.cpu().numpy()
        largest = int(self.count.max(initial=0))
        self.window = max(window or stored.WINDOW, largest)
        self.half = min(self.window + largest, int(self.count[self.far].sum()))
        self.step = max(PIECE - largest, largest)
        kept = np.flatnonzero(~self.far)
        ends = self.count[kept].cumsum()
        self.begin = int(ends[-1]) if len(ends) else 0
        pixels = torch.empty(max(self.begin + 2 * self.half, 3), dtype=torch.uint8, device=device)
        start = torch.zeros(len(x), dtype=torch.long)
        start[torch.from_numpy(kept)] = torch.from_numpy(ends - self.count[kept])
        self.x = Ragged(pixels, start.to(device), x.size, x.side)
        x.shards.read_to(self.row[kept], pixels)
        size = self.step + largest
        self.buffers = [[Buffer(size, device) for _ in range(2)] for _ in range(shards.THREADS)] if self.half else []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def arrange(self, which: Tensor, gen: torch.Generator) -> Tensor:
        """Positions in an order in which they can be read: those on the disk are shuffled in blocks, where they are."""
        arranged = which.flatten().clone()
        far = (~self.near[arranged]).nonzero()[:, 0]
        arranged[far] = stored.shuffle_blocks(self.stored, arranged[far], gen)
        return arranged.view_as(which)

    def lay_out(self, parts: Sequence[Tensor]) -> None:
        """Say which images the next batches have: tensors of positions (batches, images)."""
        which = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        sizes = np.repeat([part.shape[1] for part in parts], [len(part) for part in parts])
        far = self.far[which]
        before = np.concatenate([[0], far.cumsum()])[np.concatenate([[0], sizes.cumsum()])]
        self.which, self.edges = which[far], before
        count = self.count[self.which]
        ends = np.concatenate([[0], count.cumsum()])
        self.part = ends[:-1] // self.window
        if (most := int(np.diff(ends[before]).max(initial=0))) > self.window:
            raise UsageError(
                f"the images of a batch have {most / 1e6:.0f} MB, and {self.window / 1e6:.0f} MB are read from the "
                "disk at a time: use a smaller --batch, or --images-on device"
            )

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Each of the batches that are laid out, when its images are at hand; they are until the next one is due."""
        reading = Reading(self)
        try:
            for k, batch in enumerate(batches):
                reading.bring(k)
                yield batch
        finally:
            reading.stop()


Source = Resident | Feed


def open_source(s: Step) -> Source:
    """Where the batches of a training are read; exemplars and images held out stay at hand where others do not."""
    x = s.images.x
    if not isinstance(x, Stored):
        return Resident(x)
    near = torch.cat([s.held, s.memory])
    return Feed(x, near if int(x.bytes[near].sum()) <= NEAR else s.held)


class Buffer:
    """Memory that a thread reads into; pinned for a GPU, so that it is copied while others compute."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until what was read before has been copied."""
        if self.copied is not None:
            self.copied.synchronize()


class Piece(NamedTuple):
    """Images that are read at once."""

    part: int
    """number of the part of the epoch that is in a half of the window at once"""
    rows: Numbers
    at: int
    """where they begin on the device"""


class Part:
    """The images that are in a half of the window at once."""

    def __init__(self, which: Numbers, at: Numbers, pieces: int) -> None:
        self.which, self.at, self.left = which, at, pieces
        self.copied: torch.cuda.Event | None = None
        """on a GPU, after the last copy"""


class Reading:
    """What the threads have read of an epoch, and what of it is used already."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.device = feed, feed.x.device
        self.change = threading.Condition()
        self.pieces = self.list_pieces()
        self.parts: dict[int, Part] = {}
        self.used: dict[int, torch.cuda.Event | None] = {-2: None, -1: None}
        """parts whose batches are launched, with an event after them"""
        self.placed = -1
        """the last part whose images are at hand"""
        self.error: BaseException | None = None
        self.stopped = False
        if feed.stream is not None:
            feed.stream.wait_stream(torch.cuda.current_stream(self.device))
        needed = -(-int(feed.count[feed.which].sum()) // feed.step)
        self.threads = [
            threading.Thread(target=self.read, args=(own,), daemon=True, name="equipoise reader")
            for own in feed.buffers[:needed]
        ]
        for thread in self.threads:
            thread.start()

    def list_pieces(self) -> Iterator[Piece]:
        """All pieces in the order in which they are read: those of a part as they lie on the disk."""
        feed = self.feed
        bounds = np.flatnonzero(np.diff(feed.part)) + 1
        for k, which in enumerate(np.split(feed.which, bounds) if len(feed.which) else []):
            which = np.unique(which)
            which = which[feed.row[which].argsort()]
            count = feed.count[which]
            at = count.cumsum() - count
            pieces = np.split(np.arange(len(which)), np.flatnonzero(np.diff(at // feed.step)) + 1)
            at = at + feed.begin + k % 2 * feed.half
            self.parts[k] = Part(which, at, len(pieces))
            yield from (Piece(k, feed.row[which[piece]], int(at[piece[0]])) for piece in pieces)

    # In a thread ---------------------------------------------------------------------------------------------

    def read(self, buffers: Sequence[Buffer]) -> None:
        """Read piece after piece, into one of the buffers while the other is copied."""
        try:
            for buffer in itertools.cycle(buffers):
                with self.change:
                    piece = None if self.stopped else next(self.pieces, None)
                if piece is None:
                    return
                buffer.wait()
                read = self.feed.stored.shards.read(piece.rows, buffer.memory, checked=True, threads=1)
                if not self.wait_for_room(piece.part):
                    return
                self.copy(piece, read.pixels, buffer)
        except BaseException as error:
            with self.change:
                self.error = error
                self.change.notify_all()

    def wait_for_room(self, part: int) -> bool:
        """Wait until the half of the window is free for a part; False if nothing more is to be read."""
        with self.change:
            self.change.wait_for(lambda: self.stopped or part - 2 in self.used)
            return not self.stopped

    def copy(self, piece: Piece, pixels: Tensor, buffer: Buffer) -> None:
        """Copy what was read to its place on the device."""
        to = self.feed.x.pixels[piece.at : piece.at + len(pixels)]
        if (stream := self.feed.stream) is None:
            to.copy_(pixels)
        else:
            with torch.cuda.stream(stream):
                if (used := self.used[piece.part - 2]) is not None:
                    stream.wait_event(used)
                to.copy_(pixels, non_blocking=True)
                assert buffer.copied is not None
                buffer.copied.record(stream)
        with self.change:
            part = self.parts[piece.part]
            part.left -= 1
            if not part.left:
                part.copied = None if stream is None else stream.record_event()
                self.change.notify_all()

    # In the loop ---------------------------------------------------------------------------------------------

    def bring(self, k: int) -> None:
        """Wait until the images of batch k are at hand. What only batches before it had makes room."""
        first, last = self.feed.edges[k : k + 2]
        if first == last:
            return
        done, needed = (int(self.feed.part[i]) for i in (first, last - 1))
        stream = None if self.feed.stream is None else torch.cuda.current_stream(self.device)
        with self.change:
            for part in range(len(self.used) - 2, done):
                self.used[part] = None if stream is None else stream.record_event()
            self.change.notify_all()
        while self.placed < needed:
            self.place(self.placed + 1)

    def place(self, number: int) -> None:
        """Wait for a part, and say where its images lie."""
        with self.change:
            self.change.wait_for(lambda: self.error or (number in self.parts and not self.parts[number].left))
            if self.error is not None:
                raise self.error
            part = self.parts.pop(number)
        places = torch.from_numpy(np.stack([part.which, part.at]))
        if part.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(part.copied)
            places = places.pin_memory().to(self.device, non_blocking=True)
        self.feed.x.start.index_copy_(0, places[0], places[1])
        self.placed = number

    def stop(self) -> None:
        """End the threads, and wait for what they copy."""
        with self.change:
            self.stopped = True
            self.change.notify_all()
        for thread in self.threads:
            thread.join()
        if self.feed.stream is not None:
            self.feed.stream.synchronize()
