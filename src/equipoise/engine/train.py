"""fit(): the only training loop. Device, precision and the order of things live here; mathematics does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from ..data.augment import Crop
from ..data.images import Images
from ..errors import RunError
from ..losses import Meta
from ..method import Method, Recipe, Step
from ..nets import Features
from ..nets.backbones import RESIDUAL, Backbone
from ..randomness import generator
from . import meta
from .cuda_graph import Aside, Engine, UnfitError, prepared
from .gpu import count_memory_anew, recent_peak_memory

HELD_BATCH = 128
"""images of B_t in an update of α; all of them where there are fewer"""

Weights = dict[str, Tensor]


class Epoch(NamedTuple):
    """What is known at the end of an epoch."""

    step: int
    """t, from 0"""
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
    """since the step began, pauses left out"""
    mib: float | None = None
    """memory of the GPU at its peak while the step is trained, which torch counts anew from then on; None on a CPU"""


@dataclass
class Position:
    """Where the training of a step stands, besides the net: all that going on later needs."""

    momentum: Weights
    epoch: int = 0
    seconds: float = 0.0


class Batches:
    """Batches of one shape, cut from a stream of epochs laid end to end: nothing is dropped, nothing is short.

    A batch may span two epochs. Any stretch of the stream can be had without what came before. An epoch's
    batches lie on the device beforehand, and a counter there says which one is next: the loop sends nothing.
    """

    def __init__(
        self, images: Images, crop: Crop, size: int, order: Callable[[int], Tensor], drawn: Drawn, most: int = 0
    ) -> None:
        """`order(k)` is the k-th epoch as indices; `most` batches are loaded at a time, one epoch's if not given."""
        self.x, self.y, self.crop = crop.padded(images.x), images.y, crop
        self.order, self.drawn = order, drawn
        self.length = len(order(0))
        self.size = min(size, self.length)
        self.most = most or -(-self.length // self.size) + 1
        self.which = images.y.new_zeros(self.most, self.size)
        self.shifts = images.y.new_zeros(self.most, self.size, crop.numbers)
        self.at = images.y.new_zeros(1)

    def edge(self, epochs: int) -> int:
        """How many batches that many epochs are, rounded to the nearest."""
        return (2 * epochs * self.length + self.size) // (2 * self.size)

    def load(self, first: int, last: int, name: int) -> None:
        """Lay out the batches first, ..., last - 1; `name` names their augmentation."""
        begin, end = first * self.size, last * self.size
        epochs = range(begin // self.length, -(-end // self.length))
        if not epochs:
            return
        stream = torch.cat([self.order(k) for k in epochs])
        begin -= epochs.start * self.length
        batches = stream[begin : begin + (last - first) * self.size].view(-1, self.size)
        self.which[: len(batches)].copy_(batches)
        self.shifts[: len(batches)].copy_(self.drawn((last - first, self.size), name))
        self.at.zero_()

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch: images, augmented, and labels."""
        which = self.which.index_select(0, self.at)[0]
        shifts = self.shifts.index_select(0, self.at)[0]
        self.at += 1
        return self.crop(self.x, which, shifts), self.y[which]


Drawn = Callable[[tuple[int, int], int], Tensor]


def sgd_(weights: Weights, grads: Weights, momentum: Weights, lr: Tensor, recipe: Recipe) -> None:
    """One step of SGD, in place: b ← μ b + (g + wd θ), θ ← θ − lr b. Few kernels, whatever the number of tensors."""
    names = list(weights)
    w, g, b = ([group[k] for k in names] for group in (weights, grads, momentum))
    with torch.no_grad():
        if lr.is_cuda:  # one pass over memory
            torch._fused_sgd_(
                w, g, b, weight_decay=recipe.weight_decay, momentum=recipe.momentum, lr=lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return
        torch._foreach_mul_(b, recipe.momentum)
        torch._foreach_add_(b, torch._foreach_add(g, w, alpha=recipe.weight_decay))
        torch._foreach_sub_(w, torch._foreach_mul(b, lr))


def trained(s: Step) -> Weights:
    """The weights that SGD moves."""
    return {name: w for name, w in s.net.named_parameters() if w.requires_grad}


def fit(
    method: Method,
    s: Step,
    recipe: Recipe,
    crop: Crop,
    seed: int,
    bf16: bool,
    at: Position,
    on_epoch: Callable[[Epoch], None],
    on_batch: Callable[[float], None] = lambda epochs: None,
    engine: Engine = "eager",
    stage: str = "train",
    moving: bool = True,
    asked: bool = False,
) -> Engine:
    """Train s.net from `at` to the last epoch of the recipe; `at` moves along. Returns the engine that was used.

    `on_epoch` is told of each epoch; `on_batch` of the epochs sent so far, counted by the host: it waits for nothing.
    `engine` says how the steps are launched, which changes their speed and not what they compute. `stage` names the
    random numbers; `moving` batch norms use and move the statistics of batches, others rest. `asked` is whether that
    engine was asked for by name, so that another in its place is worth a word.
    """
    device = s.data.x.device
    weights = trained(s)
    lr = torch.zeros((), device=device)
    total = torch.zeros((), device=device)

    def batches(
        images: Images,
        purpose: str,
        size: int,
        order: Callable[[torch.Generator], Tensor],
        most: int = 0,
        augment: str = "augment",
    ) -> Batches:
        def shuffled(k: int) -> Tensor:
            return order(generator(seed, s.t, purpose, "order", k, device=device))

        def drawn(shape: tuple[int, int], k: int) -> Tensor:
            return crop.draw(shape, generator(seed, s.t, purpose, augment, k, device=device))

        return Batches(images, crop, size, shuffled, drawn, most)

    train = batches(s.data, stage, recipe.batch, lambda gen: method.epoch(s, gen))
    sources, rest = [train], train.length % train.size
    if recipe.last == "short" and rest:
        train = batches(s.data, stage, recipe.batch, lambda gen: method.epoch(s, gen)[:-rest])
        tail = batches(s.data, stage, rest, lambda gen: method.epoch(s, gen)[-rest:], augment="augment the rest")
        sources = [train, tail]
    short = len(sources) - 1
    learned = method.loss if isinstance(method.loss, Meta) else None
    if learned is not None and s.held is not None:
        n = len(s.held)
        updates = train.most // learned.every + 1
        shuffle = partial(torch.randperm, n, device=device)
        held = batches(s.held, "held", HELD_BATCH, lambda gen: shuffle(generator=gen), updates)
    else:
        learned = None  # nothing to learn α on: the base step

    def optimise(
        source: Batches,
        update_alpha: bool,
        student: Features | None,
        teacher: Features | None,
        ahead: Features | None = None,
    ) -> None:
        x, y = source.take()
        # Without autocast's cache of cast weights: inside an outer autocast it would outlive the step, and be stale.
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            with aside, torch.no_grad():
                ref = None if s.teacher is None else s.teacher(x, teacher)
            out = s.net(x, student)
        aside.join()
        loss = method.objective(s, y, out, ref)
        if update_alpha and learned is not None:
            grads = gradient(loss, weights, again=True)
            batches_of = (y, out, ref), held.take()
            meta.update_alpha(
                method, s, *batches_of, weights, grads, at.momentum, lr, recipe, learned.alpha_lr, bf16, ahead
            )
            loss = method.objective(s, y, out, ref)
        grads = gradient(loss, weights)
        if recipe.clamp:
            torch._foreach_clamp_min_(list(grads.values()), -recipe.clamp)
            torch._foreach_clamp_max_(list(grads.values()), recipe.clamp)
        sgd_(weights, grads, at.momentum, lr, recipe)
        total.add_(loss.detach())

    aside = Aside(device, "teacher")
    s.net.train(moving)

    def steps(engine: Engine) -> list[Callable[[], None]]:
        student, teacher = stand_ins(engine, s, bf16)
        ahead = student if engine == "fused" else None  # what is compiled is so for the net's own weights alone
        made: list[Callable[[], None]] = [partial(optimise, source, False, student, teacher) for source in sources]
        if learned is not None:
            made += [partial(optimise, source, True, student, teacher, ahead) for source in sources]
        return made

    changed = [*s.net.state_dict().values(), *at.momentum.values(), *s.state.values(), s.lam, total]
    changed += [source.at for source in sources]
    if learned is not None:
        changed.append(held.at)
    if at.epoch == recipe.epochs:
        return engine  # nothing is left to do
    mib: float | None = None
    if device.type == "cuda":
        count_memory_anew(device)  # what predicting took before is not what training takes
    with torch._functorch.config.patch(donated_buffer=False):  # updating α goes back through one graph thrice
        launch, engine = prepared(engine, steps, changed, asked)
    for epoch in range(at.epoch, recipe.epochs):
        began = time.perf_counter()
        first, last = train.edge(epoch), train.edge(epoch + 1)
        train.load(first, last, epoch)
        if short:
            tail.load(epoch, epoch + 1, epoch)
            first, last = first + epoch, last + epoch + 1
        if learned is not None:
            held.load(-(-first // learned.every), -(-last // learned.every), epoch)
        lr.fill_(recipe.lr_at(epoch))
        total.zero_()
        for i in range(first, last):
            updates_alpha = learned is not None and i % learned.every == 0
            launch[len(sources) * updates_alpha + (short and i == last - 1)]()
            on_batch(epoch + (i + 1 - first) / (last - first))
        mean = total.item() / max(1, last - first)  # where the CPU waits for the device, once an epoch
        seconds = time.perf_counter() - began
        if not math.isfinite(mean):
            advice = "lower --lr" if learned is None else "lower --lr or --alpha-lr"
            if stage != "train":
                advice = "lower --refit-lr"
            raise RunError(f"training diverged: the loss is {mean} in step {s.t}, epoch {epoch + 1}; {advice}")
        at.epoch, at.seconds = epoch + 1, at.seconds + seconds
        alpha = s.state["alpha"].item() if "alpha" in s.state else None
        images = (last - first - short) * train.size + short * rest
        speed = images / max(seconds, 1e-9)
        if device.type == "cuda" and mib is None:  # all epochs take the same, and whoever is told of one may predict
            mib = recent_peak_memory(device)
        on_epoch(Epoch(s.t, epoch + 1, recipe.epochs, mean, recipe.lr_at(epoch), alpha, speed, at.seconds, mib))
        if s.net.training != moving:  # half a millisecond for all modules, and seldom needed
            s.net.train(moving)
    return engine


def stand_ins(engine: Engine, s: Step, bf16: bool) -> tuple[Features | None, Features | None]:
    """What stands in for the features of the net and of its teacher: same weights, other kernels; None for nothing.

    Features only: their shapes never change, while the head grows from step to step.
    """
    if engine == "compiled":
        return torch.compile(s.net.features), None if s.teacher is None else torch.compile(s.teacher.features)
    if engine == "fused":
        if reason := unfit(s, bf16):
            raise UnfitError(reason)
        from .kernels.resnet32 import Frozen, Training  # needs Triton, which comes with torch for GPUs

        net = Training(s.net) if s.net.training else Frozen(s.net)
        return net, None if s.teacher is None else Frozen(s.teacher)
    return None, None


def unfit(s: Step, bf16: bool) -> str | None:
    """Why our kernels cannot train this; None if they can."""
    if not bf16:
        return "our kernels count in bf16, and the precision is fp32"
    for net in (s.net, s.teacher):
        if net is not None and not has_kernels(net.backbone):
            return f"there are no kernels of ours for this {type(net.backbone).__name__}"
    height, width = s.data.x.shape[2:]
    if height % 4 or width % 4:
        return f"our kernels halve both sides of an image twice, and {height} x {width} pixels cannot be halved so"
    if not s.net.training and any(w.requires_grad for w in s.net.backbone.parameters()):
        return "our kernels learn from the statistics of batches, and batch norms rest"
    return None


def has_kernels(backbone: Backbone) -> bool:
    """Whether our kernels compute what this backbone does: it is one of theirs, and nobody has changed it."""
    norms = [m for m in backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    usual = all(m.eps == 1e-5 and m.momentum == 0.1 and m.affine and m.track_running_stats for m in norms)
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
    return type(backbone) in RESIDUAL and usual and not hooked


def gradient(loss: Tensor, weights: Weights, again: bool = False) -> Weights:
    """The gradient of the loss by weight; `again` keeps what a second call needs."""
    grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=again, materialize_grads=True)
    return dict(zip(weights, grads))
