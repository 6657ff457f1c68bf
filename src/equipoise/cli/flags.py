"""Parses flags into the fields of a dataclass, and makes the help from the docstrings of the fields.

Nothing here depends on a verb, or is slow to import.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import UsageError, describe_others, find_nearest, list_choices

BEGINS_FLAG = re.compile(r"--|-(?!inf$|nan$)[A-Za-z]").match
"""whether a word begins like a flag; negative numbers do not"""
NUMBERS = {int: "a whole number", float: "a number"}
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH"}
"""what the help calls a value of a type; VALUE for other types"""


class Flag(NamedTuple):
    """A flag, or a positional argument."""

    name: str
    """without leading dashes, with underscores"""
    type: Any
    default: Any
    """MISSING if the flag is required"""
    help: str
    """its description, which may end with its own words for the default"""
    group: str = ""
    """the title under which the help shows it; empty for the flags shown first"""
    positional: bool = False

    @property
    def word(self) -> str:
        """The flag as it is typed."""
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether the flag takes any number of values."""
        return typing.get_origin(list_types(self.type)[0]) is tuple

    @property
    def spellings(self) -> list[str]:
        """All ways to type the flag: a switch also has `--no-...`."""
        return [self.word, f"--no-{self.word[2:]}"] if self.type is bool else [self.word]


class Syntax(NamedTuple):
    """A command and its flags."""

    command: str
    """such as `equipoise run lucir`"""
    about: str
    """what it does"""
    flags: Sequence[Flag]
    groups: Mapping[str, str] = {}
    """the groups of flags in order: a title and a description of each"""

    def make_error(self, what: str) -> UsageError:
        """The error for invalid words. It says how to see the help."""
        return UsageError(f"{what}; {self.command} --help lists all flags")


def parse_arguments(kind: Any, verb: str, argv: Sequence[str]) -> Any:
    """Parse the words into a dataclass."""
    hints, helps = read_types(kind), read_docstrings(kind)
    flags = [
        Flag(f.name, hints[f.name], f.default, helps[f.name], positional=f.default in (MISSING, ()))
        for f in fields(kind)
    ]
    return kind(**parse(Syntax(f"equipoise {verb}", inspect.getdoc(kind) or "", flags), argv))


def parse(syntax: Syntax, argv: Sequence[str]) -> dict[str, Any]:
    """The given values by flag name; the last one if a flag is repeated. --help prints the help and exits."""
    if "--help" in argv or "-h" in argv:
        print(format_help(syntax))
        raise SystemExit(0)
    known = {word[2:]: flag for flag in syntax.flags if not flag.positional for word in flag.spellings}
    given: dict[str, Any] = {}
    words, rest = [*argv], []
    while words:
        word = words.pop(0)
        if not BEGINS_FLAG(word):
            rest.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = typed.removeprefix("--").replace("_", "-")
        if name not in known:
            raise syntax.make_error(f"unknown flag {typed!r}{suggest(name.lstrip('-'), known, '--')}")
        flag = known[name]
        if flag.type is bool:
            if equals:
                raise syntax.make_error(f"{typed} takes no value")
            given[flag.name] = f"--{name}" == flag.word
            continue
        values = [value] if equals else list(itertools.takewhile(lambda word: not BEGINS_FLAG(word), words))
        values = values if flag.several else values[:1]
        words = words if equals else words[len(values) :]
        if not values and not flag.several:
            raise syntax.make_error(f"{typed} needs a value")
        given[flag.name] = parse_flag(syntax, flag, values)
    for flag in syntax.flags:
        if flag.positional:
            values, rest = (rest, []) if flag.several else (rest[:1], rest[1:])
            if values:
                given[flag.name] = parse_flag(syntax, flag, values)
            elif flag.default is MISSING:
                raise syntax.make_error(f"say which {flag.help}")
    if rest:
        meant = f" (did you mean '--{rest[0]}'?)" if rest[0] in known else ""
        raise syntax.make_error(f"unexpected word {rest[0]!r}{meant}")
    return given


