"""What only a GPU can show: a recorded step computes what the step computes, and runs go on after a kill."""

from __future__ import annotations

import copy
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from steps import make_step
from test_feed import write_noise

from equipoise import (
    DDE,
    EEIL,
    LUCIR,
    SPB,
    SPBI,
    SPBM,
    TPCIL,
    Balanced,
    BalancedFinetuning,
    Batch,
    Crop,
    Finetune,
    GeoDL,
    ICaRL,
    ILBaseline,
    Learner,
    LwF,
    Meta,
    Method,
    Mnemonics,
    PODNet,
    Recipe,
    ResizedCrop,
    SeparatedSoftmax,
    Stage,
    Standard,
    Step,
)
from equipoise.data import stored
from equipoise.data.augment import Normalisation
from equipoise.data.images import Images
from equipoise.data.ragged import Ragged
from equipoise.data.randomness import generator
from equipoise.data.stored import Stored
from equipoise.engine import feed
from equipoise.engine.cuda_graph import ENGINES, prepare
from equipoise.engine.device import use_device
from equipoise.engine.gpu import get_peak_memory, get_recent_peak_memory
from equipoise.engine.pixels import augment, cut, cut_normalised, settle
from equipoise.engine.train import Conditions, Position, fit
from equipoise.learner.state import new_net, place
from equipoise.losses import distillation
from equipoise.methods.bic import BiC
from equipoise.methods.geodl import geodesic_distance
from equipoise.methods.ss_il import SSIL
from equipoise.nets import Net
from equipoise.nets.backbones import PODNetResNet18, Residual, ResNet18
from equipoise.remedies import REMEDIES
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run
from equipoise.step import More, Plan, Stages, plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (3, 32, 32)
GREY = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def net_of(classes: int, method: Method | None = None) -> Net:
    net = new_net(method or ILBaseline(), SHAPE, torch.full((3,), 128.0), torch.full((3,), 64.0), generator(0))
    net.head.widen(classes, generator(1))
    return place(net, torch.device("cuda"))


def trained(
    remedy: Any,
    engine: Any,
    bf16: bool = False,
    epochs: int = 2,
    images: int | Images = 300,
    method: Method | None = None,
    **stage: Any,
) -> tuple[Step, Position]:
    gen, crop = generator(7), Crop() if isinstance(images, int) else ResizedCrop(SHAPE[1])
    if isinstance(images, int):
        x = torch.randint(0, 256, (images, *SHAPE), dtype=torch.uint8, generator=gen)
        y = torch.randint(0, 10, (images,), generator=gen)
        images = Images(x, y)
    data = images.to("cuda")
    net, teacher = net_of(10), net_of(6).eval().requires_grad_(False)
    method = method or ILBaseline(remedy)
    meta = isinstance(remedy, Meta)
    held = torch.arange(40, device="cuda") if meta else None
    state = {"alpha": torch.ones((), device="cuda")} if meta else {"seen": torch.zeros(10, device="cuda")}
    s = make_step((6, 4), data, remedy, held=held, net=net, teacher=teacher, state=state)
    recipe = Recipe(epochs=epochs, lr=0.01, milestones=(), batch=64)
    made: Any = Stage(**{"name": "train", "recipe": recipe, "groups": method.trained, **stage})
    at = Position()
    with use_device(torch.device("cuda")):
        used = fit(method, s, made, at, Conditions(0, crop, bf16, engine))
    assert used == engine
    return s, at


def distance(a: Step, b: Step) -> float:
    """‖a − b‖ / ‖b‖ over all weights."""
    pairs = list(zip(a.net.parameters(), b.net.parameters()))
    apart = torch.stack([(x.detach() - y.detach()).double().pow(2).sum() for x, y in pairs]).sum()
    size = torch.stack([y.detach().double().pow(2).sum() for _, y in pairs]).sum()
    return float((apart / size).sqrt())


RECORDED = [Standard(), Balanced(), Balanced("0.1:10"), Meta(every=3, alpha_lr=1.0)]


@pytest.mark.parametrize("remedy", RECORDED, ids=["standard", "balanced", "changing α", "meta"])
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_a_recorded_step_is_the_step(remedy: Any, engine: str) -> None:
    eager, _ = trained(remedy, "eager")
    recorded, at = trained(remedy, engine)
    assert at.epoch == 2
    assert distance(recorded, eager) < 1e-3
    assert distance(recorded, trained(remedy, "eager", epochs=1)[0]) > 1e-3  # the second epoch did something
    if "alpha" in eager.state:
        value = eager.state["alpha"].item()
        assert recorded.state["alpha"].item() == pytest.approx(value, abs=1e-3) and value != 1.0


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN adds up in a fixed order: else two runs of one engine are a few percent apart after a dozen batches."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Busy(ILBaseline):
    """A second stream, two views of every image, and something noted in every batch."""

    def objective(self, s: Step, b: Batch) -> torch.Tensor:
        assert b.more is not None
        return super().objective(s, b) + super().objective(s, b.more)

    def views(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.flip(3)])

    def more(self, s: Step, which: torch.Tensor, gen: torch.Generator) -> More:
        drawn = torch.randint(0, len(s.memory), (len(which), 6), generator=gen, device=gen.device)
        return More(s.memory[drawn])

    def note(self, s: Step, b: Batch) -> None:
        s.state["seen"].add_(torch.nn.functional.one_hot(b.y, 10).sum(0))


