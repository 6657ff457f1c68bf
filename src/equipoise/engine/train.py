"""fit(): the training loop of all methods."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from ..data.augment import Augment
from ..data.randomness import derive_seed, generator
from ..errors import DivergedError
from ..method import Method
from ..nets import Batch, Features, Out
from ..step import More, Stage, Step
from . import meta
from .batches import Batches, SecondStreams, Table, find_epoch, shuffle
from .cuda_graph import Engine, SideStream, prepare
from .feed import open_source
from .gpu import get_recent_peak_memory, reset_peak_memory
from .sgd import Weights, compute_gradient, select_weights, sgd_
from .stand_ins import find_normalisation, get_backbones, replace_features


class Epoch(NamedTuple):
    """Progress and measurements at the end of an epoch."""

    step: int
    """t, from 0"""
    stage: str
    """name of the stage"""
    epoch: int
    """epochs done in this stage"""
    epochs: int
    """epochs of this stage"""
    loss: float
    """mean training loss of the epoch"""
    lr: float
    """learning rate of the epoch"""
    alpha: float | None
    """Meta's α"""
    images_per_second: float
    """speed of the epoch"""
    seconds: float
    """training time of the stage so far"""
    mib: float | None = None
    """peak GPU memory of the stage; None on a CPU"""


@dataclass
class Position:
    """The position in the training of a step: all that resuming needs besides the net."""

    stage: int = 0
    """index of the stage"""
    epoch: int = 0
    seconds: float = 0.0
    momentum: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """Seed, augmentation, precision and engine of a training."""

    seed: int
    crop: Augment
    bf16: bool = False
    engine: Engine = "eager"
    """how training steps are launched; affects speed only"""
    requested: bool = False
    """whether the engine was requested by name: if so, a fallback warns"""


class Callbacks(NamedTuple):
    """Called after each epoch, and after each batch with the number of epochs so far, such as 2.25."""

    epoch: Callable[[Epoch], None] = lambda epoch: None
    batch: Callable[[float], None] = lambda epochs: None


def fit(method: Method, s: Step, stage: Stage, at: Position, on: Conditions, tell: Callbacks = Callbacks()) -> Engine:
    """Train one stage from `at`, which is updated, to the last epoch. Returns the engine used."""
    recipe = stage.recipe
    if at.epoch == recipe.epochs:
        return on.engine  # the stage is complete
    training = Training(method, s, stage, at, replace(on, crop=method.augmentation(on.crop)))
    launches = training.load(at.epoch)
    cuda = s.n.is_cuda
    if cuda:
        reset_peak_memory(s.n.device)  # earlier predictions do not count
    steps, engine = training.prepare()
    mib: float | None = None
    with contextlib.closing(training.source):
        for epoch in range(at.epoch, recipe.epochs):
            began = time.perf_counter()
            launches = launches or training.load(epoch)
            for i, kind in enumerate(training.source.follow(launches)):
                steps[kind]()
                tell.batch(epoch + (i + 1) / len(launches))
            loss = training.total.item() / max(1, len(launches))  # the CPU waits for the device here, once an epoch
            seconds = time.perf_counter() - began
            if not math.isfinite(loss):
                raise explain_divergence(loss, training, epoch)
            at.epoch, at.seconds = epoch + 1, at.seconds + seconds
            speed, launches = training.count_images(launches) / max(seconds, 1e-9), []
            if cuda and mib is None:  # equal in all epochs; a callback may predict, which needs more
                mib = get_recent_peak_memory(s.n.device)
            alpha = None if training.adapt is None else s.state[training.adapt.name].item()
            rate = recipe.lr_at(epoch)
            tell.epoch(Epoch(s.t, stage.name, epoch + 1, recipe.epochs, loss, rate, alpha, speed, at.seconds, mib))
            if s.net.training != (stage.batch_norm == "train"):  # a callback may change it; to set it takes 0.5 ms
                s.net.train(stage.batch_norm == "train")
    return engine


def explain_divergence(loss: float, training: Training, epoch: int) -> DivergedError:
    """The error for a loss that is not finite."""
    settings = {"refit": {"Finetune(lr=...)": "--finetune-lr"}}.get(training.stage.name, {"Recipe(lr=...)": "--lr"})
    settings |= {"Meta(alpha_lr=...)": "--alpha-lr"} if training.adapt is not None else {}
    words = f"training diverged: the loss is {loss} in step {training.s.t}, epoch {epoch + 1}"
    return DivergedError(words, settings)


