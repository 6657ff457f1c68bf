"""Faster functions in place of a net's own features in a training step, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.augment import Augment, Normalisation, ResizedCrop
from ..method import Method
from ..nets import Features
from ..nets.backbones import LARGE, RESIDUAL, Backbone, Residual, ScaledConv2d
from ..step import Step
from .cuda_graph import Engine, UnfitError
from .pixels import has_resize_kernel


def replace_features(engine: Engine, s: Step, bf16: bool, method: Method) -> tuple[Features | None, Features | None]:
    """Functions that replace the features of the net and of its teacher; None for no replacement.

    Only features: their shapes are constant, while the head grows with every step.
    """
    if engine == "compiled":
        if learns_pixels(s):
            raise UnfitError("pixels are learned in less time than it takes to compile that")
        return torch.compile(s.net.features), None if s.teacher is None else torch.compile(s.teacher.features)
    if engine == "fused":
        if reason := explain_unfit(s, bf16, method):
            raise UnfitError(reason)
        from .kernels.resnet32 import Frozen, Training  # needs Triton, which comes with torch for GPUs

        net = Training(s.net) if s.net.training else Frozen(s.net)
        return net, None if s.teacher is None else Frozen(s.teacher)
    return None, None


def get_backbones(engine: Engine, s: Step) -> tuple[Features, Features | None]:
    """Functions that replace the features of the net and of its teacher, where images come normalised."""
    if engine == "fused":
        from .kernels.resnet18 import Frozen, Training

        assert isinstance(s.net.backbone, Residual)
        net = Training(s.net.backbone) if s.net.training else Frozen(s.net.backbone)
        return net, None if s.teacher is None else Frozen(s.teacher.backbone)  # type: ignore[arg-type]
    wrap = torch.compile if engine == "compiled" else lambda backbone: backbone
    return wrap(s.net.backbone), None if s.teacher is None else wrap(s.teacher.backbone)


def find_normalisation(
    engine: Engine, s: Step, crop: Augment, bf16: bool, method: Method, requested: bool
) -> Normalisation | None:
    """How the kernel that cuts images out normalises them too, as the net would; None where it does not.

    It does so only for backbones of ours, which begin by a convolution, and methods that use images as they come. Our
    own kernels for these are not used yet unless they are `requested`.
    """
    cuts = type(crop) is ResizedCrop and not isinstance(s.images.x, Tensor) and has_resize_kernel(s.n.device)
    if not cuts or not isinstance(s.net.backbone, Residual):
        return None
    if engine == "fused" and (not requested or explain_unfit(s, bf16, method, LARGE)):
        return None
    if method.overrides("views") or method.overrides("more"):
        return None
    return Normalisation(s.net.mean.flatten(), s.net.std.flatten(), torch.bfloat16 if bf16 else s.net.mean.dtype)


def explain_unfit(s: Step, bf16: bool, method: Method, kinds: Sequence[type[Backbone]] = RESIDUAL) -> str | None:
    """Why our kernels for these kinds of backbones do not support this training; None if they do."""
    if not bf16:
        return "our kernels compute in bf16, and the precision is fp32"
    for net in (s.net, s.teacher):
        if net is not None and not has_kernels(net.backbone, kinds):
            return f"we have no kernels for this {type(net.backbone).__name__}"
    _, height, width = s.shape
    if height % 4 or width % 4:
        return f"our kernels need height and width to be multiples of 4, and images have {height} x {width} pixels"
    if not s.net.training and any(w.requires_grad for w in s.net.backbone.parameters()):
        return "our kernels train with batch statistics, and batch norms are frozen"
    copies = method.views(torch.zeros(2, *s.shape, dtype=torch.uint8, device=s.n.device))
    if copies.dtype != torch.uint8 or tuple(copies.shape[1:]) != tuple(s.shape):
        return "our kernels read images as those of the data set, and this method makes others of them"
    if learns_pixels(s):
        return "our kernels give no gradients of pixels, and this method learns some"
    return None


def learns_pixels(s: Step) -> bool:
    """Whether the state holds pixels to learn, as in the stage of Mnemonics' exemplars."""
    return any(value.ndim == 4 for value in s.state.values())


def has_kernels(backbone: Backbone, kinds: Sequence[type[Backbone]] = RESIDUAL) -> bool:
    """Whether our kernels support this backbone: of one of these classes, without changes."""
    norms = [m for m in backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    default = all(m.eps == 1e-5 and m.momentum == 0.1 and m.affine and m.track_running_stats for m in norms)
    scaled = kinds is not RESIDUAL and any(isinstance(m, ScaledConv2d) for m in backbone.modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
    return type(backbone) in kinds and default and not scaled and not hooked
