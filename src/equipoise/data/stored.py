"""Images that stay on the disk until they are used, and an order of an epoch that a disk can follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .memory import rank_in_class
from .ragged import Ragged, Sized
from .shards import Shards

BLOCK = 2**20
"""bytes of neighbours on the disk that stay together when an epoch is shuffled: four images of ImageNet"""
WINDOW = 2**29
"""bytes of a window, in which images are shuffled across its blocks: 2,000 images of ImageNet"""


@dataclass(frozen=True)
class Stored(Sized):
    """Colour images of different sizes, in shards. It stands where images in memory are a `Ragged`.

    What is known of each without reading it is on the device that they are read to.
    """

    shards: Shards
    row: Tensor
    """positions in the index of the shards (n,), int64"""
    size: Tensor
    """height and width of each image (n, 2), int64"""
    side: int
    """side of the squares that a net sees"""

    @property
    def device(self) -> torch.device:
        """The device that they are read to."""
        return self.size.device

    def __getitem__(self, which: Tensor | slice) -> Stored:
        return replace(self, row=self.row[which], size=self.size[which])

    def to(self, device: torch.device | str) -> Stored:
        """The same images, to be read to another device."""
        return replace(self, row=self.row.to(device), size=self.size.to(device))

    def see(self, side: int) -> Stored:
        """The same images, which a net sees as squares of this side."""
        return replace(self, side=side)

    def compact(self) -> Ragged:
        """The same images in the memory of their device."""
        return self.shards.read_onto(self.row.cpu().numpy(), self.device).see(self.side)

    def chunks(self) -> Iterator[Ragged]:
        """The images in memory, some at a time."""
        return (self[part].compact() for part in self.find_chunks())


Pixels = Tensor | Ragged | Stored
"""of images: uint8 (n, channels, height, width), of different sizes, or on the disk"""


def shuffle_blocks(x: Stored, which: Tensor, gen: torch.Generator) -> Tensor:
    """The positions `which` in a random order that a disk can follow.

    Neighbours on the disk form blocks, which are shuffled. Windows of many blocks follow one another, and in each of
    them all images are shuffled. An image that comes several times comes in another block each time.
    """
    if not len(which):
        return which
    which = which[x.row[which].argsort()]
    which = which[rank_in_class(which).argsort(stable=True)]
    block = find_parts(x, which, BLOCK)
    place = torch.randperm(int(block[-1]) + 1, generator=gen, device=gen.device)[block]
    which = which[place.argsort(stable=True)]
    random = torch.rand(len(which), generator=gen, device=gen.device, dtype=torch.float64)
    return which[(find_parts(x, which, WINDOW) + random).argsort()]


def find_parts(x: Stored, which: Tensor, size: int) -> Tensor:
    """The number of the part, of so many bytes, in which each image begins if they lie one after the other."""
    count = x.bytes[which]
    return (count.cumsum(0) - count) // size
