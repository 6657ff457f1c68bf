"""IL-Baseline: the incremental baseline of the paper, sections 3.1 to 3.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import check
from ..losses import distillation
from ..method import Method, Out, Step


@dataclass(frozen=True)
class ILBaseline(Method):
    """Replay and distillation on the logits (eqs. 1 and 2): L = ρ L_d + (1 − ρ) L_c, ρ = N_{t−1} / N_t.

    L_c is the classification loss, on all classes so far; L_d distils the old classes of the previous net at
    temperature T, for every image, new or from memory.
    """

    name: ClassVar[str] = "il-baseline"
    T: float = 2.0
    """temperature of the distillation"""

    def __post_init__(self) -> None:
        check("T", self.T, above=0, most=1e6)

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """Eq. 1."""
        Lc = self.classify(out.z, y, s)
        if ref is None:
            return Lc
        rho = s.n_old / s.N
        return rho * distillation(out.z, ref.z, self.T) + (1 - rho) * Lc

    def at_base(self) -> Method:
        """The plain cross-entropy."""
        return ILBaseline()
