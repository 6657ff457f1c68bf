"""Training: SGD against torch's, the schedule, the stream of batches, crop and flip, and named generators."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from steps import make_step, train
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise import (
    LUCIR,
    Balanced,
    Batch,
    Crop,
    Finetune,
    Group,
    ILBaseline,
    Learner,
    Method,
    Plan,
    PODNet,
    Recipe,
    RunError,
    Stage,
    Step,
    UsageError,
)
from equipoise.data.augment import FINE
from equipoise.data.images import Images
from equipoise.data.randomness import generator
from equipoise.engine.batches import Batches
from equipoise.engine.sgd import Trained, compute_gradient, select_weights, sgd_
from equipoise.engine.train import Epoch, Position, Training
from equipoise.nets import Net
from equipoise.nets.backbones import SmallNet
from equipoise.nets.heads import LinearHead
from equipoise.step import More, plan_for

properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# SGD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 2e-4), (0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.5, 0.3)])
def test_sgd_is_that_of_torch(momentum: float, weight_decay: float, memory_format: torch.memory_format) -> None:
    """Convolutions give channels-last gradients for channels-last images: strides must not matter."""
    recipe = Recipe(momentum=momentum, weight_decay=weight_decay)
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    theirs.double().to(memory_format=memory_format)  # type: ignore[call-overload]
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for w in theirs.parameters():
            w.copy_(torch.randn(w.shape, generator=gen, dtype=w.dtype) / 3)
    mine = copy.deepcopy(theirs)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    weights = dict(mine.named_parameters())
    buffers = {k: torch.zeros_like(w) for k, w in weights.items()}
    for i in range(6):
        lr = 0.1 if i < 3 else 0.01
        sgd.param_groups[0]["lr"] = lr
        x = torch.randn(5, 3, 5, 5, generator=gen, dtype=torch.float64).to(memory_format=memory_format)
        y = torch.arange(5) % 3
        sgd.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        sgd.step()
        grads = compute_gradient(F.cross_entropy(mine(x), y), weights)
        kept = {k: g.clone() for k, g in grads.items()}
        group = Trained(weights, 1.0, weight_decay, torch.tensor(lr, dtype=torch.float64))
        sgd_([group], grads, buffers, recipe)
        assert all(torch.equal(grads[k], kept[k]) for k in grads), "gradients are read only"
        for k, w in theirs.named_parameters():
            torch.testing.assert_close(weights[k], w, rtol=1e-12, atol=1e-14, msg=k)
            if momentum:
                torch.testing.assert_close(buffers[k], sgd.state[w]["momentum_buffer"], rtol=1e-12, atol=1e-14, msg=k)


def test_sgd_steps_in_place() -> None:
    w, b = torch.ones(3), torch.zeros(3)
    group = Trained({"w": w}, 1.0, 1.0, torch.tensor(0.25))
    sgd_([group], {"w": torch.full((3,), 2.0)}, {"w": b}, Recipe(momentum=0.5))
    assert b.tolist() == [3.0] * 3 and w.tolist() == [0.25] * 3
    sgd_([group], {"w": torch.full((3,), 2.0)}, {"w": b}, Recipe(momentum=0.5))
    assert b.tolist() == [3.75] * 3 and w.tolist() == [0.25 - 0.9375] * 3


def test_a_weight_that_the_loss_does_not_see_has_a_gradient_of_zero() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    grads = compute_gradient(used.sum(), {"used": used, "unused": unused})
    assert grads["used"].tolist() == [1, 1] and grads["unused"].tolist() == [0, 0]


# The schedule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "falls"), [(250, (100, 150, 200)), (25, (10, 15, 20)), (10, (4, 6, 8)), (5, (2, 3, 4))]
)
def test_the_learning_rate_falls_at_the_milestones(epochs: int, falls: tuple[int, ...]) -> None:
    recipe = Recipe(epochs=epochs)
    for epoch in range(epochs):  # counted from 0: `falls` epochs are done when it falls
        expected = 0.1
        for fall in falls:
            if epoch >= fall:
                expected /= 10
        assert recipe.lr_at(epoch) == pytest.approx(expected, rel=1e-12), epoch


def test_the_recipe_is_that_of_the_paper() -> None:
    recipe = ILBaseline().recipe(plan_for((3, 32, 32)))
    assert (recipe.epochs, recipe.lr, recipe.batch, recipe.weight_decay, recipe.momentum) == (250, 0.1, 128, 2e-4, 0.9)


def test_a_recipe_without_milestones_keeps_its_learning_rate() -> None:
    recipe = Recipe(epochs=7, lr=0.3, milestones=())
    assert {recipe.lr_at(k) for k in range(7)} == {0.3}
    assert [Recipe(epochs=4, lr=1.0, milestones=(0.5, 1.0), decay=0.5).lr_at(k) for k in range(4)] == [1, 1, 0.5, 0.5]


@pytest.mark.parametrize("epochs", [1, 2, 7, 160])
def test_a_late_cosine_is_the_cosine_of_the_epoch_before(epochs: int) -> None:
    """As torch's scheduler does it that is told, after each epoch, the number of that epoch instead of the next."""
    on_time, late = (Recipe(epochs=epochs, lr=0.25, schedule=s) for s in ("cosine", "cosine-late"))  # type: ignore[arg-type]
    assert [on_time.lr_at(k) for k in range(epochs)] == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * k / epochs)) / 2 for k in range(epochs)], rel=1e-12
    )
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.25)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs)
    for epoch in range(epochs):
        assert late.lr_at(epoch) == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-12), epoch
        sgd.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather not be told
            scheduler.step(epoch)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="'steps', 'cosine' or 'cosine-late', not 'linear'"):
        Recipe(schedule="linear")  # type: ignore[arg-type]


# Batches ------------------------------------------------------------------------------------------------------

NONE = Crop(pad=0, flip=False)


