"""What a redesign must not change: confusion matrices and α of short runs on digits, on a CPU with one thread.

    python tests/frozen/record.py write FILE     records every case into FILE
    python tests/frozen/record.py check FILE     computes every case again and names those that differ
    python tests/frozen/record.py gpu FOLDER     short CIFAR-100 runs on a GPU: a line each, and a hash of its logits

A case is a method, a remedy, a memory and settings; cases that are refused are recorded as refused. Six cases of
PODNet were recorded anew when a CPU began to sum squares of stage outputs instead of taking norms, which rounds
differently; with norms all 269 were still the same then.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
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
DATA = ("validation", "brightness")
PROTOCOL = ("order", "select")
REMEDY = ("alpha", "epsilon", "alpha_lr", "every", "hold_out", "count", "share", "mean")
NAMES = {"hold": "hold_out"}
"""settings that had another name when the records were made"""


def made(case: Case, dataset: str = "digits", epochs: int = 3, base: int = 4, steps: int = 3) -> Any:
    """The run of a case."""
    from equipoise import methods
    from equipoise.data.datasets import SHAPES
    from equipoise.runs.settings import Data, Protocol, Run
    from equipoise.step import plan_for

    name, remedy, memory, settings = case
    settings = {NAMES.get(k, k): v for k, v in settings.items()}

    def of(names: tuple[str, ...]) -> dict[str, Any]:
        return {k: v for k, v in settings.items() if k in names}

    kind = methods.find_method(name)
    rest = set(settings) - {*RECIPE, *DATA, *PROTOCOL, *REMEDY, "seed", "precision", "finetune"}
    own: dict[str, Any] = {k: settings[k] for k in rest}
    if "finetune" in settings:
        usual: Any = kind()
        own["finetune"] = replace(usual.finetune, epochs=20 if settings["finetune"] else 0)
    method = kind(remedy=methods.find_remedy(remedy)(**of(REMEDY)), **own)
    recipe = replace(method.recipe(plan_for(SHAPES[dataset])), epochs=epochs, **of(RECIPE))
    protocol = Protocol(base, steps, memory=memory, **of(PROTOCOL))
    return Run(method, Data(dataset, **of(DATA)), protocol, recipe, settings.get("seed", 0))


def computed(case: Case) -> dict[str, Any]:
    """What a case comes to."""
    from equipoise import EquipoiseError
    from equipoise.runs.run import run
    from equipoise.runs.settings import Machine

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = run(made(case), Path(folder) / "run", Machine("cpu", case[3].get("precision", "auto")))
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
    from equipoise.runs.settings import Machine, Options

    data = Path.home() / "data"
    place = folder / name_of(case).replace(" ", "_").replace("=", "-")
    result = run(made(case, "cifar100", 8, 50, 5), place, Machine("cuda"), Options(data))
    learner = Learner.load(place / "model", device="cuda")
    z = learner.logits(load("cifar100", data).test.x[:2000]).cpu().numpy()
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
