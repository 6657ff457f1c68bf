"""What the features of two nets span, and the geodesic between the two subspaces.

Twice: by eigenvectors and singular values, which is fastest on a CPU; and by matrix products alone, for GPUs. There a
decomposition takes milliseconds and the CPU waits for it, so that a training step could not be a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1e-6
"""directions that rows span less than this, relative to all, are taken as not spanned, by and by; likewise cosines"""
DEGREE = 16
"""of polynomials in cosines, which are exact to 12 digits"""


class Geodesic(NamedTuple):
    """G = A C Aᵀ, which is symmetric and never formed: it integrates projections along the geodesic."""

    A: Tensor
    C: Tensor

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """xᵀ G y, row by row."""
        return (x @ self.A @ self.C * (y @ self.A)).sum(1)


def find_geodesic(old: Tensor, new: Tensor) -> Geodesic:
    """G = ∫ Π(v) Π(v)ᵀ dv, v from 0 to 1, between what the rows of two float64 matrices span, each less its own mean.

    Of B rows of D numbers that is min(B, D) − 2 dimensions; the two directions that are spanned the least are left out.
    """
    both = torch.stack([old, new])
    both = both - both.mean(2, keepdim=True)
    return find_by_decompositions(both) if both.is_cpu else find_by_products(both)


# By decompositions -----------------------------------------------------------------------------------------------


def find_by_decompositions(both: Tensor) -> Geodesic:
    """G between what the rows of two matrices span."""
    return join_subspaces(*(find_subspace(x) for x in both))


def find_subspace(x: Tensor) -> Tensor:
    """An orthonormal basis (D, min(B, D) − 2) of what B rows span, by the smaller Gram matrix.

    Directions that the rows hardly span, as where an image comes twice, are zeros.
    """
    x = torch.nan_to_num(x)  # what diverges shows in the loss, not in eigh
    wide = x.shape[0] <= x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    rank = max(1, min(x.shape) - 2)
    values, vectors = values[-rank:], vectors[:, -rank:]
    kept = values > 1e-10 * values[-1]
    basis: Tensor = x.T @ vectors * torch.where(kept, values, torch.inf).rsqrt() if wide else vectors * kept
    return basis


def join_subspaces(old: Tensor, new: Tensor) -> Geodesic:
    """G between the columns: oldᵀ new = U cos(t) Vᵀ, and A has P = old U, then Q = (new V − P cos t) / sin t."""
    U, cos, V = torch.linalg.svd(old.T @ new)
    P = old @ U
    rest = new @ V.T - P * cos
    sin = rest.norm(dim=0)
    Q = rest * torch.where(sin > 1e-6, sin, torch.inf).reciprocal()
    # The cosine tells large angles, also that of a direction of one side to the zeros of the other.
    t = torch.where(cos < 0.5, cos.acos(), torch.atan2(sin, cos))
    once, twice = torch.sinc(t / math.pi), torch.sinc(2 * t / math.pi)  # sin t / t and sin 2t / 2t
    across = torch.diag(t.sin() * once / 2)
    return Geodesic(torch.cat([P, Q], 1), join_blocks(torch.diag((1 + twice) / 2), across, torch.diag((1 - twice) / 2)))


def join_blocks(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The symmetric matrix [a b; bᵀ c]."""
    return torch.cat([torch.cat([a, b], 1), torch.cat([b.T, c], 1)])


# By matrix products ----------------------------------------------------------------------------------------------


def find_by_products(both: Tensor) -> Geodesic:
    """G between what the rows of two matrices span."""
    return join_bases(*find_bases(both))


