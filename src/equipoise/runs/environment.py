"""What a result was computed with and on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..engine.gpu import peak_memory
from ..learner.record import digest

NOT_NUMERIC = {"__main__", "cli", "errors", "paper", "report", "runs/command", "runs/estimate", "runs/folder"}
NOT_NUMERIC |= {"runs/mps", "runs/progress", "runs/queue", "runs/queue_progress", "runs/tensorboard", "runs/workers"}
"""modules and rooms that cannot change a result"""

UNKNOWN = "unknown"


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


@functools.cache
def code_fingerprint() -> str:
    """A hash of the source that determines results: a step computed by other code is never reused."""
    h = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if NOT_NUMERIC.isdisjoint((inside.parts[0], inside.with_suffix("").as_posix())):
            h.update(str(inside).encode() + path.read_bytes())
    return h.hexdigest()[:16]


def method_code(method: object) -> str | None:
    """A hash of the files of a method from outside this package; those inside are part of `code_fingerprint`.

    None for a method of this package, `UNKNOWN` for one typed at a prompt, of which no file tells.
    """
    outside = [k for k in type(method).__mro__ if k.__module__.split(".")[0] not in ("equipoise", "builtins")]
    if not outside:
        return None
    try:
        sources = [hashlib.sha256(Path(inspect.getfile(k)).read_bytes()).hexdigest() for k in outside]
    except (OSError, TypeError):
        return UNKNOWN
    return digest([type(method).__qualname__, sources])
