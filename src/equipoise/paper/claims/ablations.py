"""What the paper says in its ablations, sections 4.3.1, 4.3.2 and 4.3.4, in our words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..cells import BALANCED, META
from ..published import TABLE6, parse_numbers
from .checks import IL, IL_BALANCED, IL_META, check_number, compare, subtract
from .judge import NUMBER, SIMILAR, Check, Claim, Read, Value

MEMORIES = (1, 5, 10, 20, 50)
ALPHAS = ("α 0.1", "α 0.25", "α 0.5", "α 1")
OTHERS = [name for name, _ in parse_numbers(TABLE6) if name not in (BALANCED, META)]
"""the rows of table 6 that are not the paper's own losses"""


def measure_gain(row: str, other: str, memory: int, less: int | None = None) -> Value:
    """A row's gain over another with this memory, or by how much it is larger than with one of `less` images."""

    def at(read: Read, m: int) -> float:
        column = f"cifar100-memory-{m}"
        return read("table4", row, column) - read("table4", other, column)

    return lambda read: at(read, memory) - (0.0 if less is None else at(read, less))


def check_growth(row: str, other: str, memories: Sequence[int]) -> tuple[Check, ...]:
    """A check for each pair of neighbours: the gain of a row over another is larger with the smaller memory."""
    return tuple(
        Check(f"gain of {row}, {small} − {large} kept", measure_gain(row, other, small, large))
        for small, large in itertools.pairwise(memories)
    )


MEMORY = (
    Claim(
        "4.3.1, table 4",
        "The smaller the memory, the larger the gain of Balanced over the standard loss.",
        check_growth(IL_BALANCED, IL, MEMORIES),
    ),
    Claim(
        "4.3.1, table 4",
        "Balanced with 1 image of every class is almost where the standard loss is with 50.",
        (
            Check(
                "Balanced, 1 kept − standard, 50 kept",
                subtract(("table4", IL_BALANCED, "cifar100-memory-1"), ("table4", IL, "cifar100-memory-50")),
                SIMILAR,
            ),
        ),
    ),
    Claim(
        "4.3.1, table 4",
        "Meta improves on Balanced.",
        tuple(Check(f"{m} kept: Meta − Balanced", measure_gain(IL_META, IL_BALANCED, m)) for m in MEMORIES[1:]),
    ),
    Claim(
        "4.3.1, table 4",
        "Meta gains most where the memory is small.",
        check_growth(IL_META, IL_BALANCED, MEMORIES[1:]),
    ),
)


def locate(row: str, t: int, metric: str) -> tuple[str, str, str]:
    """The place of a number of table 5."""
    return "table5", row, f"cifar100-{t}-{metric}"


def measure_imbalance(read: Read, row: str, t: int) -> float:
    """How far base and later classes, which are as many, are apart at the end."""
    return 2 * abs(read(*locate(row, t, "final-base")) - read(*locate(row, t, "final")))


def compare_imbalance(t: int) -> Value:
    """How much further base and later classes are apart with any other α, or with Meta, than with 1."""
    others = (*ALPHAS[:-1], META)
    return lambda read: min(measure_imbalance(read, row, t) for row in others) - measure_imbalance(read, ALPHAS[-1], t)


def compare_best(rows: Sequence[str], others: Sequence[str], t: int) -> Value:
    """The best average of some rows of table 5, minus that of others."""

    def best(read: Read, which: Sequence[str]) -> float:
        return max(read(*locate(row, t, "average")) for row in which)

    return lambda read: best(read, rows) - best(read, others)


WEIGHT = (
    Claim(
        "4.3.2, table 5",
        "The smaller α, the better the base classes are kept.",
        tuple(
            Check(
                f"{t} steps: base classes, {small} − {large}",
                subtract(locate(small, t, "final-base"), locate(large, t, "final-base")),
            )
            for t in (5, 10)
            for small, large in itertools.pairwise(ALPHAS)
        ),
    ),
    Claim(
        "4.3.2, table 5",
        "In 5 steps, α 0.1 instead of 1 raises the base classes by 16.30, and the final accuracy falls by only 3.01.",
        tuple(
            Check(words, subtract(locate(one, 5, metric), locate(other, 5, metric)), NUMBER)
            for words, metric, one, other in (
                ("base classes, α 0.1 − 1", "final-base", "α 0.1", "α 1"),
                ("final, α 1 − 0.1", "final", "α 1", "α 0.1"),
            )
        ),
    ),
    Claim(
        "4.3.2, table 5",
        "With α 1, base and later classes end nearest to each other.",
        tuple(Check(f"{t} steps: distance, the next − α 1", compare_imbalance(t)) for t in (5, 10)),
    ),
    Claim(
        "3.3, 4.3.2",
        "α 1 has not the highest average: a smaller α has a higher one.",
        tuple(
            Check(f"{t} steps: the best of the others − α 1", compare_best(ALPHAS[:-1], ALPHAS[-1:], t))
            for t in (5, 10)
        ),
    ),
    Claim(
        "4.3.2, table 5",
        "Meta has the highest average.",
        tuple(Check(f"{t} steps: Meta − the best fixed α", compare_best([META], ALPHAS, t)) for t in (5, 10)),
    ),
    Claim(
        "4.3.2, table 5",
        "Meta favours the old classes.",
        tuple(
            Check(
                f"{t} steps: base − all classes",
                subtract(locate(META, t, "final-base"), locate(META, t, "final")),
            )
            for t in (5, 10)
        ),
    ),
)


def check_above(row: str, *others: str) -> tuple[Check, ...]:
    """A check for each of the others that a row of table 6 is above it."""
    return tuple(check for other in others for check in compare("table6", row, other, ["cifar100-5"]))


def measure_relief(row: str) -> Value:
    """By how much nearer to each other base and later classes end in a row of figure 5 than without a remedy."""

    def lean(read: Read, row: str) -> float:
        return abs(
            read("confusion", row, "cifar100-final", "final base")
            - read("confusion", row, "cifar100-final", "final new")
        )

    return lambda read: lean(read, IL) - lean(read, row)


REMEDIES = (
    Claim(
        "4.3.4, table 6",
        "Oversampling the memory or the old classes improves IL-Baseline.",
        check_above("memory oversampling", IL) + check_above("class oversampling", IL),
    ),
    Claim(
        "4.3.4, table 6",
        "Rescaling the loss is better than both.",
        check_above("loss rescaling", "memory oversampling", "class oversampling"),
    ),
    Claim(
        "4.3.4, table 6",
        "Fine-tuning on balanced images is better than rescaling.",
        check_above("balanced finetuning", "loss rescaling"),
    ),
    Claim(
        "2, 4.3.4",
        "Balanced and Meta are better than all other remedies, without a second training or oversampling.",
        check_above(BALANCED, *OTHERS) + check_above(META, *OTHERS),
    ),
    Claim(
        "4.3.4, figure 5",
        "IL-Baseline ends at 54.76 with Balanced and at 55.35 with Meta (CIFAR-100, 5 steps, 20 kept).",
        (
            check_number("Balanced", "confusion", IL_BALANCED, "cifar100-final"),
            check_number("Meta", "confusion", IL_META, "cifar100-final"),
        ),
    ),
    Claim(
        "4.3.4, figure 5",
        "Both lessen the imbalance: base and later classes end nearer to each other than with the standard loss.",
        tuple(Check(f"distance, standard − {row}", measure_relief(row)) for row in (IL_BALANCED, IL_META)),
    ),
)
