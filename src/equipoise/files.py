"""Files that are whole or absent, and folders that belong to us.

Only what we wrote ourselves is ever replaced or deleted. A folder that we write to holds a manifest, made before the
first of its files, which names them. Without one, whatever is in a folder belongs to somebody else, and nothing is
written beside it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePath
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from .errors import DataError, UsageError

PARTIAL = ".partial"
"""ends the names of files that are being written; one that is left is from a process that was killed"""
PARTIAL_NAME = re.compile(rf"\.(.+)\.\d+{re.escape(PARTIAL)}")
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
    check_no_folder(path)
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


def check_no_folder(path: Path) -> None:
    """Refuse a folder where a file is to be written."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, where a file is to be written: move it, or choose another folder")


def parse_partial_name(path: Path) -> str | None:
    """The name that a partial file was to get; None for every other file."""
    found = PARTIAL_NAME.fullmatch(path.name)
    return found[1] if found else None


def remove_partials(folder: Path, names: Collection[str]) -> None:
    """Delete what a process that was killed has left of these files."""
    for path in folder.glob(f".*{PARTIAL}"):
        if parse_partial_name(path) in names:
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file, readable by people; without indent it is written in half the time."""
    write_file(path, (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_bytes(path: Path, follow: bool = True) -> bytes:
    """All of a regular file; a link is one if it may be followed.

    Anything else is a `DataError`: from a pipe or a device, a reader would wait for ever or read without end.
    """
    if not follow and path.is_symlink():
        raise DataError(f"{path} is a link, not a file")
    # Windows has no pipes among its files, and Unix no text files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken one is a `DataError` that names it."""
    try:
        return parse_json(read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): delete it, and what made it can make it again") from None


def parse_json(text: bytes) -> Any:
    """What a JSON text says. NaN and infinities are no JSON, and nothing of ours is nested a thousand deep."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def as_folder(path: str | Path) -> Path:
    """The path of a folder; an empty one would mean the working directory, by mistake."""
    if path == "" or "\0" in str(path):
        state = "has a NUL in it" if path else "is empty"
        raise UsageError(f"the path of the folder {state}: {REMEDY}")
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
        foreign = [path.name for path in inside if not may_precede_manifest(path)]
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


def may_precede_manifest(path: Path) -> bool:
    """Whether a file is one of ours that can be there before the manifest: a lock, or half a manifest.

    Half a manifest is never deleted: another process may be writing it.
    """
    empty_lock = path.name == LOCK and path.is_file() and not path.stat().st_size
    return empty_lock or parse_partial_name(path) == MANIFEST


def write_manifest(folder: Path, kind: str, names: Collection[str]) -> None:
    """Write the manifest of a folder."""
    write_json(folder / MANIFEST, {"format": FORMAT, "kind": kind, "names": sorted(names)})


def read_manifest(folder: Path, kind: str) -> set[str]:
    """The names in the manifest of a folder, which must be of that kind. None of them leads out of the folder."""
    path = folder / MANIFEST
    try:
        manifest: Any = read_json(path)
    except DataError:
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
