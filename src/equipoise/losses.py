"""Losses as pure functions: the λ family of the paper, the distillation of its baseline, and what the methods add.

Every classification loss of the paper is cross_entropy(z + log λ, y); only λ differs:

| loss          | λ of an old class | λ of a new class | equation |
| ------------- | ----------------- | ---------------- | -------- |
| Standard      | 1                 | 1                |          |
| Balanced(α)   | α n_i             | n_i              | 3, 5     |
| Relaxed(ε)    | ε                 | n_i              | 6        |
| Meta          | α n_i, α learned  | n_i              | 5, Alg. 1 |

n_i is the number of training images of class i in the current step. Predictions use plain z. α and ε may change in the
course of a training (`follow_ramp`), which the paper's do not.
Jodelet, Liu and Murata, "Balanced softmax cross-entropy for incremental learning with and without memory",
Computer Vision and Image Understanding 225, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Number = float | Tensor


def follow_ramp(value: float | str, done: float, read: Callable[[str], Number]) -> Number:
    """A number that may change in the course of a training, when the part `done` of it is done; 1 is its last epoch.

    (1 − w) first + w last with w = done, or (1 − cos(π done)) / 2. `settings.spell_ramp` says how it is written.
    """
    first, *rest = str(value).split(":")
    if not rest:
        return read(first)
    w = (1 - math.cos(math.pi * done)) / 2 if "cosine" in rest else done
    return (1 - w) * read(first) + w * read(rest[0])


def log_weights(lam: Tensor) -> Tensor:
    """log λ, up to a constant that a softmax does not feel: equal λ give exactly 0, and λ = 0 gives −∞."""
    lam = lam / lam.detach().max()
    some = lam > 0
    # The inner `where` keeps log away from 0, whose gradient is not a number even where it is not used.
    return torch.where(some, torch.where(some, lam, 1).log(), -math.inf)


def weighted_cross_entropy(z: Tensor, y: Tensor, lam: Tensor) -> Tensor:
    """Eq. 4 with the weighted softmax of eq. 3: −log q_y, q_k = λ_k e^{z_k} / Σ_j λ_j e^{z_j}; mean over the batch.

    A class with λ = 0 is left out of the softmax: exact, and finite in value and gradient for all other labels.
    """
    return F.cross_entropy(full_precision(z) + log_weights(lam).to(z.device), y)


def colliding_cross_entropy(z: Tensor, near: Tensor, y: Tensor, lam: Tensor) -> Tensor:
    """DDE's −log q_y, q = ½ p(x) + ½ mean_k p(x_k), of weighted softmaxes p as in eq. 3; mean over the batch.

    `near` are the logits of the neighbours x_k, image by image, as many of each; λ is in each softmax before mixing.
    """
    log_lam = log_weights(lam).to(z.device)
    labels = y[:, None].expand(-1, len(near) // len(z))
    own = F.cross_entropy(full_precision(z) + log_lam, y, reduction="none")
    others = F.cross_entropy(full_precision(near) + log_lam, labels.flatten(), reduction="none").view_as(labels)
    around = (-others).logsumexp(1) - math.log(labels.shape[1])
    return (math.log(2) - torch.logaddexp(-own, around)).mean()


def distillation(z: Tensor, z_old: Tensor, T: float, parts: Sequence[int] | None = None) -> Tensor:
    """Eq. 2: −T² Σ_k p̂_k log p_k over the old classes, p̂ and p the softmax of z_old/T and of z/T there.

    With `parts`, how many classes each has, that is added up over them: a softmax is over the classes of one part.
    """
    N_old = z_old.shape[1]
    split = list(parts or (N_old,))
    found = []
    for new, old in zip(torch.split(z[:, :N_old], split, 1), torch.split(z_old, split, 1)):
        p_hat = F.softmax(full_precision(old) / T, 1)
        log_p = F.log_softmax(full_precision(new) / T, 1)
        found.append(-(p_hat * log_p).sum(1).mean() * T**2)
    return sum(found[1:], start=found[0])


def full_precision(z: Tensor) -> Tensor:
    """Losses are computed in fp32 at least, whatever the net was computed in."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def cosine_distance(h: Tensor, h_old: Tensor) -> Tensor:
    """1 − cos of the embeddings of the net and of the previous net, mean over images (LUCIR, PODNet)."""
    return (1 - F.cosine_similarity(h, h_old)).mean()


def margin_ranking(cos: Tensor, y: Tensor, n_old: int, K: int, m: float) -> Tensor:
    """LUCIR's inter-class separation: mean over images of old classes and the K nearest new classes of
    max(0, m − cos of the own class + cos of the new one). 0 where a batch has no such images."""
    cos = full_precision(cos)
    own = cos.gather(1, y[:, None])
    rivals = cos[:, n_old:].topk(min(K, cos.shape[1] - n_old), dim=1).values
    old = (y < n_old).to(cos.dtype)
    return ((m - own + rivals).clamp_min(0).mean(1) * old).sum() / old.sum().clamp_min(1)


