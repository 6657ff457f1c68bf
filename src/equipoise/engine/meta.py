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

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from ..losses import full_precision
from ..method import Method, Out, Recipe, Step
from ..nets import Features, Net

SMALLEST = 1e-3
"""α stays at or above this; the paper asks for a positive number only"""

Weights = dict[str, Tensor]


def lookahead(weights: Weights, grads: Weights, momentum: Weights, lr: Tensor, recipe: Recipe) -> Weights:
    """θ*: where SGD with the recipe's momentum and weight decay would go from here."""
    w, g, b = ([group[name] for name in weights] for group in (weights, grads, momentum))
    if recipe.clamp:
        g = [one.clamp(-recipe.clamp, recipe.clamp) for one in g]
    move = torch._foreach_add(g, w, alpha=recipe.weight_decay)
    torch._foreach_add_(move, b, alpha=recipe.momentum)
    return dict(zip(weights, torch._foreach_sub(w, torch._foreach_mul(move, lr))))


def validation_gradient(
    net: Net, weights: Weights, x: Tensor, y: Tensor, bf16: bool = False, features: Features | None = None
) -> list[Tensor]:
    """v: the gradient of the plain softmax cross-entropy of a balanced batch, at the given weights.

    It moves copies of the batch-norm statistics, so that the net's own do not feel it.
    """
    at = {name: w.detach().requires_grad_() for name, w in weights.items()}
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        out = functional_call(net, {**at, **buffers}, (x, features))
    loss = F.cross_entropy(full_precision(out.z), y)
    return list(torch.autograd.grad(loss, list(at.values()), materialize_grads=True))


def influence(method: Method, s: Step, y: Tensor, out: Out, ref: Out | None, weights: Weights) -> list[Tensor]:
    """∂/∂θ [∂L_train/∂α] on the batch that gave `out`, whose graph is kept for whoever needs it next."""
    parts = [out.z, out.h, *out.maps, *out.extra.values()]
    leaves = [part.detach().requires_grad_() for part in parts]
    names, last = list(out.extra), 2 + len(out.maps)
    copy = Out(leaves[0], leaves[1], leaves[2:last], dict(zip(names, leaves[last:])))
    alpha = s.state["alpha"].detach().requires_grad_()
    loss = method.objective(replace(s, lam=method.loss.lam(s.n, s.past, alpha)), y, copy, ref)
    (slope,) = torch.autograd.grad(loss, alpha, create_graph=True)
    u = torch.autograd.grad(slope, leaves, allow_unused=True)
    felt = [(part, du) for part, du in zip(parts, u) if du is not None and part.requires_grad]
    through, by = [part for part, _ in felt], [du for _, du in felt]
    given = torch.autograd.grad(through, list(weights.values()), by, retain_graph=True, materialize_grads=True)
    return list(given)


def hyper_gradient(d_alpha: list[Tensor], v: list[Tensor], lr: Tensor) -> Tensor:
    """dL_val(θ*)/dα = −η ⟨∂/∂θ [∂L_train/∂α], v⟩."""
    products = torch._foreach_mul(d_alpha, v)
    return -lr * torch.stack([product.sum() for product in products]).sum()


def update_alpha(
    method: Method,
    s: Step,
    batch: tuple[Tensor, Out, Out | None],
    balanced: tuple[Tensor, Tensor],
    weights: Weights,
    grads: Weights,
    momentum: Weights,
    lr: Tensor,
    recipe: Recipe,
    alpha_lr: float,
    bf16: bool = False,
    features: Features | None = None,
) -> None:
    """One update of α (and of λ) in place; `grads` are those of the objective on `batch` at the present α.

    `batch` is its labels, and what the net and the previous net said to it; `balanced` is images and labels.
    """
    d_alpha = influence(method, s, *batch, weights)
    if recipe.clamp:  # what is clamped does not feel α
        d_alpha = [d.where(g.abs() <= recipe.clamp, 0) for d, g in zip(d_alpha, grads.values())]
    with torch.no_grad():
        star = lookahead(weights, grads, momentum, lr, recipe)
    v = validation_gradient(s.net, star, *balanced, bf16, features)
    with torch.no_grad():
        alpha = s.state["alpha"]
        alpha.copy_((alpha - alpha_lr * hyper_gradient(d_alpha, v, lr)).clamp_min(SMALLEST))
        s.lam.copy_(method.loss.lam(s.n, s.past, alpha))
