"""What the paper says in sections 3 and 4.1, of its losses and of what it compares with, in our words."""

from __future__ import annotations

from .checks import (
    ALL,
    FEW_STEPS,
    IL,
    IL_BALANCED,
    IL_META,
    LUCIR_BALANCED,
    PODNET_BALANCED,
    check_lean,
    check_number,
    compare,
    name_setting,
    need_more,
    subtract,
)
from .judge import PERCENT, SIMILAR, Check, Claim, Value

OWN = (IL_BALANCED, IL_META, "LUCIR", LUCIR_BALANCED, "PODNet", PODNET_BALANCED)
"""the authors' rows of table 1 besides IL-Baseline"""
STANDARD, BALANCED = "LUCIR, 5 steps, no memory", "LUCIR, Balanced, 5 steps, no memory"
"""the two panels of figure 3"""
FINAL = "imagenet-subset-final"


def compare_lowest(column: str) -> Value:
    """How far IL-Baseline is below the lowest of the authors' other rows of table 1."""
    return lambda read: min(read("table1", row, column) for row in OWN) - read("table1", IL, column)


METHOD = (
    Claim(
        "3.2, figure 2",
        "IL-Baseline without a remedy ends at 31.25 (CIFAR-100, 5 steps, 20 kept).",
        (check_number("final", "confusion", IL, "cifar100-final"),),
    ),
    Claim(
        "3.2, figure 2",
        "It takes old classes for new ones: at the end, it is better on later than on base classes.",
        (check_lean("later − base classes", "confusion", IL, "cifar100-final", new=True),),
    ),
    Claim(
        "3.2",
        "Balanced costs no notable time: as much as the standard loss, up to 5%.",
        (Check("IL-Baseline: seconds", need_more(IL_BALANCED, IL, "seconds"), SIMILAR, form=PERCENT, allowed=5.0),),
    ),
    Claim(
        "3.3",
        "Meta takes more time than Balanced, and more memory of the GPU.",
        (
            Check("seconds", need_more(IL_META, IL_BALANCED, "seconds"), form=PERCENT),
            Check("memory", need_more(IL_META, IL_BALANCED, "training MiB"), form=PERCENT),
        ),
    ),
    Claim(
        "3.4, figure 3",
        "On ImageNet-Subset without memory, LUCIR falls from 82.12 to 29.76 on the base classes, and ends at 38.36.",
        (
            check_number("after the base step", "text", STANDARD, "imagenet-subset-base-step"),
            check_number("final, base classes", "text", STANDARD, FINAL + "-base"),
            check_number("final", "text", STANDARD, FINAL),
        ),
    ),
    Claim(
        "3.4, figure 3",
        "There it knows the most recent classes only: at the end, it is better on later than on base classes.",
        (check_lean("later − base classes", "text", STANDARD, FINAL, new=True),),
    ),
    Claim(
        "3.4, figure 3",
        "With Balanced it falls from 81.16 to 79.44 only, but reaches 4.56 on the later classes, and ends at 42.00.",
        (
            check_number("after the base step", "text", BALANCED, "imagenet-subset-base-step"),
            check_number("final, base classes", "text", BALANCED, FINAL + "-base"),
            check_number("final, later classes", "text", BALANCED, FINAL + "-new"),
            check_number("final", "text", BALANCED, FINAL),
        ),
    ),
    Claim(
        "3.4, figure 3",
        "The two end at similar accuracies.",
        (
            Check(
                "Balanced − standard",
                subtract(("text", BALANCED, FINAL), ("text", STANDARD, FINAL)),
                SIMILAR,
            ),
        ),
    ),
    Claim(
        "4.1.2",
        "IL-Baseline without a remedy is the lowest of the authors' own rows.",
        tuple(Check(f"{name_setting(c)}: the next row − IL-Baseline", compare_lowest(c)) for c in ALL),
    ),
    Claim(
        "4.1.2",
        "NCM and SLDA, trained in the base step only, are competitive: similar to SPB.",
        tuple(check for row in ("NCM", "SLDA") for check in compare("table3", row, "SPB", FEW_STEPS[:-1], SIMILAR)),
    ),
)
