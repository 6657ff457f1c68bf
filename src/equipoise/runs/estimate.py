"""Estimates of time and memory for runs, from short cached measurements on this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from .. import files
from ..data.datasets import COUNTS, SHAPES
from ..data.images import Images
from ..data.long_tail import count_long_tail
from ..data.randomness import generator
from ..engine.device import resolve_device
from ..engine.gpu import get_peak_memory
from ..errors import DataError
from ..learner import Learner
from ..method import Method
from ..methods.around import Around
from ..remedies import Standard
from ..settings import digest, to_plain
from ..step import Plan, Stage
from .environment import describe_hardware, list_versions
from .plan import compute_sizes, count_images, find_base_method, list_trainings, plan_steps, resolve
from .settings import Protocol, Run
from .shared_steps import find_default_store


class Speed(NamedTuple):
    """Speed and memory of a method on a data set, one run at a time."""

    base: float
    """images per second in the base step"""
    later: float
    """images per second with a teacher"""
    mib: float
    """peak memory of the GPU, or of the process on a CPU"""


def measure_speed(method: Method, dataset: str, device: str) -> Speed:
    """Train two steps of two epochs on noise, without fine-tuning; the second epoch of each counts."""
    learner = Learner(without_finetuning(method), method.default_memory, device=device)
    cuda = learner.device_.type == "cuda"
    shape, counts = SHAPES[dataset], COUNTS[dataset]
    tiny = shape[1] < 16
    of_each = 256 if cuda else 20 if tiny else 4  # Meta holds two of each out of training
    classes, new = len(counts) // 2, max(1, len(counts) // 10)
    x = torch.randint(0, 256, ((classes + new) * of_each, *shape), dtype=torch.uint8, generator=generator(0, "speed"))
    y = torch.arange(classes + new).repeat_interleave(of_each)
    learner.recipe = replace(learner.recipe_for(shape), epochs=2)
    seen: list[float] = []

    def note(learner: Learner) -> None:
        if learner.progress_ is not None and learner.progress_.stage == "train":
            seen.append(learner.progress_.images_per_second)

    images = Images(x, y)
    images = images.to(learner.device_)
    for part in (range(classes), range(classes, classes + new)):
        learner.learn(images, part, note, verbose=False)
    learner.predict(x[:1000])
    held = sum(counts) * shape[0] * shape[1] * shape[2] / 2**20  # all images
    if cuda:
        peak = get_peak_memory(learner.device_)
    else:
        peak = measure_process_memory()
    _, base, _, later = seen  # of each step, the second epoch
    return Speed(base, later, peak + held)


def without_finetuning(method: Method) -> Method:
    """The method without the fine-tuning of its own, or of its host."""
    if isinstance(method, Around):
        return replace(method, host=without_finetuning(method.host))
    finetune = method.finetuning()
    if finetune is None:
        return method
    return replace(method, finetune=replace(finetune, epochs=0))  # type: ignore[call-arg]


def measure_process_memory() -> float:
    """Peak memory of this process in MiB; 0 on Windows, which does not report it."""
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure_in_process(method: Method, dataset: str, device: str) -> Speed:
    """Run `measure_speed` in a separate process, so that its memory is measured and freed separately."""
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.apply(measure_speed, (method, dataset, device))


def estimate_speed(run: Run, device: str, say: Callable[[str], None]) -> Speed:
    """The speed of a run's method on this machine, cached. Only remedies with `adapt` slow training down."""
    method, shape = run.method, SHAPES[run.data.name]
    later = Plan(1, (2, 1), shape, (2, 2, 2), 20, 20)
    if not any(isinstance(stage, Stage) for stage in method.stages(later)):
        method = method.at_base()
    plain = find_speed(method.with_remedy(Standard()), run.data.name, device, say)
    # The cost of updates is measured with many of them, so that a few batches suffice.
    often = method.remedy.update_most_often()
    adapt, measured = method.remedy.adapt(), often.adapt()
    if adapt is None or measured is None:
        return plain
    slow = find_speed(method.with_remedy(often), run.data.name, device, say)
    seconds = 1 / plain.later + (1 / slow.later - 1 / plain.later) * measured.every / adapt.every
    return Speed(plain.base, 1 / seconds, slow.mib)


def find_speed(method: Method, dataset: str, device: str, say: Callable[[str], None]) -> Speed:
    """The speed of a method on a data set and device, from the cache or measured now."""
    machine = {k: v for k, v in describe_hardware(resolve_device(device)).items() if k != "peak_memory_mib"}
    key = digest([to_plain(method), dataset, machine, list_versions()])
    file = find_default_store().parent / "speed.json"
    found = read_speeds(file)
    if key not in found:
        remedy = "" if method.remedy.keeps_finetuning else f" with the {method.remedy.name} remedy"
        say(f"measuring the speed of {method.name}{remedy} on this machine")
        now = measure_in_process(method, dataset, device)
        found = {**read_speeds(file), key: list(now)}
        try:
            files.write_json(file, found)
        except OSError as error:
            say(f"the speed was not cached: {error}")
    return Speed(*found[key])


def read_speeds(file: Path) -> dict[str, list[float]]:
    """The cached measurements; none if the file is missing or damaged."""
    try:
        found = files.read_json(file)
    except (OSError, DataError):
        return {}
    return found if isinstance(found, dict) else {}


class Estimate(NamedTuple):
    """Time and memory of consecutive runs."""

    seconds: float
    mib: float
    """of the largest run"""


def estimate(
    runs: Sequence[Run], device: str, say: Callable[[str], None] = lambda words: None, shared: bool = True
) -> Estimate:
    """Estimate time and memory of consecutive runs on this machine; `shared` base steps count once."""
    seconds = mib = 0.0
    based: set[str] = set()
    for run in map(resolve_run, runs):
        speed = estimate_speed(run, device, say)
        base, *later = count_step_images(run)
        only_base = Protocol(run.protocol.base, order=run.protocol.order)
        key = digest([to_plain(replace(run, method=find_base_method(run.method), protocol=only_base)), base])
        seconds += 0.0 if shared and key in based else base / speed.base
        seconds += sum(later) / speed.later
        mib = max(mib, speed.mib)
        based.add(key)
    return Estimate(seconds, mib)


def resolve_run(run: Run) -> Run:
    """A run with all defaults filled in."""
    return resolve(run, len(COUNTS[run.data.name]), SHAPES[run.data.name])


def count_step_images(run: Run) -> list[int]:
    """Number of images that each step of a run trains on, computed without its data."""
    run = resolve_run(run)
    sizes = compute_sizes(run, len(COUNTS[run.data.name]))
    left = [count - round(run.data.validation * count) for count in COUNTS[run.data.name]]
    counts = count_long_tail(left, sizes, run.data.imbalance)
    return count_images([list_trainings(run.method, p) for p in plan_steps(run, sizes, counts, SHAPES[run.data.name])])
