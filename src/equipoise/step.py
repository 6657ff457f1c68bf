"""What a step is: what is known of it, and the trainings that it is made of. Data, not code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .data.images import Images
from .errors import UsageError, check, check_choice
from .nets import Batch, Net
from .settings import check_fields, no_flag, number

if TYPE_CHECKING:
    from .remedies import Remedy

Shape = tuple[int, int, int]
"""of an image: channels, height, width"""


@dataclass(frozen=True)
class Recipe:
    """How a training is optimised: SGD with momentum, and a learning rate that falls."""

    epochs: int = number(250, whole=True, least=1)
    """passes over the step's training images"""
    lr: float = number(0.1, above=0, most=1e30)
    """learning rate at the start of every step"""
    milestones: tuple[float, ...] = (0.4, 0.6, 0.8)
    """when the learning rate falls, as fractions of the epochs (0.4 of 250: after epoch 100)"""
    decay: float = number(0.1, above=0, most=1)
    """what the learning rate is multiplied by at a milestone"""
    schedule: Literal["steps", "cosine", "cosine-late"] = "steps"
    """how the learning rate falls: at milestones, as a cosine to 0, or as one an epoch late, as in PODNet's code"""
    batch: int = number(128, whole=True, least=2)  # with one image a batch, its own statistics are all there is
    """images in a batch; a smaller training set is one batch"""
    momentum: float = number(0.9, least=0, below=1)
    """momentum of SGD"""
    weight_decay: float = number(2e-4, least=0, most=1e12)
    """L2 penalty of SGD, on all parameters"""
    clamp: float = number(0.0, least=0)
    """bound on the size of each number of the gradient; 0 for none"""
    last: Literal["joined", "short"] = "joined"
    """images that fill no batch at the end of an epoch: joined with the next epoch's, or a short batch"""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.milestones, tuple):
            raise UsageError(f"milestones must be a tuple of fractions of the epochs, not {self.milestones!r}")
        for milestone in self.milestones:
            check("each of the milestones, a fraction of the epochs,", milestone, above=0, most=1)

    def lr_at(self, epoch: int) -> float:
        """The learning rate in an epoch, counted from 0."""
        if self.schedule != "steps":
            done = epoch if self.schedule == "cosine" else max(0, epoch - 1)
            return self.lr * (1 + math.cos(math.pi * done / self.epochs)) / 2
        return self.lr * self.decay ** sum(epoch >= max(1, round(m * self.epochs)) for m in self.milestones)

    def override(self, base: Recipe, own: Recipe) -> Recipe:
        """This recipe, set by the user in place of the base step's, as it applies to a step whose own recipe is `own`.

        What the user left as in the base step stays the step's own; learning rate and batch keep their ratio to the
        base step's, so that a method's lr / (t + 1) is scaled and not removed.
        """
        changed = {k: v for k, v in vars(self).items() if v != vars(base)[k]}
        if "lr" in changed and own.lr != base.lr:
            changed["lr"] = self.lr * (own.lr / base.lr)
        if "batch" in changed and own.batch != base.batch:
            changed["batch"] = max(2, round(self.batch * own.batch / base.batch))
        return replace(own, **changed)


@dataclass(frozen=True)
class Group:
    """Weights that are trained alike, named by patterns; what is in no group of a stage is frozen.

    Names are those of `net.named_parameters()` (backbone.*, head.*) and, for tensors of a step's state, state.NAME.
    """

    names: tuple[str, ...]
    lr: float = 1.0
    """factor on the recipe's learning rate"""
    decay: float | None = None
    """L2 penalty; None for the recipe's"""


EVERYTHING = (Group(("backbone.*", "head.*")),)
NEW_ROWS = (Group(("backbone.*", "head.new", "head.scale")),)
"""all but the rows of old classes, in a head that has them apart"""
ROWS = (Group(("head.weight", "head.bias", "head.old", "head.new")),)
"""the rows of the classifier, those of old classes included; a learned scale is frozen"""


@dataclass(frozen=True)
class Stage:
    """One training within a step."""

    name: str
    """names its random numbers, and its place in a checkpoint"""
    recipe: Recipe
    """how it is optimised"""
    groups: tuple[Group, ...] = EVERYTHING
    """what is trained"""
    images: Literal["all", "memory", "held"] = "all"
    """what it is trained on: the step's images and the memory, the memory alone, or what is held out"""
    objective: Objective | None = None
    """the training loss; None for the method's"""
    teacher: Literal["previous", "as this stage began"] | None = "previous"
    """the frozen net that teaches: the one before the step, or the net as this stage found it"""
    batch_norm: Literal["train", "eval"] = "train"
    """whether batch norms use and update the statistics of batches, or are frozen"""
    remedy: Remedy | None = None
    """against the bias; None for the method's"""
    gradient_noise: float = 0.0
    """η of Gaussian noise on gradients with variance η / (1 + epoch)^0.55 (Neelakantan et al., 2015); 0 for none"""


CHOOSE: Final = "choose"
"""stands among the stages where the exemplars are chosen"""
Stages = tuple[Stage | Literal["choose"], ...]


