"""Nets: sizes computed by hand, what a head keeps when it grows, normalisation, and where random numbers come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import LUCIR, Balanced, Finetune, ILBaseline, Learner, Method, PODNet, Recipe, Relaxed
from equipoise.data.randomness import generator
from equipoise.learner.state import new_net
from equipoise.nets import Net
from equipoise.nets.backbones import Backbone, PODNetResNet18, ResNet18, ResNet32, SmallNet, choose_scale
from equipoise.nets.heads import Head, LinearHead
from equipoise.step import plan_for


def parameters(module: nn.Module) -> int:
    return sum(w.numel() for w in module.parameters())


def conv(inside: int, outside: int, side: int) -> int:
    """Weights of a convolution without bias."""
    return inside * outside * side * side


def norm(width: int) -> int:
    """Scale and shift of a batch norm."""
    return 2 * width


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ResNet-32 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "total"), [(3, 466_256), (1, 465_968)])
def test_resnet32_has_as_many_parameters_as_it_should(channels: int, total: int) -> None:
    stem = conv(channels, 16, 3) + norm(16)
    count = stem
    inside = 16
    for wide in (16, 32, 64):
        for _ in range(5):
            count += conv(inside, wide, 3) + norm(wide) + conv(wide, wide, 3) + norm(wide)
            if inside != wide:  # option B: a 1×1 convolution and its batch norm
                count += conv(inside, wide, 1) + norm(wide)
            inside = wide
    net = ResNet32(channels)
    assert parameters(net) == count == total
    # 32 layers: the stem, 15 blocks of two 3×3 convolutions, and the classifier, which is the head's.
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in net.modules()) == 31
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) for m in net.modules()) == 2
    assert all(m.bias is None for m in net.modules() if isinstance(m, nn.Conv2d))


def test_smallnet_has_as_many_parameters_as_it_should() -> None:
    count = conv(1, 16, 3) + norm(16) + conv(16, 32, 3) + norm(32) + conv(32, 64, 3) + norm(64)
    assert parameters(SmallNet(1)) == count
    assert parameters(SmallNet(3)) == count + conv(2, 16, 3)


@pytest.mark.parametrize(
    ("net", "shape", "sides"),
    [
        (ResNet32(3), (3, 32, 32), [(32, 32), (16, 16), (8, 8)]),
        (ResNet32(1), (1, 28, 28), [(28, 28), (14, 14), (7, 7)]),
        (ResNet32(3), (3, 64, 20), [(64, 20), (32, 10), (16, 5)]),
        (SmallNet(1), (1, 8, 8), [(8, 8), (4, 4), (2, 2)]),
        (SmallNet(3), (3, 16, 9), [(16, 9), (8, 5), (4, 3)]),
    ],
)
def test_shapes(net: Backbone, shape: tuple[int, int, int], sides: list[tuple[int, int]]) -> None:
    h, maps = net(noise(2, *shape))
    assert h.shape == (2, 64) and net.width == 64
    assert [tuple(m.shape) for m in maps] == [(2, wide, *side) for wide, side in zip((16, 32, 64), sides)]
    torch.testing.assert_close(h, maps[-1].flatten(2).mean(2))


def test_the_last_relu_is_the_only_difference() -> None:
    plain, open_ended = ResNet32(3), ResNet32(3, last_relu=False)
    plain.initialise(generator(0))
    with torch.no_grad():
        plain.stages[2][4].bn2.bias.copy_(3 * noise(64))  # a shift, so that some features are negative on average
    open_ended.load_state_dict(plain.state_dict())
    x = noise(4, 3, 32, 32)
    h, maps = plain(x)
    h_open, maps_open = open_ended(x)
    assert (h >= 0).all() and all((m >= 0).all() for m in maps)
    assert (h_open < 0).any() and (maps_open[2] < 0).any()
    torch.testing.assert_close(maps_open[:2], maps[:2])
    torch.testing.assert_close(maps_open[2].clamp_min(0), maps[2])


def test_a_block_adds_its_input() -> None:
    """With its last batch norm at 0 a block without change of shape is the identity of what is not negative."""
    net = ResNet32(3).eval()
    block = net.stages[0][1]
    assert isinstance(block.shortcut, nn.Identity) and isinstance(net.stages[1][0].shortcut, nn.Sequential)
    nn.init.zeros_(block.bn2.weight)
    x = noise(2, 16, 8, 8)
    torch.testing.assert_close(block(x), x.clamp_min(0))


def test_initialisation_is_he_fan_out_from_the_generator() -> None:
    nets = [ResNet32(3) for _ in range(3)]
    for net, seed in zip(nets, (1, 1, 2)):
        net.initialise(generator(seed))
    first, same, other = (dict(net.named_parameters()) for net in nets)
    convs = [k for k, w in first.items() if w.ndim == 4]
    assert len(convs) == 33
    for k in convs:
        assert torch.equal(first[k], same[k]) and not torch.equal(first[k], other[k]), k
        outside, _, side, _ = first[k].shape
        spread = math.sqrt(2 / (outside * side * side))
        count = first[k].numel()
        assert abs(first[k].std().item() / spread - 1) < 5 / math.sqrt(2 * count), k
        assert abs(first[k].mean().item()) < 5 * spread / math.sqrt(count), k
    for m in nets[0].modules():
        if isinstance(m, nn.BatchNorm2d):
            assert (m.weight == 1).all() and (m.bias == 0).all()


# The head -----------------------------------------------------------------------------------------------------


def test_a_head_keeps_its_rows_bit_for_bit_when_it_grows() -> None:
    head = LinearHead(64)
    assert head.weight.shape == (0, 64) and head.bias.shape == (0,)
    head.widen(5, generator(0, "rows"))
    with torch.no_grad():
        head.weight *= 1.37
        head.bias -= 0.11
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.widen(3, generator(1, "rows"))
    assert head.weight.shape == (8, 64) and head.bias.shape == (8,)
    assert torch.equal(head.weight[:5], weight) and torch.equal(head.bias[:5], bias)
    assert isinstance(head.weight, nn.Parameter) and head.weight.requires_grad and head.weight.is_leaf
    assert isinstance(head.bias, nn.Parameter) and head.bias.requires_grad and head.bias.is_leaf
    assert {k for k, _ in head.named_parameters()} == {"weight", "bias"}


@pytest.mark.parametrize("width", [4, 64, 400])
def test_new_rows_are_uniform_within_one_over_the_root_of_the_width(width: int) -> None:
    head = LinearHead(width)
    head.widen(2000, generator(0))
    bound = 1 / math.sqrt(width)
    for values in (head.weight.detach(), head.bias.detach()):
        assert values.abs().max() <= bound and values.max() > 0.95 * bound and values.min() < -0.95 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_new_rows_come_from_the_generator_alone() -> None:
    rows = []
    for seed, noise_seed in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(noise_seed)
        head = LinearHead(16)
        head.widen(3, generator(seed))
        rows.append(head.weight.detach())
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_a_linear_head_is_linear() -> None:
    head = LinearHead(6)
    head.widen(4, generator(0))
    h = noise(3, 6)
    z, extra = head(h, [])
    weight, bias = head.weight.tolist(), head.bias.tolist()
    for i in range(3):
        for k in range(4):
            expected = sum(weight[k][a] * h[i, a].item() for a in range(6)) + bias[k]
            assert z[i, k].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert extra == {}


def test_an_unfinished_backbone_or_head_says_so() -> None:
    with pytest.raises(AttributeError, match="stages"):
        Backbone()(noise(1, 3, 8, 8))
    for call in (lambda: Head()(noise(1, 8), []), lambda: Head().widen(2, generator(0))):
        with pytest.raises(TypeError, match="must define"):
            call()


# The net ------------------------------------------------------------------------------------------------------


class Probe(Backbone):
    """Keeps what it is given."""

    width = 3

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.seen = x
        return x.mean((2, 3)), [x]


def test_a_net_normalises_pixels_by_channel() -> None:
    mean, std = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]
    probe, head = Probe(), LinearHead(3)
    head.widen(2, generator(0))
    net = Net(probe, head, torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64))
    x = torch.randint(0, 256, (4, 3, 5, 7), generator=generator(0), dtype=torch.uint8)
    x[0, :, 0, 0], x[0, :, 0, 1] = 0, 255
    out = net(x)
    for i in range(4):
        for c in range(3):
            for a in range(5):
                for b in range(7):
                    expected = (int(x[i, c, a, b]) - mean[c]) / std[c]
                    assert probe.seen[i, c, a, b].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert probe.seen.dtype == torch.float32 and out.z.shape == (4, 2)
    assert torch.equal(out.h, probe.seen.mean((2, 3))) and out.maps[0] is probe.seen
    assert torch.equal(out.z, head(out.h, out.maps)[0]) and out.extra == {}


class OnMaps(LinearHead):
    """Classifies the mean of the first stage's output instead of the embedding."""

    def forward(self, h: Tensor, maps: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return super().forward(maps[0].mean((2, 3)), maps)


def test_a_head_sees_the_stage_outputs_too() -> None:
    head = OnMaps(16)
    head.widen(3, generator(0))
    net = Net(SmallNet(1), head, torch.tensor([120.0]), torch.tensor([60.0])).eval()
    x = torch.randint(0, 256, (4, 1, 8, 8), generator=generator(1), dtype=torch.uint8)
    out = net(x)
    assert torch.equal(out.z, nn.functional.linear(out.maps[0].mean((2, 3)), head.weight, head.bias))
    assert net(x, classify=False).z.shape == (4, 0) and torch.equal(net(x, classify=False).h, out.h)


def test_normalisation_is_saved_with_the_weights() -> None:
    net = Net(SmallNet(1), LinearHead(64), torch.tensor([10.0]), torch.tensor([2.0]))
    state = net.state_dict()
    assert state["mean"].item() == 10.0 and state["std"].item() == 2.0
    assert not {"mean", "std"} & {k for k, _ in net.named_parameters()}, "they are not trained"


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_a_new_net_leaves_the_global_generator_alone(shape: tuple[int, int, int]) -> None:
    mean = std = torch.ones(shape[0])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    net = new_net(ILBaseline(), shape, mean, std, generator(7))
    net.head.widen(4, generator(8))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    same, other = (new_net(ILBaseline(), shape, mean, std, generator(seed)) for seed in (7, 9))
    for net_ in (same, other):
        net_.head.widen(4, generator(8))
    assert all(torch.equal(v, same.state_dict()[k]) for k, v in net.state_dict().items())
    assert not all(torch.equal(v, other.state_dict()[k]) for k, v in net.state_dict().items())


def test_the_backbone_suits_the_size_of_the_images() -> None:
    method = ILBaseline()
    for shape, kind in (
        ((1, 8, 8), SmallNet),
        ((3, 16, 16), SmallNet),
        ((1, 4, 16), SmallNet),
        ((3, 17, 9), ResNet32),
        ((3, 32, 32), ResNet32),
        ((1, 64, 64), ResNet32),
        ((3, 65, 64), ResNet18),
        ((3, 224, 224), ResNet18),
    ):
        backbone = method.backbone(shape)
        assert type(backbone) is kind
        assert next(backbone.parameters()).shape[1] == shape[0], "as many channels as the images have"
    assert choose_scale((1, 16, 16)) == "tiny" and choose_scale((3, 17, 9)) == choose_scale((3, 64, 64)) == "small"
    assert choose_scale((3, 64, 65)) == "large"


@pytest.mark.parametrize(
    ("kind", "stem", "total", "sides"),
    [
        (ResNet18, conv(3, 64, 7), 11_176_512, (56, 28, 14, 7)),
        (PODNetResNet18, conv(3, 64, 3), 11_168_832, (112, 56, 28, 14)),
    ],
)
def test_nets_for_large_images_have_the_sizes_of_the_originals(
    kind: Any, stem: int, total: int, sides: tuple[int, ...]
) -> None:
    """The total of ResNet-18 is the well-known 11,689,512 without its classifier of 1,000 classes."""
    count, inside = stem + norm(64), 64
    for wide in (64, 128, 256, 512):
        for _ in range(2):
            count += conv(inside, wide, 3) + norm(wide) + conv(wide, wide, 3) + norm(wide)
            if inside != wide:
                count += conv(inside, wide, 1) + norm(wide)
            inside = wide
    net = kind().eval()
    assert parameters(net) == count == total
    with torch.no_grad():
        h, maps = net(noise(1, 3, 224, 224))
    assert [tuple(m.shape) for m in maps] == [(1, w, s, s) for w, s in zip((64, 128, 256, 512), sides)]
    assert torch.allclose(h, maps[-1].mean((2, 3))) and h.shape == (1, net.width)


def ended_with_relu(net: Backbone) -> list[list[bool]]:
    """Of each block of each stage, whether its output is never negative, for random weights and images."""
    net.initialise(generator(0))
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5, generator=generator(1))
    found, x = [], noise(2, 64, 16, 16).relu()
    for stage in net.eval().stages:
        found.append([])
        for block in stage:
            x = block(x)
            found[-1].append(bool((x >= 0).all()))
    return found


