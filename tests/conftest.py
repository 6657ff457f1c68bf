"""What tests share: one thread (on a small shared machine two are several times slower), and a place of their own."""

import multiprocessing
import os

import matplotlib
import pytest
import torch
from forks import FORKS
from squares import READ_DIGITS

from equipoise.data import datasets

torch.set_num_threads(1)
os.fsync = lambda fd: None  # no test cuts the power, and waiting for the disk takes most of the time of a save
datasets._read_digits = READ_DIGITS


@pytest.fixture
def forked(monkeypatch):
    """Processes that would be spawned are forked from one that has imported what takes two seconds to import."""
    get_context = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: FORKS if method == "spawn" else get_context(method)
    )


@pytest.fixture
def isolated(tmp_path, monkeypatch):
    """Everything that a command writes by itself lands in tmp_path, and it prints as to a pipe."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # else every process would look for fonts again
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EQUIPOISE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("FORCE_COLOR", "COLUMNS", "EQUIPOISE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
