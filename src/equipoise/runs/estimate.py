"""Estimates of time and memory for runs, from short cached measurements on this machine."""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import files
from ..data.augment import ResizedCrop
from ..data.datasets import COUNTS, SHAPES
from ..data.folders import NAMES, ROOM
from ..data.images import Images
from ..data.long_tail import count_long_tail
from ..data.packing import SMALL, Packing
from ..data.ragged import Ragged
from ..data.randomness import generator
from ..data.stored import WINDOW
from ..engine.device import resolve_device
from ..engine.gpu import get_peak_memory
from ..errors import DataError
from ..learner import Learner
from ..method import Method
from ..methods.around import Around
from ..remedies import Standard
from ..settings import digest, to_plain
from ..step import Plan, Shape, Stage
from .environment import describe_hardware, list_versions
from .plan import compute_sizes, count_images, find_base_method, list_trainings, plan_steps, resolve
from .settings import Data, Protocol, Run
from .shared_steps import find_default_store


class Speed(NamedTuple):
    """Speed and memory of a method on a data set, one run at a time."""

    base: float
    """images per second in the base step"""
    later: float
    """images per second with a teacher"""
    mib: float
    """peak memory of the GPU, or of the process on a CPU"""


def measure_speed(method: Method, dataset: str, device: str, size: int | None = None) -> Speed:
    """Train two steps of two epochs on noise, without fine-tuning; the second epoch of each counts.

    Large images have sizes like those of ImageNet, and boxes are cut out of them. Few are enough, of few classes.
    """
    shape, counts = SHAPES[dataset] if size is None else (3, size, size), COUNTS[dataset]
    large = max(shape[1:]) > SMALL
    augment = ResizedCrop(max(shape[1:])) if large else None
    learner = Learner(without_finetuning(method), method.default_memory, augment=augment, device=device)
    cuda = learner.device_.type == "cuda"
    tiny = shape[1] < 16
    of_each = 256 if cuda else 20 if tiny else 4  # Meta holds two of each out of training
    classes, new = ((20, 10) if cuda else (4, 2)) if large else (len(counts) // 2, max(1, len(counts) // 10))
    x = make_noise((classes + new) * of_each, shape)
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
    learner.logits_at(images.x[:1000], None)
    each = shape[0] * math.prod(find_stored_size(shape))
    held = sum(counts) * each  # all images; of more than there is room for, 20 of every class and a window
    held = held if held <= ROOM else 20 * len(counts) * each + 2 * WINDOW
    if cuda:
        peak = get_peak_memory(learner.device_)
    else:
        peak = measure_process_memory()
    _, base, _, later = seen  # of each step, the second epoch
    return Speed(base, later, peak + held / 2**20)


def make_noise(n: int, shape: Shape) -> Tensor | Ragged:
    """Images (n, *shape) of noise, as a data set holds them."""
    size = find_stored_size(shape)
    x = torch.randint(0, 256, (n, shape[0], *size), dtype=torch.uint8, generator=generator(0, "speed"))
    return x if size == shape[1:] else Ragged.of_one_size(x, shape[1])


def find_stored_size(shape: Shape) -> tuple[int, int]:
    """Height and width of an image as it is stored: large ones are like photographs of 4 to 3."""
    _, height, width = shape
    if max(height, width) <= SMALL:
        return height, width
    width, height = Packing(width).train.scale(4000, 3000)
    return height, width


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


def measure_in_process(method: Method, dataset: str, device: str, size: int | None = None) -> Speed:
    """Run `measure_speed` in a separate process, so that its memory is measured and freed separately."""
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.apply(measure_speed, (method, dataset, device, size))


def estimate_speed(run: Run, device: str, say: Callable[[str], None]) -> Speed:
    """The speed of a run's method on this machine, cached. Only remedies with `adapt` slow training down."""
    method, data = run.method, run.data
    later = Plan(1, (2, 1), data.shape, (2, 2, 2), 20, 20)
    if not any(isinstance(stage, Stage) for stage in method.stages(later)):
        method = method.at_base()
    plain = find_speed(method.with_remedy(Standard()), data, device, say)
    # The cost of updates is measured with many of them, so that a few batches suffice.
    often = method.remedy.update_most_often()
    adapt, measured = method.remedy.adapt(), often.adapt()
    if adapt is None or measured is None:
        return plain
    slow = find_speed(method.with_remedy(often), data, device, say)
    seconds = 1 / plain.later + (1 / slow.later - 1 / plain.later) * measured.every / adapt.every
    return Speed(plain.base, 1 / seconds, slow.mib)


def find_speed(method: Method, data: Data, device: str, say: Callable[[str], None]) -> Speed:
    """The speed of a method on a data set and device, from the cache or measured now."""
    size = None if data.shape == SHAPES[data.name] else data.size
    images = data.name if size is None else f"{data.name} {size}"
    machine = {k: v for k, v in describe_hardware(resolve_device(device)).items() if k != "peak_memory_mib"}
    key = digest([to_plain(method), images, machine, list_versions()])
    file = find_default_store().parent / "speed.json"
    found = read_speeds(file)
    if key not in found:
        remedy = "" if method.remedy.keeps_finetuning else f" with the {method.remedy.name} remedy"
        say(f"measuring the speed of {method.name}{remedy} on this machine")
        now = measure_in_process(method, data.name, device, size)
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
        # Classes of ImageNet have different numbers of images, by which a remedy weighs them in the base step too.
        method = run.method if run.data.name in NAMES else find_base_method(run.method)
        key = digest([to_plain(replace(run, method=method, protocol=only_base)), base])
        seconds += 0.0 if shared and key in based else base / speed.base
        seconds += sum(later) / speed.later
        mib = max(mib, speed.mib)
        based.add(key)
    return Estimate(seconds, mib)


def resolve_run(run: Run) -> Run:
    """A run with all defaults filled in."""
    return resolve(run, len(COUNTS[run.data.name]), run.data.shape)


@functools.lru_cache(4096)
def count_step_images(run: Run) -> list[int]:
    """Number of images that each step of a run trains on, computed without its data."""
    run = resolve_run(run)
    sizes = compute_sizes(run, len(COUNTS[run.data.name]))
    left = [count - round(run.data.validation * count) for count in COUNTS[run.data.name]]
    counts = count_long_tail(left, sizes, run.data.imbalance)
    return count_images([list_trainings(run.method, p) for p in plan_steps(run, sizes, counts, run.data.shape)])
