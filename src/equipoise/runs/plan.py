"""A run prepared for its data: its steps, their work, and the keys of shared steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from .. import methods
from ..data import folders, stored
from ..data.datasets import Dataset, load, split
from ..data.images import Images
from ..data.long_tail import count_long_tail, drop_surplus
from ..data.memory import Budget, rank_in_class
from ..data.protocol import order_classes, split_classes
from ..data.ragged import Ragged
from ..data.randomness import generator
from ..data.stored import Stored
from ..errors import RunError, is_gpu_full
from ..learner import Learner
from ..method import Method
from ..remedies import REMEDIES, Standard
from ..settings import digest, from_plain, to_plain
from ..step import Plan, Shape, Step
from .environment import hash_method_code
from .settings import Machine, Run


class Training(NamedTuple):
    """The work of one stage."""

    stage: str
    epochs: int
    images: int
    """per epoch"""


Work = list[list[Training]]
"""the stages of each step"""


def resolve(run: Run, classes: int, shape: Shape) -> Run:
    """The run with all defaults filled in, for a data set with so many classes and images of this shape.

    Equal resolved runs are the same run, on any machine. Settings without effect get their defaults.
    """
    p = run.protocol
    base = p.base if p.base is not None else classes // 2
    sizes = split_classes(classes, base, 5 if p.steps is None else p.steps)
    protocol = replace(p, base=base, steps=len(sizes) - 1, order=str(p.order), memory=str(Budget.parse(p.memory)))
    run = run.reset_unused(run.method.recipe(Plan(0, sizes[:1], shape)))
    return replace(run, data=run.data.resolve(shape), protocol=protocol, seed=int(run.seed))


def compute_sizes(run: Run, classes: int) -> tuple[int, ...]:
    """Number of classes of each step of a resolved run."""
    return split_classes(classes, run.protocol.base or 0, run.protocol.steps or 0)


def read_run(plain: Mapping[str, Any]) -> Run:
    """The run of a record."""
    return from_plain(Run, plain, methods.KINDS)


@dataclass(frozen=True)
class Prepared:
    """A resolved run with its data in learning order, and a learner."""

    run: Run
    """resolved"""
    data: Dataset
    """as loaded"""
    train: Images
    """on the device; labels are positions in the learning order"""
    test: Images
    """likewise; with validation, the images set aside"""
    order: list[int]
    """the data set's labels in learning order"""
    sizes: tuple[int, ...]
    """number of classes of each step"""
    learner: Learner
    """untrained"""

    def edges(self, t: int) -> tuple[int, int]:
        """N_{t-1} and N_t."""
        return sum(self.sizes[:t]), sum(self.sizes[: t + 1])

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, for the record."""
        data = self.data.fingerprint
        return {"run": to_plain(self.run), "class_order": self.order, "data": data, "machine": self.machine}

    @property
    def machine(self) -> dict[str, Any]:
        """Device type and precision, which must not change when a run is resumed."""
        return {"device": self.learner.device_.type, "precision": "bf16" if self.learner.bf16_ else "fp32"}

    def compute_keys(self) -> list[str]:
        """The key of each step's state; empty if the source of the method is not in a file."""
        run, learner, method = self.run, self.learner, self.run.method
        counts = torch.bincount(self.train.y)[: self.sizes[0]]
        base = find_base_method(method) if bool((counts == counts[0]).all()) else method
        codes = hash_method_code(base), hash_method_code(method)
        if None in codes:
            return [""] * len(self.sizes)
        always = {
            **self.machine,
            "engine": learner.engine_,
            "torch": torch.__version__.split("+")[0],
            # On a CPU, the order of summation depends on the number of threads.
            "threads": torch.get_num_threads() if learner.device_.type == "cpu" else None,
            "data": [self.data.fingerprint, to_plain(run.data), self.data.mean, self.data.std],
            "augment": to_plain(learner.augment),
            "recipe": to_plain(run.recipe),
            "seed": run.seed,
        }
        kept = {"memory": run.protocol.memory, "select": run.protocol.select}
        brought = [self.order[slice(*self.edges(t))] for t in range(len(self.sizes))]
        keys = [digest([always, codes[0], to_plain(base), brought[0]])]
        for classes in brought[1:]:
            keys.append(digest([keys[-1], codes[1], to_plain(method), kept, classes]))
        return keys

    def describe_stages(self) -> dict[str, Any]:
        """Normalisation, augmentation and stages. Steps with the same stages as the step before are omitted."""
        stages: list[dict[str, Any]] = []
        for plan in self.make_plans():
            now = [s if isinstance(s, str) else to_plain(s) for s in self.run.method.stages(plan)]
            if not stages or stages[-1]["stages"] != now:
                stages.append({"from": plan.t, "stages": now})
        shuffled_in = {"block": stored.BLOCK, "window": stored.WINDOW}
        return {
            "data": self.data.fingerprint,
            "normalise": [list(self.data.mean), list(self.data.std)],
            "augment": to_plain(self.learner.augment),
            **({"shuffled_in": shuffled_in} if self.run.data.images_on == "disk" else {}),
            "stages": stages,
        }

    def make_plans(self) -> list[Plan]:
        """The plan of each step."""
        return plan_steps(self.run, self.sizes, torch.bincount(self.train.y).tolist(), self.data.shape)

    def list_work(self) -> Work:
        """The stages of each step and their numbers of images."""
        return [list_trainings(self.run.method, plan) for plan in self.make_plans()]


