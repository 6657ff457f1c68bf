"""Remedies against the bias towards new classes, the paper's table 6, for any method.

The weighted losses differ in λ only (see `losses.py`). The others act after the base step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .data.memory import EVERYTHING, oversample
from .errors import UsageError
from .losses import follow_ramp, rescaled_cross_entropy, separated_cross_entropy, weighted_cross_entropy
from .settings import check_fields, name_class, number, spell_amount, spell_number, spell_ramp
from .step import Adapt, Finetune, Plan, Recipe, Stage, Step

TINY, HUGE = 1e-6, 1e6
"""bounds of α and ε: beyond them, λ overflows fp32"""
SMALLEST = 1e-3
"""Meta's α stays at or above this; the paper asks for a positive number only"""
REMEDIES: dict[str, type[Remedy]] = {}
"""the paper's remedies by name; filled below"""


@dataclass(frozen=True)
class Remedy:
    """A remedy against the bias towards new classes. Its fields are its flags."""

    name: ClassVar[str] = ""
    """its name on the command line and in records"""
    keeps_finetuning: ClassVar[bool] = False
    """whether it keeps the method's own loss and fine-tuning"""
    least_memory: ClassVar[int] = 0
    """images of every old class that it needs in memory"""
    cost: ClassVar[float] = 1.0
    """relative training time per image; used to order a queue"""

    def __init_subclass__(cls) -> None:
        """Set the default name."""
        super().__init_subclass__()
        name_class(cls, (*cls.__mro__[1:], *REMEDIES.values()), "remedy")

    def __post_init__(self) -> None:
        check_fields(self)

    def at_base(self) -> Remedy:
        """A remedy with the same base step, if all classes have equally many images."""
        return Standard()

    def check_memory(self, *shares: int) -> None:
        """Refuse an unsuitable memory; `shares` are the numbers of images per old class in later steps."""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """λ of every class: `past` marks the old ones, n counts the training images."""
        return torch.ones_like(n)

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """The classification loss of a batch; None for the method's own."""
        return None

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """The images of one epoch in order, as indices into s.where; None for each image once."""
        return None

    def hold(self, plan: Plan) -> int:
        """Number of images of every class to hold out of training."""
        return 0

    def stages(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """The stages after the choice of exemplars; `own` is the recipe of the step."""
        return ()

    def enter(self, s: Step) -> None:
        """Called when the step begins, to initialise s.state."""

    def adapt(self) -> Adapt | None:
        """What is learned one step ahead on the held-out images; None for nothing."""
        return None

    def update_most_often(self) -> Remedy:
        """The same remedy, which adapts in as many batches as it can: that shows what an update costs."""
        return self


@dataclass(frozen=True)
class Standard(Remedy):
    """Plain softmax cross-entropy: λ = 1."""

    name: ClassVar[str] = "standard"
    keeps_finetuning: ClassVar[bool] = True


@dataclass(frozen=True)
class Weighted(Remedy):
    """A weighted softmax: cross_entropy(z + log λ, y)."""

    name: ClassVar[str] = ""

    def at_base(self) -> Remedy:
        """Balanced: with equal counts, all weighted losses are the same."""
        return Balanced()

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Eq. 4."""
        return weighted_cross_entropy(z, y, s.lam)


@dataclass(frozen=True)
class Balanced(Weighted):
    """Balanced softmax cross-entropy (eqs. 3 and 5): λ_i = n_i, times α for the old classes."""

    name: ClassVar[str] = "balanced"
    alpha: float | str = 1.0
    """importance of old classes in the softmax; below 1, old classes are protected more; 0.1:1 changes from 0.1 in the
    first epoch of a step to 1 in its last, 0.1:1:cosine as half a cosine"""

    def __post_init__(self) -> None:
        super().__post_init__()
        spell = partial(spell_number, least=TINY, most=HUGE)
        object.__setattr__(self, "alpha", spell_ramp("alpha", self.alpha, spell))

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """α n_i for old classes, n_i for new ones."""
        return torch.where(past, follow_ramp(self.alpha, s.done, float) * n, n)


@dataclass(frozen=True)
class Relaxed(Weighted):
    """Relaxed balanced softmax cross-entropy (eq. 6), made for learning without memory: λ_old = ε."""

    name: ClassVar[str] = "relaxed"
    epsilon: float | str = "0.2%"
    """λ of the old classes: a count, or a percentage of the images of the largest new class; 2%:0.2% changes from 2% in
    the first epoch of a step to 0.2% in its last, 2%:0.2%:cosine as half a cosine"""

    def __post_init__(self) -> None:
        spell = partial(spell_amount, least=TINY, most=HUGE)
        object.__setattr__(self, "epsilon", spell_ramp("epsilon", self.epsilon, spell))

    def value(self, largest: float | Tensor, done: float = 0.0) -> float | Tensor:
        """ε as a count, where the largest new class has `largest` images."""

        def count(word: str) -> float | Tensor:
            return largest * (float(word.removesuffix("%")) / 100) if word.endswith("%") else float(word)

        return follow_ramp(self.epsilon, done, count)

    def check_memory(self, *shares: int) -> None:
        """Refuse ε = 0 with a memory."""
        if 0 in (self.value(1.0), self.value(1.0, 1.0)) and max(shares, default=0) > 0:
            raise UsageError(
                "epsilon 0 leaves old classes out of the softmax, so that an image from memory has an infinite loss: "
                "use memory 0, an epsilon above 0, or the balanced loss"
            )

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """ε for old classes, n_i for new ones."""
        largest = torch.where(past, 0, n).max()
        return torch.where(past, self.value(largest, s.done), n)


@dataclass(frozen=True)
class OldImages(Remedy):
    """A remedy that needs images of old classes."""

    name: ClassVar[str] = ""
    least_memory: ClassVar[int] = 1


@dataclass(frozen=True)
class MemoryOversampling(OldImages):
    """Oversamples old images to a fixed share of an epoch."""

    name: ClassVar[str] = "memory-oversampling"
    keeps_finetuning: ClassVar[bool] = True
    share: float = number(0.5, above=0, most=0.99)
    """fraction of old images in an epoch"""

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """Each new image once, and repeated old ones."""
        if s.t == 0:
            return None
        kind = (s.y >= s.n_old).long()
        new = int(kind.sum())
        return oversample(kind, kind.new_tensor([round(new * self.share / (1 - self.share)), new]), gen)


@dataclass(frozen=True)
class ClassOversampling(OldImages):
    """Oversamples every class to the size of the largest."""

    name: ClassVar[str] = "class-oversampling"
    keeps_finetuning: ClassVar[bool] = True

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """Equally many images of each class."""
        if s.t == 0:
            return None
        counts = torch.bincount(s.y)
        return oversample(s.y, torch.where(counts > 0, counts.max(), 0), gen)


@dataclass(frozen=True)
class LossRescaling(OldImages):
    """Weights the loss of an image by 1 / n_y."""

    name: ClassVar[str] = "loss-rescaling"

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Cross-entropy weighted by 1 / n_y."""
        return rescaled_cross_entropy(z, y, s.n) if s.t > 0 else None


@dataclass(frozen=True)
class BalancedFinetuning(OldImages):
    """Fine-tunes the classifier on the memory after each step (Castro et al., 2018)."""

    name: ClassVar[str] = "balanced-finetuning"
    finetune: Finetune = Finetune(distil=False)
    """settings of the fine-tuning"""

    def __post_init__(self) -> None:
        if not self.finetune.epochs:
            raise UsageError("finetune-epochs must be 1 or more with the remedy balanced-finetuning")

    def stages(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """The fine-tuning, with the standard loss."""
        return (self.finetune.stage(own, Standard()),)


@dataclass(frozen=True)
class SeparatedSoftmax(MemoryOversampling):
    """A softmax over old classes for old images, and over new classes for new ones (SS-IL, Ahn et al., 2021)."""

    name: ClassVar[str] = "separated-softmax"
    keeps_finetuning: ClassVar[bool] = False
    mean: Literal["each", "all"] = "each"
    """each: sum of the means over old and over new images; all: mean over all images, as in SS-IL"""

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Separated cross-entropy."""
        return separated_cross_entropy(z, y, s.n_old, self.mean) if s.t > 0 else None


@dataclass(frozen=True)
class Meta(Weighted):
    """Meta balanced softmax cross-entropy (Algorithm 1): Balanced, with α learned on a balanced hold-out B_t."""

    name: ClassVar[str] = "meta"
    least_memory: ClassVar[int] = 2  # one to train on, one to hold out
    cost: ClassVar[float] = 102_100 / 83_200
    alpha_lr: float = number(10.0, least=0, most=1e12)
    """learning rate of α, which the paper does not print: see results/README.md"""
    every: int = number(10, whole=True, least=1)
    """optimisation steps between updates of α"""
    hold_out: float = number(0.1, above=0, below=1)
    """fraction of the memory per class to hold out for B_t; at least one image of every class"""
    count: Literal["train", "all"] = "train"
    """what n_i counts: training images, or also the held-out ones"""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """α n_i for old classes, n_i for new ones; α is 1 before it is learned."""
        if self.count == "all":
            n = n + self.hold(s)  # of every class: no sum over images, which a CUDA graph could not hold
        alpha = s.state.get("alpha")
        return torch.where(past, n if alpha is None else alpha * n, n)

    def hold(self, plan: Plan) -> int:
        """A fraction of the memory per class, or of the smallest class if all images are kept."""
        if plan.t == 0:
            return 0
        m = min(plan.m, min(plan.counts)) if plan.m >= EVERYTHING else plan.m
        return max(1, math.floor(self.hold_out * m + 1e-9))

    def enter(self, s: Step) -> None:
        """Initialise α = 1, after the base step."""
        if s.t > 0:
            s.state["alpha"] = torch.ones((), device=s.n.device)

    def adapt(self) -> Adapt | None:
        """α, by the plain cross-entropy of B_t."""
        return Adapt("alpha", self.alpha_lr, SMALLEST, self.every, 128)

    def update_most_often(self) -> Remedy:
        """An update in every batch."""
        return replace(self, every=1)


PAPER = (
    Standard, Balanced, Relaxed, Meta, MemoryOversampling, ClassOversampling, LossRescaling, BalancedFinetuning,
    SeparatedSoftmax,
)  # fmt: skip
REMEDIES |= {kind.name: kind for kind in PAPER}
