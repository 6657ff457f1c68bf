"""Accuracies in percent. Labels are positions in the learning order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def confusion_matrix(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Counts of images by true class (row) and predicted class (column)."""
    return torch.bincount(y * classes + z.argmax(1), minlength=classes**2).view(classes, classes)


def summarise(z: Tensor, y: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """Accuracies after the last of the steps that brought `sizes` classes each.

    `base` is on the classes of step 0, `new` on all later ones (the paper's "latest 50"; None at step 0),
    `latest` on those of the last step, `by_step` on those of each step.
    """
    right = z.argmax(1) == y
    top5 = (z.topk(min(5, z.shape[1]), 1).indices == y[:, None]).any(1)
    step = torch.arange(len(sizes), device=y.device).repeat_interleave(torch.tensor(sizes, device=y.device))[y]
    by_step = [to_percent(right[step == k]) for k in range(len(sizes))]
    return {
        "top1": to_percent(right),
        "top5": to_percent(top5),
        "base": by_step[0],
        "new": to_percent(right[step > 0]) if len(sizes) > 1 else None,
        "latest": by_step[-1],
        "by_step": by_step,
    }


def to_percent(right: Tensor) -> float | None:
    """The fraction of true values in percent; None for an empty tensor."""
    return 100 * int(right.sum()) / len(right) if len(right) else None


def forgetting(by_step: Sequence[Sequence[float | None]]) -> float | None:
    """Mean over earlier steps of the best accuracy on their classes before the last step, minus that after it.

    Chaudhry et al. (2018). `by_step[t][j]` is the accuracy on the classes of step j after step t. None for a
    single step; negative if later steps helped earlier classes.
    """
    last = len(by_step) - 1
    lost = []
    for j in range(last):
        before = [row[j] for row in by_step[j:last]]
        after = by_step[last][j]
        known = [a for a in before if a is not None]
        if known and after is not None:
            lost.append(max(known) - after)
    return sum(lost) / len(lost) if lost else None
