"""Runs that are killed at random moments and started again, compared with the same runs left alone.

    python tests/kills.py                                          every method and remedy on digits, 200 kills
    python tests/kills.py --device cuda --data DIR --kills 20      those that our kernels train, on CIFAR-100

Not one of the tests: it takes minutes. It ends with 1 if a run that was killed differs from one that was not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from equipoise import EquipoiseError, Finetune, Recipe, methods
from equipoise.data.datasets import load
from equipoise.remedies import REMEDIES, BalancedFinetuning
from equipoise.runs.record import read_result
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run

SHORT = Finetune(3, 0.05, batch=16, batch_norm="train")


def cases(device: str) -> dict[str, Run]:
    """Every method with its own fine-tuning, and the first of them with every remedy; on a GPU those with stages."""
    made = {name: kind() for name, kind in methods.find_built_in().items()}
    for name, method in made.items():
        if hasattr(method, "finetune"):
            made[name] = replace(method, finetune=SHORT)
    made |= {f"il-baseline {name}": methods.find_method("il-baseline")(kind()) for name, kind in REMEDIES.items()}
    made["il-baseline balanced-finetuning"] = methods.find_method("il-baseline")(BalancedFinetuning(SHORT))
    if device != "cuda":
        recipe = Recipe(4, 0.05, batch=32)
        return {
            name: Run(method, Data("digits"), Protocol(4, 2, memory=method.default_memory), recipe)
            for name, method in made.items()
        }
    few = ("podnet", "lucir", "bic", "ss-il", "il-baseline meta", "il-baseline balanced-finetuning")
    own = {name: Recipe(4, 0.1, clamp=5.0 if name == "podnet" else 0.0) for name in few}
    return {name: Run(made[name], Data("cifar100"), Protocol(50, 2, memory="20"), own[name]) for name in few}


def attempt(one: Run, out: Path, device: str, data: Path | None) -> None:
    """Do a run, or go on with it."""
    torch.set_num_threads(1)
    run(one, out, Machine(device), Options(data=data, checkpoint=0.0))


def start(*arguments: Any) -> Any:
    """An attempt in a process of its own, which has torch already."""
    process = multiprocessing.get_context("fork").Process(target=attempt, args=arguments)
    process.start()
    return process


def outcome(out: Path) -> tuple[Any, list[str]]:
    """What a run came to: its confusion matrix, and the files of its learner, which are named by their contents."""
    result = read_result(out)
    assert result is not None, f"{out} has no result"
    return result["confusion"], sorted(path.name for path in (out / "model").glob("*.safetensors"))


def kill_until_done(rng: random.Random, seconds: float, *arguments: Any) -> int:
    """How many kills it takes until an attempt ends before it is killed; later ones are given more time."""
    kills = 0
    while True:
        process = start(*arguments)
        process.join(rng.uniform(0, seconds * (0.4 + 0.1 * kills)))
        if process.exitcode is not None:
            assert process.exitcode == 0, "an attempt failed: its error is on stderr"
            return kills
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1


def main() -> None:
    """Go round the cases until there were so many kills."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="names of cases; all if none are named")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    f = parser.parse_args()
    if f.device == "cpu":
        load("digits")
    rng, kills, differ = random.Random(f.seed), 0, 0
    alone: dict[str, tuple[float, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while kills < f.kills:
            for name, one in cases(f.device).items():
                if f.cases and name not in f.cases:
                    continue
                where = Path(folder) / "run"
                if name not in alone:
                    began = time.monotonic()
                    straight = start(one, where, f.device, f.data)
                    straight.join()
                    if straight.exitcode:
                        sys.exit(f"{name} failed")
                    alone[name] = time.monotonic() - began, outcome(where)
                    shutil.rmtree(where)
                took = kill_until_done(rng, alone[name][0], one, where, f.device, f.data)
                same = outcome(where) == alone[name][1]
                kills, differ = kills + took, differ + (not same)
                print(f"{name}: {took} kills, {'the same' if same else 'DIFFERS'}", flush=True)
                shutil.rmtree(where)
                if kills >= f.kills:
                    break
    print(f"{kills} kills, {differ} different results")
    sys.exit(bool(differ))


if __name__ == "__main__":
    try:
        main()
    except EquipoiseError as error:
        sys.exit(str(error))
