"""Images on a device, the order of the classes, and how they are cut into steps."""

from __future__ import annotations

import hashlib
import numbers
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .errors import DataError, UsageError


@dataclass(frozen=True)
class Images:
    """Labelled images, whole and on one device: `x` is uint8 (n, channels, height, width), `y` int64 (n,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Tensor) -> Images:
        return Images(self.x[which], self.y[which])

    def to(self, device: torch.device | str) -> Images:
        """The same images on another device."""
        return Images(self.x.to(device), self.y.to(device))

    def of(self, first: int, last: int) -> Images:
        """The images of the classes first, ..., last - 1."""
        return self[(self.y >= first) & (self.y < last)]

    def fingerprint(self) -> str:
        """A hash of every pixel and label: equal only for equal data in equal order."""
        h = hashlib.sha256(repr((tuple(self.x.shape), str(self.x.dtype))).encode())
        h.update(self.x.contiguous().cpu().numpy().data)
        h.update(self.y.contiguous().cpu().numpy().data)
        return h.hexdigest()


def join(a: Images, b: Images) -> Images:
    """The images of a, then those of b."""
    return Images(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]))


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 images, in units of pixel values.

    From a histogram: exact, the same on every device, and without a float copy of all images.
    """
    levels = torch.arange(256, dtype=torch.float64)
    counts = [torch.bincount(x[:, c].flatten(), minlength=256).cpu().double() for c in range(x.shape[1])]
    p = torch.stack(counts) / counts[0].sum()
    mean = p @ levels
    std = ((p @ levels**2) - mean**2).clamp_min(0).sqrt()
    return mean, torch.where(std > 0, std, 1.0)  # a channel of one colour carries nothing: it becomes 0


def class_sums(h: Tensor, y: Tensor, classes: int) -> Tensor:
    """The sum of the features of each class; added up in a fixed order, as `index_add` on a GPU does not."""
    return torch.stack([h[y == c].sum(0) for c in range(classes)])


def class_order(order: str, classes: int) -> list[int]:
    """The order in which the classes are learned.

    `order` is a seed for NumPy's legacy generator (1993 is what this field uses), `natural`, or a file that
    lists every label once, separated by white space or commas.
    """
    order = str(order)
    if order == "natural":
        return list(range(classes))
    if order.isascii() and order.isdecimal():
        if len(order) > 10 or int(order) >= 2**32:
            raise UsageError("the order's seed must be below 2**32")
        ids = np.arange(classes)
        np.random.RandomState(int(order)).shuffle(ids)
        return [int(i) for i in ids]
    path = Path(order)
    try:
        found = path.is_file()
    except (OSError, ValueError):  # too long, or a character that no name may have
        found = False
    if not found:
        raise UsageError(f"--order {order[:100]}: neither a seed, nor 'natural', nor a file")
    words = path.read_text(errors="replace").replace(",", " ").split()
    if not all(w.isdecimal() for w in words):
        raise DataError(f"{order} must hold whole numbers only, separated by white space or commas")
    ids_in_file = [int(w) for w in words]
    if sorted(ids_in_file) != list(range(classes)):
        raise DataError(f"{order} must list each of the labels 0 to {classes - 1} once; it has {len(words)} numbers")
    return ids_in_file


def step_sizes(classes: int, base: int, steps: int | None, increment: int | None) -> tuple[int, ...]:
    """How many classes each step brings: the base step's, then the others', all of them equal."""
    for name, value in (("base", base), ("steps", steps), ("increment", increment)):
        if value is not None and not isinstance(value, numbers.Integral):
            raise UsageError(f"--{name} must be a whole number, not {value!r}")
    if not 2 <= base < classes:
        raise UsageError(
            f"--base {base} must be from 2 to {classes - 1}: there are {classes} classes to learn, in steps"
        )
    rest = classes - base
    for name, value in (("steps", steps), ("increment", increment)):
        if value is not None and (value < 1 or rest % value):
            fits = ", ".join(str(k) for k in range(1, rest + 1) if rest % k == 0)
            raise UsageError(
                f"--{name} {value} does not divide the {rest} classes left after the base step; what does: {fits}"
            )
    if steps is None:
        if increment is None:
            raise UsageError("say how the classes after the base step come: --steps or --increment")
        steps = rest // increment
    elif increment is not None and steps * increment != rest:
        raise UsageError(f"--steps {steps} and --increment {increment} disagree: {rest} classes are left; give one")
    return (base,) + (rest // steps,) * steps
