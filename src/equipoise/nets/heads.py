"""Classifiers that grow: linear, cosine, and many proxies to a class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    """A classifier that grows: it starts without classes."""

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Add `new` classes after those that are there, which stay as they are."""
        raise TypeError("a head says how it grows")

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch, from embeddings and stage outputs, and what else the method's objective needs."""
        raise TypeError("a head says how it computes")


class LinearHead(Head):
    """z = W h + b; new rows are drawn from U(±1/√d), as torch draws those of a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, width))
        self.bias = nn.Parameter(torch.empty(0))

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Add rows for `new` classes."""
        d = self.weight.shape[1]
        bound = 1 / math.sqrt(d)
        rows = torch.empty(new, d).uniform_(-bound, bound, generator=gen)
        bias = torch.empty(new).uniform_(-bound, bound, generator=gen)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight.device)]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), bias.to(self.bias.device)]))

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings."""
        return F.linear(h, self.weight, self.bias), {}


class RowsHead(Head):
    """A head that compares directions, with a learned scale; rows of old and of new classes are apart, so that a method
    may freeze the old ones."""

    per_class = 1
    """rows of a class"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.empty(0, width))
        self.new = nn.Parameter(torch.empty(0, width))
        self.scale = nn.Parameter(torch.ones(()))

    def rows(self) -> Tensor:
        """The rows of all classes, old ones first."""
        return torch.cat([self.old, self.new])

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Count the rows that are there as old ones, and add those of `new` classes."""
        self.old = nn.Parameter(self.rows().detach())
        rows = self.first_rows(new * self.per_class, self.old.shape[1], gen)
        self.new = nn.Parameter(rows.to(self.old))

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """What new rows are before anybody knows better."""
        raise TypeError("a head says how its rows begin")

    def imprint(self, directions: Tensor) -> None:
        """Set the new rows to these, as long as the old rows are on average."""
        with torch.no_grad():
            self.new.copy_(directions * self.old.norm(dim=1).mean())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("old", "new"):  # how many rows are of old classes depends on what was learned
            if (given := state.get(f"{prefix}{name}")) is not None:
                mine = getattr(self, name)
                room = torch.empty(given.shape, dtype=mine.dtype, device=mine.device)
                setattr(self, name, nn.Parameter(room, mine.requires_grad))
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


class CosineHead(RowsHead):
    """z = σ cos(h, w), with σ learned (LUCIR)."""

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """From U(±1/√d)."""
        bound = 1 / math.sqrt(width)
        return torch.empty(count, width).uniform_(-bound, bound, generator=gen)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings, and the cosines."""
        cos = F.normalize(h, dim=1) @ F.normalize(self.rows(), dim=1).T
        return self.scale * cos, {"cos": cos}


class ProxyHead(RowsHead):
    """z = η Σ_k softmax_k(s_k) s_k over the proxies k of a class, with s = −‖ĥ − ŵ_k‖² and η learned (PODNet).

    Or with s = cos(h, w_k), where `cosine` is asked for.
    """

    per_class = 10

    def __init__(self, width: int, cosine: bool = False) -> None:
        super().__init__(width)
        self.cosine = cosine

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """Normal, He's variance for a linear layer: 1/d."""
        return torch.empty(count, width).normal_(0, 1 / math.sqrt(width), generator=gen)

    def centres(self, h: Tensor, y: Tensor, gen: torch.Generator) -> Tensor:
        """Of the embeddings of each class, the centres of a k-means: as many as it has proxies, if need be repeated."""
        from sklearn.cluster import KMeans  # slow to import, and only this needs it

        h, y = h.cpu(), y.cpu()
        found = []
        for c in range(int(y.max()) + 1):
            own = np.unique(h[y == c].numpy(), axis=0)  # k-means warns of clusters that are one point
            count = min(self.per_class, len(own))
            seed = int(torch.randint(2**31, (), generator=gen))
            made = torch.from_numpy(KMeans(count, n_init=10, random_state=seed).fit(own).cluster_centers_)
            found.append(made[torch.arange(self.per_class) % count])
        return torch.cat(found)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings, the similarities without scale, and the scale."""
        cos = F.normalize(h, dim=1) @ F.normalize(self.rows(), dim=1).T
        near = (cos if self.cosine else 2 * cos - 2).view(len(h), -1, self.per_class)
        similarity = (near.softmax(2) * near).sum(2)
        return self.scale * similarity, {"similarity": similarity, "scale": self.scale.expand(len(h))}
