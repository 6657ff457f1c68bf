"""Reads packed images: positions of an index to pixels, without decoding."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..errors import DataError
from .index import Index, Numbers, make_damage, name_shard, read_index
from .ragged import Ragged

THREADS = 8
"""that read; a disk answers several questions in the time of one"""
CHUNK = 2**26
"""most bytes that a thread reads at a time, but for a single larger image"""


class Span(NamedTuple):
    """Images that lie one after the other in a shard and in what is read."""

    path: Path
    offset: int
    to: int
    """where they begin in what is read"""
    size: int
    checks: Sequence[tuple[int, int, int]]
    """begin and end of each image in what is read, and its checksum; none to check nothing"""


@dataclass(frozen=True)
class Shards:
    """A packed folder, opened. Images are positions in its index."""

    folder: Path
    index: Index

    def __len__(self) -> int:
        return len(self.index.columns["label"])

    def read(
        self,
        which: Numbers | Sequence[int],
        into: torch.Tensor | None = None,
        checked: bool = False,
        threads: int = THREADS,
    ) -> Ragged:
        """The images at these positions, on the CPU, `into` a flat uint8 tensor such as pinned memory if given.

        `checked` compares each with its checksum.
        """
        columns, where = self.index.columns, np.asarray(which, np.int64)
        size = np.stack([columns["height"][where], columns["width"][where]], 1)
        count = 3 * size.prod(1)
        end = count.cumsum()
        total = int(end[-1]) if len(end) else 0
        pixels = torch.empty(total, dtype=torch.uint8) if into is None else into[:total]
        target = memoryview(pixels.numpy())  # type: ignore[arg-type]
        spans = list(self._join(where, end - count, count, checked))
        if threads < 2 or len(spans) < 2:
            for span in spans:
                read_span(span, target)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda span: read_span(span, target), spans))
        return Ragged(pixels, torch.from_numpy(end - count), torch.from_numpy(size))

    def _join(self, where: Numbers, begin: Numbers, count: Numbers, checked: bool) -> Iterator[Span]:
        """The images as spans: those that follow one another on the disk are read at once."""
        shard, offset = self.index.columns["shard"][where], self.index.columns["offset"][where]
        follows = (shard[1:] == shard[:-1]) & (offset[1:] == offset[:-1] + count[:-1])
        first = 0
        for i in range(1, len(where) + 1):
            if i < len(where) and follows[i - 1] and begin[i] + count[i] - begin[first] <= CHUNK:
                continue
            checks = []
            if checked:
                sums = self.index.columns["checksum"][where[first:i]]
                checks = list(zip(begin[first:i].tolist(), (begin + count)[first:i].tolist(), sums.tolist()))
            size = int(begin[i - 1] + count[i - 1] - begin[first])
            path = self.folder / name_shard(int(shard[first]))
            yield Span(path, int(offset[first]), int(begin[first]), size, checks)
            first = i

    def read_onto(self, which: Numbers, device: torch.device | str) -> Ragged:
        """The images at these positions on a device, checked; the CPU never holds more than some of them."""
        if torch.device(device).type == "cpu":
            return self.read(which, checked=True)
        size = np.stack([self.index.columns["height"][which], self.index.columns["width"][which]], 1)
        pixels = torch.empty(int(3 * size.prod(1).sum()), dtype=torch.uint8, device=device)
        self.read_to(which, pixels)
        return Ragged.pack(pixels, torch.from_numpy(size).to(device))

    def read_to(self, which: Numbers, pixels: torch.Tensor) -> None:
        """Fill memory of any device with the images at these positions, checked, some at a time."""
        ends = (3 * self.index.columns["height"][which] * self.index.columns["width"][which]).cumsum()
        first = begin = 0
        while first < len(which):
            last = max(first + 1, int(np.searchsorted(ends, begin + THREADS * CHUNK, "right")))
            part = self.read(which[first:last], checked=True)
            pixels[begin : begin + len(part.pixels)].copy_(part.pixels)
            first, begin = last, int(ends[last - 1])


def open_shards(folder: Path) -> Shards:
    """Open a packed folder; one that is not whole is refused."""
    return Shards(folder, read_index(folder))


def read_span(span: Span, target: memoryview) -> None:
    """Read a span to its place, and compare its images with their checksums."""
    try:
        with span.path.open("rb", buffering=0) as file:
            read_at(file.fileno(), target[span.to : span.to + span.size], span.offset)
    except OSError as error:
        raise DataError(f"{span.path} cannot be read ({(error.strerror or 'error').lower()})") from None
    for begin, end, checksum in span.checks:
        if zlib.crc32(target[begin:end]) != checksum:
            raise make_damage(span.path)


def read_at(descriptor: int, part: memoryview, offset: int) -> None:
    """Fill a part of the target with the bytes of a file from an offset on."""
    while len(part):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [part], offset)
        else:  # the descriptor is this thread's own
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(part))
            count = len(data)
            part[:count] = data
        if not count:
            raise OSError(0, "the file is too short")
        part, offset = part[count:], offset + count
