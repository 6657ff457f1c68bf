"""Dataclasses to plain JSON and back, and the metadata of their fields."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from .errors import DataError, EquipoiseError, UsageError, check, check_choice, describe_others

T = TypeVar("T")

Kinds = Mapping[type, Callable[[str], type]]
"""for a base class, such as Method: a function from a name to a subclass"""


PLAIN: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float), type(None): type(None)}
"""the JSON types of simple field types"""
KINDS_IN_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}


def no_flag(default: Any, **bounds: float) -> Any:
    """A field without a flag, that can be set in Python only; a number may have bounds, as in `errors.check`."""
    return field(default=default, metadata={"flag": False} | ({"number": bounds} if bounds else {}))


def added(default: Any) -> Any:
    """A field that is younger than records: they name it only where it is not the default."""
    return field(default=default, metadata={"added": True})


def only_of(names: tuple[str, ...], default: Any = None, young: bool = False) -> Any:
    """A field that only values of these names have; others keep the default, and their records do not have it. A young
    one is `added` as well."""
    return field(default=default, metadata={"only": names} | ({"added": True} if young else {}))


def has_field(f: Field[Any], name: object) -> bool:
    """Whether a value of this name has a field."""
    return "only" not in f.metadata or name in f.metadata["only"]


def is_young(f: Field[Any], value: object) -> bool:
    """Whether a record leaves this value of a field out, since the field was `added` and has its default."""
    return "added" in f.metadata and value == f.default


def number(default: float, whole: bool = False, **bounds: float) -> Any:
    """A numeric field with bounds, as in `errors.check`."""
    return field(default=default, metadata={"number": {"whole": whole, **bounds}})


def check_fields(value: Any, prefix: str = "") -> None:
    """Refuse numbers out of bounds, and values that are not among a field's choices."""
    hints = _hints(typing.cast(Any, type(value)))
    for f in fields(value):
        one, name = getattr(value, f.name), prefix + f.name.replace("_", "-")
        if "number" in f.metadata:
            check(name, one, **f.metadata["number"])
        elif typing.get_origin(hints[f.name]) is typing.Literal:
            check_choice(name, one, *typing.get_args(hints[f.name]))


def spell_number(name: str, value: object, least: float, most: float) -> float:
    """A number, which may be given as text, within these bounds."""
    try:
        number: Any = float(value) if isinstance(value, str) else value
    except ValueError:
        raise UsageError(f"{name} must be a number, or two as in 0.1:1, not {value!r}") from None
    check(name, number, least=least, most=most)
    return float(number)  # 1 and 1.0 are one setting, and have one key


