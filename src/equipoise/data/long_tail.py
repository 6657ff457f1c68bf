"""Long-tailed classes: the classes of a later step have unequally many training images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from .randomness import generator


def count_long_tail(counts: Sequence[int], sizes: Sequence[int], imbalance: float) -> list[int]:
    """How many images of each class are used, in learning order; `counts` is how many there are.

    Class k of the C classes of a step after the base step has a fraction imbalance^(-k / (C - 1)) of its images, so
    that the step's first class has all of them and its last 1 / imbalance. 1 leaves everything as it is.
    """
    used, start = list(counts), sizes[0]
    for size in sizes[1:] if imbalance > 1 else ():
        if size == 1:
            raise UsageError(
                f"imbalance {imbalance:g} is between the classes of a step, and each step after the base step brings "
                "one class: take fewer steps"
            )
        for k in range(size):
            used[start + k] = round(counts[start + k] * imbalance ** (-k / (size - 1)))
        if used[start + size - 1] < 1:
            raise UsageError(
                f"imbalance {imbalance:g} leaves no image of the last class of a step, which has "
                f"{counts[start + size - 1]}: it must be smaller"
            )
        start += size
    return used


def drop_surplus(y: Tensor, used: Sequence[int], order: Sequence[int], seed: int) -> Tensor:
    """Labels in learning order, of which only so many of each class are left; which, is drawn.

    The images that are left out get a label that no class has. They keep their place, as exemplars are positions, and
    runs with other steps share theirs.
    """
    y = y.clone()
    for place, count in enumerate(used):
        which = (y == place).nonzero()[:, 0]
        if count < len(which):
            drawn = torch.randperm(len(which), generator=generator(seed, "imbalance", order[place]))
            y[which[drawn[count:]]] = len(used)
    return y