def numbered(n: int) -> Images:
    """Image i is of label i and shows its number in two pixels."""
    x = torch.tensor([[i // 256, i % 256] for i in range(n)], dtype=torch.uint8)
    return Images(x.view(n, 1, 1, 2), torch.arange(n))


def order(n: int, seed: int, k: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, k))


def batches(n: int, size: int, seed: int = 0, crop: Crop = NONE) -> Batches:
    def drawn(shape: tuple[int, int], name: int) -> Tensor:
        return crop.draw(shape, generator(seed, "augment", name))

    return Batches(numbered(n), crop, size, lambda k: order(n, seed, k), drawn)


def take(stream: Batches, first: int, last: int, name: int = 0) -> list[int]:
    """The images of the batches first, ..., last − 1, each checked to carry its label."""
    stream.load(first, last, name)
    taken: list[int] = []
    for _ in range(first, last):
        x, y = stream.next_batch()
        assert [int(a) * 256 + int(b) for a, b in x.reshape(-1, 2)] == y.tolist()
        assert len(y) == stream.size
        taken += y.tolist()
    return taken


def epoch_by_epoch(stream: Batches, epochs: int) -> list[list[int]]:
    return [take(stream, stream.count_batches(k), stream.count_batches(k + 1), k) for k in range(epochs)]


@properties
@given(n=st.integers(2, 300), size=st.integers(2, 64), epochs=st.integers(1, 6), seed=st.integers(0, 99))
def test_batches_are_cut_from_epochs_laid_end_to_end(n: int, size: int, epochs: int, seed: int) -> None:
    stream = batches(n, size, seed)
    size = min(size, n)
    assert stream.size == size
    taken = [i for epoch in epoch_by_epoch(stream, epochs) for i in epoch]
    whole = torch.cat([order(n, seed, k) for k in range(epochs + 1)]).tolist()
    assert taken == whole[: len(taken)]
    # As many batches as the epochs are, to the nearest; a half is rounded up.
    assert len(taken) // size == math.floor(epochs * n / size + 0.5) and len(taken) % size == 0
    counts = [taken.count(i) for i in range(n)]
    assert all(epochs - 1 <= c <= epochs + 1 for c in counts)
    for k in range(len(taken) // n):
        assert sorted(taken[k * n : (k + 1) * n]) == list(range(n)), "a whole epoch has every image once"
    if epochs * n % size == 0:
        assert set(counts) == {epochs}


@properties
@given(
    n=st.integers(2, 200),
    size=st.integers(2, 40),
    first=st.integers(0, 30),
    long=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_any_stretch_is_that_of_the_whole(n: int, size: int, first: int, long: int, seed: int) -> None:
    stream = batches(n, size, seed)
    size = min(size, n)
    last = first + long * (n // size)
    whole = torch.cat([order(n, seed, k) for k in range((last * size) // n + 1)]).tolist()
    assert take(stream, first, last) == whole[first * size : last * size]


def test_a_set_smaller_than_a_batch_is_one_batch() -> None:
    stream = batches(5, 128)
    assert [stream.count_batches(k) for k in range(4)] == [0, 1, 2, 3]
    for k, taken in enumerate(epoch_by_epoch(stream, 3)):
        assert taken == order(5, 0, k).tolist()


def test_epochs_are_shuffled_differently() -> None:
    a, b = epoch_by_epoch(batches(60, 10), 2)
    assert sorted(a) == sorted(b) == list(range(60)) and a != b != list(range(60))


def test_augmentation_is_drawn_anew_in_every_epoch_and_for_every_batch() -> None:
    stream = batches(40, 10, crop=Crop(pad=2, flip=True))
    stream.load(0, 4, 0)
    first = stream.drawn[:4].clone()
    assert torch.equal(first, Crop(2, True).draw((4, 10), generator(0, "augment", 0)))
    assert not torch.equal(first[0], first[1])
    stream.load(4, 8, 1)
    assert not torch.equal(stream.drawn[:4], first)


# Crop and flip ------------------------------------------------------------------------------------------------


def naive_crop(x: Tensor, pad: int, down: int, right: int, mirror: int) -> Tensor:
    """Pixel by pixel: out of the image is black."""
    channels, height, width = x.shape
    result = torch.zeros_like(x)
    for c, i, j in product(range(channels), range(height), range(width)):
        a, b = i + down - pad, (width - 1 - j if mirror else j) + right - pad
        if 0 <= a < height and 0 <= b < width:
            result[c, i, j] = x[c, a, b]
    return result


@pytest.mark.parametrize(("shape", "pad", "flip"), [((3, 6, 5), 2, True), ((1, 4, 4), 1, False), ((2, 3, 7), 4, True)])
def test_crops_are_those_of_a_plain_loop(shape: tuple[int, int, int], pad: int, flip: bool) -> None:
    crop = Crop(pad, flip)
    x = torch.randint(1, 256, (6, *shape), generator=generator(0), dtype=torch.uint8)
    every = torch.tensor(list(product(range(2 * pad + 1), range(2 * pad + 1), (0, 1) if flip else (0,))))
    which = torch.arange(len(every)) * 5 % 6
    found = crop(x, which, every)
    assert found.dtype == torch.uint8 and found.shape == (len(every), *shape)
    for i, (down, right, mirror) in enumerate(every.tolist()):
        expected = naive_crop(x[which[i]], pad, down, right, mirror)
        assert torch.equal(found[i], expected), (down, right, mirror)


def pad_and_cut(x: Tensor, crop: Crop, drawn: Tensor) -> Tensor:
    """A padded copy, of which a window is cut, mirrored and made brighter, image by image."""
    p, (h, w) = crop.pad, x.shape[-2:]
    padded, made = F.pad(x, (p, p, p, p)), []
    for image, (down, right, mirror, *bright) in zip(padded, drawn.tolist()):
        cut = image[:, down : down + h, :]
        cut = (cut.flip(2)[:, :, 2 * p - right :] if mirror else cut[:, :, right:])[:, :, :w]
        if bright:
            cut = (cut * (1 + crop.brightness * (2 * torch.tensor(bright[0]) / FINE - 1))).clamp(max=255).byte()
        made.append(cut)
    return torch.stack(made)


@properties
@given(
    pad=st.integers(0, 5), flip=st.booleans(), brightness=st.sampled_from([0.0, 0.25, 1.0]),
    sides=st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9)), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_crop_without_a_padded_copy_has_the_same_pixels(
    pad: int, flip: bool, brightness: float, sides: tuple[int, int, int], seed: int
) -> None:
    """Of images at any positions, some of them twice: what padding all of them and cutting out would give."""
    crop, gen = Crop(pad, flip, brightness), generator(seed)
    x = torch.randint(0, 256, (7, *sides), generator=gen, dtype=torch.uint8)
    which, before = torch.randint(0, 7, (12,), generator=gen), x.clone()
    drawn = crop.draw((12,), gen)
    found = crop(x, which, drawn)
    assert found.dtype == torch.uint8 and torch.equal(x, before)
    assert torch.equal(found, pad_and_cut(x[which], crop, drawn))


def test_the_middle_offset_is_the_image_itself() -> None:
    x = torch.randint(1, 256, (1, 3, 6, 5), generator=generator(0), dtype=torch.uint8)
    crop = Crop(2, True)
    assert torch.equal(crop(x, torch.tensor([0]), torch.tensor([[2, 2, 0]])), x)
    assert torch.equal(crop(x, torch.tensor([0]), torch.tensor([[2, 2, 1]])), x.flip(3))


def test_what_is_shifted_in_is_black() -> None:
    crop = Crop(2, False)
    x = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    moved = crop(x, torch.tensor([0]), torch.tensor([[0, 4, 0]]))[0, 0]
    assert moved.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [255, 255, 0, 0], [255, 255, 0, 0]]


def test_no_padding_and_no_mirror_is_no_change() -> None:
    crop = Crop(0, False)
    x = torch.randint(0, 256, (7, 3, 4, 5), generator=generator(0), dtype=torch.uint8)
    drawn = crop.draw((7,), generator(1))
    assert (drawn == 0).all()
    assert torch.equal(crop(x, torch.arange(7), drawn), x)


@pytest.mark.parametrize(("pad", "flip"), [(4, True), (1, False), (0, True), (2, False)])
def test_all_offsets_are_drawn_equally_often(pad: int, flip: bool) -> None:
    drawn = Crop(pad, flip).draw((60, 100), generator(0))
    assert drawn.shape == (60, 100, 3) and drawn.dtype == torch.int64
    rows = drawn.view(-1, 3).tolist()
    cases = list(product(range(2 * pad + 1), range(2 * pad + 1), (0, 1) if flip else (0,)))
    mean = len(rows) / len(cases)
    counts = dict.fromkeys(cases, 0)
    for row in rows:
        counts[tuple(row)] += 1  # any other offset is a KeyError
    assert all(abs(c - mean) < 5 * math.sqrt(mean) for c in counts.values())


def test_the_same_generator_draws_the_same() -> None:
    a, b, c = (Crop(3).draw((4, 5), generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("eighths", [range(0, 9, 2), range(1, 9, 3)], ids=["darker-and-brighter", "others"])
def test_brightness_is_a_factor_for_each_image(eighths: range) -> None:
    """Factors 1 − b to 1 + b in steps that fp32 holds exactly, pixel by pixel: rounded down, and white is the most."""
    crop, b = Crop(1, True, brightness=0.5), 0.5
    x = torch.randint(0, 256, (9, 3, 4, 5), generator=generator(0), dtype=torch.uint8)
    which = torch.tensor([4] * len(eighths))
    drawn = torch.tensor([[0, 2, k % 2, k * FINE // 8] for k in eighths])
    found = crop(x, which, drawn)
    assert found.dtype == torch.uint8 and found.permute(0, 2, 3, 1).is_contiguous()
    moved = Crop(1, True)(x, which, drawn[:, :3])
    for i, k in enumerate(eighths):
        factor = 1 - b + 2 * b * k / 8
        expected = [min(255, math.floor(v * factor)) for v in moved[i].flatten().tolist()]
        assert found[i].flatten().tolist() == expected, factor


def test_brightness_is_that_of_pillow() -> None:
    """Which torchvision's ColorJitter, PODNet's own, leaves it to."""
    crop = Crop(0, False, brightness=63 / 255)
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    drawn = crop.draw((50,), generator(3))
    found = crop(x, torch.zeros(50, dtype=torch.long), drawn)
    factors = 1 + crop.brightness * (2 * drawn[:, 3] / FINE - 1)
    assert factors.min() < 0.8 and factors.max() > 1.2
    for image, factor in zip(found, factors.tolist()):
        expected = ImageEnhance.Brightness(Image.fromarray(x[0, 0].numpy())).enhance(factor)
        assert image[0].tolist() == np.asarray(expected).tolist(), factor


def test_brightness_is_drawn_equally_often_and_after_the_rest() -> None:
    crop = Crop(2, True, brightness=0.25)
    drawn, usual = crop.draw((80, 100), generator(0)), Crop(2, True).draw((80, 100), generator(0))
    assert drawn.shape == (80, 100, 4) and drawn.dtype == torch.int64
    assert torch.equal(drawn[..., :3], usual) and Crop(2, True, brightness=0.0) == Crop(2, True)
    counts = torch.histc(drawn[..., 3].double(), 16, 0, FINE)
    assert counts.sum() == 8000 and ((counts - 500).abs() < 5 * math.sqrt(500)).all()


def test_training_sees_brightness_and_none_is_as_before() -> None:
    nets = []
    for crop in (Crop(2, True), Crop(2, True, brightness=0.0), Crop(2, True, brightness=0.3)):
        s = base_step(torch.float32)
        train(ILBaseline(), s, RECIPE, crop)
        nets.append(torch.cat([w.flatten() for w in s.net.parameters()]))
    assert torch.equal(nets[0], nets[1]) and not torch.equal(nets[0], nets[2])


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, "much", True])
def test_a_brightness_that_cannot_be_is_refused(bad: object) -> None:
    with pytest.raises(UsageError, match=r"^brightness must be a number .*, not "):
        Crop(brightness=bad)  # type: ignore[arg-type]


# Named generators ---------------------------------------------------------------------------------------------


def first_numbers(*name: str | int) -> tuple[float, ...]:
    return tuple(torch.rand(3, generator=generator(*name), dtype=torch.float64).tolist())  # type: ignore[arg-type]


def test_a_generator_is_named_by_its_purpose() -> None:
    names: list[tuple[str | int, ...]] = [
        *((seed, t, purpose, k) for seed in (0, 1) for t in (0, 1) for purpose in ("train", "held") for k in range(12)),
        (0,),
        (0, "weights"),
        (0, 1, 11, "train"),
        (0, 11, 1, "train"),
        (0, 1, "rows"),
    ]
    drawn = [first_numbers(*name) for name in names]
    assert len(set(drawn)) == len(names), "another purpose, other numbers"
    torch.manual_seed(1)
    assert [first_numbers(*name) for name in reversed(names)] == drawn[::-1], "the same name, the same numbers"


def test_generators_do_not_touch_the_global_one() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first_numbers(0, "weights")
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_are_the_same_on_every_machine() -> None:
    """Recorded: another way of naming them would change every recorded result."""
    assert generator(0, 1, "train", "order", 2).initial_seed() == 1861859308031947509


# The loop -----------------------------------------------------------------------------------------------------


def base_step(dtype: torch.dtype = torch.float64, count: int = 21) -> Step:
    gen = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (count, 1, 8, 8), generator=gen, dtype=torch.uint8)
    y = torch.arange(count) % 4 % 3  # class 0 comes twice as often
    net = Net(SmallNet(1), LinearHead(64), torch.tensor([120.0]), torch.tensor([70.0]))
    net.backbone.initialise(generator(0))
    net.head.widen(3, generator(1))
    return make_step((3,), Images(x, y), Balanced(), net=net.to(dtype), dtype=dtype)


# Learning rates that fp32, in which the loop keeps them, holds exactly.
RECIPE = Recipe(epochs=4, lr=0.125, milestones=(0.5, 0.75), decay=0.5, batch=8, momentum=0.9, weight_decay=1e-2)


def test_training_is_sgd_on_cropped_batches_by_hand() -> None:
    """The whole loop against torch's optimiser, a naive crop and the balanced loss written out."""
    s, crop, seed = base_step(), Crop(2, True), 6
    net = copy.deepcopy(s.net).train()
    sgd = torch.optim.SGD(net.parameters(), RECIPE.lr, RECIPE.momentum, weight_decay=RECIPE.weight_decay)
    stream = torch.cat([torch.randperm(21, generator=generator(seed, 0, "train", "order", k)) for k in range(6)])
    edges = [0, 3, 5, 8, 11]  # 21 images in batches of 8: 2.625, 5.25, 7.875 and 10.5 of them
    losses: list[list[float]] = []
    for epoch, (first, last, lr) in enumerate(zip(edges, edges[1:], (0.125, 0.125, 0.0625, 0.03125), strict=False)):
        sgd.param_groups[0]["lr"] = lr
        drawn = crop.draw((last - first, 8), generator(seed, 0, "train", "augment", epoch))
        losses.append([])
        for i in range(first, last):
            which = stream[8 * i : 8 * i + 8]
            x = torch.stack([naive_crop(s.images.x[j], 2, *drawn[i - first, k].tolist()) for k, j in enumerate(which)])
            y = s.images.y[which]
            q = s.n * net(x).z.exp()
            loss = -(q[torch.arange(8), y] / q.sum(1)).log().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses[-1].append(loss.item())

    at = Position()
    told = train(ILBaseline(Balanced()), s, RECIPE, crop, seed, at)
    for k, v in net.state_dict().items():
        torch.testing.assert_close(s.net.state_dict()[k], v, rtol=1e-9, atol=1e-11, msg=k)
    for k, w in net.named_parameters():
        torch.testing.assert_close(at.momentum[k], sgd.state[w]["momentum_buffer"], rtol=1e-9, atol=1e-11, msg=k)
    assert [e.loss for e in told] == pytest.approx([sum(v) / len(v) for v in losses], rel=1e-5)
    assert [(e.step, e.stage, e.epoch, e.epochs, e.lr, e.alpha) for e in told] == [
        (0, "train", 1, 4, 0.125, None),
        (0, "train", 2, 4, 0.125, None),
        (0, "train", 3, 4, 0.0625, None),
        (0, "train", 4, 4, 0.03125, None),
    ]
    assert at.epoch == 4 and at.seconds == told[-1].seconds > 0


def test_training_lowers_the_loss() -> None:
    s = base_step(torch.float32)
    told = train(ILBaseline(), s, Recipe(epochs=15, lr=0.05, batch=8))
    assert told[-1].loss < 0.3 * told[0].loss


def test_another_seed_trains_otherwise_and_the_same_seed_the_same() -> None:
    nets = []
    for seed in (1, 1, 2):
        s = base_step(torch.float32)
        train(ILBaseline(), s, RECIPE, Crop(1), seed)
        nets.append(torch.cat([w.flatten() for w in s.net.parameters()]))
    assert torch.equal(nets[0], nets[1]) and not torch.equal(nets[0], nets[2])


def test_training_uses_no_global_random_numbers() -> None:
    s = base_step(torch.float32)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    train(ILBaseline(), s, RECIPE, Crop(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_goes_on_after_a_stop_ends_at_the_same_bits() -> None:
    s = base_step(torch.float32)
    at, kept = Position(), []
    train(ILBaseline(), s, RECIPE, Crop(1), at=at, on_epoch=lambda _: kept.append(copy.deepcopy((s, at))))
    for other, position in kept[:-1]:
        train(ILBaseline(), other, RECIPE, Crop(1), at=position)
        assert all(torch.equal(v, s.net.state_dict()[k]) for k, v in other.net.state_dict().items())
        assert all(torch.equal(v, at.momentum[k]) for k, v in position.momentum.items())


def test_predicting_between_epochs_changes_nothing() -> None:
    nets = []
    for look in (False, True):
        s = base_step(torch.float32)

        def on_epoch(_: Epoch, s: Step = s, look: bool = look) -> None:
            if look:
                s.net.eval()(s.images.x)

        train(ILBaseline(), s, RECIPE, Crop(1), on_epoch=on_epoch)
        nets.append(s.net.state_dict())
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])


def test_a_set_smaller_than_the_batch_trains() -> None:
    s = base_step(torch.float32, count=5)
    told = train(ILBaseline(), s, replace(RECIPE, batch=128), Crop(1))
    assert len(told) == 4 and all(math.isfinite(e.loss) for e in told)


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(21, 8, [8, 8, 5]), (16, 8, [8, 8]), (5, 8, [5]), (9, 8, [8, 1])]
)
def test_what_fills_no_batch_is_a_short_one_if_asked(count: int, batch: int, sizes: list[int]) -> None:
    """Every image once in every epoch, the short batch last, another one in each epoch."""
    s = base_step(count=count)
    seen: list[Tensor] = []

    class Noting(ILBaseline):
        def objective(self, s: Step, b: Batch) -> Tensor:
            seen.append(b.out.z.detach())
            return super().objective(s, b)

    recipe = Recipe(epochs=3, lr=1e-9, batch=batch, last="short")
    before = s.net.eval()(s.images.x).z  # weights hardly move: an image is known by its logits; batch norms are frozen
    told = train(Noting(), s, recipe, NONE, batch_norm="eval")
    assert [len(z) for z in seen] == sizes * 3 and len(told) == 3
    which = [torch.cdist(z, before.detach()).argmin(1).tolist() for z in seen]
    per = len(sizes)
    epochs = [[i for batch in which[k * per : (k + 1) * per] for i in batch] for k in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("method", [ILBaseline(), LUCIR(), PODNet()], ids=lambda m: m.name)
@pytest.mark.parametrize("side", [8, 16, 32], ids=["tiny", "small", "cifar"])
def test_one_image_is_a_batch_too(method: Method, side: int) -> None:
    """Whose statistics are those of its pixels, of which a map of these sizes has several even at a net's end."""
    x = torch.randint(0, 256, (15, 1, side, side), dtype=torch.uint8, generator=generator(0))
    y = torch.arange(15) % 3
    learner = Learner(method, memory=2, recipe=Recipe(epochs=2, lr=0.01, batch=6, last="short"), device="cpu")
    learner.learn(x[y < 2][:7], y[y < 2][:7]).learn(x[y == 2][:3], y[y == 2][:3])  # 7 and 7 with the memory: 6 and 1
    assert len(learner.state_.exemplars) == 6
    assert learner.logits(x).isfinite().all()


def test_short_batches_go_on_after_a_stop() -> None:
    recipe = Recipe(epochs=4, lr=0.05, milestones=(), batch=8, last="short")
    whole, halves = base_step(), base_step()
    train(ILBaseline(), whole, recipe, Crop(1), 3)
    at, kept = Position(), []
    train(ILBaseline(), halves, recipe, Crop(1), 3, at, lambda e: kept.append(copy.deepcopy((halves, at))))
    half, position = kept[1]
    train(ILBaseline(), half, recipe, Crop(1), 3, position)
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), half.net.parameters()))
    joined = base_step()
    train(ILBaseline(), joined, replace(recipe, last="joined"), Crop(1), 3)
    assert not all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), joined.net.parameters()))


def test_divergence_is_said() -> None:
    s = base_step(torch.float32)
    with pytest.raises(RunError, match=r"lower Recipe\(lr=\.\.\.\)"):
        train(ILBaseline(), s, replace(RECIPE, lr=1e30), Crop(1))


def test_bf16_is_used_and_costs_little() -> None:
    losses = []
    for bf16 in (False, True):
        s = base_step(torch.float32)
        told = train(ILBaseline(), s, RECIPE, Crop(1), bf16=bf16)
        assert all(w.dtype == torch.float32 for w in s.net.parameters()), "weights are kept in fp32"
        losses.append(told[0].loss)
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)


