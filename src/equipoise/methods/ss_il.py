"""SS-IL (Ahn et al., 2021): separated softmax for incremental learning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..data.memory import rank_in_class
from ..losses import distillation, separated_cross_entropy
from ..method import Method
from ..nets import Batch
from ..step import Plan, Recipe, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class SSIL(Method):
    """L = separated cross-entropy + Σ over earlier steps of a distillation within the classes of each, T = 2.

    Old images compete among old classes and new ones among new classes. Four fifths of every batch are new images and
    one fifth is from memory; the learning rate is lr / (t + 1); exemplars are the first images of a class. Unlike in
    the authors' code, momentum begins at 0 in every step, and the head grows.
    """

    name: ClassVar[str] = "ss-il"
    title: ClassVar[str] = "SS-IL"
    remedies = ()
    reason = "its separated softmax corrects the bias"
    recipes: ClassVar = {**Method.recipes, "large": Recipe(100, milestones=(0.4, 0.8), weight_decay=1e-4)}

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 4 to 6 of SS-IL."""
        if b.ref is None:
            return self.classify(b.out.z, b.y, s)
        Lc = separated_cross_entropy(b.out.z, b.y, s.n_old, "all")
        return Lc + distillation(b.out.z, b.ref.z, 2.0, s.sizes[:-1])

    def recipe(self, plan: Plan) -> Recipe:
        """lr / (t + 1), and 32 images from memory beside 128 new ones."""
        own = super().recipe(plan)
        batch = own.batch * 5 // 4 if plan.t and plan.m else own.batch
        return replace(own, lr=own.lr / (plan.t + 1), batch=batch)

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        """New images once each, but for what fills no batch; a fifth of a batch is drawn from memory, about evenly."""
        new, old = s.where[s.y >= s.n_old], s.where[s.y < s.n_old]
        from_memory = max(1, batch // 5)
        batches = len(new) // (batch - from_memory)
        if not len(old) or not batches:
            return super().epoch(s, gen, batch)
        shuffled = new[torch.randperm(len(new), generator=gen, device=gen.device)]
        again = max(len(new), batches * from_memory)
        drawn = old[torch.randperm(again, generator=gen, device=gen.device) % len(old)]
        parts = (shuffled[: batches * (batch - from_memory)], drawn[: batches * from_memory])
        return torch.cat([part.view(batches, -1) for part in parts], 1).flatten()

    def choose(self, s: Step, m: int, select: str, gen: torch.Generator) -> Tensor:
        """The first m images of each class."""
        if select == "random":
            return super().choose(s, m, select, gen)
        y, order = s.images.y[s.data].sort(stable=True)
        return s.data[order[rank_in_class(y) < m]]

    def at_base(self) -> Method:
        """The plain cross-entropy."""
        return ILBaseline()
