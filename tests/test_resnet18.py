"""ResNet-18 in our own kernels on a CPU, run by Triton's interpreter, against torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from steps import make_step
from torch import Tensor, nn

from equipoise import ILBaseline, ResizedCrop, Standard
from equipoise.data.images import Images
from equipoise.data.ragged import Ragged
from equipoise.data.randomness import generator
from equipoise.engine import stand_ins
from equipoise.engine.stand_ins import find_normalisation, get_backbones
from equipoise.nets import Net
from equipoise.nets.backbones import Residual, ResNet18
from equipoise.nets.heads import LinearHead

if torch.cuda.is_available():
    pytest.skip("tests/test_gpu.py runs the kernels on the GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from equipoise.engine.kernels import norms
from equipoise.engine.kernels.resnet18 import Frozen, Training

LABELS = torch.tensor([0, 1] * 3)
pytestmark = pytest.mark.xdist_group("kernels")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (tl, tl.standard, norms):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        torch.use_deterministic_algorithms(True)  # for one thing: memory that is not written yet is NaN
        yield
        torch.use_deterministic_algorithms(False)


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())


class Small(Residual):
    """The first two stages of ResNet-18, or with a stem of 3×3 of PODNet's."""

    pools = True

    def __init__(self, stem: int) -> None:
        relus = (True, stem == 7)
        stride = 2 if stem == 7 else 1
        super().__init__(nn.Conv2d(3, 64, stem, stride, stem // 2, bias=False), (64, 1, relus), (128, 2, relus))


@pytest.mark.parametrize(("stem", "side"), [(7, 32), (3, 16)])
def test_the_net_and_its_gradients_are_torch_s(stem: int, side: int) -> None:
    torch.manual_seed(0)
    net: nn.Module = Small(stem)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, -1.0, 1.0)
            nn.init.normal_(m.bias, std=0.3)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(3, 3, side, side).contiguous(memory_format=torch.channels_last)
    own = copy.deepcopy(net)
    assert isinstance(own, Residual)
    (h, maps), (h_own, maps_own) = net(x), Training(own)(x)
    assert near(h_own, h, 1e-5) and all(near(a, b, 1e-5) for a, b in zip(maps_own, maps))
    wanted = [torch.randn_like(h), *(0.1 * torch.randn_like(m) for m in maps)]
    grads = torch.autograd.grad([h, *maps], list(net.parameters()), wanted)
    grads_own = torch.autograd.grad([h_own, *maps_own], list(own.parameters()), wanted)
    for (name, w), a, b in zip(net.named_parameters(), grads_own, grads):
        assert near(a, b, 1e-3), name
        assert a.stride() == w.stride(), name
    for (name, a), b in zip(own.named_buffers(), net.buffers()):
        assert near(a.float(), b.float(), 1e-5), name
    with torch.no_grad():
        again = Training(own)(x)[0]
    assert torch.equal(again, h_own), "the same step gives the same bits"
    net = net.eval()
    with torch.no_grad():
        (h, maps), (h_own, maps_own) = net(x), Frozen(net, torch.float32)(x)
    assert near(h_own, h, 1e-5) and all(near(a, b, 1e-5) for a, b in zip(maps_own, maps))


def test_an_engine_takes_them_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name only, for images that come normalised; Meta looks ahead by torch's own."""
    monkeypatch.setattr(stand_ins, "has_resize_kernel", lambda device: True)
    gen = generator(0, "images")
    size = torch.tensor([[20, 24]] * 6)
    data = Images(
        Ragged.pack(torch.randint(0, 256, (6 * 3 * 480,), dtype=torch.uint8, generator=gen), size, 16), LABELS
    )
    s = make_step((2,), data, Standard(), net=Net(ResNet18(), LinearHead(512), torch.zeros(3), torch.ones(3)))
    s = replace(s, shape=(3, 16, 16))
    assert find_normalisation("fused", s, ResizedCrop(16), True, ILBaseline(), False) is None
    to = find_normalisation("fused", s, ResizedCrop(16), True, ILBaseline(), True)
    assert to is not None and to.dtype == torch.bfloat16
    assert find_normalisation("fused", s, ResizedCrop(16), False, ILBaseline(), True) is None
    assert find_normalisation("captured", s, ResizedCrop(16), False, ILBaseline(), False) is not None
    student, teacher = get_backbones("fused", replace(s, teacher=s.net))
    assert isinstance(student, Training) and isinstance(teacher, Frozen)
    s.net.eval()
    assert isinstance(get_backbones("fused", s)[0], Frozen)
    s.net.backbone.requires_grad_(True)
    assert find_normalisation("fused", s, ResizedCrop(16), True, ILBaseline(), True) is None, "batch norms are frozen"