# Groups -------------------------------------------------------------------------------------------------------


class ByHand:
    """The same training written out: named batches of a stage, SGD weight by weight, in float64."""

    def __init__(self, s: Step, recipe: Recipe, seed: int = 0, name: str = "train", crop: Crop = NONE) -> None:
        self.s, self.recipe, self.seed, self.name, self.crop = s, recipe, seed, name, crop
        self.net = copy.deepcopy(s.net).train()
        self.state = {k: v.clone() for k, v in s.state.items()}
        self.momentum: dict[str, Tensor] = {}
        self.per_epoch, left = divmod(len(s.where), recipe.batch)
        assert not left, "so that epochs are whole batches"

    def gen(self, *purpose: str | int) -> torch.Generator:
        return generator(self.seed, self.s.t, self.name, *purpose)

    def batches(self, epoch: int) -> list[tuple[Tensor, Tensor]]:
        """Positions and augmented pixels of each batch."""
        which = self.s.where[torch.randperm(len(self.s.where), generator=self.gen("order", epoch))]
        which = which.view(self.per_epoch, -1)
        drawn = self.crop.draw((self.per_epoch, self.recipe.batch), self.gen("augment", epoch))
        return [(w, self.crop(self.s.images.x, w, d)) for w, d in zip(which, drawn)]

    def sgd(self, name: str, w: Tensor, g: Tensor, lr: float, decay: float) -> None:
        v = self.recipe.momentum * self.momentum.get(name, torch.zeros_like(w)) + g + decay * w.detach()
        self.momentum[name] = v
        w.data.sub_(lr * v)


