"""How fast this machine trains, and with how much memory: measured in seconds, remembered, and used to plan runs."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import checkpoint, record
from .data import Images
from .datasets import COUNTS, SHAPES
from .errors import DataError
from .inputs import resolve_device
from .learner import Learner
from .machine import hardware, versions
from .memory import Budget
from .method import Method
from .randomness import generator
from .run import Run, asked, training_images
from .store import default_store


class Speed(NamedTuple):
    """Of a method on a data set's images, one run at a time."""

    base: float
    """images a second in the base step"""
    later: float
    """images a second with a teacher"""
    mib: float
    """memory at its peak: of the GPU, or else of the process"""


def measured(method: Method, dataset: str, device: str) -> Speed:
    """Two steps of the product's own loop on images of noise, two epochs each; the second of each counts."""
    learner = Learner(method, 20, device=device)
    cuda = learner.device_.type == "cuda"
    shape, counts = SHAPES[dataset], COUNTS[dataset]
    tiny = shape[1] < 16
    of_each = 256 if cuda else 20 if tiny else 2
    classes, new = len(counts) // 2, max(1, len(counts) // 10)
    x = torch.randint(0, 256, ((classes + new) * of_each, *shape), dtype=torch.uint8, generator=generator(0, "speed"))
    y = torch.arange(classes + new).repeat_interleave(of_each)
    usual, _ = learner.settings_for(shape)
    learner.recipe = record.recipe_from({**record.describe(usual), "epochs": 2})
    seen: list[float] = []

    def note(learner: Learner) -> None:
        assert learner.progress_ is not None
        seen.append(learner.progress_.images_per_second)

    if cuda:
        torch.cuda.reset_peak_memory_stats(learner.device_)
    images = Images(x, y)
    for part in (images.of(0, classes), images.of(classes, classes + new)):
        learner.learn(part.x, part.y, note)
    learner.predict(x[:1000])
    held = 3 * sum(counts) * shape[0] * shape[1] * shape[2] / 2**20  # all images, and a padded copy
    if cuda:
        peak = torch.cuda.max_memory_allocated(learner.device_) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    _, base, _, later = seen  # of each step, the second epoch
    return Speed(base, later, peak + held)


def speed_of(run: Run, say: Callable[[str], None]) -> Speed:
    """The speed of a run's method here: remembered, or else measured now. Of the losses, only Meta is slower."""
    method = run.method if run.method.learns(1) else run.method.at_base()
    machine = {k: v for k, v in hardware(resolve_device(run.device)).items() if k != "peak_memory_mib"}
    meta = method.loss.name == "meta"
    key = record.digest([method.name, meta, run.dataset, machine, versions()])
    file = default_store().parent / "speed.json"
    known = remembered(file)
    if key not in known:
        say(f"measuring the speed of {method.name}{' with the meta loss' if meta else ''} on this machine")
        found = measured(method, run.dataset, run.device)
        known = {**remembered(file), key: list(found)}
        try:
            checkpoint.write_json(file, known)
        except OSError as error:
            say(f"the speed is not remembered: {error}")
    return Speed(*known[key])


def remembered(file: Path) -> dict[str, list[float]]:
    """Earlier measurements; none from a file that is not there or broken."""
    try:
        found = checkpoint.read_json(file)
    except (OSError, DataError):
        return {}
    return found if isinstance(found, dict) else {}


class Estimate(NamedTuple):
    """Of runs that are done one after the other."""

    seconds: float
    mib: float
    """of the largest"""


def estimate(runs: Sequence[Run], say: Callable[[str], None] = lambda words: None) -> Estimate:
    """How long runs take here, one after the other, and how much memory. A base step that several share counts once."""
    seconds = mib = 0.0
    based: set[str] = set()
    for run in runs:
        speed = speed_of(run, say)
        base, *later = images_of(run)
        at_base = (record.describe(run.method.at_base()), run.dataset, run.order, run.seed, run.validation)
        shared = record.digest([*at_base, base])
        seconds += (0.0 if shared in based else base / speed.base) + sum(later) / speed.later
        mib = max(mib, speed.mib)
        based.add(shared)
    return Estimate(seconds, mib)


def images_of(run: Run) -> list[int]:
    """How many images each step of a run trains on, known without its data."""
    counts, shape = COUNTS[run.dataset], SHAPES[run.dataset]
    settings = asked(run, len(counts), shape)
    sizes = [settings["base"], *[settings["increment"]] * settings["steps"]]
    recipe = run.recipe or run.method.recipe(shape)
    return training_images(run.method, recipe, Budget.parse(run.memory), sizes, counts)
