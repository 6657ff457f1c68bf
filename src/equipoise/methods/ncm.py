"""Nearest class mean, on the features of the base step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import sum_by_class
from ..method import Method
from ..nets import Batch, Out
from ..step import CHOOSE, Learned, Plan, Stages, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class NCM(Method):
    """The class whose mean embedding is nearest. The net is trained in the base step only.

    A mean is over all images of the class, at its own step: nothing else of it is kept, and no memory is used.
    """

    remedies = ("balanced", "relaxed", "meta")
    reason = "nothing is trained after the base step"
    unit_length: bool = True
    """whether embeddings and means are brought to length 1, so that only directions count; the paper does not say"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """The classification loss, in the base step."""
        return self.classify(b.out.z, b.y, s)

    def at_base(self) -> Method:
        """IL-Baseline."""
        return ILBaseline()

    def stages(self, plan: Plan) -> Stages:
        """Training in the base step only."""
        return super().stages(plan) if plan.t == 0 else (CHOOSE,)

    def after(self, s: Step) -> None:
        """Add the means of the new classes."""
        h, y = s.embed(s.net, s.data).double(), s.images.y[s.data] - s.n_old
        counts = torch.bincount(y, minlength=s.N - s.n_old)
        h = F.normalize(h, dim=1) if self.unit_length else h
        sums = sum_by_class(h, y, len(counts))
        means = F.normalize(sums, dim=1).float() if self.unit_length else sums / counts[:, None]
        s.state["means"] = torch.cat([s.state["means"], means]) if "means" in s.state else means

    def scores(self, out: Out, known: Learned) -> Tensor:
        """−‖h − μ‖², of h and μ or of their directions; the logits while the base step is under way."""
        if "means" not in known.state:
            return out.z
        means = known.state["means"]
        if self.unit_length:
            return 2 * F.normalize(out.h, dim=1) @ means.T - 2
        h = out.h.double()
        return (2 * h @ means.T - h.square().sum(1, keepdim=True) - means.square().sum(1)).float()
