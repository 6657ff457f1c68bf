"""Where every random number comes from: a generator named by what it is for, never the global seed."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator for one purpose, such as (seed, step 3, "augment", epoch 17).

    It depends on nothing that happened before. So a checkpoint holds no generator state, a run that goes on
    after a kill draws what it would have drawn, and looking at the model in between changes nothing.
    """
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))


def derive_seed(seed: int, *purpose: str | int) -> int:
    """The seed of that generator."""
    name = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
