"""Versions, hardware and code behind a result."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..engine.gpu import get_peak_memory
from ..method import Method
from ..settings import digest


def count_cores() -> int:
    """Number of CPU cores that this process may use; of all cores, if the system does not report that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def list_versions() -> dict[str, str]:
    """Versions of everything that affects a result."""
    return {
        "equipoise": __version__,
        "code": hash_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Device, CPU, GPU and peak memory."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    found: dict[str, Any] = {"device": device.type, "cpu": cpu, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["peak_memory_mib"] = round(get_peak_memory(device))
    return found


NUMERIC = ("data", "nets", "engine", "learner", "method.py", "step.py", "losses.py", "remedies.py")
"""packages and modules that compute numbers, besides the method's own file"""
MEASURING = ("runs/plan.py", "runs/metrics.py")
"""modules that split the data and measure accuracy"""


class DocstringRemover(ast.NodeTransformer):
    """Removes the statements that are a constant alone, which docstrings are."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove the statement if it is a constant."""
        return None if isinstance(node.value, ast.Constant) else node


@functools.cache
def hash_source(source: bytes) -> str:
    """A hash of what a file computes: comments, docstrings and layout do not change it."""
    tree = DocstringRemover().visit(ast.parse(source))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@functools.cache
def hash_code() -> str:
    """A hash of the source that computes results: steps computed by other code are not reused."""
    h = hashlib.sha256()
    root = Path(__file__).parents[1]
    for name in (*NUMERIC, *MEASURING):
        for path in sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]:
            h.update(f"{path.relative_to(root).as_posix()} {hash_source(path.read_bytes())}".encode())
    return h.hexdigest()[:16]


def hash_method_code(method: Method) -> str | None:
    """A hash of the source that computes a step of the method, including its own classes.

    None for a method whose source is not in a file.
    """
    parts = [method, method.remedy, *(getattr(method, f.name) for f in fields(method))]
    hosts = [part for part in parts[2:] if isinstance(part, Method)]
    sources = [hash_code(), *(hash_method_code(host) for host in hosts)]
    kinds = {kind for part in parts[:2] for kind in type(part).__mro__ if kind is not object}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        try:
            sources.append(hash_source(Path(inspect.getfile(kind)).read_bytes()))
        except (OSError, TypeError, SyntaxError, ValueError):  # ValueError where it is no text
            return None
    return None if None in sources else digest([type(method).__qualname__, *sources])
