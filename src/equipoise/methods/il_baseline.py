"""IL-Baseline: the incremental baseline of the paper, sections 3.1 to 3.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..losses import distillation
from ..method import Method
from ..nets import Batch
from ..settings import number
from ..step import Step


@dataclass(frozen=True)
class ILBaseline(Method):
    """Replay and distillation on the logits (eqs. 1 and 2): L = ρ L_d + (1 − ρ) L_c, ρ = N_{t−1} / N_t.

    L_c is the classification loss, on all classes so far; L_d distils the old classes of the previous net at
    temperature T, for every image, new or from memory.
    """

    name: ClassVar[str] = "il-baseline"
    title: ClassVar[str] = "IL-Baseline"
    T: float = number(2.0, above=0, most=1e6)
    """temperature of the distillation"""
    weights: Literal["rho", "ones"] = "rho"
    """of distillation and classification: ρ and 1 − ρ, or 1 and 1 as in SS-IL"""
    distil: Literal["together", "by-step"] = "together"
    """distillation: one softmax over all old classes, or one over those of each earlier step, added, as in SS-IL"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eq. 1."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        Ld = distillation(b.out.z, b.ref.z, self.T, (s.n_old,) if self.distil == "together" else s.sizes[:-1])
        rho = s.n_old / s.N
        return rho * Ld + (1 - rho) * Lc if self.weights == "rho" else Ld + Lc

    def at_base(self) -> Method:
        """The plain cross-entropy."""
        return ILBaseline()
