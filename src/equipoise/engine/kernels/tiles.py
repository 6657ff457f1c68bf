"""A ResNet-32, or PODNet's, as a list of layers, and the kernels of `triton.py` with their arguments in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...nets import Net
from ...nets.backbones import RESIDUAL, Block, PaddedBlock, ScaledConv2d
from . import triton as K
from .launch import launch

STEM = 16
"""channels that the stem reads: those of an image, and zeros"""


@dataclass(frozen=True)
class Layer:
    """A convolution and the batch norm after it."""

    index: int
    conv: nn.Conv2d | ScaledConv2d
    norm: nn.BatchNorm2d
    shrunk: int
    """how many times smaller than the image, each way, what it reads is"""

    @property
    def shift(self) -> Tensor | None:
        """What the convolution adds to its output: in train mode nothing but the running mean feels it."""
        return self.conv.shift.detach() if isinstance(self.conv, ScaledConv2d) else None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Channels in and out, side of the window, stride."""
        inside, (side, _), (stride, _) = self.conv.in_channels, self.conv.kernel_size, self.conv.stride
        return max(inside, STEM), self.conv.out_channels, side, stride


@dataclass(frozen=True)
class Group:
    """A residual block."""

    conv1: Layer
    conv2: Layer
    short: Layer | None
    """a convolution in the shortcut"""
    relu: bool
    thinned: bool = False
    """whether the shortcut takes every other pixel, and adds zeros for new channels"""


class Plan:
    """The layers of a residual net in the order in which they compute."""

    def __init__(self, whole: Net, dtype: torch.dtype) -> None:
        net = whole.backbone
        assert isinstance(net, RESIDUAL) and net.conv.in_channels == whole.mean.numel() == whole.std.numel()
        self.net, self.dtype = whole, dtype
        self.layers: list[Layer] = []
        self.blocks: list[Group] = []
        self.ends: list[int] = []

        def layer(conv: nn.Module, norm: nn.Module, shrunk: int) -> Layer:
            assert isinstance(conv, nn.Conv2d | ScaledConv2d) and isinstance(norm, nn.BatchNorm2d)
            self.layers.append(Layer(len(self.layers), conv, norm, shrunk))
            return self.layers[-1]

        self.stem = layer(net.conv, net.bn, 1)
        shrunk = 1
        for stage in net.stages:
            for block in stage.children():
                assert isinstance(block, Block)
                within = shrunk * block.conv1.stride[0]
                first = layer(block.conv1, block.bn1, shrunk)
                second = layer(block.conv2, block.bn2, within)
                if isinstance(block, PaddedBlock):
                    self.blocks.append(Group(first, second, None, False, thinned=block.stride > 1))
                else:
                    besides = list(block.shortcut.children())
                    short = layer(besides[0], besides[1], shrunk) if besides else None
                    self.blocks.append(Group(first, second, short, block.last_relu))
                shrunk = within
            self.ends.append(len(self.blocks))

    def rows(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) as normalised rows of channels, with zeros to fill them up."""
        x = x.permute(0, 2, 3, 1).contiguous()  # in memory they are so already
        pixels, channels = x.numel() // x.shape[3], x.shape[3]
        rows = torch.empty(pixels, STEM, dtype=self.dtype, device=x.device)
        tile, warps = LIGHT[STEM]
        mean, std = self.net.mean, self.net.std
        grid = (cdiv(pixels, tile),)
        launch(K.pixels_to_rows, grid, x, mean, std, rows, pixels, channels, STEM, BM=tile, num_warps=warps)
        return rows

    def weights(self, given: list[Tensor]) -> list[Tensor]:
        """Weights laid out (out, row, column, in), in the kernels' precision."""
        stem, *others = (w.detach().permute(0, 2, 3, 1) for w in given)
        first = torch.zeros(*stem.shape[:3], STEM, dtype=self.dtype, device=stem.device)
        first[..., : stem.shape[3]] = stem
        room = torch.empty(sum(w.numel() for w in others), dtype=self.dtype, device=stem.device)
        cast, used = [], 0
        for w in others:
            cast.append(room[used : used + w.numel()].view(w.shape))
            used += w.numel()
        torch._foreach_copy_(cast, others)
        return [first, *cast]


Patch = tuple[int, int]
"""rows and columns of pixels that are computed at a time"""

