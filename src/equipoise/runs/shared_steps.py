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
    """Where shared steps are kept unless told otherwise."""
    return Path(os.environ.get("EQUIPOISE_STORE") or Path.home() / ".cache" / "equipoise" / "store")


def parse_store(said: str | None) -> Path | None:
    """Where steps are shared, by what was said: a folder, nowhere (`none`), or nothing, for where they usually are."""
    return None if said == "none" else Path(said) if said else find_default_store()


class SharedSteps:
    """A folder of learners, each saved at the end of a step's training, before its exemplars are chosen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_entry(self, key: str) -> Path:
        """The folder of one state."""
        return self.folder / key[:2] / key

    def has(self, key: str) -> bool:
        """Whether that state is here, whole."""
        return (self.find_entry(key) / saved.INFO).is_file()

    def claim(self, key: str, on_wait: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """The right to compute a state. While another process has it, this waits, and calls `on_wait` once."""
        path = self.find_entry(key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return files.Lease(path).hold(on_wait)

    def open(self) -> None:
        """Make sure that states can be kept here; else an OSError, before anything has been computed for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_file(self.folder / f".{os.getpid()}", b"")
        (self.folder / f".{os.getpid()}").unlink()

    def put(self, key: str, save: Callable[[Path], None]) -> None:
        """Keep a state, which `save` writes into a folder: under another name, then renamed. The first one stays."""
        partial = self.find_entry(key).with_name(f".{key}.{os.getpid()}{files.PARTIAL}")
        try:
            save(partial)
            try:
                partial.rename(self.find_entry(key))
            except OSError:
                if not self.has(key):  # what is in the way is not a state, but what is left of one
                    self.drop(key)
                    partial.rename(self.find_entry(key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def drop(self, key: str) -> None:
        """Forget a state, for instance a corrupt one; at once, whoever else is looking at it."""
        aside = self.find_entry(key).with_name(f".{key}.{os.getpid()}.dropped")
        with contextlib.suppress(FileNotFoundError):
            self.find_entry(key).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
