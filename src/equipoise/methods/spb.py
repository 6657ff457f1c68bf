"""SPB (Wu, Gong and Li, 2021): striking a balance between stability and plasticity for class-incremental learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from ..losses import full_precision
from ..method import Method
from ..nets import Batch
from ..nets.backbones import Backbone, choose_scale
from ..nets.heads import CosineHead, Head
from ..remedies import Standard
from ..settings import number
from ..step import EVERYTHING, Group, Plan, Recipe, Shape, Stage, Stages, Step
from .lucir import LUCIR

SLOW_BACKBONE = (Group(("backbone.*",), lr=0.1), Group(("head.*",)))


@dataclass(frozen=True)
class SPB(Method):
    """L = w L_c + L_em / w, w = N_new / N_old, L_em = mean ‖h̄ − ĥ̄‖² of embeddings of length 1; without memory.

    Logits are η cos(h, w), with η learned. After the base step the backbone learns at a tenth of the classifier's rate.
    Written from the paper; what it leaves open is a field: `classes`, `eta` and `last_relu`.
    """

    name: ClassVar[str] = "spb"
    title: ClassVar[str] = "SPB"
    default_memory: ClassVar[str] = "0"
    remedies = ("balanced", "relaxed", "meta")
    reason = "it is made for learning without memory"
    cost: ClassVar[float] = LUCIR.cost
    backbones: ClassVar = LUCIR.backbones
    recipes: ClassVar = LUCIR.recipes
    later: ClassVar[Mapping[str, Recipe]] = {
        "tiny": Recipe(epochs=20, lr=0.005, milestones=(0.6,), batch=32),
        "small": Recipe(epochs=50, lr=0.01, milestones=(0.6,), weight_decay=5e-4),
        "large": Recipe(epochs=50, lr=0.01, milestones=(0.6,), batch=64, weight_decay=1e-4),
    }
    """recipes of the steps after the base step, by image size; the learning rate is the classifier's"""
    classes: Literal["new", "all"] = "new"
    """classes in the cross-entropy: the step's own, as printed, or all so far; a weighted remedy has all"""
    weights: Literal["reciprocal", "ones"] = "reciprocal"
    """of the two losses: N_new / N_old and its reciprocal, or 1 and 1, as in the paper's ablation"""
    eta: float = number(10.0, above=0, most=1e6)
    """η at the start; the paper does not print it"""
    last_relu: bool = False
    """whether the backbone keeps its last ReLU; the paper does not say"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 3 to 5 of SPB."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        w = s.sizes[-1] / s.n_old if self.weights == "reciprocal" else 1.0
        Lem = (F.normalize(b.out.h, dim=1) - F.normalize(b.ref.h, dim=1)).square().sum(1).mean()
        return w * Lc + Lem / w

    def classify(self, z: Tensor, y: Tensor, s: Step) -> Tensor:
        """The remedy's loss, or cross-entropy among the new classes or all."""
        if self.classes == "all" or not self.remedy.keeps_finetuning:
            return super().classify(z, y, s)
        return F.cross_entropy(full_precision(z[:, s.n_old :]), y - s.n_old)

    def check(self, *shares: int) -> None:
        """Refuse a memory where the loss has no place for its images."""
        super().check(*shares)
        if self.classes == "new" and self.remedy.keeps_finetuning and max(shares, default=0) > 0:
            raise UsageError(
                f"the loss of {self.name} is among new classes, where images from memory have no class: use memory 0, "
                "classes all, or the remedy balanced"
            )

    def backbone(self, shape: Shape) -> Backbone:
        """LUCIR's, or with the last ReLU."""
        kinds = Method.backbones if self.last_relu else self.backbones
        return kinds[choose_scale(shape)](shape[0])

    def head(self, width: int) -> Head:
        """η cos(h, w)."""
        return CosineHead(width, self.eta)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """The mean of the normalised embeddings of each class."""
        assert isinstance(head, CosineHead)
        h = F.normalize(h, dim=1)
        with torch.no_grad():
            head.new.copy_(torch.stack([h[y == c].mean(0) for c in range(len(head.new))]))

    def recipe(self, plan: Plan) -> Recipe:
        """Fewer epochs and a smaller learning rate after the base step."""
        return self.later[choose_scale(plan.shape)] if plan.t else super().recipe(plan)

    def stages(self, plan: Plan) -> Stages:
        """After the base step, a slower backbone."""
        train, *rest = super().stages(plan)
        assert isinstance(train, Stage)
        return (replace(train, groups=SLOW_BACKBONE if plan.t else EVERYTHING), *rest)

    def at_base(self) -> Method:
        """Cosines and the plain cross-entropy."""
        return replace(self, remedy=Standard(), classes="new", weights="reciprocal")
