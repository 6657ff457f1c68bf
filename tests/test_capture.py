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
from steps import make_step
from torch import Tensor

from equipoise import (
    DDE,
    LUCIR,
    SPB,
    SPBM,
    TPCIL,
    Balanced,
    Crop,
    Finetune,
    ICaRL,
    ILBaseline,
    Learner,
    LossRescaling,
    Meta,
    Method,
    Mnemonics,
    PODNet,
    Recipe,
    SeparatedSoftmax,
    Stage,
    Step,
    methods,
)
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine import cuda_graph as capture_module
from equipoise.engine import train as loop
from equipoise.engine.cuda_graph import Engine, UnfitError, prepare
from equipoise.engine.device import use_device
from equipoise.engine.gpu import Streams
from equipoise.engine.stand_ins import explain_unfit, has_kernels, replace_features
from equipoise.engine.train import Conditions, Position, fit
from equipoise.learner.state import new_net
from equipoise.nets import Batch, Net, Out
from equipoise.nets.backbones import PODNetResNet32, ResNet32, SmallNet
from equipoise.nets.heads import LinearHead
from equipoise.step import More


def recorded(
    step: Callable[[], None], state: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
) -> Callable[[], None]:
    before = [t.clone() for t in state]
    for _ in range(3):
        step()
        with torch.no_grad():
            for t, old in zip(state, before):
                t.copy_(old)
    return step


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "capture_step", recorded)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def trained(method: Method, engine: Engine, **stage: Any) -> tuple[Step, Engine]:
    gen = generator(0, "test")
    data = Images(
        torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8, generator=gen),
        torch.randint(0, 5, (90,), generator=gen),
    )
    nets = []
    for classes in (5, 3):
        net = new_net(method, (1, 8, 8), torch.tensor([128.0]), torch.tensor([64.0]), generator(1))
        net.head.widen(classes, generator(2))
        nets.append(net)
    nets[1].eval().requires_grad_(False)
    meta = isinstance(method.remedy, Meta)
    held, state = (torch.arange(20), {"alpha": torch.ones(())}) if meta else (None, {"seen": torch.zeros(5)})
    s = make_step((3, 2), data, method.remedy, held=held, net=nets[0], teacher=nets[1], state=state)
    made: Any = Stage(**{"name": "train", "recipe": Recipe(epochs=2, batch=16), **stage})
    return s, fit(method, s, made, Position(), Conditions(0, Crop(1, False), engine=engine))


class Busy(ILBaseline):
    """A second stream, views, and something noted in every batch."""

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None
        return super().objective(s, b) + super().objective(s, b.more)

    def views(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.flip(3)])

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More:
        drawn = torch.randint(0, len(s.memory), (len(which), 6), generator=gen)
        return More(s.memory[drawn])

    def note(self, s: Step, b: Batch) -> None:
        s.state["seen"].add_(torch.bincount(b.y, minlength=5))


NOISY = {"gradient_noise": 0.01, "recipe": Recipe(epochs=2, batch=16, last="short")}
RECORDED = {
    "balanced": (ILBaseline(Balanced()), {}),
    "changing α": (ILBaseline(Balanced("0.1:1")), {}),
    "meta": (ILBaseline(Meta(every=2, alpha_lr=5.0)), {}),
    "busy": (Busy(), NOISY),
}


