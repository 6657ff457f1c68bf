"""Shared prefixes: the state after step t, kept under a hash of everything that determined it.

Runs that agree up to step t reuse it. With equal counts every loss of the paper is the same cross-entropy in
the base step, so one base step serves them all, whatever comes later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from .. import files
from ..learner import saved


def find_default_store() -> Path:
    """The default store: $EQUIPOISE_STORE or ~/.cache/equipoise/store."""
    return Path(os.environ.get("EQUIPOISE_STORE") or Path.home() / ".cache" / "equipoise" / "store")


def parse_store(text: str | None) -> Path | None:
    """The store for a flag: a folder, `none` to share nothing, or None for the default."""
    return None if text == "none" else Path(text) if text else find_default_store()


class SharedSteps:
    """A folder of learners, saved after a step's training, before its exemplars are chosen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_entry(self, key: str) -> Path:
        """The folder of one state."""
        return self.folder / key[:2] / key

    def has(self, key: str) -> bool:
        """Whether the state exists."""
        return (self.find_entry(key) / saved.INFO).is_file()

    def claim(self, key: str, on_wait: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Lock a state to compute it. If another process holds the lock, call `on_wait`, then wait."""
        path = self.find_entry(key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return files.Lease(path).hold(on_wait)

    def open(self) -> None:
        """Check that the folder is writable; else raise an OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_file(self.folder / f".{os.getpid()}", b"")
        (self.folder / f".{os.getpid()}").unlink()

    def put(self, key: str, save: Callable[[Path], None]) -> None:
        """Store a state atomically; `save` writes it into a folder. An existing state is kept."""
        partial = self.find_entry(key).with_name(f".{key}.{os.getpid()}{files.PARTIAL}")
        try:
            save(partial)
            try:
                partial.rename(self.find_entry(key))
            except OSError:
                if not self.has(key):  # the existing folder is incomplete
                    self.drop(key)
                    partial.rename(self.find_entry(key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def drop(self, key: str) -> None:
        """Delete a state, such as a damaged one, atomically."""
        aside = self.find_entry(key).with_name(f".{key}.{os.getpid()}.dropped")
        with contextlib.suppress(FileNotFoundError):
            self.find_entry(key).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
