"""Images of different sizes, cut and resized: against Pillow, and our kernel, by Triton's interpreter, against that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from equipoise import Crop, ILBaseline, Learner, Method, Recipe, ResizedCrop, UsageError
from equipoise.data.augment import FINE, Normalisation, read_augment
from equipoise.data.images import Images, join_images, measure_channels
from equipoise.data.ragged import Ragged
from equipoise.data.randomness import generator
from equipoise.data.resize import find_centres, resize, see_centre
from equipoise.engine import batches, pixels, stand_ins
from equipoise.engine.pixels import cut_normalised, settle
from equipoise.settings import to_plain

PHOTOGRAPHS = Path(__file__).parents[2] / "shared" / "data" / "imagenet-sample"


def draw_picture(k: int) -> Image.Image:
    """Stripes, noise and edges, of a size of its own."""
    rng = np.random.default_rng(k)
    height, width = (int(n) for n in rng.integers(70, 200, 2))
    y, x = np.mgrid[:height, :width]
    waves = [128 + 127 * np.sin(x * rng.uniform(0.01, 3) + y * rng.uniform(0.01, 3)) for _ in range(3)]
    noisy = np.stack(waves, 2) + rng.normal(0, 30, (height, width, 3)) * (x > width / 2)[..., None]
    noisy[: height // 3, : width // 3] = 255 * (rng.random() < 0.5)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@cache
def pictures() -> list[Image.Image]:
    """Photographs with a shorter side of 160, or drawn pictures where there are none."""
    files = sorted(PHOTOGRAPHS.glob("*/*.JPEG"))
    if not files:
        return [draw_picture(k) for k in range(30)]
    found = []
    for file in files:
        with Image.open(file) as opened:
            scale = 160 / min(opened.size)
            found.append(
                opened.convert("RGB").resize([round(n * scale) for n in opened.size], Image.Resampling.BILINEAR)
            )
    return found


def ragged(images: list[Image.Image], side: int = 224) -> Ragged:
    return Ragged.stack([torch.from_numpy(np.array(image)) for image in images], side)


def cut(image: Image.Image, box: list[int], side: int) -> Tensor:
    """What Pillow makes of it (3, side, side)."""
    top, left, height, width, mirror = box
    square = image.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)
    return pixels.flip(2) if mirror else pixels


def farthest(a: Tensor, b: Tensor) -> int:
    assert a.dtype == b.dtype == torch.uint8 and a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


@pytest.mark.parametrize(("side", "draws"), [(224, 100), (84, 900)])
def test_a_crop_is_within_a_level_of_pillow(side: int, draws: int) -> None:
    """1,000 random draws in all."""
    crop, x = ResizedCrop(side), ragged(pictures())
    which = torch.arange(draws) % len(x)
    drawn = crop.draw((draws,), generator(0, side))
    boxes = crop.find_boxes(x.size[which], drawn).tolist()
    mean = 0.0
    for first in range(0, draws, 50):
        part = slice(first, first + 50)
        ours = crop(x, which[part], drawn[part])
        theirs = torch.stack([cut(pictures()[k], box, side) for k, box in zip(which[part].tolist(), boxes[part])])
        assert farthest(ours, theirs) <= 1
        mean += (ours.double() - theirs.double()).mean().item() / (draws / 50)
    assert abs(mean) < 0.05, "rounded, not cut off"
    assert ours.is_contiguous(memory_format=torch.channels_last)


def test_pillow_s_box_differs_at_its_edge_only() -> None:
    """`resize(box=...)` lets the filter reach beyond the box; where it does not, it is the same."""
    image, (top, left, length), side = pictures()[0], (20, 30, 100), 40
    x = ragged([image], side)
    ours = resize(x, torch.tensor([0]), torch.tensor([[top, left, length, length, 0]]), side, length)[0]
    beyond = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + length, top + length))
    theirs = torch.from_numpy(np.array(beyond)).permute(2, 0, 1)
    assert farthest(ours[:, 1:-1, 1:-1], theirs[:, 1:-1, 1:-1]) <= 1 < farthest(ours, theirs)


def test_boxes_follow_torchvision_s_rule() -> None:
    """Box by box, as its get_params computes them, from the same numbers."""
    crop, gen = ResizedCrop(64), generator(0, "boxes")
    size = torch.randint(1, 60, (2000, 2), generator=gen)
    size[:300, 0] *= 40  # so narrow that few boxes fit, or none
    size[300:600, 1] *= 40
    drawn = crop.draw((2000,), gen)
    tries = {"drawn": 0, "middle": 0}
    for (height, width), numbers, box in zip(size.tolist(), drawn.tolist(), crop.find_boxes(size, drawn).tolist()):
        u = [k / FINE for k in numbers]
        for area, ratio in zip(u[:10], u[10:20]):
            target = height * width * (0.08 + 0.92 * area)
            aspect = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
            w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                place = [math.floor(u[20] * (height - h + 1)), math.floor(u[21] * (width - w + 1))]
                tries["drawn"] += 1
                break
        else:
            if width / height < 3 / 4:
                w, h = width, round(width / (3 / 4))
            elif width / height > 4 / 3:
                w, h = round(height * 4 / 3), height
            else:
                w, h = width, height
            place = [(height - h) // 2, (width - w) // 2]
            tries["middle"] += 1
        assert box == [*place, h, w, numbers[22]]
    assert min(tries.values()) > 200, tries


def test_draws_are_even_and_named_by_their_generator() -> None:
    crop = ResizedCrop(32)
    size = torch.tensor([[300, 400]]).expand(20_000, 2)
    drawn = crop.draw((20_000,), generator(3, "draws"))
    assert torch.equal(drawn, crop.draw((20_000,), generator(3, "draws")))
    boxes = crop.find_boxes(size, drawn).double()
    area = boxes[:, 2] * boxes[:, 3] / (300 * 400)
    assert area.min() > 0.075 and area.max() <= 1 and (boxes[:, 3] / boxes[:, 2]).min() > 0.74
    assert (boxes[:, 4].mean() - 0.5).abs() < 0.02
    middle = boxes[:, :2] + boxes[:, 2:4] / 2
    assert ((middle.mean(0) - torch.tensor([150.0, 200.0])).abs() < 2).all()
    assert crop.draw((2, 5), generator(0)).shape == (2, 5, crop.random_numbers)
    assert not ResizedCrop(32, flip=False).draw((99,), generator(0))[:, 22].any()


def test_where_nothing_is_random_the_middle_is_seen() -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 341, 3)).astype(np.uint8))
    x = ragged([photo], 224)
    middle = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[:, 16:240, 58:282]  # as torchvision's CenterCrop
    assert torch.equal(see_centre(x, torch.tensor([0]))[0], middle)
    crop, one = ResizedCrop(224), torch.tensor([0])
    assert torch.equal(crop(x, one, crop.draw_nothing((1,), one.device))[0], middle)
    sizes = torch.tensor([[256, 341], [256, 256], [84, 84], [96, 120], [60, 90], [512, 400]])
    assert find_centres(sizes, 224)[:2].tolist() == [[16, 58, 224, 224, 0], [16, 16, 224, 224, 0]]
    assert find_centres(sizes, 84)[2:].tolist() == [
        [0, 0, 84, 84, 0], [6, 18, 84, 84, 0], [0, 15, 60, 60, 0], [81, 25, 350, 350, 0]
    ]  # fmt: skip


def test_brightness_is_that_of_a_crop() -> None:
    x = torch.full((4, 3, 20, 20), 100, dtype=torch.uint8)
    gen = generator(1)
    crop = ResizedCrop(20, brightness=0.5)
    drawn, which = crop.draw((4,), gen), torch.arange(4)
    plain = Crop(0, False, 0.5)(x, which, torch.nn.functional.pad(drawn[:, -1:], (3, 0)))
    ours = crop(Ragged.of_one_size(x, 20), which, drawn)
    assert torch.equal(ours, plain) and len(ours[:, 0, 0, 0].unique()) == 4
    same = crop(Ragged.of_one_size(x, 20), which, crop.draw_nothing((4,), torch.device("cpu")))
    assert torch.equal(same, x)


def test_a_resized_crop_is_recorded_by_name() -> None:
    for crop in (ResizedCrop(84, (0.2, 0.9), (1.0, 1.5), False, 0.25), Crop(2, False, 0.5)):
        assert read_augment(to_plain(crop)) == crop
    assert to_plain(ResizedCrop())["name"] == "resized-crop" and "name" not in to_plain(Crop())
    for wrong in ({"scale": (0.5, 0.1)}, {"ratio": 1.0}, {"scale": (0.0, 1.0)}, {"size": 0}, {"flip": 2}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ResizedCrop(**wrong)  # type: ignore[arg-type]


# Ragged


def random_ragged(count: int = 7, seed: int = 0) -> tuple[Ragged, list[Tensor]]:
    """With gaps between images, and the images."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 9, (count, 2), generator=gen)
    room = 3 * size.prod(1) + torch.arange(count) % 3  # no multiple of 3
    pixels = torch.randint(0, 256, (int(room.sum()),), dtype=torch.uint8, generator=gen)
    x = Ragged(pixels, room.cumsum(0) - room, size)
    images = [pixels[b : b + 3 * h * w].view(h, w, 3) for b, (h, w) in zip(x.start.tolist(), size.tolist())]
    return x, images


