"""What the paper says of ε: its section 4.3.3 and figure 4, in our words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..cells import DATASETS
from ..published import EPSILONS
from .checks import subtract
from .judge import NUMBER, PLACES, SIMILAR, Check, Claim, Read, Value

CURVES = [
    (dataset, method, t)
    for dataset in ("cifar100", "imagenet-subset")
    for method, t in itertools.product(("LUCIR", "PODNet"), (5, 10))
]
"""the settings of the figure of ε"""
Curve = Callable[[str, str], float]
"""gives the accuracy by metric and by ε in percent"""


def check_curves(what: str, value: Callable[[Curve], float], **rule: Any) -> tuple[Check, ...]:
    """A check for each setting of the figure of ε."""

    def make(dataset: str, method: str, t: int) -> Check:
        def compute(read: Read) -> float:
            def curve(metric: str, percent: str) -> float:
                column = f"{dataset}-{'average' if metric == 'first step' else metric.replace(' ', '-')}"
                own = (metric,) if metric == "first step" else ()
                return read("epsilon", f"{method}, {t} steps, ε {percent}%", column, *own)

            return value(curve)

        return Check(f"{DATASETS[dataset]}, {method}, {t} steps: {what}", compute, **rule)

    return tuple(make(*setting) for setting in CURVES)


def find_best(curve: Curve, metric: str) -> int:
    """The place of the ε with the highest accuracy."""
    return max(range(len(EPSILONS)), key=lambda k: curve(metric, EPSILONS[k]))


def find_balance(curve: Curve) -> int:
    """The place of the ε with which base and later classes end nearest to each other."""
    return min(range(len(EPSILONS)), key=lambda k: abs(measure_lean(curve, EPSILONS[k])))


def measure_lean(curve: Curve, percent: str) -> float:
    """Base minus later classes at the end."""
    return curve("final base", percent) - curve("final new", percent)


def find_least_fall(curve: Curve) -> float:
    """The smallest fall of the base classes from one ε to the next."""
    return min(curve("final base", a) - curve("final base", b) for a, b in itertools.pairwise(EPSILONS))


def measure_peak(curve: Curve) -> float:
    """How far the later classes are at best above both ends of the curve."""
    accuracies = [curve("final new", percent) for percent in EPSILONS]
    return max(accuracies) - max(accuracies[0], accuracies[-1])


def compare_third(curve: Curve) -> float:
    """The best average minus the third best."""
    averages = sorted(curve("average", percent) for percent in EPSILONS)
    return averages[-1] - averages[-3]


def measure_trade(curve: Curve) -> float:
    """What later classes gain by the default ε instead of 0, minus what base classes lose."""
    return sum(curve(metric, "0.2") - curve(metric, "0") for metric in ("final new", "final base"))


def pick_gain(pick: Callable[[Sequence[float]], float]) -> Value:
    """The least or the largest gain on ImageNet-Subset by ε 1% instead of the default."""

    def compute(read: Read) -> float:
        gains = [
            read("epsilon", f"{method}, {t} steps, ε 1%", "imagenet-subset-average")
            - read("epsilon", f"{method}, {t} steps, ε 0.2%", "imagenet-subset-average")
            for method, t in itertools.product(("LUCIR", "PODNet"), (5, 10))
        ]
        return pick(gains)

    return compute


def measure_default(metric: str) -> Value:
    """What the default ε instead of 0 changes for LUCIR on ImageNet-Subset in 5 steps."""
    places = [("epsilon", f"LUCIR, 5 steps, ε {percent}%", f"imagenet-subset-{metric}") for percent in ("0.2", "0")]
    return subtract(*places)


RELAXATION = (
    Claim(
        "4.3.3, figure 4",
        "With ε at 100%, Relaxed is almost the standard loss.",
        tuple(
            Check(
                f"{DATASETS[dataset]}, {method}, {t} steps: ε 100% − standard",
                subtract(
                    ("epsilon", f"{method}, {t} steps, ε 100%", f"{dataset}-average"),
                    ("table3", method, f"{dataset}-{t}"),
                ),
                SIMILAR,
            )
            for dataset, method, t in CURVES
        ),
    ),
    Claim(
        "4.3.3, figure 4",
        "The larger ε, the lower the base classes end.",
        check_curves("least fall from one ε to the next", find_least_fall),
    ),
    Claim(
        "4.3.3, figure 4",
        "The later classes end the higher, until a point after which they fall too.",
        check_curves("later classes, the best ε − both ends", measure_peak),
    ),
    Claim(
        "4.3.3, figure 4",
        "The default ε raises the later classes by more than it costs the base classes.",
        check_curves("gain − loss", measure_trade),
    ),
    Claim(
        "4.3.3",
        "For LUCIR on ImageNet-Subset in 5 steps, it raises later classes by 30.40 and costs the base classes 4.28.",
        (
            Check("later classes", measure_default("final-new"), NUMBER, paper=30.40),
            Check("base classes", measure_default("final-base"), NUMBER, paper=-4.28),
        ),
    ),
    Claim(
        "4.3.3",
        "ε 1% instead of the default raises the average on ImageNet-Subset by 0.94 to 3.05.",
        (
            Check("the smallest gain", pick_gain(min), NUMBER, paper=0.94),
            Check("the largest gain", pick_gain(max), NUMBER, paper=3.05),
        ),
    ),
    Claim(
        "4.3.3, figure 4",
        "A large range of ε has similar averages (here: three of the nine values).",
        check_curves("the best − the third", compare_third, rule=SIMILAR),
    ),
    Claim(
        "4.3.3",
        "The ε that is best after the first step is not the one with the best average at the end.",
        check_curves(
            "places between",
            lambda curve: abs(find_best(curve, "first step") - find_best(curve, "average")),
            form=PLACES,
        ),
    ),
    Claim(
        "4.3.3, figure 4",
        "Some ε balances base and later classes: with the smallest the former lead, with the largest the latter.",
        check_curves(
            "the smaller lead", lambda curve: min(measure_lean(curve, EPSILONS[0]), -measure_lean(curve, EPSILONS[-1]))
        ),
    ),
    Claim(
        "4.3.3, figure 4",
        "The best average lies at the ε where base and later classes are equal, or next to it.",
        check_curves(
            "places between",
            lambda curve: abs(find_best(curve, "average") - find_balance(curve)),
            rule=SIMILAR,
            form=PLACES,
            allowed=1.0,
        ),
    ),
)
