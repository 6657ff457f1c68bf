"""HTML from Python: elements in which every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator

VOID = ("img", "input")
"""elements without an end tag"""


class Html(str):
    """Text that is HTML already."""


def flatten(parts: object) -> Iterator[object]:
    """The parts of an element, from nested lists too; without None, False and empty text."""
    if isinstance(parts, (list, tuple)):
        for part in parts:
            yield from flatten(part)
    elif parts is not None and parts is not False and parts != "":
        yield parts


def join(*parts: object) -> Html:
    """Join parts, and escape all text."""
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in flatten(parts)))


def h(tag: str, *parts: object, **attributes: object) -> Html:
    """An element. Of attributes, `class_` is class and `data_key` data-key; None and False leave one out."""
    words = [tag]
    for name, value in attributes.items():
        if value is not None and value is not False:
            plain = name.rstrip("_").replace("_", "-")
            words.append(plain if value is True else f'{plain}="{html.escape(str(value))}"')
    return Html(f"<{' '.join(words)}>" + ("" if tag in VOID else f"{join(*parts)}</{tag}>"))
