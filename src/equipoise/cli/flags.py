"""The flags of a run: the fields of its dataclasses, with those of the named method and of the named remedy alone."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro

from .. import methods
from ..data.datasets import PLANNED, SHAPES
from ..errors import UsageError, unknown
from ..method import Method
from ..remedies import REMEDIES, Remedy
from ..runs.command import flag_of
from ..runs.settings import Data, Machine, Options, Protocol, Run
from ..runs.shared_steps import store_folder
from ..step import Finetune, Recipe, plan_for
from .words import parse, pop_flag

R = TypeVar("R", bound="Request")

GROUPS: dict[type, str] = {
    Method: "method",
    Remedy: "remedy",
    Data: "data",
    Protocol: "protocol",
    Recipe: "recipe",
    Machine: "machine",
    Options: "other",
}
"""dataclasses that the help shows as a group each, and its title"""
PLAIN = (*GROUPS, Run)
"""those whose fields are flags by their own names; of any other dataclass, flags begin with the name of its field"""
HINTS = {
    "base": "half of the classes",
    "steps": "5",
    "out": "runs/ and a name made of the settings",
    "data": "$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download",
    "store": "$EQUIPOISE_STORE or ~/.cache/equipoise/store",
    "workers": "4 for each GPU, else one for each core",
    "runs": "none",
}
"""what the help shows where the default is None"""
HELPS = {"store": "folder where steps are shared with other runs; `none` to share none"}
"""for a flag that is no value of its field"""


@dataclass(frozen=True)
class Request:
    """What `equipoise run METHOD` is given."""

    run: Run = field(default_factory=Run)
    """what determines the result"""
    machine: Machine = field(default_factory=Machine)
    """where it is computed"""
    options: Options = field(default_factory=Options)
    """how it is done"""
    out: Path | None = None
    """the run's folder"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into the run's folder"""


class Flag(NamedTuple):
    """One flag."""

    name: str
    """without dashes before it, and with underscores within"""
    group: type
    """the dataclass with which the help shows it"""
    type: Any
    default: Any
    help: str


def parse_request(argv: Sequence[str], verb: str, kind: type[R]) -> R:
    """What the words say: the method, then its flags. Only those of this method and of this remedy are known."""
    method = name_method(argv, verb)
    start = default_request(kind, method, pop_flag("--remedy", argv)[1], pop_flag("--dataset", argv)[1])
    # Those of the named remedy and data set are shown, but nothing else makes these the default.
    real = {"remedy": method().remedy.name, "dataset": Data().name}
    found = [flag._replace(default=real.get(flag.name, flag.default)) for flag in flags_of(start)]
    check_names(found, method)
    words = argv[1:]
    refuse_foreign(words, found, start.run.method)
    values = parse(build_dataclass(found, start), f"{verb} {method.name}", words)
    given = {flag.name: getattr(getattr(values, title_of(flag.group) or "", values), flag.name) for flag in found}
    refuse_milestones(words, given["schedule"])
    request: R = with_values(start, given)
    recipe = None if request.run.recipe == start.run.recipe else request.run.recipe
    return replace(request, run=replace(request.run, recipe=recipe))


def name_method(argv: Sequence[str], verb: str) -> type[Method]:
    """The method, which comes first; without one, --help lists those that there are."""
    known = methods.known()
    if argv and not argv[0].startswith("-"):
        if argv[0] not in known:
            raise unknown("method", argv[0], known)
        return known[argv[0]]
    if any(word in ("-h", "--help") for word in argv):
        lines = (f"  {name:12} {first_line(kind)}" for name, kind in sorted(known.items()))
        print(f"usage: equipoise {verb} METHOD [FLAGS]\n\n" + "\n".join(lines))
        print(
            f"\n  equipoise {verb} METHOD --help lists the flags of a method, with --remedy NAME those of a remedy too."
        )
        raise SystemExit(0)
    raise UsageError(f"name a method first: equipoise {verb} METHOD [FLAGS]; there is: {', '.join(sorted(known))}")


def default_request(kind: type[R], method: type[Method], remedy: str | None, dataset: str | None) -> R:
    """The request that no flag changes. The recipe depends on the images, so the help shows that of the data set."""
    chosen = method() if remedy is None else method().with_remedy(methods.remedy_named(remedy)())
    shapes = SHAPES | PLANNED
    data = Data() if dataset is None else Data(dataset)
    recipe = chosen.recipe(plan_for(shapes.get(data.name, shapes[Data().name])))
    return kind(run=Run(chosen, data, recipe=recipe))


# From dataclasses to flags -----------------------------------------------------------------------------------


def flags_of(value: Any, group: type | None = None, prefix: str = "") -> Iterator[Flag]:
    """The flags of a dataclass and of those within it. If a remedy replaces a method's fine-tuning, so its flags."""
    kind: type = type(value)
    hints, helps = typing.get_type_hints(kind), docstrings(kind)
    group = kind if group is None or isinstance(value, PLAIN) else group
    for field_name, name, one in flagged(value, prefix):
        if isinstance(one, Remedy):
            yield Flag("remedy", type(one), str, one.name, f"{helps[field_name]}: {', '.join(remedies_for(value))}")
        if is_dataclass(one):
            yield from flags_of(one, group, prefix if isinstance(one, PLAIN) else f"{name}_")
        else:
            yield Flag(name, group, hints[field_name], one, HELPS.get(name) or helps.get(field_name, ""))


