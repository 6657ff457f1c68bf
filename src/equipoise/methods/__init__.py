"""One file per method. Importing this package imports them all, which is all the registration there is."""

from __future__ import annotations

import importlib
import pkgutil

from ..errors import unknown
from ..method import Method

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def known() -> dict[str, type[Method]]:
    """Every method that has been imported and has a name, by that name."""
    return {kind.name: kind for kind in Method.__subclasses__() if kind.name}


def named(name: str) -> type[Method]:
    """The method of that name; the nearest one is suggested if there is none."""
    try:
        return known()[name]
    except KeyError:
        raise unknown("method", name, known()) from None
