"""Reads and validates the record of a run, `result.json`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from .. import files, methods
from ..data.protocol import split_classes
from ..errors import DataError, UsageError, check, is_finite
from ..settings import from_plain
from ..step import Recipe
from .settings import Data, Protocol

Result = dict[str, Any]
FORMAT = 1
"""version of records"""
PARTS: dict[str, type] = dict.fromkeys(("run", "machine", "versions", "final"), dict)
PARTS |= dict.fromkeys(("steps", "confusion", "class_order", "alpha"), list)
"""required entries of a record, besides numbers"""
SETTINGS = {"data": Data, "protocol": Protocol, "recipe": Recipe}
AVERAGES = {"average_incremental_accuracy": "top1", "average_incremental_accuracy_top5": "top5"}
FINAL = ("top1", "top5", "base", "new")
NEVER_NONE = ("average", "final top", "top", "base", "latest", "step", "classes", "seconds")
NEAR = 1e-6
"""tolerance for equal accuracies"""

log = logging.getLogger("equipoise")


def read_result(folder: Path) -> Result:
    """The recorded result of a run's folder."""
    path = folder / "result.json"
    if not path.is_file():
        not_finished = (folder / "run.json").is_file()
        state = "the run is not finished; resume it" if not_finished else "name the folder of a run"
        raise DataError(f"{folder} has no result.json: {state}")
    result: Any = files.read_json(path)
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise DataError(f"{path} is not a result of this version of Equipoise: delete it and run again")
    if fault := find_fault(result):
        raise DataError(f"{path} is not the result of a run ({fault}): delete it and run again")
    return result


def read_results(folders: Iterable[Path]) -> dict[Path, Result]:
    """The results of these folders. Skip unreadable ones with a warning; raise if none is readable."""
    found: dict[Path, Result] = {}
    refused: list[DataError] = []
    for folder in folders:
        try:
            found[folder] = read_result(folder)
        except DataError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    for one in refused:
        log.warning("skipped: %s", one)
    return found


def find_computer(result: Result) -> str:
    """The computer of a result."""
    machine = result["machine"]
    return str(machine.get("gpu") or machine.get("cpu") or "unknown")


def find_fault(result: Result) -> str | None:
    """The first fault in a record; None if there is none."""
    for name, kind in PARTS.items():
        if not isinstance(result.get(name), kind):
            return f"it has no {name.replace('_', ' ')}"
    if not all(isinstance(name, str) for name in result["versions"].values()):
        return "its versions are not strings"
    if (reused := result.get("reused")) and not (
        isinstance(reused, dict) and isinstance(reused.get("steps"), list) and is_number(reused.get("seconds"))
    ):
        return "it does not say which steps it reused"
    looks = result.get("looks", [])
    if not isinstance(looks, list) or not all(map(is_look, looks)):
        return "its looks within steps are no accuracies"
    return find_wrong_setting(result["run"]) or find_wrong_number(result) or find_contradiction(result)


def is_look(look: Any) -> bool:
    """Whether a value is an accuracy within a step."""
    if not isinstance(look, dict) or not isinstance(look.get("stage"), str) or type(look.get("step")) is not int:
        return False
    done, top1 = look.get("done"), look.get("top1")
    return is_number(done) and 0 <= done <= 1 and is_number(top1) and -NEAR <= top1 <= 100 + NEAR


def find_wrong_setting(run: dict[str, Any]) -> str | None:
    """The first invalid setting of a run; methods and remedies may be unknown."""
    method = run.get("method")
    remedy = method.get("remedy", method) if isinstance(method, dict) else None
    while isinstance(method, dict) and isinstance(method.get("host"), dict):
        method = remedy = method["host"]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in (method, remedy)):
        return "it names no method"
    try:
        check("seed", run.get("seed"), least=0, whole=True)
        for name, kind in SETTINGS.items():
            from_plain(kind, run.get(name), methods.KINDS)
    except (DataError, UsageError) as error:
        return str(error)
    return None


def find_wrong_number(result: Result) -> str | None:
    """The first missing or invalid number."""
    steps, matrix, final = result["steps"], result["confusion"], result["final"]
    if not steps or not all(isinstance(step, dict) and isinstance(step.get("by_step"), list) for step in steps):
        return "it has no steps"
    if not matrix or not all(isinstance(row, list) and len(row) == len(matrix) for row in matrix):
        return "its confusion matrix is not square"
    counts = (set(map(type, row)) == {int} and min(row) >= 0 for row in matrix)  # a thousand rows of a thousand
    if not all(counts) or not any(map(any, matrix)):
        return "its confusion matrix does not count images"
    accuracies = {name: result.get(name) for name in AVERAGES} | {f"final {n}": final.get(n, "") for n in FINAL}
    others = {f"α {t}": a for t, a in enumerate(result["alpha"])}
    forgetting = result.get("forgetting", "")
    for t, step in enumerate(steps):
        accuracies |= {f"{name} of step {t}": step.get(name, "") for name in (*FINAL, "latest")}
        accuracies |= {f"accuracy of step {t} on step {k}": value for k, value in enumerate(step["by_step"])}
        others |= {f"{name} of step {t}": step.get(name, "") for name in ("step", "classes", "seconds")}
    wrong = {name: v for name, v in accuracies.items() if not (is_number(v) and -NEAR <= v <= 100 + NEAR)}
    wrong |= {name: v for name, v in others.items() if not (is_number(v) and v >= 0)}
    wrong |= {} if is_number(forgetting) and abs(forgetting) <= 100 + NEAR else {"forgetting": forgetting}
    told = {name: "missing" if v == "" else f"{v!r:.40}" for name, v in wrong.items()}
    return next((f"{n} is {told[n]}" for n, v in wrong.items() if v is not None or n.startswith(NEVER_NONE)), None)


def find_contradiction(result: Result) -> str | None:
    """The first contradiction between two numbers."""
    steps, matrix, final, protocol = result["steps"], result["confusion"], result["final"], result["run"]["protocol"]
    if {*map(type, result["class_order"])} != {int} or len({*result["class_order"]}) < len(result["class_order"]):
        return "its class order does not name each class once"
    try:
        sizes = split_classes(len(result["class_order"]), protocol["base"], protocol["steps"])
    except UsageError as error:
        return str(error)
    last, right, images = steps[-1], sum(row[k] for k, row in enumerate(matrix)), sum(map(sum, matrix))
    pairs = [(name, result[name], sum(step[top] for step in steps) / len(steps)) for name, top in AVERAGES.items()]
    pairs += [(f"final {name}", final[name], last[name]) for name in FINAL]
    pairs += [("accuracy in the confusion matrix", 100 * right / images, last["top1"])]
    pairs += [("number of steps", len(steps), len(sizes)), ("number of α", len(result["alpha"]), len(sizes))]
    pairs += [("size of the confusion matrix", len(matrix), sum(sizes))]
    for t, step in enumerate(steps[: len(sizes)]):
        pairs += [("step", step["step"], t), (f"number of accuracies of step {t}", len(step["by_step"]), t + 1)]
        pairs += [(f"number of classes of step {t}", step["classes"], sum(sizes[: t + 1]))]
    for name, found, expected in pairs:
        if (found is None) != (expected is None) or (found is not None and abs(found - expected) > NEAR):
            return f"{name} is {found}, and the rest implies {expected}"
    return None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