def nca(z: Tensor, y: Tensor, margin: Tensor | None = None) -> Tensor:
    """PODNet's neighbourhood component analysis of scaled similarities z = η ŝ.

    Without a margin as the authors' code computes it: in the denominator the own class counts as the nearest one
    does, and a margin would cancel. With margins η δ as printed: [−(z_y − η δ) + log Σ_{k≠y} exp z_k]₊.
    """
    z = full_precision(z)
    own = torch.arange(z.shape[1], device=z.device) == y[:, None]
    if margin is None:
        z = z - z.max(1, keepdim=True).values
        return (-z.gather(1, y[:, None])[:, 0] + z.masked_fill(own, 0).logsumexp(1)).mean()
    near = z.gather(1, y[:, None])[:, 0] - margin
    return (-near + z.masked_fill(own, -torch.inf).logsumexp(1)).clamp_min(0).mean()


def pooled_distance(maps: list[Tensor], before: list[Tensor]) -> Tensor:
    """POD-spatial as PODNet's code computes it: squared activations, summed over width and over height, both
    normalised as one vector; the distance of the two nets' vectors, mean over images and stages."""
    a, b = (F.normalize(Pooled.apply(*of), dim=2) for of in (maps, before))  # type: ignore[no-untyped-call]
    far: Tensor = torch.linalg.vector_norm(a - b, dim=2).mean()
    return far


def printed_distance(maps: list[Tensor], before: list[Tensor]) -> Tensor:
    """POD-spatial as PODNet's paper prints it, of stage outputs x and x̂ of the two nets:
    Σ_c Σ_h (Σ_w x − Σ_w x̂)² + Σ_c Σ_w (Σ_h x − Σ_h x̂)², mean over images and stages."""
    apart = [full_precision(x) - full_precision(x_hat) for x, x_hat in zip(maps, before)]
    far = [d.sum(side).square().sum((1, 2)).mean() for d in apart for side in (2, 3)]
    return torch.stack(far).sum() / len(maps)


class Pooled(torch.autograd.Function):
    """Squared activations summed over width and over height, of every stage (stages, images, numbers).

    Stages that give fewer numbers than others are filled up with zeros, which change no length and no distance. On a
    GPU, norms read a map as it is, without a copy in another precision; on a CPU they take up to twenty times as long
    as sums of a copy. Channels come last, as they lie in the memory of a GPU, where sums across that order took three
    times as long. It can be differentiated once, and not by `torch.func`.
    """

    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        """From maps (images, channels, height, width)."""
        ctx.save_for_backward(*maps)
        numbers = max(x.shape[1] * (x.shape[2] + x.shape[3]) for x in maps)
        kind = torch.promote_types(maps[0].dtype, torch.float32)
        sums = torch.zeros(len(maps), len(maps[0]), numbers, dtype=kind, device=maps[0].device)
        for row, x in zip(sums, maps):
            squares = x.to(kind).square() if x.is_cpu else None
            for part, dim in zip(_parts(row, x), (2, 1)):
                if squares is not None:
                    torch.sum(squares.permute(0, 2, 3, 1), dim, out=part)
                else:
                    torch.linalg.vector_norm(x.permute(0, 2, 3, 1), dim=dim, dtype=kind, out=part)
        return sums if maps[0].is_cpu else sums.square_()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """2 x (d of its row + d of its column)."""
        felt: list[Tensor | None] = []
        for row, x, wanted in zip(2 * d, ctx.saved_tensors, ctx.needs_input_grad):
            if not wanted:
                felt.append(None)
                continue
            across, down = (part.movedim(2, 1) for part in _parts(row, x))
            both = torch.add(across[..., None], down[:, :, None], out=torch.empty_like(x, dtype=d.dtype))
            felt.append(torch.mul(both, x, out=torch.empty_like(x)))  # laid out in memory as x is
        return tuple(felt)


def _parts(row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a stage whose output is x: sums over width (images, height, channels), then over height."""
    n, c, h, w = x.shape
    return row[:, : h * c].view(n, h, c), row[:, h * c : (h + w) * c].view(n, w, c)


def rescaled_cross_entropy(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Cross-entropy where an image counts 1/n_y, in the mean too."""
    z = full_precision(z)
    return F.cross_entropy(z, y, weight=1 / n.clamp_min(1).to(z.dtype))


def separated_cross_entropy(z: Tensor, y: Tensor, n_old: int, mean: str) -> Tensor:
    """Cross-entropy of each image among its own kind only, old classes or new ones (SS-IL, Ahn et al., 2021).

    The mean is over `each` kind, and the two are added: one that a batch lacks is 0; or over `all` images, as in SS-IL.
    """
    z, old = full_precision(z), y < n_old
    past = torch.arange(z.shape[1], device=z.device) < n_old
    other = past[None, :] != old[:, None]
    of_each = F.cross_entropy(z.masked_fill(other, -torch.inf), y, reduction="none")
    if mean == "all":
        return of_each.mean()
    kinds = torch.stack([old, ~old]).to(of_each.dtype)
    return ((kinds * of_each).sum(1) / kinds.sum(1).clamp_min(1)).sum()
