"""Random crop, flip and brightness of whole batches on the device, from random numbers drawn in advance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check
from .images import Images

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
            factor = 1 + self.brightness * (2 * drawn[:, 3] / FINE - 1)
            nhwc = (nhwc * factor[:, None, None, None]).clamp(max=255).to(nhwc.dtype)  # rounds towards 0, like Pillow
        return nhwc.permute(0, 3, 1, 2)


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
class AugmentedEpoch:
    """The images of an epoch, batch after batch, as they are augmented in it. A slice of it is uint8 pixels."""

    images: Images
    crop: Crop
    where: Tensor
    """positions of the images (n,)"""
    drawn: Tensor
    """random numbers of their augmentation (n, random_numbers)"""
    first: int = 0
    """number of the first image of the batches that `more` is called for"""

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, part: slice) -> Tensor:
        return self.crop(self.images.x, self.where[part], self.drawn[part])
