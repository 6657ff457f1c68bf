"""Errors. A message is one sentence: what is wrong, where, and what to do.

`UsageError` is a mistake of the user (exit code 2 at the command line, a `ValueError` in Python); every other
`EquipoiseError` is a problem of the machine or its files (exit code 1).
"""

from __future__ import annotations

import difflib
import errno
import numbers
import sys
from collections.abc import Hashable, Iterable, Mapping
from typing import Any


class EquipoiseError(Exception):
    """The base class of all errors that Equipoise raises itself."""


class UsageError(EquipoiseError, ValueError):
    """Invalid input: a setting out of range, labels that do not fit, an unknown name."""


class DataError(EquipoiseError):
    """A file is missing, damaged or of the wrong kind."""


class RunError(EquipoiseError):
    """A run cannot continue: its folder is in use or belongs to other settings, or training diverged."""

    def __init__(self, words: str, with_flags: str = "") -> None:
        """`with_flags` says the same where the remedy is typed at the command line and not in Python."""
        super().__init__(words)
        self.with_flags = with_flags or words


class DivergedError(RunError):
    """Training diverged."""

    def __init__(self, words: str, settings: Mapping[str, str]) -> None:
        """`settings` are those to lower: from the Python argument to the flag."""
        super().__init__(*(f"{words}; lower {' or '.join(names)}" for names in (settings, settings.values())))


class BusyError(RunError):
    """Another process is using the folder of a run."""


def make_unknown_error(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown name: it suggests the nearest known name and lists the known ones (at most 20)."""
    by_low = {one.lower(): one for one in sorted(known)}
    close = find_nearest(name, by_low.values())
    choose = f"did you mean {close!r}? Choose from" if close else "choose from"
    listed = list(by_low) if len(by_low) <= 20 else difflib.get_close_matches(name.lower(), by_low, n=8, cutoff=0.0)
    names = [by_low[one] for one in listed]
    names += [f"and {len(by_low) - len(listed)} more"] if len(listed) < len(by_low) else []
    between = "; " if any("," in one for one in listed) else ", "
    return UsageError(f"unknown {what} {name!r}: {choose} {between.join(names)}")


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one may be meant for: a similar one, or one of which one begins the other."""
    low, by_low = name.lower(), {one.lower(): one for one in sorted(known)}
    begins = [one for one in by_low if min(len(one), len(low)) > 2 and (one.startswith(low) or low.startswith(one))]
    near = difflib.get_close_matches(low, by_low, n=1, cutoff=0.75) or begins  # below, --workers is --order
    return by_low[near[0]] if near else None


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
    """Refuse a setting that is not a finite number within bounds, or with `whole` not an integer."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, kind) and not isinstance(value, bool) and is_finite(value):
        x = float(value)
        low = (least is None or x >= least) and (above is None or x > above)
        if low and (most is None or x <= most) and (below is None or x < below):
            return
    bounds = [(least, "of {:g} or more"), (above, "above {:g}"), (most, "at most {:g}"), (below, "below {:g}")]
    words = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
    raise UsageError(f"{name} must be a {'whole ' if whole else ''}number {words}, not {value}")


def is_finite(value: Any) -> bool:
    """Whether a number is one of those that a float can hold; a whole number may be too large."""
    return bool(abs(value) <= sys.float_info.max)


def check_choice(name: str, value: object, *known: object) -> None:
    """Refuse a value that is not one of the choices."""
    if not isinstance(value, Hashable) or value not in known:  # an array compares each of its values
        raise UsageError(f"{name} must be {list_choices(map(repr, known))}, not {value!r}")


def list_choices(words: Iterable[str], last: str = "or") -> str:
    """Choices as one says them: a, b or c."""
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end


def describe_others(words: Iterable[str]) -> str:
    """That a value is not among the choices: neither a, b nor c."""
    words = [*words]
    return f"neither {list_choices(words, 'nor')}" if len(words) > 1 else f"not {words[0]}"


def format_count(count: int, word: str, plural: str = "") -> str:
    """A number of things: 1 run, 3 classes, 2,600 images."""
    return f"{count:,} {word if count == 1 else plural or f'{word}s'}"


def get_first_line(error: BaseException) -> str:
    """The first line of an error message."""
    return (str(error).strip().splitlines() or [""])[0]


def is_gpu_full(error: BaseException) -> bool:
    """Whether a GPU ran out of memory; drivers and compilers report it by other types of errors."""
    import torch  # slow to import, and usage errors do not need it

    words = get_first_line(error)
    other = isinstance(error, RuntimeError) and "CUDA" in words and "out of memory" in words
    return isinstance(error, torch.OutOfMemoryError) or other


def describe_gpu_failure(error: BaseException) -> str | None:
    """A description of a GPU failure; None for other errors."""
    import torch

    words = get_first_line(error)
    other = isinstance(error, RuntimeError) and ("CUDA error" in words or "cuDNN error" in words)
    if is_gpu_full(error) or not (isinstance(error, torch.AcceleratorError) or other):
        return None
    return f"the GPU failed ({words})"


def describe_error(error: BaseException, lower: str = "--batch") -> str | None:
    """What is wrong and what to do; None for a bug. `lower` names the flags to lower when GPU memory runs out."""
    if isinstance(error, RunError):
        return error.with_flags
    if isinstance(error, EquipoiseError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        words = f"no space left for {error.filename or 'the files of the run'}"
        return f"{words}: free some space and repeat the command to resume"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "a file exceeded the size limit (see ulimit -f): raise the limit and repeat the command to resume"
    if isinstance(error, PermissionError):
        return f"no permission to use {error.filename}: choose another --out, --store or --data"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used ({(error.strerror or 'error').lower()}): choose another folder"
    if isinstance(error, OSError):
        return str(error)
    if is_gpu_full(error):
        return f"the GPU is out of memory: lower {lower}, or stop other processes on the GPU, then repeat the command"
    if failure := describe_gpu_failure(error):
        return f"{failure}: check that nvidia-smi still lists it, then repeat the command"
    return None
