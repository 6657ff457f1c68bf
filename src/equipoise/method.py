"""What a method is. Read this, and `step.py`, before a file in `methods/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import memory
from .errors import UsageError
from .losses import full_precision
from .nets import Batch, Out
from .nets.backbones import Backbone, ResNet18, ResNet32, SmallNet, choose_scale
from .nets.heads import Head, LinearHead
from .remedies import Remedy, Standard
from .settings import check_fields, name_class
from .step import (
    CHOOSE,
    EVERYTHING,
    Finetune,
    Group,
    Learned,
    More,
    Plan,
    Recipe,
    Shape,
    Stage,
    Stages,
    Step,
    make_base_plan,
)


@dataclass(frozen=True)
class Method:
    """A way to learn classes step by step. Its fields are its hyper-parameters, its flags and its record at once.

    Only `objective` must be written; the rest has defaults. A subclass in `methods/` becomes a word of
    `equipoise run`; one from elsewhere needs no registration: `Learner(Mine())`, `run(Run(Mine()))`.
    """

    name: ClassVar[str] = ""
    """what it is called at the command line and in records"""
    title: ClassVar[str] = ""
    """what papers call it"""
    cost: ClassVar[float] = 1.0
    """how much longer an image takes with a teacher than with IL-Baseline, for the order of a queue"""
    remedies: ClassVar[tuple[str, ...] | None] = None
    """names of the remedies that it goes with; None for all"""
    reason: ClassVar[str] = ""
    """why not with others"""
    fresh: ClassVar[bool] = False
    """whether every step begins with a new net, without a teacher"""
    capturable: ClassVar[bool] = True
    """whether a CUDA graph can hold a step of it: False for what svd, eigh or solve is part of"""
    needs_maps: ClassVar[bool] = False
    """whether its objective reads the outputs of the backbone's stages"""
    trained: ClassVar[tuple[Group, ...]] = EVERYTHING
    """the weights that are trained in a step"""
    backbones: ClassVar[Mapping[str, Callable[[int], Backbone]]] = {
        "tiny": SmallNet,
        "small": ResNet32,
        "large": ResNet18,
    }
    """by the size of images, made with their number of channels"""
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "tiny": Recipe(epochs=20, lr=0.05, batch=32),
        "small": Recipe(),
        "large": Recipe(epochs=100, milestones=(0.3, 0.6, 0.8, 0.9), batch=256, weight_decay=1e-4),
    }
    """how a step is optimised, likewise"""
    least_memory: ClassVar[int] = 0
    """images of every old class that it needs"""
    herds_unit_length: ClassVar[bool] = True
    """whether exemplars are herded by features that are brought to length 1"""
    continues: ClassVar[bool] = False
    """whether a known class may come again"""

    remedy: Remedy = Standard()
    """against the bias towards new classes"""

    def __init_subclass__(cls) -> None:
        """A method without a name of its own is called like its class."""
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

        `b.out` is the net's output and `b.ref` the frozen teacher's (None in the base step). On a GPU this is recorded
        once and replayed: no `.item()`, no shape that depends on values, no `if` on a tensor.
        """
        raise TypeError(f"{type(self).__name__} must define objective(s, b)")

    def classify(self, z: Tensor, y: Tensor, s: Step) -> Tensor:
        """The classification loss of a batch with logits z and labels y: the remedy's, or else cross-entropy."""
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
        """The classifier on embeddings of that width; it starts without classes and is widened step by step."""
        return LinearHead(width)

    def first_rows(self, head: Head, h: Tensor, y: Tensor, gen: torch.Generator) -> None:
        """Set the head's rows of new classes, from the embeddings that the previous net gives their images.

        y counts the new classes from 0. Not called in the base step, where there is no previous net.
        """

    def views(self, x: Tensor) -> Tensor:
        """Copies of a batch to be seen together, one after the other; labels repeat, and `scores` folds them back."""
        return x

    # How a step is trained -----------------------------------------------------------------------------------

    def recipe(self, plan: Plan) -> Recipe:
        """How a step is optimised, unless the user says otherwise."""
        return self.recipes[choose_scale(plan.shape)]

    def recipe_for(self, plan: Plan) -> Recipe:
        """The same, with what the user says."""
        own = self.recipe(plan)
        return own if plan.recipe is None else plan.recipe.override(self.recipe(make_base_plan(plan)), own)

    def finetuning(self) -> Finetune | None:
        """The method's own fine-tuning, for remedies that keep it: a field called `finetune`, if it has one."""
        return getattr(self, "finetune", None)

    def stages(self, plan: Plan) -> Stages:
        """The trainings of a step, and the choice of the exemplars between them. Pure: a resumed run asks again."""
        own = self.recipe_for(plan)
        return (Stage("train", own, self.trained), CHOOSE, *self.refinements(own, plan))

    def refinements(self, own: Recipe, plan: Plan) -> tuple[Stage, ...]:
        """What follows the choice: the remedy's stages, or the method's own fine-tuning."""
        if plan.t == 0 or plan.keep < 1:
            return ()
        finetune = self.finetuning() if self.remedy.keeps_finetuning else None
        own_stages = (finetune.stage(own, Standard()),) if finetune is not None and finetune.epochs else ()
        return (*own_stages, *self.remedy.stages(own, plan))

    def enter(self, s: Step, stage: Stage) -> None:
        """As a stage begins; not again where it is resumed."""

    def leave(self, s: Step, stage: Stage) -> Tensor | None:
        """As a stage ends: pixels to keep in place of the exemplars' (uint8, as many as s.memory), or None."""
        return None

    def hold(self, plan: Plan) -> int:
        """How many images of every class are held out of training."""
        return self.remedy.hold(plan)

    def epoch(self, s: Step, gen: torch.Generator, batch: int) -> Tensor:
        """Which images make one epoch, in which order: positions, the same number in every epoch of a stage.

        It is asked once beforehand, with labels only, for the time that a run takes.
        """
        which = self.remedy.epoch(s, gen)
        if which is None:
            which = torch.randperm(len(s.where), generator=gen, device=gen.device)
        return s.where[which]

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More | None:
        """A second stream for an epoch whose batches are at the positions `which` (batches, size); None for none.

        As many images a batch in every epoch of a stage. Called once an epoch, and never recorded: it may take time.
        """
        return None

    def note(self, s: Step, b: Batch) -> None:
        """After each batch: change tensors of s.state in place, such as a moving average."""

    def choose(self, s: Step, m: int, select: str, gen: torch.Generator) -> Tensor:
        """The exemplars of the new classes: positions, class by class, best first, m of each."""
        y = s.images.y[s.data]
        if select == "random":
            return s.data[memory.choose_at_random(y, m, gen)]
        return s.data[memory.choose_by_herding(s.embed(s.net, s.data), y, m, self.herds_unit_length)]

    def after(self, s: Step) -> None:
        """Note in s.state what the step's images say, once all is trained and the exemplars are chosen."""

    def overrides(self, name: str) -> bool:
        """Whether a function of this name is its own; computing what nobody looks at takes time."""
        return getattr(type(self), name) is not getattr(Method, name)

    # What is asked of it -------------------------------------------------------------------------------------

    def at_base(self) -> Method:
        """A method with the same base step, where every class has as many images as any other.

        Runs share a base step when these are equal. Equal counts make every λ equal: a weighted cross-entropy is plain.
        Where the remedy has no loss, a method may have one of its own, which need not be that.
        """
        return self.with_remedy(self.remedy.at_base())

    def with_remedy(self, remedy: Remedy) -> Self:
        """The same method with another remedy."""
        return replace(self, remedy=remedy)

    def scores(self, out: Out, known: Learned) -> Tensor:
        """What the largest of is the prediction (batch, N_t); while a step is under way, the state may lack it."""
        return out.z

    def check(self, *shares: int) -> None:
        """Refuse what makes no sense: `shares` are images per old class that will occur, none if there are no steps."""
        self.check_needs(*shares)
        self.remedy.check_memory(*shares)
        finetune = self.finetuning()
        if finetune is None or not finetune.epochs or finetune == type(self)().finetuning():
            return
        if not self.remedy.keeps_finetuning or max(shares, default=1) < 1:
            raise UsageError(
                "fine-tuning is on the memory, with the standard loss, and this run does neither: leave it out, "
                "or use the standard remedy and a memory above 0"
            )

    def check_needs(self, *shares: int) -> None:
        """Refuse a remedy that it does not go with, and a memory that is too small for it."""
        if self.remedies is not None and self.remedy.name not in (*self.remedies, "standard"):
            takes = " or ".join(("standard", *self.remedies))
            raise UsageError(
                f"remedy {self.remedy.name} does not go with {self.name}, which takes {takes}: {self.reason}"
            )
        needed = max(self.least_memory, self.remedy.least_memory)
        if (least := min(shares, default=needed)) < needed:
            name = self.name if self.least_memory >= needed else f"remedy {self.remedy.name}"
            if needed == memory.EVERYTHING:
                words = f"{name} needs all images, and here the memory keeps {least}"
                raise UsageError(f'{words}: use --memory all, in Python memory="all"')
            many = f"at least {needed} image(s) of every old class"
            raise UsageError(f"{name} needs {many}, and here the memory keeps {least}: raise --memory")


