"""Files that are whole or absent: tensors as safetensors, the rest as JSON. Reading one never executes code.

Only what we wrote ourselves is ever replaced or deleted. A folder that we write to holds a manifest, made before the
first of its files, which names them. Without one, whatever is in a folder belongs to somebody else, and nothing is
written beside it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePath
from typing import Any

import safetensors
import safetensors.torch
from filelock import FileLock, Timeout
from torch import Tensor

from .errors import DataError, RunError, UsageError

INFO = "learner.json"
PARTIAL = ".partial"
"""ends the names of files that are being written; one that is left is from a process that was killed"""
PARTIAL_NAME = re.compile(rf"\.(.+)\.\d+{re.escape(PARTIAL)}")
TENSORS_NAME = re.compile(r"learner-[0-9a-f]{16}\.safetensors")
MANIFEST = ".equipoise.json"
FORMAT = 1
"""of manifests"""
LOCK = ".lock"
"""an empty file, which may come before the manifest"""
REMEDY = "name a new or an empty folder"


class Lease:
    """The sole right to what a lock file stands for. It ends with its process, however that ends.

    How it is kept is known here only: this is the place for a heartbeat, which file systems without locks would need.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, FileLock(path)

    @contextlib.contextmanager
    def hold(self, on_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold it during the block. While it is another's, wait, after one call of `on_busy`, which may raise instead.

        On a file system without locks nobody waits.
        """
        try:
            self.lock.acquire(timeout=0.1)  # somebody may only be looking whether it is held
        except Timeout:
            on_busy()
            self.lock.acquire()
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        try:
            yield
        finally:
            self.lock.release()

    def is_held(self) -> bool:
        """Whether somebody holds it. To find out, no file is made."""
        if not self.path.exists():
            return False
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            return True
        self.lock.release()
        return False


def write_file(path: Path, data: bytes) -> None:
    """Write all of a file or nothing of it: under another name first, then renamed. A full disk leaves no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}{PARTIAL}")
    try:
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def whole_name(path: Path) -> str | None:
    """The name that a partial file was to get; None for every other file."""
    found = PARTIAL_NAME.fullmatch(path.name)
    return found[1] if found else None


def remove_partials(folder: Path, names: Collection[str]) -> None:
    """Delete what a process that was killed has left of these files."""
    for path in folder.glob(f".*{PARTIAL}"):
        if whole_name(path) in names:
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file, readable by people; without indent it is written in half the time."""
    write_file(path, (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken one is a `DataError` that names it."""
    try:
        return json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is corrupt ({error}): delete it and make it anew") from None


def tensors_name(digest: str) -> str:
    """The name of a tensor file, by the checksum of what is in it."""
    return f"learner-{digest[:16]}.safetensors"


