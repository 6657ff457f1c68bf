"""What users hand over, made uniform: images, labels, statistics. Bad input is said to be so here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError


def as_images(images: Any) -> Tensor:
    """Images as a uint8 tensor (n, channels, height, width), whatever of the allowed forms they came in."""
    from_torch = isinstance(images, Tensor)
    try:
        x = images if from_torch else torch.from_numpy(np.array(images, order="C"))
    except (TypeError, ValueError):
        raise UsageError(f"images must be one array of equal-sized uint8 images, not {type(images)}") from None
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
        if last and not (first and from_torch):  # where both could be, numpy has them last and torch first
            x = x.permute(0, 3, 1, 2)
    # Through one dimension: a single channel has two layouts that torch calls contiguous, and they round differently.
    return x.contiguous().flatten().view(x.shape)


def as_labels(labels: Any, count: int) -> list[Hashable]:
    """Labels as a list of plain hashable values, as many as there are images."""
    try:
        plain = labels.tolist() if isinstance(labels, (np.ndarray, Tensor)) else list(labels)
    except TypeError:
        raise UsageError(f"labels must be a sequence, one label for each image, not {labels!r}") from None
    plain = plain if isinstance(plain, list) else [plain]  # a 0-dimensional array is one label
    if len(plain) != count:
        raise UsageError(f"there are {count} images but {len(plain)} labels")
    plain = [v.item() if isinstance(v, (np.generic, Tensor)) and np.ndim(v) == 0 else v for v in plain]
    for v in plain:
        try:
            hash(v)
        except TypeError:
            raise UsageError(f"labels must be hashable; {v!r} is not") from None
    if not plain:
        raise UsageError("there are no images")
    if any(map(_has_nan, plain)):
        raise UsageError("a label is NaN")
    return plain


def _has_nan(label: Any) -> bool:
    return any(map(_has_nan, label)) if isinstance(label, tuple) else isinstance(label, float) and math.isnan(label)


def as_statistics(normalise: tuple[Sequence[float], Sequence[float]], channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, given for pixels from 0 to 1, in units of pixel values."""
    mean, std = (torch.as_tensor(v, dtype=torch.float64) * 255 for v in normalise)
    if mean.shape != (channels,) or std.shape != (channels,) or not bool((std > 0).all()):
        raise UsageError(f"normalise must be {channels} means and {channels} positive standard deviations")
    return mean, std


def image_shape(x: Tensor) -> tuple[int, int, int]:
    """(channels, height, width)."""
    _, channels, height, width = x.shape
    return channels, height, width
