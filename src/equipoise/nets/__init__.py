"""A net: normalisation, backbone and a growing head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .backbones import Backbone
from .heads import Head


class Out(NamedTuple):
    """The output of a net. Objectives see this, not the net."""

    z: Tensor
    """logits of all classes so far (batch, N_t)"""
    h: Tensor
    """embedding before the classifier (batch, d)"""
    maps: list[Tensor]
    """outputs of the stages of the backbone"""
    extra: dict[str, Tensor]
    """further outputs of the head, such as unscaled cosines"""


class Batch(NamedTuple):
    """A batch, as an objective sees it."""

    y: Tensor
    """labels"""
    out: Out
    """output of the net"""
    ref: Out | None = None
    """output of the frozen teacher; None without one"""
    more: Batch | None = None
    """the batch of the second stream, if the method has one"""
    all_y: Tensor | None = None
    """labels of the global batch, if it is divided among GPUs"""


Features = Callable[[Tensor], tuple[Tensor, list[Tensor]]]
"""a function from uint8 images to the embedding and the stage outputs"""


class Net(nn.Module):
    """Normalisation, backbone and head, from uint8 images to `Out`."""

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: Backbone, head: Head, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        # In units of pixels, 0 to 255. As buffers, they are saved with the weights.
        self.register_buffer("mean", mean.float().reshape(1, -1, 1, 1))
        self.register_buffer("std", std.float().reshape(1, -1, 1, 1))

    def features(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch of uint8 images."""
        features: tuple[Tensor, list[Tensor]] = self.backbone((x.to(self.mean.dtype) - self.mean) / self.std)
        return features

    def forward(self, x: Tensor, features: Features | None = None, classify: bool = True) -> Out:
        """The output for a batch of uint8 images (batch, channels, height, width).

        `features` replaces the net's own function, with the same weights. Without `classify` there are no logits.
        """
        h, maps = (self.features if features is None else features)(x)
        # The head is computed in fp32: it is small, and rounded logits would tie.
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        if not classify:
            return Out(h.new_empty(len(h), 0), h, maps, {})
        with torch.autocast(x.device.type, enabled=False):
            z, extra = self.head(h, maps)
        return Out(z, h, maps, extra)
