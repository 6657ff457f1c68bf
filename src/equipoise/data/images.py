"""Labelled images on a device, and sums over them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Labelled images on one device: `x` is uint8 (n, channels, height, width), `y` int64 (n,).

    Pixels are stored here once; training sets, exemplars and batches are positions.
    """

    x: Tensor
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
        else:
            h = hashlib.sha256(repr((tuple(self.x.shape), str(self.x.dtype))).encode())
            h.update(self.x.contiguous().cpu().numpy().data)
            h.update(self.y.contiguous().cpu().numpy().data)
        return h.hexdigest()


def join_images(a: Images, b: Images) -> Images:
    """The images of a, then those of b."""
    return Images(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]))


def measure_channels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 images, in units of pixel values.

    Computed from a histogram: exact, equal on every device, and without a float copy of the images.
    """
    levels = torch.arange(256, dtype=torch.float64)
    counts = [torch.bincount(x[:, c].flatten(), minlength=256).cpu().double() for c in range(x.shape[1])]
    p = torch.stack(counts) / counts[0].sum()
    mean = p @ levels
    std = ((p @ levels**2) - mean**2).clamp_min(0).sqrt()
    return mean, torch.where(std > 0, std, 1.0)  # a constant channel is normalised to 0


def sum_by_class(h: Tensor, y: Tensor, classes: int) -> Tensor:
    """The sum of the features of each class. Deterministic on a GPU, unlike `index_add`."""
    return torch.stack([h[y == c].sum(0) for c in range(classes)])