def test_a_second_stream_views_and_notes_are_recorded_too(settled: None) -> None:
    recorded, _ = trained(Standard(), "captured", method=Busy())
    eager, _ = trained(Standard(), "eager", method=Busy())
    assert distance(recorded, eager) < 1e-3 < distance(recorded, trained(Standard(), "eager")[0])
    assert torch.equal(recorded.state["seen"], eager.state["seen"])
    assert eager.state["seen"].sum() == 2 * 64 * 9  # 300 images are 4.7 batches, and 600 are 9.4


class Still(ILBaseline):
    """A loss that nothing changes: weights move by noise alone."""

    def objective(self, s: Step, b: Batch) -> torch.Tensor:
        return 0 * b.out.z.sum()


def noise_of_batches(engine: str, images: int) -> torch.Tensor:
    """Where the weights go in an epoch of so many images, in batches of 64, without momentum and weight decay."""
    before = torch.cat([w.detach().flatten() for w in net_of(10).parameters()])
    recipe = Recipe(epochs=1, lr=1.0, milestones=(), batch=64, momentum=0.0, weight_decay=0.0)
    s, _ = trained(Standard(), engine, images=images, method=Still(), recipe=recipe, gradient_noise=0.01)
    return torch.cat([w.detach().flatten() for w in s.net.parameters()]) - before


def test_noise_on_gradients_is_drawn_anew_in_every_replay_and_is_the_same_again(settled: None) -> None:
    """A graph with the generator's numbers baked in would add the same noise at each replay: 2 batches would move the
    weights by twice the noise of one, and not by √2 times."""
    one, two = noise_of_batches("captured", 64), noise_of_batches("captured", 128)
    second = two - one  # named by seed, step, stage and epoch: the first batch's noise is that of the shorter epoch
    for noise in (one, second):
        assert noise.std().item() == pytest.approx(0.1, rel=0.05)  # η is a variance
    assert abs(torch.corrcoef(torch.stack([one, second]))[0, 1].item()) < 0.02  # half a million numbers: 0.0015
    assert torch.equal(noise_of_batches("captured", 128), two), "the same again, to the bit"
    # Without a graph the same numbers are drawn, whatever was drawn while recording.
    torch.testing.assert_close(noise_of_batches("eager", 128), two, rtol=1e-4, atol=1e-5)


