"""The stages of a step: the net grows, it is trained, exemplars are chosen, and the classifier may be refitted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..data import memory
from ..data.images import Images, channel_statistics, join
from ..data.inputs import as_statistics, image_shape
from ..engine.device import working_on
from ..engine.train import Epoch, Position, fit, trained
from ..errors import UsageError
from ..losses import Meta
from ..method import Method, Step
from ..nets.heads import RowsHead
from ..randomness import generator
from .state import Live, State, new_net, place

if TYPE_CHECKING:
    from . import Learner

log = logging.getLogger("equipoise")


def begin(learner: Learner, data: Images, names: list[Hashable]) -> Live:
    """The net with rows for the new classes, and nothing trained yet."""
    old, method, seed = learner.state_, learner.method, learner.seed
    t, shape = len(old.sizes), image_shape(data.x)
    if t > 0:
        method.check_memory(learner.budget_.share(len(old.classes)))
    rows = len(names)
    if old.net is None or method.fresh:
        if old.net is not None:
            statistics, rows = (old.net.mean.clone(), old.net.std.clone()), rows + len(old.classes)
        elif learner.normalise is not None:
            statistics = as_statistics(learner.normalise, shape[0])
        else:
            statistics = channel_statistics(data.x)
        net = new_net(method, shape, *statistics, generator(seed, t, "weights"))
        place(net, learner.device_)
    else:
        net = copy.deepcopy(old.net).requires_grad_(True)
    net.head.widen(rows, generator(seed, t, "rows"))
    if t > 0 and not method.fresh and type(method).first_rows is not Method.first_rows:
        h = torch.cat([out.h for out in learner.outputs(data.x)])
        method.first_rows(net.head, h, data.y - len(old.classes), generator(seed, t, "first rows"))
    state = State(
        net,
        old.classes + names,
        (*old.sizes, len(names)),
        shape,
        Images(data.x[:0], data.y[:0]) if old.exemplars is None else old.exemplars,
        {name: noted.clone() for name, noted in old.extra.items()},
        list(old.alphas),
    )
    if isinstance(method.loss, Meta) and t > 0 and method.learns(t):
        state.extra["alpha"] = torch.ones((), device=learner.device_)
    momentum = {name: torch.zeros_like(w) for name, w in net.named_parameters()}
    return Live(state, Position(momentum), data.fingerprint())


def train(
    learner: Learner,
    live: Live,
    data: Images,
    callback: Callable[[Learner], None] | None,
    tick: Callable[[float], None],
) -> None:
    """All epochs of the step that are left."""
    state, method = live.state, learner.method
    assert state.exemplars is not None
    if not method.learns(len(state.sizes) - 1):
        return
    n_old = len(learner.state_.classes)
    everything = join(data, state.exemplars)
    if len(everything) < 2:
        raise UsageError("a step needs at least two images to train on")
    images, held = everything, None
    if "alpha" in state.extra:
        images, held = hold_out(learner, everything, n_old, len(state.sizes) - 1)
    counted = everything if isinstance(method.loss, Meta) and method.loss.count == "all" else images
    step = step_on(learner, live, images, held, counted)
    recipe, crop = learner.settings_for(image_shape(data.x))

    def on_epoch(epoch: Epoch) -> None:
        learner.progress_ = epoch
        if callback is not None:
            callback(learner)

    # Only what is trained has momentum; a method may have frozen some weights.
    live.at.momentum = {name: live.at.momentum[name] for name in trained(step)}
    plain = torch.autocast(learner.device_.type, enabled=False)  # whatever the caller is in the middle of
    with torch.enable_grad(), plain, working_on(learner.device_):
        # What could not be compiled or recorded once is neither tried nor said again in every step.
        learner.engine_ = fit(
            method, step, recipe, crop, learner.seed, learner.bf16_, live.at, on_epoch, tick, learner.engine_,
            asked=learner.engine == learner.engine_,
        )  # fmt: skip


def step_on(learner: Learner, live: Live, images: Images, held: Images | None, counted: Images) -> Step:
    """What the method may see when it trains on these images; `counted` are those that n counts."""
    state, method, before = live.state, learner.method, learner.state_
    assert state.net is not None
    n = torch.bincount(counted.y, minlength=len(state.classes)).float()
    past = torch.arange(len(n), device=n.device) < len(before.classes)
    lam = method.loss.lam(n, past, state.extra.get("alpha")).clone()
    t = len(state.sizes) - 1
    teacher = None if method.fresh else before.net
    return Step(t, len(before.classes), state.sizes, n, lam, images, held, state.net, teacher, state.extra)


def hold_out(learner: Learner, images: Images, n_old: int, t: int) -> tuple[Images, Images]:
    """D_t and B_t: the same number of images of every class is held out of training, for this step only."""
    loss = learner.method.loss
    assert isinstance(loss, Meta)
    share = learner.budget_.share(n_old)
    loss.check_memory(share)
    counts = torch.bincount(images.y)
    h = loss.held(int(counts.min()) if share == memory.EVERYTHING else share)
    if int(counts.min()) <= h:
        few = learner.classes_[int(counts.argmin())]
        raise UsageError(
            f"Meta holds {h} image(s) of every class out of training, but {few!r} has only {int(counts.min())}"
        )
    return memory.hold_out(images, h, generator(learner.seed, t, "hold"))


def finish(learner: Learner, live: Live, data: Images, on_refit: Callable[[Epoch], None]) -> None:
    """After training: freeze the net, choose the exemplars, refit the classifier, note α."""
    state = live.state
    assert state.net is not None
    state.net.eval().requires_grad_(False)
    m = learner.budget_.share(len(state.classes))
    t = len(state.sizes) - 1
    noting = type(learner.method).after is not Method.after
    herding = m > 0 and learner.select == "herding"
    if noting or herding:
        h = torch.cat([out.h for out in learner.outputs(data.x)])
    if noting:
        learner.method.after(step_on(learner, live, data, None, data), h)
    if m == 0:
        which = data.y.new_zeros(0)
    elif learner.select == "random":
        which = memory.at_random(data.y, m, generator(learner.seed, t, "exemplars"))
    else:
        which = memory.herding(h, data.y, m)
    state.exemplars = memory.update(state.exemplars, data[which], m)
    if t > 0 and len(state.exemplars) > 1:
        refit(learner, live, on_refit)
    if isinstance(state.net.head, RowsHead) and (scale := state.net.head.scale.item()) < 0:
        log.warning(
            "the scale of the head is %.3g after step %d, so that the least similar class wins: train for more epochs",
            scale,
            t,
        )
    alpha = state.extra.pop("alpha", None)
    state.alphas = [*state.alphas, None if alpha is None else alpha.item()]


def refit(learner: Learner, live: Live, on_epoch: Callable[[Epoch], None]) -> None:
    """Train the classifier, or all, once more on the memory alone, which is balanced, where the method asks for it.

    It takes seconds, has no checkpoint of its own, and is done again where it was cut off.
    """
    state, method = live.state, learner.method
    assert state.net is not None and state.exemplars is not None
    recipe, crop = learner.settings_for(image_shape(state.exemplars.x))
    asked = method.refitting(recipe.last)
    if asked is None:
        return
    step = step_on(learner, live, state.exemplars, None, state.exemplars)
    if not asked.taught:
        step.teacher = None
    classifier = state.net.head.refitted()
    for w in classifier if asked.what == "classifier" else state.net.parameters():
        w.requires_grad_(True)
    at = Position({name: torch.zeros_like(w) for name, w in trained(step).items()})
    plain = torch.autocast(learner.device_.type, enabled=False)
    with torch.enable_grad(), plain, working_on(learner.device_):
        fit(
            replace(method, mitigation="none"), step, asked.recipe, crop, learner.seed, learner.bf16_, at,
            on_epoch, engine=learner.engine_, stage="refit", moving=asked.statistics == "move",
            asked=learner.engine == learner.engine_ and step.t == 1,  # said once
        )  # fmt: skip
    state.net.eval().requires_grad_(False)
