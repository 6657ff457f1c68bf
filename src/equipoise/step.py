"""A step as data: what is known of it, and the stages in which it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .data.augment import AugmentedEpoch
from .data.images import Images
from .errors import UsageError, check, check_choice
from .nets import Batch, Net
from .settings import check_fields, no_flag, number

if TYPE_CHECKING:
    from .remedies import Remedy

Shape = tuple[int, int, int]
"""of an image: (channels, height, width)"""
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a stage is optimised: SGD with momentum and a learning-rate schedule."""

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
    batch: int = number(128, whole=True, least=2)  # batch norm needs two
    """images in a batch, or the whole training set if it is smaller"""
    momentum: float = number(0.9, least=0, below=1)
    """momentum of SGD"""
    weight_decay: float = number(2e-4, least=0, most=1e12)
    """L2 penalty of SGD, on all parameters"""
    clamp: float = no_flag(0.0, least=0)
    """largest absolute value of each element of the gradient; 0 for no clamping"""
    last: Literal["joined", "short"] = "joined"
    """the images left over at the end of an epoch: joined with the next epoch's, or a short batch"""

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
        """Apply the user's changes, this recipe against `base` (the base step's), to `own` (a later step's).

        Learning rate and batch keep their ratio to the base step's: a method's lr / (t + 1) is scaled, not replaced.
        """
        changed = {k: v for k, v in vars(self).items() if v != vars(base)[k]}
        if "lr" in changed and own.lr != base.lr:
            changed["lr"] = self.lr * (own.lr / base.lr)
        if "batch" in changed and own.batch != base.batch:
            changed["batch"] = max(2, round(self.batch * own.batch / base.batch))
        return replace(own, **changed)


@dataclass(frozen=True)
class Group:
    """Weights with common settings, named by patterns; weights that are in no group of a stage are frozen.

    Names are those of `net.named_parameters()` (backbone.*, head.*) and, for tensors of a step's state, state.NAME.
    """

    names: tuple[str, ...]
    lr: float = 1.0
    """factor on the recipe's learning rate"""
    decay: float | None = None
    """L2 penalty; None for the recipe's"""


EVERYTHING = (Group(("backbone.*", "head.*")),)
NEW_ROWS = (Group(("backbone.*", "head.new", "head.scale")),)
"""all but the rows of old classes, in a head that stores them separately"""
ROWS = (Group(("head.weight", "head.bias", "head.old", "head.new")),)
"""the rows of the classifier, those of old classes included; a learned scale is frozen"""


@dataclass(frozen=True)
class Stage:
    """One training within a step."""

    name: str
    """identifies its random numbers and its place in a checkpoint"""
    recipe: Recipe
    """how the stage is optimised"""
    groups: tuple[Group, ...] = EVERYTHING
    """the weights to train"""
    images: Literal["all", "memory", "held"] = "all"
    """images to train on: the step's and the memory's, the memory's alone, or those held out"""
    objective: Objective | None = None
    """the training loss; None for the method's"""
    teacher: Literal["previous", "as this stage began"] | None = "previous"
    """the frozen teacher: the net before this step, or before this stage"""
    batch_norm: Literal["train", "eval"] = "train"
    """train: use and update batch statistics; eval: use the running statistics"""
    remedy: Remedy | None = None
    """None for the method's"""
    gradient_noise: float = 0.0
    """η of Gaussian noise on gradients with variance η / (1 + epoch)^0.55 (Neelakantan et al., 2015); 0 for none"""


CHOOSE: Final = "choose"
"""marks, among the stages, where the exemplars are chosen"""
Stages = tuple[Stage | Literal["choose"], ...]


@dataclass(frozen=True)
class Finetune:
    """A second training, on the memory alone, which is balanced, after the exemplars are chosen."""

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
    """largest absolute value of each element of the gradient; 0 for no clamping"""
    what: Literal["classifier", "all"] = no_flag("classifier")
    """the weights to train"""
    batch_norm: Literal["train", "eval"] = no_flag("eval")
    """train: use and update batch statistics; eval: use the running statistics"""
    distil: bool = no_flag(True)
    """whether to keep the previous net as the teacher"""

    def __post_init__(self) -> None:
        check_fields(self, "finetune-")
        check_choice("finetune.distil", self.distil, True, False)
        self.recipe(Recipe())

    def recipe(self, own: Recipe) -> Recipe:
        """The recipe of the fine-tuning; `last` is that of `own`, the recipe of the step."""
        try:
            settings = {name: getattr(self, name) for name in ("lr", "milestones", "batch", "weight_decay", "clamp")}
            return Recipe(max(1, self.epochs), **settings, last=own.last)
        except UsageError as error:
            raise UsageError(f"in fine-tuning, {error}") from None

    def stage(self, own: Recipe, remedy: Remedy) -> Stage:
        """The stage of the fine-tuning, with this remedy."""
        groups = ROWS if self.what == "classifier" else EVERYTHING
        teacher: Literal["previous"] | None = "previous" if self.distil else None
        return Stage("refit", self.recipe(own), groups, "memory", None, teacher, self.batch_norm, remedy)


