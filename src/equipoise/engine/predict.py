"""Evaluating a net: in eval mode and fp32, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from ..data.augment import AugmentedEpoch
from ..data.stored import Pixels, Stored
from ..nets import Net, Out
from ..step import View
from .device import use_device
from .feed import Feed, Resident, Source
from .pixels import take

CHUNK = 1000 * 32 * 32
"""most pixels in a chunk"""
LARGE = 64 * 64
"""pixels of an image from which a GPU is given chunks that are eight times as large"""
AHEAD = 2**27
"""bytes of a half of the window through which images on the disk are seen"""
FEW = 150
"""up to so many images, converting the layout of weights does not pay (benchmarks/README.md)"""


def compute_outputs(
    net: Net,
    x: Pixels,
    where: Tensor | AugmentedEpoch | None = None,
    view: View | None = None,
    classify: bool = True,
    chunk: int | None = None,
) -> Iterator[Out]:
    """The net's outputs for images x, those at the positions `where` or those of an epoch, transformed by `view`.

    A chunk is 1,000 images of up to 32 × 32 pixels, or as many pixels in fewer, larger images; on a GPU, 163 images of
    224 × 224 pixels.
    """
    device = net.mean.device
    area = x.shape[2] * x.shape[3]
    most = 8 * CHUNK if device.type == "cuda" and area > LARGE else CHUNK
    chunk = chunk or max(1, most // max(CHUNK // 1000, area))
    count = len(x) if where is None else len(where)
    parts = [slice(first, first + chunk) for first in range(0, count, chunk)]
    source = open_parts(x, where, parts)
    # In fp32 even if training is in bf16: predicting is cheap, and rounded features choose other exemplars. On a GPU,
    # fp32 convolutions are fastest channels-first, bf16 ones channels-last.
    converted = net.named_parameters() if count > FEW else ()
    weights = {name: w.detach().contiguous() for name, w in converted}
    training = net.training
    net.eval()
    try:
        for part in source.follow(parts):
            plain = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), plain, use_device(device, tuned=False):
                pixels = take(source.x, where, part, device)
                pixels = pixels if view is None else view(pixels)
                out: Out = functional_call(net, weights, (pixels, None, classify))
            yield out
    finally:
        net.train(training)


def open_parts(x: Pixels, where: Tensor | AugmentedEpoch | None, parts: Sequence[slice]) -> Source:
    """Where these parts of images x, of those at the positions `where` or of those of an epoch, are read."""
    if not isinstance(x, Stored):
        return Resident(x)
    which = torch.arange(len(x), device=x.device) if where is None else where
    which = which.where if isinstance(which, AugmentedEpoch) else which
    source = Feed(x, which[:0], window=AHEAD)
    source.lay_out([which[part][None] for part in parts])
    return source


def compute_features(net: Net, x: Pixels, where: Tensor | AugmentedEpoch, view: View | None = None) -> Tensor:
    """The embeddings of the images at these positions or of an epoch; if a view stacks copies, copy by copy."""
    chunks = [out.h for out in compute_outputs(net, x, where, view, classify=False)]
    copies = sum(map(len, chunks)) // max(1, len(where))
    if copies < 2:
        return torch.cat(chunks)
    return torch.cat([h.view(copies, -1, h.shape[1]) for h in chunks], 1).flatten(0, 1)
