"""Other remedies for the bias towards new classes, which the paper compares its losses with: one axis, any method.

They act after the base step only, and go with the standard loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import UsageError
from .losses import Standard, full_precision

if TYPE_CHECKING:
    from .method import Method, Step

Mitigation = Literal[
    "none", "memory-oversampling", "class-oversampling", "loss-rescaling", "balanced-finetuning", "separated-softmax"
]
MITIGATIONS: tuple[str, ...] = get_args(Mitigation)


def check(method: Method, *shares: int) -> None:
    """Refuse what makes no sense; `shares` are images per old class that will occur."""
    kind = method.mitigation
    if kind not in MITIGATIONS:
        raise UsageError(f"mitigation must be one of {', '.join(MITIGATIONS)}, not {kind!r}")
    if kind == "none":
        return
    if not isinstance(method.loss, Standard):
        raise UsageError(f"mitigation {kind} goes with the standard loss: the {method.loss.name} loss is one itself")
    if kind not in method.mitigations:
        raise UsageError(f"mitigation {kind} does not go with {method.name}")
    if min(shares, default=1) < 1:
        raise UsageError(f"mitigation {kind} needs images of old classes: use a memory above 0")


def length(kind: str, old: list[int], new: list[int]) -> int:
    """How many images make an epoch, with so many images of each old and of each new class."""
    if old and kind in ("memory-oversampling", "separated-softmax"):
        return 2 * sum(new)
    if old and kind == "class-oversampling":
        return max(*old, *new) * len(old + new)
    return sum(old) + sum(new)


def cross_entropy(kind: str, z: Tensor, y: Tensor, s: Step) -> Tensor:
    """The classification loss: rescaled by 1/n_y, with a mean weighted alike; or each image among its own kind only,
    old classes or new ones."""
    z = full_precision(z)
    if kind == "loss-rescaling":
        return F.cross_entropy(z, y, weight=1 / s.n.clamp_min(1).to(z.dtype))
    other = s.past[None, :] != (y < s.n_old)[:, None]
    return F.cross_entropy(z.masked_fill(other, -torch.inf), y)


def epoch(kind: str, s: Step, gen: torch.Generator) -> Tensor:
    """Which images make an epoch, shuffled: as many old ones as new ones, or as many of each class as the largest has.

    Images of which there are too few come again and again, each as often as the others, give or take one.
    """
    y = s.data.y
    group = (y >= s.n_old).long() if kind != "class-oversampling" else y
    counts = torch.bincount(group)
    random = torch.rand(len(y), generator=gen, device=gen.device, dtype=torch.float64)
    order = torch.argsort(group + random)  # group after group, each shuffled
    most = int(counts[1]) if kind != "class-oversampling" else int(counts.max())
    place = torch.arange(most, device=y.device) % counts[counts > 0][:, None]
    first = (counts.cumsum(0) - counts)[counts > 0][:, None]
    which = order[(first + place).flatten()]
    return which[torch.randperm(len(which), generator=gen, device=gen.device)]