@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_recording_leaves_no_trace_in_what_is_trained(kind: str, engine: Engine, like_a_gpu: None) -> None:
    method, stage = RECORDED[kind]
    plain, _ = trained(method, "eager", **stage)
    other, used = trained(method, engine, **stage)
    assert used == engine
    for (name, a), b in zip(plain.net.state_dict().items(), other.net.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(plain.lam, other.lam)
    assert plain.state.keys() == other.state.keys()
    if kind == "busy":
        assert plain.state["seen"].sum() == 2 * 2 * 90 and torch.equal(plain.state["seen"], other.state["seen"])
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
    _, used = trained(ILBaseline(Balanced()), "compiled")
    # 90 images, 16 a batch, 2 epochs: 11 steps, and 3 before; for the student and for the teacher.
    assert used == "compiled" and calls == [14, 14]


def test_what_cannot_be_recorded_is_said_once_and_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Callable[[], None]:
        raise RuntimeError("no such driver\nand a page of details")

    monkeypatch.setattr(capture_module, "capture_step", refuse)
    made: list[str] = []

    def make(engine: Engine) -> list[Callable[[], None]]:
        made.append(engine)
        return [lambda: None]

    with caplog.at_level(logging.WARNING, "equipoise"):
        steps, used = prepare("compiled", make, [])
    # After each failure a step is done plainly, so that a fault in an objective is raised as what it is.
    assert (used, made, len(steps)) == ("eager", ["compiled", "eager", "captured", "eager", "eager"], 1)
    assert [r.getMessage() for r in caplog.records] == [
        f"training cannot be {engine} here, and is slower: no such driver" for engine in ("compiled", "captured")
    ]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: out of memory")], ids=str
)
def test_a_full_gpu_is_no_reason_for_a_simpler_engine(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Callable[[], None]:
        raise error

    monkeypatch.setattr(capture_module, "capture_step", refuse)
    with caplog.at_level(logging.WARNING, "equipoise"), pytest.raises(type(error), match="memory"):
        prepare("compiled", lambda engine: [lambda: None], [])
    assert not caplog.records


def unfit_of(
    backbone: Any,
    bf16: bool = True,
    shape: tuple[int, int] = (32, 32),
    method: Method = ILBaseline(),  # noqa: B008
    **training: bool,
) -> str | None:
    """Why there would be no kernels for a net with this backbone."""
    net = Net(backbone, LinearHead(64), torch.zeros(3), torch.ones(3))
    net.train(training.get("moving", True)).requires_grad_(training.get("learning", True))
    data = Images(torch.zeros(4, 3, *shape, dtype=torch.uint8), torch.zeros(4).long())
    return explain_unfit(make_step((1,), data, net=net), bf16, method)


def test_why_there_are_no_kernels() -> None:
    assert unfit_of(ResNet32()) is None and unfit_of(PODNetResNet32()) is None
    assert "precision is fp32" in str(unfit_of(ResNet32(), bf16=False))
    assert "for this SmallNet" in str(unfit_of(SmallNet(3)))
    assert "30 x 32 pixels" in str(unfit_of(ResNet32(), shape=(30, 32)))
    assert unfit_of(ResNet32(), moving=False, learning=False) is None, "a classifier on a frozen net"
    assert "batch norms are frozen" in str(unfit_of(ResNet32(), moving=False)), "their gradient would be silently 0"
    assert unfit_of(ResNet32(), method=Busy()) is None and unfit_of(ResNet32(), method=SPBM()) is None, "copies"
    for views in (lambda x: x[..., :30], lambda x: x / 2):
        other = type("Other", (ILBaseline,), {"views": staticmethod(views)})
        assert "makes others of them" in str(unfit_of(ResNet32(), method=other()))


def test_pixels_are_learned_without_our_kernels_and_without_a_compiler() -> None:
    """Their training is over before it would be compiled."""
    data = Images(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4).long())
    s = make_step(
        (1,),
        data,
        net=Net(ResNet32(), LinearHead(64), torch.zeros(3), torch.ones(3)),
        state={"pixels": torch.zeros(4, 3, 32, 32)},
    )
    for engine, words in (("fused", "no gradients of pixels"), ("compiled", "takes to compile")):
        with pytest.raises(UnfitError, match=words):
            replace_features(engine, s, True, ILBaseline())  # type: ignore[arg-type]
    assert replace_features("captured", s, True, ILBaseline()) == (None, None)


