"""PODNet (Douillard et al., 2020): pooled outputs distillation for small-tasks incremental learning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from ..losses import cosine_distance, nca, pooled_distance, printed_distance
from ..method import Method
from ..nets import Batch
from ..nets.backbones import PODNetResNet18, PODNetResNet32, SmallNet
from ..nets.heads import Head, ProxyHead, imprint_rows
from ..settings import number
from ..step import NEW_ROWS, Finetune, Recipe, Step


@dataclass(frozen=True)
class PODNet(Method):
    """L = L_c + √(N_t / N_new) (λ_c pooled distance of stage outputs + λ_f mean(1 − cos(h, ĥ))).

    Ten proxies to a class; those of old classes are frozen, those of new ones begin at the centres of a k-means. L_c is
    PODNet's own loss, NCA, after which the classifier is fine-tuned on the memory; a remedy with a loss of its own
    replaces both, and nothing else changes.
    """

    cost: ClassVar[float] = 102_100 / 80_500
    trained = NEW_ROWS
    needs_maps = True
    first_rows = staticmethod(imprint_rows)
    backbones: ClassVar = {"tiny": SmallNet, "small": PODNetResNet32, "large": PODNetResNet18}
    # The original's code takes the cosine an epoch late (`--schedule cosine-late`).
    recipes: ClassVar = {
        **Method.recipes,
        "small": Recipe(epochs=160, schedule="cosine", weight_decay=5e-4, clamp=5.0),
        "large": Recipe(epochs=90, lr=0.05, schedule="cosine", batch=64, weight_decay=5e-4, clamp=5.0),
    }
    imagenet: ClassVar = {"lambda_c": 8.0, "lambda_f": 10.0, "finetune": {"lr": 0.01, "batch": 64}}
    whole_imagenet: ClassVar = {"finetune": {"weight_decay": 1e-4}, "recipe": {"weight_decay": 1e-4}}
    remedies = ("balanced", "relaxed", "meta", "memory-oversampling", "class-oversampling")
    reason = "its own loss is not a cross-entropy, and it fine-tunes its classifier already"
    lambda_c: float = number(3.0, least=0, most=1e6)
    """weight of the stage outputs' distance; the original has 8 for ImageNet"""
    lambda_f: float = number(1.0, least=0, most=1e6)
    """weight of the embeddings' distance; the original has 10 for ImageNet"""
    nca: Literal["code", "paper"] = "code"
    """NCA as the authors' code computes it, where the margin cancels, or as their paper prints it"""
    margin: float = number(0.6, least=0, most=10)
    """of the printed NCA"""
    similarity: Literal["code", "paper"] = "code"
    """of an image to a proxy: −‖ĥ − ŵ‖², which is 2 cos − 2, as in the authors' code, or the cosine as printed"""
    spatial: Literal["code", "paper"] = "code"
    """distance of stage outputs: of normalised sums of squares as in the authors' code; or as printed, squared and of
    plain sums, which wants a far smaller lambda-c"""
    finetune: Finetune = Finetune(20, 0.05, weight_decay=5e-4, milestones=(), clamp=5.0, batch_norm="train")
    """of the classifier, where its own loss stands; batch norms go on learning"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 4 to 9 of PODNet."""
        Lc = self.remedy.ce(b.out.z, b.y, s)
        if Lc is None:
            Lc = nca(b.out.z, b.y, None if self.nca == "code" else self.margin * b.out.extra["scale"])
        if b.ref is None:
            return Lc
        factor = math.sqrt(s.N / s.sizes[-1])
        spatial = (pooled_distance if self.spatial == "code" else printed_distance)(b.out.maps, b.ref.maps)
        return Lc + factor * (self.lambda_c * spatial + self.lambda_f * cosine_distance(b.out.h, b.ref.h))

    def at_base(self) -> Method:
        """NCA, or else the plain cross-entropy; nothing else matters yet."""
        same = PODNet(self.remedy.at_base(), similarity=self.similarity)
        if self.nca == "code" or not self.remedy.keeps_finetuning:  # in the code's NCA, the margin cancels
            return same
        return replace(same, nca=self.nca, margin=self.margin)

    def head(self, width: int) -> Head:
        """Ten proxies to a class."""
        return ProxyHead(width, cosine=self.similarity == "paper")
