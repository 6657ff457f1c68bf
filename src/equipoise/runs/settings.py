"""The settings of a run, which determine its result; and where and how it runs, which do not."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..data.augment import Crop
from ..data.datasets import SHAPES, STATISTICS
from ..data.folders import NAMES, PLACES
from ..data.listing import DEFAULT_SUBSET, SUBSETS
from ..errors import UsageError, check, check_choice, make_unknown_error
from ..method import Method
from ..methods.il_baseline import ILBaseline
from ..settings import added, has_field, only_of
from ..step import Recipe, Shape, plan_for


@dataclass(frozen=True)
class Data:
    """Which images to train and to evaluate on."""

    name: str = field(default="cifar100", metadata={"flag": "dataset"})
    """digits (embedded) or cifar100; of images in a folder given by --data: folder, for any that has a folder for each
    class, imagenet, imagenet-subset or mini-imagenet"""
    validation: float = 0.0
    """fraction of the training images of every class to set aside and measure on, instead of the test images"""
    brightness: float = 0.0
    """how much darker or brighter training images become at most, as a fraction; PODNet's own code has 63/255"""
    imbalance: float = added(1.0)
    """how many times more training images the first class of a later step has than its last, those between falling
    exponentially"""
    size: int | None = only_of(NAMES)
    """side of the squares that a net sees (default: 224, of mini-imagenet 84; images of one size of up to
    64 pixels as they are)"""
    subset: Literal["first100", "seed1993"] | None = only_of(("imagenet-subset",))
    """definition of ImageNet-Subset: the first 100 classes in sorted order, or those drawn with NumPy's seed 1993
    (default: first100)"""
    normalise: Literal["measured", "imagenet", "cifar100"] | None = only_of(("folder",))
    """mean and standard deviation to normalise with: of the training images, or of a known data set
    (default: measured)"""
    images_on: Literal["device", "disk"] | None = only_of(NAMES, young=True)
    """where images are during training: all on the device, or on the disk, in an order that it can follow (default:
    device up to 64 GiB)"""

    def __post_init__(self) -> None:
        check("validation", self.validation, least=0, below=1)
        check("imbalance", self.imbalance, least=1)
        Crop(brightness=self.brightness)
        for f in fields(self):
            if getattr(self, f.name) is not None and not has_field(f, self.name):
                raise UsageError(
                    f"{f.name} belongs to the data sets {', '.join(f.metadata['only'])}, not to {self.name}"
                )
        if self.size is not None:
            check("size", self.size, least=8, most=4096, whole=True)
        check_choice("subset", self.subset, None, *SUBSETS)
        check_choice("normalise", self.normalise, None, *STATISTICS)
        check_choice("images-on", self.images_on, None, *PLACES)

    @property
    def choices(self) -> dict[str, Any]:
        """What `load` takes besides a name and a folder, for a data set that has choices."""
        return {f.name: getattr(self, f.name) for f in fields(self) if "only" in f.metadata and has_field(f, self.name)}

    @property
    def shape(self) -> Shape:
        """(channels, height, width) of its images as a net sees them, if that is known without loading them."""
        if self.size is not None:
            return 3, self.size, self.size
        if self.name == "folder":
            raise UsageError("its recipe depends on the size of its images: choose a size")
        if self.name not in SHAPES:
            raise make_unknown_error("data set", self.name, (*SHAPES, "folder"))
        return SHAPES[self.name]

    @property
    def images(self) -> Data:
        """Which images are loaded, apart from what is done with them."""
        return Data(self.name, **self.choices)

    def resolve(self, shape: Shape) -> Data:
        """The same with the defaults filled in, for images of this shape."""
        _, height, width = shape
        size = height if self.name in NAMES and height == width else None
        validation, brightness, imbalance = map(float, (self.validation, self.brightness, self.imbalance))
        filled = replace(self, validation=validation, brightness=brightness, imbalance=imbalance, size=size)
        if self.name == "imagenet-subset" and self.subset is None:
            return replace(filled, subset=DEFAULT_SUBSET)
        if self.name == "folder" and self.normalise is None:
            return replace(filled, normalise="measured")
        return filled


@dataclass(frozen=True)
class Protocol:
    """The division of classes into steps, and the memory. By default half of the classes, then 5 steps."""

    base: int | None = None
    """classes of the base step"""
    steps: int | None = None
    """steps after the base step, of equally many classes"""
    order: str = "1993"
    """order of the classes: a NumPy seed, `natural`, `podnet` (PODNet's first, of CIFAR-100), or a file that lists the
    labels"""
    memory: str = "20"
    """exemplars kept: 20 of every class, total:2000 in all, 0, or all"""
    select: Literal["herding", "random"] = "herding"
    """how exemplars are chosen"""


@dataclass(frozen=True)
class Run:
    """Everything that determines a result. The same object is the flags, the record and the cache key."""

    method: Method = field(default_factory=ILBaseline)
    """how to learn"""
    data: Data = Data()
    """what to learn"""
    protocol: Protocol = Protocol()
    """in which steps"""
    recipe: Recipe | None = None
    """how to optimise; None for the method's own recipe"""
    seed: int = 0
    """of weights, batches, augmentation and everything else that is random"""

    def __post_init__(self) -> None:
        check("seed", self.seed, least=0, whole=True)

    @property
    def default_recipe(self) -> Recipe:
        """Its method's own recipe for images of its data set."""
        return self.method.recipe(plan_for(self.data.shape))

    def reset_unused(self, default: Recipe) -> Run:
        """The same run with the defaults of settings that have no effect; `default` is the recipe of its method."""
        recipe = self.recipe or default
        if recipe.schedule != "steps":
            recipe = replace(recipe, milestones=default.milestones, decay=default.decay)
        return replace(self, method=self.method.reset_finetuning(), recipe=recipe)


@dataclass(frozen=True)
class Machine:
    """Where a run is computed, and how."""

    device: str = "auto"
    """auto, cpu or cuda"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""
    engine: Literal["auto", "fused", "compiled", "captured", "eager"] = "auto"
    """how training steps are launched, which changes only their speed: auto is fused on a GPU, eager on a CPU"""


@dataclass(frozen=True)
class Options:
    """Options of a run that do not change its result."""

    data: Path | None = None
    """folder with the data set's files, if it is not embedded"""
    store: Path | None = None
    """folder where steps are shared with other runs; None to share none"""
    checkpoint: float = 30.0
    """seconds between checkpoints; 0 for one at every epoch"""
    evaluate_every: int = 0
    """epochs between looks at the test (or validation) images on the way; 0 for none"""

    def __post_init__(self) -> None:
        check("checkpoint", self.checkpoint, least=0)
        check("evaluate-every", self.evaluate_every, least=0, whole=True)
