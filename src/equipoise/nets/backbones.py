"""Backbones. Widths and depths are those of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def choose_scale(shape: tuple[int, int, int]) -> Literal["tiny", "small", "large"]:
    """The class of image sizes, which selects backbone and recipe: like digits, CIFAR or ImageNet."""
    side = max(shape[1:])
    return "tiny" if side <= 16 else "small" if side <= 64 else "large"


class Backbone(nn.Module):
    """Maps normalised images to an embedding of `width` numbers and the outputs of its stages."""

    width: int
    """of the embedding"""
    stages: nn.ModuleList
    """in order; the embedding is the mean over the pixels of the last output"""
    frozen: frozenset[str] = frozenset()
    """names of parameters that no stage trains"""

    def stem(self, x: Tensor) -> Tensor:
        """The layers before the first stage; none by default."""
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        x = self.stem(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return x.mean((2, 3)), maps

    def initialise(self, gen: torch.Generator) -> None:
        """Initialise convolutions as He et al. (fan out); batch norms start as the identity."""
        initialise_convolutions(self, gen)


def initialise_convolutions(module: nn.Module, gen: torch.Generator) -> None:
    """Initialise convolutions as He et al. (fan out), on any device by numbers drawn on the CPU."""
    for m in module.modules():
        if isinstance(m, nn.Conv2d | ScaledConv2d):
            kernel = m.weight if isinstance(m, nn.Conv2d) else m.kernel
            drawn = torch.empty(kernel.shape, dtype=kernel.dtype)
            nn.init.kaiming_normal_(drawn, mode="fan_out", nonlinearity="relu", generator=gen)
            with torch.no_grad():
                kernel.copy_(drawn)


class SmallNet(Backbone):
    """Three convolutions, for images of at most 16×16 pixels."""

    width = 64

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for inside, outside, stride in ((channels, 16, 1), (16, 32, 2), (32, 64, 2)):
            conv = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.stages.append(nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU()))


class ScaledConv2d(nn.Module):
    """A convolution whose kernel has a factor for each pair of channels, 1 at first, and an offset for each channel, 0.

    With the kernel frozen, these are what later steps train (Sun et al., 2019: meta-transfer learning).
    """

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.kernel = nn.Parameter(like.weight.detach())
        self.scale = nn.Parameter(torch.ones(*like.weight.shape[:2], 1, 1))
        self.shift = nn.Parameter(torch.zeros(like.out_channels))
        self.stride, self.padding, self.kernel_size = like.stride, like.padding, like.kernel_size
        self.in_channels, self.out_channels = like.in_channels, like.out_channels

    @property
    def weight(self) -> Tensor:
        """The scaled kernel."""
        return self.kernel * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """The convolution by the scaled kernel, shifted."""
        return F.conv2d(x, self.weight, self.shift, self.stride, self.padding)  # type: ignore[arg-type]


def add_scales(backbone: Backbone) -> Backbone:
    """The backbone with a factor and an offset beside each kernel of its convolutions, which have no bias."""
    for module in list(backbone.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, ScaledConv2d(child))
    return backbone


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut: a 1×1 convolution if the shape changes (option B)."""

    def __init__(self, inside: int, outside: int, stride: int, last_relu: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = self.make_shortcut(inside, outside, stride)
        self.stride, self.last_relu = stride, last_relu

    def make_shortcut(self, inside: int, outside: int, stride: int) -> nn.Module:
        """The shortcut."""
        if stride == 1 and inside == outside:
            return nn.Identity()
        return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x)
        return F.relu(y) if self.last_relu else y


class PaddedBlock(Block):
    """A block with a shortcut without weights: subsampling, and zeros for new channels (option A)."""

    def make_shortcut(self, inside: int, outside: int, stride: int) -> nn.Module:
        """The shortcut."""
        return Subsampled(stride, outside - inside)


class Subsampled(nn.Module):
    """Subsampled pixels, and zeros for new channels."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and pad channels."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Residual(Backbone):
    """A convolution and stages of residual blocks: width, stride, and for each block whether it ends with a ReLU."""

    block: type[Block] = Block
    pools = False
    """whether a 3×3 max pooling with stride 2 follows the first convolution"""

    def __init__(self, conv: nn.Conv2d, *stages: tuple[int, int, Sequence[bool]]) -> None:
        super().__init__()
        self.conv = conv
        self.bn = nn.BatchNorm2d(conv.out_channels)
        self.stages = nn.ModuleList()
        inside = conv.out_channels
        for wide, stride, relus in stages:
            blocks = []
            for k, relu in enumerate(relus):
                blocks.append(self.block(wide if k else inside, wide, 1 if k else stride, relu))
            self.stages.append(nn.Sequential(*blocks))
            inside = wide
        self.width = inside

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, batch norm, ReLU and pooling."""
        x = F.relu(self.bn(self.conv(x)))
        return F.max_pool2d(x, 3, 2, 1) if self.pools else x


class ResNet32(Residual):
    """ResNet-32 for CIFAR (He et al., 2016): 3 stages of 5 blocks, 16, 32 and 64 wide, then the mean over pixels.

    `last_relu=False` leaves out the last ReLU, for cosine classifiers.
    """

    def __init__(self, channels: int = 3, last_relu: bool = True) -> None:
        whole, last = [True] * 5, [True] * 4 + [last_relu]
        super().__init__(nn.Conv2d(channels, 16, 3, 1, 1, bias=False), (16, 1, whole), (32, 2, whole), (64, 2, last))


class ResNet18(Residual):
    """ResNet-18 for large images (He et al., 2016): 4 stages of 2 blocks, 64 to 512 wide, then the mean over pixels.

    `last_relu=False` leaves out the last ReLU, for cosine classifiers.
    """

    pools = True

    def __init__(self, channels: int = 3, last_relu: bool = True) -> None:
        pair, last = (True, True), (True, last_relu)
        conv = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        super().__init__(conv, (64, 1, pair), (128, 2, pair), (256, 2, pair), (512, 2, last))


class PODNetResidual(Residual):
    """The second batch norm of each block starts at 0, so that a new block is its shortcut, as in PODNet's nets."""

    def initialise(self, gen: torch.Generator) -> None:
        """Initialise as He et al. (fan out), and the second batch norms with 0."""
        super().initialise(gen)
        for m in self.modules():
            if isinstance(m, Block):
                nn.init.zeros_(m.bn2.weight)


class PODNetResNet32(PODNetResidual):
    """PODNet's ResNet-32: 5, 5, 4 and 1 blocks, 16, 32, 64 and 64 wide, without a ReLU between blocks."""

    block = PaddedBlock

    def __init__(self, channels: int = 3) -> None:
        conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        none = [False] * 5
        super().__init__(conv, (16, 1, none), (32, 2, none), (64, 2, none[:4]), (64, 1, none[:1]))


class PODNetResNet18(PODNetResidual):
    """PODNet's ResNet-18: its first convolution is 3×3 without a stride, and no ReLU follows a stage's second block."""

    pools = True

    def __init__(self, channels: int = 3) -> None:
        pair = (True, False)
        conv = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        super().__init__(conv, (64, 1, pair), (128, 2, pair), (256, 2, pair), (512, 2, pair))


RESIDUAL = (ResNet32, PODNetResNet32)
"""the backbones that our kernels support"""
LARGE = (ResNet18, PODNetResNet18)
"""those that our kernels support where images come normalised"""
