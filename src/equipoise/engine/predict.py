"""A net's answers to images, as in prediction: in fp32, chunk by chunk, with training left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from ..nets import Net, Out
from .device import use_device

CHUNK = 1000 * 32 * 32
"""pixels that are predicted at a time, at most"""
FEW = 150
"""images that a GPU answers to sooner with weights as they lie in memory (benchmarks/README.md)"""

View = Callable[[Tensor], Tensor]


def compute_outputs(
    net: Net,
    x: Tensor,
    where: Tensor | None = None,
    view: View | None = None,
    classify: bool = True,
    chunk: int | None = None,
) -> Iterator[Out]:
    """The net's output for images x, or for those at the positions `where`, or for what `view` makes of them.

    A chunk is 1,000 images of 32 × 32 pixels or less, and fewer larger ones: as many pixels at most.
    """
    device = net.mean.device
    chunk = chunk or max(1, CHUNK // max(CHUNK // 1000, x.shape[2] * x.shape[3]))
    count = len(x) if where is None else len(where)
    # In fp32, also where training is in bf16: predicting is cheap, and rounded features choose other exemplars. A
    # GPU has its fast fp32 convolutions for channels that come first in memory, unlike its bf16 ones; weights are
    # laid out so in milliseconds, which a few images do not repay.
    anew = net.named_parameters() if count > FEW else ()
    weights = {name: w.detach().contiguous() for name, w in anew}
    training = net.training
    net.eval()
    try:
        for first in range(0, count, chunk):
            part = x[first : first + chunk] if where is None else x[where[first : first + chunk]]
            part = part.to(device)
            part = part if view is None else view(part)
            plain = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), plain, use_device(device, tuned=False):
                out: Out = functional_call(net, weights, (part, None, classify))
            yield out
    finally:
        net.train(training)


def compute_features(net: Net, x: Tensor, where: Tensor, view: View | None = None) -> Tensor:
    """The embeddings of the images at these positions."""
    return torch.cat([out.h for out in compute_outputs(net, x, where, view, classify=False)])
