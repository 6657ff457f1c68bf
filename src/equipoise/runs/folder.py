"""The folder of a run: ownership, lock and contents."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import BusyError, DataError, RunError
from ..learner import saved
from ..settings import flatten
from .record import Result, read_result

LOG, ERROR, WARNINGS = "log.txt", "error.txt", "warnings.txt"
"""files that a worker writes"""
FILES = ("run.json", "metrics.jsonl", "result.json", "checkpoint", "model", LOG, ERROR, WARNINGS)
"""all files of a run's folder, besides the folder `tensorboard`"""


def check_run_folder(folder: Path) -> None:
    """Refuse a folder that is not a run's. A record alone is accepted, since nothing is written to it."""
    try:
        read_result(folder)
    except DataError:
        files.check_folder(folder, "run", FILES)


def claim_run_folder(folder: Path) -> None:
    """Claim a folder for a run, or refuse it."""
    files.claim_folder(folder, "run", FILES)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder during the block."""

    def refuse() -> None:
        raise BusyError(f"another process is using {folder}: wait for it, or choose another --out")

    folder.mkdir(parents=True, exist_ok=True)
    with files.Lease(folder / files.LOCK).hold(refuse):
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process is using a folder; False if the lock is unreadable, which the run will report."""
    with contextlib.suppress(OSError):
        return files.Lease(folder / files.LOCK).is_held()
    return False


def check_exists(folder: Path, name: str) -> None:
    """Refuse a path that is not an existing folder; `name` describes the one to name instead."""
    if not folder.is_dir():
        state = "does not exist" if not folder.exists() else "is not a folder"
        raise DataError(f"{folder} {state}: name {name}")


def find_result(folder: Path, settings: Mapping[str, Any]) -> Result | None:
    """The recorded result of a folder, or None. Refuse a folder of other settings."""
    path, result = folder / "run.json", folder / "result.json"
    if result.is_file():
        found = read_result(folder)
        check_settings(folder, found, settings, computes=False)
        return found
    if path.is_file() and (folder / "checkpoint" / saved.INFO).is_file():
        recorded = files.read_json(path)
        parts = [recorded.get(name) for name in ("run", "machine")] if isinstance(recorded, dict) else [None]
        if not all(isinstance(part, dict) for part in parts) or "class_order" not in recorded:
            raise DataError(f"{path} does not hold the settings of a run: delete {folder}, or choose another --out")
        check_settings(folder, recorded, settings, computes=True)
    return None


def check_settings(folder: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any], computes: bool) -> None:
    """Refuse a folder of a run with other settings, and list the differences. The machine matters only if the run
    continues (`computes`)."""
    resolved = recorded.get("resolved")
    data = recorded.get("data", resolved.get("data") if isinstance(resolved, dict) else None)
    there = flatten({"run": recorded["run"], "class_order": recorded["class_order"], "fingerprint of the data": data})
    ours = {"run": settings["run"], "class_order": settings["class_order"]}
    here = flatten(json.loads(json.dumps({**ours, "fingerprint of the data": settings["data"]})))
    differ = [k for k in {**there, **here} if there.get(k) != here.get(k)]
    if "class_order" not in differ:  # only the resulting order counts, not how it was specified
        differ = [k for k in differ if k != "run.protocol.order"]
    machine = [k for k, v in settings["machine"].items() if recorded["machine"].get(k) != v] if computes else []
    if "device" in machine and recorded["machine"].get("device") == "cuda" and not differ:
        raise RunError(f"{folder} is of a run on a GPU: use --device cuda where there is one, or choose another --out")
    words = [describe_difference(k.removeprefix("run."), there.get(k), here.get(k)) for k in differ]
    words += [describe_difference(k, recorded["machine"].get(k), settings["machine"][k]) for k in machine]
    if words:
        some = ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")
        raise RunError(f"{folder} belongs to a run with other settings: {some}; choose another --out")


def describe_difference(name: str, there: Any, here: Any) -> str:
    """Describe a difference, without values if they are long."""
    return name if len(str(here)) > 50 or len(str(there)) > 50 else f"{name} (there {there}, here {here})"


def read_last_epoch(folder: Path) -> dict[str, Any] | None:
    """The last complete line of a run's metrics.jsonl; None if there is none or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        with (folder / "metrics.jsonl").open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 2000))
            lines = f.read().split(b"\n")[:-1]
        if lines:
            return dict(json.loads(lines[-1]))
    return None
