"""Algorithm 1 of the paper: learning α, the importance of the old classes, by its effect one step ahead.

θ* is one SGD step from θ on a training batch; α then follows the gradient of the plain cross-entropy of a
balanced batch at θ*. α enters θ* through λ alone, and one SGD step depends on it through its gradient only, so
with v the gradient of the validation loss L_val at θ*

    dL_val(θ*)/dα = −η · ⟨∂/∂θ [∂L_train/∂α], v⟩.

∂L_train/∂α is a function of what the net returns, so its gradient by θ is one more ordinary backward pass of the
training batch, from u = ∂²L_train/∂α∂out instead of ∂L_train/∂out. That is exact, and nothing is ever differentiated
twice but the objective, which is small: the usual way, a backward pass through a backward pass, is hungry and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from ..losses import full_precision
from ..method import Method
from ..nets import Batch, Features, Net, Out
from ..step import Adapt, Learned, Objective, Recipe, Step
from .batches import Batches
from .sgd import Trained, Weights, look_ahead


@dataclass(frozen=True)
class Ahead:
    """What it takes to look one step ahead."""

    groups: list[Trained]
    momentum: Weights
    recipe: Recipe
    held: Batches
    """B_t"""
    bf16: bool
    features: Features | None
    """stands in for the net's own, at other weights"""

    @property
    def weights(self) -> Weights:
        """All that are trained."""
        return {name: w for group in self.groups for name, w in group.weights.items()}


def validation_gradient(
    net: Net,
    weights: Weights,
    x: Tensor,
    y: Tensor,
    bf16: bool = False,
    features: Features | None = None,
    scores: Callable[[Out], Tensor] = attrgetter("z"),
) -> list[Tensor]:
    """v: the gradient of the plain softmax cross-entropy of a balanced batch, at the given weights.

    It is that of the logits, or of other `scores` of what the net returns. It updates copies of the batch-norm
    statistics, so that the net's own are left alone.
    """
    at = {name: w.detach().requires_grad_() for name, w in weights.items()}
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        out = functional_call(net, {**at, **buffers}, (x, features))
    loss = F.cross_entropy(full_precision(scores(out)), y)
    return list(torch.autograd.grad(loss, list(at.values()), materialize_grads=True))


def influence(adapt: Adapt, method: Method, objective: Objective, s: Step, b: Batch, weights: Weights) -> list[Tensor]:
    """∂/∂θ [∂L_train/∂α] on the batch that gave `b.out`, whose graph is kept for whoever needs it next."""
    parts = [b.out.z, b.out.h, *b.out.maps, *b.out.extra.values()]
    leaves = [part.detach().requires_grad_() for part in parts]
    last = 2 + len(b.out.maps)
    copy = Out(leaves[0], leaves[1], leaves[2:last], dict(zip(b.out.extra, leaves[last:])))
    alpha = s.state[adapt.name].detach().requires_grad_()
    at_alpha = replace(s, state={**s.state, adapt.name: alpha})
    at_alpha = replace(at_alpha, lam=method.lam(at_alpha))
    loss = objective(at_alpha, b._replace(out=copy))
    (slope,) = torch.autograd.grad(loss, alpha, create_graph=True)
    u = torch.autograd.grad(slope, leaves, allow_unused=True)
    # The gradient of ⟨out, u⟩ is that from u. torch.autograd.grad takes u too, but then imports sympy, for a second.
    products = [(part * du).sum() for part, du in zip(parts, u) if du is not None and part.requires_grad]
    return list(torch.autograd.grad(products, list(weights.values()), retain_graph=True, materialize_grads=True))


def hyper_gradient(d_alpha: Weights, v: Weights, groups: list[Trained]) -> Tensor:
    """dL_val(θ*)/dα = −⟨∂/∂θ [∂L_train/∂α], η v⟩, where each group of weights has a learning rate η of its own."""
    total = []
    for group in groups:
        products = torch._foreach_mul([d_alpha[k] for k in group.weights], [v[k] for k in group.weights])
        total.append(-group.lr * torch.stack([product.sum() for product in products]).sum())
    return torch.stack(total).sum()


def update(adapt: Adapt, method: Method, objective: Objective, s: Step, b: Batch, grads: Weights, ahead: Ahead) -> None:
    """One update of α, and of λ, in place; `grads` are those of the objective on the batch at the present α."""
    weights, recipe = ahead.weights, ahead.recipe
    d_alpha = dict(zip(weights, influence(adapt, method, objective, s, b, weights)))
    if recipe.clamp:  # what is clamped does not depend on α
        d_alpha = {k: d.where(grads[k].abs() <= recipe.clamp, 0) for k, d in d_alpha.items()}
    with torch.no_grad():
        star = look_ahead(ahead.groups, grads, ahead.momentum, recipe)
    x, y = ahead.held.next_batch()
    scores: Callable[[Out], Tensor] = attrgetter("z")
    if method.overrides("views"):  # such as rotated copies, which `scores` combines
        x, scores = method.views(x), partial(method.scores, known=Learned(s.sizes, s.state))
    v = dict(zip(star, validation_gradient(s.net, star, x, y, ahead.bf16, ahead.features, scores)))
    with torch.no_grad():
        alpha = s.state[adapt.name]
        alpha.copy_((alpha - adapt.lr * hyper_gradient(d_alpha, v, ahead.groups)).clamp_min(adapt.least))
        s.lam.copy_(method.lam(s))
