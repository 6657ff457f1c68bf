"""NVIDIA's Multi-Process Service: without it, processes on one GPU take turns instead of sharing it."""

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
"""seconds that it may take to end"""

PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
"""where it looks who goes first on a GPU"""
YIELDING = "1"
"""below normal, which is 0"""

# A queue that is killed can end nothing itself: this waits for the end of what the queue could write to it.
LAST_WORDS = 'read _; echo "quit -t $1" | timeout 60 "$2"; rm -rf "$3"'

log = logging.getLogger("equipoise")


@contextlib.contextmanager
def run_mps() -> Iterator[None]:
    """MPS while the block runs, if this machine has it, unless somebody has started it already."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not torch.cuda.is_available() or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    if control is None:
        log.warning("nvidia-cuda-mps-control was not found: runs on one GPU take turns, which is slower")
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a server that lingers writes there
        # What a server sees is numbered anew for its clients, who look for the user's numbers: so it sees them all.
        all_seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        begun = subprocess.run([control, "-d"], env=all_seen | places, capture_output=True, text=True)
        if begun.returncode:
            why = begun.stderr.strip() or f"code {begun.returncode}"
            log.warning("MPS does not start (%s): runs on one GPU take turns, which is slower", why)
            yield
            return
        heir = None
        try:
            os.environ.update(places)
            words = ["sh", "-c", LAST_WORDS, "sh", str(PATIENCE), control, folder]
            heir = subprocess.Popen(words, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            yield
        finally:
            said = f"quit -t {PATIENCE}\n"  # it waits that long for its clients, then ends them
            try:
                subprocess.run([control], input=said, capture_output=True, text=True, timeout=2 * PATIENCE)
            except subprocess.TimeoutExpired:
                log.warning("MPS does not end: kill nvidia-cuda-mps-control if it is in the way")
            finally:
                for name in places:
                    os.environ.pop(name, None)
            if heir is not None:  # not before: until now it was still needed
                heir.kill()
                heir.communicate()