def two_steps(
    method: Method,
    engine: str,
    device: str = "cuda",
    brightness: float = 0.0,
    last: Literal["joined", "short"] = "joined",
    precision: str = "fp32",
    cuts: tuple[int, ...] = (0, 4, 6),
) -> torch.Tensor:
    """The logits after a base step and another, or where the six classes are cut."""
    gen = generator(13)
    x = torch.randint(0, 256, (240, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.arange(240) % 6
    settings = {"device": device, "precision": precision, "engine": engine, "augment": Crop(4, brightness=brightness)}
    recipe = Recipe(epochs=2, lr=0.01, milestones=(), batch=40, clamp=method.recipe(plan_for(SHAPE)).clamp, last=last)
    learner = Learner(method, memory=5, recipe=recipe, **settings)  # type: ignore[arg-type]
    for first, last in itertools.pairwise(cuts):
        now = (y >= first) & (y < last)
        learner.learn(x[now], y[now])
    assert learner.engine_used_ == engine
    return learner.logits(x).cpu()


@pytest.mark.parametrize(
    "method",
    [
        LUCIR(Balanced()),
        LUCIR(Meta(every=3)),
        LUCIR(finetune=Finetune(20, weight_decay=5e-4)),
        PODNet(),
        PODNet(nca="paper"),
        PODNet(Balanced()),
        *(ILBaseline(kind()) for name, kind in REMEDIES.items() if name not in ("standard", "balanced", "meta")),
        ILBaseline(SeparatedSoftmax(share=0.2, mean="all")),
        ILBaseline(BalancedFinetuning(Finetune(what="all", batch_norm="train"))),
        BiC(),
        SSIL(),
        ICaRL(),
        ICaRL(outputs="sigmoid"),
        LwF(),
        EEIL(finetune=Finetune(20, what="all", batch_norm="train")),
        EEIL(Meta(every=3), shift=63.0, contrast=0.8),
        SPB(Balanced()),
        SPBI(classes="all"),
        SPBM(Meta(every=3), scales="each"),
        TPCIL(Balanced()),
        GeoDL(),
        GeoDL(Meta(every=3), form="cosine"),
        DDE(),
        DDE(host=PODNet(Balanced())),
        Mnemonics(),
        Mnemonics(host=LUCIR(), mode="paper"),
    ],
    ids=lambda m: f"{m.name}-{getattr(m, 'host', m).name}-{m.remedy.name}",
)
def test_a_recorded_run_is_the_run(method: Method, settled: None) -> None:
    """Every method and remedy: what is recorded once and replayed is what Python would do step by step."""
    eager = two_steps(method, "eager")
    apart = (two_steps(method, "captured") - eager).norm() / eager.norm()
    assert apart < 1e-2


@pytest.mark.parametrize("form", ["difference", "cosine"])
def test_geodesics_are_found_as_on_a_cpu(form: str) -> None:
    """By matrix products instead of decompositions: of features in 128 directions, which shrink to a hundredth."""
    gen = generator(17)
    sizes = torch.logspace(0, -2, 256)
    old, moved = (torch.randn(128, 256, generator=gen) * sizes for _ in range(2))
    found = []
    for device in ("cuda", "cpu"):
        new = (0.3 + old + 0.2 * moved).to(device).requires_grad_()
        loss = geodesic_distance(new, (0.3 + old).to(device), form)
        found.append((loss.item(), torch.autograd.grad(loss, new)[0].cpu()))
    (there, by_products), (here, exact) = found
    assert there == pytest.approx(here, rel=1e-9)
    assert (by_products - exact).norm() < 1e-6 * exact.norm()


def test_distilling_step_by_step_is_recorded_too(settled: None) -> None:
    method, cuts = ILBaseline(SeparatedSoftmax(), weights="ones", distil="by-step"), (0, 2, 4, 6)
    eager = two_steps(method, "eager", cuts=cuts)
    apart = (two_steps(method, "captured", cuts=cuts) - eager).norm() / eager.norm()
    together = two_steps(replace(method, distil="together"), "eager", cuts=cuts)
    assert apart < 1e-2 and apart < (together - eager).norm() / eager.norm()


def test_brightness_is_recorded_too(settled: None) -> None:
    eager = two_steps(ILBaseline(), "eager", brightness=0.25)
    apart = (two_steps(ILBaseline(), "captured", brightness=0.25) - eager).norm() / eager.norm()
    assert apart < 1e-2 < (two_steps(ILBaseline(), "eager") - eager).norm() / eager.norm()


@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=2)], ids=lambda v: v.name)
def test_short_last_batches_are_recorded_too(remedy: Any, settled: None) -> None:
    eager = two_steps(ILBaseline(remedy), "eager", last="short")
    apart = (two_steps(ILBaseline(remedy), "captured", last="short") - eager).norm() / eager.norm()
    assert apart < 1e-2 < (two_steps(ILBaseline(remedy), "eager") - eager).norm() / eager.norm()


def test_bf16_is_near_fp32() -> None:
    assert 1e-6 < distance(trained(Balanced(), "eager", bf16=True)[0], trained(Balanced(), "eager")[0]) < 0.05


def test_recording_leaves_everything_as_it_was() -> None:
    w, count = torch.ones(3, device="cuda"), torch.zeros(1, device="cuda")

    def step() -> None:
        w.mul_(2)
        count.add_(1)

    (replay,), engine = prepare("captured", lambda engine: [step], [w, count])
    assert w.tolist() == [1, 1, 1] and count.item() == 0 and engine == "captured"
    replay()
    replay()
    assert w.tolist() == [4, 4, 4] and count.item() == 2


def test_what_cannot_be_recorded_is_said_and_done_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.ones(3, device="cuda")

    def step() -> None:
        w.mul_(2)
        w.sum().item()  # the host waits: not possible in a graph

    with caplog.at_level(logging.WARNING, "equipoise"):
        (plain,), engine = prepare("captured", lambda engine: [step], [w])
    assert "captured" in caplog.text and w.tolist() == [1, 1, 1] and engine == "eager"
    plain()
    assert w.tolist() == [2, 2, 2]


@pytest.mark.parametrize("engine", ENGINES)
def test_digits_run_on_every_engine(engine: str, tmp_path: Path) -> None:
    one = Run(ILBaseline(Meta()), Data("digits"), Protocol(memory="5"))
    machine = Machine(device="cuda", precision="fp32", engine=engine)  # type: ignore[arg-type]
    result = run(one, tmp_path / "a", machine)
    assert result["average_incremental_accuracy"] > 60  # Standard is near 40
    used = "compiled" if engine == "fused" else engine  # the net for tiny images has no kernels of its own
    assert result["machine"]["engine"] == used and result["machine"]["gpu"]


