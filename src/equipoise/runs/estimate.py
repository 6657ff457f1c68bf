"""How fast this machine trains, and with how much memory: measured in seconds, remembered, and used to plan runs."""

from __future__ import annotations

import itertools
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from .. import files
from ..data.datasets import COUNTS, SHAPES
from ..data.images import Images
from ..data.memory import Budget
from ..engine.device import resolve_device
from ..engine.gpu import peak_memory
from ..errors import DataError
from ..learner import Learner, record
from ..losses import Meta, Standard
from ..method import Method
from ..randomness import generator
from .environment import hardware, versions
from .run import Run, asked, sizes_of, training_images
from .shared_steps import default_store


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
    learner = Learner(method, "all" if method.fresh else 20, device=device)
    cuda = learner.device_.type == "cuda"
    shape, counts = SHAPES[dataset], COUNTS[dataset]
    tiny = shape[1] < 16
    of_each = 256 if cuda else 20 if tiny else 4  # Meta holds two of each out of training
    classes, new = len(counts) // 2, max(1, len(counts) // 10)
    x = torch.randint(0, 256, ((classes + new) * of_each, *shape), dtype=torch.uint8, generator=generator(0, "speed"))
    y = torch.arange(classes + new).repeat_interleave(of_each)
    usual, _ = learner.settings_for(shape)
    learner.recipe = replace(usual, epochs=2)
    seen: list[float] = []

    def note(learner: Learner) -> None:
        assert learner.progress_ is not None
        seen.append(learner.progress_.images_per_second)

    images = Images(x, y)
    for part in (images.of(0, classes), images.of(classes, classes + new)):
        learner.learn(part.x, part.y, note)
    learner.predict(x[:1000])
    held = 3 * sum(counts) * shape[0] * shape[1] * shape[2] / 2**20  # all images, and a padded copy
    if cuda:
        peak = peak_memory(learner.device_)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    _, base, _, later = seen  # of each step, the second epoch
    return Speed(base, later, peak + held)


def in_a_process(method: Method, dataset: str, device: str) -> Speed:
    """`measured` in a process of its own, whose memory is that of this method alone, and is given back."""
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.apply(measured, (method, dataset, device))


def speed_of(run: Run, say: Callable[[str], None]) -> Speed:
    """The speed of a run's method here: remembered, or else measured now. Of the losses, only Meta is slower."""
    method = run.method if run.method.learns(1) else run.method.at_base()
    kind = type(method)  # other settings than the loss do not change what an image costs
    plain = known(kind(loss=Standard()), run, say)
    if not isinstance(method.loss, Meta):
        return plain
    # What an update of α costs is measured with one in every batch: a few batches then suffice.
    always = known(kind(loss=Meta(every=1)), run, say)
    seconds = 1 / plain.later + (1 / always.later - 1 / plain.later) / method.loss.every
    return Speed(plain.base, 1 / seconds, always.mib)


def known(method: Method, run: Run, say: Callable[[str], None]) -> Speed:
    """The speed of a method on a run's images and device: remembered, or else measured now."""
    machine = {k: v for k, v in hardware(resolve_device(run.device)).items() if k != "peak_memory_mib"}
    key = record.digest([record.describe(method), run.dataset, machine, versions()])
    file = default_store().parent / "speed.json"
    found = remembered(file)
    if key not in found:
        meta = " with the meta loss" if isinstance(method.loss, Meta) else ""
        say(f"measuring the speed of {method.name}{meta} on this machine")
        now = in_a_process(method, run.dataset, run.device)
        found = {**remembered(file), key: list(now)}
        try:
            files.write_json(file, found)
        except OSError as error:
            say(f"the speed is not remembered: {error}")
    return Speed(*found[key])


def remembered(file: Path) -> dict[str, list[float]]:
    """Earlier measurements; none from a file that is not there or broken."""
    try:
        found = files.read_json(file)
    except (OSError, DataError):
        return {}
    return found if isinstance(found, dict) else {}


class Estimate(NamedTuple):
    """Of runs that are done one after the other."""

    seconds: float
    mib: float
    """of the largest"""


def estimate(runs: Sequence[Run], say: Callable[[str], None] = lambda words: None, shared: bool = True) -> Estimate:
    """How long runs take here, one after the other, and how much memory; `shared` base steps count once."""
    seconds = mib = 0.0
    based: set[str] = set()
    for run in runs:
        speed = speed_of(run, say)
        base, *later = images_of(run)
        recipe = record.describe(run.recipe or run.method.recipe(SHAPES[run.dataset]))
        at_base = (record.describe(run.method.at_base()), run.dataset, run.order, run.seed, run.validation)
        key = record.digest([*at_base, recipe, run.brightness, base])
        seconds += 0.0 if shared and key in based else base / speed.base
        seconds += (sum(later) + refit_images(run)) / speed.later
        mib = max(mib, speed.mib)
        based.add(key)
    return Estimate(seconds, mib)


def refit_images(run: Run) -> int:
    """How many images all refits of a run train on."""
    refit = run.method.refitting()
    if refit is None:
        return 0
    counts, shape = COUNTS[run.dataset], SHAPES[run.dataset]
    _, *learned = itertools.accumulate(sizes_of(asked(run, len(counts), shape)))
    kept = [(Budget.parse(run.memory).share(classes), counts[:classes]) for classes in learned]
    return refit.recipe.epochs * sum(min(share, count) for share, seen in kept for count in seen)


def images_of(run: Run) -> list[int]:
    """How many images each step of a run trains on, known without its data."""
    counts, shape = COUNTS[run.dataset], SHAPES[run.dataset]
    sizes = sizes_of(asked(run, len(counts), shape))
    recipe = run.recipe or run.method.recipe(shape)
    return training_images(run.method, recipe, Budget.parse(run.memory), sizes, counts)
