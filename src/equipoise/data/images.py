"""Labelled images on a device, and sums over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UsageError
from .ragged import Ragged, join_ragged
from .resize import see_centre
from .stored import Pixels, Stored


@dataclass(frozen=True)
class Images:
    """Labelled images on one device: `x` is uint8 (n, channels, height, width) or `Ragged`, `y` int64 (n,).

    Pixels are stored here once; training sets, exemplars and batches are positions. Those of a `Stored` x are read
    when they are used.
    """

    x: Pixels
    y: Tensor
    id: str = ""
    """a hash of all pixels and labels, if known"""

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Tensor) -> Images:
        return Images(self.x[which], self.y[which])

    def to(self, device: torch.device | str) -> Images:
        """The same images on another device."""
        return Images(self.x.to(device), self.y.to(device), self.id)

    def take_squares(self, which: Tensor) -> Tensor:
        """The pixels of some images (n, channels, height, width), as a net sees them where nothing is random."""
        if isinstance(self.x, Stored):
            return self[which].compact().take_squares(torch.arange(len(which), device=self.x.device))
        return see_centre(self.x, which) if isinstance(self.x, Ragged) else self.x[which]

    def compact(self) -> Images:
        """The same images in memory, without pixels of others."""
        return self if isinstance(self.x, Tensor) else replace(self, x=self.x.compact())

    def find_positions(self, first: int, last: int) -> Tensor:
        """Positions of the images of the classes first, ..., last - 1."""
        return ((self.y >= first) & (self.y < last)).nonzero()[:, 0]

    def fingerprint(self, where: Tensor | None = None) -> str:
        """A hash of all pixels and labels in order, or of those at the positions `where`."""
        if where is not None:
            if not self.id:
                return self[where].fingerprint()
            h = hashlib.sha256(self.id.encode())
            h.update(where.cpu().numpy().data)
            h.update(self.y[where].cpu().numpy().data)
        elif isinstance(self.x, Stored):  # by the checksums of the index, without reading
            return self.x.shards.index.fingerprint(self.x.row.cpu().numpy(), self.y.cpu().numpy())
        else:
            ragged = not isinstance(self.x, Tensor)
            head = ("ragged", len(self)) if ragged else (tuple(self.x.shape), str(torch.uint8))
            h = hashlib.sha256(repr(head).encode())
            if not isinstance(self.x, Tensor):
                h.update(self.x.size.contiguous().cpu().numpy().data)
            for pixels in list_pixels(self.x):
                h.update(pixels.cpu().numpy().data)
            h.update(self.y.contiguous().cpu().numpy().data)
        return h.hexdigest()


def list_pixels(x: Pixels) -> Iterator[Tensor]:
    """All pixels in order, contiguous; those of images of different sizes some at a time, without gaps."""
    if isinstance(x, Tensor):
        yield x.contiguous()
    else:
        yield from (part.compact().pixels for part in x.chunks())


def join_images(a: Images, b: Images) -> Images:
    """The images of a, then those of b."""
    y = torch.cat([a.y, b.y])
    if isinstance(a.x, Tensor) and isinstance(b.x, Tensor):
        return Images(torch.cat([a.x, b.x]), y)
    if isinstance(a.x, Stored) or isinstance(b.x, Stored):
        raise UsageError(
            "images on the disk are not learned beside pixels that a method or a learner keeps: use --images-on device"
        )
    one, other = (x if isinstance(x, Ragged) else Ragged.of_one_size(x) for x in (a.x, b.x))
    return Images(join_ragged(one, other), y)


def measure_channels(x: Pixels) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 images, in units of pixel values.

    Computed from a histogram: exact, equal on every device, and without a float copy of the images.
    """
    counts = torch.zeros(x.shape[1], 256, dtype=torch.float64)
    for pixels in list_pixels(x):
        channels = pixels.unbind(1) if isinstance(x, Tensor) else pixels.view(-1, 3).unbind(1)
        counts += torch.stack([torch.bincount(c.flatten(), minlength=256).cpu().double() for c in channels])
    return summarise_levels(counts)


def summarise_levels(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, from the number of its pixels of each level (channels, 256)."""
    levels = torch.arange(256, dtype=torch.float64)
    p = counts / counts[0].sum()
    mean = p @ levels
    std = ((p @ levels**2) - mean**2).clamp_min(0).sqrt()
    return mean, torch.where(std > 0, std, 1.0)  # a constant channel is normalised to 0


def sum_by_class(h: Tensor, y: Tensor, classes: int) -> Tensor:
    """The sum of the features of each class. Deterministic on a GPU, unlike `index_add`."""
    return torch.stack([h[y == c].sum(0) for c in range(classes)])
