"""The lower and the upper bound: plain fine-tuning, and joint training on all classes so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..data.memory import EVERYTHING
from ..method import Method
from ..nets import Batch
from ..step import Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class FineTuning(Method):
    """The classification loss only: with a memory, plain replay."""

    name: ClassVar[str] = "fine-tuning"
    title: ClassVar[str] = "Fine-tuning"

    def objective(self, s: Step, b: Batch) -> Tensor:
        """L_c."""
        return self.classify(b.out.z, b.y, s)

    def at_base(self) -> Method:
        """IL-Baseline."""
        return ILBaseline()


@dataclass(frozen=True)
class Joint(Method):
    """A new net in every step, trained on all images of all classes so far: needs a memory that keeps them all."""

    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "Joint training"
    remedies = ()
    reason = "its training set is balanced"
    least_memory = EVERYTHING
    default_memory = "all"
    fresh: ClassVar[bool] = True

    def objective(self, s: Step, b: Batch) -> Tensor:
        """L_c."""
        return self.classify(b.out.z, b.y, s)

    def at_base(self) -> Method:
        """IL-Baseline."""
        return ILBaseline()
