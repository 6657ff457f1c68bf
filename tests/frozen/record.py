"""What a redesign must not change: confusion matrices and α of short runs on digits, on a CPU with one thread.

    python tests/frozen/record.py write FILE     records every case into FILE
    python tests/frozen/record.py check FILE     computes every case again and names those that differ
    python tests/frozen/record.py gpu FOLDER     short CIFAR-100 runs on a GPU: a line each, and a hash of its logits

A case is a method, a remedy, a memory and settings; cases that are refused are recorded as refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

METHODS = ("il-baseline", "lucir", "podnet", "ncm", "slda", "fine-tuning", "joint")
REMEDIES = (
    "standard", "balanced", "relaxed", "meta", "memory-oversampling", "class-oversampling", "loss-rescaling",
    "balanced-finetuning", "separated-softmax",
)  # fmt: skip
MEMORIES = ("5", "0", "total:40", "all")

Case = tuple[str, str, str, dict[str, Any]]

MORE: list[Case] = [
    ("lucir", "standard", "5", {"finetune": True}),
    ("lucir", "standard", "5", {"ratio": "paper", "imprint": False}),
    ("lucir", "balanced", "5", {"alpha": 0.25, "last": "short"}),
    ("podnet", "standard", "5", {"finetune": False}),
    ("podnet", "standard", "5", {"nca": "paper", "similarity": "paper", "last": "short"}),
    ("podnet", "standard", "5", {"spatial": "paper", "lambda_c": 0.01}),
    ("podnet", "relaxed", "0", {"epsilon": "1%", "brightness": 0.25}),
    ("podnet", "class-oversampling", "5", {"last": "short"}),
    ("il-baseline", "separated-softmax", "5", {"share": 0.2, "mean": "all"}),
    ("il-baseline", "standard", "5", {"weights": "ones", "distil": "by-step"}),
    ("il-baseline", "balanced-finetuning", "5", {"last": "short", "batch": 50}),
    ("il-baseline", "meta", "20", {"count": "all", "hold": 0.25, "every": 3, "last": "short"}),
    ("il-baseline", "meta", "5", {"alpha_lr": 1.0, "every": 2, "clamp": 0.05}),
    ("il-baseline", "balanced", "5", {"schedule": "cosine", "clamp": 0.1, "momentum": 0.5, "weight_decay": 0.01}),
    ("il-baseline", "balanced", "5", {"validation": 0.2, "order": "7", "select": "random", "seed": 3}),
    ("il-baseline", "balanced", "5", {"precision": "bf16"}),
    ("ncm", "standard", "0", {"unit_length": False}),
]


def cases() -> list[Case]:
    """All of them."""
    return [(m, r, memory, {}) for m, r, memory in itertools.product(METHODS, REMEDIES, MEMORIES)] + MORE


def name_of(case: Case) -> str:
    """A case in one line."""
    method, remedy, memory, settings = case
    return " ".join([method, remedy, f"memory={memory}", *(f"{k}={v}" for k, v in settings.items())])


RECIPE = ("last", "batch", "schedule", "clamp", "momentum", "weight_decay", "epochs")
RUN = ("validation", "order", "select", "seed", "precision", "brightness")


def made(
    case: Case, dataset: str = "digits", device: str = "cpu", epochs: int = 3, base: int = 4, steps: int = 3
) -> Any:
    """The run of a case."""
    from dataclasses import replace

    from equipoise import Balanced, Meta, Relaxed, Standard, methods
    from equipoise.data.datasets import SHAPES
    from equipoise.runs.run import Run

    name, remedy, memory, settings = case
    losses = {"standard": Standard, "balanced": Balanced, "relaxed": Relaxed, "meta": Meta}
    own = {k: v for k, v in settings.items() if k not in RECIPE + RUN}
    of_loss = {k: own.pop(k) for k in ("alpha", "epsilon", "alpha_lr", "every", "hold", "count") if k in own}
    for old, new in (("old_share", "share"), ("separated_mean", "mean")):
        if new in own:
            own[old] = own.pop(new)
    if remedy not in losses:
        own["mitigation"] = remedy
    method = methods.named(name)(losses.get(remedy, Standard)(**of_loss), **own)
    usual = method.recipe(SHAPES[dataset])
    recipe = replace(usual, epochs=epochs, **{k: v for k, v in settings.items() if k in RECIPE})
    of_run = {k: v for k, v in settings.items() if k in RUN}
    return Run(method, dataset, base=base, steps=steps, memory=memory, recipe=recipe, device=device, **of_run)


def computed(case: Case) -> dict[str, Any]:
    """What a case comes to."""
    from equipoise import EquipoiseError
    from equipoise.runs.run import run

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = run(made(case), Path(folder) / "run")
    except EquipoiseError:
        return {"refused": True}
    return {"alpha": result["alpha"], "confusion": result["confusion"]}


GPU: list[Case] = [
    ("il-baseline", "standard", "20", {}),
    ("il-baseline", "balanced", "20", {"last": "short"}),
    ("il-baseline", "meta", "20", {}),
    ("lucir", "balanced", "20", {}),
    ("podnet", "standard", "20", {}),
]


def on_gpu(case: Case, folder: Path) -> str:
    """A short run on CIFAR-100 on a GPU, in a line."""
    from equipoise import Learner
    from equipoise.data.datasets import load
    from equipoise.runs.run import run

    asked = made(case, "cifar100", "cuda", epochs=8, base=50, steps=5)
    place = folder / name_of(case).replace(" ", "_").replace("=", "-")
    result = run(asked, place, data=Path.home() / "data")
    learner = Learner.load(place / "model", device="cuda")
    z = learner.logits(load("cifar100", Path.home() / "data").test.x[:2000]).cpu().numpy()
    digest = hashlib.sha256(np.ascontiguousarray(z).tobytes()).hexdigest()[:16]
    mib = max(step["training_mib"] for step in result["steps"])
    return f"{name_of(case)}: {result['average_incremental_accuracy']:.4f} {digest} {mib:.0f} MiB"


def main(what: str, where: str) -> None:
    """Do what the command line says."""
    if what == "gpu":
        for case in GPU:
            print(on_gpu(case, Path(where)), flush=True)
        return
    every = cases()
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(map(name_of, every), pool.map(computed, every)))
    if what == "write":
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in found.items())
        Path(where).write_text("{\n" + lines + "\n}\n")
        return
    before = json.loads(Path(where).read_text())
    differ = [name for name in before if before[name] != found.get(name)]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(before) - len(differ)} of {len(before)} are the same")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main(*sys.argv[1:])
