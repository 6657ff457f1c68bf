"""Our own kernels on a CPU, run by Triton's interpreter: each against torch, and all of them as a ResNet-32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.engine import meta
from equipoise.engine.kernels.launch import launch
from equipoise.methods.spb_i import rotate
from equipoise.nets import Net
from equipoise.nets.backbones import Backbone, PODNetResNet32, ResNet32, ScaledConv2d, add_scales
from equipoise.nets.heads import LinearHead

if torch.cuda.is_available():
    pytest.skip("tests/test_gpu.py runs the kernels on the GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder
from triton.runtime.jit import JITFunction

from equipoise.engine.kernels import resnet32, triton

REPLICAS, WIDEST = triton.REPLICAS.value, triton.WIDEST.value
FORWARD, BACKWARD = triton.FORWARD.value, triton.BACKWARD.value
TILE = 16  # rows; no number of pixels below is a multiple, so that the last tile is never full
EDGE = 4096  # numbers around a tensor that nobody may read or write: more than a tile reaches beyond it


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The kernels, and what they call of Triton's own, for its interpreter, whoever imported them before.

    The variable alone would decide only what is imported from now on. Everything is put back at the end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (tl, tl.standard, triton):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        # Half of the time goes into finding overflows of int32, which are not reported then.
        patch.setattr(interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False))
        torch.use_deterministic_algorithms(True)  # for one thing: memory that is not written yet is NaN
        yield
        torch.use_deterministic_algorithms(False)


# Each kernel alone, mostly on whole numbers, which add up exactly -------------------------------------------------


def near(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """‖a − b‖ ≤ tolerance · ‖b‖, so that only zeros are near to zeros."""
    return a.shape == b.shape and bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


def framed(t: Tensor) -> Tensor:
    """A copy of t with NaN before and behind it in memory: to read there spoils the result."""
    around = torch.full((t.numel() + 2 * EDGE,), float("nan"))
    return around[EDGE:-EDGE].view(t.shape).copy_(t)


def room(*shape: int) -> Tensor:
    """NaN to be written over."""
    return framed(torch.full(shape, float("nan")))


def is_written(t: Tensor, exact: Tensor, tolerance: float = 0.0) -> bool:
    """The right numbers are, all of them, and nothing around them."""
    around: Any = t._base
    return near(t, exact, tolerance) and bool(around[:EDGE].isnan().all() and around[-EDGE:].isnan().all())


def whole(*shape: int, most: int = 3, seed: int = 0) -> Tensor:
    """Whole numbers from −most to most."""
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return framed(torch.randint(-most, most + 1, shape, generator=gen).float())


def no_sums() -> Tensor:
    return torch.zeros(REPLICAS, 2, WIDEST, dtype=torch.int64)


def sums_of(a: Tensor, b: Tensor, unit: float) -> Tensor:
    """Σa and Σab over the rows, counted in 1/unit."""
    a, b = a.double(), b.double()
    sums = (torch.stack([a.sum(0), (a * b).sum(0)]) * unit).round().long()
    return F.pad(sums, (0, WIDEST - a.shape[1]))


def spread(sums: Tensor) -> Tensor:
    """The same sums in unequal replicas."""
    parts = torch.arange(REPLICAS)[:, None, None] * sums // 100
    parts[0] += sums - parts.sum(0)
    return parts


def images(rows: Tensor, h: int, w: int) -> Tensor:
    return rows.double().view(-1, h, w, rows.shape[1]).permute(0, 3, 1, 2)


# images, height, width; channels in and out, side of the window, stride; numbers, columns at a time; sides of a patch
CONVOLUTIONS = {
    "plain": (3, 5, 14, 16, 16, 3, 1, 64, 16, 1, 1),
    "paired": (3, 5, 18, 16, 16, 3, 1, 64, 32, 1, 2),
    "paired-in-steps": (1, 5, 6, 32, 32, 3, 1, 32, 64, 1, 2),
    "paired-in-columns": (1, 5, 6, 32, 32, 3, 1, 64, 32, 1, 2),
    "square": (3, 6, 18, 16, 16, 3, 1, 64, 64, 2, 2),
    "square-in-columns": (3, 6, 6, 16, 16, 3, 1, 64, 32, 2, 2),
    "tall-in-steps": (1, 6, 7, 32, 32, 3, 1, 32, 64, 2, 1),
    "wide": (1, 5, 7, 64, 64, 3, 1, 64, 64, 1, 1),
    "stride": (3, 6, 10, 16, 32, 3, 2, 64, 32, 1, 1),
    "stride-in-columns": (1, 6, 10, 32, 64, 3, 2, 64, 16, 1, 1),
    "1x1": (3, 6, 10, 16, 32, 1, 2, 16, 32, 1, 1),
}
every_convolution = pytest.mark.parametrize("shape", CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@pytest.mark.parametrize("flags", ["sums", "bias", "residual relu"])
@every_convolution
def test_conv_is_a_convolution(shape: tuple[int, ...], flags: str) -> None:
    n, h, w, inside, outside, window, stride, bk, bn, tall, wide = shape
    patch = tall * wide
    pixels = n * (h // stride) * (w // stride)
    assert pixels % (TILE * patch)
    x, weight = whole(n * h * w, inside), whole(outside, window, window, inside, most=2)
    bias, residual, sums, y = whole(outside), whole(pixels, outside, most=9), no_sums(), room(pixels, outside)
    launch(
        triton.conv, (-(-pixels // (TILE * patch)), outside * patch // bn),
        x, weight, y, sums, bias, residual, pixels, h, w, inside, outside, window, stride,
        SUMS="sums" in flags, BIAS="bias" in flags, RESIDUAL="residual" in flags, RELU="relu" in flags,
        BM=TILE, BN=bn, BK=bk, AHEAD=1, TALL=tall, WIDE=wide,
    )  # fmt: skip
    exact = F.conv2d(images(x, h, w), weight.double().permute(0, 3, 1, 2), None, stride, window // 2)
    exact = exact.permute(0, 2, 3, 1).flatten(0, 2)
    assert torch.equal(sums.sum(0), ("sums" in flags) * sums_of(exact, exact, FORWARD))
    exact = exact + bias if "bias" in flags else exact
    exact = (exact + residual).relu() if "residual relu" in flags else exact
    assert is_written(y, exact)


@pytest.mark.parametrize("flags", ["same", "relu", "short extra below"])
@pytest.mark.parametrize("name", [name for name, shape in CONVOLUTIONS.items() if shape[5] == 3])
def test_input_gradient_is_what_autograd_finds(name: str, flags: str) -> None:
    """Of a 3×3 convolution, a 1×1 one beside it, the way around it, and what somebody else wants, by what they read."""
    n, h, w, inside, outside, _, stride, bk, bn, tall, wide = CONVOLUTIONS[name]
    if stride == 2:
        tall = wide = 2
    patch = tall * wide
    if stride == 1 and patch > 1:
        flags = flags.replace("short ", "")  # which no net has there
    pixels, out, bn = n * h * w, (h // stride, w // stride), min(bn, inside * patch)
    assert pixels % (TILE * patch)
    dy, dys = (whole(n * out[0] * out[1], outside, most=2, seed=seed) for seed in range(2))
    weight, weight_s = whole(outside, 3, 3, inside, most=2), whole(outside, inside, most=2)
    same, extra, x, y, ys = (whole(pixels, inside, most=2, seed=seed) for seed in range(5))
    g, sums, sums_s = room(pixels, inside), no_sums(), no_sums()
    launch(
        triton.input_gradient, (-(-pixels // (TILE * patch)), inside * patch // bn),
        dy, weight, dys, weight_s, same, extra, x, y, ys, g, sums, sums_s, pixels, h, w, inside, outside, stride,
        SHORT="short" in flags, SAME="same" in flags, EXTRA="extra" in flags, RELU="relu" in flags,
        BELOW="below" in flags, BM=TILE, BN=bn, BK=bk, AHEAD=1, TALL=tall, WIDE=wide,
    )  # fmt: skip
    leaf = x.clone().requires_grad_()
    z = leaf.relu() if "relu" in flags else leaf
    parts = [(F.conv2d(images(z, h, w), weight.double().permute(0, 3, 1, 2), None, stride, 1), images(dy, *out))]
    if "short" in flags:
        parts.append((F.conv2d(images(z, h, w), weight_s[:, :, None, None].double(), None, stride), images(dys, *out)))
    parts += [(z, d) for name, d in (("same", same), ("extra", extra)) if name in flags]
    (exact,) = torch.autograd.grad([part for part, _ in parts], leaf, [d for _, d in parts])
    assert is_written(g, exact)
    assert torch.equal(sums.sum(0), sums_of(exact, y, BACKWARD))
    assert torch.equal(sums_s.sum(0), ("below" in flags) * sums_of(exact, ys, BACKWARD))


@every_convolution
def test_weight_gradient_is_torchs(shape: tuple[int, ...]) -> None:
    n, h, w, inside, outside, window, stride, bk, _, _, pair = shape
    out, share = (h // stride, w // stride), 2 * TILE
    pixels = n * out[0] * out[1]
    shares = -(-pixels // (share * pair))
    x, dy = whole(n * h * w, inside), whole(pixels, outside)
    parts = room(shares * pair, outside, window, window, inside)
    launch(
        triton.weight_gradient, (shares, window, -(-(window + pair - 1) * inside // bk)),
        x, dy, parts, pixels, share, h, w, inside, outside, window, stride, BP=TILE, BK=bk, PAIR=pair,
    )  # fmt: skip
    size = (outside, inside, window, window)
    exact = nn.grad.conv2d_weight(images(x, h, w), size, images(dy, *out), stride, window // 2)
    assert is_written(parts, parts) and near(parts.sum(0), exact.permute(0, 2, 3, 1), 0.0)


def batch_norm(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.batch_norm(y.double(), None, None, gamma.double(), beta.double(), training=True)


@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_normalise_is_a_batch_norm_with_a_shortcut(channels: int, relu: bool, other: int) -> None:
    pixels = 75  # the last of 5 tiles is not full
    y, short, out = whole(pixels, channels, most=9), whole(pixels, channels, seed=1), room(pixels, channels)
    gamma, beta, gamma_s, beta_s = (whole(channels, seed=seed) for seed in range(4))
    sums, sums_s = spread(sums_of(y, y, FORWARD)), spread(sums_of(short, short, FORWARD))
    launch(
        triton.normalise, (5,), y, sums, gamma, beta, short, sums_s, gamma_s, beta_s, out, pixels, channels,
        OTHER=other, RELU=relu, BM=TILE,
    )  # fmt: skip
    exact = batch_norm(y, gamma, beta) + (0.0, short, batch_norm(short, gamma_s, beta_s))[other]
    assert is_written(out, exact.relu() if relu else exact, 1e-6)


@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize("short", [True, False])
def test_normalise_backward_is_what_autograd_finds(channels: int, short: bool) -> None:
    pixels = 75
    g, y, ys = whole(pixels, channels), whole(pixels, channels, most=9, seed=1), whole(pixels, channels, seed=2)
    gamma, gamma_s, dy, dys = whole(channels), whole(channels, seed=1), room(pixels, channels), room(pixels, channels)
    sums, sums_s = spread(sums_of(y, y, FORWARD)), spread(sums_of(ys, ys, FORWARD))
    sums_g, sums_gs = spread(sums_of(g, y, BACKWARD)), spread(sums_of(g, ys, BACKWARD))
    launch(
        triton.normalise_backward, (5,), g, y, sums, sums_g, gamma, dy, ys, sums_s, sums_gs, gamma_s, dys, pixels,
        channels, SHORT=short, BM=TILE,
    )  # fmt: skip
    for given, factor, got in ((y, gamma, dy), (ys, gamma_s, dys))[: 1 + short]:
        leaf = given.clone().requires_grad_()
        (exact,) = torch.autograd.grad(batch_norm(leaf, factor, factor), leaf, g.double())
        assert is_written(got, exact, 1e-6)
    assert short or dys.isnan().all()


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_top_is_what_autograd_finds(extra: bool, relu: bool) -> None:
    n, area, channels = 5, 8, 32  # a mean over 8 pixels is exact
    dh, wanted, g, sums = whole(n, channels), whole(n * area, channels), room(n * area, channels), no_sums()
    leaf, y = whole(n * area, channels, seed=1).clone().requires_grad_(), whole(n * area, channels, seed=2)
    z, flags = leaf.relu() if relu else leaf, {"EXTRA": extra, "RELU": relu, "BM": TILE}
    launch(triton.top, (3,), dh, wanted, framed(z.detach()), y, g, sums, n * area, area, channels, **flags)
    loss = (z.view(n, area, channels).mean(1) * dh).sum() + extra * (z * wanted).sum()
    (exact,) = torch.autograd.grad(loss, leaf)
    assert is_written(g, exact)
    assert torch.equal(sums.sum(0), sums_of(exact, y, BACKWARD))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_become_rows_of_normalised_channels(channels: int) -> None:
    x, out = pixels_of(1, channels, 1, 37)[0, :, 0].T.contiguous(), room(37, 16)
    mean, std = whole(channels), framed(torch.tensor([60.0, 61, 62])[:channels])
    launch(triton.pixels_to_rows, (3,), x, mean, std, out, 37, channels, 16, BM=TILE)
    assert is_written(out, F.pad((x.float() - mean) / std, (0, 16 - channels)))


# All of them, as a ResNet-32 --------------------------------------------------------------------------------------


def pixels_of(n: int, channels: int, h: int, w: int) -> Tensor:
    return torch.randint(0, 256, (n, channels, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def net_of(
    channels: int = 3, last_relu: bool = True, channels_last: bool = True, short: bool = True, trunk: bool = False
) -> Net:
    """A net whose batch norms do something; if short, with the first and the last block of each stage only.

    `trunk` is PODNet's: shortcuts without weights, and no ReLU between blocks.
    """
    gen = torch.Generator().manual_seed(1)
    backbone: Backbone = PODNetResNet32(channels) if trunk else ResNet32(channels, last_relu)
    if short:
        ends = ({0: stage[0], len(stage) - 1: stage[-1]}.values() for stage in backbone.stages)  # type: ignore
        backbone.stages = nn.ModuleList(nn.Sequential(*blocks) for blocks in ends)
    backbone.initialise(gen)
    for m in backbone.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in ((m.weight, 0.5), (m.bias, -0.5), (m.running_mean, -0.5), (m.running_var, 0.5)):
                t.data.uniform_(low, low + 1, generator=gen)  # type: ignore[union-attr]
    net = Net(backbone, LinearHead(64), torch.full((channels,), 120.0), torch.tensor([60.0, 61, 62])[:channels])
    return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[call-overload]


class Twins(NamedTuple):
    """What our kernels made of a net, and torch of its twin in float64: embeddings and stage outputs."""

    net: Net
    twin: Net
    mine: list[Tensor]
    exact: list[Tensor]


def twins_of(x: Tensor, **kind: bool) -> Twins:
    net = net_of(x.shape[1], **kind).train()
    twin = copy.deepcopy(net).double()
    mine, exact = ([h, *maps] for h, maps in (resnet32.Training(net, torch.float32)(x), twin.features(x)))
    return Twins(net, twin, mine, exact)


CASES = [
    pytest.param((2, 3, 8, 8), {}, id="channels-last"),
    pytest.param((3, 1, 4, 12), {"last_relu": False, "channels_last": False}, id="contiguous-without-last-relu"),
    pytest.param((1, 3, 12, 8), {"channels_last": False}, id="one-image"),
    pytest.param((2, 3, 8, 8), {"trunk": True}, id="trunk-of-podnet"),
]


@pytest.fixture(scope="module", params=[pytest.param(case.values, id=case.id) for case in CASES])
def twins(request: pytest.FixtureRequest) -> Twins:
    return twins_of(pixels_of(*request.param[0]), **request.param[1])


def check_gradients(twins: Twins, chosen: tuple[int, ...]) -> None:
    """Of a random function of the chosen outputs, by all parameters."""
    gen = torch.Generator().manual_seed(2)
    by = [torch.randn(out.shape, generator=gen) for out in twins.mine]
    mine, exact = (
        torch.autograd.grad(
            [outs[k] for k in chosen], list(net.backbone.parameters()), [by[k].to(outs[k].dtype) for k in chosen],
            retain_graph=True, materialize_grads=True,
        )
        for net, outs in ((twins.net, twins.mine), (twins.twin, twins.exact))
    )  # fmt: skip
    for (name, w), a, b in zip(twins.net.backbone.named_parameters(), mine, exact):
        assert near(a, b) and a.stride() == w.stride(), name
        assert bool(b.any()) == (chosen != (2,) or not name.startswith(("stages.2.", "stages.3."))), name


def test_training_computes_what_the_net_does(twins: Twins) -> None:
    assert len(twins.mine) == len(twins.exact) and all(near(a, b) for a, b in zip(twins.mine, twins.exact))


def test_training_moves_running_statistics_as_the_net_does(twins: Twins) -> None:
    was = net_of(twins.net.mean.shape[1], trunk=isinstance(twins.net.backbone, PODNetResNet32)).state_dict()
    for (name, mine), exact in zip(twins.net.named_buffers(), twins.twin.buffers()):
        assert near(mine, exact), name
        assert name in ("mean", "std") or not near(mine, was[name], 1e-2), f"{name} did not move"


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, -1), (0,), (2,)], ids=["everything", "embedding", "second-stage"])
def test_gradients_are_what_autograd_finds(twins: Twins, chosen: tuple[int, ...]) -> None:
    check_gradients(twins, chosen)


def test_rotated_copies_are_read_as_images_are() -> None:
    """They lie in memory in another way: by rows of one channel after the other."""
    x = rotate(pixels_of(1, 3, 8, 8))
    twins = twins_of(x)
    assert len(x) == 4 and all(near(a, b) for a, b in zip(twins.mine, twins.exact))
    check_gradients(twins, (0, -1))
    twins.net.eval().requires_grad_(False)
    h, maps = resnet32.Frozen(twins.net, torch.float32)(x)
    exact, _ = twins.net.features(x)
    assert near(h, exact) and len(maps) == 3


def scaled_net() -> Net:
    """With a factor for every pair of channels and an offset for every channel, which are not those of the start."""
    net, gen = net_of(), torch.Generator().manual_seed(4)
    add_scales(net.backbone)
    for m in net.modules():
        if isinstance(m, ScaledConv2d):
            m.scale.data.uniform_(0.5, 1.5, generator=gen)
            m.shift.data.normal_(generator=gen)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("trained", ["kernel", "scale"])
def test_factors_and_offsets_of_kernels_are_trained_too(trained: str) -> None:
    """By autograd around our kernels; of an offset the batch norm takes everything but a shift of its running mean."""
    net, x = scaled_net().train(), pixels_of(2, 3, 8, 8)
    weights = {name: w for name, w in net.backbone.named_parameters() if not name.endswith((".kernel", ".scale"))}
    weights |= {name: w for name, w in net.backbone.named_parameters() if name.endswith(f".{trained}")}
    for name, w in net.backbone.named_parameters():
        w.requires_grad_(name in weights)
    twin = copy.deepcopy(net).double()
    mine, exact = ([h, *maps] for h, maps in (resnet32.Training(net, torch.float32)(x), twin.features(x)))
    assert all(near(a, b) for a, b in zip(mine, exact))
    own = dict(twin.backbone.named_parameters())
    by = [torch.randn(out.shape, generator=torch.Generator().manual_seed(5)) for out in mine]
    found, truth = (
        torch.autograd.grad(outs, those, [v.to(o.dtype) for v, o in zip(by, outs)], materialize_grads=True)
        for outs, those in ((mine, list(weights.values())), (exact, [own[name] for name in weights]))
    )
    for (name, w), a, b in zip(weights.items(), found, truth):
        if name.endswith(".shift"):
            assert not a.any() and b.abs().max() < 1e-9, "torch finds rounding errors there"
            continue
        laid_out = zip(w.shape, a.stride(), w.stride())
        assert near(a, b) and all(one == other for size, one, other in laid_out if size > 1), name
    for (name, a), b in zip(net.named_buffers(), twin.buffers()):
        assert near(a, b), name
    net.eval().requires_grad_(False)
    h, maps = resnet32.Frozen(net, torch.float32)(x)
    truth_h, truth_maps = copy.deepcopy(net).double().features(x)
    assert near(h, truth_h) and all(near(a, b) for a, b in zip(maps, truth_maps))


def test_all_of_a_resnet_32_is_what_torch_makes_of_it() -> None:
    twins = twins_of(pixels_of(2, 3, 8, 8), short=False)
    assert all(near(a, b) for a, b in zip(twins.mine, twins.exact))
    check_gradients(twins, (0, 1, 2, 3))


def test_the_same_step_gives_the_same_bits() -> None:
    net, x = net_of().train(), pixels_of(2, 3, 8, 8)
    features = resnet32.Training(net, torch.float32)
    (h, maps), (again, maps_again) = features(x), features(x)
    assert all(torch.equal(a, b) for a, b in zip([h, *maps], [again, *maps_again]))
    loss, weights = h.square().sum() + maps[0].square().sum(), list(net.backbone.parameters())
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(a.any() and torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize(("size", "kind"), CASES)
def test_frozen_computes_what_the_net_does_in_eval_mode(size: tuple[int, ...], kind: dict[str, bool]) -> None:
    net, x = net_of(size[1], **kind).eval().requires_grad_(False), pixels_of(*size)
    h, maps = resnet32.Frozen(net, torch.float32)(x)
    exact, exact_maps = copy.deepcopy(net).double().features(x)
    assert near(h, exact) and len(maps) == len(exact_maps) and all(near(a, b) for a, b in zip(maps, exact_maps))


def test_the_validation_gradient_is_the_same_and_leaves_the_net_as_it_was() -> None:
    net, x, y = net_of().train(), pixels_of(3, 3, 8, 8), torch.tensor([0, 4, 2])
    gen = torch.Generator().manual_seed(3)
    net.head.widen(5, gen)  # type: ignore[operator]
    elsewhere = {name: w + 0.1 * torch.randn(w.shape, generator=gen) for name, w in net.named_parameters()}
    (features := resnet32.Training(net, torch.float32))(x[:2])  # that it has seen a smaller batch makes no difference
    before = copy.deepcopy(net.state_dict())
    mine = meta.validation_gradient(net, elsewhere, x, y, features=features)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values()))
    exact = meta.validation_gradient(net, elsewhere, x, y)
    assert all(near(a, b) and b.any() for a, b in zip(mine, exact))
    here = meta.validation_gradient(net, dict(net.named_parameters()), x, y)
    assert not any(near(a, b, 0.1) for a, b in zip(here, exact))
