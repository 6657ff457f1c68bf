"""ResNet-18, ours and PODNet's: cuDNN's convolutions, and the kernels of `norms.py` between them.

`Training` stands in for a backbone in a training step, with gradients, and `Frozen` for one that only answers, such as
the teacher's. Both read normalised images, and the backbone's own modules. Nothing is compiled by torch, so that a step
is recorded in seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...nets.backbones import Residual
from . import norms as K
from .launch import launch
from .layers import (
    COLUMNS,
    FEW_ROWS,
    ROWS,
    WARPS,
    Group,
    Layer,
    Plan,
    Stem,
    convolve,
    differentiate,
    grid_of,
    rows_of,
    share_rows,
)
from .resnet32 import split

MOMENTUM = 0.1
"""of batch norms, as torch has it"""


class Training:
    """A ResNet-18 in train mode: batch statistics, gradients, and running statistics that move."""

    def __init__(self, backbone: Residual) -> None:
        self.plan = Plan(backbone)
        self.counts: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of normalised images, channels last."""
        given = [p for layer in self.plan.layers for p in (layer.conv.weight, layer.norm.weight, layer.norm.bias)]
        h, *maps = Function.apply(x, self, *given)  # type: ignore[no-untyped-call]
        return h, maps

    def move_statistics(self, sums: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Running means and variances, as `BatchNorm2d` moves them; returns the batch's own."""
        if tuple(counts) not in self.counts:  # made once: within a CUDA graph it could not be
            self.counts[tuple(counts)] = torch.tensor(counts, device=sums.device)[:, None]
        count = self.counts[tuple(counts)]
        mean, square = (sums / (K.FORWARD.value * count[..., None])).unbind(1)
        var = (square - mean * mean).clamp_min_(0).masked_fill_(square < 0, torch.nan)
        norms = [layer.norm for layer in self.plan.layers]
        for name, now in (("running_mean", mean), ("running_var", var * (count / (count - 1)))):
            running = [getattr(norm, name) for norm in norms]
            torch._foreach_lerp_(running, [row[: len(r)] for row, r in zip(now.float(), running)], MOMENTUM)
        torch._foreach_add_([norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None], 1)
        return mean, var


class Function(torch.autograd.Function):
    """The whole backbone as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Training, *given: Tensor) -> tuple[Tensor, ...]:
        """Weights, γ and β of every layer follow each other in `given`."""
        plan, dtype = net.plan, x.dtype
        gammas, betas = given[1::3], given[2::3]
        weights = [torch.empty_like(w, dtype=dtype) for w in given[0::3]]
        torch._foreach_copy_(weights, list(given[0::3]))
        sums = torch.zeros(len(plan.layers), 2, K.WIDEST.value, dtype=torch.int64, device=x.device)
        ys: list[Tensor] = [x] * len(plan.layers)

        def note(layer: Layer, y: Tensor) -> None:
            grid, share = share_rows(y)
            ys[layer.index] = y
            launch(
                K.add_up, grid, y, sums[layer.index], len(rows_of(y)), share, y.shape[1], BM=ROWS, BC=COLUMNS,
                num_warps=WARPS,
            )  # fmt: skip

        def conv(layer: Layer, x: Tensor) -> None:
            note(layer, convolve(x, weights[layer.index], layer.conv.stride, layer.conv.padding))

        def normalise(layer: Layer, relu: bool, other: Tensor | None = None, short: Layer | None = None) -> Tensor:
            k, s = layer.index, layer.index if short is None else short.index
            y = ys[k]
            out = torch.empty_like(y)
            launch(
                K.normalise, grid_of(y),
                y, sums[k], gammas[k], betas[k], y if other is None else other, sums[s], gammas[s], betas[s], out,
                len(rows_of(y)), y.shape[1], OTHER=0 if other is None else 1 if short is None else 2, RELU=relu,
                BM=ROWS, BC=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
            return out

        stem = Stem(plan.stem.conv, x, weights[0])
        note(plan.stem, stem.forward())
        first, where = pool(ys[0], sums[0], gammas[0], betas[0])
        xs, inner = [first], []
        for block in plan.blocks:
            if block.short is not None:
                conv(block.short, xs[-1])
            conv(block.one, xs[-1])
            inner.append(normalise(block.one, True))
            conv(block.two, inner[-1])
            other = xs[-1] if block.short is None else ys[block.short.index]
            xs.append(normalise(block.two, block.relu, other, block.short))
        mean, var = net.move_statistics(sums, [len(rows_of(y)) for y in ys])
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.stem = plan, stem
        ctx.save_for_backward(sums, mean, var, where, *given, *weights, *ys, *xs, *inner)
        h = rows_of(xs[-1]).view(len(x), -1, xs[-1].shape[1]).mean(1, dtype=torch.float32)
        return h, *(xs[end].detach() for end in plan.ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *wanted: Tensor | None) -> Any:
        """Gradients of weights, γ and β; none of the images."""
        plan: Plan = ctx.plan
        n, blocks = len(plan.layers), plan.blocks
        sums, mean, var, where, *saved = ctx.saved_tensors
        given, weights, ys, xs, inner = split(saved, 3 * n, n, n, len(blocks) + 1, len(blocks))
        gammas, betas = given[1::3], given[2::3]
        sums_g = torch.zeros_like(sums)
        dh, *rest = wanted
        extras = {end: last(d.to(xs[0].dtype)) for end, d in zip(plan.ends, rest) if d is not None}
        dws: list[Tensor] = [sums] * n

        def meet(at: int, d: Tensor, other: Tensor | None, area: int = 0) -> Tensor:
            """The gradient before the ReLU at the end of a block."""
            block, x = blocks[at], xs[at + 1]
            k, s = block.two.index, block.two.index if block.short is None else block.short.index
            g, extra = torch.empty_like(x), extras.get(at + 1)
            grid, share = share_rows(x)
            launch(
                K.gather_gradient, grid,
                d, d if other is None else other, d if extra is None else extra, x, ys[k], ys[s], g, sums_g[k],
                sums_g[s], len(rows_of(x)), share, area, x.shape[1], OTHER=other is not None, EXTRA=extra is not None,
                RELU=block.relu, SHORT=block.short is not None, BM=FEW_ROWS, BC=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
            return g

        def normalise(layer: Layer, g: Tensor, relu: bool = False) -> Tensor:
            k = layer.index
            y = ys[k]
            dy = torch.empty_like(y)
            if relu:
                grid, share = share_rows(y)
                launch(
                    K.add_up_gradient, grid, g, y, sums[k], gammas[k], betas[k], sums_g[k], len(rows_of(y)), share,
                    y.shape[1], BM=ROWS, BC=COLUMNS, num_warps=WARPS,
                )  # fmt: skip
            launch(
                K.normalise_backward, grid_of(y), g, y, sums[k], sums_g[k], gammas[k], betas[k], dy, len(rows_of(y)),
                y.shape[1], RELU=relu, BM=ROWS, BC=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
            return dy

        def back(layer: Layer, dy: Tensor, x: Tensor) -> Tensor:
            conv, k = layer.conv, layer.index
            dx, dws[k] = differentiate(dy, x, weights[k], conv.stride, conv.padding)
            return dx

        area = xs[-1].shape[2] * xs[-1].shape[3]
        dh = torch.zeros(len(xs[0]), xs[-1].shape[1], device=sums.device) if dh is None else dh.float().contiguous()
        d: Tensor = dh
        other: Tensor | None = None  # a block's output leads to the next one's convolution, and around it
        for at in reversed(range(len(blocks))):
            block, x = blocks[at], xs[at]
            g = meet(at, d, other, area if at + 1 == len(blocks) else 0)
            inside = normalise(block.one, back(block.two, normalise(block.two, g), inner[at]), True)
            other = g if block.short is None else back(block.short, normalise(block.short, g), x)
            d = back(block.one, inside, x)
        assert other is not None
        dws[0] = ctx.stem.gradient(unpool(d + other, where, ys[0], sums[0], sums_g[0], gammas[0], betas[0]))
        d_beta, gy = (sums_g / K.BACKWARD.value).unbind(1)
        d_gamma = (gy - mean * d_beta) * (var + K.EPS.value).rsqrt()
        given_dws = [torch.empty_like(w) for w in given[0::3]]
        torch._foreach_copy_(given_dws, dws)
        grads: list[Tensor | None] = [None, None]
        for k, dw in enumerate(given_dws):
            grads += [dw, d_gamma[k, : len(dw)], d_beta[k, : len(dw)]]
        return tuple(grads)


def pool(y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Batch norm, ReLU and 3×3 max pooling with stride 2, and which of the nine pixels it was."""
    n, channels, height, width = y.shape
    out = torch.empty(n, height // 2, width // 2, channels, dtype=y.dtype, device=y.device).permute(0, 3, 1, 2)
    where = torch.empty_like(out, dtype=torch.int8)
    launch(
        K.normalise_and_pool, grid_of(out, FEW_ROWS), y, sums, gamma, beta, out, where, len(rows_of(out)),
        len(rows_of(y)), height, width, channels, BM=FEW_ROWS, BC=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out, where


def unpool(d: Tensor, where: Tensor, y: Tensor, sums: Tensor, sums_g: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """The gradient at y, the input of `pool`, from that at what it gives."""
    dy = torch.empty_like(y)
    _, channels, height, width = y.shape
    grid, share = share_rows(y)
    launch(
        K.add_up_unpooled, grid, d, where, y, sums, gamma, beta, sums_g, len(rows_of(y)), share, height, width,
        channels, BM=FEW_ROWS, BC=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    launch(
        K.unpooled_backward, grid_of(y, FEW_ROWS), d, where, y, sums, sums_g, gamma, beta, dy, len(rows_of(y)),
        height, width, channels, BM=FEW_ROWS, BC=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return dy


def last(x: Tensor) -> Tensor:
    """The same numbers, channels last."""
    return x.contiguous(memory_format=torch.channels_last)


class Frozen:
    """A ResNet-18 in eval mode, as it is now: each batch norm is folded into the convolution before it.

    cuDNN adds the shortcut and applies the ReLU too: nothing is written between convolutions.
    """

    def __init__(self, backbone: Residual, dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan, self.dtype = Plan(backbone), dtype
        self.weights: list[tuple[Tensor, Tensor]] = []
        for layer in self.plan.layers:
            norm = layer.norm
            assert norm.running_mean is not None and norm.running_var is not None
            factor = norm.weight * (norm.running_var + norm.eps).rsqrt()
            w = (layer.conv.weight * factor[:, None, None, None]).detach().to(dtype)
            b = (norm.bias - norm.running_mean * factor).detach().to(dtype)
            self.weights.append((w.contiguous(memory_format=torch.channels_last), b))

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of normalised images, channels last; without gradients."""
        plan, maps = self.plan, []
        with torch.autocast(x.device.type, enabled=False):
            z = F.max_pool2d(self.convolve(plan.stem, x.to(self.dtype)), 3, 2, 1)
            for at, block in enumerate(plan.blocks):
                z = self.run_block(block, z)
                if at + 1 in plan.ends:
                    maps.append(z)
        return z.mean((2, 3), dtype=torch.float32), maps

    def run_block(self, block: Group, x: Tensor) -> Tensor:
        """What a block gives."""
        y = self.convolve(block.one, x)
        _, offset = self.weights[block.two.index]
        if block.short is not None:
            w, b = self.weights[block.short.index]
            x, offset = convolve(x, w, block.short.conv.stride, block.short.conv.padding), offset + b
        if block.relu:
            return self.convolve(block.two, y, x, offset)
        w, _ = self.weights[block.two.index]
        return torch.add(convolve(y, w, (1, 1), (1, 1)), x).add_(offset[:, None, None])

    def convolve(self, layer: Layer, x: Tensor, z: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        """ReLU of a convolution, with its offset and z added: one kernel of cuDNN."""
        conv, (w, b) = layer.conv, self.weights[layer.index]
        b = b if offset is None else offset
        if not x.is_cuda:
            y = F.conv2d(x, w, b, conv.stride, conv.padding)  # type: ignore[arg-type]
            return F.relu(y if z is None else y + z)
        sizes: Any = (conv.stride, conv.padding, conv.dilation, 1)
        if z is None:
            return torch.cudnn_convolution_relu(x, w, b, *sizes)
        return torch.cudnn_convolution_add_relu(x, w, z, 1.0, b, *sizes)
