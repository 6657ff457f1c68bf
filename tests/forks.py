"""Processes that are forked from one that has imported what takes two seconds to import, instead of being spawned."""

from __future__ import annotations

import multiprocessing.context
import os
from typing import Any

from equipoise.runs.environment import hash_code


class ForkedProcess(multiprocessing.context.ForkServerProcess):
    """A process with the environment of the one that begins it, as one that is spawned."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class Forks(multiprocessing.context.ForkServerContext):
    """What `multiprocessing.get_context` gives."""

    Process = ForkedProcess


hash_code()  # once for all: it reads the whole source
FORKS = Forks()
FORKS.set_forkserver_preload(["forks", "sklearn.cluster", "equipoise.runs.run", "equipoise.cli.speed"])
