"""Random generators named by their purpose; the global seed is never used."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator for one purpose, such as (seed, step 3, "augment", epoch 17).

    It depends on its name only. So checkpoints need no generator state, a resumed run draws the same numbers, and
    predicting during training changes nothing.
    """
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))


def derive_seed(seed: int, *purpose: str | int) -> int:
    """The seed of that generator."""
    name = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
