"""Evaluating a net: in eval mode and fp32, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from ..data.augment import AugmentedEpoch
from ..data.ragged import Ragged
from ..nets import Net, Out
from .device import use_device
from .pixels import take

CHUNK = 1000 * 32 * 32
"""most pixels in a chunk"""
LARGE = 64 * 64
"""pixels of an image from which a GPU is given chunks that are eight times as large"""
FEW = 150
"""up to so many images, converting the layout of weights does not pay (benchmarks/README.md)"""

View = Callable[[Tensor], Tensor]


def compute_outputs(
    net: Net,
    x: Tensor | Ragged,
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
    pixels = x.shape[2] * x.shape[3]
    most = 8 * CHUNK if device.type == "cuda" and pixels > LARGE else CHUNK
    chunk = chunk or max(1, most // max(CHUNK // 1000, pixels))
    count = len(x) if where is None else len(where)
    # In fp32 even if training is in bf16: predicting is cheap, and rounded features choose other exemplars. On a GPU,
    # fp32 convolutions are fastest channels-first, bf16 ones channels-last.
    converted = net.named_parameters() if count > FEW else ()
    weights = {name: w.detach().contiguous() for name, w in converted}
    training = net.training
    net.eval()
    try:
        for first in range(0, count, chunk):
            plain = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), plain, use_device(device, tuned=False):
                part = take(x, where, slice(first, first + chunk), device)
                part = part if view is None else view(part)
                out: Out = functional_call(net, weights, (part, None, classify))
            yield out
    finally:
        net.train(training)


def compute_features(net: Net, x: Tensor | Ragged, where: Tensor | AugmentedEpoch, view: View | None = None) -> Tensor:
    """The embeddings of the images at these positions or of an epoch; if a view stacks copies, copy by copy."""
    chunks = [out.h for out in compute_outputs(net, x, where, view, classify=False)]
    copies = sum(map(len, chunks)) // max(1, len(where))
    if copies < 2:
        return torch.cat(chunks)
    return torch.cat([h.view(copies, -1, h.shape[1]) for h in chunks], 1).flatten(0, 1)
