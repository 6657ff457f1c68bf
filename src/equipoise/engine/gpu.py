"""What a GPU is asked for besides computing: the peak of its memory, and further streams."""

from __future__ import annotations

import threading

import torch

_before: dict[int, float] = {}  # by GPU, the peak before its counting began anew


def get_peak_memory(device: torch.device) -> float:
    """The most memory of a GPU, in MiB, that tensors of this process have had at once, ever."""
    return max(_before.get(get_gpu_index(device), 0.0), get_recent_peak_memory(device))


def get_recent_peak_memory(device: torch.device) -> float:
    """The same since `count_memory_anew`."""
    return torch.cuda.max_memory_allocated(device) / 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of a GPU's memory so far, as far as `recent_peak_memory` goes."""
    _before[get_gpu_index(device)] = get_peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)


def get_gpu_index(device: torch.device) -> int:
    """Which GPU a device is: the current one, where it does not say."""
    return torch.cuda.current_device() if device.index is None else device.index


class Streams(threading.local):
    """Further streams of GPUs, one for each purpose, in each thread.

    Each is used again and again: where matrices are multiplied on a stream, cuBLAS takes memory for it, for good (32 or
    64 MiB on an H200).
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], torch.cuda.Stream] = {}

    def get(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        """The stream of a GPU that is for this."""
        key = get_gpu_index(device), purpose
        if key not in self.known:
            self.known[key] = torch.cuda.Stream(key[0])  # type: ignore[no-untyped-call]
        return self.known[key]

    def forget(self) -> None:
        """Take others from now on."""
        self.known.clear()


STREAMS = Streams()
