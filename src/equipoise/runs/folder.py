"""A run's folder: whose it is, who may work in it, and the result that it holds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import BusyError, DataError, RunError
from ..files import LOCK, check_folder, claim_folder
from ..learner.record import usual
from ..remedies import as_made

Result = dict[str, Any]
RESULT = {"average_incremental_accuracy", "steps", "final", "forgetting", "confusion", "class_order", "alpha", "run"}
"""what every result has, besides its circumstances"""
SETTINGS = {"method", "loss", "dataset", "base", "steps", "increment", "memory", "seed", "recipe"}
"""what every result names of its run"""
LATER = {"validation": 0.0, "mitigation": "none"}
LATER_RECIPE = {"schedule": "steps", "clamp": 0.0}
"""settings, of the run and of its recipe, that older files do not name, and what they were then"""
BASED = "based"
"""a file that says: this run has its base step, computed or taken over, and others can have it too"""
LOG, ERROR, WARNINGS = "log.txt", "error.txt", "warnings.txt"
"""what a worker of a queue writes"""
FILES = ("run.json", "metrics.jsonl", "result.json", "checkpoint", "model", BASED, LOG, ERROR, WARNINGS)
"""all that is ever written to a run's folder; `tensorboard` is a folder of its own"""


def check_run_folder(folder: Path) -> None:
    """Refuse a folder that is not of a run; a record by itself is one, to which nothing is written."""
    try:
        read_result(folder)
    except DataError:
        check_folder(folder, "run", FILES)


def claim_run_folder(folder: Path) -> None:
    """Make a folder that of a run, or refuse it."""
    claim_folder(folder, "run", FILES)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; the lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as f:
        for last in (False, True):
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if last:
                    words = f"another process is at work in {folder}: wait for it, or choose another --out"
                    raise BusyError(words) from None
                time.sleep(0.05)  # a queue may only have looked whether anybody is
        yield


def check_there(folder: Path, name: str) -> None:
    """Refuse what is no folder; `name` says which one to name instead."""
    if not folder.is_dir():
        state = "is not there" if not folder.exists() else "is not a folder"
        raise DataError(f"{folder} {state}: name {name}")


def agree(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder that belongs to a run with other settings, and say which differ."""
    path, result = folder / "run.json", folder / "result.json"
    if path.is_file() and (result.is_file() or (folder / "checkpoint" / files.INFO).is_file()):
        recorded = files.read_json(path)
    elif result.is_file():  # a record by itself
        known = read_result(folder)
        recorded = {**known["run"], "class_order": known["class_order"]}
    else:
        return
    if not isinstance(recorded, dict):
        raise DataError(f"{path} is not the settings of a run: delete {folder}, or choose another --out")
    meant = usual(settings["method"])
    there, here = (meant | flat_settings(one) for one in (completed(recorded), json.loads(json.dumps(settings))))
    differ = [k for k in {**there, **here} if there.get(k) != here.get(k)]
    if not path.is_file():  # nothing will be computed, so where it was does not matter
        differ = [k for k in differ if k not in ("device", "precision")]
    if "class_order" not in differ:  # of the order, what counts is the list it comes to, however it was written
        differ = [k for k in differ if k != "order"]
    if there.get("device") == "cuda" and "device" in differ and set(differ) <= {"device", "precision"}:
        raise RunError(f"{folder} is of a run on a GPU: use --device cuda where there is one, or choose another --out")
    if differ:
        words = ", ".join(
            k if len(str(here.get(k))) > 50 else f"{k} (there {there.get(k)}, here {here.get(k)})" for k in differ
        )
        raise RunError(f"{folder} belongs to a run with other settings: {words}; choose another --out")


def find_result(folder: Path, settings: dict[str, Any]) -> Result | None:
    """The recorded result of a folder, None if there is none yet; refused if it belongs to other settings."""
    agree(folder, settings)
    return read_result(folder) if (folder / "result.json").is_file() else None


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with what their file is too old to name."""
    return {**LATER, **as_made(settings), "recipe": {**LATER_RECIPE, **settings.get("recipe", {})}}


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings on one level: those of the recipe beside the others."""
    inner = [flat_settings(v) if isinstance(v, dict) else {k: v} for k, v in settings.items()]
    return {k: v for part in inner for k, v in part.items()}


def read_result(folder: Path) -> Result:
    """The recorded result of a run's folder."""
    path = folder / "result.json"
    if not path.is_file():
        not_finished = (folder / "run.json").is_file()
        state = "not finished: run it again" if not_finished else "not a run's folder, nor does it hold any: name one"
        raise DataError(f"{folder} has no result.json: it is {state}")
    result: Any = files.read_json(path)
    whole = isinstance(result, dict) and result.keys() >= RESULT and result["steps"]
    kinds = whole and all(isinstance(result[name], dict) for name in ("run", "final"))
    named = kinds and result["run"].keys() >= SETTINGS and {"top1", "base", "new"} <= result["final"].keys()
    if not named or not isinstance(result["run"]["recipe"], dict) or not _measured(result):
        raise DataError(f"{path} is not the result of a run: delete it and run again")
    return {**result, "run": completed(result["run"])}


def _measured(result: Result) -> bool:
    """Whether numbers are where a result has numbers."""
    steps, matrix, final = result["steps"], result["confusion"], result["final"]
    if not all(isinstance(many, list) for many in (steps, matrix, result["alpha"], result["class_order"])):
        return False
    if not all(isinstance(row, list) and len(row) == len(matrix) for row in matrix):
        return False
    if not all(isinstance(one, dict) for one in (*steps, result.get("hardware", {}), result.get("versions", {}))):
        return False
    numbers = [result["average_incremental_accuracy"], final["top1"], *(count for row in matrix for count in row)]
    numbers += [step.get(name) for step in steps for name in ("classes", "top1", "seconds")]
    perhaps = [final["base"], final["new"], result["forgetting"], *result["alpha"]]
    perhaps += [step.get(name, "") for step in steps for name in ("top5", "base", "new", "latest")]
    return bool(matrix) and all(map(_number, [*numbers, *(value for value in perhaps if value is not None)]))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
