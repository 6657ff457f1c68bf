"""Results for people: tables in the terminal, and the accuracies of several seeds as mean ± deviation."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from .. import methods
from ..errors import UsageError
from ..learner.record import digest, usual
from ..method import Method, Recipe
from ..runs.folder import Result, check_there, flat_settings, read_result

SAID = {"method", "loss", "alpha", "epsilon", "alpha_lr", "dataset", "base", "steps", "increment", "memory", "epochs"}
SAID |= {"seed", "data", "normalise", "pad", "flip", "validation"}
"""settings that a table shows in its own way, or that follow from others"""


DRAWN = 24
"""settings that a picture has room for"""


def for_output() -> Console:
    """Standard output: as wide as the terminal, or wide enough for a table in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 160)


def load_results(folders: Sequence[Path]) -> list[Result]:
    """The results of these folders of runs; a folder that holds such folders stands for all of them."""
    found: dict[Path, None] = {}  # each run once, however often it is named
    for folder in folders:
        check_there(folder, "the folder of a run, or one that holds such folders")
        inside = sorted(path.parent for path in folder.rglob("result.json"))
        found |= dict.fromkeys(path.resolve() for path in inside or [folder])
    return [read_result(path) for path in found]


def grouped(results: Sequence[Result]) -> list[list[Result]]:
    """Results that differ in the seed only, together, one of each seed; in the order in which they first come.

    Other kernels of a GPU are another setting; a record that knows of none, as all was reused, goes with the first.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        same = {k: v for k, v in result["run"].items() if k != "seed"}
        alike.setdefault(json.dumps(same, sort_keys=True), []).append(result)
    groups: list[list[Result]] = []
    for group in alike.values():
        first = next(filter(None, map(engine_of, group)), None)
        by_engine: dict[str | None, dict[int, Result]] = {}
        for result in group:
            by_engine.setdefault(engine_of(result) or first, {}).setdefault(result["run"]["seed"], result)
        groups += [list(by_seed.values()) for by_seed in by_engine.values()]
    return groups


def engine_of(result: Result) -> str | None:
    """The kernels of a GPU that a run was trained by."""
    return result.get("hardware", {}).get("engine") if result["run"].get("device") == "cuda" else None


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Mean ± sample deviation; without the deviation for one value."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{np.mean(known):.2f} ± {np.std(known, ddof=1):.2f}"


def label(result: Result) -> str:
    """A run's loss in a few words, with what was set by hand."""
    s = result["run"]
    more = {"balanced": ("alpha", 1.0, "α"), "relaxed": ("epsilon", "0.2%", "ε"), "meta": ("alpha_lr", 10.0, "α lr")}
    name, default, letter = more.get(s["loss"], ("", None, ""))
    value = s.get(name, default)
    return str(s["loss"]).capitalize() + ("" if value == default else f" {letter} {value}")


def remedy(settings: dict[str, Any]) -> str:
    """Another remedy than the loss, after a comma; nothing if there is none."""
    return "" if settings["mitigation"] == "none" else f", {settings['mitigation']}"


def measured_on(settings: dict[str, Any]) -> str:
    """Which images the accuracies are of."""
    return f"validation images ({settings['validation']:g})" if settings["validation"] else "test images"


def protocol(settings: dict[str, Any]) -> str:
    """The steps in a few characters: 50 + 5 × 10."""
    return f"{settings['base']} + {settings['steps']} × {settings['increment']}"


def of_methods() -> set[str]:
    """Settings that methods have each its own of: that these differ from one to the next goes without saying."""
    kinds: list[type[Recipe] | type[Method]] = [Recipe, *methods.known().values()]
    return {f.name for kind in kinds for f in fields(kind)} - {"batch", "last", "mitigation"}


def named(settings: dict[str, Any]) -> dict[str, str]:
    """Settings on one level, with the default of what came later where a record does not say it.

    But for what every method has: where it does nothing, such as a share of old images, nothing is said.
    """
    every = {f.name for f in fields(Method)}
    meant = {k: v for k, v in usual(settings["method"]).items() if k not in every}
    return {k: str(v) for k, v in (meant | flat_settings(settings)).items() if v is not None}


def tells_apart(name: str, settings: Sequence[dict[str, str]]) -> bool:
    """Whether a setting differs between runs, or, where methods have each its own, between runs of one method.

    What only some losses have does not differ by being absent; with the same loss, what is absent was not given.
    """
    own = name in of_methods()
    given: defaultdict[str, set[str]] = defaultdict(set)
    by_loss: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for s in settings:
        if name in s:
            given[s["method"] if own else ""].add(s[name])
        by_loss[s["method"], s["loss"]].add(s.get(name, ""))
    return any(len(values) > 1 for values in (*given.values(), *by_loss.values()))


