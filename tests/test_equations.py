"""Equations: every loss against the paper's formula, written out in float64 with sums, and its gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from steps import make_step
from torch import Tensor
from torch.nn import functional as F

from equipoise import (
    Balanced,
    BalancedFinetuning,
    Batch,
    EquipoiseError,
    Finetune,
    ILBaseline,
    MemoryOversampling,
    Meta,
    Method,
    Out,
    Plan,
    Recipe,
    Relaxed,
    Remedy,
    SeparatedSoftmax,
    Standard,
    Step,
    UsageError,
)
from equipoise.data.images import Images
from equipoise.data.memory import EVERYTHING
from equipoise.losses import distillation, log_weights, weighted_cross_entropy

NAN, INF = math.nan, math.inf
Numbers = list[float]
Rows = list[Numbers]

# Two old classes with few images, three new ones with many, none equal to another.
N = [18.0, 20.0, 498.0, 500.0, 137.0]
PAST = [True, True, False, False, False]


# The formulas, with plain numbers -----------------------------------------------------------------------------


def q_of(z: Numbers, lam: Numbers) -> Numbers:
    """Eqs. 3, 5 and 6: q_k = λ_k e^{z_k} / Σ_j λ_j e^{z_j}."""
    total = math.fsum(w * math.exp(v) for w, v in zip(lam, z))
    return [w * math.exp(v) / total for w, v in zip(lam, z)]


def balanced_loss(z: Rows, y: list[int], lam: Numbers) -> float:
    """Eq. 4, mean over the batch."""
    return math.fsum(-math.log(q_of(row, lam)[label]) for row, label in zip(z, y)) / len(z)


def balanced_gradient(z: Rows, y: list[int], lam: Numbers) -> Rows:
    """d/dz_k of eq. 4: q_k − δ_{k=y}, over the size of the batch."""
    return [[(q - (k == label)) / len(z) for k, q in enumerate(q_of(row, lam))] for row, label in zip(z, y)]


def p_of(z: Numbers, old: int, T: float) -> Numbers:
    """The p of eq. 2: a softmax at temperature T over the first `old` logits."""
    total = math.fsum(math.exp(v / T) for v in z[:old])
    return [math.exp(v / T) / total for v in z[:old]]


def distillation_loss(z: Rows, z_old: Rows, T: float) -> float:
    """Eq. 2, mean over the batch."""
    old = len(z_old[0])
    terms = [
        -p_hat * math.log(p) * T**2
        for row, row_old in zip(z, z_old)
        for p_hat, p in zip(p_of(row_old, old, T), p_of(row, old, T))
    ]
    return math.fsum(terms) / len(z)


# Inputs -------------------------------------------------------------------------------------------------------


def logits(rows: int, classes: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def labels(rows: int, classes: list[int]) -> Tensor:
    return torch.tensor([classes[i % len(classes)] for i in range(rows)])


def step(lam: Tensor, n: Sequence[float] | Tensor, n_old: int) -> Step:
    """Without a net, at which an objective must not look."""
    return make_step((n_old, len(n) - n_old) if n_old else (len(n),), n=n, lam=lam)


def lam_of(remedy: Remedy, n: Numbers, past: list[bool], dtype: torch.dtype = torch.float64, **state: Any) -> Tensor:
    old = sum(past)
    assert past == [True] * old + [False] * (len(past) - old), "old classes come first"
    sizes = (old, len(past) - old) if old else (len(past),)
    s = make_step(sizes, n=torch.tensor(n, dtype=dtype), dtype=dtype, state=state)
    assert s.past.tolist() == past
    return remedy.lam(s.n, s.past, s)


def loss_of(remedy: Remedy, z: Tensor, y: Tensor, s: Step) -> Tensor:
    """The classification loss of a method whose own is cross-entropy."""
    return ILBaseline(remedy).classify(z, y, s)


def value_and_gradient(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = f(z)
    (gradient,) = torch.autograd.grad(value, z)
    return value.detach(), gradient


def finite_differences(f: Callable[[Tensor], Tensor], z: Tensor, h: float = 1e-5) -> Tensor:
    gradient = torch.zeros_like(z)
    for i in range(z.numel()):
        move = torch.zeros_like(z).view(-1)
        move[i] = h
        move = move.view(z.shape)
        gradient.view(-1)[i] = (f(z + move) - f(z - move)) / (2 * h)
    return gradient


def out(z: Tensor) -> Out:
    return Out(z, z.new_zeros(len(z), 1), [], {})


# λ, the table of the module -----------------------------------------------------------------------------------

CASES: list[tuple[Remedy, dict[str, Any], Numbers]] = [
    (Standard(), {}, [1, 1, 1, 1, 1]),
    (Balanced(), {}, [18, 20, 498, 500, 137]),
    (Balanced(0.25), {}, [4.5, 5, 498, 500, 137]),
    (Balanced(3.0), {}, [54, 60, 498, 500, 137]),
    (Relaxed(0.7), {}, [0.7, 0.7, 498, 500, 137]),
    (Relaxed("0.2%"), {}, [1, 1, 498, 500, 137]),
    (Relaxed("100%"), {}, [500, 500, 498, 500, 137]),
    (Meta(), {}, [18, 20, 498, 500, 137]),
    (Meta(), {"alpha": torch.tensor(0.4, dtype=torch.float64)}, [7.2, 8, 498, 500, 137]),
]
NAMES = ["standard", "balanced", "balanced-quarter", "balanced-3", "relaxed-count", "relaxed", "relaxed-all", "meta"]
each_remedy = pytest.mark.parametrize(("remedy", "state", "lam"), CASES, ids=[*NAMES, "meta-learned"])


@each_remedy
def test_lambda_is_that_of_the_paper(remedy: Remedy, state: dict[str, Any], lam: Numbers) -> None:
    torch.testing.assert_close(
        lam_of(remedy, N, PAST, **state), torch.tensor(lam, dtype=torch.float64), rtol=1e-15, atol=0
    )


@each_remedy
def test_loss_and_gradient_are_those_of_the_paper(remedy: Remedy, state: dict[str, Any], lam: Numbers) -> None:
    z, y = logits(9, 5), labels(9, [0, 1, 2, 3, 4])
    s = step(lam_of(remedy, N, PAST, **state), N, 2)
    value, gradient = value_and_gradient(lambda z: loss_of(remedy, z, y, s), z)
    assert value.item() == pytest.approx(balanced_loss(z.tolist(), y.tolist(), lam), rel=1e-13)
    expected = torch.tensor(balanced_gradient(z.tolist(), y.tolist(), lam), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_a_smaller_alpha_protects_the_old_classes() -> None:
    """On an image of a new class, the push against the old logits shrinks with α: a wrong sign of log λ turns it."""
    z, y = logits(6, 5), torch.tensor([2, 3, 4, 2, 3, 4])
    push = []
    for alpha in (1.0, 0.5, 0.25, 0.1):
        lam = lam_of(Balanced(alpha), N, PAST)
        push.append(value_and_gradient(lambda z, lam=lam: weighted_cross_entropy(z, y, lam), z)[1][:, :2].sum().item())
    assert push == sorted(push, reverse=True) and push[-1] > 0


@pytest.mark.parametrize("factor", [1e-6, 0.37, 1.0, 5e4])
def test_only_ratios_of_lambda_count(factor: float) -> None:
    z, y, lam = logits(7, 5), labels(7, [0, 1, 2, 3, 4]), torch.tensor(N, dtype=torch.float64)
    f = [value_and_gradient(lambda z, k=k: weighted_cross_entropy(z, y, k * lam), z) for k in (1.0, factor)]
    torch.testing.assert_close(f[0], f[1], rtol=1e-12, atol=1e-15)


# Limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1.0, 3.0, 18.0, 500.0, 1300.0, 0.1])
def test_equal_counts_give_an_offset_of_exactly_zero(count: float, dtype: torch.dtype) -> None:
    n = [count] * 7
    for remedy in (Balanced(), Meta(), Relaxed("100%"), Standard()):
        lam = lam_of(remedy, n, [True] * 3 + [False] * 4, dtype)
        assert torch.equal(log_weights(lam), torch.zeros(7, dtype=dtype)), remedy


def test_equal_counts_give_the_standard_loss_bit_for_bit() -> None:
    z, y, n = logits(64, 7).float(), labels(64, list(range(7))), [498.0] * 7
    plain = value_and_gradient(lambda z: F.cross_entropy(z, y), z)
    for remedy in (Balanced(1.0), Standard(), Meta()):
        s = step(lam_of(remedy, n, [True] * 3 + [False] * 4, torch.float32), n, 3)
        value, gradient = value_and_gradient(lambda z, remedy=remedy, s=s: loss_of(remedy, z, y, s), z)
        assert torch.equal(value, plain[0]) and torch.equal(gradient, plain[1]), remedy


def test_the_plain_softmax_is_not_what_unequal_counts_give() -> None:
    z, y = logits(64, 5), labels(64, [0, 1, 2, 3, 4])
    s = step(lam_of(Balanced(), N, PAST), N, 2)
    assert abs(loss_of(Balanced(), z, y, s).item() - F.cross_entropy(z, y).item()) > 0.1


WITHOUT_MEMORY: list[tuple[Remedy, Numbers]] = [
    (Balanced(), [0, 0, 500, 500, 500]),
    (Balanced(0.1), [0, 0, 500, 500, 500]),
    (Relaxed(0), [0, 0, 500, 500, 500]),
    (Relaxed("0%"), [0, 0, 500, 500, 500]),
    (Relaxed(0), [20, 20, 500, 500, 500]),
]


@pytest.mark.parametrize(("remedy", "n"), WITHOUT_MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_memory_it_is_the_cross_entropy_of_the_new_classes(
    remedy: Remedy, n: Numbers, dtype: torch.dtype
) -> None:
    """The paper's statement about eq. 3 without memory, and about eq. 6 with ε = 0."""
    z, y = logits(16, 5).to(dtype), labels(16, [2, 3, 4])
    s = step(lam_of(remedy, n, PAST, torch.float32), n, 2)
    value, gradient = value_and_gradient(lambda z: loss_of(remedy, z, y, s), z)
    assert value.item() == pytest.approx(
        balanced_loss(z[:, 2:].tolist(), (y - 2).tolist(), [1.0] * 3), rel=1e-6 if dtype != torch.float64 else 1e-13
    )
    restricted = value_and_gradient(lambda z: F.cross_entropy(z.to(value.dtype), y - 2), z[:, 2:])
    torch.testing.assert_close(value, restricted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient[:, 2:], restricted[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7
    )
    assert gradient.isfinite().all()
    assert (gradient[:, :2] == 0).all(), "a class that is left out must feel nothing at all"


def test_relaxed_zero_is_balanced_without_memory_also_for_unequal_new_classes() -> None:
    z, y, n = logits(16, 5), labels(16, [2, 3, 4]), [0.0, 0.0, 498.0, 500.0, 137.0]
    values = [
        value_and_gradient(lambda z, r=remedy: loss_of(r, z, y, step(lam_of(r, n, PAST), n, 2)), z)
        for remedy in (Balanced(), Relaxed(0))
    ]
    assert torch.equal(values[0][0], values[1][0]) and torch.equal(values[0][1], values[1][1])
    assert values[0][0].item() == pytest.approx(balanced_loss(z[:, 2:].tolist(), (y - 2).tolist(), n[2:]), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remedy", [Balanced(), Relaxed(0), Relaxed("0.2%"), Standard()])
def test_extreme_logits_stay_finite(remedy: Remedy, dtype: torch.dtype) -> None:
    n = [0.0, 0.0, 500.0, 500.0, 500.0]
    z = torch.tensor(
        [[1e4, -1e4, 1e4, -1e4, 0.0], [-1e4, 1e4, 0.0, 1e4, -1e4], [1e4, 1e4, -1e4, -1e4, -1e4]], dtype=dtype
    )
    y = torch.tensor([3, 3, 2])
    s = step(lam_of(remedy, n, PAST, torch.float32), n, 2)
    value, gradient = value_and_gradient(lambda z: loss_of(remedy, z, y, s), z)
    assert value.isfinite() and gradient.isfinite().all()
    if remedy in (Balanced(), Relaxed(0)):
        # Row 1: −log q_3 = 2e4 against class 2. Row 2: q_3 = 1. Row 3: three equal classes.
        big = 2 * float(torch.tensor(1e4, dtype=dtype))
        assert value.item() == pytest.approx((big + 0.0 + math.log(3)) / 3, rel=1e-6)
        assert (gradient[:, :2] == 0).all()
        expected = torch.tensor([[1, -1, 0], [0, 0, 0], [1 / 3 - 1, 1 / 3, 1 / 3]]) / 3
        torch.testing.assert_close(
            gradient[:, 2:].float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
        )


def test_an_image_of_a_class_that_is_left_out_has_an_infinite_loss() -> None:
    lam = torch.tensor([0.0, 1.0, 1.0])
    assert weighted_cross_entropy(torch.zeros(1, 3), torch.tensor([0]), lam).item() == INF


def test_log_weights_is_differentiable_where_a_weight_is_zero() -> None:
    """α times n_old = 0: the gradient by α is 0 and not NaN."""
    alpha = torch.tensor(0.5, requires_grad=True)
    z = torch.tensor([[0.3, -0.2, 0.5]])
    lam = lam_of(Meta(), [0.0, 20.0, 500.0], [True, True, False], torch.float32, alpha=alpha)
    loss = weighted_cross_entropy(z, torch.tensor([2]), lam)
    (slope,) = torch.autograd.grad(loss, alpha)
    # d/dα log(α 20 e^{z_1} + 500 e^{z_2}) = 20 e^{z_1} / (...)
    top = 20 * math.exp(-0.2)
    assert slope.item() == pytest.approx(top / (0.5 * top + 500 * math.exp(0.5)), rel=1e-5)


# Relaxed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.0, 1.0, 20.0, 5000.0])
@pytest.mark.parametrize(
    ("epsilon", "new", "value"),
    [
        ("0.2%", [500.0, 500.0], 1.0),
        ("0.2%", [1300.0, 732.0], 2.6),
        ("0.2%", [732.0, 1300.0], 2.6),
        ("1%", [500.0, 20.0], 5.0),
        (" 10 % ", [500.0, 20.0], 50.0),
        ("100%", [500.0, 20.0], 500.0),
        ("2.5", [500.0, 20.0], 2.5),
        (2.5, [500.0, 20.0], 2.5),
        (1, [500.0, 20.0], 1.0),
        (0, [500.0, 20.0], 0.0),
    ],
)
def test_epsilon_is_a_count_or_a_percentage_of_the_largest_new_class(
    epsilon: float | str, new: Numbers, value: float, memory: float
) -> None:
    """λ_old = ε as printed in eq. 6: the images of old classes do not enter, however many there are."""
    lam = lam_of(Relaxed(epsilon), [memory, memory / 2, *new], [True, True, False, False])
    torch.testing.assert_close(lam, torch.tensor([value, value, *new], dtype=torch.float64), rtol=1e-14, atol=0)
    single = lam_of(Relaxed(epsilon), [memory, memory / 2, *new], [True, True, False, False], torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, torch.tensor([value, value, *new]), rtol=1e-6, atol=0)


def test_relaxed_in_the_base_step_is_balanced() -> None:
    n = [3.0, 5.0, 7.0]
    assert torch.equal(lam_of(Relaxed(), n, [False] * 3), torch.tensor(n, dtype=torch.float64))


def test_one_percent_lets_old_classes_be_pushed_more_than_less() -> None:
    z, y, n = logits(6, 5), torch.tensor([2, 3, 4, 2, 3, 4]), [0.0, 0.0, 500.0, 500.0, 500.0]
    push = []
    for epsilon in ("0%", "0.2%", "1%", "100%"):
        lam = lam_of(Relaxed(epsilon), n, PAST)
        push.append(value_and_gradient(lambda z, lam=lam: weighted_cross_entropy(z, y, lam), z)[1][:, :2].sum().item())
    assert push[0] == 0 and push == sorted(push) and push[1] > 0


# Precision ----------------------------------------------------------------------------------------------------


def test_losses_of_bf16_logits_are_computed_in_fp32() -> None:
    n = [18.0, 20.0] + [500.0] * 98
    z, y = logits(64, 100, spread=4.0).bfloat16(), labels(64, list(range(100)))
    z_old = logits(64, 50, seed=1, spread=4.0).bfloat16()
    lam = torch.tensor(n)
    value = weighted_cross_entropy(z, y, lam)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(balanced_loss(z.tolist(), y.tolist(), n), rel=1e-6)
    distilled = distillation(z, z_old, 2.0)
    assert distilled.dtype == torch.float32
    assert distilled.item() == pytest.approx(distillation_loss(z.tolist(), z_old.tolist(), 2.0), rel=1e-6)
    s = step(lam, lam, 50)
    whole = ILBaseline(Balanced()).objective(s, Batch(y, out(z), out(z_old)))
    assert whole.dtype == torch.float32
    assert whole.item() == pytest.approx(0.5 * distilled.item() + 0.5 * value.item(), rel=1e-6)


def test_float64_stays_float64() -> None:
    z, y = logits(4, 5), labels(4, [0, 1, 2, 3, 4])
    assert weighted_cross_entropy(z, y, torch.tensor(N)).dtype == torch.float64
    assert distillation(z, z[:, :2], 2.0).dtype == torch.float64


# Distillation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [0.5, 1.0, 2.0, 4.0])
def test_distillation_is_that_of_the_paper(T: float) -> None:
    z, z_old = logits(8, 5), logits(8, 3, seed=1)
    value, gradient = value_and_gradient(lambda z: distillation(z, z_old, T), z)
    assert value.item() == pytest.approx(distillation_loss(z.tolist(), z_old.tolist(), T), rel=1e-13)
    # d/dz_k of eq. 2 is T (p_k − p̂_k): T² from the factor, 1/T from the logits. New logits are no part of it.
    expected = torch.zeros(8, 5, dtype=torch.float64)
    for i in range(8):
        p, p_hat = p_of(z[i].tolist(), 3, T), p_of(z_old[i].tolist(), 3, T)
        for k in range(3):
            expected[i, k] = T * (p[k] - p_hat[k]) / 8
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    assert (gradient[:, 3:] == 0).all()


def test_distillation_does_not_see_the_new_logits() -> None:
    z, z_old = logits(8, 5), logits(8, 3, seed=1)
    changed = z.clone()
    changed[:, 3:] += 50
    assert torch.equal(distillation(z, z_old, 2.0), distillation(changed, z_old, 2.0))


def test_distillation_is_smallest_where_the_nets_agree() -> None:
    z_old = logits(8, 3)
    _, gradient = value_and_gradient(lambda z: distillation(z, z_old, 2.0), z_old)
    assert gradient.abs().max() < 1e-15
    assert distillation(z_old, z_old, 2.0) < distillation(z_old + logits(8, 3, seed=2), z_old, 2.0)


# IL-Baseline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_old", "classes"), [(2, 5), (4, 5), (1, 5), (50, 60)])
@pytest.mark.parametrize("remedy", [Standard(), Balanced(0.5), Relaxed("0.2%"), Meta()], ids=lambda r: r.name)
def test_il_baseline_is_eq_1(remedy: Remedy, n_old: int, classes: int) -> None:
    z, z_old, T = logits(6, classes), logits(6, n_old, seed=1), 2.0
    y = labels(6, list(range(classes)))
    n = [20.0] * n_old + [500.0] * (classes - n_old)
    lam = lam_of(remedy, n, [k < n_old for k in range(classes)])
    s = step(lam, n, n_old)
    method = ILBaseline(remedy, T=T)
    assert method.T == T

    def f(z: Tensor) -> Tensor:
        return method.objective(s, Batch(y, out(z), out(z_old)))

    value, gradient = value_and_gradient(f, z)
    rho = n_old / classes
    expected = rho * distillation_loss(z.tolist(), z_old.tolist(), T) + (1 - rho) * balanced_loss(
        z.tolist(), y.tolist(), lam.tolist()
    )
    assert value.item() == pytest.approx(expected, rel=1e-13)
    torch.testing.assert_close(gradient, finite_differences(f, z), rtol=1e-7, atol=2e-9)


def test_il_baseline_uses_its_own_temperature() -> None:
    z, z_old, y = logits(6, 5), logits(6, 2, seed=1), labels(6, [2, 3, 4])
    s = step(torch.ones(5, dtype=torch.float64), N, 2)
    for T in (1.0, 2.0, 5.0):
        whole = ILBaseline(T=T).objective(s, Batch(y, out(z), out(z_old))).item()
        expected = 0.4 * distillation_loss(z.tolist(), z_old.tolist(), T) + 0.6 * balanced_loss(
            z.tolist(), y.tolist(), [1.0] * 5
        )
        assert whole == pytest.approx(expected, rel=1e-13)
    assert ILBaseline().T == 2.0


@pytest.mark.parametrize("sizes", [(2, 3, 1, 4), (6, 4)], ids=str)
def test_il_baseline_distils_step_by_step_or_with_whole_weights(sizes: tuple[int, ...]) -> None:
    """As in SS-IL: the old classes of each step have a softmax of their own, and neither loss is weighed down."""
    z, z_old, T, ends = logits(6, 10), logits(6, 6, seed=1), 2.0, list(itertools.accumulate(sizes[:-1]))
    n_old, y = ends[-1], labels(6, list(range(10)))
    s = make_step(sizes, n=torch.ones(10), lam=torch.ones(10, dtype=torch.float64))
    z_old = z_old[:, :n_old]
    Lc = balanced_loss(z.tolist(), y.tolist(), [1.0] * 10)

    def part(rows: Tensor, first: int, last: int) -> Rows:
        return rows[:, first:last].tolist()

    together = distillation_loss(part(z, 0, n_old), z_old.tolist(), T)
    apart = math.fsum(distillation_loss(part(z, a, b), part(z_old, a, b), T) for a, b in zip([0, *ends], ends))
    assert len(ends) == 1 or abs(apart - together) > 0.1
    rho = n_old / 10
    for weights, distil, expected in (
        ("rho", "together", rho * together + (1 - rho) * Lc),
        ("rho", "by-step", rho * apart + (1 - rho) * Lc),
        ("ones", "together", together + Lc),
        ("ones", "by-step", apart + Lc),
    ):
        method = ILBaseline(weights=weights, distil=distil)  # type: ignore[arg-type]

        def f(z: Tensor, method: ILBaseline = method) -> Tensor:
            return method.objective(s, Batch(y, out(z), out(z_old)))

        value, gradient = value_and_gradient(f, z)
        assert value.item() == pytest.approx(expected, rel=1e-13)
        torch.testing.assert_close(gradient, finite_differences(f, z), rtol=1e-7, atol=2e-9)


@pytest.mark.parametrize("setting", [{"weights": "one"}, {"distil": "step"}], ids=str)
def test_settings_of_il_baseline_that_are_not_known_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))} must be '.*' or '.*', not"):
        ILBaseline(**setting)


