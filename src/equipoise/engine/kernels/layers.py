"""The layers of a ResNet-18 as the kernels of `norms.py` and cuDNN's convolutions are given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...nets.backbones import Block, Residual
from . import norms as K
from .launch import launch

ROWS, COLUMNS, WARPS = 64, 64, 4
"""of a program at a time"""
FEW_ROWS = 32
"""of a program that reads many tensors or neighbours: more would not fit in its registers"""
SUMMING = 528
"""programs that sum up a tensor, at most: four for each multiprocessor of an H200"""


@dataclass(frozen=True)
class Layer:
    """A convolution and the batch norm after it."""

    index: int
    conv: nn.Conv2d
    norm: nn.BatchNorm2d


@dataclass(frozen=True)
class Group:
    """A residual block."""

    one: Layer
    two: Layer
    short: Layer | None
    relu: bool


class Plan:
    """The layers of a backbone, in the order of their weights."""

    def __init__(self, backbone: Residual) -> None:
        self.layers: list[Layer] = []
        self.stem = self.add(backbone.conv, backbone.bn)
        self.blocks: list[Group] = []
        self.ends: list[int] = []
        """how many blocks there are up to the end of each stage"""
        for stage in backbone.stages:
            assert isinstance(stage, nn.Sequential)
            for block in stage:
                assert isinstance(block, Block)
                short = self.add(*block.shortcut) if isinstance(block.shortcut, nn.Sequential) else None  # type: ignore[arg-type]
                one, two = self.add(block.conv1, block.bn1), self.add(block.conv2, block.bn2)
                self.blocks.append(Group(one, two, short, block.last_relu))
            self.ends.append(len(self.blocks))

    def add(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Layer:
        """The next layer."""
        self.layers.append(Layer(len(self.layers), conv, norm))
        return self.layers[-1]


def rows_of(x: Tensor) -> Tensor:
    """Activations as rows of channels, without copying."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1])


def share_rows(y: Tensor) -> tuple[tuple[int, int], int]:
    """The grid of a kernel that sums up a tensor, and how many rows each of its programs has."""
    count, columns = len(rows_of(y)), -(-y.shape[1] // COLUMNS)
    share = -(-count // max(1, SUMMING // columns))
    share = -(-share // ROWS) * ROWS
    return (-(-count // share), columns), share


def grid_of(y: Tensor, rows: int = ROWS) -> tuple[int, int]:
    """The grid of a kernel that writes every number of a tensor."""
    return -(-len(rows_of(y)) // rows), -(-y.shape[1] // COLUMNS)


class Stem:
    """The first convolution, of 3 channels. One of 7×7 with stride 2 is computed as 4×4 on 2×2 pixels, 16 channels."""

    def __init__(self, conv: nn.Conv2d, x: Tensor, w: Tensor) -> None:
        self.blocks = conv.kernel_size == (7, 7) and conv.stride == (2, 2) and conv.padding == (3, 3)
        self.conv, self.x, self.w = conv, x, w
        self.stride, self.padding = conv.stride, conv.padding
        if self.blocks:
            n, _, height, width = x.shape
            out = x.new_empty(n, height // 2 + 3, width // 2 + 3, 16)
            pixels = out.numel() // 16
            launch(
                K.pixels_to_blocks, (-(-pixels // 256),), x, out, pixels, height, width, BM=256, num_warps=WARPS,
            )  # fmt: skip
            self.x = out.permute(0, 3, 1, 2)
            w = F.pad(F.pixel_unshuffle(F.pad(w, (1, 0, 1, 0)), 2), (0, 0, 0, 0, 0, 4))
            self.w = w.contiguous(memory_format=torch.channels_last)
            self.stride, self.padding = (1, 1), (0, 0)

    def forward(self) -> Tensor:
        """What it gives."""
        return convolve(self.x, self.w, self.stride, self.padding)

    def gradient(self, dy: Tensor) -> Tensor:
        """The gradient of its weights."""
        _, dw = differentiate(dy, self.x, self.w, self.stride, self.padding, False)
        return F.pixel_shuffle(dw[:, :12], 2)[:, :, 1:, 1:] if self.blocks else dw


def convolve(x: Tensor, w: Tensor, stride: Any, padding: Any) -> Tensor:
    """A convolution, channels last."""
    return F.conv2d(x, w, None, stride, padding).contiguous(memory_format=torch.channels_last)


def differentiate(
    dy: Tensor, x: Tensor, w: Tensor, stride: Any, padding: Any, of_input: bool = True
) -> tuple[Tensor, Tensor]:
    """The gradients of a convolution's input and weights."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, padding, (1, 1), False, (0, 0), 1, (of_input, True, False)
    )
    return dx.contiguous(memory_format=torch.channels_last) if of_input else dx, dw