@dataclass(frozen=True)
class Finetune:
    """A second training after the choice of the exemplars, on the memory alone, which is balanced."""

    epochs: int = number(20, whole=True, least=0)
    """fine-tuning: passes over the memory; 0 for no fine-tuning"""
    lr: float = 0.01
    """fine-tuning: learning rate at its start"""
    batch: int = 128
    """fine-tuning: images in a batch"""
    weight_decay: float = 2e-4
    """fine-tuning: L2 penalty"""
    milestones: tuple[float, ...] = no_flag((0.5,))
    """when the learning rate falls, as fractions of its epochs"""
    clamp: float = no_flag(0.0)
    """bound on the size of each number of the gradient; 0 for none"""
    what: Literal["classifier", "all"] = no_flag("classifier")
    """which weights are trained"""
    batch_norm: Literal["train", "eval"] = no_flag("eval")
    """whether batch norms use and update the statistics of batches, or are frozen"""
    distil: bool = no_flag(True)
    """whether the previous net still teaches"""

    def __post_init__(self) -> None:
        check_fields(self, "finetune-")
        check_choice("finetune.distil", self.distil, True, False)
        self.recipe(Recipe())

    def recipe(self, own: Recipe) -> Recipe:
        """How it is optimised; its epochs end as those of the step, which is optimised by `own`."""
        names = ("lr", "milestones", "batch", "weight_decay", "clamp")
        try:
            settings = {name: getattr(self, name) for name in names}
            return Recipe(max(1, self.epochs), **settings, last=own.last)
        except UsageError as error:
            raise UsageError(f"in fine-tuning, {error}") from None

    def stage(self, own: Recipe, remedy: Remedy) -> Stage:
        """The stage, with the remedy that is in force there: the memory is balanced by itself."""
        return Stage(
            "refit",
            self.recipe(own),
            ROWS if self.what == "classifier" else EVERYTHING,
            images="memory",
            teacher="previous" if self.distil else None,
            batch_norm=self.batch_norm,
            remedy=remedy,
        )


@dataclass(frozen=True)
class Plan:
    """What is known of step t without its pixels."""

    t: int
    """0 is the base step"""
    sizes: tuple[int, ...]
    """classes of each step so far, this one included"""
    shape: Shape
    """of an image: channels, height, width"""
    counts: tuple[int, ...] = ()
    """images at hand of each class so far: of old classes, those in memory"""
    m: int = 0
    """images of each old class in memory"""
    keep: int = 0
    """images of each class that the memory keeps at the end of this step"""
    recipe: Recipe | None = None
    """what the user wants in place of the method's recipe of the base step"""

    @property
    def N(self) -> int:
        """N_t, classes so far."""
        return sum(self.sizes)

    @property
    def n_old(self) -> int:
        """N_{t-1}, classes learned before; they come first."""
        return sum(self.sizes[:-1])


@dataclass(frozen=True)
class Step(Plan):
    """All that a method may see of step t, in the paper's letters. Tensors are on the device of the training."""

    n: Tensor = field(kw_only=True)
    """n_i, training images of each class"""
    lam: Tensor = field(kw_only=True)
    """λ_i, the weights in the softmax; Meta differentiates through replace(s, lam=λ(α))"""
    images: Images = field(kw_only=True)
    """where all pixels are; what follows are positions there"""
    data: Tensor = field(kw_only=True)
    """the step's own images"""
    memory: Tensor = field(kw_only=True)
    """the exemplars, class by class, best first"""
    held: Tensor = field(kw_only=True)
    """what is held out of training; empty where nothing is"""
    where: Tensor = field(kw_only=True)
    """what the stage at hand is trained on: D_t, or the memory, or what is held out"""
    net: Net = field(kw_only=True)
    """θ_t; for everything but the objective, which must not read it: Meta evaluates it at other weights"""
    teacher: Net | None = field(kw_only=True)
    """θ_{t-1}, frozen; None in the base step"""
    state: dict[str, Tensor] = field(kw_only=True, default_factory=dict)
    """what is learned besides the net: on the device, and part of every checkpoint"""
    embed: Embed = field(kw_only=True)
    """features of images, as in prediction"""

    @property
    def past(self) -> Tensor:
        """Marks the old classes."""
        return torch.arange(self.N, device=self.n.device) < self.n_old

    @property
    def y(self) -> Tensor:
        """Labels of the images that are trained on."""
        return self.images.y[self.where]


class Embed(Protocol):
    """Features of images, for everything but the objective."""

    def __call__(self, net: Net, where: Tensor, view: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """h of the images at these positions, or of what `view` makes of their pixels."""


class Learned(NamedTuple):
    """What is known when images are predicted."""

    sizes: tuple[int, ...]
    """classes of each step so far"""
    state: dict[str, Tensor]
    """what methods noted"""


class More(NamedTuple):
    """A second stream of images beside the batches."""

    where: Tensor
    """positions (batches, k); or, with `pixels`, rows of that tensor of the state, which stand for the memory's"""
    gradient: bool = True
    """whether the net learns from them"""
    teacher: bool = True
    """whether the teacher sees them too"""
    pixels: str | None = None
    """name of a tensor of the state (images, channels, height, width) that holds their pixels"""


class Adapt(NamedTuple):
    """That a tensor of the state, on which λ depends, is learned by its effect one step ahead (`engine/meta.py`)."""

    name: str
    """of the tensor in s.state"""
    lr: float
    least: float
    """it stays at or above this"""
    every: int
    """optimisation steps from one update to the next"""
    batch: int
    """images of B_t in an update; all of them where there are fewer"""


Objective = Callable[[Step, Batch], Tensor]


def make_base_plan(plan: Plan) -> Plan:
    """The plan of the base step, as far as recipes go."""
    return Plan(0, plan.sizes[:1], plan.shape)


def plan_for(shape: Shape) -> Plan:
    """A base step on images of that shape, to ask a method for its recipe."""
    return Plan(0, (2,), shape)
