"""The memory: herding against a plain greedy loop, budgets, and what holds after any sequence of steps."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import UsageError
from equipoise.data.memory import EVERYTHING, Budget, choose_at_random, choose_by_herding, hold_out, keep, rank_in_class

properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)
Features = npt.NDArray[np.float64]


# Herding ------------------------------------------------------------------------------------------------------


def greedy(h: Features, y: list[int], m: int) -> list[int]:
    """argmin_x ‖μ − (x + Σ chosen) / k‖ over normalised features, class by class, one candidate after the other."""
    unit = [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in h.tolist()]
    d = len(unit[0])
    picks: list[int] = []
    for c in sorted(set(y)):
        left = [i for i, label in enumerate(y) if label == c]
        mu = [sum(unit[i][a] for i in left) / len(left) for a in range(d)]
        total = [0.0] * d
        for k in range(1, min(m, len(left)) + 1):
            best, nearest = -1, math.inf
            for i in left:
                far = math.sqrt(sum((mu[a] - (total[a] + unit[i][a]) / k) ** 2 for a in range(d)))
                if far < nearest * (1 - 1e-12):  # what is equal up to rounding goes to the first
                    best, nearest = i, far
            picks.append(best)
            left.remove(best)
            total = [total[a] + unit[best][a] for a in range(d)]
    return picks


def features(sizes: list[int], seed: int, width: int = 6) -> tuple[Tensor, Tensor]:
    """Features of very unequal length around a mean, in mixed order: without normalisation others are chosen."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    h = (rng.normal(size=(len(y), width)) + rng.normal(size=(len(sizes), width))[y]) * rng.uniform(0.1, 10, (len(y), 1))
    return torch.from_numpy(h), torch.from_numpy(y)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("sizes", "m"), [([12, 12, 12], 5), ([20, 3, 11, 1], 6), ([4, 9], 9), ([7], 3), ([5, 5], 100), ([6, 8], 1)]
)
def test_herding_is_the_greedy_loop(sizes: list[int], m: int, seed: int) -> None:
    h, y = features(sizes, seed)
    expected = greedy(h.numpy(), y.tolist(), m)
    assert choose_by_herding(h, y, m).tolist() == expected
    assert len(expected) == sum(min(m, size) for size in sizes)


def test_herding_of_fp32_features() -> None:
    h, y = features([15, 10], 0)
    assert choose_by_herding(h.float(), y, 6).tolist() == greedy(h.float().double().numpy(), y.tolist(), 6)


@pytest.mark.parametrize("seed", range(3))
def test_herding_tells_nearly_equal_images_apart(seed: int) -> None:
    """All features point almost the same way: only float64 sees which mean is nearest."""
    rng = np.random.default_rng(seed)
    h = torch.from_numpy(1 + 1e-5 * rng.normal(size=(100, 6))).float()
    y = torch.arange(100) % 2
    assert choose_by_herding(h, y, 15).tolist() == greedy(h.double().numpy(), y.tolist(), 15)


def test_herding_does_not_feel_the_length_of_a_feature() -> None:
    h, y = features([15, 10], 1)
    longer = h * torch.linspace(0.01, 100, len(h))[:, None].double()
    assert choose_by_herding(longer, y, 8).tolist() == choose_by_herding(h, y, 8).tolist()


def test_herding_with_labels_that_do_not_start_at_zero() -> None:
    h, y = features([5, 6, 7], 2)
    assert choose_by_herding(h, y * 10 + 50, 4).tolist() == choose_by_herding(h, y, 4).tolist()


def test_herding_begins_with_the_image_nearest_to_the_mean() -> None:
    h = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -0.2]])
    assert choose_by_herding(h, torch.zeros(4, dtype=torch.long), 1).tolist() == [2]


@pytest.mark.parametrize("seed", range(3))
def test_herding_takes_duplicates_as_different_images(seed: int) -> None:
    h, y = features([6, 4], seed)
    h, y = torch.cat([h, h[:5], h[:5]]), torch.cat([y, y[:5], y[:5]])
    for m in (3, 7, 30):
        picks = choose_by_herding(h, y, m).tolist()
        assert picks == greedy(h.numpy(), y.tolist(), m)
        assert len(set(picks)) == len(picks) == sum(min(m, int((y == c).sum())) for c in (0, 1))