CONV: dict[int, tuple[int, int, int, Patch]] = {
    16: (512, 4, 1, (2, 2)),
    32: (256, 4, 3, (1, 1)),
    64: (64, 8, 3, (1, 1)),
}
"""pixels of a tile, warps, loads ahead, and the patch where the stride is 1 (else one pixel); by channels out"""
INPUT: dict[int, tuple[int, int, int, Patch]] = {
    16: (512, 4, 1, (2, 2)),
    32: (256, 4, 3, (1, 1)),
    64: (64, 4, 3, (1, 1)),
}
"""the same for gradients of inputs, by channels in; where the stride is 2, a patch is 2 × 2"""
WEIGHT = {16: (128, 64, 4, 2), 32: (64, 32, 4, 2), 64: (64, 16, 4, 1)}
"""rows of a tile, most shares of the pixels, warps, and pixels at a time, for gradients of weights; by channels in"""
LIGHT = {16: (256, 4), 32: (64, 2), 64: (64, 4)}
"""rows of a tile and warps for passes without a convolution, by channels"""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def count_at_a_time(channels: int, window: int) -> int:
    """How many numbers of a row of the window are multiplied at a time: all of a row of 16s, 64 in a patch."""
    return channels if window == 1 or channels > 16 else 4 * channels


def fit_patch(asked: Patch, layer: Layer) -> Patch:
    """The patch that is computed at a time: what is asked for, where channels stay as many and there is no stride."""
    inside, outside, window, stride = layer.shape
    return asked if inside == outside and window == 3 and stride == 1 else (1, 1)


def count_paired_pixels(layer: Layer) -> int:
    """How many pixels give a gradient of weights at a time."""
    return fit_patch((1, WEIGHT[layer.shape[0]][3]), layer)[1]


class Pass:
    """One batch on its way through the net: sizes, and the kernels with their arguments in place."""

    def __init__(self, plan: Plan, images: int, height: int, width: int) -> None:
        self.plan, self.images, self.height, self.width = plan, images, height, width

    def sides(self, layer: Layer) -> tuple[int, int]:
        """Height and width of what a layer reads."""
        return self.height // layer.shrunk, self.width // layer.shrunk

    def pixels(self, layer: Layer) -> int:
        """Rows that a layer gives."""
        height, width = self.sides(layer)
        return self.images * (height // layer.shape[3]) * (width // layer.shape[3])

    def counts(self, device: torch.device) -> Tensor:
        """How many numbers of a channel each batch norm sees (layers, 1)."""
        return torch.cat([torch.full((1, 1), float(self.pixels(layer)), device=device) for layer in self.plan.layers])

    def map(self, rows: Tensor, block: Group) -> Tensor:
        """A block's output as images."""
        return rows.view(self.images, *self.sides(block.conv2), -1).permute(0, 3, 1, 2)

    def shortcut(self, block: Group, x: Tensor) -> Tensor:
        """What goes around a block without weights in its shortcut."""
        if not block.thinned:
            return x
        stride, more = block.conv1.shape[3], block.conv1.shape[1] - x.shape[1]
        images = x.view(self.images, *self.sides(block.conv1), -1)[:, ::stride, ::stride]
        return F.pad(images, (0, more)).flatten(0, 2)

    def shortcut_gradient(self, block: Group, g: Tensor) -> Tensor:
        """From the gradient at what `shortcut` gave to the one at what it was given."""
        if not block.thinned:
            return g
        inside, _, _, stride = block.conv1.shape
        wide = torch.zeros(self.images, *self.sides(block.conv1), inside, dtype=g.dtype, device=g.device)
        wide[:, ::stride, ::stride] = g.view(self.images, *self.sides(block.conv2), -1)[..., :inside]
        return wide.flatten(0, 2)

    def conv(
        self,
        layer: Layer,
        x: Tensor,
        w: Tensor,
        sums: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """A layer's convolution of x."""
        inside, outside, window, stride = layer.shape
        pixels = self.pixels(layer)
        y = torch.empty(pixels, outside, dtype=x.dtype, device=x.device)
        tile, warps, ahead, asked = CONV[outside]
        tall, wide = fit_patch(asked, layer)
        launch(
            K.conv, (cdiv(pixels, tile), 1),
            x, w, y, y if sums is None else sums, y if bias is None else bias, y if residual is None else residual,
            pixels, *self.sides(layer), inside, outside, window, stride,
            SUMS=sums is not None, BIAS=bias is not None, RESIDUAL=residual is not None, RELU=relu,
            BM=tile // (tall * wide), BN=outside * tall * wide, BK=count_at_a_time(inside, window), AHEAD=ahead,
            TALL=tall, WIDE=wide, num_warps=warps,
        )  # fmt: skip
        return y
