"""Images of different sizes, in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 2**28
"""most bytes that are copied at a time, but for a single larger image"""


class Sized:
    """What is known of images of different sizes, wherever their pixels are."""

    size: Tensor
    """height and width of each image (n, 2), int64"""
    side: int
    """side of the squares that a net sees"""

    def __len__(self) -> int:
        return len(self.size)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n, 3, side, side), as a net sees them."""
        return len(self), 3, self.side, self.side

    @property
    def bytes(self) -> Tensor:
        """Number of bytes of each image (n,)."""
        return 3 * self.size.prod(1)

    def find_chunks(self) -> Iterator[slice]:
        """The images, some at a time: as many as CHUNK bytes, at least one."""
        ends, first = self.bytes.cumsum(0).tolist(), 0
        for i in range(1, len(self) + 1):
            if i == len(self) or ends[i] - (ends[first - 1] if first else 0) > CHUNK:
                yield slice(first, i)
                first = i


@dataclass(frozen=True)
class Ragged(Sized):
    """Colour images of different sizes. It stands where images of one size are a uint8 tensor.

    Image i is the bytes from `start[i]` on, row by row: (height, width, 3). Indexing copies no pixels: it selects
    starts and sizes, and `compact` copies the selected pixels.
    """

    pixels: Tensor
    """uint8, flat; there may be gaps between images"""
    start: Tensor
    """where each image begins (n,), int64"""
    size: Tensor
    """height and width of each image (n, 2), int64"""
    side: int = 0
    """side of the squares that a net sees; 0 if that is not chosen yet"""

    @classmethod
    def pack(cls, pixels: Tensor, size: Tensor, side: int = 0) -> Ragged:
        """Images of these sizes that follow one another without a gap."""
        count = 3 * size.prod(1)
        return cls(pixels, count.cumsum(0) - count, size, side)

    @classmethod
    def stack(cls, images: Sequence[Tensor], side: int = 0) -> Ragged:
        """Images (height, width, 3) as one; at least one."""
        size = torch.tensor([list(image.shape[:2]) for image in images], device=images[0].device)
        return cls.pack(torch.cat([image.flatten() for image in images]), size, side)

    @classmethod
    def of_one_size(cls, x: Tensor, side: int = 0) -> Ragged:
        """Images (n, channels, height, width), of 1 or 3 channels."""
        pixels = x.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).reshape(-1)
        return cls.pack(pixels, torch.tensor(x.shape[2:], device=x.device).expand(len(x), 2).contiguous(), side)

    @property
    def device(self) -> torch.device:
        """The device that they are on."""
        return self.pixels.device

    @cached_property
    def largest(self) -> int:
        """The largest of the images' shorter sides. The CPU waits for the device, once."""
        return int(self.size.amin(1).max()) if len(self) else 0

    def __getitem__(self, which: Tensor | slice) -> Ragged:
        return Ragged(self.pixels, self.start[which], self.size[which], self.side)

    def to(self, device: torch.device | str) -> Ragged:
        """The same images on another device, where only their own pixels are copied to."""
        if torch.empty(0, device=device).device == self.device:
            return self
        own = self.compact()
        return Ragged(own.pixels.to(device), own.start.to(device), own.size.to(device), self.side)

    def compact(self) -> Ragged:
        """The same images one after the other, without pixels of others or gaps between them."""
        if int(self.bytes.sum()) == len(self.pixels) and bool((self.bytes.cumsum(0) - self.bytes == self.start).all()):
            return self
        return Ragged.pack(torch.cat([self.pixels[:0], *self._runs()]), self.size, self.side)

    def _runs(self) -> Iterator[Tensor]:
        """The images' pixels in order; images that are neighbours in memory come together."""
        ends = (self.start + self.bytes).tolist()
        first = last = 0
        for begin, end in zip(self.start.tolist(), ends):
            if begin != last:
                yield self.pixels[first:last]
                first = begin
            last = end
        yield self.pixels[first:last]

    def chunks(self) -> Iterator[Ragged]:
        """The images, some at a time."""
        return (self[part] for part in self.find_chunks())

    def see(self, side: int) -> Ragged:
        """The same images, which a net sees as squares of this side."""
        return self if side == self.side else replace(self, side=side)


def join_ragged(a: Ragged, b: Ragged) -> Ragged:
    """The images of a, then those of b."""
    a, b = a.compact(), b.compact()
    return Ragged.pack(torch.cat([a.pixels, b.pixels]), torch.cat([a.size, b.size]), a.side or b.side)
