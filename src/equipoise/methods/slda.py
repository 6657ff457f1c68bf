"""Deep streaming linear discriminant analysis (Hayes and Kanan, 2020), on the features of the base step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.images import sum_by_class
from ..method import Method
from ..nets import Batch, Out
from ..settings import number
from ..step import CHOOSE, Learned, Plan, Stages, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class SLDA(Method):
    """Class means and one covariance Σ, updated image by image: score = h Λ μ_k − ½ μ_k Λ μ_k, Λ = ((1 − ε) Σ + ε I)⁻¹.

    The net is trained in the base step only, whose images give the first Σ; no memory is used.
    """

    remedies = ("balanced", "relaxed", "meta")
    reason = "nothing is trained after the base step"
    shrinkage: float = number(1e-4, above=0, most=1)
    """ε"""

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
        """Means of the new classes; Σ by oracle shrinkage of the base step, then image by image."""
        h, y = s.embed(s.net, s.data).double(), s.images.y[s.data] - s.n_old
        counts = torch.bincount(y, minlength=s.N - s.n_old)
        means = sum_by_class(h, y, len(counts)) / counts[:, None]
        if s.t == 0:
            from sklearn.covariance import OAS  # slow to import, and only this needs it

            found = OAS(assume_centered=True).fit((h - means[y]).cpu().numpy())
            s.state["sigma"] = torch.from_numpy(found.covariance_).to(h)
            s.state["means"], s.state["seen"] = means, h.new_tensor(len(h))
            return
        # Image j moves Σ by its distance to its class's mean so far (at first 0), with weight n_j / (n_j + 1).
        before = torch.zeros_like(h)
        for c in range(len(counts)):
            own = (y == c).nonzero()[:, 0]
            sums = h[own].cumsum(0)[:-1]
            before[own[1:]] = sums / torch.arange(1, len(own), device=h.device)[:, None]
        n = s.state["seen"] + torch.arange(len(h), device=h.device)
        far = h - before
        moved = (far * (n / (n + 1))[:, None]).T @ far
        total = s.state["seen"] + len(h)
        s.state["sigma"] = (s.state["seen"] * s.state["sigma"] + moved) / total
        s.state["seen"] = total
        s.state["means"] = torch.cat([s.state["means"], means])

    def scores(self, out: Out, known: Learned) -> Tensor:
        """h Λ μ_k − ½ μ_k Λ μ_k; the logits while the base step is under way."""
        if "means" not in known.state:
            return out.z
        sigma, means = known.state["sigma"], known.state["means"]
        shrunk = (1 - self.shrinkage) * sigma + self.shrinkage * torch.eye(len(sigma)).to(sigma)
        w = torch.linalg.solve(shrunk, means.T)
        score: Tensor = out.h.double() @ w - (means * w.T).sum(1) / 2
        return score.float()