def find_base_method(method: Method) -> Method:
    """The method whose base step is the same, if all classes have equally many images.

    Only a class that defines `at_base` itself shares with other methods, since a subclass may compute something else.
    A user's remedy shares its base step with no other.
    """
    if type(method.remedy) is not REMEDIES.get(method.remedy.name):
        return method
    source = next(kind for kind in type(method).__mro__ if "at_base" in vars(kind))
    if source in (type(method), Method):
        return method.at_base()
    plain = method.with_remedy(Standard())
    return plain if plain.at_base() == method.at_base() else method


def plan_steps(run: Run, sizes: Sequence[int], counts: Sequence[int], shape: Shape) -> list[Plan]:
    """The plans of a resolved run's steps; class k has counts[k] images."""
    budget, plans = Budget.parse(run.protocol.memory), []
    for t, now in enumerate(itertools.accumulate(sizes)):
        old = now - sizes[t]
        m = budget.share(old) if t else 0
        at_hand = [min(m, c) for c in counts[:old]] + list(counts[old:now])
        plans.append(Plan(t, tuple(sizes[: t + 1]), shape, tuple(at_hand), m, budget.share(now), run.recipe))
    return plans


def list_trainings(method: Method, plan: Plan) -> list[Training]:
    """The stages of a step with their images per epoch, counted by drawing an epoch from labels only."""
    y = torch.arange(plan.N).repeat_interleave(torch.tensor(plan.counts))
    everything, place, new, h = torch.arange(len(y)), rank_in_class(y), y >= plan.n_old, method.hold(plan)
    data, memory, held = everything[new], everything[~new], everything[place < h]
    nothing: Any = None
    found = []
    for stage in method.stages(plan):
        if isinstance(stage, str):
            memory = everything[place < plan.keep]
            continue
        where = {"all": everything[place >= h], "memory": memory, "held": held}[stage.images]
        if len(where) < {"all": 0, "memory": 2, "held": 1}[stage.images]:
            continue
        n = torch.bincount(y[where], minlength=plan.N).float()
        s = Step(
            **vars(plan), n=n, lam=torch.ones(plan.N), images=Images(torch.empty(len(y), 0), y), data=data,
            memory=memory, held=held, where=where, net=nothing, teacher=None, state={}, embed=nothing,
        )  # fmt: skip
        own = method if stage.remedy is None else method.with_remedy(stage.remedy)
        epoch = own.epoch(s, generator(0, "length"), stage.recipe.batch)
        found.append(Training(stage.name, stage.recipe.epochs, len(epoch)))
    return found


def count_images(work: Work) -> list[int]:
    """Number of images that each step trains on, over all stages and epochs."""
    return [sum(part.epochs * part.images for part in step) for step in work]


def prepare(
    run: Run, machine: Machine = Machine(), data: Path | None = None, loaded: Dataset | None = None
) -> Prepared:
    """Check the settings, and load the data unless it is `loaded`."""
    budget = Budget.parse(run.protocol.memory)
    made = {"select": run.protocol.select, "seed": run.seed, **vars(machine)}
    Learner(run.method, budget, recipe=run.recipe, **made)  # refuses invalid settings before loading data
    loaded = loaded or load(run.data.name, data, **run.data.choices)
    classes = len(loaded.classes)
    order = order_classes(run.protocol.order, classes)
    run = resolve(run, classes, loaded.shape)
    run = replace(run, data=replace(run.data, images_on=name_place(loaded)))
    sizes = compute_sizes(run, classes)
    run.method.check(*(budget.share(sum(sizes[:t])) for t in range(1, len(sizes))))
    augment = replace(loaded.augment, brightness=run.data.brightness)
    run.method.augmentation(augment)  # refuses what it cannot augment, before anything is computed
    normalise = (loaded.mean, loaded.std)
    learner = Learner(run.method, budget, recipe=run.recipe, augment=augment, normalise=normalise, **made)
    # Labels become positions in the learning order: the classes learned so far are those below N_t.
    position = torch.empty(classes, dtype=torch.long)
    position[torch.tensor(order)] = torch.arange(classes)
    parts = split(loaded, run.data.validation, run.seed)
    train_y, test_y = (position[part.y] for part in parts)
    used = count_long_tail(torch.bincount(train_y, minlength=classes).tolist(), sizes, run.data.imbalance)
    labels = drop_surplus(train_y, used, order, run.seed), test_y
    ids = [digest([loaded.fingerprint, to_plain(run.data), run.seed, k]) for k in range(2)]
    train, test = (move(Images(part.x, y, id), learner.device_) for part, y, id in zip(parts, labels, ids))
    return Prepared(run, loaded, train, test, order, sizes, learner)


def name_place(loaded: Dataset) -> Literal["device", "disk"] | None:
    """Where the images are, as a record names it: None for a device that they are on unless one chooses."""
    if isinstance(loaded.train.x, Stored):
        return "disk"
    count = sum(int(part.x.bytes.sum()) for part in (loaded.train, loaded.test) if isinstance(part.x, Ragged))
    return "device" if count > folders.ROOM else None


def move(images: Images, device: torch.device) -> Images:
    """The images on a device; large ones that do not fit may stay on the disk."""
    try:
        return images.to(device)
    except Exception as error:
        if not isinstance(images.x, Ragged) or not is_gpu_full(error):
            raise
        words = f"{len(images.x.pixels) / 1e9:.0f} GB of images do not fit the GPU: choose"
        raise RunError(f'{words} Data(images_on="disk")', f"{words} --images-on disk") from None