@pytest.mark.parametrize("seed", range(3))
def test_fewer_exemplars_are_a_prefix_of_more(seed: int) -> None:
    h, y = features([9, 5, 14], seed)
    whole = choose_by_herding(h, y, 14)
    for m in range(1, 14):
        picks = choose_by_herding(h, y, m)
        for c in range(3):
            of_class = whole[y[whole] == c]
            assert picks[y[picks] == c].tolist() == of_class[:m].tolist()


def test_herding_some_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    h, y = features([9, 5, 14, 3, 8], 0)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    h, y = h[shuffled], 3 * y[shuffled]
    whole = choose_by_herding(h, y, 6).tolist()
    for most in (1, 2 * 14 * h.shape[1], 3 * 14 * h.shape[1]):
        monkeypatch.setattr("equipoise.data.memory.HERDED", most)
        assert choose_by_herding(h, y, 6).tolist() == whole


def test_herding_nothing() -> None:
    h, y = features([3, 3], 0)
    assert choose_by_herding(h, y, 0).tolist() == []


# At random ----------------------------------------------------------------------------------------------------


def test_at_random_is_without_repetition_and_class_by_class() -> None:
    y = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 2, 2, 0])
    for m, counts in ((1, [1, 1, 1]), (3, [3, 3, 3]), (4, [4, 3, 4]), (5, [5, 3, 5]), (9, [5, 3, 5]), (0, [0, 0, 0])):
        which = choose_at_random(y, m, torch.Generator().manual_seed(1)).tolist()
        assert len(set(which)) == len(which)
        assert y[which].tolist() == [c for c in range(3) for _ in range(counts[c])]


def test_at_random_depends_on_its_generator_alone() -> None:
    y = torch.arange(4).repeat(25)
    first = choose_at_random(y, 10, torch.Generator().manual_seed(1)).tolist()
    torch.manual_seed(999)
    state = torch.get_rng_state()
    assert choose_at_random(y, 10, torch.Generator().manual_seed(1)).tolist() == first
    assert torch.equal(torch.get_rng_state(), state)
    assert choose_at_random(y, 10, torch.Generator().manual_seed(2)).tolist() != first


def test_at_random_takes_every_image_as_often() -> None:
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0])
    gen, counts, draws = torch.Generator().manual_seed(0), [0] * 8, 3000
    for _ in range(draws):
        for i in choose_at_random(y, 2, gen).tolist():
            counts[i] += 1
    for i in range(8):
        p = 2 / int((y == y[i]).sum())
        assert abs(counts[i] - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


# Budgets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget", "shown"),
    [
        ("20", Budget(per_class=20), "20"),
        (20, Budget(per_class=20), "20"),
        (" 20 ", Budget(per_class=20), "20"),
        ("0", Budget(), "0"),
        (0, Budget(), "0"),
        ("007", Budget(per_class=7), "7"),
        ("total:2000", Budget(total=2000), "total:2000"),
        ("total:0", Budget(total=0), "total:0"),
        ("all", Budget(per_class=EVERYTHING), "all"),
    ],
)
def test_budgets_are_read_and_shown(text: str | int, budget: Budget, shown: str) -> None:
    assert Budget.parse(text) == budget
    assert str(budget) == shown
    assert Budget.parse(str(budget)) == budget


BAD = ["-1", "abc", "total:", "2.5", "", " ", "total", "total:-5", "total:2.5", "total:abc", "Total:5", "total:total:5"]


@pytest.mark.parametrize("text", [*BAD, "20 30", "+5", "1e3", "²", "20%", "total:20:", -1, 2.5, True, None])
def test_bad_budgets_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="memory"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("budget", "classes", "share"),
    [
        ("20", 1, 20),
        ("20", 100, 20),
        ("0", 50, 0),
        ("total:2000", 100, 20),
        ("total:2000", 50, 40),
        ("total:2000", 60, 33),
        ("total:2000", 2001, 0),
        ("total:7", 0, 7),
        ("20", 0, 20),
    ],
)
def test_a_total_budget_is_shared_equally_and_rounded_down(budget: str, classes: int, share: int) -> None:
    assert Budget.parse(budget).share(classes) == share


