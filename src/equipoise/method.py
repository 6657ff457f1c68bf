"""What a method is, and all that it may see of a step. Read this before a file in `methods/`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from . import remedies
from .data.images import Images
from .errors import UsageError, check, check_choice
from .losses import Loss, Standard
from .nets import Net, Out
from .nets.backbones import Backbone, ResNet18, ResNet32, SmallNet, scale
from .nets.heads import Head, LinearHead
from .remedies import HALF, Mitigation, separates
from .settings import later


@dataclass(frozen=True)
class Recipe:
    """How one step is optimised: SGD with momentum, and a learning rate that falls."""

    epochs: int = 250
    """passes over the step's training images"""
    lr: float = 0.1
    """learning rate at the start of every step"""
    milestones: tuple[float, ...] = (0.4, 0.6, 0.8)
    """when the learning rate falls, as fractions of the epochs (0.4 of 250: after epoch 100)"""
    decay: float = 0.1
    """what the learning rate is multiplied by at a milestone"""
    schedule: Literal["steps", "cosine", "cosine-late"] = "steps"
    """how the learning rate falls: at milestones, as a cosine to 0, or as one an epoch late, as in PODNet's code"""
    batch: int = 128
    """images in a batch; a smaller training set is one batch"""
    momentum: float = 0.9
    """momentum of SGD"""
    weight_decay: float = 2e-4
    """L2 penalty of SGD, on all parameters"""
    clamp: float = 0.0
    """bound on the size of each number of the gradient; 0 for none"""
    last: Literal["joined", "short"] = later("joined")
    """images that fill no batch at the end of an epoch, of a refit too: joined with the next epoch's, or short"""

    def __post_init__(self) -> None:
        check("epochs", self.epochs, least=1, whole=True)
        check("lr", self.lr, above=0, most=1e30)
        if not isinstance(self.milestones, tuple):
            raise UsageError(f"milestones must be a tuple of fractions of the epochs, not {self.milestones!r}")
        for milestone in self.milestones:
            check("each of the milestones, a fraction of the epochs,", milestone, above=0, most=1)
        check("decay", self.decay, above=0, most=1)
        check("batch", self.batch, least=2, whole=True)  # with one image a batch, its own statistics are all there is
        check("momentum", self.momentum, least=0, below=1)
        check("weight-decay", self.weight_decay, least=0, most=1e12)
        check("clamp", self.clamp, least=0)
        check_choice("last", self.last, "joined", "short")
        check_choice("schedule", self.schedule, "steps", "cosine", "cosine-late")

    def lr_at(self, epoch: int) -> float:
        """The learning rate in an epoch, counted from 0."""
        if self.schedule != "steps":
            done = epoch if self.schedule == "cosine" else max(0, epoch - 1)
            return self.lr * (1 + math.cos(math.pi * done / self.epochs)) / 2
        return self.lr * self.decay ** sum(epoch >= max(1, round(m * self.epochs)) for m in self.milestones)


@dataclass(frozen=True)
class Refit:
    """A second stage of a step, on the memory alone, which is balanced: the classifier is trained once more."""

    recipe: Recipe
    """how"""
    what: Literal["classifier", "all"] = "classifier"
    """which weights are trained: those of the classifier, rows of old classes included, or all of the net"""
    statistics: Literal["move", "rest"] = "rest"
    """whether batch norms use and move the statistics of batches, or rest"""
    taught: bool = True
    """whether the previous net goes on teaching, or the classification loss is all there is"""

    def __post_init__(self) -> None:
        check_choice("what is trained", self.what, "classifier", "all")
        check_choice("statistics", self.statistics, "move", "rest")
        check_choice("taught", self.taught, True, False)


REFIT_RECIPE = ("epochs", "lr", "milestones", "decay", "batch", "weight_decay")
REFIT = (*REFIT_RECIPE, "what", "statistics", "taught")
"""what the user may say of a refit, as settings of a method called refit_epochs and so on"""


