"""Algorithm 1 of the paper: learning α, the importance of the old classes, by its effect one step ahead.

θ* is one SGD step from θ on a training batch; α then follows the gradient of the plain cross-entropy of a
balanced batch at θ*. α enters θ* through λ alone, and one SGD step depends on it through its gradient only, so
with v the gradient of the validation loss L_val at θ*

    dL_val(θ*)/dα = −η · d/dθ [∂L_train/∂α (θ)] · v,

one forward-mode derivative of a scalar's gradient: exact, and without the graph of a backward pass through a
backward pass, which is what makes the usual way hungry for memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F

from .losses import full_precision
from .method import Method, Out, Recipe, Step
from .nets import Net

SMALLEST = 1e-3
"""α stays at or above this; the paper asks for a positive number only"""

Weights = dict[str, Tensor]


def call(net: Net, weights: Weights, x: Tensor) -> Out:
    """The net at other weights. It moves copies of the batch-norm statistics, so that the net's own do not feel it."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    out = functional_call(net, {**weights, **buffers}, (x,))
    assert isinstance(out, Out)
    return out


def lookahead(weights: Weights, grads: Weights, momentum: Weights, lr: Tensor, recipe: Recipe) -> Weights:
    """θ*: where SGD with the recipe's momentum and weight decay would go from here."""
    return {
        name: w - lr * (recipe.momentum * momentum[name] + grads[name] + recipe.weight_decay * w)
        for name, w in weights.items()
    }


def validation_gradient(net: Net, weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """v: the gradient of the plain softmax cross-entropy of a balanced batch, at the given weights."""
    v: Weights = grad(lambda w: F.cross_entropy(full_precision(call(net, w, x).z), y))(weights)
    return v


def hyper_gradient(
    method: Method, s: Step, x: Tensor, y: Tensor, ref: Out | None, weights: Weights, v: Weights, lr: Tensor
) -> Tensor:
    """dL_val(θ*)/dα, for the method's whole objective L_train on the batch (x, y)."""

    def d_alpha(w: Weights) -> Tensor:
        out = call(s.net, w, x)

        def objective(alpha: Tensor) -> Tensor:
            return method.objective(replace(s, lam=method.loss.lam(s.n, s.past, alpha)), y, out, ref)

        slope: Tensor = grad(objective)(s.state["alpha"])
        return slope

    change: Tensor = jvp(d_alpha, (weights,), (v,))[1]
    return -lr * change


def update_alpha(
    method: Method,
    s: Step,
    batch: tuple[Tensor, Tensor, Out | None],
    balanced: tuple[Tensor, Tensor],
    grads: Weights,
    momentum: Weights,
    lr: Tensor,
    recipe: Recipe,
    alpha_lr: float,
) -> None:
    """One update of α (and of λ) in place; `grads` are those of the objective on `batch` at the present α."""
    weights = {name: w.detach() for name, w in s.net.named_parameters() if name in grads}
    with torch.no_grad():
        star = lookahead(weights, grads, momentum, lr, recipe)
    v = validation_gradient(s.net, star, *balanced)
    slope = hyper_gradient(method, s, *batch, weights, v, lr)
    with torch.no_grad():
        alpha = s.state["alpha"]
        alpha.copy_((alpha - alpha_lr * slope).clamp_min(SMALLEST))
        s.lam.copy_(method.loss.lam(s.n, s.past, alpha))