@properties
@given(total=st.integers(0, 5000), classes=st.integers(1, 1000))
def test_shares_fit_into_the_budget_and_one_more_would_not(total: int, classes: int) -> None:
    share = Budget(total=total).share(classes)
    assert share * classes <= total < (share + 1) * classes


# Any sequence of steps ----------------------------------------------------------------------------------------


def by_class(memory: Tensor, y: Tensor) -> dict[int, list[int]]:
    """Of positions of images with labels y, those of each class, in their order."""
    found: dict[int, list[int]] = {}
    for position in memory.tolist():
        found.setdefault(int(y[position]), []).append(position)
    return found


class History(NamedTuple):
    """The images of each class of each step, how they are chosen, and how many may be kept."""

    steps: list[list[int]]
    budget: Budget
    select: str
    seed: int


histories = st.builds(
    History,
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=5),
    st.builds(Budget, per_class=st.integers(0, 6)) | st.builds(Budget, total=st.integers(0, 60)),
    st.sampled_from(["herding", "random"]),
    st.integers(0, 1000),
)


@properties
@given(histories)
def test_after_any_steps_the_memory_is_what_it_should_be(history: History) -> None:
    rng = random.Random(history.seed)
    memory, y = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    chosen: dict[int, list[int]] = {}  # at the step of the class
    earlier: dict[int, list[int]] = {}  # in the memory before the step
    size_of: dict[int, int] = {}
    for t, sizes in enumerate(history.steps):
        n_old = len(size_of)
        own = [n_old + k for k, size in enumerate(sizes) for _ in range(size)]
        rng.shuffle(own)
        data = torch.arange(len(y), len(y) + len(own))
        y = torch.cat([y, torch.tensor(own)])
        size_of |= {n_old + k: size for k, size in enumerate(sizes)}
        m = history.budget.share(len(size_of))
        if history.select == "random":
            which = choose_at_random(y[data], m, torch.Generator().manual_seed(history.seed + t))
        else:
            h = torch.randn(len(own), 4, generator=torch.Generator().manual_seed(history.seed + t))
            which = choose_by_herding(h, y[data], m)
        chosen |= by_class(data[which], y)
        memory = torch.cat([keep(memory, y[memory], m), data[which]])

        labels = y[memory].tolist()
        assert labels == sorted(labels), "classes lie together, old ones first"
        found = by_class(memory, y)
        assert sum(len(v) for v in found.values()) == len(memory)
        if history.budget.total is None:
            assert all(len(v) <= history.budget.per_class for v in found.values())
        else:
            assert len(memory) <= history.budget.total
        for c, size in size_of.items():
            here = found.get(c, [])
            assert len(here) == min(m, size), "as many as fit, of every class seen"
            assert here == chosen.get(c, [])[: len(here)], "the best of those chosen at first"
            if c in earlier:
                assert here == earlier[c][: len(here)], "giving up keeps a prefix"
        earlier = found


@properties
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 8))
def test_ranks_and_keep(sizes: list[int], m: int) -> None:
    y = [c for c, size in enumerate(sizes) for _ in range(size)]
    expected = [y[:i].count(c) for i, c in enumerate(y)]
    labels, memory = torch.tensor(y, dtype=torch.long), 100 + torch.arange(len(y)) * 3  # positions, of any order
    assert rank_in_class(labels).tolist() == expected
    kept = keep(memory, labels, m)
    assert kept.tolist() == [100 + 3 * i for i, rank in enumerate(expected) if rank < m]


@properties
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 99))
def test_what_is_held_out_is_as_many_of_every_class_and_nothing_is_lost(sizes: list[int], h: int, seed: int) -> None:
    y = torch.from_numpy(np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes)))
    trained, held = hold_out(y, h, torch.Generator().manual_seed(seed))
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(len(y)))
    assert torch.bincount(y[held], minlength=len(sizes)).tolist() == [min(h, size) for size in sizes]
    assert trained.tolist() == sorted(trained.tolist()), "what stays is in its order"
    again = hold_out(y, h, torch.Generator().manual_seed(seed))
    assert torch.equal(again[0], trained) and torch.equal(again[1], held)
