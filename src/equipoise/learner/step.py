"""A step from its beginning to its end: the net grows, stages are entered and left, exemplars are chosen and kept."""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data import memory
from ..data.augment import Augment, AugmentedEpoch, fit_pixels
from ..data.images import Images, join_images, measure_channels
from ..data.inputs import as_pixels, get_image_shape
from ..data.labels import as_labels
from ..data.memory import Budget
from ..data.randomness import generator
from ..data.stored import Stored
from ..engine.predict import compute_features
from ..engine.sgd import check_groups
from ..engine.train import Position
from ..errors import DataError, UsageError, format_count
from ..method import Method
from ..nets import Net
from ..nets.heads import RowsHead
from ..nets.modules import ModuleSource
from ..step import Plan, Recipe, Stage, Stages, Step, View
from .arguments import check_shape, find_new_classes
from .state import Live, State, new_net, place

log = logging.getLogger("equipoise")


@dataclass(frozen=True)
class Before:
    """What a step is made from: the method, what is known, and the images."""

    method: Method
    state: State
    """after the step before"""
    plan: Plan
    images: Images
    """all pixels at hand: the step's and the memory's"""
    data: Tensor
    """where the step's images are"""
    memory: Tensor
    """where the exemplars are"""
    stays: bool
    """whether the caller keeps the images, so that exemplars may remain positions in them"""
    seed: int
    source: ModuleSource | None
    """of the backbone, where it is not the method's"""

    @property
    def stages(self) -> Stages:
        """The trainings of the step, and the choice of the exemplars between them; none on held-out images if there are
        none."""
        held = self.method.hold(self.plan) > 0
        stages = self.method.stages(self.plan)
        return tuple(s for s in stages if isinstance(s, str) or s.images != "held" or held)

    def begin(self, new: list[Hashable], statistics: tuple[Tensor, Tensor] | None, fingerprint: str) -> Live:
        """The net with rows for the new classes, and nothing trained yet."""
        old, plan = self.state, self.plan
        if isinstance(self.images.x, Stored) and self.method.overrides("leave"):
            raise UsageError(
                f"{self.method.name} learns pixels of exemplars, which are not on the disk: use --images-on device"
            )
        net = self.grow(len(new), measure_channels(self.images.x[self.data]) if statistics is None else statistics)
        stages = [stage for stage in self.stages if isinstance(stage, Stage)]
        for stage in stages:
            check_groups(stage, dict(net.named_parameters()), state=False)
        if len({stage.name for stage in stages}) < len(stages):
            names = ", ".join(stage.name for stage in stages)
            raise UsageError(f"{self.method.name} has stages called {names}: give each a name of its own")
        noted = {name: value.clone() for name, value in old.extra.items()}
        state = State(
            net, old.classes + new, plan.sizes, plan.shape, old.exemplars, old.kept, old.keeper, noted, list(old.alphas)
        )  # fmt: skip
        live = Live(state, Position(), fingerprint)
        if stages:
            self.method.remedy.enter(self.step(live))
        return live

    def grow(self, new: int, statistics: tuple[Tensor, Tensor]) -> Net:
        """The net of the step before with rows for the new classes, or a fresh one."""
        method, old, t, images = self.method, self.state, self.plan.t, self.images
        rows = new
        if old.net is None or method.fresh:
            if old.net is not None:
                statistics, rows = (old.net.mean.clone(), old.net.std.clone()), self.plan.N
            net = new_net(method, self.plan.shape, *statistics, generator(self.seed, t, "weights"), self.source)
            place(net, images.x.device)
        else:
            net = copy.deepcopy(old.net)
        net.head.widen(rows, generator(self.seed, t, "rows"))
        if old.net is not None and not method.fresh and method.overrides("first_rows"):
            h, y = embed(images, old.net, self.data, method.views), images.y[self.data] - self.plan.n_old
            y = y.repeat(len(h) // len(y))
            method.first_rows(net.head, h, y, generator(self.seed, t, "first rows"))
        return net

    def has_images(self, stage: Stage, live: Live) -> bool:
        """Whether there is something to train a stage on."""
        return stage.images != "memory" or len(self.memory if live.chosen is None else live.chosen) > 1

    def enter(self, live: Live, stage: Stage) -> tuple[Method, Step]:
        """A stage, from where it stands: the method with the remedy that is in force, and what it may see."""
        method = self.method if stage.remedy is None else self.method.with_remedy(stage.remedy)
        if stage.teacher == "as this stage began" and live.teacher is None:
            live.teacher = copy.deepcopy(live.net).eval().requires_grad_(False)
        previous = None if method.fresh else self.state.net
        teacher = {"previous": previous, "as this stage began": live.teacher, None: None}[stage.teacher]
        s = self.step(live, stage, teacher, method)
        if live.at.epoch == 0:
            method.enter(s, stage)
        return method, s

    def leave(self, method: Method, s: Step, stage: Stage, live: Live) -> None:
        """A stage is over: freeze all, and keep what the method puts in place of the exemplars' pixels."""
        live.net.eval().requires_grad_(False)
        for name, value in s.state.items():
            s.state[name] = value.detach()
        pixels = method.leave(s, stage)
        live.pixels = live.pixels if pixels is None else pixels

    def step(
        self, live: Live, stage: Stage | None = None, teacher: Net | None = None, method: Method | None = None
    ) -> Step:
        """What the method may see in a stage, where it has the remedy in force; without one, before the first or after
        the last."""
        plan, everything = self.plan, torch.cat([self.data, self.memory])
        held = everything[:0]
        if (h := self.method.hold(plan)) > 0:
            if min(plan.counts) <= h:
                few = live.state.classes[plan.counts.index(min(plan.counts))]
                raise UsageError(
                    f"{self.method.name}, remedy {self.method.remedy.name}, holds {format_count(h, 'image')} "
                    f"of every class out of training, but {few!r} has only {min(plan.counts)}"
                )
            trained, out = memory.hold_out(self.images.y[everything], h, generator(self.seed, plan.t, "hold"))
            everything, held = everything[trained], everything[out]
        images, kept = self.images, self.memory if live.chosen is None else live.chosen
        if live.pixels is not None:
            images = join_images(images, Images(live.pixels, images.y[kept]))
            kept = torch.arange(len(self.images), len(images), device=kept.device)
        where = self.data if stage is None else {"all": everything, "memory": kept, "held": held}[stage.images]
        n = torch.bincount(images.y[where], minlength=plan.N).float()
        s = Step(
            **vars(plan), n=n, lam=torch.ones_like(n), images=images, data=self.data, memory=kept, held=held,
            where=where, net=live.net, teacher=teacher, state=live.state.extra, embed=partial(embed, images),
        )  # fmt: skip
        return replace(s, lam=(method or self.method).lam(s).clone())

    def choose(self, live: Live, select: str) -> Tensor:
        """The memory after the step: m of every old class, then the new exemplars, class by class."""
        live.net.eval().requires_grad_(False)
        m, new = self.plan.keep, self.data[:0]
        if m > 0:
            gen = generator(self.seed, self.plan.t, "exemplars")
            new = self.method.choose(self.step(live), m, select, gen)
        return torch.cat([memory.keep(self.memory, self.images.y[self.memory], m), new])

    def finish(self, live: Live) -> None:
        """The step is over: note what the method notes, the last α, and the exemplars as they stay."""
        state = live.state
        self.method.after(self.step(live))
        warn_of_scale(live.net, self.plan.t)
        adapt = self.method.remedy.adapt()
        alpha = None if adapt is None else state.extra.pop(adapt.name, None)
        state.alphas = [*state.alphas, None if alpha is None else alpha.item()]
        chosen = self.memory if live.chosen is None else live.chosen
        if self.stays and live.pixels is None:
            state.exemplars, state.kept, state.keeper = None, chosen, self.images.id
            return
        own = self.images[chosen].compact()
        state.exemplars, state.kept = own if live.pixels is None else Images(live.pixels, own.y), None


def plan_step(state: State, new: int, images: Images, where: Tensor, budget: Budget, recipe: Recipe | None) -> Plan:
    """What is known without pixels of a step that brings so many new classes, with images at these positions."""
    sizes = (*state.sizes, new)
    counts = torch.bincount(images.y[where], minlength=sum(sizes)).tolist()
    _, channels, height, width = images.x.shape
    m, keep = budget.share(sum(state.sizes)) if state.sizes else 0, budget.share(sum(sizes))
    if not keep and budget.share(1):
        log.warning("memory %s is less than an image for each of %d classes: no images are kept", budget, sum(sizes))
    return Plan(len(state.sizes), sizes, (channels, height, width), tuple(counts), m, keep, recipe)


def check_position(live: Live, method: Method, budget: Budget, recipe: Recipe | None) -> None:
    """Refuse a place that the method's step does not have, be the images of a class few or many."""
    sizes, shape, at = live.state.sizes, live.state.shape, live.at
    assert shape is not None, "a step under way has images"
    m, keep = budget.share(sum(sizes[:-1])) if len(sizes) > 1 else 0, budget.share(sum(sizes))
    for count in (1, 10**6):
        plan = Plan(len(sizes) - 1, sizes, shape, (count,) * sum(sizes), m, keep, recipe)
        epochs = [0 if isinstance(stage, str) else stage.recipe.epochs for stage in method.stages(plan)]
        if at.stage < len(epochs) and at.epoch <= epochs[at.stage]:
            return
    raise DataError(f"epoch {at.epoch} of stage {at.stage} is none of its step")


def read_images(
    images: Any, labels: Any, old: State, live: Live | None, device: torch.device, crop: Augment | None
) -> tuple[Images, list[Hashable], Tensor]:
    """A step's images on the device, its new classes, and where its own images are among them.

    `old` is what was known before it; `live` is where it was stopped, if it was begun.
    """
    known, shape = len(old.classes), (live.state if live else old).shape
    if isinstance(images, Images):
        data, new = replace(images, x=fit_pixels(images.x, crop), id=images.id or images.fingerprint()), list(labels)
        check_shape(get_image_shape(data.x), shape)
        if new != list(range(known, known + max(len(new), 1 if known else 2))):
            raise UsageError(f"these images are learned in the order of their labels: next is {known}")
        return data, new, data.find_positions(new[0], new[-1] + 1)
    x = as_pixels(images, crop, copy=True)
    names = as_labels(labels, len(x))
    check_shape(get_image_shape(x), shape)
    new = live.state.classes[known:] if live else find_new_classes(names, old.classes)
    index = {name: known + k for k, name in enumerate(new)}
    if any(name not in index for name in names):
        raise other_data(old)
    data = Images(x, torch.tensor([index[name] for name in names])).to(device)
    return data, new, torch.arange(len(data), device=device)


def other_data(old: State) -> UsageError:
    """That a step goes on with other images than those it was begun with."""
    return UsageError(f"step {len(old.sizes)} is not finished: call learn with the images and labels it was begun with")


def embed(images: Images, net: Net, where: Tensor | AugmentedEpoch, view: View | None = None) -> Tensor:
    """The embeddings of the images at these positions, or of those of an epoch."""
    return compute_features(net, images.x, where, view)


def gather(data: Images, state: State) -> tuple[Images, Tensor]:
    """All pixels that a step can see, and where among them the exemplars are."""
    if state.kept is not None:
        if not data.id or data.id != state.keeper:
            raise UsageError("the exemplars are positions in other images: call own_exemplars(images) with those first")
        return data, state.kept
    if state.exemplars is None or not len(state.exemplars):
        return data, torch.zeros(0, dtype=torch.long, device=data.y.device)
    everything = join_images(data, state.exemplars)
    return everything, torch.arange(len(data), len(everything), device=data.y.device)


def warn_of_scale(net: Net, t: int) -> None:
    """A scale below 0 turns similarities round."""
    if isinstance(net.head, RowsHead) and (scale := net.head.scale.min().item()) < 0:
        log.warning(
            "the scale of the head is %.3g after step %d, so that the least similar class wins: train for more epochs",
            scale,
            t,
        )
