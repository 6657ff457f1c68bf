"""Processes that are forked from one that has imported what takes two seconds to import, instead of being spawned."""

from __future__ import annotations

import multiprocessing.context
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from squares import digits_of

from equipoise.__main__ import main
from equipoise.data import datasets


class ForkedProcess(multiprocessing.context.ForkServerProcess):
    """A process with the environment of the one that begins it, as one that is spawned, and with as many digits."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.environment, self.digits = dict(os.environ), datasets.DIGITS_TRAIN

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:  # Python 3.11 tells the one that is forked from no other way
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        with digits_of(self.digits):
            super().run()


class Forks(multiprocessing.context.ForkServerContext):
    """What `multiprocessing.get_context` gives."""

    Process = ForkedProcess


FORKS = Forks()
FORKS.set_forkserver_preload(["forks", "warm"])


class Command:
    """The command in a forked process, in a session of its own as in a terminal; what it prints goes to two files.

    Its workers are begun by `start`: forked from it, or spawned as they are for users.
    """

    def __init__(self, words: list[str], folder: Path, start: str = "fork", terminal: str | None = None) -> None:
        printed = Path(tempfile.mkdtemp(dir=folder, prefix=".printed-"))
        self.out, self.err = printed / "out", printed / "err"
        for path in (self.out, self.err):
            path.touch()
        to = [terminal] * 2 if terminal else [str(self.out), str(self.err)]
        self.process = FORKS.Process(target=run_words, args=(words, str(folder), start, *to))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus a signal."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """What it printed, when it has ended."""
        self.process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self.out.read_text(), self.err.read_text()


def run_words(words: list[str], folder: str, start: str, out: str, err: str) -> None:
    """As `equipoise WORDS` in a folder."""
    os.setsid()
    os.chdir(folder)
    context = multiprocessing.get_context(start)
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
    sys.argv = ["equipoise", *words]
    main()
