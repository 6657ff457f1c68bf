"""fit(): the only training loop. Device, precision and the order of things live here; mathematics does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from ..data.augment import Crop
from ..data.randomness import derive_seed, generator
from ..errors import DivergedError
from ..method import Method
from ..nets import Batch, Features, Out
from ..step import More, Stage, Step
from . import meta
from .batches import Batches, SecondStream, Table, shuffle
from .cuda_graph import Engine, SideStream, prepare
from .gpu import get_recent_peak_memory, reset_peak_memory
from .sgd import Weights, compute_gradient, select_weights, sgd_
from .stand_ins import replace_features


class Epoch(NamedTuple):
    """What is known at the end of an epoch."""

    step: int
    """t, from 0"""
    stage: str
    """which training of the step"""
    epoch: int
    """epochs done, from 1"""
    epochs: int
    """epochs there are"""
    loss: float
    """mean of the training loss over the epoch"""
    lr: float
    """learning rate of the epoch"""
    alpha: float | None
    """Meta's α"""
    images_per_second: float
    """in this epoch"""
    seconds: float
    """since the stage began, pauses left out"""
    mib: float | None = None
    """memory of the GPU at its peak while the stage is trained, counted from its beginning; None on a CPU"""


@dataclass
class Position:
    """Where the training of a step stands, besides the net: all that resuming needs."""

    stage: int = 0
    """index of the stage"""
    epoch: int = 0
    seconds: float = 0.0
    momentum: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """How a stage is computed."""

    seed: int
    crop: Crop
    bf16: bool = False
    engine: Engine = "eager"
    """how training steps are launched, which changes their speed and not what they compute"""
    requested: bool = False
    """whether that engine was requested by name, so that another in its place is worth a warning"""


class Callbacks(NamedTuple):
    """Who is told of progress: of each epoch, and after each batch of the epochs launched so far, such as 2.25."""

    epoch: Callable[[Epoch], None] = lambda epoch: None
    batch: Callable[[float], None] = lambda epochs: None


def fit(method: Method, s: Step, stage: Stage, at: Position, on: Conditions, tell: Callbacks = Callbacks()) -> Engine:
    """Train one stage from `at` to the last epoch of its recipe; `at` moves along. Returns the engine that was used."""
    recipe = stage.recipe
    if at.epoch == recipe.epochs:
        return on.engine  # nothing is left to do
    training = Training(method, s, stage, at, on)
    launches = training.load(at.epoch)
    cuda = s.n.is_cuda
    if cuda:
        reset_peak_memory(s.n.device)  # what predicting took before is not what training takes
    steps, engine = training.prepare()
    mib: float | None = None
    for epoch in range(at.epoch, recipe.epochs):
        began = time.perf_counter()
        launches = launches or training.load(epoch)
        for i, kind in enumerate(launches):
            steps[kind]()
            tell.batch(epoch + (i + 1) / len(launches))
        loss = training.total.item() / max(1, len(launches))  # where the CPU waits for the device, once an epoch
        seconds = time.perf_counter() - began
        if not math.isfinite(loss):
            raise explain_divergence(loss, training, epoch)
        at.epoch, at.seconds = epoch + 1, at.seconds + seconds
        speed, launches = training.count_images(launches) / max(seconds, 1e-9), []
        if cuda and mib is None:  # all epochs take the same, and whoever is told of one may predict
            mib = get_recent_peak_memory(s.n.device)
        alpha = None if training.adapt is None else s.state[training.adapt.name].item()
        rate = recipe.lr_at(epoch)
        tell.epoch(Epoch(s.t, stage.name, epoch + 1, recipe.epochs, loss, rate, alpha, speed, at.seconds, mib))
        if s.net.training != (stage.batch_norm == "train"):  # half a millisecond for all modules, and seldom needed
            s.net.train(stage.batch_norm == "train")
    return engine


def explain_divergence(loss: float, training: Training, epoch: int) -> DivergedError:
    """What to do about a loss that is no number."""
    settings = {"refit": {"Finetune(lr=...)": "--finetune-lr"}}.get(training.stage.name, {"Recipe(lr=...)": "--lr"})
    settings |= {"Meta(alpha_lr=...)": "--alpha-lr"} if training.adapt is not None else {}
    words = f"training diverged: the loss is {loss} in step {training.s.t}, epoch {epoch + 1}"
    return DivergedError(words, settings)