@dataclass
class Step:
    """All that a method may see of step t, in the paper's letters. Tensors are on the device of the training."""

    t: int
    """0 is the base step"""
    n_old: int
    """N_{t-1}, classes learned before; they come first"""
    sizes: tuple[int, ...]
    """classes of each step so far, this one included"""
    n: Tensor
    """n_i, training images of each class"""
    lam: Tensor
    """λ_i, the weights in the softmax; Meta differentiates through replace(s, lam=λ(α))"""
    data: Images
    """D_t: the images to train on, those of the memory included"""
    held: Images | None
    """B_t, the balanced hold-out, where the loss asks for one"""
    net: Net
    """θ_t; for everything but the objective, which must not read it: Meta evaluates it at other weights"""
    teacher: Net | None
    """θ_{t-1}, frozen; None in the base step"""
    state: dict[str, Tensor] = field(default_factory=dict)
    """what is learned besides the net (Meta's α): on the device, and part of every checkpoint"""

    @property
    def N(self) -> int:
        """N_t, classes so far."""
        return len(self.n)

    @property
    def past(self) -> Tensor:
        """Marks the old classes."""
        return torch.arange(self.N, device=self.n.device) < self.n_old


@dataclass(frozen=True)
class Method:
    """A way to learn classes step by step. Its fields are its hyper-parameters, its flags and its record at once.

    Only `objective` must be written; the rest has defaults. A subclass in `methods/` becomes a word of
    `equipoise run`; one from elsewhere needs no registration: `Learner(Mine())`, `run(Run(method=Mine()))`.
    """

    name: ClassVar[str] = ""
    """what it is called at the command line and in records"""

    mitigations: ClassVar[tuple[str, ...]] = remedies.MITIGATIONS
    """those it goes with"""
    others: ClassVar[str] = ""
    """why not with others"""
    fresh: ClassVar[bool] = False
    """whether every step begins with a new net, without a teacher"""

    loss: Loss = Standard()
    """the classification loss"""
    mitigation: Mitigation = "none"
    """another remedy for the bias towards new classes, instead of a loss that is one"""
    old_share: float = later(HALF)
    """oversampling (memory-oversampling, separated-softmax): how much of an epoch is old images; SS-IL: 0.2"""
    separated_mean: Literal["each", "all"] = later("each", named=separates)
    """separated softmax: a mean over old and one over new images, which are added, or one mean over all as in SS-IL"""
    refit_epochs: int | None = later(None)
    """refit: passes over the memory; None for the method's own number"""
    refit_lr: float | None = later(None)
    """refit: learning rate at its start; None for the method's own"""
    refit_milestones: tuple[float, ...] | None = later(None)
    """refit: when the learning rate falls, as fractions of its epochs; None for the method's own"""
    refit_decay: float | None = later(None)
    """refit: what the learning rate is multiplied by at a milestone; None for the method's own"""
    refit_batch: int | None = later(None)
    """refit: images in a batch; None for the method's own number"""
    refit_weight_decay: float | None = later(None)
    """refit: L2 penalty; None for the method's own"""
    refit_what: Literal["classifier", "all"] | None = later(None)
    """refit: which weights are trained, the classifier's or all; None for what the method has"""
    refit_statistics: Literal["rest", "move"] | None = later(None)
    """refit: whether batch norms rest or use and move the statistics of batches; None for what the method has"""
    refit_taught: bool | None = later(None)
    """refit: whether the previous net goes on teaching; None for what the method has"""

    def __init_subclass__(cls) -> None:
        """A method without a name of its own is called like its class."""
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def objective(self, s: Step, y: Tensor, out: Out, ref: Out | None) -> Tensor:
        """The whole training loss of a batch with labels y: a pure function of its arguments.

        `out` is the net's output and `ref` the frozen previous net's (None in the base step). On a GPU this is
        recorded once and replayed: no `.item()`, no shape that depends on values, no `if` on a tensor.
        """
        raise TypeError(f"{type(self).__name__} must define objective(s, y, out, ref)")

    def classify(self, z: Tensor, y: Tensor, s: Step) -> Tensor:
        """The classification loss of a batch with logits z and labels y: what `loss` and `mitigation` say."""
        if s.t > 0 and self.mitigation == "loss-rescaling":
            return remedies.rescaled(z, y, s.n)
        if s.t > 0 and separates(self):
            return remedies.separated(z, y, s.n_old, self.separated_mean)
        return self.loss(z, y, s)

    def check_memory(self, *shares: int) -> None:
        """Refuse a memory that this cannot do with: `shares` are images per old class that will occur."""
        self.loss.check_memory(*shares)
        remedies.check(self, *shares)

    def backbone(self, shape: tuple[int, int, int]) -> Backbone:
        """The feature extractor for images of shape (channels, height, width)."""
        kind: type[Backbone] = {"tiny": SmallNet, "small": ResNet32, "large": ResNet18}[scale(shape)]
        return kind(shape[0])

    def head(self, width: int) -> Head:
        """The classifier on embeddings of that width; it starts without classes and is widened step by step."""
        return LinearHead(width)

    def recipe(self, shape: tuple[int, int, int]) -> Recipe:
        """How a step is optimised for images of that shape, unless the user says otherwise."""
        if scale(shape) == "tiny":
            return Recipe(epochs=20, lr=0.05, batch=32)
        if scale(shape) == "large":
            return Recipe(epochs=100, milestones=(0.3, 0.6, 0.8, 0.9), batch=256, weight_decay=1e-4)
        return Recipe()

    def at_base(self) -> Method:
        """A method with the same base step, where every class has as many images as any other.

        Runs share a base step when these are equal. Equal counts make every λ equal, so the loss is no difference.
        """
        refits: dict[str, Any] = {f"refit_{name}": None for name in REFIT}
        return replace(self, loss=Standard(), mitigation="none", old_share=HALF, separated_mean="each", **refits)

    def learns(self, t: int) -> bool:
        """Whether the net is trained in step t; else the step is `after` alone."""
        return True

    def after(self, s: Step, h: Tensor) -> None:
        """Note in s.state what the step's images say, once the net is trained; h are their embeddings.

        s.data are the images that the step brought, without the memory.
        """

    def scores(self, out: Out, state: Mapping[str, Tensor]) -> Tensor:
        """What the largest of is the prediction (batch, N_t); `state` is what `after` noted."""
        return out.z

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """Set the head's rows of new classes, from the embeddings that the previous net gives their images.

        y counts the new classes from 0. Not called in the base step, where there is no previous net.
        """

    def refit(self) -> Refit | None:
        """A second stage after every step but the base step, once the memory has been chosen; None for none.

        Unless the user says otherwise: `refitting` is what is done, and its epochs end as the step's do.
        """
        if self.mitigation == "balanced-finetuning":
            return Refit(Recipe(epochs=20, lr=0.01, milestones=(0.5,)), taught=False)
        return None

    def refitting(self, last: Literal["joined", "short"] = "joined") -> Refit | None:
        """What `refit` says, but for what the user says otherwise; its epochs end as those of the step do: `last`."""
        own = self.refit()
        if own is None:
            return None
        said = {name: value for name in REFIT if (value := getattr(self, f"refit_{name}")) is not None}
        recipe = {name: said.pop(name) for name in REFIT_RECIPE if name in said}
        try:
            return replace(own, recipe=replace(own.recipe, last=last, **recipe), **said)
        except UsageError as error:
            raise UsageError(f"in the refit, {error}") from None

    def check_refit(self, share: int) -> None:
        """Refuse what is said of a refit if it cannot be or if there is none; `share` is images per class in memory."""
        said = [name for name in REFIT if getattr(self, f"refit_{name}") is not None]
        if said and (self.refitting() is None or share < 1):
            name = said[0].replace("_", "-")
            raise UsageError(
                f"refit-{name} is of a refit on the memory, which is not done here: leave it out, or ask for one "
                "(mitigation balanced-finetuning, or a method's finetune) with the standard loss and a memory above 0"
            )

    def epoch(self, s: Step, gen: torch.Generator) -> Tensor:
        """Which images of s.data make one epoch, in which order; the same number in every epoch of a step."""
        if s.t > 0 and self.mitigation in ("class-oversampling", *remedies.REPLAYING):
            return remedies.epoch(self.mitigation, s, gen, self.old_share)
        return torch.randperm(len(s.data), generator=gen, device=gen.device)
