"""NVIDIA's Multi-Process Service (MPS), which lets processes share a GPU instead of taking turns."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from subprocess import DEVNULL, PIPE

import torch

PATIENCE = 5
"""seconds that MPS has to stop"""

PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
"""environment variable with the priority of a client"""
YIELDING = "1"
"""below normal (0)"""

# A killed queue cannot stop MPS. This shell command does: its `read` returns when the queue's end of the pipe closes.
LAST_WORDS = 'read _; echo "quit -t $1" | timeout 60 "$2"; rm -rf "$3"'

log = logging.getLogger("equipoise")


@contextlib.contextmanager
def run_mps() -> Iterator[None]:
    """Run MPS during the block, if available and not running already."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not torch.cuda.is_available() or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    if control is None:
        log.warning("nvidia-cuda-mps-control was not found: runs on one GPU take turns, which is slower")
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a slow server may still write there
        # A server renumbers its visible GPUs for clients, who use the user's numbers: so it sees all GPUs.
        all_seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        begun = subprocess.run([control, "-d"], env=all_seen | places, capture_output=True, text=True)
        if begun.returncode:
            why = begun.stderr.strip() or f"code {begun.returncode}"
            log.warning("MPS does not start (%s): runs on one GPU take turns, which is slower", why)
            yield
            return
        watchdog = None
        try:
            os.environ.update(places)
            words = ["sh", "-c", LAST_WORDS, "sh", str(PATIENCE), control, folder]
            watchdog = subprocess.Popen(words, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            yield
        finally:
            quit_command = f"quit -t {PATIENCE}\n"  # waits so long for clients, then kills them
            try:
                subprocess.run([control], input=quit_command, capture_output=True, text=True, timeout=2 * PATIENCE)
            except subprocess.TimeoutExpired:
                log.warning("MPS does not end: kill nvidia-cuda-mps-control if it is in the way")
            finally:
                for name in places:
                    os.environ.pop(name, None)
            if watchdog is not None:  # only now: it guards the lines above
                watchdog.kill()
                watchdog.communicate()
