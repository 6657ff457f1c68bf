"""ResNet-32, ours and PODNet's, in the kernels of `triton.py`: the same weights, the same function, much faster.

`Training` stands in for a net's features in a training step, with gradients; `Frozen` for one that only answers, such
as the teacher. Both read the net's own modules; nothing of a method changes. The same step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...nets import Net
from ..cuda_graph import SideStream
from . import triton as K
from .launch import launch
from .tiles import INPUT, LIGHT, WEIGHT, Group, Layer, Pass, Plan, cdiv, count_at_a_time, count_paired_pixels, fit_patch

MOMENTUM = 0.1
"""of batch norms, as torch has it"""


class Training:
    """A ResNet-32 in train mode: batch statistics, gradients, and running statistics that move."""

    def __init__(self, net: Net, dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan = Plan(net, dtype)
        self.counts: dict[tuple[int, int, int], Tensor] = {}
        self.aside = SideStream(net.mean.device, "weights")

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch of uint8 images."""
        layers = self.plan.layers
        given = [p for layer in layers for p in (layer.conv.weight, layer.norm.weight, layer.norm.bias)]
        h, *maps = Function.apply(x, self, *given)  # type: ignore[no-untyped-call]
        if not h.requires_grad:
            self.aside.join()  # there will be no backward pass to do so
        return h, maps

    def count(self, way: Pass, device: torch.device) -> Tensor:
        """`way.counts`, made once."""
        key = (way.images, way.height, way.width)
        if key not in self.counts:
            self.counts[key] = way.counts(device)
        return self.counts[key]

    def moments(self, sums: Tensor, way: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of what each batch norm saw, and how much that was."""
        count = self.count(way, sums.device)
        mean, square = (sums.sum(1) / (K.FORWARD.value * count[:, None])).unbind(1)
        return mean, (square - mean * mean).clamp_min_(0).masked_fill_(square < 0, torch.nan), count

    def move_statistics(self, sums: Tensor, way: Pass) -> None:
        """Running means and variances, as `BatchNorm2d` moves them."""
        mean, var, count = self.moments(sums, way)
        norms, shifts = zip(*((layer.norm, layer.shift) for layer in self.plan.layers))
        for name, now in (("running_mean", mean), ("running_var", var * (count / (count - 1)))):
            running = [getattr(norm, name) for norm in norms]
            rows = [row[: len(r)] for row, r in zip(now, running)]
            if name == "running_mean" and shifts[0] is not None:
                rows = list(torch._foreach_add(rows, shifts))
            torch._foreach_lerp_(running, rows, MOMENTUM)
        torch._foreach_add_([norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None], 1)


class Function(torch.autograd.Function):
    """The whole backbone as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Training, *given: Tensor) -> tuple[Tensor, ...]:
        """Weights, γ and β of every layer follow each other in `given`."""
        plan = net.plan
        images = len(x)
        way = Pass(plan, images, *x.shape[2:])
        weights, gammas, betas = plan.weights(list(given[0::3])), given[1::3], given[2::3]
        sums = torch.zeros(len(plan.layers), K.REPLICAS.value, 2, K.WIDEST.value, dtype=torch.int64, device=x.device)
        ys: list[Tensor] = [x] * len(plan.layers)

        def conv(layer: Layer, x: Tensor) -> Tensor:
            k = layer.index
            ys[k] = way.conv(layer, x, weights[k], sums[k])
            return ys[k]

        def normalise(layer: Layer, relu: bool, other: Tensor | None = None, short: Layer | None = None) -> Tensor:
            k, s = layer.index, layer.index if short is None else short.index
            y, out = ys[k], torch.empty_like(ys[k])
            pixels, channels = y.shape
            tile, warps = LIGHT[channels]
            launch(
                K.normalise, (cdiv(pixels, tile),),
                y, sums[k], gammas[k], betas[k], y if other is None else other, sums[s], gammas[s], betas[s], out,
                pixels, channels, OTHER=0 if other is None else 1 if short is None else 2, RELU=relu, BM=tile,
                num_warps=warps,
            )  # fmt: skip
            return out

        image = plan.rows(x)
        conv(plan.stem, image)
        xs, inner = [normalise(plan.stem, True)], []
        for block in plan.blocks:
            conv(block.conv1, xs[-1])
            inner.append(normalise(block.conv1, True))
            conv(block.conv2, inner[-1])
            other = way.shortcut(block, xs[-1]) if block.short is None else conv(block.short, xs[-1])
            xs.append(normalise(block.conv2, block.relu, other, block.short))
        with net.aside:
            net.move_statistics(sums, way)
        ctx.set_materialize_grads(False)
        ctx.net, ctx.way = net, way
        ctx.save_for_backward(image, sums, *given, *weights, *ys, *xs, *inner)
        h = xs[-1].view(images, -1, K.WIDEST.value).mean(1, dtype=torch.float32)
        return h, *(way.map(xs[end], plan.blocks[end - 1]) for end in plan.ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *wanted: Tensor | None) -> Any:
        """Gradients of weights, γ and β; none of the images."""
        net, way = ctx.net, ctx.way
        plan: Plan = net.plan
        n, blocks = len(plan.layers), plan.blocks
        image, sums, *saved = ctx.saved_tensors
        given, weights, ys, xs, inner = split(saved, 3 * n, n, n, len(blocks) + 1, len(blocks))
        gammas, device = given[1::3], image.device
        sums_g = torch.zeros_like(sums)
        dh, *rest = wanted
        extras = {end: to_rows(d, plan.dtype) for end, d in zip(plan.ends, rest) if d is not None}
        parts = Parts(way, device)
        alive: list[Tensor] = []  # what is read aside must not be overwritten meanwhile

        def normalise(layer: Layer, g: Tensor, short: Layer | None = None) -> tuple[Tensor, Tensor]:
            k, s = layer.index, layer.index if short is None else short.index
            dy = torch.empty_like(g)
            dys = dy if short is None else torch.empty_like(g)
            pixels, channels = g.shape
            tile, warps = LIGHT[channels]
            launch(
                K.normalise_backward, (cdiv(pixels, tile),),
                g, ys[k], sums[k], sums_g[k], gammas[k], dy, ys[s], sums[s], sums_g[s], gammas[s], dys, pixels,
                channels, SHORT=short is not None, BM=tile, num_warps=warps,
            )  # fmt: skip
            alive.extend((g, dy, dys))
            return dy, dys

        def weight_gradient(layer: Layer, x: Tensor, dy: Tensor) -> None:
            inside, outside, window, stride = layer.shape
            tile, _, warps, _ = WEIGHT[inside]
            pair = count_paired_pixels(layer)
            wide = 4 * inside if window == 3 and inside < 64 else inside
            room = parts.of(layer)
            shares = len(room) // pair
            with net.aside:
                launch(
                    K.weight_gradient, (shares, window, cdiv((window + pair - 1) * inside, wide)),
                    x, dy, room, len(dy), cdiv(cdiv(len(dy), shares * pair), tile) * tile, *way.sides(layer),
                    inside, outside, window, stride, BP=tile, BK=wide, PAIR=pair, num_warps=warps,
                )  # fmt: skip
                parts.done(layer)

        def input_gradient(
            layer: Layer, dy: Tensor, below: Layer, x: Tensor, relu: bool, below_short: Layer | None = None,
            short: Layer | None = None, dys: Tensor | None = None, same: Tensor | None = None,
            extra: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            inside, outside, _, stride = layer.shape
            k, b = layer.index, below.index
            s, bs = k if short is None else short.index, b if below_short is None else below_short.index
            g = torch.empty_like(x)
            tile, warps, ahead, asked = INPUT[inside]
            tall, wide = fit_patch(asked, layer) if stride == 1 else (stride, stride)
            launch(
                K.input_gradient, (cdiv(len(g), tile), 1),
                dy, weights[k], dy if dys is None else dys, weights[s], dy if same is None else same,
                dy if extra is None else extra, x, ys[b], ys[bs], g, sums_g[b], sums_g[bs], len(g),
                *way.sides(layer), inside, outside, stride, SHORT=dys is not None, SAME=same is not None,
                EXTRA=extra is not None, RELU=relu, BELOW=below_short is not None,
                BM=tile // (tall * wide), BN=inside * tall * wide, BK=count_at_a_time(outside, 3), AHEAD=ahead,
                TALL=tall, WIDE=wide, num_warps=warps,
            )  # fmt: skip
            return g

        block, x = blocks[-1], xs[-1]
        g, end, k = torch.empty_like(x), len(blocks), block.conv2.index
        dh = torch.zeros(way.images, x.shape[1], device=device) if dh is None else dh.float().contiguous()
        tile, warps = LIGHT[x.shape[1]]
        launch(
            K.top, (cdiv(len(x), tile),),
            dh, extras.get(end, x), x, ys[k], g, sums_g[k], len(x), len(x) // way.images, x.shape[1],
            EXTRA=end in extras, RELU=block.relu, BM=tile, num_warps=warps,
        )  # fmt: skip
        for at in reversed(range(len(blocks))):
            block, x = blocks[at], xs[at]
            one, two, short = block.conv1, block.conv2, block.short
            dy, dys = normalise(two, g, short)
            weight_gradient(two, inner[at], dy)
            dy, _ = normalise(one, input_gradient(two, dy, one, inner[at], True))
            weight_gradient(one, x, dy)
            if short is not None:
                weight_gradient(short, x, dys)
            under = blocks[at - 1] if at else Group(plan.stem, plan.stem, None, True)
            around = way.shortcut_gradient(block, g) if short is None else None
            g = input_gradient(
                one, dy, under.conv2, x, under.relu, under.short,
                short, None if short is None else dys, around, extras.get(at),
            )  # fmt: skip
        dy, _ = normalise(plan.stem, g)
        weight_gradient(plan.stem, image, dy)
        mean, var, _ = net.moments(sums, way)
        d_beta, gy = (sums_g.sum(1) / K.BACKWARD.value).unbind(1)
        d_gamma = (gy - mean * d_beta) * (var + K.EPS.value).rsqrt()
        net.aside.join()
        grads: list[Tensor | None] = [None, None]
        for layer in plan.layers:
            k, w = layer.index, given[3 * layer.index]
            grads += [lay_out_like(parts.sums[k], w), d_gamma[k, : len(w)], d_beta[k, : len(w)]]
        return tuple(grads)


def split(saved: list[Tensor], *lengths: int) -> Iterator[list[Tensor]]:
    """The lists that were laid end to end."""
    for length in lengths:
        yield saved[:length]
        saved = saved[length:]


def to_rows(d: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient at a stage output, as rows of channels."""
    return d.permute(0, 2, 3, 1).to(dtype).contiguous()


def lay_out_like(d: Tensor, w: Tensor) -> Tensor:
    """A gradient (out, row, column, in), laid out in memory as the weights are."""
    d = d[..., : w.shape[1]].contiguous()
    if w.permute(0, 2, 3, 1).is_contiguous():
        return d.as_strided(w.size(), w.stride())
    return d.permute(0, 3, 1, 2).contiguous()


class Parts:
    """Room for the parts of weight gradients; layers of one shape lie together, so that one kernel adds them up."""

    def __init__(self, way: Pass, device: torch.device) -> None:
        self.members: dict[tuple[int, ...], list[int]] = {}
        for layer in way.plan.layers:
            inside, outside, window, _ = layer.shape
            tile, most, _, _ = WEIGHT[inside]
            pair = count_paired_pixels(layer)
            key = (pair * min(most, cdiv(way.pixels(layer), tile * pair)), outside, window, window, inside)
            self.members.setdefault(key, []).append(layer.index)
        self.room = {key: torch.empty(len(who), *key, device=device) for key, who in self.members.items()}
        self.missing = {layer.index for layer in way.plan.layers}
        self.sums: dict[int, Tensor] = {}

    def of(self, layer: Layer) -> Tensor:
        """The room of a layer: its first dimension are the parts."""
        return next(self.room[key][who.index(layer.index)] for key, who in self.members.items() if layer.index in who)

    def done(self, layer: Layer) -> None:
        """A layer's parts are there; once those of all of its shape are, they are added up."""
        self.missing.discard(layer.index)
        for key, who in self.members.items():
            if layer.index in who and not self.missing.intersection(who):
                self.sums |= zip(who, self.room[key].sum(1))


class Frozen:
    """A ResNet-32 in eval mode, as it is now: its batch norms are folded into weights and biases."""

    def __init__(self, net: Net, dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan = Plan(net, dtype)
        folded, self.biases = [], []
        for layer in self.plan.layers:
            norm = layer.norm
            assert norm.running_mean is not None and norm.running_var is not None
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            folded.append((layer.conv.weight * scale[:, None, None, None]).detach())
            mean = norm.running_mean if layer.shift is None else norm.running_mean - layer.shift
            self.biases.append((norm.bias - mean * scale).detach().float())
        self.weights = self.plan.weights(folded)

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The embedding and the stage outputs of a batch of uint8 images; without gradients."""
        plan, images = self.plan, len(x)
        way = Pass(plan, images, *x.shape[2:])

        def conv(layer: Layer, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
            k = layer.index
            return way.conv(layer, x, self.weights[k], bias=self.biases[k], residual=residual, relu=relu)

        z = conv(plan.stem, plan.rows(x), None, True)
        maps = []
        for at, block in enumerate(plan.blocks):
            inner = conv(block.conv1, z, None, True)
            short = way.shortcut(block, z) if block.short is None else conv(block.short, z, None, False)
            z = conv(block.conv2, inner, short, block.relu)
            if at + 1 in plan.ends:
                maps.append(way.map(z, block))
        return z.view(images, -1, z.shape[1]).mean(1, dtype=torch.float32), maps