WHOLE = Recipe(epochs=3, lr=0.125, milestones=(0.5,), decay=0.5, batch=8, momentum=0.75, weight_decay=0.0625)


def later_step(count: int = 24, dtype: torch.dtype = torch.float64, **state: Tensor) -> Step:
    """Three old classes and two new ones, with a teacher that is another net."""
    gen, nets = torch.Generator().manual_seed(2), []
    x = torch.randint(0, 256, (count, 1, 8, 8), generator=gen, dtype=torch.uint8)
    for seed, sizes in ((0, (3, 2)), (1, (3,))):
        net = Net(SmallNet(1), LinearHead(64), torch.tensor([120.0]), torch.tensor([70.0]))
        net.backbone.initialise(generator(seed))
        for k, new in enumerate(sizes):
            net.head.widen(new, generator(seed, k))
        nets.append(net.to(dtype))
    net, teacher = nets[0], nets[1].eval().requires_grad_(False)
    return make_step(
        (3, 2), Images(x, torch.arange(count) % 5), net=net, teacher=teacher, state=dict(state), dtype=dtype
    )


def assert_same(s: Step, hand: ByHand, at: Position) -> None:
    for name, value in hand.net.state_dict().items():
        torch.testing.assert_close(s.net.state_dict()[name], value, rtol=1e-9, atol=1e-11, msg=name)
    for name, value in hand.momentum.items():
        torch.testing.assert_close(at.momentum[name], value, rtol=1e-9, atol=1e-11, msg=name)
    for name, value in hand.state.items():
        torch.testing.assert_close(s.state[name].detach(), value.detach(), rtol=1e-9, atol=1e-11, msg=name)