@dataclass(frozen=True)
class Plan:
    """What is known of step t before its images are loaded."""

    t: int
    """0 is the base step"""
    sizes: tuple[int, ...]
    """number of classes of each step up to this one"""
    shape: Shape
    counts: tuple[int, ...] = ()
    """available images of each class; of old classes, those in memory"""
    m: int = 0
    """images of each old class in memory"""
    keep: int = 0
    """images of each class in memory at the end of this step"""
    recipe: Recipe | None = None
    """the user's recipe, which replaces the method's for the base step"""

    @property
    def N(self) -> int:
        """N_t, classes so far."""
        return sum(self.sizes)

    @property
    def n_old(self) -> int:
        """N_{t-1}, classes learned before; they come first."""
        return sum(self.sizes[:-1])

    @property
    def base(self) -> Plan:
        """The plan of the base step, for its recipe."""
        return Plan(0, self.sizes[:1], self.shape)


@dataclass(frozen=True)
class Step(Plan):
    """Everything a method sees of step t, in the paper's letters. Tensors are on the training device."""

    n: Tensor = field(kw_only=True)
    """n_i, training images of each class"""
    lam: Tensor = field(kw_only=True)
    """λ_i, the weights in the softmax; Meta differentiates through replace(s, lam=λ(α))"""
    images: Images = field(kw_only=True)
    """all pixels and labels; the next four fields are positions in it"""
    data: Tensor = field(kw_only=True)
    """the step's own images"""
    memory: Tensor = field(kw_only=True)
    """the exemplars, class by class, best first"""
    held: Tensor = field(kw_only=True)
    """the images held out of training; may be empty"""
    where: Tensor = field(kw_only=True)
    """the images of the current stage: D_t, the memory, or those held out"""
    net: Net = field(kw_only=True)
    """θ_t. The objective must not read it: Meta evaluates the objective at other weights"""
    teacher: Net | None = field(kw_only=True)
    """θ_{t-1}, frozen; None in the base step"""
    state: dict[str, Tensor] = field(kw_only=True, default_factory=dict)
    """tensors learned besides the net; saved in every checkpoint"""
    embed: Embed = field(kw_only=True)
    """computes features of images, in eval mode"""
    epoch: AugmentedEpoch | None = field(kw_only=True, default=None)
    """the epoch that begins, as it is augmented; for `more` only"""
    done: float = field(kw_only=True, default=0.0)
    """the part of the stage that is done, from 0 in its first epoch to 1 in its last; for λ only"""

    @property
    def past(self) -> Tensor:
        """A mask of the old classes."""
        return torch.arange(self.N, device=self.n.device) < self.n_old

    @property
    def y(self) -> Tensor:
        """Labels of the images of the current stage."""
        return self.images.y[self.where]


class Embed(Protocol):
    """Computes features of images. Not for objectives."""

    def __call__(self, net: Net, where: Tensor | AugmentedEpoch, view: View | None = None) -> Tensor:
        """h of the images at these positions, or of those of an epoch, transformed by `view`."""


class Learned(NamedTuple):
    """What predictions may depend on."""

    sizes: tuple[int, ...]
    """number of classes of each step so far"""
    state: dict[str, Tensor]
    """the state of the last step"""


class More(NamedTuple):
    """A second stream of images beside the batches."""

    where: Tensor
    """positions (batches, k); with `pixels`, rows of that tensor instead"""
    gradient: bool = True
    """whether to compute gradients for them"""
    teacher: bool = True
    """whether to compute the teacher's output for them"""
    pixels: str | None = None
    """name of a tensor of the state (images, channels, height, width), in the order of the memory"""
    normalised: bool = False
    """whether those pixels are normalised, as a net normalises its images"""
    drawn: Tensor | None = None
    """random numbers of their augmentation (batches, k, numbers); None to draw new ones"""


class Adapt(NamedTuple):
    """A tensor of the state on which λ depends, to be learned by its effect one step ahead (`engine/meta.py`)."""

    name: str
    """its key in s.state"""
    lr: float
    least: float
    """lower bound of its value"""
    every: int
    """optimisation steps between updates"""
    batch: int
    """images of B_t in an update"""


Objective = Callable[[Step, Batch], Tensor]


def plan_for(shape: Shape) -> Plan:
    """A plan of a base step on images of this shape, for its recipe."""
    return Plan(0, (2,), shape)
