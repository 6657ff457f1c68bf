"""Squares cut out of images of different sizes: `data/resize.py` as one kernel, in Triton.

A program computes neighbouring pixels of one square, each from the pixels of the image that its filter covers: four
where an image grows, about nine where half of a side is lost. An image is read from memory about once, since neighbours
share what they read. Nothing is written in between. The same kernel can change brightness and normalise, from grey
levels rounded as before: the same bits as in three passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...data.augment import Normalisation
from ...data.ragged import Ragged
from .launch import launch

PIXELS = 512
"""of a square, in a program"""
WARPS = 4


def resize(x: Ragged, which: Tensor, boxes: Tensor, side: int, largest: int) -> Tensor:
    """Cut boxes out of images, mirror them and resize them to squares (n, 3, side, side), uint8, channels last."""
    out = torch.empty(len(which), side, side, 3, dtype=torch.uint8, device=which.device)
    launch_resize(x, which, boxes, out, None, None)
    return out.permute(0, 3, 1, 2)


def resize_normalised(
    x: Ragged, which: Tensor, boxes: Tensor, side: int, to: Normalisation, factors: Tensor | None
) -> Tensor:
    """The same squares, normalised; each image's brightness changed by a factor before, if there are `factors` (n,)."""
    out = torch.empty(len(which), side, side, 3, dtype=to.dtype, device=which.device)
    launch_resize(x, which, boxes, out, to, factors)
    return out.permute(0, 3, 1, 2)


def launch_resize(
    x: Ragged, which: Tensor, boxes: Tensor, out: Tensor, to: Normalisation | None, factors: Tensor | None
) -> None:
    """Write the squares to `out` (n, side, side, 3)."""
    side = out.shape[1]
    tiles = -(-side * side // PIXELS)
    mean, std = (out, out) if to is None else (to.mean, to.std)  # what is not used is any tensor
    launch(
        resize_boxes, (len(which) * tiles,), x.pixels, x.start.contiguous(), x.size.contiguous(), which.contiguous(),
        boxes.contiguous(), boxes.shape[1], out if factors is None else factors, mean, std, out, side,
        BRIGHTEN=factors is not None, NORMALISE=to is not None, PIXELS=PIXELS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def finish(level, channel, factor, mean, std, BRIGHTEN: tl.constexpr, NORMALISE: tl.constexpr):
    """A pixel of a channel as it is written, of its mean before rounding."""
    level = (level + 0.5).to(tl.uint8)
    if BRIGHTEN:
        level = tl.minimum(level.to(tl.float32) * factor, 255.0).to(tl.uint8)
    if NORMALISE:
        return tl.div_rn(level.to(tl.float32) - tl.load(mean + channel), tl.load(std + channel))
    else:  # the compiler wants one type
        return level


@triton.jit
def resize_boxes(
    x, starts, sizes, which, boxes, numbers, factors, mean, std, out, side,
    BRIGHTEN: tl.constexpr, NORMALISE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out[i] = the box boxes[i] = (top, left, height, width, mirror, ...), `numbers` in all, of the image which[i]."""
    tiles = tl.cdiv(side * side, PIXELS)
    i = (tl.program_id(0) // tiles).to(tl.int64)
    image = tl.load(which + i)
    start, line = tl.load(starts + image), tl.load(sizes + 2 * image + 1)
    box = boxes + numbers * i
    top, left, mirror = tl.load(box), tl.load(box + 1), tl.load(box + 4)
    height, width = tl.load(box + 2).to(tl.int32), tl.load(box + 3).to(tl.int32)
    corner, line = x + start + 3 * (top * line + left), line.to(tl.int32)
    p = tl.program_id(0) % tiles * PIXELS + tl.arange(0, PIXELS)
    ok = p < side * side
    row, column = p // side, p % side
    column = tl.where(mirror > 0, side - 1 - column, column)

    down, tall = height.to(tl.float32) / side, tl.maximum(height.to(tl.float32) / side, 1.0)
    across, wide = width.to(tl.float32) / side, tl.maximum(width.to(tl.float32) / side, 1.0)
    y, x0 = (row + 0.5) * down, (column + 0.5) * across
    first_y = tl.maximum(y - tall + 0.5, 0.0).to(tl.int32)  # the first pixel that the filter covers
    first_x = tl.maximum(x0 - wide + 0.5, 0.0).to(tl.int32)

    red = tl.zeros((PIXELS,), tl.float32)
    green = tl.zeros((PIXELS,), tl.float32)
    blue = tl.zeros((PIXELS,), tl.float32)
    total = tl.zeros((PIXELS,), tl.float32)
    for a in range(0, tl.ceil(2 * tall).to(tl.int32)):
        at_y = first_y + a
        weight_y = tl.maximum(1.0 - tl.abs(at_y + 0.5 - y) / tall, 0.0)
        weight_y = tl.where(at_y < height, weight_y, 0.0)
        for b in range(0, tl.ceil(2 * wide).to(tl.int32)):
            at_x = first_x + b
            weight = weight_y * tl.maximum(1.0 - tl.abs(at_x + 0.5 - x0) / wide, 0.0)
            weight = tl.where(at_x < width, weight, 0.0)
            pixel = corner + 3 * (at_y * line + at_x)
            some = ok & (weight > 0)
            red += weight * tl.load(pixel, some, 0).to(tl.float32)
            green += weight * tl.load(pixel + 1, some, 0).to(tl.float32)
            blue += weight * tl.load(pixel + 2, some, 0).to(tl.float32)
            total += weight
    total = tl.where(ok, total, 1.0)
    factor = tl.load(factors + i) if BRIGHTEN else 1.0
    to = out + 3 * (i * side * side + p)
    tl.store(to, finish(red / total, 0, factor, mean, std, BRIGHTEN, NORMALISE), ok)
    tl.store(to + 1, finish(green / total, 1, factor, mean, std, BRIGHTEN, NORMALISE), ok)
    tl.store(to + 2, finish(blue / total, 2, factor, mean, std, BRIGHTEN, NORMALISE), ok)