def test_a_fault_in_an_objective_is_raised_as_what_it_is(like_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(ILBaseline):
        def objective(self, s: Step, b: Batch) -> Tensor:
            return b.out.z[:, 99].sum()

    with caplog.at_level(logging.WARNING, "equipoise"), pytest.raises(IndexError, match="99"):
        trained(Faulty(), "captured")
    assert not engines_said(caplog)


def test_what_cannot_be_captured_is_trained_eagerly(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that says so is not even tried."""

    class Solving(ILBaseline):
        capturable = False

    monkeypatch.setattr(capture_module, "capture_step", lambda *_: pytest.fail("it says that it cannot be captured"))
    assert trained(Solving(), "captured")[1] == "eager"


def test_generators_are_recorded_where_gradients_have_noise(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[torch.Generator]] = []

    def note(step: Callable[[], None], state: Sequence[Tensor], generators: Sequence[torch.Generator]) -> Any:
        given.append(generators)
        return recorded(step, state)

    monkeypatch.setattr(capture_module, "capture_step", note)
    trained(ILBaseline(), "captured")
    trained(ILBaseline(), "captured", gradient_noise=0.1)
    assert [len(one) for one in given] == [0, 1]


def engines_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of engines: after an epoch or two a head's scale may be below 0, which is said too."""
    said = [r.getMessage() for r in caplog.records if r.name == "equipoise"]
    return [words for words in said if "scale of the head" not in words]


TUNED = Finetune(2, what="all", batch_norm="eval")


def test_another_engine_than_the_one_asked_for_is_said_once_and_why(
    like_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    said = {}
    for asked in ("auto", "fused"):
        learner = Learner(PODNet(finetune=TUNED), 4, recipe=Recipe(epochs=1), device="cpu")
        learner.engine, learner.engine_ = asked, "fused"  # as on a GPU
        with caplog.at_level(logging.WARNING, "equipoise"):
            for classes in (range(3), range(3, 5), range(5, 6)):
                learner.learn(*images(classes))
        assert learner.engine_used_ == "compiled"
        said[asked] = engines_said(caplog)
        caplog.clear()
    words = "training is compiled instead of fused: our kernels compute in bf16, and the precision is fp32"
    assert said == {"auto": [], "fused": [words]}


def test_fine_tuning_that_our_kernels_cannot_do_is_said_once(
    like_a_gpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_ins(engine: Engine, s: Step, bf16: bool, method: Method) -> tuple[None, None]:
        if engine == "fused" and not s.net.training:
            raise UnfitError("batch norms are frozen")
        return None, None

    monkeypatch.setattr(loop, "replace_features", stand_ins)
    learner = Learner(PODNet(finetune=TUNED), 4, recipe=Recipe(epochs=1), device="cpu")
    learner.engine = learner.engine_ = "fused"
    with caplog.at_level(logging.WARNING, "equipoise"):
        for classes in (range(3), range(3, 5), range(5, 6)):
            learner.learn(*images(classes))
    assert learner.engine_used_ == "fused", "the steps themselves go on with it"
    assert engines_said(caplog) == ["training is compiled instead of fused: batch norms are frozen"]


def test_an_engine_that_is_not_made_for_it_is_no_failure(like_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    def make(engine: Engine) -> list[Callable[[], None]]:
        if engine == "fused":
            raise UnfitError("it is too warm")
        return [lambda: None]

    with caplog.at_level(logging.WARNING, "equipoise"):
        assert prepare("fused", make, [])[1] == "compiled" and not caplog.records
        assert prepare("fused", make, [], requested=True)[1] == "compiled"
    assert [r.getMessage() for r in caplog.records] == ["training is compiled instead of fused: it is too warm"]


def test_a_full_gpu_is_not_taken_for_one_that_cannot_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capture_module, "capture_step", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepare("captured", lambda engine: [lambda: None], [])


def test_a_cpu_is_worked_on_as_it_is() -> None:
    before = torch.backends.cudnn.benchmark
    with use_device(torch.device("cpu")):
        assert torch.backends.cudnn.benchmark == before


def test_our_kernels_stand_in_only_for_what_they_compute() -> None:
    class Mine(ResNet32):
        pass

    assert has_kernels(ResNet32()) and has_kernels(PODNetResNet32()) and not has_kernels(SmallNet())
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


# What a graph cannot hold


def train_without_values(method: Method, pixels: bool = False) -> None:
    """The loss of a batch, its gradient, and what is noted, on tensors that have a shape and no values.

    Torch raises where a value is read, where a shape depends on one, and where a tensor of another device is mixed in:
    all that a CUDA graph cannot hold either. With `pixels`, the loss is that of Mnemonics' exemplars.
    """
    net = new_net(method, (1, 8, 8), torch.zeros(1), torch.ones(1), generator(0))
    net.head.widen(6, generator(0))
    net.head.widen(4, generator(0))
    net.to("meta")

    def answer(images: int) -> Out:
        h, maps = net.features(method.views(torch.zeros(images, 1, 8, 8, device="meta")))
        z, extra = net.head(h, maps)
        return Out(z, h, maps, extra)

    y = torch.zeros(32, dtype=torch.long, device="meta")
    state = {"direction": net.mean.new_zeros(64), "means of old": net.mean.new_zeros(6, 64), "part": y}
    n, data = net.mean.new_ones(10), Images(torch.zeros(32, 1, 8, 8, dtype=torch.uint8, device="meta"), y)
    s = Step(
        1, (6, 4), (1, 8, 8), (20,) * 10, 20, 20, n=n, lam=n.clone(), images=data, data=y, memory=y, held=y[:0],
        where=y, net=net, teacher=None, state=state, embed=lambda *_: pytest.fail("features are not for objectives"),
    )  # fmt: skip
    out, ref = answer(32), answer(32)
    b = Batch(y.repeat(len(out.z) // 32), out, ref._replace(z=ref.z[:, :6]))
    if method.overrides("more"):
        b = b._replace(more=b if method.name != "dde" else Batch(y.repeat(10), answer(320)))
    loss = (method.pixel_objective if isinstance(method, Mnemonics) and pixels else method.objective)(s, b)
    loss.backward()  # type: ignore[no-untyped-call]
    method.note(s, b)


VARIANTS: list[Method] = [
    DDE(host=PODNet(Balanced())),
    ICaRL(outputs="sigmoid"),
    ILBaseline(LossRescaling()),
    ILBaseline(SeparatedSoftmax(mean="all")),
    SPB(classes="all"),
    SPBM(Balanced(), scales="each"),
    TPCIL(pool="global", positive=True, edges="dot"),
]


CAPTURABLE = [m for m in (*(kind() for kind in methods.find_built_in().values()), *VARIANTS) if m.capturable]


@pytest.mark.parametrize("method", CAPTURABLE, ids=lambda m: m.name)
def test_no_method_that_is_recorded_reads_a_value(method: Method) -> None:
    """If it did, tensors without values would raise an error, as the test of what reads a value shows."""
    train_without_values(method)


@pytest.mark.parametrize("method", [Mnemonics(), Mnemonics(host=LUCIR(), mode="paper")])
def test_no_value_is_read_where_pixels_are_learned(method: Method) -> None:
    train_without_values(method, pixels=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda z: z.sum().item(),
        lambda z: z[z > 0].sum(),
        lambda z: (z * torch.ones(z.shape[1])).sum(),
        lambda z: z.sum() if z.sum() > 0 else -z.sum(),
    ],
    ids=["item", "mask", "other device", "branch"],
)
def test_what_reads_a_value_is_found(read: Callable[[Tensor], Any]) -> None:
    class Reading(ILBaseline):
        def objective(self, s: Step, b: Batch) -> Tensor:
            return super().objective(s, b) + read(b.out.z)

    with pytest.raises((RuntimeError, NotImplementedError)):
        train_without_values(Reading())
