"""LwF (Li and Hoiem, 2017): learning without forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..losses import distillation
from ..method import Method
from ..nets import Batch
from ..settings import number
from ..step import Recipe, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class LwF(Method):
    """Distillation alone: L = L_c + λ_o L_d, where L_d keeps the old logits of the previous net. It needs no memory.

    L_d has no factor T². Its softmax is over all old classes, as in the code of Mnemonics, where LwF with a memory is a
    host; in the original each task has its own. There L_c is over the new classes only, too, which without memory is
    the remedy balanced.
    """

    name: ClassVar[str] = "lwf"
    title: ClassVar[str] = "LwF"
    default_memory = "0"
    recipes: ClassVar = {
        **Method.recipes,
        "small": Recipe(epochs=160, milestones=(0.5, 0.75), weight_decay=5e-4),
        "large": Recipe(epochs=90, milestones=(1 / 3, 2 / 3), weight_decay=1e-4),
    }
    lambda_o: float = number(1.0, least=0, most=1e6)
    """λ_o, the weight of the distillation"""
    T: float = number(2.0, above=0, most=1e6)
    """temperature of the distillation"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 2 and 3 of LwF, and the sum of both."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        return Lc + self.lambda_o * distillation(b.out.z, b.ref.z, self.T) / self.T**2

    def at_base(self) -> Method:
        """The plain cross-entropy."""
        return ILBaseline()