def draw_sizes(count: int, most: int) -> Ragged:
    """Noise of different sizes."""
    gen = generator(0, "sizes")
    size = torch.randint(most // 6, most, (count, 2), generator=gen)
    return Ragged.pack(torch.randint(0, 256, (int(3 * size.prod(1).sum()),), dtype=torch.uint8, generator=gen), size)


@pytest.mark.parametrize("side", [224, 84])
def test_images_are_cut_and_resized_as_on_a_cpu(side: int) -> None:
    """1,000 draws: at most one grey level apart."""
    x, crop, which = draw_sizes(64, 400), ResizedCrop(side), torch.arange(1000) % 64
    drawn, there = crop.draw((1000,), generator(0, "draws")), x.to("cuda")
    drawn[::10] = crop.draw_nothing((100,), drawn.device)
    for part in torch.arange(1000).split(50):
        ours = augment(crop, there, which[part].cuda(), drawn[part].cuda())
        plain = crop(x, which[part], drawn[part])
        assert ours.stride() == plain.stride()
        assert (ours.cpu().int() - plain.int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_come_normalised_as_by_the_net(dtype: torch.dtype) -> None:
    x, crop, which = draw_sizes(64, 400).to("cuda"), ResizedCrop(84, brightness=0.25), torch.arange(64, device="cuda")
    boxes = settle(crop, x, which[None], crop.draw((1, 64), generator(0, "draws", device="cuda")))[0]
    mean, std = torch.tensor([[123.7, 116.3, 103.5], [58.4, 57.1, 57.4]], device="cuda")
    ours = cut_normalised(crop, x, which, boxes, Normalisation(mean, std, dtype))
    by_net = ((cut(crop, x, which, boxes).float() - mean[:, None, None]) / std[:, None, None]).to(dtype)
    assert torch.equal(ours, by_net) and ours.stride() == by_net.stride()


def test_steps_on_images_of_different_sizes_are_recorded_too(settled: None) -> None:
    data = Images(draw_sizes(60, 60), torch.arange(60) % 5).to("cuda")

    def learn(engine: str) -> torch.Tensor:
        recipe, crop = Recipe(epochs=2, lr=0.01, batch=16), ResizedCrop(16, scale=(0.3, 1.0))
        learner = Learner(ILBaseline(), 4, recipe=recipe, augment=crop, precision="fp32", engine=engine, device="cuda")
        learner.learn(data, range(3)).learn(data, range(3, 5))
        assert learner.engine_used_ == engine
        return learner.logits_at(data.x, torch.arange(60, device="cuda"))

    torch.testing.assert_close(learn("captured"), learn("eager"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", [ILBaseline(Meta(every=3)), PODNet()], ids=lambda m: m.name)
def test_large_images_train_by_our_kernels(method: Method, settled: None) -> None:
    """Of images of 96 pixels: as near to fp32 as torch's own bf16, about."""
    data = Images(draw_sizes(40, 150), torch.arange(40) % 5).to("cuda")

    def learn(engine: str, precision: str) -> torch.Tensor:
        recipe, crop = Recipe(epochs=2, lr=0.01, batch=16), ResizedCrop(96, brightness=0.2)
        settings = {"recipe": recipe, "augment": crop, "precision": precision, "engine": engine, "device": "cuda"}
        learner = Learner(method, 4, **settings)  # type: ignore[arg-type]
        learner.learn(data, range(3)).learn(data, range(3, 5))
        return learner.logits_at(data.x, torch.arange(40, device="cuda"))

    exact, plain, ours = learn("eager", "fp32"), learn("eager", "bf16"), learn("fused", "bf16")
    assert 0 < apart([ours], [exact]) < max(2 * apart([plain], [exact]), 0.05)


def test_a_learner_moves_between_devices(tmp_path: Path) -> None:
    gen = generator(3)
    x = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=gen)
    y = torch.arange(60) % 3
    learner = Learner(ILBaseline(), memory=5, device="cuda", precision="fp32", recipe=Recipe(epochs=2, batch=20))
    learner.learn(x, y)
    learner.save(tmp_path / "model")
    here = Learner.load(tmp_path / "model", device="cpu")
    assert torch.allclose(here.logits(x), learner.logits(x).cpu(), atol=1e-4)


# Our own kernels ------------------------------------------------------------------------------------------------


def gradients(net: Net, x: torch.Tensor, y: torch.Tensor, features: Any, bf16: bool) -> list[torch.Tensor]:
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
        out = net(x, features)
    loss = torch.nn.functional.cross_entropy(out.z, y) + sum(m.float().square().mean() for m in out.maps)
    assert isinstance(loss, torch.Tensor)
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(net.parameters()))
    if features is not None:
        assert all(torch.equal(a, b) for a, b in zip(first, again)), "the same bits, whenever"
    return list(first)


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """‖a − b‖ / ‖b‖."""
    difference = torch.stack([(x.double() - y.double()).pow(2).sum() for x, y in zip(a, b)]).sum()
    return float((difference / torch.stack([y.double().pow(2).sum() for y in b]).sum()).sqrt())


@pytest.mark.parametrize("batch", [128, 33])
@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(), PODNet()], ids=lambda m: m.name)
def test_kernels_are_as_near_to_the_truth_as_autocast(batch: int, method: Method) -> None:
    """Gradients of one step: our kernels and torch's own in bf16, both against float64."""
    from equipoise.engine.kernels.resnet32 import Frozen, Training

    gen = generator(11)
    x = torch.randint(0, 256, (batch, *SHAPE), dtype=torch.uint8, generator=gen).cuda()
    y = torch.randint(0, 10, (batch,), generator=gen).cuda()
    net = net_of(10, method)
    for m in net.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.weight.data.copy_(torch.rand(m.weight.shape, generator=gen) + 0.5)
            m.bias.data.copy_(0.3 * torch.randn(m.bias.shape, generator=gen))
    twins = [copy.deepcopy(net).train() for _ in range(3)]
    with use_device(torch.device("cuda")):
        truth = gradients(twins[0].double(), x, y, None, False)
        torch_s = gradients(twins[1], x, y, None, True)
        ours = gradients(twins[2], x, y, Training(twins[2]), True)
    theirs, mine = apart(torch_s, truth), apart(ours, truth)
    print(f"batch {batch}: torch {theirs:.4f}, ours {mine:.4f}")
    assert 1e-5 < mine < 1.1 * theirs < 0.5  # noise for images is the hardest case there is for bf16
    for (name, a), b in zip(twins[2].state_dict().items(), twins[0].state_dict().values()):
        torch.testing.assert_close(a.double(), b.double(), rtol=3e-2, atol=3e-2, msg=name)  # running statistics
    assert all(a.stride() == w.stride() for a, w in zip(ours, twins[2].parameters()))
    frozen = twins[2].eval().requires_grad_(False)
    with torch.no_grad(), use_device(torch.device("cuda")):
        exact, near = frozen(x), frozen(x, Frozen(frozen))
    assert 0 < apart([near.z], [exact.z]) < 0.03
    assert all(0 < apart([a], [b]) < 0.03 for a, b in zip(near.maps, exact.maps))