def differences(groups: Sequence[Sequence[Result]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What tells settings apart, as columns of a table, and what all of them share."""
    columns: dict[str, list[str]] = {
        "method": [g[0]["run"]["method"] for g in groups],
        "loss": [label(g[0]) for g in groups],
        "data": [g[0]["run"]["dataset"] for g in groups],
        "classes": [protocol(g[0]["run"]) for g in groups],
        "memory": [g[0]["run"]["memory"] for g in groups],
        "epochs": [str(g[0]["run"]["recipe"]["epochs"]) for g in groups],
    }
    if any(g[0]["run"]["validation"] for g in groups):  # nobody is to take these accuracies for those of test images
        columns["measured on"] = [measured_on(g[0]["run"]) for g in groups]
    if any(remedy(g[0]["run"]) for g in groups):
        columns["mitigation"] = [g[0]["run"]["mitigation"] for g in groups]
    settings = [named(g[0]["run"]) for g in groups]
    engines = [next(filter(None, map(engine_of, g)), "–") for g in groups]
    if len({*engines} - {"–"}) > 1:
        columns["engine"] = engines
    for name in dict.fromkeys(k for s in settings for k in s if k not in SAID):
        if tells_apart(name, settings):
            values = [s.get(name, "–") for s in settings]
            columns[name.replace("_", " ")] = [v if len(v) <= 20 else digest(v)[:6] for v in values]
    same = {k: v[0] for k, v in columns.items() if len(set(v)) == 1 and k != "loss"}
    return {k: v for k, v in columns.items() if k not in same}, same


def print_table(results: Sequence[Result], console: Console) -> None:
    """One row for each setting, over its seeds; settings that all rows share are in the title."""
    groups = grouped(results)
    columns, same = differences(groups)
    title = ", ".join(v if k in ("method", "data") else f"{k} {v}" for k, v in same.items())
    title = f"{title}: average incremental and final accuracy in percent".lstrip(": ")
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for name in ("seeds", "average", "final", "base", "new", "forgetting"):
        table.add_column(name, justify="right", no_wrap=not console.is_terminal)
    for i, group in enumerate(groups):
        finals = [[r["final"][k] for r in group] for k in ("top1", "base", "new")]
        measured = [[r["average_incremental_accuracy"] for r in group], *finals, [r["forgetting"] for r in group]]
        cells = [values[i] for values in columns.values()]
        table.add_row(*cells, str(len(group)), *(mean_and_deviation(m) for m in measured))
    if not console.is_terminal:  # a file or a pipe has no edge
        everything = console.options.update(width=10**6)
        console.width = max(console.width, console.measure(table, options=everything).maximum)
    console.print(table)


def print_result(result: Result, console: Console) -> None:
    """Each step of one run, and what it comes to."""
    s = result["run"]
    title = f"{s['method']}, {label(result)}{remedy(s)}, {s['dataset']}, memory {s['memory']}, seed {s['seed']}"
    title += f", measured on {measured_on(s)}" if s["validation"] else ""
    table = Table(title=f"{title}: accuracy in percent", box=box.SIMPLE_HEAD)
    for name in ("step", "classes", "all", "top 5", "base", "new", "latest", "α", "seconds"):
        table.add_column(name, justify="right")
    for record, alpha in zip(result["steps"], result["alpha"]):
        shown = [record[k] for k in ("top1", "top5", "base", "new", "latest")]
        table.add_row(
            str(record["step"]),
            str(record["classes"]),
            *("–" if v is None else f"{v:.2f}" for v in shown),
            "–" if alpha is None else f"{alpha:.3f}",
            f"{record['seconds']:.1f}",
        )
    console.print(table)
    forgotten = result["forgetting"]
    console.print(
        f"average incremental accuracy {result['average_incremental_accuracy']:.2f}%"
        + ("" if forgotten is None else f", forgetting {forgotten:.2f} points")
        + reuse_words(result["reused"]),
        highlight=False,
    )


def reuse_words(reused: dict[str, Any] | None) -> str:
    """What was not computed in this run."""
    if not reused:
        return ""
    steps = ", ".join(map(str, reused["steps"]))
    return f"; step(s) {steps} reused ({reused['seconds']:.1f} s when they were computed)"


def figures_for(results: Sequence[Result], folder: Path) -> list[Path]:
    """The accuracy curves of all results, and the confusion matrix of the first seed of each setting, as PNG."""
    from . import figures  # matplotlib is slow to import, and only pictures need it

    groups = grouped(results)
    if len(groups) > DRAWN:
        raise UsageError(f"pictures show at most {DRAWN} settings, and these are {len(groups)}: name fewer folders")
    columns, same = differences(groups)
    plain = ("method", "loss", "data", "classes")
    named = [[v[i] if k in plain else f"{k} {v[i]}" for k, v in columns.items()] for i in range(len(groups))]
    curves = [(", ".join(words), g) for words, g in zip(named, groups)]
    folder.mkdir(parents=True, exist_ok=True)
    return [
        figures.accuracy_curves({same.get("measured on", ""): curves}, folder / "accuracy.png"),
        figures.confusions([(name, group[0]) for name, group in curves], folder / "confusion.png"),
    ]
