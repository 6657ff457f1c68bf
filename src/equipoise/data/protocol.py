"""The order of the classes, and their division into steps."""

from __future__ import annotations

import numbers
from pathlib import Path

import numpy as np

from ..errors import DataError, UsageError

PODNET = """
87 0 52 58 44 91 68 97 51 15 94 92 10 72 49 78 61 14 8 86 84 96 18 24 32 45 88 11 4 67 69 66 77 47
79 93 29 50 57 83 17 81 41 12 37 59 25 20 80 73 1 28 6 46 62 82 53 9 31 75 38 63 33 74 27 22 36 3
16 21 60 19 70 90 89 43 5 42 65 76 40 30 23 85 2 95 56 48 71 64 98 13 99 7 34 55 54 26 35 39
"""
"""the first of PODNet's three orders of the classes of CIFAR-100, in which DDE's released script learns them too"""


def order_classes(order: str, classes: int) -> list[int]:
    """The order in which the classes are learned.

    `order` is a seed of NumPy's legacy generator (usually 1993), `natural`, `podnet` (of CIFAR-100), or a file that
    lists every label once, separated by white space or commas.
    """
    order = str(order)
    if order == "natural":
        return list(range(classes))
    if order == "podnet":
        found = [int(word) for word in PODNET.split()]
        if len(found) != classes:
            raise UsageError(f"--order podnet is that of the 100 classes of CIFAR-100, and there are {classes}")
        return found
    if order.isascii() and order.isdecimal():
        if len(order) > 10 or int(order) >= 2**32:
            raise UsageError("the order's seed must be below 2**32")
        ids = np.arange(classes)
        np.random.RandomState(int(order)).shuffle(ids)
        return [int(i) for i in ids]
    path = Path(order)
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # too long, or an invalid character
        exists = False
    if not exists:
        raise UsageError(f"--order {order[:100]} is not a seed, 'natural', 'podnet' or an existing file")
    words = path.read_text(errors="replace").replace(",", " ").split()
    if not all(w.isdecimal() for w in words):
        raise DataError(f"{order} must hold whole numbers only, separated by white space or commas")
    ids_in_file = [int(w) for w in words]
    if sorted(ids_in_file) != list(range(classes)):
        raise DataError(f"{order} must list each of the labels 0 to {classes - 1} once; it has {len(words)} numbers")
    return ids_in_file


def split_classes(classes: int, base: int, steps: int) -> tuple[int, ...]:
    """The number of classes of each step: the base step's, then an equal number for the others."""
    for name, value in (("base", base), ("steps", steps)):
        if not isinstance(value, numbers.Integral):
            raise UsageError(f"--{name} must be a whole number, not {value!r}")
    if not 2 <= base < classes:
        raise UsageError(
            f"--base {base} must be from 2 to {classes - 1}: there are {classes} classes to learn, in steps"
        )
    rest = classes - base
    if steps < 1 or rest % steps:
        fits = ", ".join(str(k) for k in range(1, rest + 1) if rest % k == 0)
        raise UsageError(
            f"--steps {steps} does not divide the {rest} classes left after the base step; use one of {fits}"
        )
    return (base,) + (rest // steps,) * steps
