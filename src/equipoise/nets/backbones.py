"""Backbones. Widths and depths are those of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def scale(shape: tuple[int, int, int]) -> Literal["tiny", "small", "large"]:
    """Which backbone and recipe suit images of that shape: `tiny` is like digits, `small` CIFAR, `large` ImageNet."""
    side = max(shape[1:])
    return "tiny" if side <= 16 else "small" if side <= 64 else "large"


class Backbone(nn.Module):
    """Maps normalised images to an embedding of `width` numbers and the outputs of its stages."""

    width: int
    """of the embedding"""
    stages: nn.ModuleList
    """one after the other; the embedding is the mean over the pixels of the last one's output"""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        raise TypeError("a backbone says how it computes")

    def staged(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of what goes into the first stage."""
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return x.mean((2, 3)), maps

    def initialise(self, gen: torch.Generator) -> None:
        """He initialisation (fan out) of the convolutions; batch norm starts as the identity."""
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu", generator=gen)


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes (option B)."""

    def __init__(self, inside: int, outside: int, stride: int, last_relu: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else nn.Identity()
        )
        self.last_relu = last_relu

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x)
        return F.relu(y) if self.last_relu else y


def stage(inside: int, wide: int, stride: int, relus: Sequence[bool]) -> nn.Sequential:
    """A stage of residual blocks, of which the first has the stride; `relus` says which of them end with a ReLU."""
    return nn.Sequential(
        *(Block(wide if k else inside, wide, 1 if k else stride, relu) for k, relu in enumerate(relus))
    )


class ResNet32(Backbone):
    """ResNet-32 for CIFAR (He et al., 2016): 3 stages of 5 blocks, 16, 32 and 64 wide, then the mean over pixels.

    `last_relu=False` leaves out the very last ReLU, as cosine classifiers want it.
    """

    width = 64

    def __init__(self, channels: int = 3, last_relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        whole, last = [True] * 5, [True] * 4 + [last_relu]
        self.stages = nn.ModuleList([stage(16, 16, 1, whole), stage(16, 32, 2, whole), stage(32, 64, 2, last)])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        x = F.relu(self.bn(self.conv(x)))
        return self.staged(x)


class LinearBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut without weights: every other pixel, and zeros for new channels (option A)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.stride, self.more = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; no ReLU follows the sum."""
        y: Tensor = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))


class ShortcutsFirst(Backbone):
    """The second batch norm of each block starts at 0, so that a fresh block is its shortcut, as in PODNet's nets."""

    def initialise(self, gen: torch.Generator) -> None:
        """He initialisation (fan out), and blocks that add nothing yet."""
        super().initialise(gen)
        for m in self.modules():
            if isinstance(m, (Block, LinearBlock)):
                nn.init.zeros_(m.bn2.weight)


class LinearTrunk(ShortcutsFirst):
    """PODNet's ResNet-32: 5, 5, 4 and 1 blocks, 16, 32, 64 and 64 wide, without a ReLU between blocks."""

    width = 64

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stages = nn.ModuleList()
        inside = 16
        for blocks, wide, stride in ((5, 16, 1), (5, 32, 2), (4, 64, 2), (1, 64, 1)):
            stage = []
            for k in range(blocks):
                stage.append(LinearBlock(inside, wide, stride if k == 0 else 1))
                inside = wide
            self.stages.append(nn.Sequential(*stage))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        x = F.relu(self.bn(self.conv(x)))
        return self.staged(x)


FOUR_STAGES = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
"""channels in, channels out and stride of the stages of a ResNet-18"""


class ResNet18(Backbone):
    """ResNet-18 for large images (He et al., 2016): 4 stages of 2 blocks, 64 to 512 wide, then the mean over pixels.

    `last_relu=False` leaves out the very last ReLU, as cosine classifiers want it.
    """

    width = 512

    def __init__(self, channels: int = 3, last_relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(64)
        self.stages = nn.ModuleList()
        for inside, wide, stride in FOUR_STAGES:
            self.stages.append(stage(inside, wide, stride, [True, last_relu or wide < 512]))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        return self.staged(F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, 2, 1))


class HalfLinearTrunk(ShortcutsFirst):
    """PODNet's ResNet-18: its first convolution is 3×3 without a stride, and no ReLU follows a stage's second block."""

    width = 512

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(64)
        self.stages = nn.ModuleList()
        for inside, wide, stride in FOUR_STAGES:
            self.stages.append(stage(inside, wide, stride, [True, False]))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        return self.staged(F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, 2, 1))


RESIDUAL = (ResNet32, LinearTrunk)
"""the backbones that there are kernels for"""


class SmallNet(Backbone):
    """Three convolutions for images of at most 16×16 pixels: seconds on a CPU."""

    width = 64

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        inside = channels
        for wide, stride in ((16, 1), (32, 2), (64, 2)):
            conv = nn.Conv2d(inside, wide, 3, stride, 1, bias=False)
            self.stages.append(nn.Sequential(conv, nn.BatchNorm2d(wide), nn.ReLU()))
            inside = wide

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch."""
        return self.staged(x)
