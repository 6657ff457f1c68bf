"""How steps are launched, as far as a CPU can show it: what a GPU's recorder would need is complete, and it falls back.

`captured` needs a GPU. Here a stand-in does to the state all that recording does: it runs the step several times and
puts every tensor it was told of back. A tensor that it was not told of would show in the result.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from squares import images
from torch import Tensor

from equipoise import Balanced, Crop, ILBaseline, Learner, Meta, Recipe
from equipoise.data.images import Images
from equipoise.engine import cuda_graph as capture_module
from equipoise.engine.cuda_graph import Engine, UnfitError, prepared
from equipoise.engine.device import working_on
from equipoise.engine.gpu import Streams
from equipoise.engine.train import Position, fit, has_kernels, unfit
from equipoise.learner.state import new_net
from equipoise.method import Step
from equipoise.methods.podnet import PODNet
from equipoise.nets import Net
from equipoise.nets.backbones import LinearTrunk, ResNet32, SmallNet
from equipoise.nets.heads import LinearHead
from equipoise.randomness import generator


def recorded(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    before = [t.clone() for t in state]
    for _ in range(3):
        step()
        with torch.no_grad():
            for t, old in zip(state, before):
                t.copy_(old)
    return step


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "captured", recorded)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def trained(loss: Any, engine: Engine) -> tuple[Step, Engine]:
    gen = generator(0, "test")
    data = Images(
        torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8, generator=gen),
        torch.randint(0, 5, (90,), generator=gen),
    )
    method = ILBaseline(loss)
    nets = []
    for classes in (5, 3):
        net = new_net(method, (1, 8, 8), torch.tensor([128.0]), torch.tensor([64.0]), generator(1))
        net.head.widen(classes, generator(2))
        nets.append(net)
    nets[1].eval().requires_grad_(False)
    n, past = torch.bincount(data.y).float(), torch.arange(5) < 3
    state = {"alpha": torch.ones(())} if isinstance(loss, Meta) else {}
    lam = loss.lam(n, past, state.get("alpha")).clone()
    held = data[torch.arange(20)] if state else None
    s = Step(1, 3, (3, 2), n, lam, data, held, nets[0], nets[1], state)
    at = Position({name: torch.zeros_like(w) for name, w in s.net.named_parameters()})
    used = fit(method, s, Recipe(epochs=2, batch=16), Crop(1, False), 0, False, at, lambda e: None, engine=engine)
    return s, used


@pytest.mark.parametrize("loss", [Balanced(), Meta(every=2, alpha_lr=5.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_recording_leaves_no_trace_in_what_is_trained(loss: Any, engine: Engine, like_a_gpu: None) -> None:
    plain, _ = trained(loss, "eager")
    other, used = trained(loss, engine)
    assert used == engine
    for (name, a), b in zip(plain.net.state_dict().items(), other.net.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(plain.lam, other.lam)
    assert plain.state.keys() == other.state.keys()
    if "alpha" in plain.state:
        assert plain.state["alpha"] != 1
        torch.testing.assert_close(plain.state["alpha"], other.state["alpha"], rtol=1e-4, atol=1e-5)


def test_compiled_backbones_are_really_used(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compiled(module: SmallNet) -> Callable[[Tensor], Any]:
        calls.append(0)
        which = len(calls) - 1

        def call(x: Tensor) -> Any:
            calls[which] += 1
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    _, used = trained(Balanced(), "compiled")
    # 90 images, 16 a batch, 2 epochs: 11 steps, and 3 before; for the student and for the teacher.
    assert used == "compiled" and calls == [14, 14]


def test_what_cannot_be_recorded_is_said_once_and_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
        raise RuntimeError("no such driver\nand a page of details")

    monkeypatch.setattr(capture_module, "captured", refuse)
    made: list[str] = []

    def make(engine: Engine) -> list[Callable[[], None]]:
        made.append(engine)
        return [lambda: None]

    with caplog.at_level(logging.WARNING, "equipoise"):
        steps, used = prepared("compiled", make, [])
    assert (used, made, len(steps)) == ("eager", ["compiled", "captured", "eager"], 1)
    assert [r.getMessage() for r in caplog.records] == [
        f"training cannot be {engine} here, and is slower: no such driver" for engine in ("compiled", "captured")
    ]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: out of memory")], ids=str
)
def test_a_full_gpu_is_no_reason_for_a_simpler_engine(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
        raise error

    monkeypatch.setattr(capture_module, "captured", refuse)
    with caplog.at_level(logging.WARNING, "equipoise"), pytest.raises(type(error), match="memory"):
        prepared("compiled", lambda engine: [lambda: None], [])
    assert not caplog.records


def unfit_of(backbone: Any, bf16: bool = True, shape: tuple[int, int] = (32, 32), **training: bool) -> str | None:
    """Why there would be no kernels for a net with this backbone."""
    net = Net(backbone, LinearHead(64), torch.zeros(3), torch.ones(3))
    net.train(training.get("moving", True)).requires_grad_(training.get("learning", True))
    data = Images(torch.zeros(4, 3, *shape, dtype=torch.uint8), torch.zeros(4).long())
    n = torch.ones(1)
    return unfit(Step(0, 0, (1,), n, n, data, None, net, None), bf16)


def test_why_there_are_no_kernels() -> None:
    assert unfit_of(ResNet32()) is None and unfit_of(LinearTrunk()) is None
    assert "precision is fp32" in str(unfit_of(ResNet32(), bf16=False))
    assert "for this SmallNet" in str(unfit_of(SmallNet(3)))
    assert "30 x 32 pixels" in str(unfit_of(ResNet32(), shape=(30, 32)))
    assert unfit_of(ResNet32(), moving=False, learning=False) is None, "a classifier on a net that rests"
    assert "batch norms rest" in str(unfit_of(ResNet32(), moving=False)), "their gradient would be silently 0"


def engines_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of engines: after an epoch or two a head's scale may be below 0, which is said too."""
    said = [r.getMessage() for r in caplog.records if r.name == "equipoise"]
    return [words for words in said if "scale of the head" not in words]