def images_of(x: Ragged) -> list[Tensor]:
    own = x.compact()
    parts = own.pixels.split(own.bytes.tolist())
    return [part.view(h, w, 3) for part, (h, w) in zip(parts, own.size.tolist())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_images_of_different_sizes_stand_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x, images = random_ragged()
    which = torch.tensor([5, 1, 2, 3, 1])
    assert same(images_of(x), images) and same(images_of(x[which]), [images[k] for k in which.tolist()])
    assert same(images_of(x[2:4]), images[2:4]) and same(images_of(x[x.size[:, 0] < 0]), [])
    assert x[which].pixels.data_ptr() == x.pixels.data_ptr() and x.compact().compact() is not x
    assert x.to("cpu") is x and x.see(8).shape == (7, 3, 8, 8) and x.largest == int(x.size.amin(1).max())
    monkeypatch.setattr("equipoise.data.ragged.CHUNK", 150)
    parts = list(x.chunks())
    assert len(parts) > 2 and same([one for part in parts for one in images_of(part)], images)
    assert all(len(part) == 1 or int(part.bytes.sum()) <= 150 for part in parts)
    assert list(x[:0].chunks()) == []


def test_labelled_images_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, images = random_ragged()
    data, which = Images(x, torch.arange(7)), torch.tensor([3, 0, 4])
    prints = {data.fingerprint(), data[which].fingerprint(), data[which.flip(0)].fingerprint()}
    monkeypatch.setattr("equipoise.data.ragged.CHUNK", 50)
    assert len(prints) == 3 and data.compact().fingerprint() in prints and data.fingerprint(which) in prints
    squares = Images(torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8), torch.tensor([8, 9]))
    both = join_images(data[which], squares)
    assert isinstance(both.x, Ragged) and both.y.tolist() == [3, 0, 4, 8, 9]
    grey = [one[0, :, :, None].expand(4, 4, 3) for one in squares.x]
    assert same(images_of(both.x), [images[3], images[0], images[4], *grey])
    rows = torch.cat([one.view(-1, 3) for one in images]).double()
    mean, std = measure_channels(x)
    torch.testing.assert_close((mean, std), (rows.mean(0), rows.std(0, correction=0)))


