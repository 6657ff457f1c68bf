"""Rewrites records from before the nested format into format 1: `python results/migrate.py results`.

All numbers are kept as they are. A record that has a format is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from equipoise import files, methods
from equipoise.runs.plan import compute_sizes, plan_steps, read_run
from equipoise.runs.record import FORMAT, find_fault
from equipoise.runs.settings import Data, Protocol, Run
from equipoise.settings import list_fields, to_plain
from equipoise.step import Finetune, Recipe

SHAPE, COUNTS = (3, 32, 32), (500,) * 100
"""of CIFAR-100, which all old records are of"""
RENAMED = {"hold": "hold_out", "old_share": "share", "separated_mean": "mean"}
"""settings of remedies"""
KEPT = ("average_incremental_accuracy", "average_incremental_accuracy_top5", "final", "forgetting", "alpha", "steps")
"""copied as they are"""


def remedy_of(old: dict[str, Any]) -> dict[str, Any]:
    """The remedy, of what were a loss and a mitigation."""
    loss = old["loss"]
    name = old["mitigation"] if old["mitigation"] != "none" else loss["name"]
    if old["mitigation"] != "none" and loss["name"] != "standard":
        raise SystemExit(f"{name} with the loss {loss['name']} is no remedy")
    kind = methods.find_remedy(name)
    known = {RENAMED.get(key, key): value for key, value in (old | loss).items()}
    own = {key: known[key] for key in list_fields(kind) if key in known}
    return to_plain(kind()) | own


def method_of(old: dict[str, Any]) -> dict[str, Any]:
    """The method with its remedy; LUCIR never fine-tuned, and PODNet did so in its own way."""
    for name, value in old.items():
        if name.startswith("refit_") and value is not None:
            raise SystemExit(f"no record was known to have its own {name}")
    default = to_plain(methods.find_method(old["name"])())
    own = {key: value for key, value in old.items() if key in default and key not in ("finetune", "remedy")}
    if old.get("finetune") not in (None, old["name"] == "podnet"):
        raise SystemExit(f"no record of {old['name']} was known to be without its default fine-tuning")
    return default | own | {"remedy": remedy_of(old)}


def check_refit(run: Run, refit: dict[str, Any] | None) -> None:
    """Refuse a record whose refit is not the fine-tuning that the new settings come to."""
    finetune: Finetune | None = getattr(run.method.remedy, "finetune", None)
    if finetune is None and run.method.remedy.keeps_finetuning and run.protocol.memory != "0":
        finetune = run.method.finetuning()
    if (refit is not None) != (finetune is not None and finetune.epochs > 0):
        raise SystemExit(f"{run}: refit {refit} is not {finetune}")
    if refit is not None and finetune is not None:
        now = finetune.recipe(run.recipe or Recipe())
        state = {"move": "train", "rest": "eval"}[refit["statistics"]]
        if to_plain(now) != refit["recipe"] or (finetune.what, finetune.batch_norm, finetune.distil) != (
            refit["what"],
            state,
            refit["taught"],
        ):
            raise SystemExit(f"{run}: refit {refit} is not {finetune}")


def stages_of(run: Run) -> list[dict[str, Any]]:
    """The trainings of each step; a step that is trained like the one before is left out."""
    stages: list[dict[str, Any]] = []
    for plan in plan_steps(run, compute_sizes(run, len(COUNTS)), COUNTS, SHAPE):
        now = [stage if isinstance(stage, str) else to_plain(stage) for stage in run.method.stages(plan)]
        if not stages or stages[-1]["stages"] != now:
            stages.append({"from": plan.t, "stages": now})
    return stages


def migrated(old: dict[str, Any]) -> dict[str, Any]:
    """The record in format 1."""
    flat, full, hardware = old["run"], old["in_full"], dict(old["hardware"])
    protocol = {name: flat[name] for name in list_fields(Protocol)}
    data = {"validation": flat["validation"], "brightness": full["augment"]["brightness"]}
    plain = {
        "method": method_of(full["method"]),
        "data": to_plain(Data(flat["dataset"], **data)),
        "protocol": {name: protocol[name] for name in ("base", "steps", "order", "memory", "select")},
        "recipe": full["recipe"],
        "seed": flat["seed"],
    }
    run = read_run(plain)
    if to_plain(run) != plain:
        raise SystemExit(f"not the same run when read again: {plain}")
    check_refit(run, old["refit"])
    engine = hardware.pop("engine")
    return {
        "format": FORMAT,
        "run": to_plain(run),
        "class_order": old["class_order"],
        "machine": {"device": flat["device"], "precision": flat["precision"], **hardware, "engine": engine},
        "versions": old["versions"],
        **{name: old[name] for name in KEPT},
        "confusion": old["confusion"],
        "resolved": {
            "data": flat["data"],
            "normalise": flat["normalise"],
            "augment": full["augment"],
            "stages": stages_of(run),
        },
        "reused": old["reused"],
        "seconds": old["seconds"],
    }


def main(folder: Path) -> None:
    """Rewrite all records below a folder."""
    for path in sorted(folder.rglob("result.json")):
        old = files.read_json(path)
        if "format" in old:
            continue
        new = migrated(old)
        if find_fault(new):
            raise SystemExit(f"{path} would be no result")
        files.write_json(path, new)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