def test_another_engine_than_the_one_asked_for_is_said_once_and_why(
    like_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    said = {}
    for asked in ("auto", "fused"):
        learner = Learner(PODNet(refit_what="all", refit_statistics="rest"), 4, recipe=Recipe(epochs=1), device="cpu")
        learner.engine, learner.engine_ = asked, "fused"  # as on a GPU
        with caplog.at_level(logging.WARNING, "equipoise"):
            for classes in (range(3), range(3, 5), range(5, 6)):
                learner.learn(*images(classes))
        assert learner.engine_ == "compiled"
        said[asked] = engines_said(caplog)
        caplog.clear()
    words = "training is compiled instead of fused: our kernels count in bf16, and the precision is fp32"
    assert said == {"auto": [], "fused": [words]}


def test_a_refit_that_our_kernels_cannot_do_is_said_once(
    like_a_gpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_ins(engine: Engine, s: Step, bf16: bool) -> tuple[None, None]:
        if engine == "fused" and not s.net.training:
            raise UnfitError("batch norms rest")
        return None, None

    monkeypatch.setattr("equipoise.engine.train.stand_ins", stand_ins)
    learner = Learner(PODNet(refit_what="all", refit_statistics="rest"), 4, recipe=Recipe(epochs=1), device="cpu")
    learner.engine = learner.engine_ = "fused"
    with caplog.at_level(logging.WARNING, "equipoise"):
        for classes in (range(3), range(3, 5), range(5, 6)):
            learner.learn(*images(classes))
    assert learner.engine_ == "fused", "the steps themselves go on with it"
    assert engines_said(caplog) == ["training is compiled instead of fused: batch norms rest"]


def test_an_engine_that_is_not_made_for_it_is_no_failure(like_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    def make(engine: Engine) -> list[Callable[[], None]]:
        if engine == "fused":
            raise UnfitError("it is too warm")
        return [lambda: None]

    with caplog.at_level(logging.WARNING, "equipoise"):
        assert prepared("fused", make, [])[1] == "compiled" and not caplog.records
        assert prepared("fused", make, [], asked=True)[1] == "compiled"
    assert [r.getMessage() for r in caplog.records] == ["training is compiled instead of fused: it is too warm"]


def test_a_full_gpu_is_not_taken_for_one_that_cannot_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capture_module, "captured", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepared("captured", lambda engine: [lambda: None], [])


def test_a_cpu_is_worked_on_as_it_is() -> None:
    before = torch.backends.cudnn.benchmark
    with working_on(torch.device("cpu")):
        assert torch.backends.cudnn.benchmark == before


def test_our_kernels_stand_in_only_for_what_they_compute() -> None:
    class Mine(ResNet32):
        pass

    assert has_kernels(ResNet32()) and has_kernels(LinearTrunk()) and not has_kernels(SmallNet())
    assert not has_kernels(Mine()), "its forward may be another"
    other, hooked = ResNet32(), ResNet32()
    other.bn.eps = 1e-3
    hooked.conv.register_forward_hook(lambda *_: None)
    assert not has_kernels(other) and not has_kernels(hooked)


def test_a_stream_is_used_again_for_its_purpose_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda number: (number, object()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    streams = Streams()
    first = streams.get(torch.device("cuda"), "teacher")
    assert first == streams.get(torch.device("cuda:1"), "teacher") and first[0] == 1  # type: ignore[index]
    others = {streams.get(torch.device("cuda"), "weights"), streams.get(torch.device("cuda:0"), "teacher")}
    with ThreadPoolExecutor(1) as pool:
        others.add(pool.submit(streams.get, torch.device("cuda"), "teacher").result())
    assert len(others | {first}) == 4
    streams.forget()
    assert streams.get(torch.device("cuda"), "teacher") not in others | {first}
