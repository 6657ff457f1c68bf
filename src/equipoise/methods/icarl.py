"""iCaRL (Rebuffi et al., 2017): incremental classifier and representation learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import sum_by_class
from ..errors import UsageError
from ..losses import distillation, full_precision
from ..method import Method
from ..nets import Batch, Out
from ..nets.backbones import Backbone, choose_scale
from ..step import Learned, Plan, Recipe, Shape, Stages, Step
from .il_baseline import ILBaseline
from .lucir import LUCIR


@dataclass(frozen=True)
class ICaRL(Method):
    """The class whose mean of exemplars is nearest to the embedding; the classifier is for training only.

    A mean is over the embeddings of the exemplars and of their mirror images, all of length 1, and is brought to length
    1 itself. With softmax outputs this is the variant in the code of LUCIR's authors, from which the paper quotes its
    numbers; with sigmoid outputs it is the original.
    """

    name: ClassVar[str] = "icarl"
    title: ClassVar[str] = "iCaRL"
    least_memory = 1
    remedies = (
        "balanced", "relaxed", "meta", "memory-oversampling", "class-oversampling", "loss-rescaling",
        "separated-softmax",
    )  # fmt: skip
    reason = "it does not predict by the classifier, which is all that this remedy trains"
    recipes: ClassVar = {
        **Method.recipes,
        "small": Recipe(epochs=160, milestones=(0.5, 0.75), weight_decay=5e-4),
        "large": Recipe(epochs=90, milestones=(1 / 3, 2 / 3), weight_decay=1e-4),
    }
    original_recipes: ClassVar = {
        "tiny": Recipe(epochs=20, lr=0.5, batch=32),
        # A penalty of 1e-5 on the sum of squares, whose gradient is twice the weights.
        "small": Recipe(epochs=70, lr=2.0, milestones=(0.7, 0.9), decay=0.2, weight_decay=2e-5),
        "large": Recipe(60, lr=2.0, milestones=(1 / 3, 1 / 2, 2 / 3, 5 / 6), decay=0.2, weight_decay=1e-5),
    }
    """recipes for sigmoid outputs"""
    imagenet: ClassVar = {"mirror": False}
    outputs: Literal["softmax", "sigmoid"] = "softmax"
    """cross-entropy and distillation at temperature 2; or a binary cross-entropy for each class, as in the original"""
    mirror: bool = True
    """whether the means include the mirrored exemplars; on ImageNet the code of LUCIR's authors leaves them out"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """L_c + L_d without a factor T², or the sigmoids of iCaRL's algorithm 3."""
        if self.outputs == "sigmoid":
            return binary_cross_entropy(b.out.z, b.y, None if b.ref is None else b.ref.z)
        Lc = self.classify(b.out.z, b.y, s)
        return Lc if b.ref is None else Lc + distillation(b.out.z, b.ref.z, 2.0) / 4

    def backbone(self, shape: Shape) -> Backbone:
        """The original's has no last ReLU: its features are of either sign."""
        backbones = self.backbones if self.outputs == "softmax" else LUCIR.backbones
        return backbones[choose_scale(shape)](shape[0])

    def recipe(self, plan: Plan) -> Recipe:
        """That of the code in which such outputs were used."""
        recipes = self.recipes if self.outputs == "softmax" else self.original_recipes
        return recipes[choose_scale(plan.shape)]

    def stages(self, plan: Plan) -> Stages:
        """One training; exemplars of every class must remain after it."""
        if plan.keep < 1:
            raise UsageError(f"{self.name} needs an image of each of {plan.N} classes in memory: raise --memory")
        return super().stages(plan)

    def after(self, s: Step) -> None:
        """Algorithm 1: the means of all classes, by the net as it is now."""
        views = (None, flip) if self.mirror else (None,)
        h = torch.stack([F.normalize(s.embed(s.net, s.memory, view).double(), dim=1) for view in views]).sum(0)
        s.state["means"] = F.normalize(sum_by_class(h, s.images.y[s.memory], s.N), dim=1).float()

    def scores(self, out: Out, known: Learned) -> Tensor:
        """−‖ĥ − μ‖²; the logits while a step is under way."""
        means = known.state.get("means")
        if means is None or len(means) < sum(known.sizes):
            return out.z
        return 2 * F.normalize(out.h, dim=1) @ means.T - 2

    def at_base(self) -> Method:
        """The plain cross-entropy, or the binary ones."""
        return ILBaseline() if self.outputs == "softmax" else ICaRL(outputs="sigmoid")

    def check(self, *shares: int) -> None:
        """Refuse remedies that change a softmax where there is none."""
        super().check(*shares)
        if self.outputs == "sigmoid" and not self.remedy.keeps_finetuning:
            raise UsageError(
                f"{self.name} does not support the remedy {self.remedy.name} with sigmoid outputs, whose loss has "
                "no softmax: use standard, memory-oversampling or class-oversampling, or outputs softmax"
            )


def flip(x: Tensor) -> Tensor:
    """Mirror images (batch, channels, height, width) horizontally."""
    return x.flip(3)


def binary_cross_entropy(z: Tensor, y: Tensor, z_old: Tensor | None) -> Tensor:
    """−Σ_k [q_k log σ(z_k) + (1 − q_k) log(1 − σ(z_k))], mean over images and classes so far.

    q is one-hot; with a teacher, the q_k of the old classes are σ(z_old) instead, for images of old classes too.
    """
    z = full_precision(z)
    q = (torch.arange(z.shape[1], device=z.device) == y[:, None]).to(z.dtype)
    if z_old is not None:
        q = torch.cat([full_precision(z_old).sigmoid().to(z.dtype), q[:, z_old.shape[1] :]], 1)
    return F.binary_cross_entropy_with_logits(z, q)
