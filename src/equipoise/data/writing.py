"""Writes the shards of a packed folder, in several processes. Imports no torch: they start fast."""

from __future__ import annotations

import multiprocessing
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import files
from ..errors import DataError
from ..settings import digest
from .decode import BadImageError, Fit, decode
from .index import Row, name_shard
from .listing import Listing


class Task(NamedTuple):
    """A shard to write."""

    root: Path
    folder: Path
    number: int
    names: list[str]
    fit: Fit

    @property
    def shard(self) -> Path:
        """The file of pixels."""
        return self.folder / name_shard(self.number)

    @property
    def note(self) -> Path:
        """The file that says what is in it, until the index does."""
        return self.shard.with_suffix(".json")

    def find_key(self) -> str:
        """A hash of all that determines the shard, but the files."""
        return digest([asdict(self.fit), [os.fsencode(name).hex() for name in self.names]])


def write_shards(tasks: Sequence[Task], workers: int) -> Iterator[Task]:
    """Write these shards in several processes; gives each as it is done."""
    workers = min(workers, len(tasks))
    if workers < 2:
        for task in tasks:
            write_shard(task)
            yield task
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        futures = {pool.submit(write_shard, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            words = "a process that packs was killed, perhaps for want of memory"
            raise DataError(f"{words}: repeat the command to go on, with fewer --workers") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def end_with_parent() -> None:
    """End this process when its parent dies."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write_shard(task: Task) -> None:
    """Decode the images of a shard and write it, then what is in it."""
    entries: list[Any] = []
    levels = np.zeros(768, np.int64)
    with files.replace_file(task.shard) as f:
        for name in task.names:
            try:
                image, kinds = decode(files.read_bytes(task.root / name), name, task.fit)
            except (BadImageError, DataError, OSError) as error:
                unread = isinstance(error, OSError) and (error.strerror or "it cannot be read")
                entries.append(unread.lower() if unread else str(error))
                continue
            data = image.tobytes()
            f.write(data)
            entries.append([image.height, image.width, zlib.crc32(data), kinds])
            levels += image.histogram()
    files.write_json(task.note, {"key": task.find_key(), "entries": entries, "levels": levels.tolist()}, indent=None)


def read_note(task: Task) -> dict[str, Any] | None:
    """What is in a shard; None if it is not written, or not of this task."""
    try:
        note = files.read_json(task.note)
        stored = sum(3 * entry[0] * entry[1] for entry in note["entries"] if not isinstance(entry, str))
        whole = note["key"] == task.find_key() and task.shard.stat().st_size == stored
        return note if whole else None
    except (OSError, DataError, KeyError, TypeError):
        return None


def read_notes(listing: Listing, tasks: Sequence[Task]) -> tuple[list[Row], list[int]]:
    """What is known of each image, and how many pixels of the training images have each level."""
    rows: list[Row] = []
    levels = np.zeros(768, np.int64)
    images = [(*image, part) for part, images in enumerate((listing.train, listing.test)) for image in images]
    for task in tasks:
        note, offset = read_note(task), 0
        if note is None:
            raise DataError(f"{task.shard} was changed while it was packed: repeat the command")
        levels += 0 if images[len(rows)][2] else np.array(note["levels"])
        for entry in note["entries"]:
            name, label, part = images[len(rows)]
            if isinstance(entry, str):
                rows.append(Row(name, label, bool(part), task.number, fault=entry))
            else:
                h, w, checksum, kinds = entry
                rows.append(Row(name, label, bool(part), task.number, offset, h, w, checksum, kinds))
                offset += 3 * h * w
    return rows, levels.tolist()
