"""BiC (Wu et al., 2019): large scale incremental learning, by a correction of the bias towards new classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import distillation
from ..method import Method
from ..nets import Batch, Out
from ..step import Group, Learned, Plan, Stage, Stages, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class BiC(Method):
    """L = ρ L_d + (1 − ρ) L_c, ρ = N_{t−1} / N_t, then z ← β z + γ for the newest classes, learned on held-out images.

    A tenth of the memory, and as many images of each new class, are held out of training; on them β and γ are learned
    with the net frozen. L_d distils the teacher's corrected logits at temperature 2, without a factor T² as in the
    authors' code. Exemplars are herded by features that are not normalised.
    """

    remedies = ()
    reason = "it corrects the bias by itself"
    herds_unit_length = False
    least_memory = 2  # one image to train on, one to hold out

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 1 to 3 of BiC."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        z_old = self.scores(b.ref, Learned(s.sizes[:-1], s.state))
        rho = s.n_old / s.N
        return rho * distillation(b.out.z, z_old, 2.0) / 4 + (1 - rho) * Lc

    def bias_objective(self, s: Step, b: Batch) -> Tensor:
        """Eq. 5, and the authors' penalty on the offset: 0.1 γ² / 2."""
        z = self.scores(b.out, Learned(s.sizes, s.state))
        return F.cross_entropy(z, b.y) + 0.05 * s.state["bias"][-1, 1] ** 2

    def stages(self, plan: Plan) -> Stages:
        """A second stage after the training, with twice as many epochs, for β and γ."""
        train, choose = super().stages(plan)
        if plan.t == 0 or isinstance(train, str):
            return (train, choose)
        twice = replace(train.recipe, epochs=2 * train.recipe.epochs)
        both = (Group(("state.bias",), decay=0.0),)
        bias = Stage("bias", twice, both, "held", self.bias_objective, teacher=None, batch_norm="eval")
        return (train, bias, choose)

    def enter(self, s: Step, stage: Stage) -> None:
        """Initialise β = 1 and γ = 0 for this step's classes."""
        if stage.name == "bias":
            fresh = torch.tensor([[1.0, 0.0]], device=s.n.device)
            s.state["bias"] = torch.cat([s.state["bias"], fresh]) if "bias" in s.state else fresh

    def hold(self, plan: Plan) -> int:
        """A tenth of the memory, at least one image of every class."""
        return math.ceil(min(plan.m, min(plan.counts)) / 10) if plan.t else 0

    def at_base(self) -> Method:
        """The plain cross-entropy."""
        return ILBaseline()

    def scores(self, out: Out, known: Learned) -> Tensor:
        """β z + γ for the newest classes, z for the others; z for all until β and γ of the step are learned."""
        bias, new = known.state.get("bias"), known.sizes[-1]
        if bias is None or len(bias) < len(known.sizes) - 1:
            return out.z
        return torch.cat([out.z[:, :-new], bias[-1, 0] * out.z[:, -new:] + bias[-1, 1]], 1)
