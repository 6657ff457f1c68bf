"""Nearest class mean, on the features of the base step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..method import Method, Out, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class NCM(Method):
    """The class whose mean embedding is nearest, all of length 1. The net is trained in the base step only.

    A mean is over all images of the class, at its own step: nothing else of it is kept, and no memory is used.
    """

    name: ClassVar[str] = "ncm"
    mitigations: ClassVar[tuple[str, ...]] = ()

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
        h = F.normalize(h.double(), dim=1)
        sums = h.new_zeros(s.N - s.n_old, h.shape[1]).index_add(0, s.data.y - s.n_old, h)
        means = F.normalize(sums, dim=1).float()
        s.state["means"] = torch.cat([s.state["means"], means]) if "means" in s.state else means

    def scores(self, out: Out, state: Mapping[str, Tensor]) -> Tensor:
        """−‖ĥ − μ̂‖²; the logits while the base step is under way."""
        if "means" not in state:
            return out.z
        return 2 * F.normalize(out.h, dim=1) @ state["means"].T - 2
