"""TPCIL (Tao et al., 2020): topology-preserving class-incremental learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import memory
from ..losses import full_precision
from ..method import Method
from ..nets import Batch
from ..nets.heads import CosineHead, Head
from ..settings import number
from ..step import More, Step
from .lucir import LUCIR


@dataclass(frozen=True)
class TPCIL(Method):
    """L = L_c + λ mean_i (1 − r_i), r_i the correlation of anchor i's similarities to the others in the two nets.

    Anchors are images from memory, beside every batch; net, recipe and cosine classifier are LUCIR's, and all rows are
    trained. The loss is that of the group's later code, with edges as in its variant for stored vertices. The paper's
    graph, `vertices` by competitive Hebbian learning, is reconstructed, with settings of our own.
    """

    title = "TPCIL"
    backbones: ClassVar = LUCIR.backbones
    recipes: ClassVar = LUCIR.recipes
    imagenet: ClassVar = {"lambda_tpl": 15.0}
    least_memory: ClassVar[int] = 1
    cost: ClassVar[float] = 1.8 * LUCIR.cost
    lambda_tpl: float = number(10.0, least=0, most=1e6)
    """weight of the second term; the group's later code has 15 for ImageNet"""
    anchors: int = number(100, whole=True, least=2)
    """anchors beside a batch; all there are if these are fewer"""
    edges: Literal["cosine", "dot"] = "cosine"
    """similarity of two anchors: of embeddings at unit length, or as they are"""
    pool: Literal["row", "global"] = "row"
    """correlations: one for each anchor, or one over all pairs"""
    diagonal: bool = False
    """whether the similarity of an anchor to itself counts too"""
    positive: bool = False
    """whether only pairs count that were similar in the old net"""
    vertices: Literal["herding", "hebbian"] = "herding"
    """exemplars: by herding, or those nearest to vertices of competitive Hebbian learning"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """The cross-entropy, and what is lost of the anchors' topology."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.more is None or b.more.ref is None:
            return Lc
        new, old = (self.compare(h) for h in (b.more.out.h, b.more.ref.h))
        w = torch.ones_like(old) if self.diagonal else 1 - torch.eye(len(old), dtype=old.dtype, device=old.device)
        w = w * (old > 0) if self.positive else w
        if self.pool == "global":
            new, old, w = new.flatten(), old.flatten(), w.flatten()
        return Lc + self.lambda_tpl * (1 - correlate(new, old, w)).mean()

    def compare(self, h: Tensor) -> Tensor:
        """The similarities of all pairs of anchors."""
        h = F.normalize(full_precision(h), dim=1) if self.edges == "cosine" else full_precision(h)
        return h @ h.T

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        """Anchors: the memory that is trained on, shuffled and dealt out in full batches, again and again."""
        if s.teacher is None or s.where is s.memory:
            return None
        old = s.where[s.y < s.n_old]  # without those that Meta holds out
        size = min(self.anchors, len(old))
        deals = len(old) // size
        drawn = torch.rand(-(-len(which) // deals), len(old), generator=gen, device=gen.device)
        return More(old[drawn.argsort(1)[:, : deals * size].reshape(-1, size)[: len(which)]])

    def choose(self, s: Step, m: int, select: str, gen: torch.Generator) -> Tensor:
        """Herded exemplars, or the images nearest to the vertices that begin there."""
        if select == "random" or self.vertices == "herding":
            return super().choose(s, m, select, gen)
        h, y = s.embed(s.net, s.data), s.images.y[s.data]
        return s.data[memory.choose_by_vertices(h, y, m, gen)]

    def at_base(self) -> Method:
        """LUCIR's."""
        return LUCIR()

    def head(self, width: int) -> Head:
        """σ cos(h, w)."""
        return CosineHead(width)


def correlate(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Pearson's correlation along the last dimension, of the pairs with w = 1; 0 where one side does not vary."""
    n = w.sum(-1, keepdim=True).clamp_min(1)
    a, b = (w * (x - (w * x).sum(-1, keepdim=True) / n) for x in (a, b))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).clamp_min(1e-16).sqrt()
