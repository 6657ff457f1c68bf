"""Mnemonics (Liu et al., 2020): exemplars whose pixels are learned, around LwF, iCaRL or LUCIR."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import sum_by_class
from ..data.memory import EVERYTHING, rank_in_class
from ..errors import UsageError
from ..method import Method
from ..nets import Batch
from ..nets.backbones import Backbone, add_scales, choose_scale
from ..nets.heads import CosineHead, Head, imprint_rows
from ..remedies import Standard
from ..settings import number
from ..step import CHOOSE, Finetune, Group, More, Plan, Recipe, Shape, Stage, Stages, Step
from .around import Around
from .icarl import ICaRL, flip
from .lucir import LUCIR

NORMS = ("backbone.*weight", "backbone.*bias", "head.new", "head.scale")
"""what every step trains: batch norms, new rows and the scale; of convolutions nothing is called weight or bias"""
KERNELS = (Group(("backbone.*.kernel",)), Group(NORMS))
SCALES = (Group(("backbone.*.scale", "backbone.*.shift")), Group(NORMS))


class OpenHead(CosineHead):
    """A cosine classifier that shows its rows and its scale, for an inner step."""

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of a batch of embeddings, the cosines, the rows and σ."""
        z, extra = super().forward(h, maps)
        shown = {"rows": self.rows().expand(len(h), -1, -1), "scale": self.scale.expand(len(h))}
        return z, {**extra, **shown}


