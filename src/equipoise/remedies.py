"""Other remedies for the bias towards new classes, which the paper compares its losses with: one axis, any method.

They act after the base step only, and go with the standard loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from . import errors
from .errors import UsageError
from .losses import Standard, full_precision

if TYPE_CHECKING:
    from .method import Method, Step

Mitigation = Literal[
    "none", "memory-oversampling", "class-oversampling", "loss-rescaling", "balanced-finetuning", "separated-softmax"
]
MITIGATIONS: tuple[str, ...] = get_args(Mitigation)
SEPARATED = "separated-softmax"
REPLAYING = ("memory-oversampling", SEPARATED)
"""those whose epochs have a certain share of old images"""
HALF = 0.5
"""the paper's share: as many old images as new ones"""


def separates(method: Method) -> bool:
    """Whether its remedy is a separated softmax."""
    return method.mitigation == SEPARATED


def as_made(settings: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings, with the mean of a separated softmax where they leave it out: the default at that time."""
    return {"separated_mean": "all", **settings} if settings.get("mitigation") == SEPARATED else settings


def check(method: Method, *shares: int) -> None:
    """Refuse what makes no sense; `shares` are images per old class that will occur."""
    kind = method.mitigation
    errors.check_choice("mitigation", kind, *MITIGATIONS)
    share, mean = method.old_share, method.separated_mean
    errors.check("old-share", share, above=0, most=0.99)
    errors.check_choice("separated-mean", mean, "each", "all")
    if share != HALF and kind not in REPLAYING:
        raise UsageError(f"old-share goes with mitigation {' or '.join(REPLAYING)}, not with {kind}")
    if mean != "each" and kind != SEPARATED:
        raise UsageError(f"separated-mean goes with mitigation {SEPARATED}, not with {kind}")
    if kind == "none":
        return
    if not isinstance(method.loss, Standard):
        raise UsageError(f"mitigation {kind} goes with the standard loss: the {method.loss.name} loss is one itself")
    if kind not in method.mitigations:
        takes, why = " or ".join(method.mitigations) or "none", f": {method.others}" if method.others else ""
        raise UsageError(f"mitigation {kind} does not go with {method.name}, which takes {takes}{why}")
    if min(shares, default=1) < 1:
        raise UsageError(f"mitigation {kind} needs images of old classes: use a memory above 0")


def length(kind: str, old: list[int], new: list[int], share: float) -> int:
    """How many images make an epoch, with so many images of each old and of each new class."""
    if old and kind in REPLAYING:
        return old_beside(sum(new), share) + sum(new)
    if old and kind == "class-oversampling":
        return max(*old, *new) * len(old + new)
    return sum(old) + sum(new)


def old_beside(new: int, share: float) -> int:
    """How many old images go with so many new ones, where the old ones are that share of them all."""
    return round(new * share / (1 - share))


def rescaled(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Cross-entropy where an image counts 1/n_y, in the mean too."""
    z = full_precision(z)
    return F.cross_entropy(z, y, weight=1 / n.clamp_min(1).to(z.dtype))


def separated(z: Tensor, y: Tensor, n_old: int, mean: str) -> Tensor:
    """Cross-entropy of each image among its own kind only, old classes or new ones (SS-IL, Ahn et al., 2021).

    The mean is over `each` kind, and the two are added: one that a batch lacks is 0; or over `all` images, as in SS-IL.
    """
    z, old = full_precision(z), y < n_old
    past = torch.arange(z.shape[1], device=z.device) < n_old
    other = past[None, :] != old[:, None]
    of_each = F.cross_entropy(z.masked_fill(other, -torch.inf), y, reduction="none")
    if mean == "all":
        return of_each.mean()
    kinds = torch.stack([old, ~old]).to(of_each.dtype)
    return ((kinds * of_each).sum(1) / kinds.sum(1).clamp_min(1)).sum()


def epoch(kind: str, s: Step, gen: torch.Generator, share: float) -> Tensor:
    """Which images make an epoch, shuffled: each new one once and old ones beside them, so that they are that share of
    the epoch; or as many of each class as the largest has.

    Images of which there are too few come again and again, each as often as the others, give or take one.
    """
    y = s.data.y
    group = (y >= s.n_old).long() if kind != "class-oversampling" else y
    counts = torch.bincount(group)
    random = torch.rand(len(y), generator=gen, device=gen.device, dtype=torch.float64)
    order = torch.argsort(group + random)  # group after group, each shuffled
    if kind == "class-oversampling":
        wanted = torch.where(counts > 0, counts.max(), 0)
    else:
        wanted = counts.new_tensor([old_beside(int(counts[1]), share), int(counts[1])])
    # Of every group as many places as are wanted, which count from 0 to its last image and begin again.
    place = torch.arange(int(wanted.sum()), device=y.device) - (wanted.cumsum(0) - wanted).repeat_interleave(wanted)
    first = counts.cumsum(0) - counts
    which = order[first.repeat_interleave(wanted) + place % counts.repeat_interleave(wanted)]
    return which[torch.randperm(len(which), generator=gen, device=gen.device)]
