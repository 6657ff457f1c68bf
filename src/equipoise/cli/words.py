"""The words of a command line: lists, files of runs, and flags that are read from a dataclass."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ..errors import DataError, UsageError

T = TypeVar("T")

PATHS = ("--out", "--data", "--store", "--results", "--figures", "--runs")
"""flags that name a file or a folder"""
NOT_A_NUMBER = {
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is not a whole number",
    r"could not convert string to float: (.*)": r"\1 is not a number",
    r"no type matching \{None\}\|INT could be instantiated from \[(.*)\]\.": r"\1 is not a whole number",
    r"Could not find valid parse for arguments: \[(.*)\]": r"\1 cannot be read",
}
"""what tyro writes of a value that it cannot read, and what we write instead"""


def pop_flag(flag: str, argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without a flag and its value, and that value; of several, the last one counts."""
    rest, value = [], None
    words = iter(argv)
    for word in words:
        if word == flag or word.startswith(f"{flag}="):
            value = next(words, "") if word == flag else word.split("=", 1)[1]
            if not value:
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
        if not word and (before in PATHS or verb in ("report", "show")):
            raise UsageError(f"{before if before in PATHS else 'a path'} is empty: name a folder")


def hint(text: str) -> Any:
    """What the help shows instead of a default."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})", metavar="VALUE")


def parse(kind: type[T], verb: str, argv: Sequence[str]) -> T:
    """The dataclass that the words describe. Words that it has no field for, or no type, are a `UsageError`."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, prog=f"equipoise {verb}", args=argv, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if not end.code:  # that was --help
            raise
        raise UsageError(f"{sentence(printed.getvalue())}; equipoise {verb} --help lists all flags") from None


def sentence(box: str) -> str:
    """What is wrong, out of the box that tyro draws around it: the first paragraph in it."""
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()[1:]]  # after its title
    ends = [not line.strip("─-") for line in lines]
    content = itertools.dropwhile(lambda pair: pair[1], zip(lines, ends))
    words = [line for line, _ in itertools.takewhile(lambda pair: not pair[1], content)]
    text = " ".join(words).removeprefix("Error parsing ").rstrip(".")
    for theirs, ours in NOT_A_NUMBER.items():
        text = re.sub(theirs.removesuffix(r"\."), ours, text)
    return text[:1].lower() + text[1:]
