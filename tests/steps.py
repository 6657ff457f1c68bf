"""Steps as a learner would make them, of a few images, for tests of what methods and the training loop do with them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from equipoise import Crop, Method, Recipe, Remedy, Stage, Standard, Step
from equipoise.data.images import Images
from equipoise.engine.predict import compute_features
from equipoise.engine.train import Callbacks, Conditions, Epoch, Position, fit
from equipoise.nets import Net

NOTHING = Images(torch.empty(0, 1, 8, 8, dtype=torch.uint8), torch.empty(0, dtype=torch.long))
PLAIN = Crop(pad=0, flip=False)


def make_step(
    sizes: Sequence[int],
    images: Images = NOTHING,
    remedy: Remedy = Standard(),  # noqa: B008
    *,
    n: Any = None,
    lam: Any = None,
    held: Tensor | None = None,
    net: Net | None = None,
    teacher: Net | None = None,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **plan: Any,
) -> Step:
    """The step that brings the last of `sizes`: images of the classes before are the memory, and all but `held` are
    trained on. Counts and λ follow from the images and the remedy, unless they are given."""
    N, n_old, device, none = sum(sizes), sum(sizes[:-1]), images.y.device, images.y[:0]
    everything = torch.arange(len(images), device=device)
    held = none if held is None else held
    where = everything[~torch.isin(everything, held)]
    memory = everything[images.y < n_old]
    memory = memory[torch.argsort(images.y[memory], stable=True)]
    counts = torch.bincount(images.y[where], minlength=N) if n is None else torch.as_tensor(n, device=device)
    counts = counts.to(dtype)
    channels, height, width = images.x.shape[1:]
    s = Step(
        t=len(sizes) - 1, sizes=tuple(sizes), shape=(channels, height, width),
        **{"counts": tuple(int(k) for k in counts.tolist()), **plan},
        n=counts, lam=torch.ones_like(counts), images=images, data=everything[images.y >= n_old], memory=memory,
        held=held, where=where, net=net, teacher=teacher, state=state or {}, embed=partial(embed, images),
    )  # fmt: skip
    return replace(s, lam=remedy.lam(s.n, s.past, s).clone() if lam is None else torch.as_tensor(lam))


def embed(images: Images, net: Net, where: Tensor, view: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    return compute_features(net, images.x, where, view)


def train(
    method: Method,
    s: Step,
    recipe: Recipe,
    crop: Crop = PLAIN,
    seed: int = 0,
    at: Position | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    *,
    bf16: bool = False,
    engine: Any = "eager",
    **stage: Any,
) -> list[Epoch]:
    """Train a stage to its end; what was said of each epoch."""
    told: list[Epoch] = []

    def tell(epoch: Epoch) -> None:
        told.append(epoch)
        if on_epoch is not None:
            on_epoch(epoch)

    made: Any = Stage(**{"name": "train", "recipe": recipe, "groups": method.trained, **stage})
    fit(method, s, made, at or Position(), Conditions(seed, crop, bf16, engine), Callbacks(tell))
    return told


class Trained(NamedTuple):
    """A training, as a learner began it."""

    t: int
    stage: Stage
    s: Step
    net: Any
    """a copy, as it was before"""
    at: Position
    """a copy, likewise"""
    method: Method
    """with the remedy in force"""


def note_trainings(patch: pytest.MonkeyPatch) -> list[Trained]:
    """Where each training of any learner is noted from now on."""
    found, module = [], importlib.import_module("equipoise.learner")
    fit = module.fit

    def spy(method: Method, s: Step, stage: Stage, at: Position, *rest: Any) -> Any:
        found.append(Trained(s.t, stage, s, copy.deepcopy(s.net), copy.deepcopy(at), method))
        return fit(method, s, stage, at, *rest)

    patch.setattr(module, "fit", spy)
    return found
