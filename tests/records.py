"""Records of runs that were never done, with numbers that fit together."""

from __future__ import annotations

import json
from typing import Any

from equipoise.data.datasets import COUNTS, SHAPES
from equipoise.data.protocol import split_classes
from equipoise.runs.plan import resolve
from equipoise.runs.settings import Run
from equipoise.settings import to_plain


def make_record(run: Run, average: float, final: float, base: float, new: float) -> dict[str, Any]:
    """A record with this average accuracy, and these in its last step: overall, of the base classes, of the new ones.

    All of them have one decimal or two; those of the five best classes are higher by 30. In the steps before the last,
    each is lower by 1 than the one before.
    """
    classes = len(COUNTS[run.data.name])
    settings = json.loads(json.dumps(to_plain(resolve(run, classes, SHAPES[run.data.name]))))
    sizes = split_classes(classes, settings["protocol"]["base"], settings["protocol"]["steps"])
    before = (average * len(sizes) - final) / (len(sizes) - 1)  # in all steps but the last
    steps = []
    for t in range(len(sizes)):
        last = t == len(sizes) - 1
        top1 = final if last else before + (len(sizes) - 2) / 2 - t
        step = {"step": t, "classes": sum(sizes[: t + 1]), "top1": top1, "top5": top1 + 30, "by_step": [top1] * (t + 1)}
        step |= {"base": base, "new": new} if last else {"base": top1, "new": top1 if t else None}
        steps.append({**step, "latest": step["new"] or top1, "seconds": 1.0, "training_seconds": 1.0})
    confusion = [[0] * classes for _ in range(classes)]
    confusion[0][0] = round(final * 100)
    confusion[0][1] = 10_000 - round(final * 100)
    return {
        "format": 1,
        "run": settings,
        "class_order": list(range(classes)),
        "machine": {},
        "versions": {},
        "average_incremental_accuracy": average,
        "average_incremental_accuracy_top5": average + 30,
        "final": {name: steps[-1][name] for name in ("top1", "top5", "base", "new")},
        "forgetting": 0.0,
        "alpha": [None] * len(sizes),
        "steps": steps,
        "confusion": confusion,
        "reused": None,
        "seconds": 1.0,
    }
