"""What a result was computed with and on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__
from .gpu import peak_memory
from .store import code_fingerprint


def cores() -> int:
    """CPU cores that this process may use; of all there are, where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of all that takes part in a result."""
    return {
        "equipoise": __version__,
        "code": code_fingerprint(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run was computed on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    found: dict[str, Any] = {"device": device.type, "cpu": cpu, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["peak_memory_mib"] = round(peak_memory(device))
    return found
