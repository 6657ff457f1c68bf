"""Images of different sizes from end to end: learned, kept, saved, resumed, predicted and herded; and large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_capture import recorded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from equipoise import (
    DDE,
    EEIL,
    LUCIR,
    Balanced,
    Crop,
    Finetune,
    ICaRL,
    ILBaseline,
    Learner,
    Meta,
    Method,
    Mnemonics,
    PODNet,
    Recipe,
    ResizedCrop,
    UsageError,
)  # fmt: skip
from equipoise.data.images import Images
from equipoise.data.ragged import Ragged
from equipoise.data.randomness import generator
from equipoise.engine import cuda_graph, pixels, predict
from equipoise.engine.batches import Table
from equipoise.engine.predict import compute_features
from equipoise.learner.state import new_net
from equipoise.nets.backbones import PODNetResNet18, ResNet18

SIDE = 12
CROP = ResizedCrop(SIDE, scale=(0.3, 1.0))
FAST = Recipe(epochs=2, lr=0.05, batch=8)
GREY = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def pictures(classes: range, each: int = 8) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    """Noise of a colour that tells the class, each of a size of its own."""
    rng, y = np.random.default_rng(classes.start), [c for c in classes for _ in range(each)]
    made = []
    for c in y:
        height, width = rng.integers(SIDE - 4, 2 * SIDE, 2)
        colour = 40 + 170 * np.array([c & 1, c >> 1 & 1, c >> 2 & 1])
        made.append((colour + rng.integers(-40, 41, (height, width, 3))).clip(0, 255).astype(np.uint8))
    return made, y


def learner(method: Method | None = None, **more: Any) -> Learner:
    settings = {"memory": 3, "recipe": FAST, "augment": CROP, "device": "cpu", **more}
    return Learner(method or ILBaseline(Balanced()), **settings)


def labelled(x: list[np.ndarray[Any, Any]], y: list[int]) -> Images:
    return Images(Ragged.stack([torch.from_numpy(one) for one in x]), torch.tensor(y))


def weights(one: Learner) -> dict[str, Tensor]:
    assert one.state_.net is not None
    return one.state_.net.state_dict()


def same_weights(a: Learner, b: Learner) -> bool:
    return all(torch.equal(v, weights(b)[k]) for k, v in weights(a).items())


def test_images_of_different_sizes_are_learned_kept_and_saved(tmp_path: Path) -> None:
    one = learner(recipe=Recipe(epochs=12, lr=0.05, batch=8))
    for classes in (range(3), range(3, 5)):
        one.learn(*pictures(classes))
    x, y = pictures(range(5))
    assert one.score(x, y) > 0.8 and one.predict(x[0]).shape == (1,) and one.state_.shape == (3, SIDE, SIDE)
    exemplars = one.exemplars_
    assert exemplars is not None and isinstance(exemplars.x, Ragged) and len(exemplars) == 15
    assert len(exemplars.x.pixels) == int(exemplars.x.bytes.sum()), "no others are kept"
    one.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model")
    assert loaded.augment == CROP and torch.equal(loaded.logits(x), one.logits(x))
    assert loaded.exemplars_ is not None and loaded.exemplars_.fingerprint() == exemplars.fingerprint()
    for again in (one, loaded):
        again.learn(*pictures(range(5, 6)))
    assert same_weights(one, loaded)


def test_positions_in_images_of_different_sizes_are_the_same_as_pixels(tmp_path: Path) -> None:
    """And a step that is resumed ends as one that was not stopped."""
    x, y = pictures(range(5))
    data, kept = labelled(x, y), learner()
    taught = learner(normalise=GREY).learn(data, range(3)).learn(data, range(3, 5))
    given = learner(normalise=GREY)
    for classes in (range(3), range(3, 5)):
        given.learn([one for one, c in zip(x, y) if c in classes], [c for c in y if c in classes])
    assert same_weights(taught, given) and taught.state_.kept is not None and taught.exemplars_ is None
    taught.own_exemplars(data)
    assert taught.exemplars_ is not None and given.exemplars_ is not None
    assert taught.exemplars_.fingerprint() == given.exemplars_.fingerprint()

    kept = learner(normalise=GREY).learn(data, range(3))

    def stop(one: Learner) -> None:
        one.save(tmp_path / "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.learn(data, range(3, 5), stop)
    resumed = Learner.load(tmp_path / "half").learn(data, range(3, 5))
    assert same_weights(resumed, taught)
    (saved,) = (tmp_path / "half").glob("*.safetensors")
    names = load_file(saved).keys()
    assert "memory.at" in names and "memory.x" not in names, "a checkpoint holds positions"


LEARNING_PIXELS = Mnemonics(host=LUCIR(), mode="paper", exemplar_epochs=1)
METHODS = [ICaRL(), DDE(host=LUCIR(Balanced())), LUCIR(Meta(every=2)), PODNet(), LEARNING_PIXELS]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_methods_see_images_of_different_sizes_as_squares(method: Method) -> None:
    """With second streams, features of an epoch as it is augmented, mirror images, and pixels that are learned."""
    one = learner(method)
    for classes in (range(3), range(3, 5)):
        one.learn(*pictures(classes))
    assert one.logits(pictures(range(5))[0]).isfinite().all() and one.exemplars_ is not None
    if method is LEARNING_PIXELS:
        assert one.exemplars_.x.shape[1:] == (3, SIDE, SIDE)
        one.learn(*pictures(range(5, 6)))


def test_squares_and_lists_are_alike_and_what_is_wrong_is_refused() -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, 14, 14, 3)).astype(np.uint8)
    a, b = learner().learn(x, [0, 1] * 4), learner().learn(list(x), [0, 1] * 4)
    assert same_weights(a, b) and a.predict(torch.from_numpy(x).permute(0, 3, 1, 2)[0]).shape == (1,)
    with pytest.raises(UsageError, match="need augment=ResizedCrop"):
        learner(augment=Crop(1)).learn(labelled(*pictures(range(2))), range(2))
    with pytest.raises(UsageError, match="one array of equal-sized"):
        learner(augment=None).learn(*pictures(range(2)))
    with pytest.raises(UsageError, match="there are no images"):
        learner().learn([], [])
    with pytest.raises(UsageError, match="remove shift and contrast"):
        learner(EEIL(shift=10.0)).learn(*pictures(range(2)))
    with pytest.raises(UsageError, match=r"must be a Crop\(\) or a ResizedCrop\(\)"):
        learner(augment=4)


# Large images


@pytest.mark.parametrize(
    ("method", "side"),
    [(ILBaseline(Balanced()), 224), (ILBaseline(Balanced()), 84), (LUCIR(), 84), (PODNet(finetune=Finetune(1)), 84)],
    ids=lambda value: value.name if isinstance(value, Method) else str(value),
)
def test_large_images_are_learned_by_the_recipe_of_their_size(method: Method, side: int) -> None:
    """Their recipe and nets, but for the epochs; few images, since 224 pixels take a tenth of a second each, and three
    times as long in PODNet's net. The net and the recipe are those of 84 pixels."""
    each = 2 if side == 84 else 1
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 256, (side, side + 9 * k, 3)).astype(np.uint8) for k in range(3 * each)]
    y = [k // each for k in range(3 * each)]
    recipe = method.recipes["large"]
    one = learner(method, memory=1, augment=ResizedCrop(side), recipe=Recipe(**{**vars(recipe), "epochs": 1}))
    one.learn(x[: 2 * each], y[: 2 * each]).learn(x[2 * each :], y[2 * each :])
    assert one.state_.net is not None and type(one.state_.net.backbone) in (ResNet18, PODNetResNet18)
    assert one.logits(x[:2]).shape == (2, 3) and one.logits(x[:2]).isfinite().all()


# Steps that are captured, and chunks


def test_no_shape_depends_on_what_is_drawn() -> None:
    """Fake tensors have no values: what asks for one, as a captured step must not, raises an error."""
    data = labelled(*pictures(range(2)))
    assert isinstance(data.x, Ragged)
    drawn, largest = CROP.draw((5,), generator(0)), data.x.largest
    with FakeTensorMode() as mode:
        x = Ragged(*(mode.from_tensor(t) for t in (data.x.pixels, data.x.start, data.x.size)), SIDE)
        vars(x)["largest"] = largest  # as the steps before the recording have found it
        out = ResizedCrop(SIDE, brightness=0.5)(x, torch.zeros(5, dtype=torch.long), mode.from_tensor(drawn))
        assert out.shape == (5, 3, SIDE, SIDE) and out.dtype == torch.uint8


def test_boxes_of_an_epoch_are_those_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "AT_ONCE", 5)
    data, crop = labelled(*pictures(range(2))), ResizedCrop(SIDE, brightness=0.5)
    which, gen = torch.arange(12).flip(0).view(3, 4), generator(0)
    drawn, table = crop.draw((3, 4), gen), Table(data, crop, 5, 4)
    table.lay_out(which, drawn)
    for k in range(3):
        x, y = table.next_batch()
        assert torch.equal(x, crop(data.x, which[k], drawn[k])) and y.tolist() == data.y[which[k]].tolist()


def test_a_captured_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "capture_step", recorded)
    plain, captured = learner(), learner()
    captured.engine = captured.engine_ = "captured"
    for classes in (range(3), range(3, 5)):
        for one in (plain, captured):
            one.learn(*pictures(classes))
    assert captured.engine_used_ == "captured" and same_weights(plain, captured)


def test_chunks_have_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = labelled(*pictures(range(3))).x.see(SIDE)  # type: ignore[union-attr]
    net = new_net(ILBaseline(), (3, SIDE, SIDE), torch.full((3,), 128.0), torch.full((3,), 64.0), generator(0))
    where = torch.arange(len(data)).flip(0)
    sizes: list[int] = []
    whole = compute_features(net, data, where)
    monkeypatch.setattr(predict, "CHUNK", 5 * SIDE**2)

    def note(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    torch.testing.assert_close(compute_features(net, data, where, note), whole)
    assert sizes == [5, 5, 5, 5, 4]
