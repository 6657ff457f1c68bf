"""The command that does a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from ..data.datasets import COUNTS, PLANNED, SHAPES
from ..settings import changed
from .run import Run


def command(run: Run) -> str:
    """The command that does a run: what most readers look for is always there, the rest where it is unusual."""
    usual = type(run)(method=run.method)
    said = [
        *_flags(run.method, type(run.method)(), skip=("loss",)),
        *_flags(run.method.loss, type(run.method.loss)()),
        *("--dataset", run.dataset),
        *(() if run.base in (None, len(COUNTS.get(run.dataset, ())) // 2) else ("--base", str(run.base))),
        *(("--steps", str(run.steps)) if run.steps is not None else ()),
        *("--memory", run.memory),
        *_flags(run, usual, skip=("method", "dataset", "base", "steps", "memory", "recipe", "seed")),
        *("--seed", str(run.seed)),
    ]
    shapes = SHAPES | PLANNED
    if run.recipe is not None and run.dataset in shapes:
        said += _flags(run.recipe, run.method.recipe(shapes[run.dataset]))
    return shlex.join(["equipoise", "run", run.method.name, "--loss", run.method.loss.name, *said])


def _flags(value: Any, usual: Any, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """The flags of all fields that are not as usual, except those to skip."""
    for field, one in changed(value, usual, skip):
        name = field.replace("_", "-")
        if isinstance(getattr(usual, field), bool):  # a switch; where nothing is usual, it takes a word
            yield f"--{name}" if one else f"--no-{name}"
        else:
            yield f"--{name}"
            yield from map(str, one) if isinstance(one, tuple) else (str(one),)
