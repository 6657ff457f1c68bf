"""The two bounds that every reader looks for: plain fine-tuning, and joint training on all classes so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..data.memory import EVERYTHING
from ..errors import UsageError
from ..losses import Standard
from ..method import Method, Out, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class FineTuning(Method):
    """The classification loss and nothing else: without memory, what forgetting is; with one, plain replay."""

    name: ClassVar[str] = "fine-tuning"

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """L_c."""
        return self.classify(out.z, y, s)

    def at_base(self) -> Method:
        """That of IL-Baseline."""
        return ILBaseline()


@dataclass(frozen=True)
class Joint(Method):
    """A new net in every step, trained on all images of all classes so far: needs a memory that keeps them all."""

    name: ClassVar[str] = "joint"
    fresh: ClassVar[bool] = True

    def check_memory(self, *shares: int) -> None:
        """All images, which are balanced: no remedy is needed."""
        super().check_memory(*shares)
        if not isinstance(self.loss, Standard) or self.mitigation != "none":
            raise UsageError("joint training has nothing to balance: use the standard loss, and no mitigation")
        if min(shares) < EVERYTHING:
            raise UsageError("joint training is on all images of all classes: use memory all")

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """L_c."""
        return self.classify(out.z, y, s)

    def at_base(self) -> Method:
        """That of IL-Baseline."""
        return ILBaseline()
