"""Peak memory and extra streams of GPUs."""

from __future__ import annotations

import threading

import torch

_before: dict[int, float] = {}  # peak memory of each GPU before the last reset


def get_peak_memory(device: torch.device) -> float:
    """Peak GPU memory of this process, in MiB."""
    return max(_before.get(get_gpu_index(device), 0.0), get_recent_peak_memory(device))


def get_recent_peak_memory(device: torch.device) -> float:
    """Peak GPU memory since `reset_peak_memory`, in MiB."""
    return torch.cuda.max_memory_allocated(device) / 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `get_recent_peak_memory`."""
    _before[get_gpu_index(device)] = get_peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)


def get_gpu_index(device: torch.device) -> int:
    """The index of a GPU; that of the current one, if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


class Streams(threading.local):
    """Extra streams of GPUs: one for each purpose and thread.

    Streams are reused, since cuBLAS allocates a permanent workspace for each (32 or 64 MiB on an H200).
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], torch.cuda.Stream] = {}

    def get(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        """The stream of a GPU for a purpose."""
        key = get_gpu_index(device), purpose
        if key not in self.known:
            self.known[key] = torch.cuda.Stream(key[0])  # type: ignore[no-untyped-call]
        return self.known[key]

    def forget(self) -> None:
        """Use new streams from now on."""
        self.known.clear()


STREAMS = Streams()
