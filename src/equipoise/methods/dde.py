"""DDE (Hu et al., 2021): distilling the causal effect of data, around LUCIR or PODNet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import colliding_cross_entropy
from ..method import Method
from ..nets import Batch, Out
from ..remedies import Remedy
from ..settings import number
from ..step import Learned, More, Stage, Step
from .around import Around
from .lucir import LUCIR

CHUNK = 1024
"""images whose similarities to all candidates are computed at once"""


@dataclass(frozen=True)
class Colliding(Remedy):
    """Takes the remedy's place in the host's loss: its softmax, averaged with those of the image's neighbours."""

    name: ClassVar[str] = ""
    near: Tensor
    """z of the neighbours, image by image"""

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """L_c of DDE."""
        return colliding_cross_entropy(z, self.near, y, s.lam)


@dataclass(frozen=True)
class DDE(Around):
    """L_c = −log q_y, q = ½ p(x) + ½ mean_k p(x_k), in place of the host's; then z ← z − a cos(h, d) z(d).

    The colliding effect: x_1, ..., x_10 are the new images nearest to x by the previous net, in that epoch's
    augmentation, and are not differentiated. λ is in each softmax p. The momentum effect: d is the direction of
    d ← 0.9 d + mean h over the batches of the step, and z(d) what the classifier makes of it. As in the authors' code
    around LUCIR. They did not release theirs around PODNet: there, q replaces NCA, and z(d) is of its own classifier.
    Fine-tuning on the memory is the host's.
    """

    title = "DDE"
    remedies = ("balanced", "relaxed", "meta", "memory-oversampling", "class-oversampling", "balanced-finetuning")
    reason = "its loss mixes softmaxes over all classes"
    hosts = ("lucir", "podnet")
    cost: ClassVar[float] = 4.0  # by arithmetic: ten more forward passes beside the four or so of a host
    # Around LUCIR, the authors' command for ImageNet-Subset has 5 where LUCIR's own has 10.
    imagenet: ClassVar[Any] = property(lambda self: self.weigh_host(5.0))
    whole_imagenet: ClassVar[Any] = property(lambda self: {"neighbours": 1, **self.weigh_host(10.0)})
    host: Method = field(default_factory=LUCIR)
    """the method that it wraps"""
    neighbours: int = number(10, whole=True, least=1)
    """images whose softmaxes are mixed in; fewer new images repeat. The original has 1 for the whole of ImageNet"""
    effect: float = number(0.5, least=0, most=1e6)
    """a, how much of the momentum effect is removed from predictions"""

    def weigh_host(self, lambda_base: float) -> dict[str, Any]:
        """The change of LUCIR's weight, if that is the host."""
        return {"host": {"lambda_base": lambda_base}} if isinstance(self.host, LUCIR) else {}

    def objective(self, s: Step, b: Batch) -> Tensor:
        """The host's loss, with q in its softmax."""
        host = self.host if b.more is None else self.host.with_remedy(Colliding(b.more.out.z))
        return host.objective(s, b)

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        """The neighbours of each image, augmented as they are in this epoch."""
        if s.teacher is None or s.epoch is None or s.where is s.memory:
            return None
        near = self.find_neighbours(s, which.numel()).view(len(which), -1)
        return More(s.epoch.where[near], gradient=False, teacher=False, drawn=s.epoch.drawn[near])

    def find_neighbours(self, s: Step, count: int) -> Tensor:
        """Of each of the next images of the epoch, the nearest new ones but itself (count, neighbours): numbers."""
        assert s.teacher is not None and s.epoch is not None
        h = F.normalize(s.embed(s.teacher, s.epoch), dim=1)
        every = torch.arange(len(h), device=h.device)
        new = every[s.images.y[s.epoch.where] >= s.n_old]
        new = new if len(new) > 1 else every
        found = []
        for own in torch.split(every[s.epoch.first : s.epoch.first + count], CHUNK):
            near = (h[own] @ h[new].T).masked_fill_(own[:, None] == new, -torch.inf)
            found.append(new[near.topk(min(self.neighbours, len(new) - 1)).indices])
        nearest = torch.cat(found)
        return nearest[:, torch.arange(self.neighbours, device=h.device) % nearest.shape[1]]

    def enter(self, s: Step, stage: Stage) -> None:
        """Begin the moving average anew in each step; none in the base step."""
        self.host.enter(s, stage)
        if s.t and stage.name == "train":
            s.state["direction"] = torch.zeros(s.net.backbone.width, device=s.n.device)

    def note(self, s: Step, b: Batch) -> None:
        """d ← 0.9 d + mean h, while all images are trained on."""
        self.host.note(s, b)
        if b.more is not None:
            s.state["direction"].mul_(0.9).add_(b.out.h.mean(0))

    def after(self, s: Step) -> None:
        """Note d at unit length, and z(d)."""
        self.host.after(s)
        if s.t:
            s.state["direction"] = F.normalize(s.state["direction"], dim=0)
            s.state["effect"] = s.net.head(s.state["direction"][None], [])[0][0]

    def scores(self, out: Out, known: Learned) -> Tensor:
        """z − a cos(h, d) z(d), once a step is over."""
        z = self.host.scores(out, known)
        effect = known.state.get("effect")
        if effect is None or len(effect) < z.shape[1]:
            return z
        return z - self.effect * F.cosine_similarity(out.h, known.state["direction"][None])[:, None] * effect

    def at_base(self) -> Method:
        """The host's."""
        return self.host.at_base()
