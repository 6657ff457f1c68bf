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


_before: dict[int, float] = {}  # by GPU, the peak before its counting began anew


def peak_memory(device: torch.device) -> float:
    """The most memory of a GPU, in MiB, that tensors of this process have had at once, ever."""
    return max(_before.get(_number(device), 0.0), recent_peak_memory(device))


def recent_peak_memory(device: torch.device) -> float:
    """The same since `count_memory_anew`."""
    return torch.cuda.max_memory_allocated(device) / 2**20


def count_memory_anew(device: torch.device) -> None:
    """Forget the peak of a GPU's memory so far, as far as `recent_peak_memory` goes."""
    _before[_number(device)] = peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