def test_groups_have_learning_rates_and_penalties_of_their_own() -> None:
    """And what is in no group does not change by a bit; a weight that two groups name belongs to the first."""
    groups = (
        Group(("backbone.stages.0.*",), lr=0.5, decay=0.25),
        Group(("head.weight",), lr=2.0),
        Group(("backbone.stages.*.1.bias",), lr=4.0, decay=0.0),
    )
    of = {"head.weight": (2.0, WHOLE.weight_decay)}
    of |= {f"backbone.stages.0.{k}": (0.5, 0.25) for k in ("0.weight", "1.weight", "1.bias")}
    of |= {f"backbone.stages.{k}.1.bias": (4.0, 0.0) for k in (1, 2)}
    s, at = later_step(), Position()
    before, hand = copy.deepcopy(s.net).state_dict(), ByHand(s, WHOLE)
    weights = dict(hand.net.named_parameters())
    for epoch in range(WHOLE.epochs):
        for which, x in hand.batches(epoch):
            loss = F.cross_entropy(hand.net(x).z, s.images.y[which])
            for name, g in zip(of, torch.autograd.grad(loss, [weights[name] for name in of])):
                factor, decay = of[name]
                hand.sgd(name, weights[name], g, WHOLE.lr_at(epoch) * factor, decay)
    train(ILBaseline(), replace(s, teacher=None), WHOLE, at=at, groups=groups)
    assert_same(s, hand, at)
    assert at.momentum.keys() == of.keys(), "what is frozen has no momentum"
    for name, w in s.net.named_parameters():
        assert w.requires_grad == (name in of) and torch.equal(w, before[name]) != (name in of), name


