"""Pixels of a batch: augmented, or as a net sees images where nothing is random. On a GPU by our own kernel."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ..data.augment import Augment, AugmentedEpoch, Normalisation, ResizedCrop, find_factors
from ..data.ragged import Ragged
from ..data.resize import Resize, resize, see_centre
from ..data.stored import Pixels, Stored

AT_ONCE = 2**16
"""images whose boxes are found at a time"""


def augment(crop: Augment, x: Tensor | Ragged, which: Tensor, drawn: Tensor) -> Tensor:
    """The images `which` of x, augmented by the numbers `drawn`: uint8."""
    if isinstance(crop, ResizedCrop):
        return crop(x, which, drawn, choose_resize(which.device))
    assert isinstance(x, Tensor), "images of different sizes have a ResizedCrop"
    return crop(x, which, drawn)


def count_numbers(crop: Augment, x: Pixels) -> int:
    """How many numbers `settle` makes of those that are drawn for an image; 0 if it leaves them as they are."""
    return 0 if isinstance(x, Tensor) or not isinstance(crop, ResizedCrop) else crop.box_numbers


def settle(crop: Augment, x: Pixels, which: Tensor, drawn: Tensor) -> Tensor:
    """The boxes of images at these positions (batches, size), by the numbers drawn.

    They are found for all batches of an epoch at once: it takes sixty small kernels, as many as a small net.
    """
    if isinstance(x, Tensor) or not isinstance(crop, ResizedCrop):
        return drawn
    size, numbers = x.size[which.flatten()], drawn.flatten(0, 1)
    parts = [slice(first, first + AT_ONCE) for first in range(0, max(1, len(size)), AT_ONCE)]
    boxes = torch.cat([crop.find_boxes(size[part], numbers[part]) for part in parts])
    return boxes.view(*which.shape, crop.box_numbers)


def cut(crop: Augment, x: Pixels, which: Tensor, settled: Tensor) -> Tensor:
    """The images `which` of x, augmented by the numbers that are settled: uint8."""
    assert not isinstance(x, Stored), "of images on the disk, those of a batch are brought into memory"
    if isinstance(crop, ResizedCrop) and isinstance(x, Ragged):
        return crop.cut(x, which, settled, choose_resize(which.device))
    return augment(crop, x, which, settled)


def cut_normalised(crop: Augment, x: Pixels, which: Tensor, settled: Tensor, to: Normalisation) -> Tensor:
    """What `cut` gives, normalised: in one kernel, which writes every pixel once."""
    from .kernels.resize import resize_normalised

    assert isinstance(crop, ResizedCrop) and isinstance(x, Ragged)
    factors = find_factors(crop.brightness, settled[:, -1]) if crop.brightness else None
    return resize_normalised(x, which, settled, crop.size, to, factors)


def take(x: Tensor | Ragged, where: Tensor | AugmentedEpoch | None, part: slice, device: torch.device) -> Tensor:
    """A part of images x, of those at the positions `where` or of those of an epoch: uint8, on this device."""
    if isinstance(where, AugmentedEpoch):
        return augment(where.crop, x, where.where[part], where.drawn[part]).to(device)
    which = part if where is None else where[part]
    if isinstance(x, Tensor):
        return x[which].to(device)
    if x.device != device or isinstance(which, slice):
        x = x[which].to(device)
        which = torch.arange(len(x), device=device)
    return see_centre(x, which, choose_resize(device))


def choose_resize(device: torch.device) -> Resize:
    """How images are resized on a device: by our own kernel where there is Triton."""
    if has_resize_kernel(device):
        from .kernels.resize import resize as fast

        return fast
    return resize


def has_resize_kernel(device: torch.device) -> bool:
    """Whether our own kernel resizes images on this device."""
    return device.type == "cuda" and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which comes with torch for GPUs."""
    return importlib.util.find_spec("triton") is not None