class Training:
    """The training of one stage, in tensors that stay where they are, so that a CUDA graph can hold them."""

    def __init__(self, method: Method, s: Step, stage: Stage, at: Position, on: Conditions) -> None:
        self.method, self.s, self.stage, self.on = method, s, stage, on
        self.objective = stage.objective or method.objective
        self.device = s.n.device
        self.groups = select_weights(s, stage)
        self.weights = {name: w for group in self.groups for name, w in group.weights.items()}
        # Only what is trained has momentum.
        at.momentum = {n: at.momentum.get(n, torch.zeros_like(w)) for n, w in self.weights.items()}
        self.momentum = at.momentum
        self.total = torch.zeros((), device=self.device)
        self.noise = torch.zeros((), device=self.device)
        self.noise_generator = torch.Generator(self.device)
        self.aside = SideStream(self.device, "teacher")
        self.sources = self._make_sources()
        adapt = method.remedy.adapt()
        self.adapt = adapt if adapt is not None and len(s.held) and stage.images == "all" else None
        if self.adapt is not None:
            n, most = len(s.held), self.sources[0].which.shape[0] // self.adapt.every + 1
            self.held = self._make_batches("held", self.adapt.batch, lambda gen: s.held[shuffle(n, gen)], most=most)
        self.seconds: list[SecondStream | None] = [None] * len(self.sources)
        s.net.train(stage.batch_norm == "train")

    def _make_batches(
        self,
        purpose: str,
        size: int,
        order: Callable[[torch.Generator], Tensor],
        augment: str = "augment",
        most: int = 0,
    ) -> Batches:
        seed, t, crop, device = self.on.seed, self.s.t, self.on.crop, self.device
        return Batches(
            self.s.images,
            crop,
            size,
            lambda k: order(generator(seed, t, purpose, "order", k, device=device)),
            lambda shape, k: crop.draw(shape, generator(seed, t, purpose, augment, k, device=device)),
            most,
        )

    def _make_sources(self) -> list[Batches]:
        """The stream of batches, and where epochs end with a short one, the stream of those."""
        recipe, name = self.stage.recipe, self.stage.name

        def order(gen: torch.Generator) -> Tensor:
            return self.method.epoch(self.s, gen, recipe.batch)

        train = self._make_batches(name, recipe.batch, order)
        self.rest = train.length % train.size
        if recipe.last == "joined" or not self.rest:
            return [train]
        return [
            self._make_batches(name, recipe.batch, lambda gen: order(gen)[: -self.rest]),
            self._make_batches(name, self.rest, lambda gen: order(gen)[-self.rest :], "augment the rest"),
        ]

    # An epoch ------------------------------------------------------------------------------------------------

    def load(self, epoch: int) -> list[int]:
        """Lay out the batches of an epoch; returns which of the steps to launch, one after the other."""
        train, short = self.sources[0], len(self.sources) - 1
        first, last = train.count_batches(epoch), train.count_batches(epoch + 1)
        self._load_second_stream(0, train.load(first, last, epoch), epoch)
        if short:
            self._load_second_stream(1, self.sources[1].load(epoch, epoch + 1, epoch), epoch)
            first, last = first + epoch, last + epoch + 1
        every = 0 if self.adapt is None else self.adapt.every
        if every:
            self.held.load(-(-first // every), -(-last // every), epoch)
        rate = self.stage.recipe.lr_at(epoch)
        for group in self.groups:
            group.lr.fill_(rate * group.factor)
        if self.stage.gradient_noise:
            self.noise.fill_(math.sqrt(self.stage.gradient_noise / (1 + epoch) ** 0.55))  # it is a variance
            self.noise_generator.manual_seed(derive_seed(self.on.seed, self.s.t, self.stage.name, "noise", epoch))
        self.total.zero_()
        adapts = [bool(every) and i % every == 0 for i in range(first, last)]
        ends = [bool(short) and i == last - 1 for i in range(first, last)]
        return [len(self.sources) * a + e for a, e in zip(adapts, ends)]

    def _load_second_stream(self, k: int, which: Tensor, epoch: int) -> None:
        """Lay out the second stream beside the batches of a source, where the method names one."""
        name = self.stage.name
        gen = partial(generator, self.on.seed, self.s.t, name, device=self.device)
        more = self.method.more(self.s, which, gen("more", epoch, k)) if len(which) else None
        if more is None:
            return
        second = self.seconds[k] or SecondStream(self.s, more, self.on.crop, self.sources[k].which.shape[0])
        self.seconds[k] = second
        second.lay_out(more.where, self.on.crop.draw(tuple(more.where.shape), gen("augment more", epoch, k)))

    def count_images(self, launches: list[int]) -> int:
        """How many images these steps train on."""
        short = sum(kind % len(self.sources) for kind in launches)
        return (len(launches) - short) * self.sources[0].size + short * self.rest

    # A step --------------------------------------------------------------------------------------------------

    def prepare(self) -> tuple[list[Callable[[], None]], Engine]:
        """The steps as functions, launched in the fastest way that there is for them, and which way that is."""
        s = self.s
        changed = [*s.net.state_dict().values(), *self.momentum.values(), *s.state.values(), s.lam, self.total]
        changed += [source.at for source in self.sources]
        changed += [second.at for second in self.seconds if second is not None]
        changed += [self.held.at] if self.adapt is not None else []
        engine = self.on.engine if self.method.capturable else "eager"
        generators = [self.noise_generator] if self.stage.gradient_noise else []
        drawn = self.noise_generator.get_state()
        with torch._functorch.config.patch(donated_buffer=False):  # updating α goes back through one graph thrice
            made = prepare(engine, self.make_steps, changed, self.on.requested, generators)
        self.noise_generator.set_state(drawn)  # recording has drawn from it
        return made

    def make_steps(self, engine: Engine) -> list[Callable[[], None]]:
        """A step for each source, then one for each that updates α as well."""
        student, teacher = replace_features(engine, self.s, self.on.bf16, self.method)
        kinds = [False] if self.adapt is None else [False, True]
        ahead = student if engine == "fused" else None  # what is compiled is so for the net's own weights alone
        both = range(len(self.sources))
        return [partial(self.run_step, k, adapts, student, teacher, ahead) for adapts in kinds for k in both]

    def run_step(
        self, k: int, adapts: bool, student: Features | None, teacher: Features | None, ahead: Features | None
    ) -> None:
        """One optimisation step on the next batch of a source."""
        b = self.forward(self.sources[k], student, teacher)
        if (second := self.seconds[k]) is not None:
            b = b._replace(more=self.forward(second, student, teacher, second.more))
        loss = self.objective(self.s, b)
        if adapts and self.adapt is not None:
            grads = compute_gradient(loss, self.weights, again=True)
            look = meta.Ahead(self.groups, self.momentum, self.stage.recipe, self.held, self.on.bf16, ahead)
            meta.update(self.adapt, self.method, self.objective, self.s, b, grads, look)
            loss = self.objective(self.s, b)
        grads = compute_gradient(loss, self.weights)
        if self.stage.gradient_noise:
            gen = self.noise_generator
            for g in grads.values():
                g.add_(self.noise * torch.empty_like(g).normal_(generator=gen))
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
        """The next batch of a source, as the net and the teacher see it."""
        x, y = source.next_batch()
        x = self.method.views(x)
        y = y.repeat(len(x) // len(y))
        s, learns = self.s, more is None or more.gradient
        taught = s.teacher is not None and (more is None or more.teacher)
        ref: Out | None = None
        # Without autocast's cache of cast weights: inside an outer autocast it would outlive the step, and be stale.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on.bf16, cache_enabled=False):
            with self.aside, torch.no_grad():
                if taught and s.teacher is not None:
                    ref = s.teacher(x, teacher)
            with torch.set_grad_enabled(learns):
                out = s.net(x, student)
        self.aside.join()
        return Batch(y, out, ref)
