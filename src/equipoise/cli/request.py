"""Parses the command line of a run: its flags are the fields of its dataclasses, its method and its remedy."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .. import methods
from ..data.datasets import SHAPES
from ..data.folders import NAMES, find_shape
from ..errors import UsageError, make_unknown_error
from ..method import Method
from ..methods.around import Around
from ..remedies import REMEDIES, Remedy
from ..runs.command import NO_FLAGS_OF_A_HOST, name_flag
from ..runs.settings import Data, Machine, Options, Protocol, Run
from ..runs.shared_steps import parse_store
from ..settings import has_field
from ..step import Finetune, Recipe, plan_for
from .flags import Flag, Syntax, parse, read_docstrings, read_types
from .words import pop_flag

R = TypeVar("R", bound="Request")


@dataclass(frozen=True)
class Request:
    """The settings of `equipoise run METHOD`."""

    run: Run = field(default_factory=Run)
    """settings that determine the result"""
    machine: Machine = field(default_factory=Machine)
    """where it is computed"""
    options: Options = field(default_factory=Options)
    """how it is done"""
    out: Path | None = None
    """the run's folder (default: runs/ and a name made of the settings)"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into the run's folder"""


FIRST = ("dataset", "host", "remedy", "steps", "memory", "out")
"""the flags that most runs need; the help shows them first"""
GROUPS: dict[str, tuple[type, ...]] = {
    "method": (Method,),
    "remedy": (Remedy,),
    "protocol": (Protocol, Data, Run),
    "recipe": (Recipe,),
    "machine": (Machine, Options, Request),
}
"""the groups of the help, and the dataclasses whose fields are flags in them, named like the fields

The flags of any other dataclass have the name of the field that holds it as a prefix, and are in the group of that
field.
"""
NAMED = tuple(kind for kinds in GROUPS.values() for kind in kinds)
UNSET = {
    "base": "half of the classes",
    "steps": "5",
    "data": "$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download",
    "store": "$EQUIPOISE_STORE or ~/.cache/equipoise/store",
}
"""what the help shows for a default of None, if the docstring does not say it"""
HELPS = {"store": "folder where steps are shared with other runs; `none` to share none"}
"""descriptions of flags whose value is not that of the field"""


def parse_request(argv: Sequence[str], verb: str, kind: type[R]) -> R:
    """Parse the method, then its flags. Only the flags of this method and its remedy are accepted."""
    method = choose_method(argv, verb)
    chosen = choose_parts(method(), pop_flag("--host", argv)[1], pop_flag("--remedy", argv)[1])
    start = make_default_request(kind, chosen, argv)
    # The help shows the flags of what is named, but as defaults it still shows the real ones.
    real = {"remedy": method().remedy.name, "dataset": Data().name}
    real |= {flag.name: flag.default for flag in collect_flags(method()) if flag.name == "host"}
    found = [flag._replace(default=real.get(flag.name, flag.default)) for flag in collect_flags(start)]
    check_names(found, method)
    refuse_foreign_flags(argv[1:], found, start.run.method)
    given = parse(make_syntax(found, start, verb), argv[1:])
    values = {flag.name: flag.default for flag in found} | given
    refuse_milestones(given, values["schedule"])
    request: R = replace_values(start, values)
    recipe = None if request.run.recipe == start.run.recipe else request.run.recipe
    return replace(request, run=replace(request.run, recipe=recipe))


def choose_method(argv: Sequence[str], verb: str) -> type[Method]:
    """The method, which is the first word; without it, --help lists all methods."""
    known = methods.find_methods()
    if argv and not argv[0].startswith("-"):
        if argv[0] not in known:
            raise make_unknown_error("method", argv[0], known)
        return known[argv[0]]
    if any(word in ("-h", "--help") for word in argv):
        lines = [f"  {name:12} {get_summary(kind)}" for name, kind in sorted(known.items())]
        more = f"  equipoise {verb} METHOD --help lists a method's flags, with --remedy NAME those of a remedy too."
        print("\n".join([f"usage: equipoise {verb} METHOD [FLAGS]", "", *lines, "", more]))
        raise SystemExit(0)
    raise UsageError(f"name a method first: equipoise {verb} METHOD [FLAGS]; choose from {', '.join(sorted(known))}")


def choose_parts(method: Method, host: str | None, remedy: str | None) -> Method:
    """The method around the host and with the remedy of these names, if they are given."""
    if host is not None and isinstance(method, Around):
        method = replace(method, host=methods.find_method(host)())
        method.check_host()
    return method if remedy is None else method.with_remedy(methods.find_remedy(remedy)())


def make_default_request(kind: type[R], chosen: Method, argv: Sequence[str]) -> R:
    """The request without any flags. The default recipe depends on the size of the images, so on the data set."""
    name, folder, size = (pop_flag(flag, argv)[1] for flag in ("--dataset", "--data", "--size"))
    data = Data() if name is None else Data(name)
    shape = SHAPES.get(data.name, SHAPES[Data().name])
    if data.name in NAMES:
        side = int(size) if size and size.isdecimal() else None  # what is no number is refused later
        shape = find_shape(data.name, Path(folder) if folder else None, side)
        data = replace(data, size=shape[1] if shape[1] == shape[2] else None)
    return kind(run=Run(chosen, data, Protocol(memory=chosen.default_memory), chosen.recipe(plan_for(shape))))


def make_syntax(found: Sequence[Flag], start: Request, verb: str) -> Syntax:
    """The syntax of a method's command, with its flags in the order of the help."""
    method = start.run.method
    first = sorted((flag for flag in found if flag.name in FIRST), key=lambda flag: FIRST.index(flag.name))
    flags = [flag._replace(group="") for flag in first] + [flag for flag in found if flag.name not in FIRST]
    groups = {title: get_summary(kinds[0]) for title, kinds in GROUPS.items()}
    groups |= {"method": "", "remedy": get_summary(type(method.remedy))}
    return Syntax(f"equipoise {verb} {method.name}", inspect.getdoc(type(method)) or "", flags, groups)


