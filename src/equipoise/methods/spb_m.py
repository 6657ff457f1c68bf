"""SPB-M (Wu, Gong and Li, 2021): SPB from four perspectives, each with a classifier of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nets import Out
from ..nets.heads import Head, PerspectiveHead
from ..step import Learned, Plan, Stages
from .spb import SPB
from .spb_i import check_square, rotate


@dataclass(frozen=True)
class SPBM(SPB):
    """SPB on four rotations of every image, each with a cosine classifier of its own, in all steps and in prediction.

    L_c is the mean of the four classifiers' losses, and L_em that of all copies. Predictions are added.
    """

    name: ClassVar[str] = "spb-m"
    title: ClassVar[str] = "SPB-M"
    cost: ClassVar[float] = 4 * SPB.cost
    vote: Literal["probabilities", "logits"] = "probabilities"
    """what predictions add up over the classifiers; the paper does not say"""
    scales: Literal["shared", "each"] = "shared"
    """whether the classifiers share one η; the paper does not say"""

    def stages(self, plan: Plan) -> Stages:
        """SPB's, of square images."""
        check_square(self.name, plan.shape)
        return super().stages(plan)

    def views(self, x: Tensor) -> Tensor:
        """Four rotations."""
        return rotate(x)

    def head(self, width: int) -> Head:
        """A cosine classifier for each rotation."""
        return PerspectiveHead(width, self.eta, self.scales == "each")

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """The mean of each class's normalised embeddings, of each rotation by itself."""
        assert isinstance(head, PerspectiveHead)
        h, y = F.normalize(h, dim=1).view(4, -1, h.shape[1]), y[: len(y) // 4]
        with torch.no_grad():
            means = torch.stack([h[:, y == c].mean(1) for c in range(len(head.new) // 4)])
            head.new.copy_(means.flatten(0, 1))

    def scores(self, out: Out, known: Learned) -> Tensor:
        """The logarithm of the mean probability, or the mean logit."""
        z = out.z.view(4, -1, out.z.shape[1])
        return z.mean(0) if self.vote == "logits" else z.log_softmax(2).logsumexp(0) - math.log(4)
