"""The words of a command line, before their flags are parsed: lists of values, and files of runs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError, UsageError

PATHS = ("--out", "--data", "--store", "--results", "--figures", "--runs")
"""flags that name a file or a folder"""


def pop_flag(flag: str, argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without a flag and its value, and that value; of several, the last one counts."""
    rest, value = [], None
    words = iter(argv)
    for word in words:
        if word == flag or word.startswith(f"{flag}="):
            value = next(words, "") if word == flag else word.split("=", 1)[1]
            if not value or (word == flag and value.startswith("--")):
                raise UsageError(f"{flag} needs a value")
        else:
            rest.append(word)
    return rest, value


def expand_lists(argv: Sequence[str]) -> list[list[str]]:
    """All ways to choose one value from each list: a word such as 0,1,2 or --seed=0,1,2."""
    choices = []
    for word in argv:
        flag, equals, values = word.rpartition("=") if word.startswith("--") else ("", "", word)
        choices.append([flag + equals + value for value in values.split(",")])
    return [list(words) for words in itertools.product(*choices)]


def read_runs(file: Path) -> list[list[str]]:
    """The words of each line that is not empty; # begins a comment."""
    lines = []
    try:
        for line in file.read_text().splitlines():
            if words := shlex.split(line, comments=True):
                lines.append(words)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({(error.strerror or 'error').lower()}): name a file of runs") from None
    except ValueError as error:
        raise DataError(f"{file} is not a file of runs: {str(error).lower()}") from None
    for flag in ("--out", "--workers", "--runs"):
        if any(word.split("=")[0] == flag for words in lines for word in words):
            raise UsageError(f"{file}: {flag} is one for all runs of a sweep")
    if not lines:
        raise UsageError(f"{file} names no run: write the words of one on each line, such as il-baseline --seed 0")
    return lines


def refuse_empty_path(verb: str, argv: Sequence[str]) -> None:
    """Refuse `--out "$UNSET"`, which would become the working directory."""
    for before, word in zip([verb, *argv], argv):
        flag, equals, value = word.partition("=")
        if equals and not value and flag in PATHS:
            raise UsageError(f"{flag} is empty: name a folder")
        if not word and (before in PATHS or verb in ("report", "show", "pack")):
            raise UsageError(f"{before if before in PATHS else 'a path'} is empty: name a folder")
