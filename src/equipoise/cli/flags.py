"""Flags: words become values of a field's type, and the help is made of the field's docstring.

Nothing here knows any verb, and nothing takes time to import.
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

from ..errors import UsageError, find_nearest

BEGINS_FLAG = re.compile(r"--|-(?!inf$|nan$)[A-Za-z]").match
"""whether a word is a flag, which a negative number is not"""
NUMBERS = {int: "a whole number", float: "a number"}
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH"}
"""what the help calls a value of a type; VALUE for every other"""


class Flag(NamedTuple):
    """A flag; or what is `positional`, a word after no flag."""

    name: str
    """without dashes before it, and with underscores within"""
    type: Any
    default: Any
    """MISSING for what must be given"""
    help: str
    """what it is for, with the words for its default if there are better ones"""
    group: str = ""
    """the title under which the help shows it; none for what is shown first"""
    positional: bool = False

    @property
    def word(self) -> str:
        """As it is typed."""
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether it takes any number of values."""
        return typing.get_origin(alternatives(self.type)[0]) is tuple

    @property
    def spellings(self) -> list[str]:
        """As it is typed, and what turns off a switch."""
        return [self.word, f"--no-{self.word[2:]}"] if self.type is bool else [self.word]


class Syntax(NamedTuple):
    """All that can stand behind a command."""

    command: str
    """such as `equipoise run lucir`"""
    about: str
    """what it does"""
    flags: Sequence[Flag]
    groups: Mapping[str, str] = {}
    """the groups of flags in their order: titles, and what there is to say of each"""

    def mistake(self, what: str) -> UsageError:
        """The error for words that do not fit. It names the page that does help."""
        return UsageError(f"{what}; {self.command} --help lists all flags")


def parse_arguments(kind: Any, verb: str, argv: Sequence[str]) -> Any:
    """The dataclass that the words describe."""
    hints, helps = typing.get_type_hints(kind), docstrings(kind)
    flags = [
        Flag(f.name, hints[f.name], f.default, helps[f.name], positional=f.default in (MISSING, ()))
        for f in fields(kind)
    ]
    return kind(**parse(Syntax(f"equipoise {verb}", inspect.getdoc(kind) or "", flags), argv))


def parse(syntax: Syntax, argv: Sequence[str]) -> dict[str, Any]:
    """The values that are given, by the names of their flags; of a flag given twice, the last. --help ends it."""
    if "--help" in argv or "-h" in argv:
        print(help_page(syntax))
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
            raise syntax.mistake(f"unknown flag {typed!r}{suggest(name.lstrip('-'), known, '--')}")
        flag = known[name]
        if flag.type is bool:
            if equals:
                raise syntax.mistake(f"{typed} takes no value")
            given[flag.name] = f"--{name}" == flag.word
            continue
        values = [value] if equals else list(itertools.takewhile(lambda word: not BEGINS_FLAG(word), words))
        values = values if flag.several else values[:1]
        words = words if equals else words[len(values) :]
        if not values and not flag.several:
            raise syntax.mistake(f"{typed} needs a value")
        given[flag.name] = read(syntax, flag, values)
    for flag in syntax.flags:
        if flag.positional:
            values, rest = (rest, []) if flag.several else (rest[:1], rest[1:])
            if values:
                given[flag.name] = read(syntax, flag, values)
            elif flag.default is MISSING:
                raise syntax.mistake(f"say which {flag.help}")
    if rest:
        meant = f" (did you mean '--{rest[0]}'?)" if rest[0] in known else ""
        raise syntax.mistake(f"unexpected word {rest[0]!r}{meant}")
    return given


def read(syntax: Syntax, flag: Flag, words: Sequence[str]) -> Any:
    """The value of a flag."""
    try:
        return value_of(flag.type, words)
    except ValueError as error:
        raise syntax.mistake(f"{flag.word}: {error}") from None


def value_of(kind: Any, words: Sequence[str]) -> Any:
    """The value of a type for which words stand; a ValueError says why they stand for none."""
    if type(None) in typing.get_args(kind) and [*words] == ["None"]:
        return None
    *others, kind = alternatives(kind)
    for other in others:
        with contextlib.suppress(ValueError):
            return value_of(other, words)
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and len({*inside} - {...}) == 1:
        return tuple(value_of(inside[0], [word]) for word in words)
    if kind not in (bool, *NUMBERS, str, Path) and typing.get_origin(kind) is not Literal:
        raise ValueError("it can be set in Python only")
    (word,) = words
    if kind is bool or typing.get_origin(kind) is Literal:
        choices = {str(one): one for one in inside or (True, False)}
        if word not in choices:
            raise ValueError(f"{word!r} is none of {', '.join(map(repr, choices))}{suggest(word, choices)}")
        return choices[word]
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is not {NUMBERS[kind]}") from None


def alternatives(kind: Any) -> Sequence[Any]:
    """The types of a union but None; any other type alone."""
    inside = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    return [one for one in inside if one is not type(None)]


def suggest(word: str, known: Iterable[str], dashes: str = "") -> str:
    """The nearest of what is known, as a question; nothing if none is near."""
    near = find_nearest(word, known)
    return "" if near is None else f" (did you mean {dashes + near!r}?)"


def help_page(syntax: Syntax) -> str:
    """The flags of no group first, which the first line names too; then each group."""
    width = min(100, shutil.get_terminal_size().columns)
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    first = [form(flag) if flag.default is MISSING else f"[{form(flag)}]" for flag in syntax.flags if not flag.group]
    more = ["[FLAGS]"] if len(first) < len(syntax.flags) else []
    lines = [fill(" ".join(["usage:", syntax.command, "[--help]", *first, *more]), subsequent_indent=" " * 7), ""]
    lines += ["\n\n".join(fill(paragraph) for paragraph in syntax.about.split("\n\n")), ""]
    for title, words in {"": "", **syntax.groups}.items():
        flags = [flag for flag in syntax.flags if flag.group == title]
        if flags and title:
            lines += ["", f"{title} options", *([fill(words)] if words else [])]
        for flag in flags:
            start = f"  {', '.join(flag.spellings) if flag.default is True else form(flag):20} "
            lines.append(fill(describe(flag), initial_indent=start, subsequent_indent=" " * 23))
    return "\n".join(lines).replace("\xa0", " ")


def form(flag: Flag) -> str:
    """A flag and what follows it, such as --epochs INT, with spaces at which no line is broken."""
    *others, kind = alternatives(flag.type)
    kind = typing.get_args(kind)[0] if flag.several else kind
    value = "" if flag.positional or flag.type is bool else f" {METAVARS.get(kind, 'VALUE') if not others else 'VALUE'}"
    return f"{flag.word}{value}{' ...' if flag.several else ''}".replace(" ", "\xa0")


def describe(flag: Flag) -> str:
    """What a flag is for, its values where they are few, and its default."""
    (kind, *_), text, default = alternatives(flag.type), flag.help, flag.default
    if typing.get_origin(kind) is Literal:
        *most, last = map(str, typing.get_args(kind))
        choices = f"{', '.join(most)} or {last}" if most else last
        text = f"{text}; {choices}" if text else choices
    if isinstance(default, tuple):
        default = " ".join(map(str, default)) or "none"
    return text if flag.positional or "(default: " in text else f"{text} (default: {default})"


@functools.cache
def docstrings(kind: Any) -> dict[str, str]:
    """The text below each field of a dataclass; nothing where its source is not in a file."""
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