@pytest.mark.parametrize("remedy", [Standard(), Balanced(0.25), Relaxed(), Meta()], ids=lambda r: r.name)
def test_the_base_step_is_the_classification_loss_alone(remedy: Remedy) -> None:
    z, y, n = logits(6, 5), labels(6, [0, 1, 2, 3, 4]), [3.0, 5.0, 7.0, 11.0, 13.0]
    lam = lam_of(remedy, n, [False] * 5)
    s = step(lam, n, 0)
    value = ILBaseline(remedy).objective(s, Batch(y, out(z)))
    assert value.item() == pytest.approx(balanced_loss(z.tolist(), y.tolist(), lam.tolist()), rel=1e-13)
    # α and ε are about old classes, and there are none.
    assert lam.tolist() == ([1.0] * 5 if remedy == Standard() else n)


def test_the_objective_follows_the_lambda_of_the_step() -> None:
    """Meta differentiates through s.lam: an objective that kept an older λ would not learn α."""
    z, y = logits(6, 5), labels(6, [0, 1, 2, 3, 4])
    values = {
        ILBaseline(Meta()).objective(step(torch.tensor(lam), N, 2), Batch(y, out(z))).item()
        for lam in ([1.0, 1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 5.0, 5.0, 5.0], [3.0, 3.0, 5.0, 5.0, 5.0])
    }
    assert len(values) == 3


