"""What can go wrong, said to the person who reads it: every message is one sentence with a way out.

`UsageError` is a mistake in what was asked for (exit code 2 at the command line, and a `ValueError` in Python);
every other `EquipoiseError` is something about the machine or its files (exit code 1).
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable


class EquipoiseError(Exception):
    """The common ancestor: catching it catches everything that Equipoise says about bad input."""


class UsageError(EquipoiseError, ValueError):
    """What was asked for cannot be done: a setting out of range, labels that do not fit, an unknown name."""


class DataError(EquipoiseError):
    """A file is missing, truncated, corrupt or not what its name says."""


class RunError(EquipoiseError):
    """A run cannot go on: its folder is in use or belongs to other settings, or training diverged."""


class BusyError(RunError):
    """Another process is at work in a run's folder."""


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """An unknown name, with the nearest known one and the list of all."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"unknown {what} {name!r}: {hint}There is: {', '.join(known)}")


def check(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
) -> None:
    """Refuse a setting that is not a finite number within its bounds, or not a whole one where it must be."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value):
        x = float(value)
        low = (least is None or x >= least) and (above is None or x > above)
        if low and (most is None or x <= most) and (below is None or x < below):
            return
    bounds = [(least, "of {:g} or more"), (above, "above {:g}"), (most, "at most {:g}"), (below, "below {:g}")]
    words = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
    raise UsageError(f"{name} must be a {'whole ' if whole else ''}number {words}, not {value}")
