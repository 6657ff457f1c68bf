"""LUCIR (Hou et al., 2019): learning a unified classifier incrementally via rebalancing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import class_sums
from ..errors import UsageError, check, check_choice
from ..losses import Standard, margin_ranking
from ..method import Method, Out, Recipe, Refit, Step
from ..nets.backbones import Backbone, ResNet18, ResNet32, SmallNet, scale
from ..nets.heads import CosineHead, Head
from ..settings import later


@dataclass(frozen=True)
class LUCIR(Method):
    """Cosines, kept where they were: L = L_c + λ mean(1 − cos(h, ĥ)) + margin ranking, λ = λ_base √(N_old / N_new).

    ĥ is the embedding of the previous net. The ranking keeps images from memory at least m nearer to their own class
    than to the K nearest new ones. Rows of old classes rest; those of new ones begin at the mean of their features.
    """

    name: ClassVar[str] = "lucir"
    lambda_base: float = 5.0
    """weight of the embeddings' distance to those of the previous net; the original has 10 for ImageNet"""
    K: int = 2
    """new classes that an image from memory is kept away from; all of them where there are fewer"""
    m: float = 0.5
    """how much nearer to its own class, in cosines"""
    ratio: Literal["code", "paper"] = later("code")
    """what is under the root of λ: N_old / N_new as in the authors' code, or N_new / N_old as printed"""
    imprint: bool = True
    """whether new rows begin at the mean of their features, or are drawn at random"""
    finetune: bool = False
    """whether the classifier is refitted on the memory, with the standard loss; the original does for ImageNet only"""

    def __post_init__(self) -> None:
        check("lambda-base", self.lambda_base, least=0, most=1e6)
        check("K", self.K, least=1, whole=True)
        check("m", self.m, least=0, most=2)
        check_choice("ratio", self.ratio, "code", "paper")

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """Eqs. 5 to 9 of LUCIR; without images from memory, no ranking."""
        Lc = self.classify(out.z, y, s)
        if ref is None:
            return Lc
        ratio = s.n_old / s.sizes[-1]
        lam = self.lambda_base * math.sqrt(ratio if self.ratio == "code" else 1 / ratio)
        Lg = (1 - F.cosine_similarity(out.h, ref.h)).mean()
        return Lc + lam * Lg + margin_ranking(out.extra["cos"], y, s.n_old, self.K, self.m)

    def at_base(self) -> Method:
        """Cosines and the plain cross-entropy."""
        return LUCIR()

    def backbone(self, shape: tuple[int, int, int]) -> Backbone:
        """Without the last ReLU, so that cosines may be negative; the net for tiny images keeps it."""
        if scale(shape) == "tiny":
            return SmallNet(shape[0])
        return (ResNet32 if scale(shape) == "small" else ResNet18)(shape[0], last_relu=False)

    def head(self, width: int) -> Head:
        """σ cos(h, w)."""
        return CosineHead(width)

    def recipe(self, shape: tuple[int, int, int]) -> Recipe:
        """That of the original for CIFAR, or for ImageNet."""
        if scale(shape) == "tiny":
            return super().recipe(shape)
        if scale(shape) == "large":
            return Recipe(epochs=90, milestones=(1 / 3, 2 / 3), weight_decay=1e-4)
        return Recipe(epochs=160, milestones=(0.5, 0.75), weight_decay=5e-4)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """The direction of the mean of the normalised embeddings of each class."""
        if self.imprint:
            assert isinstance(head, CosineHead)
            head.imprint(F.normalize(class_sums(F.normalize(h, dim=1), y, len(head.new)), dim=1))

    def check_refit(self, share: int) -> None:
        """Fine-tuning that is asked for and would not be done is refused."""
        super().check_refit(share)
        if self.finetune and self.mitigation == "balanced-finetuning":
            raise UsageError("finetune and mitigation balanced-finetuning refit the same classifier: ask for one")
        if self.finetune and (not isinstance(self.loss, Standard) or share < 1):
            raise UsageError(
                "finetune refits the classifier on the memory with the standard loss: leave it out, or use "
                "the standard loss and a memory above 0"
            )

    def refit(self) -> Refit | None:
        """20 epochs with learning rate 0.01, ×0.1 after 10; batch norms rest."""
        if not self.finetune or not isinstance(self.loss, Standard):
            return super().refit()
        return Refit(Recipe(epochs=20, lr=0.01, milestones=(0.5,), weight_decay=5e-4))
