"""Crop and flip: whole batches, on the device of the images, from random numbers drawn beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import check


@dataclass(frozen=True)
class Crop:
    """Shift an image by at most `pad` pixels each way, filling with black, then mirror it half of the time."""

    pad: int = 4
    """largest shift in pixels, up, down, left and right; 0 for none"""
    flip: bool = True
    """whether half of the images are mirrored left to right"""

    def __post_init__(self) -> None:
        check("pad", self.pad, least=0, whole=True)

    def padded(self, x: Tensor) -> Tensor:
        """The images with a black margin, made once; a crop is then a plain gather."""
        return F.pad(x, (self.pad,) * 4) if self.pad else x

    def draw(self, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
        """The random numbers for `shape` images, int64 (*shape, 3): offset down, offset right, mirror or not."""
        offsets = torch.randint(0, 2 * self.pad + 1, (*shape, 2), generator=gen, device=gen.device)
        mirror = torch.randint(0, 2, (*shape, 1), generator=gen, device=gen.device)
        return torch.cat([offsets, mirror if self.flip else torch.zeros_like(mirror)], -1)

    def __call__(self, padded: Tensor, which: Tensor, drawn: Tensor) -> Tensor:
        """The images `which` of `padded`, cropped and mirrored as `drawn` says; one gather, no loop."""
        h, w = padded.shape[-2] - 2 * self.pad, padded.shape[-1] - 2 * self.pad
        across = torch.arange(w, device=padded.device)
        down = torch.arange(h, device=padded.device) + drawn[:, 0:1]
        right = torch.where(drawn[:, 2:3] > 0, w - 1 - across, across) + drawn[:, 1:2]
        # Index tensors on both sides of a slice put the channels last in memory, which convolutions like.
        nhwc = padded[which[:, None, None], :, down[:, :, None], right[:, None, :]]
        return nhwc.permute(0, 3, 1, 2)
