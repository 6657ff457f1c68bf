"""What a run is given: the fields of its dataclasses, with those of the named method and of the named remedy alone."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .. import methods
from ..data.datasets import PLANNED, SHAPES
from ..data.memory import EVERYTHING
from ..errors import UsageError, make_unknown_error
from ..method import Method
from ..remedies import REMEDIES, Remedy
from ..runs.command import name_flag
from ..runs.settings import Data, Machine, Options, Protocol, Run
from ..runs.shared_steps import parse_store
from ..step import Finetune, Recipe, plan_for
from .flags import Flag, Syntax, docstrings, parse
from .words import pop_flag

R = TypeVar("R", bound="Request")


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
    """the run's folder (default: runs/ and a name made of the settings)"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into the run's folder"""


FIRST = ("dataset", "remedy", "steps", "memory", "out")
"""the flags that nearly every run needs, which the help shows before all groups"""
GROUPS: dict[str, tuple[type, ...]] = {
    "method": (Method,),
    "remedy": (Remedy,),
    "protocol": (Protocol, Data, Run),
    "recipe": (Recipe,),
    "machine": (Machine, Options, Request),
}
"""the groups of the help, and the dataclasses whose fields are flags of them by their own names

The flags of any other dataclass begin with the name of the field that holds it, and are in the group of that field.
"""
NAMED = tuple(kind for kinds in GROUPS.values() for kind in kinds)
UNSET = {
    "base": "half of the classes",
    "steps": "5",
    "data": "$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download",
    "store": "$EQUIPOISE_STORE or ~/.cache/equipoise/store",
}
"""what the help shows where the default of a flag is None, unless its docstring says it"""
HELPS = {"store": "folder where steps are shared with other runs; `none` to share none"}
"""for a flag that is no value of its field"""


def parse_request(argv: Sequence[str], verb: str, kind: type[R]) -> R:
    """What the words say: the method, then its flags. Only those of this method and of this remedy are known."""
    method = name_method(argv, verb)
    start = default_request(kind, method, pop_flag("--remedy", argv)[1], pop_flag("--dataset", argv)[1])
    # Those of the named remedy and data set are shown, but nothing else makes these the default.
    real = {"remedy": method().remedy.name, "dataset": Data().name}
    found = [flag._replace(default=real.get(flag.name, flag.default)) for flag in flags_of(start)]
    check_names(found, method)
    refuse_foreign(argv[1:], found, start.run.method)
    given = parse(syntax_of(found, start, verb), argv[1:])
    values = {flag.name: flag.default for flag in found} | given
    refuse_milestones(given, values["schedule"])
    request: R = with_values(start, values)
    recipe = None if request.run.recipe == start.run.recipe else request.run.recipe
    return replace(request, run=replace(request.run, recipe=recipe))


def name_method(argv: Sequence[str], verb: str) -> type[Method]:
    """The method, which comes first; without one, --help lists those that there are."""
    known = methods.find_methods()
    if argv and not argv[0].startswith("-"):
        if argv[0] not in known:
            raise make_unknown_error("method", argv[0], known)
        return known[argv[0]]
    if any(word in ("-h", "--help") for word in argv):
        lines = [f"  {name:12} {first_line(kind)}" for name, kind in sorted(known.items())]
        more = f"  equipoise {verb} METHOD --help lists a method's flags, with --remedy NAME those of a remedy too."
        print("\n".join([f"usage: equipoise {verb} METHOD [FLAGS]", "", *lines, "", more]))
        raise SystemExit(0)
    raise UsageError(f"name a method first: equipoise {verb} METHOD [FLAGS]; there is: {', '.join(sorted(known))}")


def default_request(kind: type[R], method: type[Method], remedy: str | None, dataset: str | None) -> R:
    """The request that no flag changes. The recipe depends on the images, so the help shows that of the data set."""
    chosen = method() if remedy is None else method().with_remedy(methods.find_remedy(remedy)())
    shapes = SHAPES | PLANNED
    data = Data() if dataset is None else Data(dataset)
    recipe = chosen.recipe(plan_for(shapes.get(data.name, shapes[Data().name])))
    protocol = Protocol(memory="all") if chosen.least_memory == EVERYTHING else Protocol()
    return kind(run=Run(chosen, data, protocol, recipe))


def syntax_of(found: Sequence[Flag], start: Request, verb: str) -> Syntax:
    """What a method's flags are, in the order in which the help shows them."""
    method = start.run.method
    first = sorted((flag for flag in found if flag.name in FIRST), key=lambda flag: FIRST.index(flag.name))
    flags = [flag._replace(group="") for flag in first] + [flag for flag in found if flag.name not in FIRST]
    groups = {title: first_line(kinds[0]) for title, kinds in GROUPS.items()}
    groups |= {"method": "", "remedy": first_line(type(method.remedy))}
    return Syntax(f"equipoise {verb} {method.name}", inspect.getdoc(type(method)) or "", flags, groups)


