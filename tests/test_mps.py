"""NVIDIA's MPS, by a program in its place that notes how it is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.runs.mps import run_mps


def control_that_says(where: Path, then: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of NVIDIA's: a program that notes how it is called, and then does something."""
    control = where / "nvidia-cuda-mps-control"
    noted = f'echo "$1 $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" >> {where}/said'
    control.write_text(f'#!/bin/sh\n{noted}\n[ "$1" = -d ] || {then}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(where), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return where / "said"


def test_the_server_that_shares_gpus_numbers_them_as_its_clients_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = control_that_says(tmp_path, f"cat >> {tmp_path}/said", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    heirs: list[Any] = []

    class Heir(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, words: list[str], **how: Any) -> None:
            super().__init__(words, **how)
            if words[0] == "sh":
                heirs.append(self)

    monkeypatch.setattr("subprocess.Popen", Heir)
    with run_mps():
        assert [heir.poll() for heir in heirs] == [None]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert said.read_text() == f"-d  {os.environ['CUDA_MPS_PIPE_DIRECTORY']}\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert said.read_text().count("quit -t 5\n") == 1 and said.read_text().endswith("quit -t 5\n")
    assert [heir.poll() for heir in heirs] == [-signal.SIGKILL], "it is not needed any more"


def test_a_server_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = control_that_says(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr("equipoise.runs.mps.PATIENCE", 0.2)
    began = time.monotonic()
    with run_mps():
        pass
    assert len(said.read_text().splitlines()) == 2 and time.monotonic() - began < 60
    assert "MPS does not end" in caplog.text


def test_without_it_a_sentence_says_so_and_all_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with run_mps():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "nvidia-cuda-mps-control was not found: runs on one GPU take turns" in caplog.text


@pytest.mark.parametrize(("words", "why"), [("Cannot find MPS", "Cannot find MPS"), ("", "code 7")])
def test_a_driver_that_does_not_start_it_is_quoted_and_all_goes_on(
    words: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = control_that_says(tmp_path, "true", monkeypatch)
    (tmp_path / "nvidia-cuda-mps-control").write_text(f"#!/bin/sh\necho $1 >> {said}\necho {words} >&2\nexit 7\n")
    with run_mps():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert f"MPS does not start ({why}): runs on one GPU take turns" in caplog.text
    assert said.read_text() == "-d\n", "what did not start is not ended"


def test_somebody_elses_is_used_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = control_that_says(tmp_path, "true", monkeypatch)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/theirs")
    with run_mps():
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/theirs"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/theirs" and not said.exists()


QUEUE = """
import os, sys, time, types
sys.modules["torch"] = torch = types.ModuleType("torch")  # of which only this is asked
torch.cuda = types.SimpleNamespace(is_available=lambda: True)
from equipoise.runs.mps import run_mps
with run_mps():
    print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_queue_that_is_killed(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = control_that_says(tmp_path, f"cat >> {tmp_path}/said", monkeypatch)
    queue = subprocess.Popen([sys.executable, "-c", QUEUE], stdout=subprocess.PIPE, text=True)
    assert queue.stdout is not None
    folder = Path(queue.stdout.readline().strip())
    assert folder.is_dir() and "quit" not in said.read_text()
    queue.send_signal(number)
    queue.wait()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists() and said.read_text().endswith("quit -t 5\n")