# Our kernel

SIZES = torch.tensor([[24, 20], [20, 24], [24, 20], [20, 24], [20, 24]])


@pytest.fixture
def interpreted() -> Iterator[None]:
    pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")
    if torch.cuda.is_available():
        pytest.skip("tests/test_gpu.py runs the kernel on the GPU")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from equipoise.engine.kernels import resize as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (tl, tl.standard, kernels):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        yield


@pytest.mark.usefixtures("interpreted")
def test_our_kernel_is_within_a_level_of_it() -> None:
    """Boxes that grow and that shrink, mirrored or not, at the edge of memory, and images seen as they are."""
    from equipoise.engine.kernels.resize import resize as fast

    side, gen = 17, generator(0, "kernel")
    size = torch.randint(5, 50, (12, 2), generator=gen)
    around = torch.randint(0, 256, (int(3 * size.prod(1).sum()) + 2000,), dtype=torch.uint8, generator=gen)
    x = Ragged.pack(around[1000:-1000], size, side)
    crop, which = ResizedCrop(side), torch.randint(0, 12, (7,), generator=gen)
    drawn = crop.draw((7,), gen)
    drawn[-2:] = crop.draw_nothing((2,), drawn.device)
    ours, plain = crop(x, which, drawn, fast), crop(x, which, drawn)
    assert farthest(ours, plain) <= 1 and ours.stride() == plain.stride()
    assert (ours != plain).double().mean() < 0.01, "it is the same but for ties"
    before = ours.clone()
    around[:1000], around[-1000:] = 255 - around[:1000], 255 - around[-1000:]
    assert torch.equal(crop(x, which, drawn, fast), before), "what is around the images is not read"
    assert farthest(see_centre(x, which[:2], fast), see_centre(x, which[:2])) <= 1