@pytest.mark.parametrize("kind", [ResNet18, PODNetResNet18])
def test_kernels_between_convolutions_are_as_near_to_the_truth(kind: type[Residual], settled: None) -> None:
    """Gradients of a ResNet-18: our kernels and torch's own in bf16, both against float64."""
    from equipoise.engine.kernels.resnet18 import Frozen, Training

    gen = generator(11)
    x = torch.randn(32, 3, 96, 96, generator=gen).cuda().contiguous(memory_format=torch.channels_last)
    nets = [kind().cuda().to(memory_format=torch.channels_last)]  # type: ignore[call-overload]
    for m in nets[0].modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.weight.data.copy_(torch.rand(m.weight.shape, generator=gen) + 0.5)
            m.bias.data.copy_(0.3 * torch.randn(m.bias.shape, generator=gen))
    nets += [copy.deepcopy(nets[0]) for _ in range(2)]
    drawn = torch.randn(512, 5, generator=gen).cuda()

    def differentiate(net: Any, x: torch.Tensor, features: Any) -> list[torch.Tensor]:
        h, maps = features(x)
        loss = (h.double() @ drawn.double()).square().mean() + sum(m.double().square().mean() for m in maps)
        return list(torch.autograd.grad(loss, list(net.parameters())))

    with use_device(torch.device("cuda"), tuned=False):
        truth = differentiate(nets[0].double(), x.bfloat16().double(), nets[0])
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            theirs = apart(differentiate(nets[1], x.bfloat16(), nets[1]), truth)
            ours = differentiate(nets[2], x.bfloat16(), Training(nets[2]))
            again = differentiate(nets[2], x.bfloat16(), Training(nets[2]))
    print(f"{kind.__name__}: torch {theirs:.4f}, ours {apart(ours, truth):.4f}")
    assert 1e-5 < apart(ours, truth) < 1.1 * theirs < 0.5
    assert all(torch.equal(a, b) for a, b in zip(ours, again)), "the same bits"
    assert all(a.stride() == w.stride() for a, w in zip(ours, nets[2].parameters()))
    exact, frozen = nets[0].eval(), copy.deepcopy(nets[0]).float().requires_grad_(False)
    with torch.no_grad(), use_device(torch.device("cuda"), tuned=False):
        (h, maps), (h_own, maps_own) = exact(x.bfloat16().double()), Frozen(frozen)(x.bfloat16())
    assert 0 < apart([h_own], [h]) < 0.03 and all(0 < apart([a], [b]) < 0.03 for a, b in zip(maps_own, maps))


