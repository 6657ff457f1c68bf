"""Converts and checks the images and statistics that users pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, format_count
from .augment import Augment, ResizedCrop, fit_pixels
from .ragged import Ragged
from .stored import Pixels


def as_images(images: Any, copy: bool = False) -> Tensor:
    """Convert images to a uint8 tensor (n, channels, height, width); `copy`: one that shares no memory with them."""
    from_torch = isinstance(images, Tensor)
    if from_torch and not is_ordinary(images):
        raise UsageError("images must be an ordinary tensor with pixels, not a sparse, quantized, nested or meta one")
    try:
        x = images if from_torch else torch.from_numpy(np.array(images, order="C"))
    except (TypeError, ValueError):
        what = "an array of objects" if isinstance(images, np.ndarray) else f"a {type(images).__name__}"
        words = f"images must be one array of equal-sized uint8 images, such as np.stack makes of a list, not {what}"
        raise UsageError(words) from None
    if x.dtype != torch.uint8:
        raise UsageError(f"images must be uint8, from 0 to 255, not {str(x.dtype).removeprefix('torch.')}")
    if x.ndim not in (3, 4) or 0 in x.shape[1:]:
        raise UsageError(
            f"images must be (n, height, width, channels) or (n, channels, height, width), not {tuple(x.shape)}"
        )
    if x.ndim == 3:
        x = x[:, None]
    else:
        first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
        if not (first or last):
            raise UsageError(f"images must have 1 or 3 channels, first or last; their shape is {tuple(x.shape)}")
        if last and not (first and from_torch):  # ambiguous: last for numpy, first for torch
            x = x.permute(0, 3, 1, 2)
    # Flatten and view: with one channel, two memory layouts count as contiguous, and their results differ.
    flat = x.contiguous().flatten()
    return (flat.clone() if copy and from_torch else flat).view(x.shape)


def as_pixels(images: Any, crop: Augment | None, copy: bool = False) -> Pixels:
    """Convert images to what an augmentation reads: for a `ResizedCrop`, a list may have images of different sizes."""
    if not isinstance(crop, ResizedCrop) or not isinstance(images, Sequence):
        return fit_pixels(as_images(images, copy), crop)
    if not images:
        raise UsageError("there are no images")
    arrays = [as_images((one if isinstance(one, Tensor) else np.asarray(one))[None]) for one in images]
    return Ragged.stack([x[0].permute(1, 2, 0).expand(-1, -1, 3) for x in arrays], crop.size)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has its values one beside the other: it is not sparse, quantized, nested or a meta tensor."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def as_batch(images: Any, known: tuple[int, int, int], crop: Augment | None) -> Any:
    """Turn a single image into a batch of one, where images of the shape `known` are expected, or of any size for a
    `ResizedCrop`."""
    try:
        shape = tuple(np.shape(images))
    except ValueError:  # images of several sizes: `as_images` raises
        return images
    if isinstance(crop, ResizedCrop):
        colour = len(shape) == 3 and 3 in (shape[2], shape[0] if isinstance(images, Tensor) else 0)
        return [images] if len(shape) == 2 or colour else images
    channels, height, width = known
    alone = shape in ((height, width), (height, width, channels)) or (channels > 1 and shape == known)
    return images[None] if alone and isinstance(images, (np.ndarray, Tensor)) else [images] if alone else images


Statistics = tuple[Sequence[float], Sequence[float]]
"""mean and standard deviation of each channel, for pixels from 0 to 1"""


def check_statistics(normalise: Statistics | None) -> None:
    """Refuse anything but None, or a mean and a standard deviation for each channel."""
    if normalise is None:
        return
    try:
        mean, std = ([float(value) for value in values] for values in normalise)
    except (TypeError, ValueError, OverflowError):
        mean, std = [], []
    if not mean or len(mean) != len(std) or not all(map(math.isfinite, [*mean, *std])) or min(std) <= 0:
        raise UsageError(
            f"normalise must be a mean and a positive standard deviation for each channel, such as ([0.5], [0.25]), "
            f"not {normalise!r}"
        )


def as_statistics(normalise: Statistics, channels: int) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of each channel, in units of pixel values."""
    mean, std = (torch.as_tensor(v, dtype=torch.float64) * 255 for v in normalise)
    if len(mean) != channels:
        raise UsageError(f"normalise has {format_count(len(mean), 'channel')}, and the images have {channels}")
    return mean, std


def get_image_shape(x: Pixels) -> tuple[int, int, int]:
    """(channels, height, width)."""
    _, channels, height, width = x.shape
    return channels, height, width
