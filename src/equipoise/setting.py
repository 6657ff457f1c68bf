"""Settings as they differ: from those of the first records, which do not name what came later, or from the usual."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import field, fields
from typing import Any


def later(default: Any) -> Any:
    """The default of such a setting, which is given by name: what older records, keys and folders were made with."""
    return field(default=default, kw_only=True, metadata={"later": True})


def given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that came later and have their default."""
    every = {f: getattr(value, f.name) for f in fields(value)}
    return {f.name: one for f, one in every.items() if not (f.metadata.get("later") and one == f.default)}


def changed(value: Any, usual: Any, skip: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of the fields of a dataclass that are not as usual, except those to skip."""
    for f in fields(value):
        one = getattr(value, f.name)
        if f.name not in skip and one != getattr(usual, f.name):
            yield f.name, one