def with_values(value: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass with the values of its flags in place of its own. Whatever it refuses is an error of ours."""
    changed = {}
    for field_name, name, one in flagged(value, prefix):
        if is_dataclass(one):
            changed[field_name] = with_values(one, given, prefix if isinstance(one, PLAIN) else f"{name}_")
        else:
            changed[field_name] = store_folder(given[name]) if name == "store" else given[name]
    return replace(value, **changed)


def flagged(value: Any, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """The fields of a dataclass that are flags or hold flags: the field's name, the flag's, and its value."""
    for f in fields(value):
        one, flag = getattr(value, f.name), flag_of(f.name, f.metadata)
        replaced = isinstance(one, Finetune) and isinstance(value, Method) and not value.remedy.keeps_finetuning
        host = isinstance(one, Method) and isinstance(value, Method)
        if flag is not None and not replaced and not host:
            yield f.name, f"{prefix}{flag}".replace("-", "_"), one


def build_dataclass(found: Sequence[Flag], start: Request) -> type[Any]:
    """A dataclass with these flags, for tyro: one within for each group."""
    groups: dict[type, list[Any]] = {}
    for flag in found:
        groups.setdefault(flag.group, []).append((flag.name, annotate(flag), field(default=flag.default)))
    parts, own = [], []
    for kind, members in groups.items():
        if (title := title_of(kind)) is None:
            own += members
        else:
            part = make_dataclass(title, members)
            words = "" if issubclass(kind, Method) else first_line(kind)
            parts.append((title, Annotated[part, tyro.conf.arg(help=words)], field(default_factory=part)))
    made = make_dataclass("Flags", [*parts, *own])
    made.__doc__ = inspect.getdoc(type(start.run.method))
    return made


def title_of(kind: type) -> str | None:
    """What the help calls a group of flags; None for those that stand before all groups."""
    return next((title for group, title in GROUPS.items() if issubclass(kind, group)), None)


def annotate(flag: Flag) -> Any:
    """The type of a flag, and how tyro shows it."""
    kind: Any = str | None if flag.name == "store" else flag.type
    if flag.default is not None or flag.name not in HINTS:
        return Annotated[kind, tyro.conf.arg(help=flag.help)]
    metavar = {int | None: "INT", Path | None: "PATH"}.get(kind, "VALUE")
    return Annotated[
        kind, tyro.conf.arg(help=flag.help, help_behavior_hint=f"(default: {HINTS[flag.name]})", metavar=metavar)
    ]


def first_line(kind: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


@functools.cache
def docstrings(kind: type) -> dict[str, str]:
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


# What is refused ---------------------------------------------------------------------------------------------


def remedies_for(method: Method) -> list[str]:
    """The remedies that a method goes with."""
    return [name for name in REMEDIES if method.remedies is None or name in (*method.remedies, "standard")]


def check_names(found: Sequence[Flag], method: type[Method]) -> None:
    """Refuse a method of which a field has the flag of another setting."""
    names = [flag.name for flag in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"method {method.name} has a field {name}, which is a flag of every run: rename the field")


def refuse_foreign(words: Sequence[str], found: Sequence[Flag], method: Method) -> None:
    """Refuse the flags of another method or remedy, saying whose they are, and those that nothing has."""
    own = {flag.name for flag in found} | {f"no_{flag.name}" for flag in found if flag.type is bool}
    for word in words:
        name = word.split("=")[0].removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name in own or name in ("help", ""):
            continue
        plain, flag = name.removeprefix("no_"), word.split("=")[0]
        for axis, here, others in (
            ("--remedy ", method.remedy.name, {n: method.with_remedy(REMEDIES[n]()) for n in remedies_for(method)}),
            ("the method ", method.name, {n: kind() for n, kind in sorted(methods.built_in().items())}),
        ):
            owners = [n for n, other in others.items() if plain in {one.name for one in flags_of(other)}]
            if owners:
                raise UsageError(f"{flag} belongs to {axis}{' or '.join(owners)}, not to {axis}{here}")
        raise unknown("flag", flag, [f"--{one.replace('_', '-')}" for one in own])


def refuse_milestones(words: Sequence[str], schedule: str) -> None:
    """Refuse what only a schedule with milestones has, where there is another."""
    for flag in ("--milestones", "--decay"):
        if schedule != "steps" and any(word.split("=")[0] == flag for word in words):
            other = f"{flag} belongs to --schedule steps, not to --schedule {schedule}"
            raise UsageError(f"{other}: add --schedule steps, or leave {flag} out")