@pytest.mark.xdist_group("kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("brightness", [0.0, 0.5])
def test_our_kernel_normalises_to_the_same_bits(dtype: torch.dtype, brightness: float) -> None:
    """As the net itself does, from grey levels that are rounded before, and made brighter or darker before that."""
    from equipoise.engine.kernels.resize import resize as fast

    side, gen = 9, generator(0, "kernel")
    x = Ragged.pack(torch.randint(0, 256, (5 * 3 * 24 * 20,), dtype=torch.uint8, generator=gen), SIZES, side)
    crop, which = ResizedCrop(side, brightness=brightness), torch.randint(0, 5, (4,), generator=gen)
    boxes = settle(crop, x, which[None], crop.draw((1, 4), gen))[0]
    mean, std = torch.tensor([123.7, 116.3, 103.5]), torch.tensor([58.4, 57.1, 57.4])
    ours = cut_normalised(crop, x, which, boxes, Normalisation(mean, std, dtype))
    plain = crop.cut(x, which, boxes, fast)
    by_net = (plain.float() - mean[:, None, None]) / std[:, None, None]
    if dtype == torch.bfloat16:  # a GPU rounds to the nearest (test_gpu.py), the interpreter towards 0
        by_net = (by_net.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(ours, by_net.to(dtype)) and ours.dtype == dtype and ours.stride() == by_net.stride()
    assert ours.std() > 0.5 and (len(plain.unique()) > 50)


class Rotated(ILBaseline):
    def views(self, x: Tensor) -> Tensor:
        return x.rot90(2, (2, 3))


@pytest.mark.xdist_group("kernels")
@pytest.mark.usefixtures("interpreted")
def test_training_is_the_same_where_the_kernel_normalises(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = generator(0, "images")
    x = Ragged.pack(torch.randint(0, 256, (5 * 3 * 24 * 20,), dtype=torch.uint8, generator=gen), SIZES)
    data = Images(x, torch.tensor([0, 1, 0, 1, 2]))
    cut: list[torch.dtype] = []

    def note(*given: Any) -> Tensor:
        cut.append((found := cut_normalised(*given)).dtype)
        return found

    monkeypatch.setattr(batches, "cut_normalised", note)
    monkeypatch.setattr(pixels, "has_resize_kernel", lambda device: True)

    def learn(method: Method, here: bool) -> dict[str, Tensor]:
        monkeypatch.setattr(stand_ins, "has_resize_kernel", lambda device: here)
        crop, recipe = ResizedCrop(17, brightness=0.2), Recipe(epochs=1, batch=2)
        learner = Learner(method, 1, recipe=recipe, augment=crop, precision="fp32", device="cpu")
        net = learner.learn(data, range(2)).learn(data, range(2, 3)).state_.net
        assert net is not None
        return net.state_dict()

    plain = learn(ILBaseline(), False)
    assert cut == []
    ours = learn(ILBaseline(), True)
    assert set(cut) == {torch.float32} and all(torch.equal(ours[name], plain[name]) for name in plain)
    cut.clear()
    learn(Rotated(), True)
    assert cut == [], "a method makes copies of images as they are"
