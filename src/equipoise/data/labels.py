"""Labels, as users name their classes. Saving and loading preserves them exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import UsageError
from .inputs import is_ordinary

TIMES = (np.datetime64, np.timedelta64)
"""which would become whole numbers, without their unit"""
SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""two halves of one character, which JSON would join"""
DIGITS = 1000
"""most digits of an integer"""
DEPTH = 20
"""deepest nesting of tuples"""


def as_labels(labels: Any, count: int) -> list[Hashable]:
    """Labels as a list of plain values, one for each of `count` images."""
    if isinstance(labels, (Set, Mapping)):
        raise UsageError(f"labels must be in the order of the images, and a {type(labels).__name__} has no order")
    if isinstance(labels, Tensor) and not is_ordinary(labels):
        raise UsageError("labels must be an ordinary tensor with values, not a sparse, quantized, nested or meta one")
    if isinstance(labels, (np.ndarray, Tensor)) and labels.ndim == 0:
        labels = labels.reshape(1)
    try:
        plain = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    except TypeError:
        raise UsageError(f"labels must be a sequence, one label for each image, not {labels!r}") from None
    if len(plain) != count:
        raise UsageError(f"there are {count} images but {len(plain)} labels")
    if not plain:
        raise UsageError("there are no images")
    return [as_label(label) for label in plain]


def as_label(label: Any, depth: int = 0) -> Hashable:
    """A label as a plain value. Refuse labels that cannot be saved and restored exactly."""
    if isinstance(label, (np.generic, Tensor)) and np.ndim(label) == 0 and not isinstance(label, TIMES):
        label = label.item()
    if type(label) is tuple and depth < DEPTH:
        return tuple(as_label(part, depth + 1) for part in label)
    if type(label) is float and math.isnan(label):
        raise UsageError("a label is NaN")
    if type(label) is int and abs(label) >= 10**DIGITS:
        raise UsageError(f"a label has more than {DIGITS} digits")
    if type(label) is str and SURROGATES.search(label):
        raise UsageError(f"a label has a character in two halves, {label!r:.60}: join them to one")
    if label is None or type(label) in (bool, int, float, str):
        return label  # type: ignore[no-any-return]
    if depth == DEPTH:
        raise UsageError(f"a label has tuples within tuples, more than {DEPTH} deep")
    text, kind = str(label)[:60], type(label).__name__
    raise UsageError(f"a label must be a string, a number, None or a tuple of these, not the {kind} {text}")


def as_array(labels: Sequence[Hashable]) -> np.ndarray[Any, Any]:
    """An array of labels: of numbers or strings if numpy represents all of them exactly, else of objects."""
    for kind, letter in ((int, "i"), (float, "f"), (str, "U")):
        if all(type(label) is kind for label in labels) and labels:
            try:
                array = np.array(labels)
            except OverflowError:
                break
            if array.dtype.kind == letter and array.tolist() == list(labels):  # numpy drops a NUL at the end
                return array
    array = np.empty(len(labels), dtype=object)
    for k, label in enumerate(labels):  # one by one: numpy would read a tuple as a row
        array[k] = label
    return array


def label_to_plain(label: Hashable) -> Any:
    """A label as plain JSON."""
    if isinstance(label, tuple):
        return {"tuple": [label_to_plain(part) for part in label]}
    if isinstance(label, float) and math.isinf(label):
        return {"float": repr(label)}  # JSON has no infinity
    return label


def label_from_plain(plain: Any) -> Any:
    """The inverse of `label_to_plain`."""
    if not isinstance(plain, dict):
        return plain
    return float(plain["float"]) if "float" in plain else tuple(label_from_plain(part) for part in plain["tuple"])
