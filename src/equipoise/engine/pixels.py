"""Pixels of a batch: augmented, or as a net sees images where nothing is random. On a GPU by our own kernel."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ..data.augment import Augment, AugmentedEpoch, ResizedCrop
from ..data.ragged import Ragged
from ..data.resize import Resize, resize, see_centre


def augment(crop: Augment, x: Tensor | Ragged, which: Tensor, drawn: Tensor) -> Tensor:
    """The images `which` of x, augmented by the numbers `drawn`: uint8."""
    if isinstance(crop, ResizedCrop):
        return crop(x, which, drawn, choose_resize(which.device))
    assert isinstance(x, Tensor), "images of different sizes have a ResizedCrop"
    return crop(x, which, drawn)


def take(x: Tensor | Ragged, where: Tensor | AugmentedEpoch | None, part: slice, device: torch.device) -> Tensor:
    """A part of images x, of those at the positions `where` or of those of an epoch: uint8, on this device."""
    if isinstance(where, AugmentedEpoch):
        return augment(where.crop, where.images.x, where.where[part], where.drawn[part]).to(device)
    images = x[part if where is None else where[part]].to(device)
    return images if isinstance(images, Tensor) else see_centre(images, choose_resize(device))


def choose_resize(device: torch.device) -> Resize:
    """How images are resized on a device: by our own kernel where there is Triton."""
    if device.type == "cuda" and has_triton():
        from .kernels.resize import resize as fast

        return fast
    return resize


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which comes with torch for GPUs."""
    return importlib.util.find_spec("triton") is not None
