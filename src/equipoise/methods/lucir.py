"""LUCIR (Hou et al., 2019): learning a unified classifier incrementally via rebalancing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..losses import cosine_distance, margin_ranking
from ..method import Method
from ..nets import Batch
from ..nets.backbones import ResNet18, ResNet32, SmallNet
from ..nets.heads import CosineHead, Head, imprint_rows
from ..settings import number
from ..step import NEW_ROWS, Finetune, Recipe, Step


@dataclass(frozen=True)
class LUCIR(Method):
    """Cosines, kept where they were: L = L_c + λ mean(1 − cos(h, ĥ)) + margin ranking, λ = λ_base √(N_old / N_new).

    ĥ is the embedding of the previous net. The ranking keeps images from memory at least m nearer to their own class
    than to the K nearest new ones. Rows of old classes are frozen; new ones begin at the mean of their features.
    """

    trained = NEW_ROWS
    # Without the last ReLU, so that cosines may be negative; the net for tiny images keeps it.
    backbones: ClassVar = {
        "tiny": SmallNet,
        "small": partial(ResNet32, last_relu=False),
        "large": partial(ResNet18, last_relu=False),
    }
    recipes: ClassVar = {
        **Method.recipes,
        "small": Recipe(epochs=160, milestones=(0.5, 0.75), weight_decay=5e-4),
        "large": Recipe(epochs=90, milestones=(1 / 3, 2 / 3), weight_decay=1e-4),
    }
    imagenet: ClassVar = {"lambda_base": 10.0}
    whole_imagenet: ClassVar = {"finetune": {"epochs": 20, "weight_decay": 1e-4}}
    cost: ClassVar[float] = 98_800 / 89_200
    lambda_base: float = number(5.0, least=0, most=1e6)
    """weight of the embeddings' distance to those of the previous net; the original has 10 for ImageNet"""
    K: int = number(2, whole=True, least=1)
    """new classes that an image from memory is kept away from; all of them where there are fewer"""
    m: float = number(0.5, least=0, most=2)
    """how much nearer to its own class, in cosines"""
    ratio: Literal["code", "paper"] = "code"
    """what is under the root of λ: N_old / N_new as in the authors' code, or N_new / N_old as printed"""
    imprint: bool = True
    """whether new rows begin at the mean of their features, or are drawn at random"""
    finetune: Finetune = Finetune(epochs=0, weight_decay=5e-4)
    """of the classifier, with the standard remedy; the original does so for ImageNet only, for 20 epochs"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 5 to 9 of LUCIR; without images from memory, no ranking."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        ratio = s.n_old / s.sizes[-1]
        lam = self.lambda_base * math.sqrt(ratio if self.ratio == "code" else 1 / ratio)
        Lg = cosine_distance(b.out.h, b.ref.h)
        return Lc + lam * Lg + margin_ranking(b.out.extra["cos"], b.y, s.n_old, self.K, self.m)

    def at_base(self) -> Method:
        """Cosines and the plain cross-entropy."""
        return LUCIR()

    def head(self, width: int) -> Head:
        """σ cos(h, w)."""
        return CosineHead(width)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """The directions of the mean embeddings of the classes."""
        if self.imprint:
            imprint_rows(head, h, y, gen)
