"""Our own kernels, compiled for a GPU that is not there: the compiler refuses some of what the interpreter runs."""

from __future__ import annotations

import multiprocessing
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from equipoise.data.augment import Normalisation
from equipoise.data.ragged import Ragged
from equipoise.engine.kernels import launch, resnet18
from equipoise.nets import Net
from equipoise.nets.backbones import Backbone, PODNetResNet32, Residual, ResNet32
from equipoise.nets.heads import LinearHead

pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from equipoise.engine.kernels.resize import resize, resize_normalised
from equipoise.engine.kernels.resnet32 import Frozen, Training

HOPPER = GPUTarget("cuda", 90, 32)
MOST_SHARED = 232_448
"""bytes of shared memory that a program may have there"""


def wanted(backbone: Backbone) -> list[tuple[Any, ...]]:
    """What a training step with a teacher launches, at the sizes of CIFAR, and what cuts and resizes images; nothing is
    computed."""
    net = Net(backbone, LinearHead(64), torch.zeros(3), torch.ones(3))
    x = torch.zeros(128, 3, 32, 32, dtype=torch.uint8)
    collected: dict[Any, tuple[Any, ...]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_collected", collected)
        with torch.no_grad():
            Frozen(net)(x)
        h, maps = Training(net)(x)
        torch.autograd.grad([h, *maps], list(net.backbone.parameters()), [torch.ones_like(t) for t in (h, *maps)])
        images = Ragged.of_one_size(torch.zeros(2, 3, 9, 9, dtype=torch.uint8), 8)
        resize(images, torch.arange(2), torch.zeros(2, 5).long(), 8, 9)
        to = Normalisation(torch.zeros(3), torch.ones(3), torch.bfloat16)
        resize_normalised(images, torch.arange(2), torch.zeros(2, 6).long(), 8, to, torch.ones(2))
    return list(collected.values())


def wanted_at_224() -> list[tuple[Any, ...]]:
    """What a ResNet-18 launches between convolutions; sizes of images and nets matter little here."""
    conv = torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    net = Residual(conv, (64, 1, (True,)), (128, 2, (True,)))
    x = torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    collected: dict[Any, tuple[Any, ...]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_collected", collected)
        h, maps = resnet18.Training(net.to(memory_format=torch.channels_last))(x)
        torch.autograd.grad([h, *maps], list(net.parameters()), [torch.ones_like(t) for t in (h, *maps)])
    return list(collected.values())


def compiled(kernel: Any, args: tuple[Any, ...], flags: dict[str, Any]) -> Any:
    kinds = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.uint8: "*u8"}
    kinds[torch.int8] = "*i8"
    values = dict(zip(kernel.arg_names, args)) | flags
    fixed = {(p.num,): values[p.name] for p in kernel.params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.is_constexpr else kinds[v.dtype] if isinstance(v := values[p.name], Tensor) else "i32"
        for p in kernel.params
    }
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if not p.is_constexpr}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": flags["num_warps"]})


class Made(NamedTuple):
    """What became of a kernel."""

    kernel: str
    shared: int
    """bytes of shared memory"""
    multiplies: bool
    """by the units for matrices"""


def made() -> list[Made]:
    """One of each kernel and sizes, with the most flags: what they add to it, they add to all of that kind."""
    launches = [one for backbone in (ResNet32(), PODNetResNet32()) for one in wanted(backbone)]
    chosen: dict[Any, tuple[Any, ...]] = {}
    for kernel, _, args, flags in sorted(launches, key=lambda one: sum(v is True for v in one[3].values())):
        numbers = (v for v in (*args, *flags.values()) if isinstance(v, int) and not isinstance(v, bool))
        chosen[kernel.__name__, tuple(numbers)] = (kernel, args, flags)
    flagged = sorted(wanted_at_224(), key=lambda one: sum(v is True for v in one[3].values()))
    chosen |= {(kernel.__name__, ()): (kernel, args, flags) for kernel, _, args, flags in flagged}
    found = [(kernel.__name__, compiled(kernel, args, flags)) for kernel, args, flags in chosen.values()]
    return [Made(name, one.metadata.shared, "mma" in one.asm["ptx"]) for name, one in found]


def test_all_kernels_of_a_step_compile_and_fit() -> None:
    # In a process of its own: Triton's interpreter, which other tests use, leaves its compiler broken behind it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(made)
    assert {one.kernel for one in found} == {
        "pixels_to_rows", "conv", "normalise", "top", "normalise_backward", "weight_gradient", "input_gradient",
        "resize_boxes", "pixels_to_blocks", "add_up", "normalise_and_pool", "gather_gradient", "add_up_gradient",
        "add_up_unpooled", "unpooled_backward",
    }  # fmt: skip
    for one in found:
        assert one.multiplies == (one.kernel in ("conv", "input_gradient", "weight_gradient")), one
        assert one.shared <= MOST_SHARED, one