def get_summary(kind: type) -> str:
    """The first paragraph of a docstring, on one line."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


# From dataclasses to flags -----------------------------------------------------------------------------------


def collect_flags(value: Any, group: str = "", prefix: str = "", around: Around | None = None) -> Iterator[Flag]:
    """The flags of a dataclass and of nested dataclasses; without those of a fine-tuning that the remedy replaces.

    Those of the host of a method have no prefix: they are flags of the method that is `around` it.
    """
    kind: type = type(value)
    hints, helps = read_types(kind), read_docstrings(kind)
    group = next((title for title, kinds in GROUPS.items() if isinstance(value, kinds)), group)
    for field_name, name, one in list_fields(value, prefix, around is not None):
        if isinstance(one, Remedy):
            yield Flag("remedy", str, one.name, f"{helps[field_name]}: {', '.join(list_remedies(around or value))}")
        inside = value if isinstance(one, Method) and isinstance(value, Around) else None
        if inside is not None:
            yield Flag("host", str, one.name, f"{helps[field_name]}: {', '.join(list_hosts(inside))}", group)
        if is_dataclass(one):
            yield from collect_flags(one, group, prefix if isinstance(one, NAMED) else f"{name}_", inside)
        else:
            words = HELPS.get(name) or helps.get(field_name, "")
            default = f" (default: {UNSET[name]})" if one is None and name in UNSET else ""
            yield Flag(name, hints[field_name], one, words + default, group)


def replace_values(value: Any, given: Mapping[str, Any], prefix: str = "", hosted: bool = False) -> Any:
    """A copy of a dataclass with the values of its flags, which the dataclass checks; `hosted` for a method's host."""
    changed = {}
    for field_name, name, one in list_fields(value, prefix, hosted):
        if is_dataclass(one):
            inside = isinstance(value, Around) and isinstance(one, Method)
            changed[field_name] = replace_values(one, given, prefix if isinstance(one, NAMED) else f"{name}_", inside)
        elif name == "store":
            changed[field_name] = parse_store(None if given[name] is None else str(given[name]))
        else:
            changed[field_name] = given[name]
    return replace(value, **changed)