def first_line(kind: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


# From dataclasses to flags -----------------------------------------------------------------------------------


def flags_of(value: Any, group: str = "", prefix: str = "") -> Iterator[Flag]:
    """The flags of a dataclass and of those within it. If a remedy replaces a method's fine-tuning, so its flags."""
    kind: type = type(value)
    hints, helps = typing.get_type_hints(kind), docstrings(kind)
    group = next((title for title, kinds in GROUPS.items() if isinstance(value, kinds)), group)
    for field_name, name, one in flagged(value, prefix):
        if isinstance(one, Remedy):
            yield Flag("remedy", str, one.name, f"{helps[field_name]}: {', '.join(remedies_for(value))}")
        if is_dataclass(one):
            yield from flags_of(one, group, prefix if isinstance(one, NAMED) else f"{name}_")
        else:
            words = HELPS.get(name) or helps.get(field_name, "")
            default = f" (default: {UNSET[name]})" if one is None and name in UNSET else ""
            yield Flag(name, hints[field_name], one, words + default, group)


def with_values(value: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass with the values of its flags in place of its own. Whatever it refuses is an error of ours."""
    changed = {}
    for field_name, name, one in flagged(value, prefix):
        if is_dataclass(one):
            changed[field_name] = with_values(one, given, prefix if isinstance(one, NAMED) else f"{name}_")
        elif name == "store":
            changed[field_name] = parse_store(None if given[name] is None else str(given[name]))
        else:
            changed[field_name] = given[name]
    return replace(value, **changed)


def flagged(value: Any, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """The fields of a dataclass that are flags or hold flags: the field's name, the flag's, and its value."""
    for f in fields(value):
        one, flag = getattr(value, f.name), name_flag(f.name, f.metadata)
        replaced = isinstance(one, Finetune) and isinstance(value, Method) and not value.remedy.keeps_finetuning
        host = isinstance(one, Method) and isinstance(value, Method)
        if flag is not None and not replaced and not host:
            yield f.name, f"{prefix}{flag}".replace("-", "_"), one


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
    """Refuse the flags of another method or remedy, saying whose they are."""
    own = {spelling for flag in found for spelling in flag.spellings}
    for word in words:
        flag = word.split("=")[0]
        if not flag.startswith("--") or flag.replace("_", "-") in own:
            continue
        plain = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
        for axis, here, others in (
            ("--remedy ", method.remedy.name, {n: method.with_remedy(REMEDIES[n]()) for n in remedies_for(method)}),
            ("the method ", method.name, {n: kind() for n, kind in sorted(methods.find_built_in().items())}),
        ):
            owners = [n for n, other in others.items() if plain in {one.name for one in flags_of(other)}]
            if owners:
                raise UsageError(f"{flag} belongs to {axis}{' or '.join(owners)}, not to {axis}{here}")


def refuse_milestones(given: Collection[str], schedule: str) -> None:
    """Refuse what only a schedule with milestones has, where there is another."""
    for name in ("milestones", "decay"):
        if name in given and schedule != "steps":
            other = f"--{name} belongs to --schedule steps, not to --schedule {schedule}"
            raise UsageError(f"{other}: add --schedule steps, or leave --{name} out")