# Settings out of range ----------------------------------------------------------------------------------------

BAD: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((Balanced, {"alpha": v}) for v in (0, 0.0, -1, -1e-9, NAN, INF, -INF)),
    *((Relaxed, {"epsilon": v}) for v in (-1, -1e-9, NAN, INF, -INF, "-1", "-1%", "nan", "inf", "nan%", "inf%")),
    *((Relaxed, {"epsilon": v}) for v in ("", "%", "abc", "1 2", "5%%", "%5", "2/3", None)),
    *((Meta, {"alpha_lr": v}) for v in (-1, -1e-9, NAN, INF, -INF)),
    *((Meta, {"every": v}) for v in (0, -1, NAN, INF)),
    *((Meta, {"hold_out": v}) for v in (0, 1, -0.1, 1.5, NAN, INF)),
    *((kind, {"share": v}) for kind in (MemoryOversampling, SeparatedSoftmax) for v in (0.0, 1.0, -0.5, NAN)),
    (SeparatedSoftmax, {"mean": "both"}),
    (BalancedFinetuning, {"finetune": Finetune(epochs=0)}),
    *((Finetune, {"epochs": v}) for v in (-1, 1.5, NAN)),
    *((Finetune, {"lr": v}) for v in (0.0, -1.0, NAN)),
    *((Finetune, {"milestones": v}) for v in ((0.0,), (1.5,), 0.5)),
    *((Finetune, {"batch": v}) for v in (1, 2.5)),
    *((Finetune, {"weight_decay": v}) for v in (-1.0, NAN)),
    (Finetune, {"clamp": -1.0}),
    (Finetune, {"what": "head"}),
    (Finetune, {"batch_norm": "still"}),
    (Finetune, {"distil": "never"}),
    (Meta, {"count": "some"}),
    *((ILBaseline, {"T": v}) for v in (0, -1, NAN, INF, -INF)),
    *((Recipe, {"epochs": v}) for v in (0, -1, NAN, INF)),
    *((Recipe, {"lr": v}) for v in (0, -0.1, NAN, INF)),
    *((Recipe, {"decay": v}) for v in (0, -0.1, 1.1, NAN, INF)),
    *((Recipe, {"batch": v}) for v in (1, 0, -1, NAN, INF)),
    *((Recipe, {"momentum": v}) for v in (-0.1, 1.0, 1.5, NAN, INF)),
    *((Recipe, {"weight_decay": v}) for v in (-1e-4, NAN, INF)),
    *((Recipe, {"milestones": v}) for v in ((0.0,), (0.5, 1.1), (-0.1,), (0.5, NAN), (INF,))),
]


