"""GeoDL (Simon, Koniusz and Harandi, 2021): distilling along the geodesic between old and new features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import full_precision, margin_ranking
from ..method import EAGER, Method
from ..nets import Batch
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
    capturable: ClassVar[bool] = False  # eigh and svd
    cost: ClassVar[float] = 1.3 * EAGER  # by arithmetic: the decompositions besides
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


class Geodesic(NamedTuple):
    """G = A D1 Aᵀ + A D2 Bᵀ + B D2 Aᵀ + B D3 Bᵀ, with the diagonals of the D. It is never formed."""

    A: Tensor
    B: Tensor
    d: tuple[Tensor, Tensor, Tensor]

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """xᵀ G y, row by row."""
        (xa, xb), (ya, yb) = ((z @ self.A, z @ self.B) for z in (x, y))
        return (self.d[0] * xa * ya + self.d[1] * (xa * yb + xb * ya) + self.d[2] * xb * yb).sum(1)


def geodesic_distance(z: Tensor, z_old: Tensor, form: str) -> Tensor:
    """mean (ẑ − z)ᵀ G (ẑ − z), or mean (1 − ẑᵀ G z / √(ẑᵀ G ẑ · zᵀ G z)); in float64, as angles are small."""
    z, z_old = (F.normalize(x.double(), dim=1) for x in (z, z_old))
    with torch.no_grad():
        G = join_subspaces(find_subspace(z_old), find_subspace(z))
    if form == "difference":
        return G.multiply(z_old - z, z_old - z).mean()
    lengths = (G.multiply(z_old, z_old) * G.multiply(z, z)).clamp_min(1e-24).sqrt()
    apart: Tensor = (1 - G.multiply(z_old, z) / lengths).mean()
    return apart


def pool(x: Tensor) -> Tensor:
    """A stage output (images, channels, height, width), averaged to 2 × 2 and flattened."""
    return F.adaptive_avg_pool2d(full_precision(x), 2).flatten(1)


def find_subspace(z: Tensor) -> Tensor:
    """An orthonormal basis (D, min(B, D) − 2) of what B rows span, each less its own mean, by the smaller Gram matrix.

    Directions that the rows hardly span, as where an image comes twice, are zeros.
    """
    x = torch.nan_to_num(z - z.mean(1, keepdim=True))  # what diverges shows in the loss, not in eigh
    wide = x.shape[0] <= x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    rank = max(1, min(x.shape) - 2)
    values, vectors = values[-rank:], vectors[:, -rank:]
    kept = values > 1e-10 * values[-1]
    basis: Tensor = x.T @ vectors * torch.where(kept, values, torch.inf).rsqrt() if wide else vectors * kept
    return basis


def join_subspaces(old: Tensor, new: Tensor) -> Geodesic:
    """G between two subspaces: with oldᵀ new = U cos(t) Vᵀ, A = old U and B = (new V − A cos t) / sin t."""
    U, cos, V = torch.linalg.svd(old.T @ new)
    A = old @ U
    rest = new @ V.T - A * cos
    sin = rest.norm(dim=0)
    B = rest * torch.where(sin > 1e-6, sin, torch.inf).reciprocal()
    t = torch.atan2(sin, cos)
    once, twice = torch.sinc(t / math.pi), torch.sinc(2 * t / math.pi)  # sin t / t and sin 2t / 2t
    return Geodesic(A, B, ((1 + twice) / 2, t.sin() * once / 2, (1 - twice) / 2))
