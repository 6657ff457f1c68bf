"""What can go wrong, said to the person who reads it: every message is one sentence with a way out.

`UsageError` is a mistake in what was asked for (exit code 2 at the command line, and a `ValueError` in Python);
every other `EquipoiseError` is something about the machine or its files (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EquipoiseError(Exception):
    """The common ancestor: catching it catches everything that Equipoise says about bad input."""


class UsageError(EquipoiseError, ValueError):
    """What was asked for cannot be done: a setting out of range, labels that do not fit, an unknown name."""


class DataError(EquipoiseError):
    """A file is missing, truncated, corrupt or not what its name says."""


class RunError(EquipoiseError):
    """A run cannot go on: its folder is in use or belongs to other settings, or training diverged."""


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """An unknown name, with the nearest known one and the list of all."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"unknown {what} {name!r}: {hint}There is: {', '.join(known)}")