@dataclass(frozen=True)
class Mnemonics(Around):
    """Exemplars are learned pixels. After the base step kernels are frozen, and a factor and an offset of each learned.

    As released: for one epoch the new exemplars follow the gradient of the cross-entropy of cos(h, μ_y), with μ the
    class means of the exemplars. As in the paper, which is reconstructed: from the exemplars E one step is taken on the
    classifier's rows, W' = W − a ∇ L(W; E), and E follows the gradient of L(W'; new images); each half of the old
    exemplars likewise that of L(W'; other half), at the same time; then the classifier is fine-tuned on all of them.
    The classifier is LUCIR's. Unlike in the authors' code, exemplars stay pixels: rounded, and clipped to 0 and 255.
    """

    hosts = ("lwf", "icarl", "lucir")
    least_memory = 1
    default_memory: ClassVar[str] = "20"
    # By arithmetic: 130 small kernels beside a step's 300 for factors, and pixels are learned without our own kernels.
    cost: ClassVar[Any] = property(lambda self: self.host.cost * (2.3 if self.mode == "paper" else 1.4))
    host: Method = field(default_factory=ICaRL)
    """the method that it wraps"""
    mode: Literal["released", "paper"] = "released"
    """as in the authors' code, or as in their paper, which is reconstructed and meant for LUCIR"""
    exemplar_epochs: int = number(0, whole=True, least=0)
    """passes in which exemplars are learned; 0 for 1 as released, or 10 as in the paper"""
    inner_lr: float = number(1.0, above=0, most=1e6)
    """as in the paper: learning rate of the step that is taken on the classifier's rows"""

    def check(self, *shares: int) -> None:
        """Refuse a memory of all images: those in memory are learned all at once."""
        super().check(*shares)
        if EVERYTHING in shares:
            raise UsageError(
                "mnemonics learns the pixels of all images in memory at once, so that it cannot keep every image: use "
                "--memory 20, in Python memory=20"
            )

    def stages(self, plan: Plan) -> Stages:
        """The host's, with pixels learned after the choice, and balanced fine-tuning as in the paper."""
        train, _, *rest = self.host.stages(plan)
        assert isinstance(train, Stage)
        train = replace(train, groups=SCALES if plan.t else KERNELS)
        if plan.keep < 1:
            return (train, CHOOSE, *rest)
        learn = Stage(
            "mnemonics", self.pixel_recipe(train.recipe), (Group(("state.pixels",)),), objective=self.pixel_objective,
            teacher=None, batch_norm="eval", remedy=Standard(),
        )  # fmt: skip
        balances = self.mode == "paper" and plan.t and self.remedy.keeps_finetuning
        balance = replace(Finetune(20, 0.01, weight_decay=5e-4).stage(train.recipe, Standard()), name="balance")
        return (train, CHOOSE, learn, *((balance,) if balances else ()), *rest)

    def pixel_recipe(self, own: Recipe) -> Recipe:
        """How normalised pixels are optimised; the rate halves after every epoch, or after every tenth."""
        lr, decay, each, epochs = (1e-5, 5e-4, 1, 1) if self.mode == "released" else (0.01, 0.0, 10, 10)
        epochs = self.exemplar_epochs or epochs
        falls = tuple(k / epochs for k in range(each, epochs, each))
        return Recipe(epochs, lr, falls, 0.5, batch=own.batch, weight_decay=decay, last=own.last)

    def pixel_objective(self, s: Step, b: Batch) -> Tensor:
        """The loss of a batch that the pixels are to lower, as released or as in the paper (its eqs. 8 to 10)."""
        assert b.more is not None
        own, y = b.more.out, b.more.y
        if self.mode == "released":
            new = F.one_hot(y - s.n_old, s.sizes[-1]).to(own.h.dtype)  # the means of old classes are fixed
            means = torch.cat([s.state["means of old"], new.T @ own.h / new.sum(0)[:, None]])
            return F.cross_entropy(F.normalize(b.out.h, dim=1) @ F.normalize(means, dim=1).T, b.y)
        W, scale, part = b.out.extra["rows"][0], b.out.extra["scale"][0], s.state["part"]
        ahead = [step_rows(W, scale, own.h, y, part == k, self.inner_lr) for k in range(3)]
        loss = classify_some(ahead[0], scale, b.out.h, b.y, b.y >= s.n_old)
        for k, other in ((1, 2), (2, 1)):
            loss = loss + classify_some(ahead[k], scale, own.h.detach(), y, part == other)
        return loss

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        """All exemplars that are learned, as they are, in every batch."""
        if "pixels" not in s.state or s.epoch is None:
            return self.host.more(s, which, gen)
        learned = torch.arange(len(s.memory), device=which.device)
        if self.mode == "released":
            learned = learned[s.images.y[s.memory] >= s.n_old]
        where = learned.expand(len(which), -1)
        drawn = s.epoch.crop.draw_nothing(tuple(where.shape), where.device)
        return More(where, teacher=False, pixels="pixels", normalised=True, drawn=drawn)

    def enter(self, s: Step, stage: Stage) -> None:
        """Lay out the pixels, and of the old exemplars their means as released, or the half of each as in the paper."""
        self.host.enter(s, stage)
        if stage.name != "mnemonics":
            return
        y = s.images.y[s.memory]
        s.state["pixels"] = (s.images.take_squares(s.memory) - s.net.mean) / s.net.std
        if self.mode == "paper":
            s.state["part"] = torch.where(y < s.n_old, 1 + rank_in_class(y) % 2, 0)
            return
        s.state["means of old"] = torch.zeros(0, s.net.backbone.width, device=y.device)
        if s.t:
            old = s.memory[y < s.n_old]
            views = (None, flip) if getattr(self.host, "mirror", True) else (None,)  # as the host predicts
            h = torch.stack([F.normalize(s.embed(s.net, old, view), dim=1) for view in views]).sum(0)
            s.state["means of old"] = sum_by_class(h, s.images.y[old], s.n_old)

    def note(self, s: Step, b: Batch) -> None:
        """As in the paper, pixels stay within their range after every step."""
        self.host.note(s, b)
        if "pixels" in s.state and self.mode == "paper":
            s.state["pixels"].clamp_(-s.net.mean / s.net.std, (255 - s.net.mean) / s.net.std)

    def leave(self, s: Step, stage: Stage) -> Tensor | None:
        """Hand the exemplars back as pixels."""
        if stage.name != "mnemonics":
            return self.host.leave(s, stage)
        pixels = (s.state.pop("pixels") * s.net.std + s.net.mean).round().clamp(0, 255).byte()
        if self.mode == "paper":
            del s.state["part"]
            return pixels
        del s.state["means of old"]
        new = s.images.y[s.memory] >= s.n_old
        return torch.where(new[:, None, None, None], pixels, s.images.take_squares(s.memory))

    def backbone(self, shape: Shape) -> Backbone:
        """LUCIR's, with a factor and an offset beside each kernel."""
        return add_scales(LUCIR.backbones[choose_scale(shape)](shape[0]))

    def head(self, width: int) -> Head:
        """σ cos(h, w)."""
        return OpenHead(width)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """As in LUCIR."""
        if getattr(self.host, "imprint", True):
            imprint_rows(head, h, y, gen)

    def at_base(self) -> Method:
        """The same net with the host's base step; nothing else matters yet."""
        return Mnemonics(host=self.host.at_base())


def step_rows(W: Tensor, scale: Tensor, h: Tensor, y: Tensor, some: Tensor, rate: float) -> Tensor:
    """W − rate ∇_W of the mean cross-entropy of σ cos(h, w) over `some` images, which can be differentiated by h."""
    h, unit = F.normalize(h, dim=1), F.normalize(W, dim=1)
    wrong = ((scale * h @ unit.T).softmax(1) - F.one_hot(y, len(W))) * some[:, None] / some.sum().clamp_min(1)
    slope = scale * wrong.T @ h
    length: Tensor = torch.linalg.vector_norm(W, dim=1, keepdim=True)
    return W - rate * (slope - (slope * unit).sum(1, keepdim=True) * unit) / length


def classify_some(W: Tensor, scale: Tensor, h: Tensor, y: Tensor, some: Tensor) -> Tensor:
    """The mean cross-entropy of σ cos(h, w) over `some` images; 0 if there are none."""
    z = scale * F.normalize(h, dim=1) @ F.normalize(W, dim=1).T
    loss: Tensor = (F.cross_entropy(z, y, reduction="none") * some).sum() / some.sum().clamp_min(1)
    return loss