def test_training_again_gives_the_same_bits() -> None:
    one, other = (trained(Meta(every=3, alpha_lr=1.0), "fused", bf16=True)[0] for _ in range(2))
    assert distance(one, other) == 0 and torch.equal(one.state["alpha"], other.state["alpha"])


@pytest.mark.parametrize("last", ["joined", "short"])
@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(), PODNet(), SPBM(Balanced())], ids=lambda m: m.name)
def test_a_run_again_gives_the_same_bits(method: Method, last: Literal["joined", "short"]) -> None:
    """New rows, exemplars and fine-tuning included; nothing but our kernels needs to be told to."""
    one, other = (two_steps(method, "fused", precision="bf16", last=last) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=3, alpha_lr=1.0)], ids=lambda v: v.name)
def test_training_by_our_kernels_is_training(remedy: Any) -> None:
    """As far from fp32 as bf16 is anyway."""
    exact, _ = trained(remedy, "eager")
    plain, _ = trained(remedy, "eager", bf16=True)
    fused, at = trained(remedy, "fused", bf16=True)
    print(f"{remedy.name}: bf16 {distance(plain, exact):.4f}, ours {distance(fused, exact):.4f}")
    assert at.epoch == 2
    assert 1e-6 < distance(fused, exact) < max(2 * distance(plain, exact), 0.01)
    if "alpha" in exact.state:
        assert fused.state["alpha"].item() - 1 == pytest.approx(exact.state["alpha"].item() - 1, rel=0.3)


@pytest.mark.parametrize(
    "method", [GeoDL(), SPBI(classes="all"), SPBM(Balanced()), Mnemonics(host=LUCIR())], ids=lambda m: m.name
)
def test_methods_are_trained_by_our_kernels_as_without(method: Method, settled: None) -> None:
    """Stage outputs, rotated copies and scaled kernels too: as far from fp32 as bf16 is anyway."""
    exact = two_steps(method, "eager")
    plain, fused = (two_steps(method, engine, precision="bf16") for engine in ("eager", "fused"))
    theirs, mine = ((one - exact).norm() / exact.norm() for one in (plain, fused))
    print(f"{method.name}: bf16 {theirs:.4f}, ours {mine:.4f}")
    assert 1e-6 < mine < max(3 * theirs, 0.05)