def spell_amount(name: str, value: object, least: float, most: float) -> float | str:
    """A count as a number, or a percentage as text such as 0.2%; 0, or within these bounds."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"{name} must be a count or a percentage such as 0.2%, not {text!r}") from None
    check(name, number, least=0, most=most)
    if number != 0:
        check(f"an {name} that is not 0", number, least=least)
    number += 0.0  # makes −0 a 0
    return repr(number).removesuffix(".0") + "%" if text.endswith("%") else number


def is_ramp(value: object) -> bool:
    """Whether a setting is a number that changes in the course of a training."""
    return isinstance(value, str) and ":" in value


def spell_ramp(name: str, value: object, spell: Callable[[str, object], float | str]) -> float | str:
    """A number that may change in the course of a training: one as `spell` has it, or two with a colon between them.

    It changes linearly, or with `:cosine` behind as half a cosine. It has one spelling, so that equal settings are
    equal.
    """
    if not is_ramp(value):
        return spell(name, value)
    first, last, *shape = (part.strip() for part in str(value).split(":"))
    ends = [str(spell(name, end)).removesuffix(".0") for end in (first, last)]
    ends = ["0" if end == "0%" else end for end in ends]  # the only percentage that is a count as well
    if shape not in ([], ["linear"], ["cosine"]):
        raise UsageError(f"{name} changes from one number to another as in 0.1:1 or 0.1:1:cosine, not as in {value!r}")
    if ends[0] == ends[1]:
        raise UsageError(f"{name} {value} does not change: use {ends[0]}")
    return ":".join([*ends, *shape]).removesuffix(":linear")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def name_class(cls: Any, known: Iterable[Any], what: str) -> None:
    """Set the default name of a class; refuse a user's class with the name of a known one.

    Records refer to classes by name, so names must be unique.
    """
    if "name" not in vars(cls):
        cls.name = cls.__name__.lower()
    own, inside = cls.__module__.split(".")[0], __name__.split(".")[0]
    if own != inside and cls.name and any(getattr(kind, "name", "") == cls.name for kind in known):
        raise UsageError(
            f"{cls.__qualname__} is named {cls.name!r} like an existing {what}: "
            "give it another name, such as name = 'mine'"
        )


def to_plain(value: Any) -> Any:
    """Convert a value to plain JSON: a dataclass becomes all its fields, with its `name` if it has one.

    Integers in float fields become floats. What JSON cannot represent becomes its repr.
    """
    if is_dataclass(value) and not isinstance(value, type):
        called = getattr(value, "name", None)
        name = {"name": called} if "name" not in list_fields(type(value)) and hasattr(value, "name") else {}
        named = [f for f in fields(value) if has_field(f, called) and not is_young(f, getattr(value, f.name))]
        own = {f.name: to_plain(getattr(value, f.name)) for f in named}
        floats = [f.name for f in named if f.type in ("float", float) and type(own[f.name]) is int]
        return name | own | {one: float(own[one]) for one in floats}
    if type(value) in PLAIN and (type(value) is not float or math.isfinite(value)):
        return value  # as most are, and JSON takes ten times as long
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [to_plain(one) for one in value]
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)


def from_plain(kind: type[T], plain: Any, kinds: Kinds) -> T:
    """The inverse of `to_plain`. All fields must be present, but for those that were `added`, and no others."""
    if not isinstance(plain, Mapping):
        raise DataError(f"not a {kind.__name__}: {str(plain)[:60]!r}")
    rest = dict(plain)
    if kind in kinds:
        if "name" not in rest:
            raise DataError(f"not a {kind.__name__} of this version of Equipoise: name is missing")
        try:
            kind = kinds[kind](str(rest.pop("name")))
        except EquipoiseError as error:
            raise DataError(f"not a {kind.__name__} of this version of Equipoise: {error}") from None
    known = [f for f in fields(typing.cast(Any, kind)) if has_field(f, rest.get("name"))]
    expected = {f.name for f in known if f.name in rest or not is_young(f, f.default)}
    hints, wrong = _hints(typing.cast(Any, kind)), set(rest) ^ expected
    if wrong:
        state = "unknown" if min(wrong) in rest else "missing"
        raise DataError(f"not a {kind.__name__} of this version of Equipoise: {min(wrong)} is {state}")
    values = {name: _read_value(name, hints[name], value, kinds) for name, value in rest.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise DataError(f"not a {kind.__name__} of this version of Equipoise: {error}") from None
    except EquipoiseError as error:
        raise DataError(f"not a {kind.__name__}: {error}") from None


def _read_value(name: str, hint: Any, value: Any, kinds: Kinds) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    inside = set(typing.get_args(hint)) if union else {hint}
    own: set[Any] = {kind for kind in inside if is_dataclass(kind)}
    absent = value is None and type(None) in inside
    if own and not absent and (isinstance(value, Mapping) or inside <= {*own, type(None)}):
        return from_plain(next(iter(own)), value, kinds)
    if inside <= PLAIN.keys() and not any(isinstance(value, PLAIN[kind]) for kind in inside):
        expected = " or ".join(sorted(KINDS_IN_WORDS[kind] for kind in inside))
        raise DataError(f"{name} is {value!r:.40}, where {expected} is expected")
    if inside <= {int, float} and isinstance(value, bool):
        raise DataError(f"{name} is {value!r}, where a number is expected")
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise DataError(f"{name} is {value!r:.40}, which is {describe_others(map(repr, typing.get_args(hint)))}")
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


@functools.cache
def list_fields(kind: Any) -> frozenset[str]:
    """The names of a dataclass's fields."""
    return frozenset(f.name for f in fields(kind))


def digest(plain: Any) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def list_changes(value: Any, default: Any, skip: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of the fields that differ from the default's, except those to skip."""
    for f in fields(value):
        one = getattr(value, f.name)
        if f.name not in skip and one != getattr(default, f.name):
            yield f.name, one


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"recipe": {"lr": 0.1}}` becomes `{"recipe.lr": 0.1}`."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