def test_selected_weights_are_those_that_the_patterns_name() -> None:
    s = later_step(bias=torch.zeros(2))
    groups = select_weights(
        s, Stage("own", Recipe(weight_decay=0.5), (Group(("state.*",), decay=0.0), Group(("head.*",))))
    )
    assert [list(group.weights) for group in groups] == [["state.bias"], ["head.weight", "head.bias"]]
    assert [(group.factor, group.decay) for group in groups] == [(1.0, 0.0), (1.0, 0.5)]
    assert groups[0].weights["state.bias"] is s.state["bias"] and s.state["bias"].requires_grad


@pytest.mark.parametrize("names", [("head.rows",), ("state.bias",), ("weight",), ("backbone",)], ids=str)
def test_a_pattern_that_names_nothing_is_refused(names: tuple[str, ...]) -> None:
    s = later_step()
    before, seen = copy.deepcopy(s.net).state_dict(), []

    class Seeing(ILBaseline):
        def objective(self, s: Step, b: Batch) -> Tensor:
            seen.append(b)
            return super().objective(s, b)

    with pytest.raises(UsageError, match=f"^stage train trains {names[0]}, which match no weight$"):
        train(Seeing(), s, WHOLE, groups=(Group(("head.*",)), Group(names)))
    assert not seen and all(torch.equal(v, before[k]) for k, v in s.net.state_dict().items())


# What the user sets -------------------------------------------------------------------------------------------


class Falling(ILBaseline):
    """As SS-IL: lr / (t + 1), and larger batches in later steps."""

    def recipe(self, plan: Plan) -> Recipe:
        own = Recipe(epochs=30, lr=0.5, batch=40, weight_decay=1e-3)
        return replace(own, lr=own.lr / (plan.t + 1), batch=40 if plan.t == 0 else 50)


