"""One file per method. Importing this package imports, and thereby registers, all of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TypeVar

from ..errors import make_unknown_error
from ..method import Method
from ..remedies import REMEDIES, Remedy
from ..settings import Kinds

Kind = TypeVar("Kind")

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def find_methods() -> dict[str, type[Method]]:
    """All imported methods by name; of duplicates, the latest."""
    return {kind.name: kind for kind in _walk_subclasses(Method) if kind.name}


def find_built_in() -> dict[str, type[Method]]:
    """The methods of this package by name."""
    return {name: kind for name, kind in find_methods().items() if kind.__module__.startswith(f"{__name__}.")}


def _walk_subclasses(kind: type[Kind]) -> Iterator[type[Kind]]:
    for below in kind.__subclasses__():
        yield below
        yield from _walk_subclasses(below)


def find_method(name: str) -> type[Method]:
    """The method of this name."""
    try:
        return find_methods()[name]
    except KeyError:
        raise make_unknown_error("method", name, find_methods()) from None


def find_remedy(name: str) -> type[Remedy]:
    """The remedy of this name, built-in or the user's."""
    every = {kind.name: kind for kind in _walk_subclasses(Remedy) if kind.name} | REMEDIES
    if name not in every:
        raise make_unknown_error("remedy", name, REMEDIES)
    return every[name]


KINDS: Kinds = {Method: find_method, Remedy: find_remedy}
"""finds methods and remedies by name, for `from_plain`"""
