"""Growing classifiers: linear, cosine, and several proxies per class."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.images import sum_by_class
from ..errors import UsageError
from .backbones import Block, initialise_convolutions


class Head(nn.Module):
    """A growing classifier, which starts without classes."""

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Add `new` classes after the existing ones, which do not change."""
        raise TypeError("a head must define widen")

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch, from embeddings and stage outputs, and further outputs for the objective."""
        raise TypeError("a head must define forward")


def draw_rows(count: int, width: int, gen: torch.Generator) -> Tensor:
    """Rows from U(±1/√d), as in torch's linear layer."""
    bound = 1 / math.sqrt(width)
    return torch.empty(count, width).uniform_(-bound, bound, generator=gen)


class LinearHead(Head):
    """z = W h + b; new rows are drawn from U(±1/√d), as in torch's linear layer."""

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
    """A head that compares directions, with a learned scale. Old and new classes have separate rows, so that the old
    ones can be frozen."""

    per_class = 1
    """rows per class"""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.empty(0, width))
        self.new = nn.Parameter(torch.empty(0, width))
        self.scale = nn.Parameter(torch.full((), scale))

    def rows(self) -> Tensor:
        """The rows of all classes, old ones first."""
        return torch.cat([self.old, self.new])

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Move all rows to the old ones, and add rows for `new` classes."""
        self.old = nn.Parameter(self.rows().detach())
        rows = self.first_rows(new * self.per_class, self.old.shape[1], gen)
        self.new = nn.Parameter(rows.to(self.old))

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """The initial rows of new classes."""
        raise TypeError("a head must define first_rows")

    def directions(self, h: Tensor, y: Tensor, gen: torch.Generator) -> Tensor:
        """The directions in which the rows of new classes (y, from 0) begin, found from their embeddings."""
        raise TypeError("a head must define directions")

    def imprint(self, directions: Tensor) -> None:
        """Set the new rows to these directions, with the mean length of the old rows."""
        with torch.no_grad():
            self.new.copy_(directions * self.old.norm(dim=1).mean())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("old", "new"):  # the numbers of rows depend on the classes learned
            if (given := state.get(f"{prefix}{name}")) is not None:
                mine = getattr(self, name)
                room = torch.empty(given.shape, dtype=mine.dtype, device=mine.device)
                setattr(self, name, nn.Parameter(room, mine.requires_grad))
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


def imprint_rows(head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
    """Set the rows of new classes (y, from 0) by their embeddings: a function for `Method.first_rows`."""
    assert isinstance(head, RowsHead)
    head.imprint(head.directions(h, y, gen))


class CosineHead(RowsHead):
    """z = σ cos(h, w), with σ learned (LUCIR)."""

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """From U(±1/√d)."""
        return draw_rows(count, width, gen)

    def directions(self, h: Tensor, y: Tensor, gen: torch.Generator) -> Tensor:
        """The direction of the mean of the normalised embeddings of each class."""
        return F.normalize(sum_by_class(F.normalize(h, dim=1), y, len(self.new)), dim=1)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings, and the cosines."""
        cos = F.normalize(h, dim=1) @ F.normalize(self.rows(), dim=1).T
        return self.scale * cos, {"cos": cos}


class RotationHead(CosineHead):
    """Cosine classifier; and after two residual blocks on the last stage output, one of four rotations (SPB-I)."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__(width, scale)
        self.blocks = nn.Sequential(Block(width, width, 1, True), Block(width, width, 1, True))
        self.turns = nn.Parameter(torch.empty(4, width))
        self.turn_scale = nn.Parameter(torch.full((), scale))

    def widen(self, new: int, gen: torch.Generator) -> None:
        """Add rows for `new` classes; at first, initialise the rest too."""
        if not len(self.rows()):
            initialise_convolutions(self.blocks, gen)
            with torch.no_grad():
                self.turns.copy_(self.first_rows(4, self.turns.shape[1], gen))
        super().widen(new, gen)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch, and those of its rotations."""
        z, extra = super().forward(h, maps)
        if (channels := maps[-1].shape[1]) != h.shape[1]:
            words = f"the last stage output has {channels} channels, and there are {h.shape[1]} features"
            raise UsageError(f"{words}: to tell rotations apart, a backbone must have as many of each")
        # Like the stages before them, and unlike classifiers, the blocks are computed in bf16 if that is in force.
        seen, kind = maps[-1], maps[-1].dtype
        half = nullcontext() if kind == h.dtype else torch.autocast(h.device.type, kind, cache_enabled=False)
        with half:
            seen = self.blocks(seen)
        seen = seen.to(h.dtype).mean((2, 3))
        turns = self.turn_scale * F.normalize(seen, dim=1) @ F.normalize(self.turns, dim=1).T
        return z, {**extra, "turns": turns}


class PerspectiveHead(RowsHead):
    """Four cosine classifiers, each for a quarter of the batch, with one learned scale, or with one `each` (SPB-M)."""

    per_class = 4

    def __init__(self, width: int, scale: float = 1.0, each: bool = False) -> None:
        super().__init__(width, scale)
        if each:
            self.scale = nn.Parameter(torch.full((4, 1, 1), scale))

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """From U(±1/√d)."""
        return draw_rows(count, width, gen)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of four copies, stacked: each copy's by its own classifier."""
        d = h.shape[1]
        rows = F.normalize(self.rows(), dim=1).view(-1, 4, d)
        cos = torch.einsum("vbd,cvd->vbc", F.normalize(h, dim=1).view(4, -1, d), rows)
        return (self.scale * cos).flatten(0, 1), {"cos": cos.flatten(0, 1)}


class ProxyHead(RowsHead):
    """z = η Σ_k softmax_k(s_k) s_k over the proxies k of a class, with s = −‖ĥ − ŵ_k‖² and η learned (PODNet).

    With `cosine`, s = cos(h, w_k).
    """

    per_class = 10

    def __init__(self, width: int, cosine: bool = False) -> None:
        super().__init__(width)
        self.cosine = cosine

    def first_rows(self, count: int, width: int, gen: torch.Generator) -> Tensor:
        """Normal with variance 1/d."""
        return torch.empty(count, width).normal_(0, 1 / math.sqrt(width), generator=gen)

    def directions(self, h: Tensor, y: Tensor, gen: torch.Generator) -> Tensor:
        """The centres of a k-means of each class's normalised embeddings; repeated if a class has too few."""
        from sklearn.cluster import KMeans  # slow to import, and only this needs it

        h, y = F.normalize(h.double(), dim=1).cpu(), y.cpu()
        found = []
        for c in range(int(y.max()) + 1):
            own = np.unique(h[y == c].numpy(), axis=0)  # k-means warns of duplicate points
            count = min(self.per_class, len(own))
            seed = int(torch.randint(2**31, (), generator=gen))
            made = torch.from_numpy(KMeans(count, n_init=10, random_state=seed).fit(own).cluster_centers_)
            found.append(made[torch.arange(self.per_class) % count])
        return torch.cat(found).to(self.new)

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings, the similarities without scale, and the scale."""
        cos = F.normalize(h, dim=1) @ F.normalize(self.rows(), dim=1).T
        near = (cos if self.cosine else 2 * cos - 2).view(len(h), -1, self.per_class)
        similarity = (near.softmax(2) * near).sum(2)
        return self.scale * similarity, {"similarity": similarity, "scale": self.scale.expand(len(h))}
