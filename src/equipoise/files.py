"""Atomic writes, locks, and manifests of output folders.

Only our own files are ever replaced or deleted. A manifest, written before all other files of a folder, lists them.
Nothing is written to a folder that holds files but no manifest.
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
from typing import Any, BinaryIO, NoReturn

from filelock import FileLock, Timeout

from .errors import DataError, UsageError

PARTIAL = ".partial"
"""suffix of files that are being written; a killed process leaves them behind"""
PARTIAL_NAME = re.compile(rf"\.(.+)\.\d+{re.escape(PARTIAL)}")
MANIFEST = ".equipoise.json"
FORMAT = 1
"""version of the manifest"""
LOCK = ".lock"
"""an empty file, which may exist before the manifest"""
REMEDY = "name a new or an empty folder"


class Lease:
    """An exclusive lock on a file. It is released when its process ends, in whatever way.

    A heartbeat, which file systems without locks would need, belongs here.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, FileLock(path)

    @contextlib.contextmanager
    def hold(self, on_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock during the block. If it is taken, call `on_busy`, which may raise, then wait.

        On a file system without locks, it never waits.
        """
        try:
            self.lock.acquire(timeout=0.1)  # `is_held` takes the lock for a moment
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
        """Whether a process holds the lock. Creates no file."""
        if not self.path.exists():
            return False
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            return True
        self.lock.release()
        return False


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    with replace_file(path) as f:
        f.write(data)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to during the block, under a temporary name. At its end it is synchronised and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_no_folder(path)
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}{PARTIAL}")
    try:
        with partial.open("wb") as f:
            yield f
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
    """The final name of a partial file; None for other files."""
    found = PARTIAL_NAME.fullmatch(path.name)
    return found[1] if found else None


def remove_partials(folder: Path, names: Collection[str]) -> None:
    """Delete the partial files of these names, which a killed process left behind."""
    for path in folder.glob(f".*{PARTIAL}"):
        if parse_partial_name(path) in names:
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file; indent=None takes half the time."""
    write_file(path, (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_bytes(path: Path, follow: bool = True) -> bytes:
    """The content of a regular file; `follow` allows links.

    Anything else is a `DataError`: reading a pipe or a device may never end.
    """
    if not follow and path.is_symlink():
        raise DataError(f"{path} is a link, not a file")
    # O_NONBLOCK exists on Unix only, O_BINARY on Windows only.
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
        raise DataError(f"{path} is damaged ({error}): delete it and create it again") from None


def parse_json(text: bytes) -> Any:
    """Parse strict JSON: no NaN, no infinities, no excessive nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def as_folder(path: str | Path) -> Path:
    """The path of a folder. An empty string is refused: it would mean the working directory."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise UsageError(f"the path of a folder must be a string or a Path, not {path!r}")
    if path == "" or "\0" in str(path):
        state = "contains NUL" if path else "is empty"
        raise UsageError(f"the path of the folder {state}: {REMEDY}")
    return Path(path)


def check_folder(folder: Path, kind: str, names: Collection[str] = ()) -> set[str]:
    """Refuse a folder that is not ours or holds foreign files of these names; returns the names in its manifest.

    Nothing is written.

    Args:
        folder: may be empty or missing.
        kind: run, report, tensorboard or demo.
        names: files and folders to be written, relative to the folder; * is a wildcard.
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file, not a folder: {REMEDY}")
    # List the files before reading the manifest: another process may write its manifest, then files, in between.
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
    """Check a folder, then add these names to its manifest. Call it before writing the first file."""
    ours = check_folder(folder, kind, names)
    if not ours.issuperset(names) or not (folder / MANIFEST).is_file():
        write_manifest(folder, kind, ours.union(names))


def remove_stale(folder: Path, kind: str, names: Collection[str]) -> None:
    """Delete the files that the manifest lists, except these."""
    remove_files(folder, read_manifest(folder, kind).difference(names))
    write_manifest(folder, kind, names)


def remove_files(folder: Path, names: Collection[str]) -> None:
    """Delete these files if they exist; folders are kept."""
    for name in find_existing(folder, names):
        if not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)


def find_existing(folder: Path, names: Collection[str]) -> list[str]:
    """Which of these names exist, broken links included."""
    return sorted(found for name in names for found in glob.glob(name, root_dir=folder))  # noqa: PTH207


def may_precede_manifest(path: Path) -> bool:
    """Whether this is a file of ours that may exist before the manifest: a lock, or a partial manifest.

    A partial manifest is never deleted: another process may be writing it.
    """
    empty_lock = path.name == LOCK and path.is_file() and not path.stat().st_size
    return empty_lock or parse_partial_name(path) == MANIFEST


def write_manifest(folder: Path, kind: str, names: Collection[str]) -> None:
    """Write the manifest of a folder."""
    write_json(folder / MANIFEST, {"format": FORMAT, "kind": kind, "names": sorted(names)})


def read_manifest(folder: Path, kind: str) -> set[str]:
    """The names in the manifest of a folder, which must be of this kind. All of them are inside the folder."""
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
    """Whether these are relative paths inside a folder."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return all(name and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts for name in names)