def test_what_the_user_sets_is_laid_over_each_steps_own_recipe() -> None:
    """Learning rate and batch keep their ratio to the base step's; other fields replace; what is as there stays."""
    base = Plan(0, (4,), (1, 8, 8))
    plans = [replace(base, t=t, sizes=(4,) + (2,) * t) for t in range(3)]
    own = Falling().recipe(base)
    assert plans[2].base == base and [Falling().recipe_for(p) for p in plans] == [Falling().recipe(p) for p in plans]
    for user, lr, batch in (
        (own, (0.5, 0.25, 0.5 / 3), (40, 50, 50)),
        (replace(own, lr=0.2), (0.2, 0.1, 0.2 / 3), (40, 50, 50)),
        (replace(own, lr=0.2, batch=64), (0.2, 0.1, 0.2 / 3), (64, 80, 80)),
    ):
        found = [Falling().recipe_for(replace(plan, recipe=user)) for plan in plans]
        assert [r.lr for r in found] == pytest.approx(lr, rel=1e-15) and tuple(r.batch for r in found) == batch
        assert {(r.epochs, r.weight_decay) for r in found} == {(30, 1e-3)}
    fields = {"epochs": 7, "milestones": (0.9,), "decay": 0.3, "momentum": 0.1, "weight_decay": 0.0, "clamp": 2.0}
    user = replace(own, **fields, schedule="cosine", last="short")
    for plan in plans:
        assert Falling().recipe_for(replace(plan, recipe=user)) == replace(
            Falling().recipe(plan), **fields, schedule="cosine", last="short"
        )
    assert own.override(own, own) == own
    again = replace(own, lr=0.3)
    assert again.override(own, own).lr == 0.3, "to the bit, where the step's rate is the base step's"


# A second stream, views, notes and noise ----------------------------------------------------------------------


class Anchored(ILBaseline):
    """Each batch has three exemplars beside it, drawn anew each epoch, whose embeddings stay where they were."""

    gradient, taught = True, True

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More:
        drawn = torch.randint(0, len(s.memory), (len(which), 3), generator=gen)
        return More(s.memory[drawn], gradient=self.gradient, teacher=self.taught)

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None and (b.more.ref is not None) == self.taught
        far = b.more.out.h - (b.more.ref.h if b.more.ref is not None else b.out.h.mean(0))
        return F.cross_entropy(b.out.z, b.y) + far.square().mean() + 0.1 * F.cross_entropy(b.more.out.z, b.more.y)


class Unfelt(Anchored):
    gradient = False


class Untaught(Anchored):
    taught = False


@pytest.mark.parametrize("method", [Anchored(), Unfelt(), Untaught()], ids=lambda m: m.name)
def test_a_second_stream_is_seen_beside_every_batch(method: Anchored) -> None:
    s, crop, at = later_step(), Crop(2, True), Position()
    hand, teacher = ByHand(s, WHOLE, 5, crop=crop), s.teacher
    assert teacher is not None
    for epoch in range(WHOLE.epochs):
        rows = torch.randint(0, len(s.memory), (3, 3), generator=hand.gen("more", epoch, 0))
        drawn = crop.draw((3, 3), hand.gen("augment more", epoch, 0))
        for i, (which, x) in enumerate(hand.batches(epoch)):
            beside = s.memory[rows[i]]
            x_beside = crop(s.images.x, beside, drawn[i])
            out, other = hand.net(x), hand.net(x_beside)  # in this order, for batch norms
            h, z = (other.h, other.z) if method.gradient else (other.h.detach(), other.z.detach())
            ref = teacher(x_beside).h if method.taught else out.h.mean(0)
            loss = F.cross_entropy(out.z, s.images.y[which]) + (h - ref).square().mean()
            loss = loss + 0.1 * F.cross_entropy(z, s.images.y[beside])
            weights = dict(hand.net.named_parameters())
            for (name, w), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values()))):
                hand.sgd(name, w, g, WHOLE.lr_at(epoch), WHOLE.weight_decay)
    train(method, s, WHOLE, crop, 5, at)
    assert_same(s, hand, at)


class Sketched(ILBaseline):
    """Pixels of the state stand for the memory's, and are what is trained."""

    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More:
        rows = torch.arange(len(which) * 5).view(-1, 5) % len(s.memory)
        return More(rows, teacher=False, pixels="sketch")

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None and b.more.ref is None
        return F.cross_entropy(b.more.out.z, b.more.y)


def test_a_second_stream_may_be_pixels_that_are_learned() -> None:
    s = later_step(sketch=torch.empty(0))
    s.state["sketch"] = s.images.x[s.memory].double()
    before, at = copy.deepcopy(s.net).state_dict(), Position()
    recipe = replace(WHOLE, lr=64.0, weight_decay=0.0)
    hand = ByHand(s, recipe, name="sketch")
    pixels, y = hand.state["sketch"].requires_grad_(), s.images.y[s.memory]
    for epoch in range(recipe.epochs):
        for i in range(3):
            rows = torch.arange(5 * i, 5 * i + 5) % len(s.memory)
            loss = F.cross_entropy(hand.net.eval()(pixels[rows]).z, y[rows])
            (g,) = torch.autograd.grad(loss, pixels)
            hand.sgd("state.sketch", pixels, g, recipe.lr_at(epoch), 0.0)
    group = (Group(("state.sketch",)),)
    train(Sketched(), s, recipe, at=at, name="sketch", groups=group, batch_norm="eval")
    assert_same(s, hand, at)
    moved = (s.state["sketch"].detach() - s.images.x[s.memory].double()).abs().amax((1, 2, 3))
    assert (moved > 1e-3).all() and all(torch.equal(v, before[k]) for k, v in s.net.state_dict().items())


class Turned(ILBaseline):
    """Every image upright and on its side; the mean embedding is noted in every batch."""

    def views(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.transpose(2, 3)])

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert len(b.y) == len(b.out.z) == 16 and b.ref is not None and len(b.ref.z) == 16
        return F.cross_entropy(b.out.z, b.y) + (b.out.h - b.ref.h).square().mean()

    def note(self, s: Step, b: Batch) -> None:
        s.state["mean"].lerp_(b.out.h.mean(0), 0.25)


