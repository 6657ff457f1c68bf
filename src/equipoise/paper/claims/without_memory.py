"""What the paper says in section 4.2.2, without memory: table 3, in our words."""

from __future__ import annotations

from .checks import (
    CIFAR,
    FEW_STEPS,
    IMAGENET,
    LUCIR_BALANCED,
    LUCIR_RELAXED,
    PODNET_BALANCED,
    PODNET_RELAXED,
    check_lead,
    check_lean,
    check_number,
    compare,
    name_setting,
)
from .judge import SIMILAR, Claim

SMALLER = [column for column in FEW_STEPS if column not in IMAGENET]
"""the columns of CIFAR-100 and ImageNet-Subset"""

NO_MEMORY = (
    Claim(
        "4.2.2, table 3",
        "Balanced improves LUCIR and PODNet in some cases.",
        compare("table3", LUCIR_BALANCED, "LUCIR", FEW_STEPS) + compare("table3", PODNET_BALANCED, "PODNet", FEW_STEPS),
        some=True,
    ),
    Claim(
        "3.4, 4.2.2",
        "But it favours the old classes: both end better on base classes than on later ones.",
        tuple(
            check_lean(f"{name_setting(c)}: {row}, base − later classes", "table3", row, c)
            for row in (LUCIR_BALANCED, PODNET_BALANCED)
            for c in FEW_STEPS
        ),
    ),
    Claim(
        "1, table 3",
        "Relaxed improves on Balanced.",
        compare("table3", LUCIR_RELAXED, LUCIR_BALANCED, FEW_STEPS)
        + compare("table3", PODNET_RELAXED, PODNET_BALANCED, FEW_STEPS),
    ),
    Claim(
        "4.2.2, table 3",
        "LUCIR with Relaxed is competitive with DDE.",
        compare("table3", LUCIR_RELAXED, "DDE", SMALLER, SIMILAR),
    ),
    Claim(
        "4.2.2, table 3",
        "PODNet with Relaxed is better than SPB.",
        compare("table3", PODNET_RELAXED, "SPB", FEW_STEPS[:-1]),
    ),
    Claim(
        "4.2.2, table 3",
        "PODNet with Relaxed is similar to SPB-M on CIFAR-100 and ImageNet-Subset.",
        compare("table3", PODNET_RELAXED, "SPB-M", SMALLER, SIMILAR),
    ),
    Claim(
        "1, 4.2.2",
        "PODNet with Relaxed and no memory is comparable to PODNet with 20 images of every class.",
        compare("table3", PODNET_RELAXED, "PODNet", SMALLER, SIMILAR, of="table1"),
    ),
    Claim(
        "4.2.2",
        "On ImageNet, LUCIR and PODNet with Relaxed and no memory are better than both with 20 images of every class.",
        compare("table3", LUCIR_RELAXED, "LUCIR", IMAGENET, of="table1")
        + compare("table3", PODNET_RELAXED, "PODNet", IMAGENET, of="table1"),
    ),
    Claim(
        "4.2.2",
        "With another ε, PODNet with Relaxed reaches 74.40 on ImageNet-Subset in 5 steps.",
        (check_number("average, ε 1%", "text", "PODNet, Relaxed ε 1%, 5 steps, no memory", "imagenet-subset-average"),),
    ),
    Claim(
        "1, table 3",
        "PODNet with Relaxed is the best row, but for SPB-M on CIFAR-100 in 10 steps, where only that is above it.",
        check_lead("table3", PODNET_RELAXED, [c for c in FEW_STEPS if c != CIFAR[1]])
        + check_lead("table3", PODNET_RELAXED, CIFAR[1:2], place=2),
    ),
    Claim(
        "table 3",
        "On ImageNet, only that row is above LUCIR with Relaxed.",
        check_lead("table3", LUCIR_RELAXED, IMAGENET, place=2),
    ),
)
