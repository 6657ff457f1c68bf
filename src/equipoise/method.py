"""The base class of methods. Read this and `step.py` before a file in `methods/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import memory
from .data.augment import Augment
from .errors import UsageError, format_count
from .losses import full_precision
from .nets import Batch, Out
from .nets.backbones import Backbone, ResNet18, ResNet32, SmallNet, choose_scale
from .nets.heads import Head, LinearHead
from .remedies import Remedy, Standard
from .settings import check_fields, is_ramp, name_class
from .step import CHOOSE, EVERYTHING, Finetune, Group, Learned, More, Plan, Recipe, Shape, Stage, Stages, Step

COMPILED, EAGER = 105_110 / 43_671, 105_110 / 6_673
"""time of a step with a teacher that our kernels do not support, and of one that is no CUDA graph either, relative to
one that they do, on an H200 (benchmarks/README.md): factors of a method's `cost`"""


@dataclass(frozen=True)
class Method:
    """A method of class-incremental learning. Its fields are its hyper-parameters, flags and record.

    Only `objective` must be implemented. A subclass in `methods/` becomes a command of `equipoise run`; any other works
    without registration: `Learner(Mine())`, `run(Run(Mine()))`.
    """

    name: ClassVar[str] = ""
    """its name on the command line and in records"""
    title: ClassVar[str] = ""
    """its name in papers"""
    cost: ClassVar[float] = 1.0
    """training time per image with a teacher, relative to IL-Baseline; used to order a queue"""
    remedies: ClassVar[tuple[str, ...] | None] = None
    """names of the remedies that it supports; None for all"""
    reason: ClassVar[str] = ""
    """why it does not support the others"""
    fresh: ClassVar[bool] = False
    """whether every step starts from a new net, without a teacher"""
    capturable: ClassVar[bool] = True
    """whether its training step can be a CUDA graph: not if it uses svd, eigh or solve"""
    needs_maps: ClassVar[bool] = False
    """whether its objective reads the outputs of the backbone's stages"""
    trained: ClassVar[tuple[Group, ...]] = EVERYTHING
    """the weights that are trained in a step"""
    backbones: ClassVar[Mapping[str, Callable[[int], Backbone]]] = {
        "tiny": SmallNet,
        "small": ResNet32,
        "large": ResNet18,
    }
    """constructors by image size; the argument is the number of channels"""
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "tiny": Recipe(epochs=20, lr=0.05, batch=32),
        "small": Recipe(),
        "large": Recipe(epochs=100, milestones=(0.3, 0.6, 0.8, 0.9), batch=256, weight_decay=1e-4),
    }
    """recipes by image size"""
    imagenet: ClassVar[Mapping[str, Any]] = {}
    """what the original sets on ImageNet and its subset: values by field; of `recipe` and `finetune`, by theirs"""
    whole_imagenet: ClassVar[Mapping[str, Any]] = {}
    """what it sets besides on the whole of ImageNet"""
    least_memory: ClassVar[int] = 0
    """images of every old class that it needs in memory"""
    default_memory: ClassVar[str] = "20"
    """the memory of a command that names none"""
    herds_unit_length: ClassVar[bool] = True
    """whether herding normalises features"""
    continues: ClassVar[bool] = False
    """whether later steps may contain known classes"""

    remedy: Remedy = Standard()
    """what acts against the bias towards new classes"""

    def __init_subclass__(cls) -> None:
        """Set the default name and title."""
        super().__init_subclass__()
        inside = __name__.split(".")[0]
        built_in = (kind for kind in Method.__subclasses__() if kind.__module__.split(".")[0] == inside)
        name_class(cls, (*cls.__mro__[1:], *built_in), "method")
        cls.title = cls.__dict__.get("title") or cls.__name__

    def __post_init__(self) -> None:
        check_fields(self)

    # What must be written ------------------------------------------------------------------------------------

    def objective(self, s: Step, b: Batch) -> Tensor:
        """The whole training loss of a batch: a pure function of its arguments.

        `b.out` is the net's output and `b.ref` the frozen teacher's (None in the base step). On a GPU this is captured
        in a CUDA graph: no `.item()`, no shape that depends on values, no `if` on a tensor.
        """
        raise TypeError(f"{type(self).__name__} must define objective(s, b)")

    def classify(self, z: Tensor, y: Tensor, s: Step) -> Tensor:
        """The classification loss of a batch: the remedy's, by default cross-entropy."""
        loss = self.remedy.ce(z, y, s)
        return F.cross_entropy(full_precision(z), y) if loss is None else loss

    def lam(self, s: Step) -> Tensor:
        """λ_i, the weights in the softmax."""
        return self.remedy.lam(s.n, s.past, s)

    # The net -------------------------------------------------------------------------------------------------

    def backbone(self, shape: Shape) -> Backbone:
        """The feature extractor for images of shape (channels, height, width)."""
        return self.backbones[choose_scale(shape)](shape[0])

    def head(self, width: int) -> Head:
        """The classifier on embeddings of this width; it starts without classes and grows in every step."""
        return LinearHead(width)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """Initialise the rows of new classes (y, from 0) from the previous net's embeddings h. Not in the base step.

        If `views` stacks copies of the images, h and y are stacked in the same way.
        """

    def views(self, x: Tensor) -> Tensor:
        """Stack copies of a batch, such as rotations. Labels repeat; `scores` combines the copies."""
        return x

    # How a step is trained -----------------------------------------------------------------------------------

    def recipe(self, plan: Plan) -> Recipe:
        """How a step is optimised by default."""
        return self.recipes[choose_scale(plan.shape)]

    def recipe_for(self, plan: Plan) -> Recipe:
        """How a step is optimised, with the user's settings."""
        own = self.recipe(plan)
        return own if plan.recipe is None else plan.recipe.override(self.recipe(plan.base), own)

    def finetuning(self) -> Finetune | None:
        """The method's own fine-tuning: its field `finetune`, if it has one."""
        return getattr(self, "finetune", None)

    def stages(self, plan: Plan) -> Stages:
        """The stages of a step, with CHOOSE where exemplars are chosen. Pure: a resumed run calls it again."""
        own = self.recipe_for(plan)
        return (Stage("train", own, self.trained), CHOOSE, *self.refinements(own, plan))

    def refinements(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """The stages after CHOOSE: the method's own fine-tuning and the remedy's stages."""
        if plan.t == 0 or plan.keep < 1:
            return ()
        finetune = self.finetuning() if self.remedy.keeps_finetuning else None
        own_stages = (finetune.stage(own, Standard()),) if finetune is not None and finetune.epochs else ()
        return (*own_stages, *self.remedy.stages(own, plan))

    def enter(self, s: Step, stage: Stage) -> None:
        """Called when a stage begins, not when it is resumed."""

    def leave(self, s: Step, stage: Stage) -> Tensor | None:
        """Called when a stage ends. May return new pixels of the exemplars (uint8, as many as s.memory)."""
        return None

    def hold(self, plan: Plan) -> int:
        """Number of images of every class to hold out of training."""
        return self.remedy.hold(plan)

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        """The images of one epoch in order, as positions; the same number in every epoch of a stage.

        To estimate the time of a run, it is also called with labels only.
        """
        which = self.remedy.epoch(s, gen)
        if which is None:
            which = torch.randperm(len(s.where), generator=gen, device=gen.device)
        return s.where[which]

    def augmentation(self, crop: Augment) -> Augment:
        """The augmentation of the images to train on, given that of the data set."""
        return crop

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        """A second stream of images for an epoch with batches at the positions `which` (batches, size); None for none.

        It has the same size in every epoch of a stage. Called once an epoch, outside the CUDA graph.
        """
        return None

    def note(self, s: Step, b: Batch) -> None:
        """Called after each batch, to update tensors of s.state in place, such as a moving average."""

    def choose(self, s: Step, m: int, select: str, gen: torch.Generator) -> Tensor:
        """Choose m exemplars of each new class: positions, class by class, best first."""
        y = s.images.y[s.data]
        if select == "random":
            return s.data[memory.choose_at_random(y, m, gen)]
        return s.data[memory.choose_by_herding(s.embed(s.net, s.data), y, m, self.herds_unit_length)]

    def after(self, s: Step) -> None:
        """Called at the end of a step, after the choice of exemplars, to update s.state."""

    def overrides(self, name: str) -> bool:
        """Whether it overrides this function of Method."""
        return getattr(type(self), name) is not getattr(Method, name)

    # Base step, prediction and checks ------------------------------------------------------------------------

    def at_base(self) -> Method:
        """A simpler method with the same base step, which runs then share, if all classes have equally many images."""
        return self.with_remedy(self.remedy.at_base())

    def with_remedy(self, remedy: Remedy) -> Self:
        """The same method with another remedy."""
        return replace(self, remedy=remedy)

    def scores(self, out: Out, known: Learned) -> Tensor:
        """Scores (batch, N_t), whose argmax is the prediction. During a step, the state may not be complete yet."""
        return out.z

    def reset_finetuning(self, memory: bool = True) -> Self:
        """The same method, with the default fine-tuning where its remedy or the lack of a memory leaves none."""
        if self.remedy.keeps_finetuning and memory:
            return self
        default: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name == "finetune"}
        return replace(self, **default)

    def check(self, *shares: int) -> None:
        """Refuse invalid settings; `shares` are the numbers of images per old class in later steps."""
        self.check_needs(*shares)
        self.remedy.check_memory(*shares)
        if ramps := [value for value in vars(self.remedy).values() if is_ramp(value)]:
            later = self.stages(Plan(1, (1, 1), (3, 32, 32), (2, 2), 1, 1))
            if not any(isinstance(stage, Stage) for stage in later):
                words = f"{self.name} trains in the base step only, where {ramps[0]} has no effect"
                raise UsageError(f"{words}: use one number")
        finetune, default = self.finetuning(), self.reset_finetuning(max(shares, default=1) > 0).finetuning()
        if finetune is not None and finetune.epochs and finetune != default:
            raise UsageError(
                "fine-tuning has no effect here: it needs a memory and a remedy that keeps it. Remove its settings, "
                "or use the standard remedy and a memory above 0"
            )

    def check_needs(self, *shares: int) -> None:
        """Refuse a remedy that it does not support, and a memory that is too small."""
        if self.remedies is not None and self.remedy.name not in (*self.remedies, "standard"):
            supported = " or ".join(("standard", *self.remedies))
            raise UsageError(
                f"{self.name} does not support the remedy {self.remedy.name} ({self.reason}): use {supported}"
            )
        needed = max(self.least_memory, self.remedy.least_memory)
        if (least := min(shares, default=needed)) < needed:
            name = self.name if self.least_memory >= needed else f"remedy {self.remedy.name}"
            if needed == memory.EVERYTHING:
                words = f"{name} needs all images in memory, which keeps {least}"
                raise UsageError(f'{words}: use --memory all, in Python memory="all"')
            words = f"{name} needs at least {format_count(needed, 'image')} of every old class in memory"
            raise UsageError(f"{words}, which keeps {least}: raise --memory")
