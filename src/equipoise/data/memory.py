"""The replay memory: its size, and how exemplars are chosen.

A memory is a tensor of positions of images, class by class, best exemplar first: shrinking it keeps a prefix of each
class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

EVERYTHING = 10**12
"""more images than any class has"""
HERDED = 2**26
"""most numbers of embeddings that are herded at a time, but for a single class: 0.5 GiB, and some copies of that"""


@dataclass(frozen=True)
class Budget:
    """The size of the memory: a number of images of every class, or of images in total."""

    per_class: int = 0
    """images of every class, if there is no total"""
    total: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> Budget:
        """Parse `20` (images of every class), `total:2000` (in total, equal shares), `0` or `all`."""
        word = str(text).strip()
        if word == "all":
            return cls(per_class=EVERYTHING)
        number = word.removeprefix("total:")
        if not number.isdecimal() or len(number) > 12:
            raise UsageError(f"memory must be a number such as 20 (of every class), total:2000, 0 or all, not {word!r}")
        return cls(total=int(number)) if word != number else cls(per_class=int(number))

    def share(self, classes: int) -> int:
        """Images of each class, given the number of classes; a remainder of the total is unused."""
        return self.per_class if self.total is None else self.total // max(1, classes)

    def __str__(self) -> str:
        if self.per_class == EVERYTHING:
            return "all"
        return str(self.per_class) if self.total is None else f"total:{self.total}"


def rank_in_class(y: Tensor) -> Tensor:
    """The index of each image within its class, for y sorted by class."""
    _, counts = torch.unique_consecutive(y, return_counts=True)
    starts = counts.cumsum(0) - counts
    places: Tensor = torch.arange(len(y), device=y.device) - starts.repeat_interleave(counts)
    return places


def keep(memory: Tensor, y: Tensor, m: int) -> Tensor:
    """Keep the first m exemplars of every class of a memory with labels y."""
    return memory[rank_in_class(y) < m]


def choose_by_herding(h: Tensor, y: Tensor, m: int, unit_length: bool = True) -> Tensor:
    """The first m exemplars of every class by herding: indices, class by class; as many classes at a time as have room.

    What is chosen of a class depends on its images only.
    """
    classes, counts = torch.unique(y, return_counts=True)
    some = max(1, HERDED // (int(counts.max()) * h.shape[1]))
    if len(classes) <= some:
        return herd(h, y, m, unit_length)
    chosen = []
    for part in classes.split(some):
        own = torch.isin(y, part).nonzero()[:, 0]
        chosen.append(own[herd(h[own], y[own], m, unit_length)])
    return torch.cat(chosen)


def herd(h: Tensor, y: Tensor, m: int, unit_length: bool) -> Tensor:
    """The first m exemplars of every class by herding (Welling, 2009), as iCaRL uses it: indices, class by class.

    Features are L2-normalised (`unit_length`); the k-th exemplar is the image, not yet chosen, that brings the mean of
    the chosen ones nearest to the mean μ of the class: argmin_x ‖μ − (x + Σ chosen) / k‖. All classes at once, in
    float64, so that devices agree.
    """
    order = torch.argsort(y, stable=True)
    _, counts = torch.unique_consecutive(y[order], return_counts=True)
    classes = torch.arange(len(counts), device=y.device)
    row, column = classes.repeat_interleave(counts), rank_in_class(y[order])
    table = order.new_zeros(len(counts), int(counts.max())).index_put((row, column), order)
    free = torch.zeros_like(table, dtype=torch.bool).index_put((row, column), torch.ones_like(row).bool())

    h = F.normalize(h.double(), dim=1) if unit_length else h.double()
    D = h[table] * free[..., None]
    mu = D.sum(1) / counts[:, None]
    chosen_sum = torch.zeros_like(mu)
    picks = []
    for k in range(1, min(m, table.shape[1]) + 1):
        distance = (mu[:, None] - (chosen_sum[:, None] + D) / k).norm(dim=2).masked_fill(~free, torch.inf)
        i = distance.argmin(1)
        free[classes, i] = False
        chosen_sum += D[classes, i]
        picks.append(table[classes, i])
    if not picks:
        return order[:0]
    ranked = torch.stack(picks, 1)
    return ranked[torch.arange(ranked.shape[1], device=y.device) < counts[:, None]]  # small classes have fewer


def choose_by_vertices(h: Tensor, y: Tensor, m: int, gen: torch.Generator, passes: int = 10) -> Tensor:
    """The images nearest to m vertices of every class: indices, class by class.

    The vertices begin at herded images and are fitted to all images of the class, in a new order in each pass.
    """
    herded, h, chosen = choose_by_herding(h, y, m), F.normalize(h.double(), dim=1), []
    for c in sorted(set(y.tolist())):
        own, first = (y == c).nonzero()[:, 0], herded[y[herded] == c]
        order = torch.cat([torch.randperm(len(own), generator=gen, device=gen.device) for _ in range(passes)])
        points = h[own].cpu().numpy()
        vertices = fit_vertices(points, h[first].cpu().numpy(), order.tolist())
        chosen.append(own[torch.tensor(take_nearest(points, vertices), device=own.device)])
    return torch.cat(chosen)


def fit_vertices(points: Array, vertices: Array, order: list[int]) -> Array:
    """Competitive Hebbian learning: v_k ← v_k + ε e^(−rank_k / α) (f − v_k) for every point f in this order.

    All have unit length; rank_k counts the vertices nearer to f. ε falls from 0.3 to 0.01, and α from 10 to 0.1.
    """
    v = vertices.copy()
    for i, f in enumerate(points[order]):
        done = i / len(order)
        ranks = (-(v @ f)).argsort(kind="stable").argsort()
        v += 0.3 * (0.01 / 0.3) ** done * np.exp(-ranks / (10 * 0.01**done))[:, None] * (f - v)
        v /= np.linalg.norm(v, axis=1, keepdims=True)
    return v


def take_nearest(points: Array, vertices: Array) -> list[int]:
    """The nearest point to each vertex that no vertex before has taken: indices."""
    near, found = vertices @ points.T, []
    for row in near:
        found.append(int(row.argmax()))
        near[:, found[-1]] = -np.inf
    return found


def choose_at_random(y: Tensor, m: int, gen: torch.Generator) -> Tensor:
    """m images of every class, drawn without replacement: indices, class by class."""
    shuffled = torch.randperm(len(y), generator=gen, device=gen.device).to(y.device)
    order = shuffled[torch.argsort(y[shuffled], stable=True)]
    return order[rank_in_class(y[order]) < m]


def hold_out(y: Tensor, h: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw h images of every class at random; returns indices of the others and of these: Algorithm 1's D_t and B_t."""
    which = choose_at_random(y, h, gen)
    kept = torch.ones(len(y), dtype=torch.bool, device=y.device).index_fill(0, which, False)
    return kept.nonzero()[:, 0], which


def oversample(group: Tensor, sizes: Tensor, gen: torch.Generator) -> Tensor:
    """Shuffled indices of an epoch with `sizes[k]` images of group k; images of a group repeat equally often, ± 1."""
    counts = torch.bincount(group)
    random = torch.rand(len(group), generator=gen, device=gen.device, dtype=torch.float64)
    order = torch.argsort(group + random)  # group after group, each shuffled
    # Every group is repeated cyclically, up to its size.
    place = torch.arange(int(sizes.sum()), device=group.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    first = counts.cumsum(0) - counts
    which = order[first.repeat_interleave(sizes) + place % counts.repeat_interleave(sizes)]
    return which[torch.randperm(len(which), generator=gen, device=gen.device)]