def test_a_stopped_step_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """On a GPU too: batches come from named generators, and our kernels add up alike in any order."""
    gen = generator(5)
    x = torch.randint(0, 256, (200, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.arange(200) % 4
    recipe = Recipe(epochs=3, batch=64)

    def keep(learner: Learner) -> None:
        if learner.progress_ is not None and learner.progress_.epoch == 2:
            learner.save(tmp_path / "half")

    whole = Learner(ILBaseline(), memory=5, device="cuda", precision="bf16", recipe=recipe).learn(x, y, keep)
    half = Learner.load(tmp_path / "half", device="cuda")
    assert half.unfinished_
    half.learn(x, y)
    assert half.engine_used_ == whole.engine_used_ == "fused"
    assert torch.equal(half.logits(x), whole.logits(x))


class NoisyTwice(ILBaseline):
    """After the choice of the exemplars everything is trained once more, with noise and a teacher of its own."""

    def objective(self, s: Step, b: Batch) -> torch.Tensor:
        loss = self.classify(b.out.z, b.y, s)
        return loss if b.ref is None else loss + distillation(b.out.z, b.ref.z, 2.0)

    def stages(self, plan: Plan) -> Stages:
        train, choose = super().stages(plan)
        assert isinstance(train, Stage)
        twice = replace(train, name="again", images="memory", teacher="as this stage began", gradient_noise=1e-4)
        return (train, choose, twice) if plan.t else (train, choose)


SECOND = [
    (LUCIR(finetune=Finetune(3, batch=8, weight_decay=5e-4)), "refit"),
    (PODNet(finetune=Finetune(3, 0.05, batch=8, clamp=5.0, batch_norm="train")), "refit"),
    (ILBaseline(BalancedFinetuning(Finetune(3, batch=8, what="all", batch_norm="train"))), "refit"),
    (NoisyTwice(), "again"),
]


@pytest.mark.parametrize(("method", "stage"), SECOND, ids=lambda v: getattr(v, "name", v))
def test_a_second_stage_that_was_stopped_goes_on_to_the_same_bits(method: Any, stage: str, tmp_path: Path) -> None:
    """With our kernels, whether batch norms learn (and they train) or are frozen (and they only predict), and whatever
    noise recording has drawn. What is saved at the end of an epoch is loaded by another learner, as after a kill."""
    gen = generator(5)
    x = torch.randint(0, 256, (240, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.arange(240) % 6
    old, new = y < 4, y >= 4
    clamp = method.recipe(plan_for(SHAPE)).clamp
    recipe, seen = Recipe(epochs=3, lr=0.01, milestones=(), batch=40, clamp=clamp), []

    def keep(learner: Learner) -> None:
        e = learner.progress_
        if e is not None and e.step == 1 and e.stage == stage:
            seen.append(e.epoch)
            learner.save(tmp_path / f"{e.epoch}")

    whole = Learner(method, memory=8, device="cuda", precision="bf16", engine="fused", recipe=recipe)
    whole.learn(x[old], y[old]).learn(x[new], y[new], keep)
    assert seen == [1, 2, 3]
    for epoch in (1, 2):
        half = Learner(method, memory=8, device="cuda", precision="bf16", engine="fused", recipe=recipe)
        half.restore(tmp_path / f"{epoch}")  # of a method from a test, too
        assert half.unfinished_ and not torch.equal(half.logits(x), whole.logits(x))
        half.learn(x[new], y[new])
        assert half._engines == {stage: "fused"} and whole._engines == {"train": "fused", stage: "fused"}
        assert torch.equal(half.logits(x), whole.logits(x))


def test_training_holds_each_pixel_once() -> None:
    """As a run does it, with images that lie on the GPU: what else is there does not grow with the data.

    A small and a large set of images of the same two steps are trained on, and between them only the data differs: the
    net, its momentum, the graph's pool and cuDNN's workspaces cancel. What grows with an image besides its 3,072 bytes
    are positions and random numbers of one epoch's batches and the order of the next, all int64: 8 (which) + 24 (drawn)
    in the table, as much again while an epoch is laid out, 8 for each of data, where and the order: less than 150
    bytes, 5 %. A second copy of the pixels, padded or gathered, would make it 2 and more, so 1.2 tells them apart.
    """
    taken: dict[int, int] = {}
    recipe = Recipe(epochs=2, lr=0.01, milestones=(), batch=128)
    for count in (2_000, 50_000, 2_000):  # the first one only so that what is allocated once is allocated
        gen = generator(6)
        x = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=gen)
        torch.cuda.synchronize()
        before, seen = torch.cuda.memory_allocated(), []
        images = Images(x, torch.arange(count) % 10, f"noise-{count}").to("cuda")
        learner = Learner(ILBaseline(), memory=20, device="cuda", precision="bf16", recipe=recipe, normalise=GREY)
        for classes in (range(5), range(5, 10)):
            learner.learn(images, classes, lambda _, seen=seen: seen.append(torch.cuda.memory_allocated()))
        assert learner.state_.exemplars is None and learner.state_.kept is not None, "exemplars are positions"
        taken[count] = max(seen) - before
        del learner, images
    pixels = (50_000 - 2_000) * 3 * 32 * 32
    assert pixels <= taken[50_000] - taken[2_000] < 1.2 * pixels


# Images on the disk


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    """600 images of ten classes, seen through a window of two halves of 80."""
    height, width = 48, 64
    monkeypatch.setattr(stored, "BLOCK", 2 * 3 * height * width)
    monkeypatch.setattr(stored, "WINDOW", 80 * 3 * height * width)
    monkeypatch.setattr(feed, "PIECE", 5 * 3 * height * width)
    images = write_noise(tmp_path, 600, height, width, classes=10)
    return replace(images, x=images.x.see(SHAPE[1])).to("cuda")  # type: ignore[union-attr]


def test_images_on_the_disk_are_at_hand_when_the_gpu_gets_there(on_disk: Images) -> None:
    """The CPU is far ahead of the GPU, which does something slow in every batch, and never waits for it."""
    resident, crop = on_disk.compact().x, ResizedCrop(SHAPE[1])
    assert isinstance(on_disk.x, Stored) and isinstance(resident, Ragged)
    near = torch.arange(3, 600, 17, device="cuda")
    source, slow = feed.Feed(on_disk.x, near), torch.randn(4096, 4096, device="cuda")
    for epoch in range(3):
        gen = generator(epoch, device="cuda")
        batches = torch.randint(0, 600, (60, 40), generator=gen, device="cuda")
        if epoch:
            batches = source.arrange(batches, gen)
        drawn = crop.draw((60, 40), gen)
        source.lay_out([batches])
        found = []
        for k, which in enumerate(source.follow(batches)):
            for _ in range(5):
                slow = slow @ slow / 64
            found.append(augment(crop, source.x, which, drawn[k]))
        for k, which in enumerate(batches):
            assert torch.equal(found[k], augment(crop, resident, which, drawn[k])), (epoch, k)


@pytest.mark.parametrize("remedy", [Balanced(), Meta(every=3, alpha_lr=1.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_a_recorded_step_from_the_disk_is_the_step(on_disk: Images, remedy: Any, engine: str) -> None:
    eager, _ = trained(remedy, "eager", images=on_disk)
    recorded, at = trained(remedy, engine, images=on_disk)
    assert at.epoch == 2
    assert distance(recorded, eager) < 1e-3
    assert distance(recorded, trained(remedy, "eager", epochs=1, images=on_disk)[0]) > 1e-3


def test_a_step_from_the_disk_is_that_from_memory_in_its_order(
    on_disk: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels, to the bit: where the pixels are changes nothing but the order."""
    streamed, _ = trained(Balanced(), "fused", True, images=on_disk)
    arrange = feed.Feed(on_disk.x, torch.cat([streamed.held, streamed.memory])).arrange  # type: ignore[arg-type]
    monkeypatch.setattr(feed.Resident, "arrange", lambda self, which, gen: arrange(which, gen))
    resident, _ = trained(Balanced(), "fused", True, images=on_disk.compact())
    pairs = zip(streamed.net.parameters(), resident.net.parameters())
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_step_from_the_disk_that_was_stopped_goes_on_to_the_same_bits(on_disk: Images, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(epochs: float) -> None:
        if epochs > 1.4:
            raise StoppedError

    recipe = Recipe(epochs=3, lr=0.01, milestones=(), batch=40)
    crop = ResizedCrop(SHAPE[1])
    whole = Learner(
        ILBaseline(Balanced()), memory=8, device="cuda", precision="bf16", engine="fused", recipe=recipe, augment=crop
    )
    whole.learn(on_disk, range(6)).save(tmp_path / "half")
    whole.learn(on_disk, range(6, 10))
    half = Learner.load(tmp_path / "half", "cuda")
    half.engine = half.engine_ = "fused"
    with pytest.raises(StoppedError):
        half.learn(on_disk, range(6, 10), lambda learner: learner.save(tmp_path / "half"), stop)
    half = Learner.load(tmp_path / "half", "cuda")
    half.engine = half.engine_ = "fused"
    assert half.unfinished_
    half.learn(on_disk, range(6, 10))
    where = torch.arange(len(on_disk), device="cuda")
    found = half.logits_at(on_disk.x, where)
    assert torch.equal(found, whole.logits_at(on_disk.x, where))
    assert torch.equal(found, whole.logits_at(on_disk.compact().x, where))
    assert half.state_.kept is not None and torch.equal(half.state_.kept, whole.state_.kept)  # type: ignore[arg-type]


def test_the_memory_of_training_is_told_apart_from_that_of_predicting() -> None:
    """What came before a step counts for the whole run, and not for the training of the step."""
    gen = generator(6)
    x = torch.randint(0, 256, (2000, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.arange(2000) % 4
    seen: list[float] = []

    def note(learner: Learner) -> None:
        assert learner.progress_ is not None and learner.progress_.mib is not None
        seen.append(learner.progress_.mib)

    learner = Learner(ILBaseline(), memory=5, device="cuda", precision="bf16", recipe=Recipe(epochs=2, batch=16))
    learner.learn(x[:100], y[:100], note)
    learner.predict(x)
    predicting = get_recent_peak_memory(learner.device_)
    learner.learn(x[:100], y[:100] + 4, note)
    assert 0 < seen[0] == seen[1] <= seen[2] == seen[3] < predicting <= get_peak_memory(learner.device_)


@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(finetune=Finetune(20, batch=8))], ids=lambda m: m.name)
def test_a_step_takes_no_more_memory_than_those_before(method: Method) -> None:
    """Streams are used again: each new one that multiplies matrices would keep 32 or 64 MiB.

    Batches of the fine-tuning are smaller than its images, of which there are more in every step.
    """
    gen = generator(6)
    x = torch.randint(0, 256, (100, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.arange(100) % 2
    peaks: dict[int, float] = {}

    def note(learner: Learner) -> None:
        assert learner.progress_ is not None and learner.progress_.mib is not None
        peaks[learner.progress_.step] = learner.progress_.mib

    learner = Learner(method, memory=5, device="cuda", precision="bf16", recipe=Recipe(epochs=2, batch=16))
    for t in range(6):
        learner.learn(x, y + 2 * t, note)
    assert learner.engine_used_ == "fused" and len(peaks) == 6
    assert max(peaks[t] for t in range(3, 6)) - peaks[2] < 4