@pytest.mark.parametrize(
    ("kind", "settings"), BAD, ids=[f"{kind.__name__}-{k}-{v}" for kind, s in BAD for k, v in s.items()]
)
def test_settings_out_of_range_are_refused(kind: Callable[..., Any], settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**settings)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, EquipoiseError)
    (name,) = settings
    assert name.replace("_", "-") in str(caught.value).replace("_", "-"), "the message names the setting"


GOOD: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((Balanced, {"alpha": v}) for v in (1e-3, 1, 10.0)),
    *((Relaxed, {"epsilon": v}) for v in (0, 1, 2.6, "0", "0%", "0.2%", "1e-3")),
    *((Meta, {"alpha_lr": v}) for v in (0, 0.5, 10)),
    *((Meta, {"every": v}) for v in (1, 10)),
    *((Meta, {"hold_out": v}) for v in (0.01, 0.99)),
    *((kind, {"share": v}) for kind in (MemoryOversampling, SeparatedSoftmax) for v in (0.01, 0.99)),
    *((SeparatedSoftmax, {"mean": v}) for v in ("each", "all")),
    *((Finetune, {"epochs": v}) for v in (0, 1)),
    *((Finetune, {"milestones": v}) for v in ((), (0.5, 1.0))),
    *((Finetune, {"what": v}) for v in ("classifier", "all")),
    *((Meta, {"count": v}) for v in ("train", "all")),
    *((ILBaseline, {"T": v}) for v in (0.1, 1, 20)),
    *((Recipe, {"decay": v}) for v in (1e-3, 1)),
    *((Recipe, {"momentum": v}) for v in (0, 0.999)),
    *((Recipe, {"milestones": v}) for v in ((), (1.0,), (0.5, 0.75))),
    (Recipe, {"batch": 2}),
    *((Recipe, {"weight_decay": v}) for v in (0, 1.0)),
]


