"""What helps against the bias towards new classes: one axis, the paper's table 6, for any method.

The weighted losses differ in λ only (see `losses.py`). The other remedies act after the base step, with the standard
loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .data.memory import EVERYTHING, oversample
from .errors import UsageError, check
from .losses import rescaled_cross_entropy, separated_cross_entropy, weighted_cross_entropy
from .settings import check_fields, name_class, number
from .step import Adapt, Finetune, Plan, Recipe, Stage, Step

TINY, HUGE = 1e-6, 1e6
"""bounds of α and ε: beyond them, λ times a count would leave fp32"""
SMALLEST = 1e-3
"""Meta's α stays at or above this; the paper asks for a positive number only"""
REMEDIES: dict[str, type[Remedy]] = {}
"""the paper's, by name; none until they are defined below"""


@dataclass(frozen=True)
class Remedy:
    """Something against the bias towards new classes. Its fields are its flags."""

    name: ClassVar[str] = ""
    """what it is called at the command line and in records"""
    keeps_finetuning: ClassVar[bool] = False
    """whether a method's own loss and fine-tuning stay"""
    least_memory: ClassVar[int] = 0
    """images of every old class that it needs"""
    cost: ClassVar[float] = 1.0
    """how much longer an image takes, for the order of a queue"""

    def __init_subclass__(cls) -> None:
        """A remedy without a name of its own is called like its class."""
        super().__init_subclass__()
        name_class(cls, (*cls.__mro__[1:], *REMEDIES.values()), "remedy")

    def __post_init__(self) -> None:
        check_fields(self)

    def at_base(self) -> Remedy:
        """A remedy with the same base step, where every class has as many images as any other."""
        return Standard()

    def check_memory(self, *shares: int) -> None:
        """Refuse a memory that this cannot do with: `shares` are images per old class that will occur."""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """λ of every class: `past` marks the old ones, n counts the training images."""
        return torch.ones_like(n)

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """The classification loss of a batch; None where the method's own stands."""
        return None

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """Which of the images s.where make one epoch, in which order, as indices into it; None for each once."""
        return None

    def hold(self, plan: Plan) -> int:
        """How many images of every class are held out of training."""
        return 0

    def stages(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """What is trained once the exemplars have been chosen; `own` is the recipe of the step."""
        return ()

    def enter(self, s: Step) -> None:
        """Put into s.state what is learned besides the net, as the step begins."""

    def adapt(self) -> Adapt | None:
        """What is learned besides the weights while they are trained, where images are held out."""
        return None


@dataclass(frozen=True)
class Standard(Remedy):
    """Softmax cross-entropy as everybody knows it: λ = 1."""

    name: ClassVar[str] = "standard"
    keeps_finetuning: ClassVar[bool] = True


@dataclass(frozen=True)
class Weighted(Remedy):
    """A weighted softmax: cross_entropy(z + log λ, y)."""

    name: ClassVar[str] = ""

    def at_base(self) -> Remedy:
        """Any of these: with equal counts every λ is the same."""
        return Balanced()

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Eq. 4."""
        return weighted_cross_entropy(z, y, s.lam)


@dataclass(frozen=True)
class Balanced(Weighted):
    """Balanced softmax cross-entropy (eqs. 3 and 5): λ_i = n_i, times α for the old classes."""

    name: ClassVar[str] = "balanced"
    alpha: float = number(1.0, least=TINY, most=HUGE)
    """importance of old classes in the softmax; below 1, old classes are protected more"""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """α n_i for old classes, n_i for new ones."""
        return torch.where(past, self.alpha * n, n)


@dataclass(frozen=True)
class Relaxed(Weighted):
    """Relaxed balanced softmax cross-entropy (eq. 6), made for learning without memory: λ_old = ε."""

    name: ClassVar[str] = "relaxed"
    epsilon: float | str = "0.2%"
    """λ of the old classes: a count, or a percentage of the images of the largest new class"""

    def __post_init__(self) -> None:
        text = str(self.epsilon).strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            raise UsageError(f"epsilon must be a count or a percentage such as 0.2%, not {text!r}") from None
        check("epsilon", number, least=0, most=HUGE)
        if number != 0:
            check("an epsilon that is not 0", number, least=TINY)
        # One way to write it, so that equal settings are equal: 1 and "1" and "1.0", or "0.2%" and "0.20 %".
        percentage = repr(number + 0.0).removesuffix(".0") + "%"  # adding 0 makes −0 a 0
        object.__setattr__(self, "epsilon", percentage if text.endswith("%") else number + 0.0)

    def value(self, largest: float | Tensor) -> float | Tensor:
        """ε as a count, where the largest new class has `largest` images."""
        if isinstance(self.epsilon, str):
            return largest * (float(self.epsilon.removesuffix("%")) / 100)
        return self.epsilon

    def check_memory(self, *shares: int) -> None:
        """ε = 0 goes with no memory only."""
        if self.value(1.0) == 0 and max(shares, default=0) > 0:
            raise UsageError(
                "epsilon 0 leaves old classes out of the softmax, so that an image from memory has an infinite loss: "
                "use memory 0, an epsilon above 0, or the balanced loss"
            )

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """ε for old classes, n_i for new ones."""
        largest = torch.where(past, 0, n).max()
        return torch.where(past, self.value(largest), n)


@dataclass(frozen=True)
class OldImages(Remedy):
    """A remedy with the standard loss, which acts after the base step and needs images of old classes."""

    name: ClassVar[str] = ""
    least_memory: ClassVar[int] = 1


@dataclass(frozen=True)
class MemoryOversampling(OldImages):
    """An epoch has a certain share of old images, each of them as often as the others."""

    name: ClassVar[str] = "memory-oversampling"
    keeps_finetuning: ClassVar[bool] = True
    share: float = number(0.5, above=0, most=0.99)
    """how much of an epoch is old images"""

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """Each new image once, and old ones beside them."""
        if s.t == 0:
            return None
        kind = (s.y >= s.n_old).long()
        new = int(kind.sum())
        return oversample(kind, kind.new_tensor([round(new * self.share / (1 - self.share)), new]), gen)


@dataclass(frozen=True)
class ClassOversampling(OldImages):
    """An epoch has as many images of each class as the largest has."""

    name: ClassVar[str] = "class-oversampling"
    keeps_finetuning: ClassVar[bool] = True

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor | None:
        """As many of each class."""
        if s.t == 0:
            return None
        counts = torch.bincount(s.y)
        return oversample(s.y, torch.where(counts > 0, counts.max(), 0), gen)


@dataclass(frozen=True)
class LossRescaling(OldImages):
    """An image counts in the loss as the inverse of the number of images of its class."""

    name: ClassVar[str] = "loss-rescaling"

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Weighted by 1 / n_y."""
        return rescaled_cross_entropy(z, y, s.n) if s.t > 0 else None


@dataclass(frozen=True)
class BalancedFinetuning(OldImages):
    """After each step the classifier is trained once more, on the memory alone (Castro et al., 2018)."""

    name: ClassVar[str] = "balanced-finetuning"
    finetune: Finetune = Finetune(distil=False)
    """how"""

    def __post_init__(self) -> None:
        if not self.finetune.epochs:
            raise UsageError(
                "finetune-epochs must be 1 or more with the remedy balanced-finetuning, which is just that"
            )

    def stages(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """One stage, with the standard loss."""
        return (self.finetune.stage(own, Standard()),)


@dataclass(frozen=True)
class SeparatedSoftmax(MemoryOversampling):
    """Old images compete among old classes only, and new ones among new classes (SS-IL, Ahn et al., 2021)."""

    name: ClassVar[str] = "separated-softmax"
    keeps_finetuning: ClassVar[bool] = False
    mean: Literal["each", "all"] = "each"
    """a mean over old and one over new images, which are added; or one mean over all images, as in SS-IL"""

    def ce(self, z: Tensor, y: Tensor, s: Step) -> Tensor | None:
        """Among the own kind."""
        return separated_cross_entropy(z, y, s.n_old, self.mean) if s.t > 0 else None


@dataclass(frozen=True)
class Meta(Weighted):
    """Meta balanced softmax cross-entropy (Algorithm 1): Balanced, with α learned on a balanced hold-out B_t."""

    name: ClassVar[str] = "meta"
    least_memory: ClassVar[int] = 2  # one to train on, one to hold out
    cost: ClassVar[float] = 102_100 / 83_200
    alpha_lr: float = number(10.0, least=0, most=1e12)
    """learning rate of α; not in the paper, whose algorithm prints none (that is, 1): see results/README.md"""
    every: int = number(10, whole=True, least=1)
    """optimisation steps from one update of α to the next"""
    hold_out: float = number(0.1, above=0, below=1)
    """fraction of the memory per class that is held out for B_t, at least one image of every class"""
    count: Literal["train", "all"] = "train"
    """what n_i counts: the images trained on, or these and the held-out ones"""

    def lam(self, n: Tensor, past: Tensor, s: Step) -> Tensor:
        """α n_i for old classes, n_i for new ones; α is 1 before it is learned."""
        if self.count == "all":
            n = n + self.hold(s)  # of every class: no sum over images, which a CUDA graph could not hold
        alpha = s.state.get("alpha")
        return torch.where(past, n if alpha is None else alpha * n, n)

    def hold(self, plan: Plan) -> int:
        """So many of every class as are a fraction of the memory's; of the smallest class, where all is kept."""
        if plan.t == 0:
            return 0
        m = min(plan.m, min(plan.counts)) if plan.m >= EVERYTHING else plan.m
        return max(1, math.floor(self.hold_out * m + 1e-9))

    def enter(self, s: Step) -> None:
        """α = 1, which is not learned in the base step."""
        if s.t > 0:
            s.state["alpha"] = torch.ones((), device=s.n.device)

    def adapt(self) -> Adapt | None:
        """α, by the plain cross-entropy of B_t."""
        return Adapt("alpha", self.alpha_lr, SMALLEST, self.every, 128)


PAPER = (
    Standard, Balanced, Relaxed, Meta, MemoryOversampling, ClassOversampling, LossRescaling, BalancedFinetuning,
    SeparatedSoftmax,
)  # fmt: skip
REMEDIES |= {kind.name: kind for kind in PAPER}