def list_fields(value: Any, prefix: str, hosted: bool = False) -> Iterator[tuple[str, str, Any]]:
    """The fields of a dataclass that are flags or hold flags: the field's name, the flag's name and the value."""
    for f in fields(value):
        one, flag = getattr(value, f.name), name_flag(f.name, f.metadata)
        replaced = isinstance(one, Finetune) and isinstance(value, Method) and not value.remedy.keeps_finetuning
        held = isinstance(one, Method) and isinstance(value, Method) and not isinstance(value, Around)
        hidden = hosted and isinstance(one, NO_FLAGS_OF_A_HOST)
        elsewhere = not has_field(f, getattr(value, "name", None))
        if flag is not None and not replaced and not held and not hidden and not elsewhere:
            yield f.name, f"{prefix}{flag}".replace("-", "_"), one


# What is refused ---------------------------------------------------------------------------------------------


def list_remedies(method: Method) -> list[str]:
    """The names of the remedies that a method supports, and its host if it has one."""
    known = list_remedies(method.host) if isinstance(method, Around) else list(REMEDIES)
    return [name for name in known if method.remedies is None or name in (*method.remedies, "standard")]


def list_hosts(method: Around) -> list[str]:
    """The names of the methods that a method wraps."""
    return list(method.hosts or sorted(methods.find_built_in()))


def check_names(found: Sequence[Flag], method: type[Method]) -> None:
    """Refuse a method with a field whose flag is already taken."""
    names = [flag.name for flag in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"method {method.name} has a field {name}, which is a flag of every run: rename the field")


def refuse_foreign_flags(words: Sequence[str], found: Sequence[Flag], method: Method) -> None:
    """Refuse the flags of other methods and remedies; the error names their owners."""
    own = {spelling for flag in found for spelling in flag.spellings}
    for word in words:
        flag = word.split("=")[0]
        if not flag.startswith("--") or flag.replace("_", "-") in own:
            continue
        plain = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
        for f in fields(Data):
            if f.name == plain and "only" in f.metadata:
                raise UsageError(f"{flag} belongs to --dataset {' or '.join(f.metadata['only'])}")
        hosts = list_hosts(method) if isinstance(method, Around) else []
        for axis, here, others in (
            ("--remedy ", method.remedy.name, {n: method.with_remedy(REMEDIES[n]()) for n in list_remedies(method)}),
            ("--host ", getattr(method, "host", method).name, {n: choose_parts(method, n, None) for n in hosts}),
            ("the method ", method.name, {n: kind() for n, kind in sorted(methods.find_built_in().items())}),
        ):
            owners = [n for n, other in others.items() if plain in name_own_flags(other, axis)]
            if owners:
                raise UsageError(f"{flag} belongs to {axis}{' or '.join(owners)}, not to {axis}{here}")


def name_own_flags(method: Method, axis: str) -> set[str]:
    """The names of the flags of a method; where methods are compared, without those of a host."""
    own = {flag.name for flag in collect_flags(method)}
    hosted = isinstance(method, Around) and axis == "the method "
    return own - {flag.name for flag in collect_flags(getattr(method, "host", method))} if hosted else own


def refuse_milestones(given: Collection[str], schedule: str) -> None:
    """Refuse --milestones and --decay unless the schedule has milestones."""
    for name in ("milestones", "decay"):
        if name in given and schedule != "steps":
            other = f"--{name} belongs to --schedule steps, not to --schedule {schedule}"
            raise UsageError(f"{other}: add --schedule steps, or leave --{name} out")
