"""Nearest class mean, on the features of the base step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import class_sums
from ..method import Method, Out, Step
from ..settings import later
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class NCM(Method):
    """The class whose mean embedding is nearest. The net is trained in the base step only.

    A mean is over all images of the class, at its own step: nothing else of it is kept, and no memory is used.
    """

    name: ClassVar[str] = "ncm"
    mitigations: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[str] = "nothing is trained after the base step"
    unit_length: bool = later(True)
    """whether embeddings and means are brought to length 1, so that only directions count; the paper does not say"""

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """The classification loss, in the base step."""
        return self.classify(out.z, y, s)

    def at_base(self) -> Method:
        """That of IL-Baseline."""
        return ILBaseline()

    def learns(self, t: int) -> bool:
        """In the base step only."""
        return t == 0

    def after(self, s: Step, h: Tensor) -> None:
        """Add the means of the new classes."""
        h, y = h.double(), s.data.y - s.n_old
        counts = torch.bincount(y, minlength=s.N - s.n_old)
        h = F.normalize(h, dim=1) if self.unit_length else h
        sums = class_sums(h, y, len(counts))
        means = F.normalize(sums, dim=1).float() if self.unit_length else sums / counts[:, None]
        s.state["means"] = torch.cat([s.state["means"], means]) if "means" in s.state else means

    def scores(self, out: Out, state: Mapping[str, Tensor]) -> Tensor:
        """−‖h − μ‖², of h and μ or of their directions; the logits while the base step is under way."""
        if "means" not in state:
            return out.z
        means = state["means"]
        if self.unit_length:
            return 2 * F.normalize(out.h, dim=1) @ means.T - 2
        h = out.h.double()
        return (2 * h @ means.T - h.square().sum(1, keepdim=True) - means.square().sum(1)).float()
