"""EEIL (Castro et al., 2018): end-to-end incremental learning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..data.augment import Augment, Crop, Jitter
from ..errors import UsageError
from ..losses import distillation
from ..method import Method
from ..nets import Batch
from ..settings import number
from ..step import Finetune, Plan, Recipe, Stages, Step
from .il_baseline import ILBaseline


@dataclass(frozen=True)
class EEIL(Method):
    """A head for each step: L = L_c + Σ over heads of a distillation within its classes; then balanced fine-tuning.

    The fine-tuning trains the whole net on the exemplars of all classes, and every head, the newest included, is
    distilled from the net as it was before. The gradients of both trainings have noise, in all steps but the base step,
    for which no training is published.
    """

    name: ClassVar[str] = "eeil"
    title: ClassVar[str] = "EEIL"
    least_memory = 1
    cost: ClassVar[float] = 1.2  # by arithmetic: noise takes a kernel for each of a hundred tensors
    remedies = (
        "balanced", "relaxed", "meta", "memory-oversampling", "class-oversampling", "loss-rescaling",
        "separated-softmax",
    )  # fmt: skip
    reason = "it fine-tunes on the balanced memory already"
    # An epoch of the original is twelve here: it stores twelve augmented versions of every image of CIFAR-100.
    recipes: ClassVar = {
        **Method.recipes,
        "small": Recipe(epochs=480, milestones=(0.25, 0.5, 0.75), weight_decay=1e-4),
        "large": Recipe(epochs=40, milestones=(0.25, 0.5, 0.75), weight_decay=1e-4),
    }
    imagenet: ClassVar = {"finetune": {"epochs": 30}}
    T: float = number(2.0, above=0, most=1e6)
    """temperature of the distillation"""
    noise: float = number(0.3, least=0, most=1e6)
    """η of the noise on the sum of a batch's gradients, with variance η / (1 + epoch)^0.55"""
    shift: float = number(0.0, least=0, most=255)
    """grey levels by which training images become darker or brighter at most; the original has 63"""
    contrast: float = number(0.0, least=0, most=1)
    """largest change of the contrast of training images, as a fraction; the original has 0.8"""
    finetune: Finetune = Finetune(
        360, 0.01, weight_decay=1e-4, milestones=(1 / 3, 2 / 3), what="all", batch_norm="train"
    )
    """of the whole net, where its own loss stands"""

    def objective(self, s: Step, b: Batch) -> Tensor:
        """Eqs. 1 to 3 of EEIL, without a factor T²."""
        Lc = self.classify(b.out.z, b.y, s)
        if b.ref is None:
            return Lc
        heads = s.sizes if b.ref.z.shape[1] == s.N else s.sizes[:-1]
        return Lc + distillation(b.out.z, b.ref.z, self.T, heads) / self.T**2

    def stages(self, plan: Plan) -> Stages:
        """After the base step with noise; the teacher of the fine-tuning is the net as it began."""
        stages: Stages = ()
        for stage in super().stages(plan):
            if plan.t > 0 and not isinstance(stage, str):
                stage = replace(stage, gradient_noise=self.noise / stage.recipe.batch**2)
                if stage.images == "memory" and stage.teacher is not None:
                    stage = replace(stage, teacher="as this stage began")
            stages += (stage,)
        return stages

    def augmentation(self, crop: Augment) -> Augment:
        """With brightness and contrast, where they are to change."""
        if not (self.shift or self.contrast):
            return crop
        if not isinstance(crop, Crop):
            raise UsageError(
                "eeil cannot change brightness and contrast of images that are cropped at random sizes, such as "
                "ImageNet's: remove shift and contrast"
            )
        return Jitter(**vars(crop), shift=self.shift, contrast=self.contrast)

    def at_base(self) -> Method:
        """The plain cross-entropy, of images with the same augmentation."""
        return EEIL(shift=self.shift, contrast=self.contrast) if self.shift or self.contrast else ILBaseline()