class Training:
    """The training of one stage, in tensors with fixed addresses, as a CUDA graph needs them."""

    def __init__(self, method: Method, s: Step, stage: Stage, at: Position, on: Conditions) -> None:
        self.method, self.s, self.stage, self.on = method, s, stage, on
        self.objective = stage.objective or method.objective
        self.device = s.n.device
        self.groups = select_weights(s, stage)
        self.weights = {name: w for group in self.groups for name, w in group.weights.items()}
        # Frozen weights have no momentum.
        at.momentum = {n: at.momentum.get(n, torch.zeros_like(w)) for n, w in self.weights.items()}
        self.momentum = at.momentum
        self.total = torch.zeros((), device=self.device)
        self.noise = torch.zeros((), device=self.device)
        self.noise_generator = torch.Generator(self.device)
        self.side_stream = SideStream(self.device, "teacher")
        self.source = open_source(s)
        self.images = replace(s.images, x=self.source.x)
        self.sources = self._make_sources()
        self.adapt = method.remedy.adapt() if len(s.held) and stage.images == "all" else None
        if self.adapt is not None:
            n, most = len(s.held), self.sources[0].which.shape[0] // self.adapt.every + 1
            self.held = self._make_batches("held", self.adapt.batch, lambda gen: s.held[shuffle(n, gen)], most=most)
        self.seconds = SecondStreams(method, s, stage.name, self.sources, on.seed)
        s.net.train(stage.batch_norm == "train")

    def _make_batches(
        self, purpose: str, size: int, order: Callable[[torch.Generator], Tensor], drawn: str = "augment", most: int = 0
    ) -> Batches:
        seed, t, crop, device = self.on.seed, self.s.t, self.on.crop, self.device
        source = self.source
        return Batches(
            self.images,
            crop,
            size,
            lambda k: order(generator(seed, t, purpose, "order", k, device=device)),
            lambda shape, k: crop.draw(shape, generator(seed, t, purpose, drawn, k, device=device)),
            most,
            lambda which, k: source.arrange(which, generator(seed, t, purpose, "blocks", k, device=device)),
        )

    def _make_sources(self) -> list[Batches]:
        """The stream of batches and, if epochs end with a short batch, the stream of those."""
        recipe, name, size = self.stage.recipe, self.stage.name, self.stage.recipe.batch
        method, s = self.method, self.s  # not `self`: a cycle would keep all of this until the next garbage collection

        def order(gen: torch.Generator) -> Tensor:
            return method.epoch(s, gen, size)

        train = self._make_batches(name, size, order)
        self.rest = rest = train.length % train.size
        if recipe.last == "joined" or not rest:
            return [train]
        return [
            self._make_batches(name, size, lambda gen: order(gen)[:-rest]),
            self._make_batches(name, rest, lambda gen: order(gen)[-rest:], "augment the rest"),
        ]

    # An epoch ------------------------------------------------------------------------------------------------

    def load(self, epoch: int) -> list[int]:
        """Lay out the batches of an epoch; returns the sequence of indices of the steps to launch."""
        train, short = self.sources[0], len(self.sources) - 1
        first, last = train.count_batches(epoch), train.count_batches(epoch + 1)
        batches = [train.load(first, last, epoch)]
        if short:
            batches.append(self.sources[1].load(epoch, epoch + 1, epoch))
            first, last = first + epoch, last + epoch + 1
        read, is_last = self.seconds.load(batches, epoch), epoch + 1 == self.stage.recipe.epochs
        known = not is_last and not self.seconds.made  # what a second stream has depends on the net
        self.source.lay_out(read, partial(find_epoch, self.sources, epoch + 1) if known else list)
        every = 0 if self.adapt is None else self.adapt.every
        if every:
            self.held.load(-(-first // every), -(-last // every), epoch)
        s, recipe = self.s, self.stage.recipe
        s.lam.copy_(self.method.lam(replace(s, done=epoch / max(1, recipe.epochs - 1))))  # in place, for a CUDA graph
        for group in self.groups:
            group.lr.fill_(recipe.lr_at(epoch) * group.factor)
        if self.stage.gradient_noise:
            self.noise.fill_(math.sqrt(self.stage.gradient_noise / (1 + epoch) ** 0.55))  # the formula is a variance
            self.noise_generator.manual_seed(derive_seed(self.on.seed, self.s.t, self.stage.name, "noise", epoch))
        self.total.zero_()
        adapts = [bool(every) and i % every == 0 for i in range(first, last)]
        ends = [bool(short) and i == last - 1 for i in range(first, last)]
        return [len(self.sources) * a + e for a, e in zip(adapts, ends)]

    def count_images(self, launches: list[int]) -> int:
        """Number of images that these steps train on."""
        short = sum(kind % len(self.sources) for kind in launches)
        return (len(launches) - short) * self.sources[0].size + short * self.rest

    # A step --------------------------------------------------------------------------------------------------

    def prepare(self) -> tuple[list[Callable[[], None]], Engine]:
        """Prepare the steps as functions; returns them and the engine used."""
        s = self.s
        changed = [*s.net.state_dict().values(), *self.momentum.values(), *s.state.values(), s.lam, self.total]
        tables = [*self.sources, *self.seconds.made.values(), *([] if self.adapt is None else [self.held])]
        changed += [table.at for table in tables]
        engine = self.on.engine if self.method.capturable else "eager"
        generators = [self.noise_generator] if self.stage.gradient_noise else []
        drawn = self.noise_generator.get_state()
        with torch._functorch.config.patch(donated_buffer=False):  # Meta runs backward through one graph three times
            made = prepare(engine, self.make_steps, changed, self.on.requested, generators)
        self.noise_generator.set_state(drawn)  # capturing has drawn from it
        return made

    def make_steps(self, engine: Engine) -> list[Callable[[], None]]:
        """A step for each source; with Meta also one for each that updates α."""
        on = self.on
        to = find_normalisation(engine, self.s, on.crop, on.bf16, self.method, on.requested)
        for source in self.sources:
            source.normalisation = to
        found = get_backbones(engine, self.s) if to else replace_features(engine, self.s, on.bf16, self.method)
        student, teacher = found
        kinds = [False] if self.adapt is None else [False, True]
        ahead = student if engine == "fused" and not to else None  # compiled features use the net's own weights only
        both = range(len(self.sources))
        return [partial(self.run_step, k, adapts, student, teacher, ahead) for adapts in kinds for k in both]

    def run_step(
        self, k: int, adapts: bool, student: Features | None, teacher: Features | None, ahead: Features | None
    ) -> None:
        """One optimisation step on the next batch of a source."""
        b = self.forward(self.sources[k], student, teacher)
        if (second := self.seconds.made.get(k)) is not None:
            b = b._replace(more=self.forward(second, student, teacher, second.more))
        loss = self.objective(self.s, b)
        if adapts and self.adapt is not None:
            grads = compute_gradient(loss, self.weights, again=True)
            look = meta.Ahead(self.groups, self.momentum, self.stage.recipe, self.held, self.on.bf16, ahead)
            meta.update(self.adapt, self.method, self.objective, self.s, b, grads, look)
            loss = self.objective(self.s, b)
        grads = compute_gradient(loss, self.weights)
        if self.stage.gradient_noise:
            # In a batch of half the size it is twice as large, so that it is the same on the sum over the images.
            noises = [torch.empty_like(g).normal_(generator=self.noise_generator) for g in grads.values()]
            torch._foreach_mul_(noises, self.noise * (self.stage.recipe.batch / self.sources[k].size))
            torch._foreach_add_(list(grads.values()), noises)
        if clamp := self.stage.recipe.clamp:
            torch._foreach_clamp_min_(list(grads.values()), -clamp)
            torch._foreach_clamp_max_(list(grads.values()), clamp)
        sgd_(self.groups, grads, self.momentum, self.stage.recipe)
        self.total.add_(loss.detach())
        with torch.no_grad():
            self.method.note(self.s, b)

    def forward(
        self, source: Table, student: Features | None, teacher: Features | None, more: More | None = None
    ) -> Batch:
        """The outputs of net and teacher for the next batch of a source."""
        x, y = source.next_batch()
        x = self.method.views(x)
        y = y.repeat(len(x) // len(y))
        s, learns = self.s, more is None or more.gradient
        has_teacher = s.teacher is not None and (more is None or more.teacher)
        ref: Out | None = None
        # Without autocast's weight cache, which would be stale after this step inside an outer autocast.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on.bf16, cache_enabled=False):
            with self.side_stream, torch.no_grad():
                if has_teacher and s.teacher is not None:
                    ref = s.teacher(x, teacher)
            with torch.set_grad_enabled(learns):
                out = s.net(x, student)
        self.side_stream.join()
        return Batch(y, out, ref)
