"""Random crop, flip and brightness of whole batches on the device, from random numbers drawn in advance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError, check, check_choice
from ..settings import check_fields, from_plain, number
from .ragged import Ragged
from .resize import Resize, find_centres, resize
from .stored import Pixels

FINE = 2**24
"""resolution of the brightness: all random numbers are integers, and fp32 is exact up to here"""


@dataclass(frozen=True)
class Crop:
    """Shift an image by at most `pad` pixels in each direction, fill with black, and mirror it half of the time.

    `brightness` then multiplies each image by a random factor, like torchvision's ColorJitter.
    """

    pad: int = 4
    """largest shift in pixels"""
    flip: bool = True
    """whether to mirror half of the images horizontally"""
    brightness: float = 0.0
    """the factor is drawn from 1 − brightness to 1 + brightness"""

    def __post_init__(self) -> None:
        check("pad", self.pad, least=0, whole=True)
        check("brightness", self.brightness, least=0, most=1)

    @property
    def random_numbers(self) -> int:
        """Random numbers per image."""
        return 4 if self.brightness else 3

    def draw(self, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
        """Draw the random numbers of `shape` images, int64 (*shape, random_numbers): offset down, offset right, mirror,
        and brightness from 0 to FINE, if used."""
        offsets = torch.randint(0, 2 * self.pad + 1, (*shape, 2), generator=gen, device=gen.device)
        mirror = torch.randint(0, 2, (*shape, 1), generator=gen, device=gen.device)
        drawn = [offsets, mirror if self.flip else torch.zeros_like(mirror)]
        if self.brightness:
            drawn.append(torch.randint(0, FINE + 1, (*shape, 1), generator=gen, device=gen.device))
        return torch.cat(drawn, -1)

    def draw_nothing(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The numbers, in place of random ones, by which images stay as they are."""
        numbers = [self.pad, self.pad, 0, FINE // 2][: self.random_numbers]
        return torch.tensor(numbers, device=device).expand(*shape, -1)

    def __call__(self, x: Tensor, which: Tensor, drawn: Tensor) -> Tensor:
        """Augment the uint8 images `which` of x by the numbers `drawn`: one gather, without padding x."""
        h, w = x.shape[-2:]
        across = torch.arange(-self.pad, w - self.pad, device=x.device)
        down = torch.arange(-self.pad, h - self.pad, device=x.device) + drawn[:, 0:1]
        right = torch.where(drawn[:, 2:3] > 0, w - 1 - 2 * self.pad - across, across) + drawn[:, 1:2]
        rows, columns = down.clamp(0, h - 1), right.clamp(0, w - 1)
        # Index tensors on both sides of a slice give a channels-last layout, which is fast for convolutions.
        nhwc = x[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        if self.pad:  # black outside the image
            inside = (rows == down)[:, :, None] & (columns == right)[:, None, :]
            nhwc = nhwc * inside[..., None]
        if self.brightness:
            nhwc = change_brightness(nhwc, self.brightness, drawn[:, 3])
        return nhwc.permute(0, 3, 1, 2)


def change_brightness(x: Tensor, most: float, drawn: Tensor) -> Tensor:
    """Multiply each image by a factor from 1 − most to 1 + most, by a number drawn from 0 to FINE."""
    factor = find_factors(most, drawn)
    return (x * factor[:, None, None, None]).clamp(max=255).to(x.dtype)  # rounds towards 0, like Pillow


def find_factors(most: float, drawn: Tensor) -> Tensor:
    """Factors from 1 − most to 1 + most, by numbers drawn from 0 to FINE."""
    return 1 + most * (2 * drawn / FINE - 1)


@dataclass(frozen=True)
class Jitter(Crop):
    """A crop of images, a third of which are made darker or brighter first, and another third of more or less contrast.

    Both are cut off at black and white.
    """

    shift: float = 0.0
    """grey levels by which an image becomes darker or brighter at most"""
    contrast: float = 0.0
    """the distance of each pixel to its channel's mean is multiplied by a factor from 1 − contrast to 1 + contrast"""

    @property
    def random_numbers(self) -> int:
        """Random numbers per image: those of a crop, then which of the three it is, and how much from 0 to FINE."""
        return super().random_numbers + 2

    def draw(self, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
        """Draw the random numbers."""
        crop = super().draw(shape, gen)
        ranges = (3, FINE + 1)
        drawn = [torch.randint(0, top, (*shape, 1), generator=gen, device=gen.device) for top in ranges]
        return torch.cat([crop, *drawn], -1)

    def __call__(self, x: Tensor, which: Tensor, drawn: Tensor) -> Tensor:
        """Change brightness or contrast of the images `which`, then crop them."""
        one = x[which].float()
        kind, amount = drawn[:, -2, None, None, None], 2 * drawn[:, -1, None, None, None] / FINE - 1
        mean = one.mean((2, 3), keepdim=True)
        changed = torch.where(
            kind == 1,
            one + self.shift * amount,
            torch.where(kind == 2, mean + (one - mean) * (1 + self.contrast * amount), one),
        )
        pixels = changed.round().clamp(0, 255).to(x.dtype)
        return super().__call__(pixels, torch.arange(len(which), device=x.device), drawn[:, :-2])


@dataclass(frozen=True)
class ResizedCrop:
    """Cut a box of random size, shape and place out of an image and resize it to a square; mirror half of them.

    As torchvision's RandomResizedCrop: an area and a ratio of width to height, uniform in its logarithm, are drawn
    until a box fits, ten times at most; else the box is the middle of the image, at the nearest ratio that is allowed.
    Boxes are resized as in `resize.py`. `brightness` is that of `Crop`.
    """

    name: ClassVar[str] = "resized-crop"
    """its name in records"""
    size: int = number(224, whole=True, least=1, most=2**12)
    """side of the squares"""
    scale: tuple[float, float] = (0.08, 1.0)
    """smallest and largest area of a box, as a fraction of the image's"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """smallest and largest ratio of width to height"""
    flip: bool = True
    """whether to mirror half of the images horizontally"""
    brightness: float = number(0.0, least=0, most=1)
    """the factor is drawn from 1 − brightness to 1 + brightness"""

    tries: ClassVar[int] = 10
    """boxes that are drawn at most"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("flip", self.flip, True, False)
        for name, pair, most in (("scale", self.scale, 1), ("ratio", self.ratio, 100)):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise UsageError(f"{name} must be a pair of numbers, the smallest and the largest, not {pair!r}")
            for value in pair:
                check(name, value, above=0, most=most)
            if pair[0] > pair[1]:
                raise UsageError(f"{name} must begin with the smaller number, not {pair!r}")

    @property
    def random_numbers(self) -> int:
        """Random numbers per image: ten areas, ten ratios, how far down and right, mirror; and brightness, if used."""
        return 2 * self.tries + (4 if self.brightness else 3)

    @property
    def box_numbers(self) -> int:
        """Numbers per image that `find_boxes` gives."""
        return self.random_numbers - 2 * self.tries + 2

    def draw(self, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
        """Draw the random numbers of `shape` images, int64 (*shape, random_numbers), from 0 to FINE − 1; mirror 0 or 1,
        brightness up to FINE."""
        boxes = torch.randint(0, FINE, (*shape, 2 * self.tries + 2), generator=gen, device=gen.device)
        mirror = torch.randint(0, 2, (*shape, 1), generator=gen, device=gen.device)
        drawn = [boxes, mirror if self.flip else torch.zeros_like(mirror)]
        if self.brightness:
            drawn.append(torch.randint(0, FINE + 1, (*shape, 1), generator=gen, device=gen.device))
        return torch.cat(drawn, -1)

    def draw_nothing(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The numbers, in place of random ones, by which the middle of an image is taken (`find_centres`)."""
        numbers = [-1] * (2 * self.tries + 2) + [0, FINE // 2]
        return torch.tensor(numbers[: self.random_numbers], device=device).expand(*shape, -1)

    def find_boxes(self, size: Tensor, drawn: Tensor) -> Tensor:
        """The boxes of images of these sizes (n, 2), by the numbers drawn: as `resize` reads them (n, 5); where
        brightness is used, with its number (n, 6)."""
        height, width = size[:, :1].double(), size[:, 1:].double()
        u, n = drawn.double() / FINE, self.tries
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, :n])
        low, high = map(math.log, self.ratio)
        ratio = (low + (high - low) * u[:, n : 2 * n]).exp()
        h, w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (h >= 1) & (h <= height) & (w >= 1) & (w <= width)
        first = (fits * torch.arange(n, 0, -1, device=drawn.device)).argmax(1, keepdim=True)
        found = fits.gather(1, first)
        h = torch.where(found, h.gather(1, first), torch.minimum(height, (width / self.ratio[0]).round()).clamp_min(1))
        w = torch.where(found, w.gather(1, first), torch.minimum(width, (height * self.ratio[1]).round()).clamp_min(1))
        room = torch.cat([height - h, width - w], 1)
        corner = torch.where(found, (u[:, 2 * n : 2 * n + 2] * (room + 1)).floor(), (room / 2).floor())
        boxes = torch.cat([corner, h, w], 1).long()
        boxes = torch.where(drawn[:, :1] < 0, find_centres(size, self.size)[:, :4], boxes)
        return torch.cat([boxes, drawn[:, 2 * n + 2 :]], 1)

    def __call__(self, x: Tensor | Ragged, which: Tensor, drawn: Tensor, resize: Resize = resize) -> Tensor:
        """Augment the images `which` of x by the numbers `drawn`.

        A tensor, as a method has that learns pixels, is of squares of this size already: these stay as they are.
        """
        if isinstance(x, Tensor):
            return x[which]
        return self.cut(x, which, self.find_boxes(x.size[which], drawn), resize)

    def cut(self, x: Ragged, which: Tensor, boxes: Tensor, resize: Resize) -> Tensor:
        """Augment the images `which` of x by boxes that are found already."""
        widest = max(self.ratio[1], 1 / self.ratio[0])
        largest = math.ceil((x.largest + 0.5) * widest + 0.5)  # sides are rounded
        squares = resize(x, which, boxes, self.size, largest)
        return change_brightness(squares, self.brightness, boxes[:, -1]) if self.brightness else squares


class Normalisation(NamedTuple):
    """How a net normalises its images: (x − mean) / std of each channel, as this type."""

    mean: Tensor
    std: Tensor
    dtype: torch.dtype


Augment = Crop | ResizedCrop
"""what makes a batch of images, by random numbers"""


def fit_pixels(x: Pixels, crop: Augment | None) -> Pixels:
    """Images as an augmentation reads them: of any size for a `ResizedCrop`, of one size otherwise."""
    if isinstance(crop, ResizedCrop):
        return (Ragged.of_one_size(x) if isinstance(x, Tensor) else x).see(crop.size)
    if not isinstance(x, Tensor):
        raise UsageError("images of different sizes need augment=ResizedCrop(224), or another size")
    return x


def read_augment(plain: Mapping[str, Any]) -> Augment:
    """An augmentation of a record or of a saved learner."""
    if plain.get("name") != ResizedCrop.name:
        return from_plain(Crop, plain, {})
    return from_plain(ResizedCrop, {k: v for k, v in plain.items() if k != "name"}, {})


@dataclass(frozen=True)
class AugmentedEpoch:
    """The images of an epoch, batch after batch, as they are augmented in it."""

    crop: Augment
    where: Tensor
    """positions of the images (n,)"""
    drawn: Tensor
    """random numbers of their augmentation (n, random_numbers)"""
    first: int = 0
    """number of the first image of the batches that `more` is called for"""

    def __len__(self) -> int:
        return len(self.where)