@dataclass(frozen=True)
class Around(Method):
    """A method around another, its `host`, whose ways are kept unless this has its own."""

    name: ClassVar[str] = ""
    host: Method = Method()
    remedy: ClassVar[Any] = property(attrgetter("host.remedy"))  # type: ignore[misc]

    def __init_subclass__(cls) -> None:
        """The host's stages ask the host for these: one of its own would be ignored in silence."""
        super().__init_subclass__()
        ignored = {"recipe", "finetuning", "refinements", "trained"} & cls.__dict__.keys()
        if ignored and "stages" not in cls.__dict__:
            raise UsageError(f"{cls.__qualname__} has {min(ignored)} of its own: give it stages too, which use it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.host, Method):
            raise UsageError(f"the host of {self.name} must be a Method such as PODNet(), not {self.host!r}")

    def with_remedy(self, remedy: Remedy) -> Self:
        """The host with another remedy."""
        return replace(self, host=self.host.with_remedy(remedy))

    def check(self, *shares: int) -> None:
        """What the host refuses, and what this needs besides."""
        self.host.check(*shares)
        self.check_needs(*shares)

    def overrides(self, name: str) -> bool:
        """Whether this has a way of its own, or else the host."""
        return getattr(type(self), name) is not getattr(Around, name) or self.host.overrides(name)


def _ask_host(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.host, name)(*args)


HOSTED = (
    "objective", "backbone", "head", "first_rows", "views", "recipe", "finetuning", "stages", "enter", "leave", "hold",
    "epoch", "more", "note", "choose", "after", "scores", "lam",
)  # fmt: skip
"""what a method around another leaves to its host, unless it has a way of its own"""
for _name in HOSTED:
    setattr(Around, _name, _ask_host(_name))
for _name in ("trained", "fresh", "capturable", "needs_maps", "continues", "least_memory", "cost"):
    setattr(Around, _name, property(attrgetter(f"host.{_name}")))