def test_relus_are_where_the_originals_have_them() -> None:
    with torch.no_grad():
        assert ended_with_relu(ResNet18()) == [[True, True]] * 4
        assert ended_with_relu(ResNet18(last_relu=False)) == [[True, True]] * 3 + [[True, False]]
        assert ended_with_relu(PODNetResNet18()) == [[True, False]] * 4


def test_blocks_of_podnets_large_net_start_as_their_shortcuts() -> None:
    net = PODNetResNet18()
    net.initialise(generator(0))
    first, second = net.eval().stages[1]
    x = noise(2, 64, 8, 8)
    with torch.no_grad():
        assert torch.equal(first(x), first.shortcut(x).relu()) and torch.equal(second(first(x)), first(x))


@pytest.mark.parametrize(
    ("method", "recipe"),
    [
        (ILBaseline(), Recipe(epochs=100, lr=0.1, milestones=(0.3, 0.6, 0.8, 0.9), batch=256, weight_decay=1e-4)),
        (LUCIR(), Recipe(epochs=90, lr=0.1, milestones=(1 / 3, 2 / 3), batch=128, weight_decay=1e-4)),
        (PODNet(), Recipe(epochs=90, lr=0.05, schedule="cosine", batch=64, weight_decay=5e-4, clamp=5.0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_large_images_are_learned_by_the_recipes_of_the_originals(method: Method, recipe: Recipe) -> None:
    assert method.recipe(plan_for((3, 224, 224))) == recipe
    if method.name == "lucir":
        assert [recipe.lr_at(e) for e in (0, 29, 30, 59, 60, 89)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])


ONCE = Finetune(epochs=1)
LARGE = [LUCIR(Balanced()), LUCIR(finetune=ONCE), PODNet(finetune=ONCE), PODNet(Relaxed())]


@pytest.mark.parametrize("method", LARGE, ids=lambda m: f"{m.name}-{m.remedy.name}")
def test_large_images_go_through_two_steps(method: Method) -> None:
    """70 × 66 pixels; few images, so that it takes seconds: what is asked is that all parts fit together."""
    x = torch.randint(0, 256, (12, 3, 70, 66), generator=generator(2), dtype=torch.uint8)
    y = torch.arange(12) % 3
    recipe = Recipe(epochs=1, lr=0.01, milestones=(), batch=6)
    learner = Learner(method, memory=2, recipe=recipe, device="cpu")
    learner.learn(x[y < 2], y[y < 2]).learn(x[y == 2], y[y == 2])
    p = learner.predict_proba(x)
    assert p.shape == (12, 3) and np.isfinite(p).all()


def test_gradients_reach_every_weight() -> None:
    net = new_net(ILBaseline(), (3, 32, 32), torch.full((3,), 120.0), torch.full((3,), 60.0), generator(0))
    net.head.widen(3, generator(1))
    x = torch.randint(0, 256, (4, 3, 32, 32), generator=generator(2), dtype=torch.uint8)
    net(x).z.square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in net.parameters())
