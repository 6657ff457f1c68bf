"""PODNet (Douillard et al., 2020): pooled outputs distillation for small-tasks incremental learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import check, check_choice
from ..losses import Balanced, Standard, nca, pooled_distance, printed_distance
from ..method import Method, Out, Recipe, Refit, Step
from ..nets.backbones import Backbone, HalfLinearTrunk, LinearTrunk, SmallNet, scale
from ..nets.heads import Head, ProxyHead
from ..settings import later


@dataclass(frozen=True)
class PODNet(Method):
    """L = L_c + √(N_t / N_new) (λ_c pooled distance of stage outputs + λ_f mean(1 − cos(h, ĥ))).

    Ten proxies to a class, of which those of old classes rest and those of new ones begin at the centres of a k-means.
    The standard loss is PODNet's own, NCA, after which the classifier is refitted on the memory; with any other loss
    both are replaced by it, and nothing else changes.
    """

    name: ClassVar[str] = "podnet"
    mitigations: ClassVar[tuple[str, ...]] = ("memory-oversampling", "class-oversampling")
    others: ClassVar[str] = "its own loss is no cross-entropy, and it refits its classifier anyway"
    lambda_c: float = 3.0
    """weight of the stage outputs' distance; the original has 8 for ImageNet"""
    lambda_f: float = 1.0
    """weight of the embeddings' distance; the original has 10 for ImageNet"""
    nca: Literal["code", "paper"] = "code"
    """NCA as the authors' code computes it, where the margin cancels, or as their paper prints it"""
    margin: float = 0.6
    """of the printed NCA"""
    similarity: Literal["code", "paper"] = later("code")
    """of an image to a proxy: −‖ĥ − ŵ‖², which is 2 cos − 2, as in the authors' code, or the cosine as printed"""
    spatial: Literal["code", "paper"] = later("code")
    """distance of stage outputs: of normalised sums of squares as in the authors' code; or as printed, squared and of
    plain sums, which wants a far smaller lambda-c"""
    finetune: bool = True
    """whether the classifier is refitted on the memory, with the standard loss"""

    def __post_init__(self) -> None:
        check("lambda-c", self.lambda_c, least=0, most=1e6)
        check("lambda-f", self.lambda_f, least=0, most=1e6)
        check("margin", self.margin, least=0, most=10)
        check_choice("nca", self.nca, "code", "paper")
        check_choice("similarity", self.similarity, "code", "paper")
        check_choice("spatial", self.spatial, "code", "paper")

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """Eqs. 4 to 9 of PODNet."""
        if isinstance(self.loss, Standard):
            Lc = nca(out.z, y, margin=None if self.nca == "code" else self.margin * out.extra["scale"])
        else:
            Lc = self.loss(out.z, y, s)
        if ref is None:
            return Lc
        factor = math.sqrt(s.N / s.sizes[-1])
        spatial = (pooled_distance if self.spatial == "code" else printed_distance)(out.maps, ref.maps)
        flat = (1 - F.cosine_similarity(out.h, ref.h)).mean()
        return Lc + factor * (self.lambda_c * spatial + self.lambda_f * flat)

    def at_base(self) -> Method:
        """NCA, or else the plain cross-entropy; nothing else matters yet."""
        if not isinstance(self.loss, Standard):
            return PODNet(Balanced(), similarity=self.similarity)
        margin = self.margin if self.nca == "paper" else PODNet.margin  # in the code's it cancels
        return PODNet(nca=self.nca, margin=margin, similarity=self.similarity)

    def backbone(self, shape: tuple[int, int, int]) -> Backbone:
        """The original's own ResNet-32 and ResNet-18."""
        kind: type[Backbone] = {"tiny": SmallNet, "small": LinearTrunk, "large": HalfLinearTrunk}[scale(shape)]
        return kind(shape[0])

    def head(self, width: int) -> Head:
        """Ten proxies to a class."""
        return ProxyHead(width, cosine=self.similarity == "paper")

    def recipe(self, shape: tuple[int, int, int]) -> Recipe:
        """That of the original for CIFAR, whose code takes the cosine an epoch late (`--schedule cosine-late`), or for
        100 classes of ImageNet."""
        if scale(shape) == "tiny":
            return super().recipe(shape)
        if scale(shape) == "large":
            return Recipe(epochs=90, lr=0.05, schedule="cosine", batch=64, weight_decay=5e-4, clamp=5.0)
        return Recipe(epochs=160, schedule="cosine", weight_decay=5e-4, clamp=5.0)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """The centres of a k-means of each class's normalised embeddings."""
        assert isinstance(head, ProxyHead)
        head.imprint(head.centres(F.normalize(h.double(), dim=1), y, gen).to(head.new))

    def refit(self) -> Refit | None:
        """20 epochs with learning rate 0.05; batch norms go on moving."""
        if not self.finetune or not isinstance(self.loss, Standard):
            return None
        return Refit(Recipe(epochs=20, lr=0.05, milestones=(), weight_decay=5e-4, clamp=5.0), statistics="move")
