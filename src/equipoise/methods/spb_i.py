"""SPB-I (Wu, Gong and Li, 2021): SPB with a task that old and new classes share, to tell rotations apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from ..nets import Batch, Out
from ..nets.heads import Head, RotationHead
from ..step import Learned, Plan, Shape, Stages, Step
from .spb import SPB


@dataclass(frozen=True)
class SPBI(SPB):
    """SPB + cross-entropy of which of four rotations an image has, in every step.

    L_c sees images as they are, L_em and the task all four copies. The paper's other task, contrastive learning, which
    it found to be worse, is not here. That the task's head has two residual blocks is reconstructed from its source.
    """

    name: ClassVar[str] = "spb-i"
    title: ClassVar[str] = "SPB-I"
    cost: ClassVar[float] = 4.5 * SPB.cost  # by arithmetic: four copies, and two blocks more
    needs_maps: ClassVar[bool] = True

    def objective(self, s: Step, b: Batch) -> Tensor:
        """SPB's losses, and the cross-entropy of rotations."""
        turns = torch.arange(4, device=b.y.device).repeat_interleave(len(b.y) // 4)
        return super().objective(s, b) + F.cross_entropy(b.out.extra["turns"], turns)

    def classify(self, z: Tensor, y: Tensor, s: Step) -> Tensor:
        """The loss of the copies that are not rotated."""
        plain = len(z) // 4
        return super().classify(z[:plain], y[:plain], s)

    def stages(self, plan: Plan) -> Stages:
        """SPB's, of square images."""
        check_square(self.name, plan.shape)
        return super().stages(plan)

    def views(self, x: Tensor) -> Tensor:
        """Four rotations."""
        return rotate(x)

    def head(self, width: int) -> Head:
        """SPB's, and one that tells rotations apart."""
        return RotationHead(width, self.eta)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """SPB's, by the copies that are not rotated."""
        plain = len(h) // 4
        super().first_rows(head, h[:plain], y[:plain], gen)

    def scores(self, out: Out, known: Learned) -> Tensor:
        """Those of the copies that are not rotated."""
        return out.z[: len(out.z) // 4]


def rotate(x: Tensor) -> Tensor:
    """Four copies of a batch, rotated by 0, 90, 180 and 270 degrees."""
    return torch.cat([torch.rot90(x, turns, (2, 3)) for turns in range(4)])


def check_square(name: str, shape: Shape) -> None:
    """Refuse images that do not keep their shape when they are rotated."""
    _, height, width = shape
    if height != width:
        raise UsageError(
            f"{name} rotates images, which must be square, not {height} x {width} pixels: crop or pad them"
        )