def test_views_are_seen_together_and_notes_are_taken_in_every_batch() -> None:
    s, at = later_step(mean=torch.zeros(64, dtype=torch.float64)), Position()
    hand, teacher = ByHand(s, WHOLE, 3), s.teacher
    assert teacher is not None
    for epoch in range(WHOLE.epochs):
        for which, x in hand.batches(epoch):
            x, y = torch.cat([x, x.transpose(2, 3)]), torch.cat([s.images.y[which]] * 2)
            out = hand.net(x)
            loss = F.cross_entropy(out.z, y) + (out.h - teacher(x).h).square().mean()
            weights = dict(hand.net.named_parameters())
            for (name, w), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values()))):
                hand.sgd(name, w, g, WHOLE.lr_at(epoch), WHOLE.weight_decay)
            hand.state["mean"] = 0.75 * hand.state["mean"] + 0.25 * out.h.detach().mean(0)
    train(Turned(), s, WHOLE, seed=3, at=at)
    assert_same(s, hand, at)
    assert s.state["mean"].abs().max() > 0.01 and not s.state["mean"].requires_grad


def test_noise_on_gradients_has_the_variance_of_the_paper() -> None:
    """η / (1 + epoch)^0.55, drawn anew for every weight and batch, before weight decay."""
    eta, s, at = 0.3, later_step(), Position()
    hand = ByHand(s, WHOLE, 7)
    for epoch in range(WHOLE.epochs):
        gen, spread = hand.gen("noise", epoch), math.sqrt(eta / (1 + epoch) ** 0.55)
        for which, x in hand.batches(epoch):
            loss = F.cross_entropy(hand.net(x).z, s.images.y[which])
            weights = dict(hand.net.named_parameters())
            for (name, w), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values()))):
                g = g + spread * torch.empty_like(g).normal_(generator=gen)
                hand.sgd(name, w, g, WHOLE.lr_at(epoch), WHOLE.weight_decay)
    train(ILBaseline(), replace(s, teacher=None), WHOLE, seed=7, at=at, gradient_noise=eta)
    # The loop keeps the spread in fp32.
    for name, value in hand.net.state_dict().items():
        torch.testing.assert_close(s.net.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


class Quiet(ILBaseline):
    def objective(self, s: Step, b: Batch) -> Tensor:
        return 0 * b.out.z.sum()


def test_noise_is_as_strong_as_it_says() -> None:
    """Measured: without momentum and with a loss that does not change, weights move by noise alone."""
    moved = []
    for epochs in (1, 2):
        s = later_step(count=8)
        before = torch.cat([w.detach().flatten() for w in s.net.parameters()])
        recipe = Recipe(epochs=epochs, lr=1.0, milestones=(), batch=8, momentum=0.0, weight_decay=0.0)
        train(Quiet(), s, recipe, gradient_noise=0.09)
        moved.append(torch.cat([w.detach().flatten() for w in s.net.parameters()]) - before)
    first, second = moved[0], moved[1] - moved[0]
    assert first.std().item() == pytest.approx(0.3, rel=0.05)
    assert second.std().item() == pytest.approx(0.3 / math.sqrt(2**0.55), rel=0.05)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.05, "another noise in each epoch"


def test_noise_is_the_same_on_the_sum_of_a_short_batch() -> None:
    """A batch of 8 and one of 4: deviations of 0.3 and 0.6."""
    s = later_step(count=12)
    before = torch.cat([w.detach().flatten() for w in s.net.parameters()])
    settings: dict[str, Any] = {"milestones": (), "momentum": 0.0, "weight_decay": 0.0, "last": "short"}
    train(Quiet(), s, Recipe(epochs=1, lr=1.0, batch=8, **settings), gradient_noise=0.09)
    moved = torch.cat([w.detach().flatten() for w in s.net.parameters()]) - before
    assert moved.std().item() == pytest.approx(0.3 * math.sqrt(5), rel=0.05)


class All(Turned):
    def more(self, s: Step, which: Tensor, gen: torch.Generator) -> More:
        return More(s.memory[torch.randint(0, len(s.memory), (len(which), 5), generator=gen)])

    def objective(self, s: Step, b: Batch) -> Tensor:
        assert b.more is not None
        return F.cross_entropy(b.out.z, b.y) + F.cross_entropy(b.more.out.z, b.more.y)


@pytest.mark.parametrize("last", ["joined", "short"])
def test_all_of_it_goes_on_after_a_stop(last: Any) -> None:
    """Not a bit differs, whether epochs end with a short batch or not."""
    recipe, kept = replace(WHOLE, last=last), []
    whole, at = later_step(count=29, dtype=torch.float32, mean=torch.zeros(64)), Position()
    stage: dict[str, Any] = {"crop": Crop(1), "seed": 2, "gradient_noise": 0.01}
    train(All(), whole, recipe, at=at, on_epoch=lambda _: kept.append(copy.deepcopy((whole, at))), **stage)
    for s, position in kept[:-1]:
        assert not torch.equal(s.state["mean"], whole.state["mean"])
        train(All(), s, recipe, at=position, **stage)
        assert torch.equal(s.state["mean"], whole.state["mean"])
        assert all(torch.equal(v, whole.net.state_dict()[k]) for k, v in s.net.state_dict().items())
        assert all(torch.equal(v, at.momentum[k]) for k, v in position.momentum.items())


@pytest.mark.parametrize("last", ["joined", "short"])
def test_what_training_took_is_freed_when_it_ends(last: Any) -> None:
    """And not when Python happens to look for cycles: on a GPU that is another net, its momentum and the images."""
    gen = generator(3)
    x, y = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=gen), torch.arange(40) % 4
    learner = Learner(LUCIR(finetune=Finetune(1)), memory=4, recipe=Recipe(epochs=1, batch=12, last=last))

    def find() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) is Training}

    before = find()  # of other tests
    gc.disable()
    try:
        learner.learn(x, y).learn(x, y + 4)
        assert find() <= before
    finally:
        gc.enable()
