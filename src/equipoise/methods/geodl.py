"""GeoDL (Simon, Koniusz and Harandi, 2021): distilling along the geodesic between old and new features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import full_precision, margin_ranking
from ..method import Method
from ..nets import Batch
from ..nets.subspaces import find_geodesic
from ..settings import number
from ..step import Step
from .lucir import LUCIR


@dataclass(frozen=True)
class GeoDL(LUCIR):
    """LUCIR with L_geo = mean (ẑ − z)ᵀ G (ẑ − z) in place of its distillation, z and ẑ features of length 1.

    z is the last stage output, pooled to 2 × 2. G = ∫ Π(v) Π(v)ᵀ dv, v from 0 to 1, integrates the projections on the
    subspaces between those that the batch spans in the old net and in the new one; it is not differentiated. As the
    authors' code trains; their λ for CIFAR-100 is unknown, and LUCIR's stands in.
    """

    name: ClassVar[str] = "geodl"
    title: ClassVar[str] = "GeoDL"
    needs_maps: ClassVar[bool] = True
    cost: ClassVar[float] = 2.2  # by arithmetic: 135 products of small float64 matrices beside LUCIR's training
    form: Literal["difference", "cosine"] = "difference"
    """the loss as in the code that was run, or 1 − the cosine in the metric G, as printed"""
    K: int = number(0, whole=True, least=0)
    """new classes in LUCIR's margin ranking, which the authors' command leaves out: 0 for none, LUCIR has 2"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """L_c + λ L_geo, λ as in LUCIR."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        ratio = s.n_old / s.sizes[-1]
        lam = self.lambda_base * math.sqrt(ratio if self.ratio == "code" else 1 / ratio)
        loss = Lc + lam * geodesic_distance(pool(b.out.maps[-1]), pool(b.ref.maps[-1]), self.form)
        return loss + margin_ranking(b.out.extra["cos"], b.y, s.n_old, self.K, self.m) if self.K else loss

    def at_base(self) -> Method:
        """LUCIR's."""
        return LUCIR()


def geodesic_distance(z: Tensor, z_old: Tensor, form: str) -> Tensor:
    """mean (ẑ − z)ᵀ G (ẑ − z), or mean (1 − ẑᵀ G z / √(ẑᵀ G ẑ · zᵀ G z)); in float64, as angles are small."""
    z, z_old = (F.normalize(x.double(), dim=1) for x in (z, z_old))
    with torch.no_grad():
        G = find_geodesic(z_old, z)
    if form == "difference":
        return G.multiply(z_old - z, z_old - z).mean()
    lengths = (G.multiply(z_old, z_old) * G.multiply(z, z)).clamp_min(1e-24).sqrt()
    apart: Tensor = (1 - G.multiply(z_old, z) / lengths).mean()
    return apart


def pool(x: Tensor) -> Tensor:
    """A stage output (images, channels, height, width), averaged to 2 × 2 and flattened."""
    return F.adaptive_avg_pool2d(full_precision(x), 2).flatten(1)
