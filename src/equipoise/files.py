"""Files that are whole or absent: tensors as safetensors, the rest as JSON. Reading one never executes code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from .errors import DataError, RunError

INFO = "learner.json"
PARTIAL = ".partial"
"""ends the names of files that are being written; one that is left is from a process that was killed"""


def write_file(path: Path, data: bytes) -> None:
    """Write all of a file or nothing of it: under another name first, then renamed. A full disk leaves no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file, readable by people; without indent it is written in half the time."""
    write_file(path, (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken one is a `DataError` that names it."""
    try:
        return json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is corrupt ({error}): delete it and make it anew") from None


def save(folder: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Save tensors and what goes with them into a folder, in place of what it held.

    The JSON file names the tensor file and holds its checksum; renaming the JSON file is the one moment at
    which the new state replaces the old.
    """
    data = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = f"learner-{digest[:16]}.safetensors"
    there = (folder / name).exists()
    write_file(folder / name, data)
    try:
        write_json(folder / INFO, {**info, "tensors": name, "sha256": digest}, indent=None)
    except BaseException:
        if not there:
            (folder / name).unlink()
        raise
    for other in folder.glob("learner-*.safetensors"):  # an earlier save, or one that was cut off
        if other.name != name:
            other.unlink(missing_ok=True)


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was saved in a folder, its checksum verified."""
    if not (folder / INFO).is_file():
        raise DataError(f"{folder} holds no saved learner ({INFO} is missing)")
    info = read_json(folder / INFO)
    try:
        path, digest = folder / str(info["tensors"]), info["sha256"]
        data = path.read_bytes()
    except (KeyError, TypeError):
        raise DataError(f"{folder / INFO} is not the description of a learner: delete the folder") from None
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the saved learner is not complete; delete {folder}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise DataError(f"{path} is corrupt or truncated (its checksum differs): delete {folder}")
    try:
        return safetensors.torch.load(data), info
    except safetensors.SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error}): delete {folder}") from None


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Whatever does not fit in what was read from `path` is said to be so, with its name."""
    try:
        yield
    except RunError:  # about this machine, not about the file
        raise
    except KeyError as error:
        raise DataError(f"{path} is not a learner that this version can read: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError, DataError) as error:
        raise DataError(f"{path} is not a learner that this version can read: {error}") from None
