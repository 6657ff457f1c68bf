"""The command line of a run, and the name of its folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..data.datasets import COUNTS
from ..errors import UsageError
from ..method import Method
from ..methods.around import Around
from ..remedies import Remedy
from ..settings import digest, to_plain
from .settings import Data, Machine, Protocol, Run


def name_flag(name: str, metadata: Any) -> str | None:
    """The name of a field's flag; None if it has none."""
    flag = metadata.get("flag", name)
    return None if flag is False else str(flag).replace("_", "-")


NO_FLAGS_OF_A_HOST = (bool, str)
"""switches and choices of a method within another are set in Python, so that a run has at most 40 flags"""


def list_flags(value: Any, default: Any, prefix: str = "", without: tuple[type, ...] = ()) -> Iterator[str]:
    """The flags of all fields that differ from the default; those of a nested dataclass are prefixed by its field.

    Refuses fields that have no flag, as values of the types `without` have none. A remedy and a host have their own.
    """
    for f in fields(value):
        one, other = getattr(value, f.name), getattr(default, f.name)
        flag = name_flag(f.name, f.metadata)
        if one == other or isinstance(one, Remedy) or (isinstance(one, Method) and isinstance(value, Around)):
            continue
        if flag is None or isinstance(one, (Method, *without)):
            raise UsageError(f"{f.name.replace('_', ' ')} can be set in Python only, so that no command is this run")
        if is_dataclass(one) and not isinstance(one, type):
            yield from list_flags(one, other, f"{prefix}{flag}-")
        elif isinstance(other, bool):
            yield f"--{prefix}{flag}" if one else f"--no-{prefix}{flag}"
        else:
            yield f"--{prefix}{flag}"
            yield from map(str, one) if isinstance(one, tuple) else (str(one),)


def write_command(run: Run, machine: Machine = Machine()) -> str:
    """The command of a run: always the main flags, others only where they have an effect and differ from the default.

    Refuses a run with settings or data that only Python has.
    """
    recipe = run.default_recipe
    run = run.reset_unused(recipe)
    method, data, protocol = run.method, run.data, run.protocol
    half = len(COUNTS.get(data.name, ())) // 2
    words = [
        *("equipoise", "run", method.name),
        *(("--host", method.host.name) if isinstance(method, Around) else ()),
        *("--remedy", method.remedy.name),
        *list_flags(method.remedy, type(method.remedy)()),
        *list_flags(method, type(method)()),
        *(
            list_flags(method.host, type(method.host)(), without=NO_FLAGS_OF_A_HOST)
            if isinstance(method, Around)
            else ()
        ),
        *("--dataset", data.name),
        *list_flags(data, Data(data.name)),
        *(() if protocol.base in (None, half) else ("--base", str(protocol.base))),
        *(("--steps", str(protocol.steps)) if protocol.steps is not None else ()),
        *("--memory", protocol.memory),
        *list_flags(protocol, Protocol(protocol.base, protocol.steps, memory=protocol.memory)),
        *list_flags(machine, Machine()),
        *("--seed", str(run.seed)),
        *list_flags(run.recipe, recipe),
    ]
    return shlex.join(words)


def name_folder(run: Run, machine: Machine = Machine()) -> str:
    """A descriptive folder name, unique for the settings."""
    method, memory = run.method, run.protocol.memory
    name = f"{method.name}-{method.host.name}" if isinstance(method, Around) else method.name
    parts = [name, method.remedy.name, run.data.name, f"memory-{memory}", f"seed-{run.seed}"]
    if run.data.validation:
        parts.append(f"validation-{run.data.validation:g}")
    if run.data.imbalance != 1:
        parts.append(f"imbalance-{run.data.imbalance:g}")
    return "_".join(parts).replace(":", "-") + "_" + digest([to_plain(run), to_plain(machine)])[:6]
