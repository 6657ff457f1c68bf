"""The protocol: the order of the classes, the steps, labels as positions in the order, and the accuracies."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import DataError, UsageError
from equipoise.data import datasets
from equipoise.data.images import Images, join_images
from equipoise.data.protocol import order_classes, split_classes
from equipoise.runs.metrics import confusion_matrix, forgetting, summarise, to_percent
from equipoise.runs.plan import prepare
from equipoise.runs.settings import Data, Machine, Protocol, Run

properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)

# The order that this field uses for CIFAR-100, as its public code lists it.
CIFAR_1993 = """
68 56 78 8 23 84 90 65 74 76 40 89 3 92 55 9 26 80 43 38 58 70 77 1 85 19 17 50 28 53 13 81 45 82 6 59 83 16 15 44 91
41 72 60 79 52 20 10 31 54 37 95 14 71 96 98 97 2 64 66 42 22 35 86 24 34 87 21 99 0 88 27 18 94 11 12 47 25 30 46 62
69 36 61 7 63 75 5 32 4 51 48 73 93 39 67 29 49 57 33
"""


# The order of the classes -------------------------------------------------------------------------------------


def test_the_order_of_cifar_100() -> None:
    order = order_classes("1993", 100)
    assert order == [int(word) for word in CIFAR_1993.split()]
    assert order[:10] == [68, 56, 78, 8, 23, 84, 90, 65, 74, 76] and order[-5:] == [67, 29, 49, 57, 33]
    assert all(type(k) is int for k in order)


def test_the_order_of_a_thousand_classes() -> None:
    order = order_classes("1993", 1000)
    assert order[:10] == [54, 7, 894, 512, 126, 337, 988, 11, 284, 493]
    assert order[-5:] == [285, 225, 945, 697, 417]


def test_a_seed_leaves_numpys_global_generator_alone() -> None:
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    order_classes("1993", 100)
    assert np.random.rand() == expected


@properties
@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(1, 200))
def test_every_seed_gives_each_class_once(seed: int, classes: int) -> None:
    order = order_classes(str(seed), classes)
    assert sorted(order) == list(range(classes))
    assert order == order_classes(str(seed), classes)


def test_the_order_of_podnet() -> None:
    order = order_classes("podnet", 100)
    assert order[:6] == [87, 0, 52, 58, 44, 91] and order[-3:] == [26, 35, 39] and sorted(order) == list(range(100))
    with pytest.raises(UsageError, match="--order podnet is that of the 100 classes of CIFAR-100, and there are 10"):
        order_classes("podnet", 10)


def test_natural_order() -> None:
    assert order_classes("natural", 7) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("text", ["3 1 0 2", "3,1,0,2", "3, 1,\n0\t2\n", "\n3\n1\n0\n2\n\n"])
def test_an_order_from_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "order.txt"
    path.write_text(text)
    assert order_classes(str(path), 4) == [3, 1, 0, 2]


@pytest.mark.parametrize(
    "text", ["3 1 0 2 2", "3 1 0", "3 1 1 2", "1 2 3 4", "0 1 2 9", "", "3 1 0 x", "3 1 0 -2", "3 1 0 2.0", "3;1;0;2"]
)
def test_a_bad_order_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "order.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"order\.txt"):
        order_classes(str(path), 4)


def test_an_order_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "order.bin"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match=r"order\.bin"):
        order_classes(str(path), 4)


@pytest.mark.parametrize("order", ["nowhere.txt", "Natural", "-1", "1.5", "", "4294967296", "99999999999999999999"])
def test_what_is_no_order_is_refused(order: str) -> None:
    with pytest.raises(UsageError, match="order"):
        order_classes(order, 4)


@pytest.mark.parametrize("order", ["²", "1²"])
def test_what_only_looks_like_a_number_is_refused_too(order: str) -> None:
    """`"²".isdigit()` is true, and yet it is no number for `int`."""
    with pytest.raises(UsageError, match="order"):
        order_classes(order, 4)


def test_a_folder_is_no_order(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="order"):
        order_classes(str(tmp_path), 4)


# Steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "base", "steps", "sizes"),
    [
        (100, 50, 5, (50, 10, 10, 10, 10, 10)),
        (100, 50, 25, (50, *[2] * 25)),
        (10, 4, 3, (4, 2, 2, 2)),
        (10, 2, 8, (2, *[1] * 8)),
        (10, 9, 1, (9, 1)),
    ],
)
def test_steps(classes: int, base: int, steps: int, sizes: tuple[int, ...]) -> None:
    assert split_classes(classes, base, steps) == sizes


@settings(properties, max_examples=400)
@given(classes=st.integers(2, 40), base=st.integers(-2, 42), steps=st.integers(-2, 20))
def test_steps_bring_all_classes_or_are_refused(classes: int, base: int, steps: int) -> None:
    rest = classes - base
    if base < 2 or base >= classes or not any(k * steps == rest for k in range(1, max(1, rest) + 1)):
        with pytest.raises(UsageError):
            split_classes(classes, base, steps)
        return
    sizes = split_classes(classes, base, steps)
    assert sum(sizes) == classes and sizes[0] == base and len(set(sizes[1:])) == 1 and len(sizes) == steps + 1


@pytest.mark.parametrize(
    ("base", "steps", "words"),
    [
        (50, 7, "1, 2, 5, 10, 25, 50"),
        (100, 1, "--base 100"),
        (1, 1, "from 2 to 99"),
        (50, 0, "--steps 0"),
        (50.0, 5, "--base must be a whole number, not 50.0"),
        (50, "5", "--steps must be a whole number, not '5'"),
    ],
)
def test_a_refusal_says_what_would_do(base: Any, steps: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_classes(100, base, steps)


# Labels -------------------------------------------------------------------------------------------------------


def test_labels_become_positions_in_the_order_in_both_sets() -> None:
    plan = prepare(Run(data=Data("digits"), protocol=Protocol(base=4, steps=3, order="1993")), Machine("cpu"))
    digits = datasets.load("digits")
    assert plan.order == order_classes("1993", 10) != list(range(10))
    for mine, theirs in ((plan.train, digits.train), (plan.test, digits.test)):
        assert torch.equal(mine.x, theirs.x)
        assert mine.y.tolist() == [plan.order.index(label) for label in theirs.y.tolist()]
    assert plan.sizes == (4, 2, 2, 2)
    assert [plan.edges(t) for t in range(4)] == [(0, 4), (4, 6), (6, 8), (8, 10)]
    # What is seen of the test set after step 1 are the images of the first six labels of the order.
    seen = plan.test[plan.test.find_positions(0, 6)]
    wanted = [i for i, label in enumerate(digits.test.y.tolist()) if label in plan.order[:6]]
    assert torch.equal(seen.x, digits.test.x[wanted])


def test_images_by_class_and_joined() -> None:
    y = torch.tensor([3, 0, 2, 1, 2, 0])
    images = Images(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), y)
    assert images.find_positions(1, 3).tolist() == [2, 3, 4] and images.find_positions(7, 9).tolist() == []
    part = images[images.find_positions(1, 3)]
    assert part.y.tolist() == [2, 1, 2] and part.x.flatten().tolist() == [2, 3, 4]
    both = join_images(part, images[images.find_positions(3, 4)])
    assert both.y.tolist() == [2, 1, 2, 3] and both.x.flatten().tolist() == [2, 3, 4, 0] and len(both) == 4


def test_a_fingerprint_feels_every_pixel_label_and_place() -> None:
    x, y = torch.arange(24, dtype=torch.uint8).view(2, 1, 3, 4), torch.tensor([0, 1])
    one = Images(x, y).fingerprint()
    assert Images(x.clone(), y.clone()).fingerprint() == one
    pixel = x.clone()
    pixel[1, 0, 2, 3] += 1
    others = [Images(pixel, y), Images(x, y.flip(0)), Images(x.flip(0), y.flip(0)), Images(x.view(2, 1, 4, 3), y)]
    assert len({one, *(o.fingerprint() for o in others)}) == 5
    assert Images(x.permute(0, 1, 3, 2), y).fingerprint() != one, "what counts are pixels, not memory"


def test_a_fingerprint_of_some_images_feels_which_they_are() -> None:
    """By their pixels; or, where a hash of all is known, by that and their positions, without reading a pixel."""
    x, y = torch.arange(48, dtype=torch.uint8).view(4, 1, 3, 4), torch.tensor([0, 1, 1, 2])
    some, same, other = torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([2, 1])
    for images in (Images(x, y), Images(x, y, "known")):
        assert images.fingerprint(some) == images.fingerprint(same) != images.fingerprint(other)
    assert Images(x, y).fingerprint(some) == Images(x, y)[some].fingerprint()
    known = [Images(x.flip(0), y, name).fingerprint(some) for name in ("known", "other")]
    assert known[0] == Images(x, y, "known").fingerprint(some) != known[1], "what is known of all counts, not pixels"


# Accuracies ---------------------------------------------------------------------------------------------------


def scores(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    z = rng.permuted(np.tile(np.arange(classes), (count, 1)), axis=1).astype(np.float32)  # no ties
    for i in range(0, count, 3):  # a third is right for sure
        z[i, y[i]] += 100
    return torch.from_numpy(z), torch.from_numpy(y)


def naive_rank(row: list[float], label: int) -> int:
    """How many classes score higher than the right one."""
    return sum(v > row[label] for v in row)


def naive(z: Tensor, y: Tensor, classes: set[int], k: int = 1) -> float | None:
    hits = [naive_rank(row, label) < k for row, label in zip(z.tolist(), y.tolist()) if label in classes]
    return 100 * sum(hits) / len(hits) if hits else None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2,), (4,), (3, 2), (5, 3, 3, 3), (2, 1, 1)])
def test_accuracies_are_those_of_a_plain_count(sizes: tuple[int, ...], seed: int) -> None:
    N = sum(sizes)
    z, y = scores(80, N, seed)
    edges = [sum(sizes[:t]) for t in range(len(sizes) + 1)]
    groups = [set(range(a, b)) for a, b in pairwise(edges)]
    found = summarise(z, y, sizes)
    assert found["top1"] == pytest.approx(naive(z, y, set(range(N))))
    assert found["top5"] == pytest.approx(naive(z, y, set(range(N)), 5))
    assert found["by_step"] == pytest.approx([naive(z, y, group) for group in groups])
    assert found["base"] == found["by_step"][0] and found["latest"] == found["by_step"][-1]
    if len(sizes) == 1:
        assert found["new"] is None
    else:
        assert found["new"] == pytest.approx(naive(z, y, set(range(sizes[0], N))))
    matrix = confusion_matrix(z, y, N)
    expected = [[0] * N for _ in range(N)]
    for row, label in zip(z.tolist(), y.tolist()):
        expected[label][row.index(max(row))] += 1
    assert matrix.tolist() == expected
    assert 100 * matrix.trace().item() / len(y) == pytest.approx(found["top1"])


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_top_5_of_at_most_five_classes_is_always_right(classes: int) -> None:
    z, y = scores(30, classes, 0)
    assert summarise(z, y, (classes,))["top5"] == 100.0


def test_top_5_is_not_top_1_and_not_everything() -> None:
    z = torch.arange(8.0).flip(0).repeat(8, 1)  # class 0 scores highest, class 7 lowest
    found = summarise(z, torch.arange(8), (4, 4))
    assert found["top1"] == 12.5 and found["top5"] == 62.5
    assert found["base"] == 25.0 and found["new"] == 0.0


def test_classes_without_test_images_have_no_accuracy() -> None:
    found = summarise(torch.eye(4), torch.tensor([0, 0, 0, 0]), (2, 2))
    assert found["top1"] == found["base"] == 25.0 and found["new"] is None and found["by_step"] == [25.0, None]
    assert to_percent(torch.tensor([], dtype=torch.bool)) is None


def test_a_class_of_the_confusion_matrix_may_be_missing() -> None:
    z = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert confusion_matrix(z, torch.tensor([0, 1]), 3).tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_forgetting_by_hand() -> None:
    by_step = [[90.0], [70.0, 80.0], [75.0, 60.0, 50.0], [60.0, 65.0, 20.0, 99.0]]
    # Best before the last step: 90, 80, 50. After it: 60, 65, 20.
    assert forgetting(by_step) == pytest.approx((30 + 15 + 30) / 3)
    assert forgetting([[90.0]]) is None
    assert forgetting([[50.0], [70.0, 10.0]]) == -20.0
    assert forgetting([[None], [None, 10.0]]) is None


@properties
@given(st.integers(2, 7), st.integers(0, 10**6))
def test_forgetting_is_that_of_a_plain_loop(steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [[float(v) if v > 5 else None for v in rng.uniform(0, 100, t + 1)] for t in range(steps)]
    lost = []
    for j in range(steps - 1):
        best = -1.0
        for t in range(j, steps - 1):
            best = max(best, -1.0 if rows[t][j] is None else rows[t][j])  # type: ignore[type-var]
        after = rows[steps - 1][j]
        if best >= 0 and after is not None:
            lost.append(best - after)
    found = forgetting(rows)
    assert found == (pytest.approx(sum(lost) / len(lost)) if lost else None)
