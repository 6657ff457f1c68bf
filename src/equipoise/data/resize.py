"""Squares cut out of images of different sizes and brought to one size, all images of a batch at once.

The filter is Pillow's BILINEAR: a triangle, as wide as a pixel of whichever is coarser, so that nothing is aliased
where an image shrinks. Pixels outside the box do not count, as in torchvision, which cuts first and then resizes. The
result is at most one grey level from Pillow's `crop(box).resize((side, side), BILINEAR)`, which rounds in between too,
after the columns or after the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .ragged import Ragged

Resize = Callable[[Ragged, Tensor, Tensor, int, int], Tensor]
"""what `resize` is, or does it faster"""


def resize(x: Ragged, which: Tensor, boxes: Tensor, side: int, largest: int) -> Tensor:
    """Cut boxes out of images, mirror them and resize them to squares (n, 3, side, side), uint8, channels last.

    Args:
        x: the images.
        which: positions of the images (n,).
        boxes: top, left, height, width, and 1 for a mirror image or 0 (n, 5 or more), int64.
        side: of the squares.
        largest: no box is larger.
    """
    n = len(which)
    top, left, height, width, mirror = boxes[:, :5, None].unbind(1)
    at = torch.arange(largest, device=boxes.device)
    rows, columns = top + at.minimum(height - 1), left + at.minimum(width - 1)
    line = x.start[which, None] + 3 * rows * x.size[which, 1:]  # where in memory each row begins
    triples = x.pixels.unfold(0, 3, 1)  # the three bytes from any place on
    box = triples[line[:, :, None] + 3 * columns[:, None]].float()  # (n, largest, largest, 3)
    across = weigh(width, side, at)
    across = torch.where(mirror[..., None] > 0, across.flip(1), across)
    low = torch.bmm(weigh(height, side, at), box.view(n, largest, 3 * largest)).view(n, side, largest, 3)
    squares = torch.bmm(across, low.transpose(1, 2).reshape(n, largest, 3 * side)).view(n, side, side, 3)
    return squares.add_(0.5).byte().permute(0, 3, 2, 1).contiguous(memory_format=torch.channels_last)


def weigh(length: Tensor, side: int, at: Tensor) -> Tensor:
    """The weight of each pixel `at` of boxes of this length (n, 1) in each of `side` pixels (n, side, len(at))."""
    scale = length.double() / side
    wide = scale.clamp_min(1)[..., None]
    centre = (torch.arange(side, device=at.device) + 0.5) * scale
    weight = (1 - (at + 0.5 - centre[..., None]).abs() / wide).clamp_min(0) * (at < length)[:, None]
    return (weight / weight.sum(2, keepdim=True)).float()


def find_centres(size: Tensor, side: int) -> Tensor:
    """The boxes in which images of these sizes (n, 2) are seen where nothing is random.

    With images whose shorter side is 8/7 of `side`, as 256 is of 224, the square of `side` in the middle. Of larger
    images, the square that is this part of the shorter side. Of smaller ones, as much of the middle as they have, up to
    `side`: an image of the size of the square is seen as it is.
    """
    short = size.amin(1)
    length = torch.maximum((short * 7 / 8).round().long(), short.clamp_max(side))
    top, left = ((size - length[:, None]).double() / 2).round().long().unbind(1)
    return torch.stack([top, left, length, length, torch.zeros_like(top)], 1)


def see_centre(x: Ragged, which: Tensor, resize: Resize = resize) -> Tensor:
    """The images `which` of x as a net sees them where nothing is random."""
    largest = max(round(x.largest * 7 / 8), min(x.largest, x.side))
    return resize(x, which, find_centres(x.size[which], x.side), x.side, largest)
