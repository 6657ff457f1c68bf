"""SGD with momentum over groups of weights, in place, with few kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ..errors import UsageError
from ..step import Recipe, Stage, Step

Weights = dict[str, Tensor]


@dataclass
class Trained:
    """The weights of a group, with learning rate (on the device) and L2 penalty."""

    weights: Weights
    factor: float
    decay: float
    lr: Tensor


def select_weights(s: Step, stage: Stage) -> list[Trained]:
    """The weights that a stage trains, by group. Freezes all others."""
    never = {f"backbone.{name}" for name in s.net.backbone.frozen}
    named = dict(s.net.named_parameters()) | {f"state.{name}": value for name, value in s.state.items()}
    default = stage.recipe.weight_decay
    rates = [torch.zeros((), device=s.n.device) for _ in stage.groups]
    groups = [Trained({}, g.lr, default if g.decay is None else g.decay, lr) for g, lr in zip(stage.groups, rates)]
    for name, w in named.items():
        groups_of = (k for k, g in enumerate(stage.groups) if any(fnmatchcase(name, p) for p in g.names))
        of = None if name in never else next(groups_of, None)
        w.requires_grad_(of is not None)
        if of is not None:
            groups[of].weights[name] = w
    check_groups(stage, named)
    return groups


def check_groups(stage: Stage, names: Iterable[str], state: bool = True) -> None:
    """Refuse groups whose patterns match no weight; `state=False` ignores patterns of the step's state."""
    names = list(names)
    for group in stage.groups:
        patterns = [p for p in group.names if state or not p.startswith("state.")]
        if patterns and not any(fnmatchcase(name, p) for name in names for p in patterns):
            raise UsageError(f"stage {stage.name} trains {', '.join(group.names)}, which match no weight")


def sgd_(groups: Iterable[Trained], grads: Weights, momentum: Weights, recipe: Recipe) -> None:
    """One step, in place: b ← μ b + (g + wd θ), θ ← θ − lr b."""
    with torch.no_grad():
        for group in groups:
            w, g, b = ([part[k] for k in group.weights] for part in (group.weights, grads, momentum))
            if group.lr.is_cuda:  # one pass over memory
                torch._fused_sgd_(
                    w, g, b if recipe.momentum else [], weight_decay=group.decay, momentum=recipe.momentum, lr=group.lr,
                    dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
                )  # fmt: skip
                continue
            torch._foreach_mul_(b, recipe.momentum)
            torch._foreach_add_(b, torch._foreach_add(g, w, alpha=group.decay))
            torch._foreach_sub_(w, torch._foreach_mul(b, group.lr))


def look_ahead(groups: Iterable[Trained], grads: Weights, momentum: Weights, recipe: Recipe) -> Weights:
    """θ*: the weights after that step."""
    ahead: Weights = {}
    for group in groups:
        w, g, b = ([part[k] for k in group.weights] for part in (group.weights, grads, momentum))
        if recipe.clamp:
            g = [one.clamp(-recipe.clamp, recipe.clamp) for one in g]
        step = torch._foreach_add(g, w, alpha=group.decay)
        torch._foreach_add_(step, b, alpha=recipe.momentum)
        ahead |= zip(group.weights, torch._foreach_sub(w, torch._foreach_mul(step, group.lr)))
    return ahead


def compute_gradient(loss: Tensor, weights: Weights, again: bool = False) -> Weights:
    """The gradient of the loss by weight; `again` retains the graph."""
    grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=again, materialize_grads=True)
    return dict(zip(weights, grads))
