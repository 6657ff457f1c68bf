"""Prints results in the terminal: the steps of one run, or a table of several grouped by settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from ..runs.folder import check_exists
from ..runs.record import Result, read_results
from ..settings import digest, flatten
from .words import (
    STEPS,
    describe_reused,
    find_default_settings,
    format_data,
    format_mean,
    format_name,
    format_protocol,
    format_remedy,
    format_steps,
    list_own_settings,
    write_method,
)

COLUMNS = ("data.name", "data.validation", "protocol.base", "protocol.steps", "protocol.memory", "recipe.epochs")
"""settings that have a column of their own, besides the method and its remedy"""
DRAWN = 24
"""most settings in a picture"""


def make_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for a table in a file or a pipe.

    Names are printed as they are: without markup, in which [x] would be a style.
    """
    in_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it was closed
    return Console(markup=False, width=None if in_terminal else 160)


def load_results(folders: Sequence[Path]) -> list[Result]:
    """The results of these folders of runs; a folder of such folders gives all of theirs."""
    found: dict[Path, None] = {}  # each run once, however often it is named
    for folder in folders:
        check_exists(folder, "the folder of a run, or one that holds such folders")
        inside = sorted(path.parent for path in folder.rglob("result.json"))
        found |= dict.fromkeys(path.resolve() for path in inside or [folder])
    return list(read_results(found).values())


def group_results(results: Sequence[Result]) -> list[list[Result]]:
    """Group results that differ only in the seed, one of each seed, in order of first appearance.

    Other kernels of a GPU are another setting; a record without any, as all was reused, goes with the first.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        settings = {**result["run"], "seed": None} | describe_place(result)
        alike.setdefault(json.dumps(settings, sort_keys=True), []).append(result)
    groups: list[list[Result]] = []
    for group in alike.values():
        first = next(filter(None, map(find_engine, group)), None)
        by_engine: dict[str | None, dict[int, Result]] = {}
        for result in group:
            by_engine.setdefault(find_engine(result) or first, {}).setdefault(result["run"].get("seed", 0), result)
        groups += [list(by_seed.values()) for by_seed in by_engine.values()]
    return groups


def describe_place(result: Result) -> dict[str, object]:
    """The settings of the machine that may affect a result."""
    return {f"machine.{name}": result["machine"].get(name) for name in ("device", "precision")}


def find_engine(result: Result) -> str | None:
    """The engine of a run on a GPU."""
    return result["machine"].get("engine") if result["machine"].get("device") == "cuda" else None


def describe_images(result: Result) -> str:
    """Which images were evaluated."""
    validation = result["run"]["data"].get("validation")
    return f"validation images ({validation:g})" if validation else "test images"


def find_differing(results: Sequence[Result]) -> dict[str, list[str]]:
    """The settings in which these results differ, except those with a column of their own: a value for each result.

    What methods have each its own default of is told apart only where it is not the default, or within a method.
    """
    runs = [result["run"] for result in results]
    kinds = [(write_method(run["method"]), run["data"]["name"]) for run in runs]
    defaults: dict[tuple[str, str], dict[str, object]] = {}  # of a method that is not installed, its first record's
    for kind, run in zip(kinds, runs):
        if kind not in defaults:
            defaults[kind] = find_default_settings(run) or list_own_settings(run)
    columns: dict[str, list[str]] = {}
    settings = [flatten({k: v for k, v in run.items() if k not in ("method", "recipe", "seed")}) for run in runs]
    settings = [s | describe_place(r) | list_own_settings(r["run"]) for s, r in zip(settings, results)]
    for name in dict.fromkeys(k for s in settings for k in s if k not in COLUMNS):
        values = [s.get(name) for s in settings]
        own = ["" if v == defaults[kind].get(name) else f"={v}" for v, kind in zip(values, kinds)]  # not the default
        if len(set(own)) > 1:
            columns[name] = ["–" if v is None else str(v) for v in values]
    return columns


def compare_settings(groups: Sequence[Sequence[Result]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The settings that differ, as columns of a table, and those that all groups share."""
    firsts = [group[0] for group in groups]
    runs = [result["run"] for result in firsts]
    columns: dict[str, list[str]] = {
        "method": [write_method(run["method"]) for run in runs],
        "remedy": [format_remedy(run) for run in runs],
        "data": [format_data(run) for run in runs],
        "classes": [format_protocol(result) for result in firsts],
        "memory": [run["protocol"]["memory"] for run in runs],
        "epochs": [str(run["recipe"]["epochs"]) for run in runs],
    }
    if any(run["data"].get("validation") for run in runs):  # nobody is to take these for accuracies on test images
        columns["measured on"] = list(map(describe_images, firsts))
    engines = [next(filter(None, map(find_engine, group)), "–") for group in groups]
    if len({*engines} - {"–"}) > 1:
        columns["engine"] = engines
    for name, values in find_differing(firsts).items():
        short = format_name(name)
        columns[name if short in columns else short] = [v if len(v) <= 20 else digest(v)[:6] for v in values]
    same = {k: v[0] for k, v in columns.items() if len(set(v)) == 1 and k != "remedy"}
    return {k: v for k, v in columns.items() if k not in same}, same


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print a row for each setting, over its seeds; settings that all rows share are in the title."""
    groups = group_results(results)
    columns, same = compare_settings(groups)
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
        table.add_row(*cells, str(len(group)), *(format_mean(m) for m in measured))
    if not console.is_terminal:  # a file or a pipe has no edge
        everything = console.options.update(width=10**6)
        console.width = max(console.width, console.measure(table, options=everything).maximum)
    console.print(table)


def print_result(result: Result, console: Console) -> None:
    """Print each step of one run, and its averages."""
    run = result["run"]
    words = [
        write_method(run["method"]),
        format_remedy(run),
        format_data(run),
        f"memory {run['protocol']['memory']}",
    ]
    words += [f"seed {run['seed']}"]
    words += [f"measured on {describe_images(result)}"] if run["data"].get("validation") else []
    table = Table(title=f"{', '.join(words)}: accuracy in percent", box=box.SIMPLE_HEAD)
    for name in STEPS.values():
        table.add_column(name, justify="right")
    for row in format_steps([step | {"alpha": alpha} for step, alpha in zip(result["steps"], result["alpha"])]):
        table.add_row(*row)
    console.print(table)
    forgotten, reused = result["forgetting"], describe_reused(result.get("reused"))
    console.print(
        f"average incremental accuracy {result['average_incremental_accuracy']:.2f}%"
        + ("" if forgotten is None else f", forgetting {forgotten:.2f} points")
        + (f"; {reused}" if reused else ""),
        highlight=False,
    )


def draw_figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the accuracy curves of all results, and the confusion matrix of the first seed of each setting, as PNG."""
    from . import figures  # matplotlib is slow to import, and only pictures need it

    groups = group_results(results)
    if len(groups) > DRAWN:
        raise UsageError(f"pictures show at most {DRAWN} settings, and these are {len(groups)}: name fewer folders")
    columns, same = compare_settings(groups)
    plain = ("method", "remedy", "data", "classes")
    named = [[v[i] if k in plain else f"{k} {v[i]}" for k, v in columns.items()] for i in range(len(groups))]
    curves = [(", ".join(words), g) for words, g in zip(named, groups)]
    folder.mkdir(parents=True, exist_ok=True)
    return [
        figures.draw_accuracy({same.get("measured on", ""): curves}, folder / "accuracy.png"),
        figures.draw_confusions([(name, group[0]) for name, group in curves], folder / "confusion.png"),
    ]