def save(folder: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Save tensors and what goes with them into a folder, in place of the learner that it held.

    The JSON file names the tensor file and holds its checksum; renaming the JSON file is the one moment at
    which the new state replaces the old. Of the other files in the folder none is touched.
    """
    replaced = check_saved(folder)
    data = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = tensors_name(digest)
    there = os.path.lexists(folder / name)
    if there and name != replaced and not is_tensor_file(folder / name):
        raise UsageError(f"{folder} holds {name}, which equipoise did not write: save into another folder")
    write_file(folder / name, data)
    try:
        write_json(folder / INFO, {**info, "tensors": name, "sha256": digest}, indent=None)
    except BaseException:
        if not there:
            (folder / name).unlink()
        raise
    if replaced not in (None, name):
        (folder / str(replaced)).unlink(missing_ok=True)


def check_saved(folder: Path) -> str | None:
    """The tensor file of the learner that a folder holds, None if it holds none; refused if its JSON is not ours."""
    name = read_tensors_name(folder)
    if name is None and os.path.lexists(folder / INFO):
        raise UsageError(f"{folder} holds {INFO}, which is no saved learner of equipoise: save into another folder")
    return name


def read_tensors_name(folder: Path) -> str | None:
    """The tensor file that the JSON file of a folder names; None if there is none, or it is not ours."""
    try:
        info = read_json(folder / INFO)
        name = tensors_name(info["sha256"])
        return name if info["tensors"] == name and TENSORS_NAME.fullmatch(name) else None
    except (OSError, DataError, KeyError, TypeError):
        return None


def is_tensor_file(path: Path) -> bool:
    """Whether a file is a learner's tensors: its name tells its checksum."""
    if not TENSORS_NAME.fullmatch(path.name) or not path.is_file():
        return False
    return tensors_name(hashlib.sha256(path.read_bytes()).hexdigest()) == path.name


def remove_leftovers(folder: Path) -> None:
    """Delete what saves that were cut off have left in a folder of ours: partial files, and tensors without JSON."""
    whole = filter(None, map(whole_name, folder.glob(f".*{PARTIAL}")))
    remove_partials(folder, {name for name in whole if name == INFO or TENSORS_NAME.fullmatch(name)})
    named = read_tensors_name(folder)
    if named is None and os.path.lexists(folder / INFO):
        return  # it is damaged, and may be repaired
    for path in folder.glob("learner-*.safetensors"):
        if path.name != named and is_tensor_file(path):
            path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete the learner that was saved in a folder of ours, and the folder if nothing else is in it."""
    if (name := read_tensors_name(folder)) is not None:
        (folder / INFO).unlink()
        (folder / name).unlink(missing_ok=True)
    remove_leftovers(folder)
    with contextlib.suppress(OSError):  # somebody else's file is in it, or there is none
        folder.rmdir()


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


def as_folder(path: str | Path) -> Path:
    """The path of a folder; an empty one would mean the working directory, by mistake."""
    if path == "":
        raise UsageError(f"the path of the folder is empty: {REMEDY}")
    return Path(path)


def check_folder(folder: Path, kind: str, names: Collection[str] = ()) -> set[str]:
    """Refuse a folder that is not ours, or in which one of these names is somebody else's; returns our names there.

    Nothing is written.

    Args:
        folder: an empty folder, or one that does not exist, is fine.
        kind: what the folder is of: run, report, tensorboard or demo.
        names: of the files and folders to be written, relative to the folder; * stands for anything.
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file, not a folder: {REMEDY}")
    # Listed before the manifest is read: a file of another process at work here comes after its manifest.
    try:
        inside = sorted(folder.iterdir())
    except FileNotFoundError:
        return set()
    if os.path.lexists(folder / MANIFEST):
        ours = read_manifest(folder, kind)
        foreign = find_existing(folder, set(names) - ours)
    else:
        ours = set()
        foreign = [path.name for path in inside if not comes_first(path)]
    if foreign:
        raise UsageError(f"{folder} holds {foreign[0]}, which equipoise did not write: {REMEDY}")
    return ours


def claim_folder(folder: Path, kind: str, names: Collection[str]) -> None:
    """Check a folder, then make these names in it ours: written before the first of the files is."""
    ours = check_folder(folder, kind, names)
    if not ours.issuperset(names) or not (folder / MANIFEST).is_file():
        write_manifest(folder, kind, ours.union(names))


def remove_stale(folder: Path, kind: str, names: Collection[str]) -> None:
    """Delete the files that the manifest names besides these."""
    remove_files(folder, read_manifest(folder, kind).difference(names))
    write_manifest(folder, kind, names)


def remove_files(folder: Path, names: Collection[str]) -> None:
    """Delete those of these files that exist; folders stay."""
    for name in find_existing(folder, names):
        if not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)


def find_existing(folder: Path, names: Collection[str]) -> list[str]:
    """What there is of these names, links that lead nowhere too."""
    return sorted(found for name in names for found in glob.glob(name, root_dir=folder))  # noqa: PTH207


def comes_first(path: Path) -> bool:
    """Whether a file is one of ours that can be there before the manifest: a lock, or half a manifest.

    Half a manifest is never deleted: another process may be writing it.
    """
    empty_lock = path.name == LOCK and path.is_file() and not path.stat().st_size
    return empty_lock or whole_name(path) == MANIFEST


def write_manifest(folder: Path, kind: str, names: Collection[str]) -> None:
    """Write the manifest of a folder."""
    write_json(folder / MANIFEST, {"format": FORMAT, "kind": kind, "names": sorted(names)})


def read_manifest(folder: Path, kind: str) -> set[str]:
    """The names in the manifest of a folder, which must be of that kind. None of them leads out of the folder."""
    path = folder / MANIFEST
    try:
        manifest: Any = read_json(path)
    except (DataError, IsADirectoryError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not are_inside(manifest.get("names")):
        raise UsageError(f"{path} is not a manifest that this version of equipoise wrote: {REMEDY}")
    if manifest.get("kind") != kind:
        raise UsageError(f"{folder} holds {MANIFEST} of kind {manifest.get('kind')}, not {kind}: {REMEDY}")
    return set(manifest["names"])


def are_inside(names: object) -> bool:
    """Whether these are names of files within a folder."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return all(name and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts for name in names)
