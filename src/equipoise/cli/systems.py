"""Measures how fast each method trains in a step after the base step, with its teacher and its memory.

As on CIFAR-100: ten new classes beside fifty old ones, 20 images of each kept, unless a method is made for none, and
each method's own net and recipe. All that an epoch takes is in it, such as DDE's search for neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..data.augment import Crop
from ..data.images import Images
from ..data.memory import Budget
from ..engine.device import resolve_engine, use_device
from ..engine.train import Callbacks, Conditions, Epoch, fit
from ..learner.state import State
from ..learner.step import Before, plan_step
from ..method import Method
from ..methods import find_built_in
from ..methods.around import Around
from ..methods.dde import DDE
from ..methods.il_baseline import ILBaseline
from ..methods.podnet import PODNet
from ..runs.environment import describe_hardware, list_versions
from ..step import Plan, Stage
from .large import free_memory
from .reproduce import match_rows
from .speed import ALL, MEAN, OLD, SHAPE, STD, Setting, make_images, make_net

KEPT, NEW = 20, 500
"""images of each old class and of each new one, as on CIFAR-100; fewer where an epoch is to have fewer"""


def list_methods(patterns: str | None) -> dict[str, Method]:
    """The methods that train with a teacher, by the names of their rows; those of these names, patterns or parts.

    The baseline comes first, and last what our kernels do not support, which takes long to compile.
    """
    plan = Plan(1, (OLD, ALL - OLD), SHAPE, (KEPT,) * OLD + (NEW,) * (ALL - OLD), KEPT, KEPT)
    methods = [kind() for kind in find_built_in().values() if kind.__module__ != f"{Method.__module__}s.bounds"]
    methods = [m for m in methods if any(isinstance(stage, Stage) for stage in m.stages(plan))]
    methods = sorted([*methods, DDE(host=PODNet())], key=lambda m: (m.name != ILBaseline.name, m.cost))
    rows = {f"{m.name}, {m.host.name}" if isinstance(m, Around) else m.name: m for m in methods}
    chosen = set(rows) if patterns is None else match_rows(patterns, list(rows))
    return {name: method for name, method in rows.items() if name in chosen}


def measure_methods(on: Setting, patterns: str | None, limit: float, console: Console) -> dict[str, Any]:
    """Measure the methods, each printed as soon as it is known, and return all of it as a record."""
    began, entries, baseline = time.monotonic(), list[dict[str, Any]](), None
    for name, method in list_methods(patterns).items():
        if time.monotonic() - began > limit:
            console.print(f"{name}: left out, {limit:,.0f} seconds are over", highlight=False)
            continue
        free_memory(on.device)
        with use_device(on.device):
            entry = {"row": name} | measure_method(method, on)
        speed = entry["images_per_second"]
        baseline = speed if name == ILBaseline.name else baseline
        entries.append(entry | {"cost": baseline and baseline / speed, "expected_cost": method.cost})
        words = f"{name}: {speed:,.0f} images/s, {entry['engine']}, {time.monotonic() - began:.0f} s so far"
        console.print(words, highlight=False)
    return {
        "images": on.images,
        "precision": "bf16" if on.bf16 else "fp32",
        "versions": list_versions(),
        "rows": entries,
        "hardware": describe_hardware(on.device),
    }


def measure_method(method: Method, on: Setting) -> dict[str, Any]:
    """The first training of a step after the base step, by the product's own loop, after one epoch to warm up."""
    before = prepare_step(method, on)
    live = before.begin(list(range(OLD, ALL)), (MEAN, STD), "")
    stage = next(stage for stage in before.stages if isinstance(stage, Stage))
    method, s = before.enter(live, stage)
    stage = replace(stage, recipe=replace(stage.recipe, epochs=1 + max(1, round(2 * on.images / len(s.where)))))
    epochs: list[Epoch] = []
    times = [time.monotonic()]

    def note(e: Epoch) -> None:
        epochs.append(e)
        times.append(time.monotonic())

    conditions = Conditions(0, Crop(), on.bf16, resolve_engine("auto", on.device))
    used = fit(method, s, stage, live.at, conditions, Callbacks(note))
    seen = sum(now.images_per_second * (now.seconds - last.seconds) for last, now in pairwise(epochs))
    return {
        "engine": used,
        "images_per_second": seen / (times[-1] - times[1]),
        "batch": min(stage.recipe.batch, len(s.where)),
        "kept": before.plan.m,
        "images_in_an_epoch": len(s.where),
        "seconds_to_begin": times[1] - times[0],
        "peak_memory_mib": epochs[-1].mib,
    }


def prepare_step(method: Method, on: Setting) -> Before:
    """A step that brings ten classes beside fifty, as a learner would make it, with images of noise."""
    kept = 0 if method.default_memory == "0" else max(2, min(KEPT, on.images // 300))
    new = max(2, min(NEW, (on.images - OLD * kept) // (ALL - OLD)))
    y = torch.arange(ALL).repeat_interleave(torch.tensor([kept] * OLD + [new] * (ALL - OLD)))
    images = Images(make_images(len(y)).x, y).to(on.device)
    where = torch.arange(len(y), device=on.device)
    net = make_net((OLD,), on.device, method).eval().requires_grad_(False)
    state = State(net, list(range(OLD)), (OLD,), SHAPE)
    plan = plan_step(state, ALL - OLD, images, where, Budget(kept), None)
    plan = replace(plan, recipe=replace(method.recipe(plan.base), batch=on.batch))
    return Before(method, state, plan, images, where[OLD * kept :], where[: OLD * kept], True, 0, None)


def print_methods(record: Mapping[str, Any], console: Console) -> None:
    """Print a table of all rows."""
    title = f"Training beside a teacher, ResNet-32, ten new classes beside fifty, {record['precision']}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "engine", "kept", "batch", "images/s", "time", "expected", "peak MiB", "s to begin"):
        table.add_column(name, justify="left" if name in ("", "engine") else "right")
    for r in record["rows"]:
        memory, cost = r["peak_memory_mib"], r["cost"]
        table.add_row(
            r["row"],
            r["engine"],
            str(r["kept"]),
            str(r["batch"]),
            f"{r['images_per_second']:,.0f}",
            "" if cost is None else f"{cost:.2f}",
            f"{r['expected_cost']:.2f}",
            "" if memory is None else f"{memory:,.0f}",
            f"{r['seconds_to_begin']:,.1f}",
        )
    console.print(table)
    machine = record["hardware"]
    console.print(
        f"{machine.get('gpu', machine['cpu'])}, torch {record['versions']['torch']}; the first training of a step. "
        "Time is that of an image, relative to il-baseline; a queue of runs is ordered by what is expected of it",
        highlight=False,
        soft_wrap=True,
    )