def parse_flag(syntax: Syntax, flag: Flag, words: Sequence[str]) -> Any:
    """Parse the words of a flag; an error names the flag."""
    try:
        return parse_value(flag.type, words)
    except ValueError as error:
        raise syntax.make_error(f"{flag.word}: {error}") from None


def parse_value(kind: Any, words: Sequence[str]) -> Any:
    """Parse words as a value of a type; a ValueError says what is wrong."""
    if type(None) in typing.get_args(kind) and [*words] == ["None"]:
        return None
    *others, kind = list_types(kind)
    for other in others:
        with contextlib.suppress(ValueError):
            return parse_value(other, words)
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and len({*inside} - {...}) == 1:
        return tuple(parse_value(inside[0], [word]) for word in words)
    if kind not in (bool, *NUMBERS, str, Path) and typing.get_origin(kind) is not Literal:
        raise ValueError("it can be set in Python only")
    (word,) = words
    if kind is bool or typing.get_origin(kind) is Literal:
        choices = {str(one): one for one in inside or (True, False)}
        if word not in choices:
            raise ValueError(f"{word!r} is {describe_others(map(repr, choices))}{suggest(word, choices)}")
        return choices[word]
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is not {NUMBERS[kind]}") from None


def list_types(kind: Any) -> Sequence[Any]:
    """The types of a union without None; any other type alone."""
    inside = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    return [one for one in inside if one is not type(None)]


def suggest(word: str, known: Iterable[str], dashes: str = "") -> str:
    """The most similar known name, as a question; empty if none is similar."""
    near = find_nearest(word, known)
    return "" if near is None else f" (did you mean {dashes + near!r}?)"


def format_help(syntax: Syntax) -> str:
    """The help text: usage with the main flags, these flags, then each group."""
    width = min(100, shutil.get_terminal_size().columns)
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    first = [
        format_flag(flag) if flag.default is MISSING else f"[{format_flag(flag)}]"
        for flag in syntax.flags
        if not flag.group
    ]
    more = ["[FLAGS]"] if len(first) < len(syntax.flags) else []
    lines = [fill(" ".join(["usage:", syntax.command, "[--help]", *first, *more]), subsequent_indent=" " * 7), ""]
    lines += ["\n\n".join(fill(paragraph) for paragraph in syntax.about.split("\n\n")), ""]
    for title, words in {"": "", **syntax.groups}.items():
        flags = [flag for flag in syntax.flags if flag.group == title]
        if flags and title:
            lines += ["", f"{title} options", *([fill(words)] if words else [])]
        for flag in flags:
            start = f"  {', '.join(flag.spellings) if flag.default is True else format_flag(flag):20} "
            lines.append(fill(describe(flag), initial_indent=start, subsequent_indent=" " * 23))
    return "\n".join(lines).replace("\xa0", " ")


def format_flag(flag: Flag) -> str:
    """A flag and its value, such as --epochs INT, with non-breaking spaces."""
    *others, kind = list_types(flag.type)
    kind = typing.get_args(kind)[0] if flag.several else kind
    value = "" if flag.positional or flag.type is bool else f" {METAVARS.get(kind, 'VALUE') if not others else 'VALUE'}"
    return f"{flag.word}{value}{' ...' if flag.several else ''}".replace(" ", "\xa0")


def describe(flag: Flag) -> str:
    """The description of a flag, its choices and its default."""
    (kind, *_), text, default = list_types(flag.type), flag.help, flag.default
    if typing.get_origin(kind) is Literal:
        choices = list_choices(map(str, typing.get_args(kind)))
        text = f"{text}; {choices}" if text else choices
    if isinstance(default, tuple):
        default = " ".join(map(str, default)) or "none"
    return text if flag.positional or "(default: " in text else f"{text} (default: {default})"


@functools.cache
def read_types(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass; to evaluate them takes long."""
    return typing.get_type_hints(kind)


@functools.cache
def read_docstrings(kind: Any) -> dict[str, str]:
    """The docstring of each field of a dataclass; none if its source is not in a file."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body if base is not object else (None,)
        except (OSError, TypeError, ValueError, SyntaxError):
            continue
        for line, below in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            match line, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                    found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found