def find_bases(x: Tensor) -> Tensor:
    """What the rows of each matrix (matrices, B, D) span: V (matrices, min(B, D), D), where Vᵀ V projects on that."""
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    side, width = x.shape[1:]
    eye = torch.eye(side, dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(1e-300)
    turned = orthogonalise(torch.cat([x, eye], 2), width)
    basis, inverse = turned[..., :width], turned[..., width:]  # (x xᵀ)^(−1/2) x and (x xᵀ)^(−1/2)
    basis = basis if wide else basis @ basis.mT
    for _ in range(side - max(1, side - 2)):
        u = find_largest(inverse)
        others = eye - u @ u.mT
        basis, inverse = others @ basis, others @ inverse @ others
    return basis


def orthogonalise(x: Tensor, width: int) -> Tensor:
    """(y yᵀ)^(−1/2) x, where y is the first `width` columns, with singular values of at most 1.

    Newton's iteration as Schulz has it, x ← ρ (3 − ρ² y yᵀ) x / 2, scaled so that it gains most on the smallest
    singular values (Chen and Chow, 2014). Those far below LEAST stay small.
    """
    least = LEAST
    while least < 1 - 1e-15:
        rho = math.sqrt(3 / (1 + least + least**2))
        y = x[..., :width]
        x = torch.baddbmm(x, y @ y.mT, x, beta=1.5 * rho, alpha=-0.5 * rho**3)
        least = rho * least * (3 - (rho * least) ** 2) / 2
    return x


def find_largest(x: Tensor) -> Tensor:
    """The eigenvector (matrices, n, 1) of the largest eigenvalue of positive semidefinite x, by its 32,768th power."""
    for _ in range(5):
        x = x / x.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-300)[:, None, None]
        x = torch.linalg.matrix_power(x, 8)
    largest = x.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None]
    return F.normalize(torch.take_along_dim(x, largest, 2), dim=1, eps=1e-300)


def join_bases(old: Tensor, new: Tensor) -> Geodesic:
    """G between what the rows of P and of Q span: with P Qᵀ = W H, W orthogonal and H = cos t symmetric,

    G = ½ Pᵀ (1 + W H s(H) Wᵀ) P + ½ (Pᵀ W s(H) Y + its transpose) + Yᵀ f(H) Y, where Y = Q − Q Pᵀ P,
    s = sin t / t and f = (1 − cos t sin t / t) / (2 sin² t). Where subspaces have a right angle, geodesics are many,
    and G is their mean.
    """
    M = old @ new.T
    W = orthogonalise(M[None], len(M))[0]
    H = W.T @ M
    s, f = compute_functions((H + H.T) / 2)
    across = W @ s
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    C = join_blocks((eye + across @ H @ W.T) / 2, across / 2, f)
    return Geodesic(torch.cat([old, new - M.T @ old]).T, C)


def compute_functions(H: Tensor) -> tuple[Tensor, Tensor]:
    """s(H) and f(H) of a symmetric matrix with eigenvalues from 0 to 1, by Chebyshev's polynomials of 2 H − 1."""
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    x = 2 * H - eye
    before, now = eye, x
    s, f = (a[0] * eye + a[1] * x for a in (SINES, REST))
    for a, b in zip(SINES[2:], REST[2:]):
        before, now = now, torch.addmm(before, x, now, beta=-1, alpha=2)
        s, f = s.add(now, alpha=a), f.add(now, alpha=b)
    return s, f


def _compute_s(cos: float) -> float:
    t = math.acos(cos)
    return math.sin(t) / t


def _compute_f(cos: float) -> float:
    return (1 - cos * _compute_s(cos)) / (2 - 2 * cos**2)


def _interpolate(function: Callable[[float], float]) -> list[float]:
    """Chebyshev's coefficients, in 2 cos t − 1, of a function of cos t that is analytic but at −1."""
    count = DEGREE + 1
    nodes = [math.pi * (j + 0.5) / count for j in range(count)]
    values = [function((math.cos(a) + 1) / 2) for a in nodes]
    sums = (sum(value * math.cos(k * a) for value, a in zip(values, nodes)) for k in range(count))
    return [(2 if k else 1) * total / count for k, total in enumerate(sums)]


SINES, REST = _interpolate(_compute_s), _interpolate(_compute_f)
