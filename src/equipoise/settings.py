"""Settings as they differ: from those of the first records, which do not name what came later, or from the usual."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, field, fields
from typing import Any


def later(default: Any, named: Callable[[Any], bool] = lambda value: False) -> Any:
    """The default of such a setting, which is given by name: what older records, keys and folders were made with.

    A default that has changed since is not that: where it matters, `named` says that it is named all the same.
    """
    return field(default=default, kw_only=True, metadata={"named": named})


def given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that came later and have their default."""
    every = {f: getattr(value, f.name) for f in fields(value)}
    unsaid = {f.name for f in came_later(value) if every[f] == f.default and not f.metadata["named"](value)}
    return {f.name: one for f, one in every.items() if f.name not in unsaid}


def came_later(kind: Any) -> list[Field[Any]]:
    """The fields of a dataclass, or of its kind, that older records do not name."""
    return [f for f in fields(kind) if "named" in f.metadata]


def changed(value: Any, usual: Any, skip: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of the fields of a dataclass that are not as usual, except those to skip."""
    for f in fields(value):
        one = getattr(value, f.name)
        if f.name not in skip and one != getattr(usual, f.name):
            yield f.name, one
