"""What Windows has not: every module is imported without it."""

from __future__ import annotations

import subprocess
import sys

ABSENT = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "crypt", "syslog", "readline")
"""modules of Python that are not there on Windows"""
FUNCTIONS = ("os.setsid", "os.fork", "os.getuid", "os.sched_getaffinity", "signal.pthread_sigmask")
"""and functions"""

IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys
import numpy, matplotlib.pyplot, PIL.Image, rich.progress, safetensors.torch, sklearn, torch  # they know Windows
import multiprocessing.context, multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker, torch.hub
absent, functions = sys.argv[1].split(), sys.argv[2].split()
sys.modules |= dict.fromkeys(absent)
for name in functions:
    module, function = name.split(".")
    delattr(sys.modules[module], function)
import equipoise
names = [m.name for m in pkgutil.walk_packages(equipoise.__path__, "equipoise.")]
for name in names:
    if not name.endswith("kernels.triton"):  # Triton itself is for Linux only
        importlib.import_module(name)
print(len(names))
"""


def test_every_module_is_imported_without_what_windows_lacks() -> None:
    words = [sys.executable, "-c", IMPORT_ALL, " ".join(ABSENT), " ".join(FUNCTIONS)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80
