"""What can go wrong, said to the person who reads it: every message is one sentence with a way out.

`UsageError` is a mistake in what was asked for (exit code 2 at the command line, and a `ValueError` in Python);
every other `EquipoiseError` is something about the machine or its files (exit code 1).
"""

from __future__ import annotations

import difflib
import errno
import math
import numbers
from collections.abc import Iterable, Mapping


class EquipoiseError(Exception):
    """The common ancestor: catching it catches everything that Equipoise says about bad input."""


class UsageError(EquipoiseError, ValueError):
    """What was asked for cannot be done: a setting out of range, labels that do not fit, an unknown name."""


class DataError(EquipoiseError):
    """A file is missing, truncated, corrupt or not what its name says."""


class RunError(EquipoiseError):
    """A run cannot go on: its folder is in use or belongs to other settings, or training diverged."""


class DivergedError(RunError):
    """Training diverged."""

    def __init__(self, words: str, settings: Mapping[str, str]) -> None:
        """`settings` are to be lowered: as they are written in Python, each with its flag."""
        super().__init__(f"{words}; lower {' or '.join(settings)}")
        self.with_flags = f"{words}; lower {' or '.join(settings.values())}"


class BusyError(RunError):
    """Another process is at work in a run's folder."""


def make_unknown_error(what: str, name: str, known: Iterable[str]) -> UsageError:
    """An unknown name, with the nearest known one and the list of all; of very many, those that are nearest."""
    by_low = {one.lower(): one for one in sorted(known)}
    close = find_nearest(name, by_low.values())
    hint = f"did you mean {close!r}? " if close else ""
    listed = list(by_low) if len(by_low) <= 20 else difflib.get_close_matches(name.lower(), by_low, n=8, cutoff=0.0)
    names = [by_low[one] for one in listed]
    names += [f"and {len(by_low) - len(listed)} more"] if len(listed) < len(by_low) else []
    between = "; " if any("," in one for one in listed) else ", "
    return UsageError(f"unknown {what} {name!r}: {hint}There is: {between.join(names)}")


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if none is."""
    by_low = {one.lower(): one for one in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_low, n=1)
    return by_low[close[0]] if close else None


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


def check_choice(name: str, value: object, *known: object) -> None:
    """Refuse a setting that is none of those known."""
    if value not in known:
        *others, last = map(repr, known)
        raise UsageError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def get_first_line(error: BaseException) -> str:
    """What an error says first; some libraries say a page."""
    return (str(error).strip().splitlines() or [""])[0]


def is_gpu_full(error: BaseException) -> bool:
    """Whether the memory of a GPU did not suffice; drivers and compilers say so in errors of other kinds."""
    import torch  # which takes seconds: errors of usage do not wait for it

    words = get_first_line(error)
    other = isinstance(error, RuntimeError) and "CUDA" in words and "out of memory" in words
    return isinstance(error, torch.OutOfMemoryError) or other


def describe_gpu_failure(error: BaseException) -> str | None:
    """That a GPU is lost or broke off, and in what words it did; None for all other errors."""
    import torch

    words = get_first_line(error)
    other = isinstance(error, RuntimeError) and ("CUDA error" in words or "cuDNN error" in words)
    if is_gpu_full(error) or not (isinstance(error, torch.AcceleratorError) or other):
        return None
    return f"the GPU failed ({words})"


def describe_error(error: BaseException, lower: str = "--batch") -> str | None:
    """What went wrong and what to do about it; None for a fault of ours. `lower` is what to lower on a full GPU."""
    if isinstance(error, DivergedError):
        return error.with_flags
    if isinstance(error, EquipoiseError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left for {error.filename or 'the files of the run'}: free some, and the same command goes on"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "a file became larger than is allowed here (see ulimit -f): allow more, and the same command goes on"
    if isinstance(error, PermissionError):
        return f"no permission to use {error.filename}: choose another --out, --store or --data"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used ({(error.strerror or 'error').lower()}): choose another folder"
    if isinstance(error, OSError):
        return str(error)
    if is_gpu_full(error):
        return f"the GPU is out of memory: lower {lower}, or free the GPU of other processes and run the same command"
    if said := describe_gpu_failure(error):
        return f"{said}: see whether nvidia-smi still lists it, and run the same command again"
    return None
