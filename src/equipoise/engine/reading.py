"""Threads that read images from shards ahead of a training, into a few buffers, and copy them to the device."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.index import Numbers

if TYPE_CHECKING:
    from .feed import Feed, Layout

THREAD = "equipoise reader"
"""the name of the threads"""


class Buffer:
    """Memory that a thread reads into; pinned for a GPU, so that it is copied while others compute."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

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
    """What threads read of the parts of layouts, one layout after the other, and what of it is used already."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.device = feed, feed.x.device
        self.change = threading.Condition()
        self.coming: deque[Numbers] = deque()
        """the images of parts that are not planned yet"""
        self.pieces: deque[Piece] = deque()
        self.parts: dict[int, Part] = {}
        self.planned = 0
        self.used = 0
        """number of parts whose batches are launched"""
        self.events: list[torch.cuda.Event | None] = [None, None]
        """on a GPU, for each half of the window, after the batches of the last such part in it"""
        self.placed = -1
        """the last part whose images are at hand"""
        self.error: BaseException | None = None
        self.stopped = False
        if feed.stream is not None:
            feed.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.threads: list[threading.Thread] = []

    def add(self, layout: Layout) -> None:
        """Read these batches too, after what is read already."""
        needed = -(-int(self.feed.count[layout.which].sum()) // self.feed.step)
        with self.change:
            layout.first = self.planned + len(self.coming)
            self.coming.extend(layout.split())
            self.change.notify_all()
        for own in self.feed.buffers[len(self.threads) : needed]:
            thread = threading.Thread(target=self.read, args=(own,), daemon=True, name=THREAD)
            thread.start()
            self.threads.append(thread)

    def plan_part(self) -> bool:
        """Divide the next part into pieces, which lie on the disk one after the other; False if there is none."""
        if not self.coming:
            return False
        feed, which = self.feed, np.unique(self.coming.popleft())
        which = which[feed.row[which].argsort()]
        count = feed.count[which]
        at = count.cumsum() - count
        pieces = np.split(np.arange(len(which)), np.flatnonzero(np.diff(at // feed.step)) + 1)
        at = at + feed.begin + self.planned % 2 * feed.half
        self.parts[self.planned] = Part(which, at, len(pieces))
        self.pieces.extend(Piece(self.planned, feed.row[which[piece]], int(at[piece[0]])) for piece in pieces)
        self.planned += 1
        return True

    # In a thread ---------------------------------------------------------------------------------------------

    def read(self, buffers: Sequence[Buffer]) -> None:
        """Read piece after piece, into one of the buffers while the other is copied."""
        try:
            for buffer in itertools.cycle(buffers):
                with self.change:
                    self.change.wait_for(lambda: self.stopped or self.pieces or self.plan_part())
                    if self.stopped:
                        return
                    piece = self.pieces.popleft()
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
            self.change.wait_for(lambda: self.stopped or part - 2 < self.used)
            return not self.stopped

    def copy(self, piece: Piece, pixels: Tensor, buffer: Buffer) -> None:
        """Copy what was read to its place on the device."""
        to = self.feed.x.pixels[piece.at : piece.at + len(pixels)]
        if (stream := self.feed.stream) is None:
            to.copy_(pixels)
        else:
            with torch.cuda.stream(stream):
                if (used := self.events[piece.part % 2]) is not None:
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

    def bring(self, first: int, last: int) -> None:
        """Wait until the parts first, ..., last are at hand. Those before are used, and make room."""
        stream = None if self.feed.stream is None else torch.cuda.current_stream(self.device)
        with self.change:
            for part in range(self.used, first):
                self.events[part % 2] = None if stream is None else stream.record_event()
            self.used = max(self.used, first)
            self.change.notify_all()
        while self.placed < last:
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
