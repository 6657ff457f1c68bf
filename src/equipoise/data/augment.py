"""Crop, flip and brightness: whole batches, on the device of the images, from random numbers drawn beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check

FINE = 2**24
"""steps from the darkest to the brightest: as many as fp32 tells apart, and whole, like all that is drawn"""


@dataclass(frozen=True)
class Crop:
    """Shift an image by at most `pad` pixels each way, filling with black, then mirror it half of the time.

    With `brightness` its pixels are then multiplied by a number of its own, as torchvision's ColorJitter does.
    """

    pad: int = 4
    """largest shift in pixels, up, down, left and right; 0 for none"""
    flip: bool = True
    """whether half of the images are mirrored left to right"""
    brightness: float = 0.0
    """how much darker or brighter an image becomes at most: a factor from 1 − brightness to 1 + brightness"""

    def __post_init__(self) -> None:
        check("pad", self.pad, least=0, whole=True)
        check("brightness", self.brightness, least=0, most=1)

    @property
    def random_numbers(self) -> int:
        """How many random numbers an image takes."""
        return 4 if self.brightness else 3

    def draw(self, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
        """The random numbers for `shape` images, int64 (*shape, numbers): offset down, offset right, mirror or not,
        and where it is asked for the brightness, from 0 to FINE."""
        offsets = torch.randint(0, 2 * self.pad + 1, (*shape, 2), generator=gen, device=gen.device)
        mirror = torch.randint(0, 2, (*shape, 1), generator=gen, device=gen.device)
        drawn = [offsets, mirror if self.flip else torch.zeros_like(mirror)]
        if self.brightness:
            drawn.append(torch.randint(0, FINE + 1, (*shape, 1), generator=gen, device=gen.device))
        return torch.cat(drawn, -1)

    def __call__(self, x: Tensor, which: Tensor, drawn: Tensor) -> Tensor:
        """The uint8 images `which` of x, changed as `drawn` says: one gather, no loop, and no padded copy of x."""
        h, w = x.shape[-2:]
        across = torch.arange(-self.pad, w - self.pad, device=x.device)
        down = torch.arange(-self.pad, h - self.pad, device=x.device) + drawn[:, 0:1]
        right = torch.where(drawn[:, 2:3] > 0, w - 1 - 2 * self.pad - across, across) + drawn[:, 1:2]
        rows, columns = down.clamp(0, h - 1), right.clamp(0, w - 1)
        # Index tensors on both sides of a slice put the channels last in memory, which convolutions like.
        nhwc = x[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        if self.pad:  # beyond the edge it is black
            inside = (rows == down)[:, :, None] & (columns == right)[:, None, :]
            nhwc = nhwc * inside[..., None]
        if self.brightness:
            factor = 1 + self.brightness * (2 * drawn[:, 3] / FINE - 1)
            nhwc = (nhwc * factor[:, None, None, None]).clamp(max=255).to(nhwc.dtype)  # towards 0, as Pillow rounds
        return nhwc.permute(0, 3, 1, 2)
