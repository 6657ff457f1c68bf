"""Formats runs and numbers for the terminal, tables and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from .. import methods
from ..errors import EquipoiseError
from ..methods.around import Around
from ..remedies import REMEDIES
from ..runs.plan import read_run
from ..runs.record import Result
from ..runs.settings import Machine, Run
from ..settings import flatten, to_plain

GREEK = {"alpha": "α", "epsilon": "ε", "lambda": "λ"}
"""the paper's letters for names of settings"""


def format_mean(values: Sequence[float | None]) -> str:
    """Mean ± sample deviation; without the deviation for one value."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{np.mean(known):.2f} ± {np.std(known, ddof=1):.2f}"


def is_known(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def format_number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals; a dash for None."""
    return f"{value:.{digits}f}".replace("-", "−") if is_known(value) else "–"


def format_signed(value: float) -> str:
    """A difference, always with a sign, so that colour is not the only cue."""
    digits = f"{abs(value):.2f}"
    return ("±" if float(digits) == 0 else "−" if value < 0 else "+") + digits


STEPS = {"step": "step", "classes": "classes", "top1": "all", "top5": "top 5", "base": "base", "new": "new"}
STEPS |= {"latest": "latest", "alpha": "α", "seconds": "seconds"}
"""the values shown for a step, and their headings"""
DIGITS = {"step": 0, "classes": 0, "alpha": 3, "seconds": 1}
"""decimals of numbers that do not have two"""


def format_steps(steps: Sequence[Mapping[str, Any]], names: Iterable[str] = STEPS) -> list[list[str]]:
    """The formatted values of the steps of a run, a row each; α stands with its step."""
    return [[format_number(step.get(name), DIGITS.get(name, 2)) for name in names] for step in steps]


def format_value(value: Any) -> str:
    """Format the value of a setting."""
    if isinstance(value, list):
        return " ".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_name(name: str) -> str:
    """The name of a flat setting, without the part of the run that holds it: `method.remedy.alpha_lr` is α lr."""
    name = (name.partition(".")[2] or name).removeprefix("host.").removeprefix("remedy.")
    return " ".join(GREEK.get(word, word) for word in name.replace(".", "_").split("_"))


def write_method(method: Mapping[str, Any]) -> str:
    """The name of a recorded method, and of its host if it has one: dde on podnet."""
    host = method.get("host")
    return f"{method['name']} on {write_method(host)}" if isinstance(host, dict) else str(method["name"])


def find_method_title(run: Mapping[str, Any]) -> str:
    """The title of the method, and of its host if it has one; the name of one that is not installed."""
    method, known = run["method"], methods.find_methods()
    name = str(method["name"])
    title = known[name].title if name in known else name
    host = method.get("host")
    return f"{title} on {find_method_title({'method': host})}" if isinstance(host, dict) else title


def find_remedy(method: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded method's remedy; for a method that wraps another, its host's."""
    if "remedy" not in method and isinstance(method.get("host"), dict):
        return find_remedy(method["host"])
    remedy = method.get("remedy")
    return remedy if isinstance(remedy, dict) else {"name": "standard"}


def format_remedy(run: Mapping[str, Any]) -> str:
    """The remedy with its settings that differ from the default: Balanced α 0.5."""
    remedy = find_remedy(run["method"])
    kind = REMEDIES.get(str(remedy.get("name")))
    default = flatten(to_plain(kind()) if kind else remedy)
    differing = [(name, value) for name, value in flatten(remedy).items() if default.get(name) != value]
    words = [f"{format_name(f'remedy.{name}')} {format_value(value)}" for name, value in differing]
    return " ".join([str(remedy.get("name")).replace("-", " ").capitalize(), *words])


def format_data(run: Mapping[str, Any], titles: Mapping[str, str] | None = None) -> str:
    """The data set of a run, by its title if there is one; of ImageNet-Subset with its definition."""
    name, subset = run["data"]["name"], run["data"].get("subset")
    name = (titles or {}).get(name, name)
    return f"{name} ({subset})" if subset else str(name)


def format_protocol(result: Result) -> str:
    """The steps in a few characters: 50 + 5 × 10."""
    base, steps = (int(result["run"]["protocol"].get(name) or 0) for name in ("base", "steps"))
    return f"{base} + {steps} × {(len(result['class_order']) - base) // steps}" if steps else str(base)


def find_default_settings(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The flat settings of the method, but not its remedy, and of the recipe, by default.

    None for a method or a data set that is not installed.
    """
    try:
        whole = read_run(dict(run))
        own = whole.method
        method = replace(type(own)(), host=type(own.host)()) if isinstance(own, Around) else type(own)()
        default = replace(whole, method=method)
        return list_own_settings(to_plain(replace(default, recipe=default.default_recipe)))
    except (EquipoiseError, TypeError):
        return None


def list_own_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """The flat settings of a run's method, but not its remedy, and of its recipe."""
    flat = flatten({"method": run["method"], "recipe": run["recipe"]})
    return {name: value for name, value in flat.items() if ".remedy." not in name and not name.endswith(".name")}


def describe_changes(result: Result) -> Iterator[str]:
    """The settings of a run that are not the default, besides its remedy."""
    run = result["run"]
    default = find_default_settings(run)
    if default is None:
        yield f"{run['recipe'].get('epochs')} epochs"
    else:
        own = list_own_settings(run)
        yield from (describe_change(format_name(k), v) for k, v in own.items() if v != default.get(k))
    default_run, here = flatten(to_plain(Run())), flatten(run)
    for name, form in PHRASES.items():
        if name in here and here[name] != default_run.get(name):
            yield form.format(format_value(here[name]))
    machine = find_machine(result)
    yield from (getattr(machine, name) for name in ("precision", "engine") if getattr(machine, name) != "auto")


PHRASES = {
    "protocol.order": "class order {}",
    "data.validation": "measured on {} of the training images, set aside",
    "protocol.select": "{} exemplars",
    "data.brightness": "brightness {}",
    "data.imbalance": "imbalance {}",
    "data.size": "{} pixels",
    "data.images_on": "images on the {}",
}
"""how changes of the protocol and the data are written"""


def describe_change(name: str, value: Any) -> str:
    """A setting that is not the default: `short last`, `8 epochs`, `no imprint`."""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{format_value(value)} {name}"


def find_machine(result: Result) -> Machine:
    """Precision and engine of a run on a GPU, if not the default."""
    machine = result["machine"]
    precision, engine = str(machine.get("precision", "auto")), machine.get("engine")
    if machine.get("device") != "cuda" or (precision, engine) in (("bf16", "fused"), ("bf16", None)):
        return Machine()
    return Machine(precision=precision, engine=engine or "auto")  # type: ignore[arg-type]


def describe_reused(reused: Mapping[str, Any] | None) -> str:
    """Which steps were reused; empty if none."""
    if not reused:
        return ""
    steps = ", ".join(map(str, reused["steps"]))
    word = "step" if len(reused["steps"]) == 1 else "steps"
    return f"{word} {steps} reused ({reused['seconds']:.1f} s when they were computed)"
