"""A saved learner: tensors as safetensors, the rest as JSON, sealed as one. Reading it never executes code.

The JSON file names the tensor file and has its checksum; its seal is the checksum of all else that it says. So a single
changed bit in either file is noticed, and the two cannot be mixed with those of another learner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .. import files
from ..errors import DataError, RunError, UsageError, get_first_line

INFO = "learner.json"
TENSORS_NAME = re.compile(r"learner-[0-9a-f]{16}\.safetensors")
SEAL = re.compile(rb'\{"seal": "([0-9a-f]{64})", ')
"""how the JSON file begins; the checksum is of all that follows"""


def save(folder: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Save tensors and what goes with them into a folder, in place of the learner that it held.

    Renaming the JSON file is the one moment at which the new state replaces the old. Of the other files in the folder
    none is touched.
    """
    replaced = check_saved(folder)
    check_note(info.get("note"))
    data = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = name_tensors(digest)
    exists = os.path.lexists(folder / name)
    if exists and name != replaced and not is_tensor_file(folder / name):
        raise UsageError(f"{folder} holds {name}, which equipoise did not write: save into another folder")
    files.write_file(folder / name, data)
    try:
        files.write_file(folder / INFO, seal({**info, "tensors": name, "sha256": digest}))
    except BaseException:
        if not exists:
            (folder / name).unlink()
        raise
    if replaced not in (None, name):
        (folder / str(replaced)).unlink(missing_ok=True)


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was saved in a folder, if not a bit of it has changed."""
    info = read_info(folder)
    path, digest = folder / info["tensors"], info["sha256"]
    try:
        data = files.read_bytes(path, follow=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the saved learner is not complete; delete {folder}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise DataError(f"{path} is corrupt or truncated (its checksum differs): delete {folder}")
    try:
        with torch.inference_mode(False):
            return safetensors.torch.load(data), info
    except (safetensors.SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a safetensors file ({get_first_line(error)}): delete {folder}") from None


def check_note(note: Any) -> None:
    """Refuse what JSON cannot hold."""
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        words = f"note must be of strings, finite numbers, lists and dicts, as JSON is ({get_first_line(error)})"
        raise UsageError(words) from None


def seal(info: dict[str, Any]) -> bytes:
    """The JSON of a learner, beginning with the checksum of what follows."""
    rest = json.dumps(info, allow_nan=False).encode()[1:] + b"\n"
    return b'{"seal": "%s", %s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def read_info(folder: Path) -> dict[str, Any]:
    """What the JSON file of a folder says, if its seal is whole; the tensors that it names are in the same folder."""
    path = folder / INFO
    try:
        text = files.read_bytes(path, follow=False)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} holds no saved learner ({INFO} is missing)") from None
    try:
        info = files.parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is corrupt ({error}): delete the folder") from None
    begins = SEAL.match(text)
    if not begins or not isinstance(info, dict) or info.get("tensors") != name_tensors(str(info.get("sha256"))):
        raise DataError(f"{path} is not the description of a learner: delete the folder")
    if hashlib.sha256(text[begins.end() :]).hexdigest().encode() != begins[1]:
        raise DataError(f"{path} is corrupt (its seal is broken): delete the folder")
    return info


def name_tensors(digest: str) -> str:
    """The name of a tensor file, by the checksum of what is in it."""
    return f"learner-{digest[:16]}.safetensors"


def check_saved(folder: Path) -> str | None:
    """The tensor file of the learner that a folder holds, None if it holds none; refused if its JSON is not ours."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file, where a folder is to be written: move it, or choose another folder")
    name = find_tensors(folder)
    if name is None and os.path.lexists(folder / INFO):
        raise UsageError(f"{folder} holds {INFO}, which is no saved learner of equipoise: save into another folder")
    return name


def find_tensors(folder: Path) -> str | None:
    """The tensor file that the JSON file of a folder names; None if there is none, or it is not ours."""
    with contextlib.suppress(OSError, DataError):
        name = read_info(folder)["tensors"]
        return str(name) if TENSORS_NAME.fullmatch(name) else None
    return None


def is_tensor_file(path: Path) -> bool:
    """Whether a file is a learner's tensors: its name tells its checksum."""
    if not TENSORS_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    return name_tensors(hashlib.sha256(path.read_bytes()).hexdigest()) == path.name


def remove_leftovers(folder: Path) -> None:
    """Delete what saves that were cut off have left in a folder of ours: partial files, and tensors without JSON."""
    whole = filter(None, map(files.parse_partial_name, folder.glob(f".*{files.PARTIAL}")))
    files.remove_partials(folder, {name for name in whole if name == INFO or TENSORS_NAME.fullmatch(name)})
    named = find_tensors(folder)
    if named is None and os.path.lexists(folder / INFO):
        return  # it is damaged, and may be repaired
    for path in folder.glob("learner-*.safetensors"):
        if path.name != named and is_tensor_file(path):
            path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete the learner that was saved in a folder of ours, and the folder if nothing else is in it."""
    if (name := find_tensors(folder)) is not None:
        (folder / INFO).unlink()
        (folder / name).unlink(missing_ok=True)
    remove_leftovers(folder)
    with contextlib.suppress(OSError):  # somebody else's file is in it, or there is none
        folder.rmdir()


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Within the block, whatever does not fit in what was read from `path` is said to be so, with its name."""
    try:
        yield
    except RunError:  # about this machine, not about the file
        raise
    except KeyError as error:
        raise DataError(f"{path} is not a learner that this version can read: {error} is missing") from None
    except DataError as error:
        raise DataError(f"{path} is not a learner that this version can read: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]  # torch says a page
        raise DataError(f"{path} is not a learner that this version can read: {reason}") from None
