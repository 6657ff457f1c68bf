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

from equipoise import LUCIR, Balanced, Crop, ILBaseline, Learner, Meta, Method, PODNet, Recipe, Standard
from equipoise.data.images import Images
from equipoise.engine.cuda_graph import ENGINES, prepared
from equipoise.engine.device import working_on
from equipoise.engine.gpu import peak_memory, recent_peak_memory
from equipoise.engine.train import Position, fit
from equipoise.learner.state import new_net, place
from equipoise.method import Step
from equipoise.nets import Net
from equipoise.randomness import generator
from equipoise.remedies import MITIGATIONS
from equipoise.runs.run import Run, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (3, 32, 32)


def net_of(classes: int, method: Method | None = None) -> Net:
    net = new_net(method or ILBaseline(), SHAPE, torch.full((3,), 128.0), torch.full((3,), 64.0), generator(0))
    net.head.widen(classes, generator(1))
    return place(net, torch.device("cuda"))


def trained(loss: Any, engine: Any, bf16: bool = False, epochs: int = 2, images: int = 300) -> tuple[Step, Position]:
    gen = generator(7)
    x = torch.randint(0, 256, (images, *SHAPE), dtype=torch.uint8, generator=gen)
    y = torch.randint(0, 10, (images,), generator=gen)
    data = Images(x, y).to("cuda")
    held = data[torch.arange(40, device="cuda")]
    net, teacher = net_of(10), net_of(6).eval().requires_grad_(False)
    n = torch.bincount(data.y, minlength=10).float()
    method = ILBaseline(loss)
    state = {"alpha": torch.ones((), device="cuda")} if isinstance(loss, Meta) else {}
    past = torch.arange(10, device="cuda") < 6
    lam = method.loss.lam(n, past, state.get("alpha")).clone()
    s = Step(1, 6, (6, 4), n, lam, data, held if state else None, net, teacher, state)
    at = Position({name: torch.zeros_like(w) for name, w in net.named_parameters()})
    recipe = Recipe(epochs=epochs, lr=0.01, milestones=(), batch=64)
    with working_on(torch.device("cuda")):
        used = fit(method, s, recipe, Crop(), 0, bf16, at, lambda e: None, engine=engine)
    assert used == engine
    return s, at


def distance(a: Step, b: Step) -> float:
    """‖a − b‖ / ‖b‖ over all weights."""
    pairs = list(zip(a.net.parameters(), b.net.parameters()))
    apart = torch.stack([(x.detach() - y.detach()).double().pow(2).sum() for x, y in pairs]).sum()
    size = torch.stack([y.detach().double().pow(2).sum() for _, y in pairs]).sum()
    return float((apart / size).sqrt())