@pytest.mark.parametrize(
    ("kind", "settings"), GOOD, ids=[f"{kind.__name__}-{k}-{v}" for kind, s in GOOD for k, v in s.items()]
)
def test_settings_in_range_are_kept_unchanged(kind: Callable[..., Any], settings: dict[str, Any]) -> None:
    made = kind(**settings)
    for name, value in settings.items():
        kept = getattr(made, name)
        # ε has one way to be written: a number, or a percentage.
        assert kept == (float(value) if name == "epsilon" and not str(value).endswith("%") else value)


@pytest.mark.parametrize(("hold", "m", "held"), [(0.1, 20, 2), (0.1, 2, 1), (0.1, 19, 1), (0.3, 10, 3), (0.5, 5, 2)])
def test_meta_holds_out_a_tenth_of_the_memory_and_at_least_one(hold: float, m: int, held: int) -> None:
    plan = Plan(1, (2, 2), (1, 8, 8), (m, m, 500, 500), m, m)
    assert Meta(hold_out=hold).hold(plan) == held
    assert Meta(hold_out=hold).hold(Plan(0, (4,), (1, 8, 8), (m, m, 500, 500))) == 0, "not in the base step"


def test_meta_holds_out_a_tenth_of_the_smallest_class_where_everything_is_kept() -> None:
    assert Meta().hold(Plan(1, (2, 2), (1, 8, 8), (480, 500, 37, 500), EVERYTHING, EVERYTHING)) == 3


def test_what_is_held_out_counts_for_lambda_where_it_is_asked_to() -> None:
    """`train` counts the images that are trained on; `all` the held-out ones of B_t too."""
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    images = Images(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), y)
    for count, lam in (("train", [0.5 * 2, 0.5 * 1, 4]), ("all", [0.5 * 3, 0.5 * 2, 5])):
        remedy, state = Meta(count=count), {"alpha": torch.tensor(0.5)}  # type: ignore[arg-type]
        s = make_step((2, 1), images, remedy, held=torch.tensor([2, 4, 9]), state=state)
        assert s.n.tolist() == [2, 1, 4] and s.lam.tolist() == lam


def test_an_unfinished_method_says_so() -> None:
    with pytest.raises(TypeError, match="objective"):
        Method().objective(step(torch.ones(2), [1.0, 1.0], 1), Batch(torch.tensor([0]), out(torch.zeros(1, 2))))
