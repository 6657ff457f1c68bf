"""HTML from Python: elements in which every text is escaped, and numbers as the page writes them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import TypeGuard

VOID = ("img", "input")
"""elements without an end"""


class Html(str):
    """Text that is HTML already."""


def flat(parts: object) -> Iterator[object]:
    """The parts of an element, out of any lists; without None, False and the empty text."""
    if isinstance(parts, (list, tuple)):
        for part in parts:
            yield from flat(part)
    elif parts is not None and parts is not False and parts != "":
        yield parts


def join(*parts: object) -> Html:
    """Parts one after the other, all text escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in flat(parts)))


def h(tag: str, *parts: object, **attributes: object) -> Html:
    """An element. Of attributes, `class_` is class and `data_key` data-key; None and False leave one out."""
    words = [tag]
    for name, value in attributes.items():
        if value is not None and value is not False:
            plain = name.rstrip("_").replace("_", "-")
            words.append(plain if value is True else f'{plain}="{html.escape(str(value))}"')
    return Html(f"<{' '.join(words)}>" + ("" if tag in VOID else f"{join(*parts)}</{tag}>"))


def is_known(value: object) -> TypeGuard[float]:
    """Whether there is a number: a run that diverged has none."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with so many digits, a dash for none."""
    return f"{value:.{digits}f}".replace("-", "−") if is_known(value) else "–"


def signed(value: float) -> str:
    """A difference, always with a sign: colour is not to be the only cue."""
    digits = f"{abs(value):.2f}"
    return ("±" if float(digits) == 0 else "−" if value < 0 else "+") + digits


def counted(count: int, word: str) -> str:
    """3 runs, 1 run."""
    return f"{count} {word}{'' if count == 1 else 's'}"