@pytest.mark.parametrize("loss", [Standard(), Balanced(), Meta(every=3, alpha_lr=1.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_a_recorded_step_is_the_step(loss: Any, engine: str) -> None:
    eager, _ = trained(loss, "eager")
    recorded, at = trained(loss, engine)
    assert at.epoch == 2
    assert distance(recorded, eager) < 1e-3
    assert distance(recorded, trained(loss, "eager", epochs=1)[0]) > 1e-3  # the second epoch did something
    for key, value in eager.state.items():
        assert recorded.state[key].item() == pytest.approx(value.item(), abs=1e-3)
        assert value.item() != 1.0


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN adds up in a fixed order: else two runs of one engine are a few percent apart after a dozen batches."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


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
    recipe = Recipe(epochs=2, lr=0.01, milestones=(), batch=40, clamp=method.recipe(SHAPE).clamp, last=last)
    learner = Learner(method, memory=5, recipe=recipe, **settings)  # type: ignore[arg-type]
    for first, last in itertools.pairwise(cuts):
        now = (y >= first) & (y < last)
        learner.learn(x[now], y[now])
    assert learner.engine_ == engine
    return learner.logits(x).cpu()


@pytest.mark.parametrize(
    "method",
    [
        LUCIR(Balanced()),
        LUCIR(Meta(every=3)),
        LUCIR(finetune=True),
        PODNet(),
        PODNet(nca="paper"),
        PODNet(Balanced()),
        *(ILBaseline(mitigation=name) for name in MITIGATIONS if name != "none"),  # type: ignore[arg-type]
        ILBaseline(mitigation="separated-softmax", old_share=0.2, separated_mean="all"),
        ILBaseline(mitigation="balanced-finetuning", refit_what="all", refit_statistics="move", refit_taught=True),
    ],
    ids=lambda m: f"{m.name}-{m.loss.name}-{m.mitigation}",
)
def test_a_recorded_run_is_the_run(method: Method, settled: None) -> None:
    """Every method and remedy: what is recorded once and replayed is what Python would do step by step."""
    eager = two_steps(method, "eager")
    apart = (two_steps(method, "captured") - eager).norm() / eager.norm()
    assert apart < 1e-2


def test_distilling_step_by_step_is_recorded_too(settled: None) -> None:
    method, cuts = ILBaseline(mitigation="separated-softmax", weights="ones", distil="by-step"), (0, 2, 4, 6)
    eager = two_steps(method, "eager", cuts=cuts)
    apart = (two_steps(method, "captured", cuts=cuts) - eager).norm() / eager.norm()
    together = two_steps(replace(method, distil="together"), "eager", cuts=cuts)
    assert apart < 1e-2 and apart < (together - eager).norm() / eager.norm()


def test_brightness_is_recorded_too(settled: None) -> None:
    eager = two_steps(ILBaseline(), "eager", brightness=0.25)
    apart = (two_steps(ILBaseline(), "captured", brightness=0.25) - eager).norm() / eager.norm()
    assert apart < 1e-2 < (two_steps(ILBaseline(), "eager") - eager).norm() / eager.norm()


@pytest.mark.parametrize("loss", [Balanced(), Meta(every=2)], ids=lambda v: v.name)
def test_short_last_batches_are_recorded_too(loss: Any, settled: None) -> None:
    eager = two_steps(ILBaseline(loss), "eager", last="short")
    apart = (two_steps(ILBaseline(loss), "captured", last="short") - eager).norm() / eager.norm()
    assert apart < 1e-2 < (two_steps(ILBaseline(loss), "eager") - eager).norm() / eager.norm()


def test_bf16_is_near_fp32() -> None:
    assert 1e-6 < distance(trained(Balanced(), "eager", bf16=True)[0], trained(Balanced(), "eager")[0]) < 0.05


def test_recording_leaves_everything_as_it_was() -> None:
    w, count = torch.ones(3, device="cuda"), torch.zeros(1, device="cuda")

    def step() -> None:
        w.mul_(2)
        count.add_(1)

    (replay,), engine = prepared("captured", lambda engine: [step], [w, count])
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
        (plain,), engine = prepared("captured", lambda engine: [step], [w])
    assert "captured" in caplog.text and w.tolist() == [1, 1, 1] and engine == "eager"
    plain()
    assert w.tolist() == [2, 2, 2]


@pytest.mark.parametrize("engine", ENGINES)
def test_digits_run_on_every_engine(engine: str, tmp_path: Path) -> None:
    asked = Run(ILBaseline(Meta()), dataset="digits", memory="5", engine=engine, device="cuda", precision="fp32")
    result = run(asked, tmp_path / "a")
    assert result["average_incremental_accuracy"] > 60  # Standard is near 40
    used = "compiled" if engine == "fused" else engine  # the net for tiny images has no kernels of its own
    assert result["hardware"]["engine"] == used and result["hardware"]["gpu"]


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
    with working_on(torch.device("cuda")):
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
    with torch.no_grad(), working_on(torch.device("cuda")):
        exact, near = frozen(x), frozen(x, Frozen(frozen))
    assert 0 < apart([near.z], [exact.z]) < 0.03
    assert all(0 < apart([a], [b]) < 0.03 for a, b in zip(near.maps, exact.maps))


def test_training_again_gives_the_same_bits() -> None:
    one, other = (trained(Meta(every=3, alpha_lr=1.0), "fused", bf16=True)[0] for _ in range(2))
    assert distance(one, other) == 0 and torch.equal(one.state["alpha"], other.state["alpha"])


@pytest.mark.parametrize("last", ["joined", "short"])
@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(), PODNet()], ids=lambda m: m.name)
def test_a_run_again_gives_the_same_bits(method: Method, last: Literal["joined", "short"]) -> None:
    """New rows, exemplars and refits included; nothing but our kernels needs to be told to."""
    one, other = (two_steps(method, "fused", precision="bf16", last=last) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("loss", [Balanced(), Meta(every=3, alpha_lr=1.0)], ids=lambda v: v.name)
def test_training_by_our_kernels_is_training(loss: Any) -> None:
    """As far from fp32 as bf16 is anyway."""
    exact, _ = trained(loss, "eager")
    plain, _ = trained(loss, "eager", bf16=True)
    fused, at = trained(loss, "fused", bf16=True)
    print(f"{loss.name}: bf16 {distance(plain, exact):.4f}, ours {distance(fused, exact):.4f}")
    assert at.epoch == 2
    assert 1e-6 < distance(fused, exact) < max(2 * distance(plain, exact), 0.01)
    if "alpha" in exact.state:
        assert fused.state["alpha"].item() - 1 == pytest.approx(exact.state["alpha"].item() - 1, rel=0.3)


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
    assert half.engine_ == whole.engine_ == "fused"
    assert torch.equal(half.logits(x), whole.logits(x))


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
    predicting = recent_peak_memory(learner.device_)
    learner.learn(x[:100], y[:100] + 4, note)
    assert 0 < seen[0] == seen[1] <= seen[2] == seen[3] < predicting <= peak_memory(learner.device_)


@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(finetune=True)], ids=lambda m: m.name)
def test_a_step_takes_no_more_memory_than_those_before(method: Method) -> None:
    """Streams are used again: each new one that multiplies matrices would keep 32 or 64 MiB."""
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
    assert learner.engine_ == "fused" and len(peaks) == 6
    assert max(peaks[t] for t in range(3, 6)) - peaks[2] < 4
