"""Device, precision and engine of the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import RunError, UsageError, format_count
from .cuda_graph import ENGINES, Engine


def resolve_device(name: str | torch.device) -> torch.device:
    """The device for auto, cpu or cuda; a missing GPU is an error."""
    name = str(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda, not {name!r}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device must be auto, cpu or cuda, not {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        words = f"device {name} was not found: torch sees {format_count(count, 'GPU')}; use"
        raise RunError(f"{words} device='cpu'", f"{words} --device cpu")
    return device


def resolve_precision(name: str, device: torch.device) -> bool:
    """Whether to compute in bf16; auto: on GPUs that support it."""
    if name not in ("auto", "fp32", "bf16"):
        raise UsageError(f"precision must be auto, fp32 or bf16, not {name!r}")
    return name == "bf16" or (name == "auto" and device.type == "cuda" and _has_bf16(device))


def _has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def resolve_engine(name: str, device: torch.device) -> Engine:
    """The engine by name; auto is the fastest one for the device."""
    if name == "auto":
        return ENGINES[0] if device.type == "cuda" else "eager"
    if name not in ENGINES:
        raise UsageError(f"engine must be auto, {', '.join(ENGINES)}, not {name!r}")
    if name != "eager" and device.type != "cuda":
        raise UsageError(f"engine {name} needs a GPU: use auto or eager")
    return name


@contextlib.contextmanager
def reset_torch_settings(device: torch.device) -> Iterator[None]:
    """Reset autocast, inference mode and default dtype to torch's defaults, whatever the caller has set."""
    default, plain = torch.get_default_dtype(), torch.autocast(device.type, enabled=False)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), plain, use_device(device):
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def use_device(device: torch.device, tuned: bool = True) -> Iterator[None]:
    """Select the GPU, disable TF32, and with `tuned` let cuDNN benchmark convolutions. No effect on a CPU."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    tried = cudnn.benchmark
    try:
        allowed = cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # the user has set precisions by torch's newer names
        allowed = None
    try:
        cudnn.benchmark = tuned  # takes seconds, which pays for training only
        if allowed is not None:
            cudnn.allow_tf32 = matmul.allow_tf32 = False
        with torch.cuda.device(device):
            yield
    finally:
        cudnn.benchmark = tried
        if allowed is not None:
            cudnn.allow_tf32, matmul.allow_tf32 = allowed
