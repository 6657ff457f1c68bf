"""How steps are launched, as far as a CPU can show it: what a GPU's recorder would need is complete, and it falls back.

`captured` needs a GPU. Here a stand-in does to the state all that recording does: it runs the step several times and
puts every tensor it was told of back. A tensor that it was not told of would show in the result.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import Balanced, Crop, ILBaseline, Meta, Recipe
from equipoise import capture as capture_module
from equipoise.capture import Engine, prepared
from equipoise.data import Images
from equipoise.method import Step
from equipoise.nets import LinearTrunk, ResNet32, SmallNet
from equipoise.randomness import generator
from equipoise.state import new_net
from equipoise.train import Position, fit, has_kernels, working_on


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
