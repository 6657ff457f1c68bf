"""A net: normalisation, a backbone and a head that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .backbones import Backbone
from .heads import Head


class Out(NamedTuple):
    """What a net returns. A method's objective sees this and never the net."""

    z: Tensor
    """logits of all classes so far (batch, N_t)"""
    h: Tensor
    """embedding before the classifier (batch, d)"""
    maps: list[Tensor]
    """output of each stage of the backbone"""
    extra: dict[str, Tensor]
    """what a head adds for its method, such as unscaled cosines"""


class Batch(NamedTuple):
    """What an objective is given of a batch."""

    y: Tensor
    """labels"""
    out: Out
    """what the net returns"""
    ref: Out | None = None
    """what the frozen teacher returns; None where nobody teaches"""
    more: Batch | None = None
    """the second stream, where the method names one"""
    all_y: Tensor | None = None
    """labels of the whole batch where several GPUs share it; None where this is all of it"""


Features = Callable[[Tensor], tuple[Tensor, list[Tensor]]]
"""From uint8 images to the embedding and the stage outputs."""


class Net(nn.Module):
    """Normalisation, backbone and head: raw pixels in, `Out` out."""

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: Backbone, head: Head, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        # In units of pixels, 0 to 255. Buffers, so that they are saved with the weights they were used with.
        self.register_buffer("mean", mean.float().reshape(1, -1, 1, 1))
        self.register_buffer("std", std.float().reshape(1, -1, 1, 1))

    def features(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch of uint8 images."""
        features: tuple[Tensor, list[Tensor]] = self.backbone((x.to(self.mean.dtype) - self.mean) / self.std)
        return features

    def forward(self, x: Tensor, features: Features | None = None, classify: bool = True) -> Out:
        """The output for a batch of uint8 images (batch, channels, height, width).

        `features` stands in for the net's own: the same weights, by other kernels. Without `classify` there are no
        logits.
        """
        h, maps = (self.features if features is None else features)(x)
        # The head is small, and rounding its logits makes ties: fp32, whatever the backbone was computed in.
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        if not classify:
            return Out(h.new_empty(len(h), 0), h, maps, {})
        with torch.autocast(x.device.type, enabled=False):
            z, extra = self.head(h, maps)
        return Out(z, h, maps, extra)
