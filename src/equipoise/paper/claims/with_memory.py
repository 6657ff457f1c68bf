"""What the paper says in section 4.2.1, with memory: tables 1 and 2, in our words."""

from __future__ import annotations

from .checks import (
    ALL,
    CIFAR,
    FEW_STEPS,
    IL,
    IL_BALANCED,
    IL_META,
    IMAGENET,
    LUCIR_BALANCED,
    PODNET_BALANCED,
    SUBSET,
    TOPS,
    check_lead,
    check_number,
    compare,
    name_setting,
    need_more,
    subtract,
)
from .judge import NUMBER, PERCENT, SIMILAR, Check, Claim, Read, Value

EQUAL_LUCIR, EQUAL_BALANCED = "LUCIR, ten equal steps", "LUCIR, Balanced, ten equal steps"
UNTUNED = "LUCIR without fine-tuning, ten equal steps"
TWENTY_FIVE = (CIFAR[-1], SUBSET[-1])


def compare_early(column: str) -> Value:
    """Meta minus Balanced over the first steps after the base step."""
    return subtract(("table1", IL_META, column, "first steps"), ("table1", IL_BALANCED, column, "first steps"))


def compare_gains(read: Read) -> float:
    """The smaller gain of Meta over Balanced on CIFAR-100 in 5 and 10 steps, minus the largest elsewhere."""
    gains = {c: read("table1", IL_META, c) - read("table1", IL_BALANCED, c) for c in ALL}
    return min(gains[c] for c in CIFAR[:2]) - max(gains[c] for c in ALL if c not in CIFAR[:2])


def compare_anytime(finetuned: str, balanced: str) -> tuple[Check, ...]:
    """Checks that one needs its fine-tuning, and that the other, which has none, is better before."""

    def place(row: str, metric: str) -> tuple[str, str, str]:
        return "anytime", row, f"cifar100-{metric}"

    ends, within = "training-ends", "within-steps"
    return (
        Check(f"{finetuned}, after − before it", subtract(place(finetuned, "after-steps"), place(finetuned, ends))),
        Check(f"{balanced} − {finetuned}, before it", subtract(place(balanced, ends), place(finetuned, ends))),
        Check(f"{balanced} − {finetuned}, within steps", subtract(place(balanced, within), place(finetuned, within))),
    )


HALF = (
    Claim(
        "4.2.1, table 1",
        "Balanced instead of the standard loss is a large gain for IL-Baseline on every data set, in every setting.",
        compare("table1", IL_BALANCED, IL, ALL),
    ),
    Claim(
        "1, 4.2.1",
        "Meta improves on Balanced in some settings.",
        compare("table1", IL_META, IL_BALANCED, ALL),
        some=True,
    ),
    Claim(
        "4.2.1, table 1",
        "The gain of Meta is largest on CIFAR-100 in 5 and 10 steps.",
        (Check("the smaller of these − the largest elsewhere", compare_gains),),
    ),
    Claim(
        "4.2.1, table 1",
        "On ImageNet and its subset, in 5 and 10 steps, Meta has no significant advantage over Balanced.",
        compare("table1", IL_META, IL_BALANCED, [c for c in FEW_STEPS if c not in CIFAR], SIMILAR),
    ),
    Claim(
        "4.2.1, table 1",
        "There, Meta is worse than Balanced in some cases.",
        compare("table1", IL_BALANCED, IL_META, [c for c in FEW_STEPS if c not in CIFAR]),
        some=True,
    ),
    Claim(
        "4.2.1",
        "In 25 steps, Meta is better than Balanced in the first few steps after the base step (here: three).",
        tuple(Check(f"{name_setting(c)}: Meta − Balanced", compare_early(c)) for c in TWENTY_FIVE),
    ),
    Claim(
        "4.2.1, table 1",
        "In 25 steps, Meta has a lower average than Balanced.",
        compare("table1", IL_BALANCED, IL_META, TWENTY_FIVE),
    ),
    Claim(
        "4.2.1, table 1",
        "IL-Baseline with Balanced is better than BiC.",
        compare("table1", IL_BALANCED, "BiC", ALL),
    ),
    Claim(
        "4.2.1, table 1",
        "IL-Baseline with Balanced is similar to LUCIR.",
        compare("table1", IL_BALANCED, "LUCIR", ALL, SIMILAR),
    ),
    Claim(
        "4.2.1, table 1",
        "Balanced improves LUCIR on every data set, in every setting, by 0.93 to 2.81 (2.82 in the table).",
        compare("table1", LUCIR_BALANCED, "LUCIR", ALL, NUMBER),
    ),
    Claim(
        "4.2.1, table 1",
        "Balanced improves PODNet on every data set, in every setting, by 1.11 to 6.79 (ImageNet, 5 steps: 4.47).",
        compare("table1", PODNET_BALANCED, "PODNet", ALL, NUMBER),
    ),
    Claim(
        "4.2.1",
        "PODNet with Balanced ends at 64.40 on ImageNet in 5 steps.",
        (check_number("final", "text", "PODNet, Balanced, 5 steps, 20 kept", "imagenet-final"),),
    ),
    Claim(
        "4.2.1",
        "That is about 6 points below a model trained on the whole data set at once.",
        (
            Check(
                "joint training − PODNet, Balanced",
                subtract(
                    ("text", "joint training, 5 steps", "imagenet-final"),
                    ("text", "PODNet, Balanced, 5 steps, 20 kept", "imagenet-final"),
                ),
                NUMBER,
                paper=6.0,
            ),
        ),
    ),
    Claim(
        "1, 4.2.1",
        "Balanced does without the fine-tuning after each step, so that training takes less time.",
        (
            Check(
                "PODNet over PODNet, Balanced: seconds", need_more("PODNet", PODNET_BALANCED, "seconds"), form=PERCENT
            ),
        ),
    ),
    Claim(
        "4.2.1",
        "Without fine-tuning, one can predict at any time during the training.",
        (
            *compare_anytime("PODNet", PODNET_BALANCED),
            *compare_anytime(f"{IL}, balanced finetuning", IL_BALANCED),
        ),
    ),
    Claim(
        "table 1",
        "PODNet with Balanced is the best row on CIFAR-100 and on ImageNet.",
        check_lead("table1", PODNET_BALANCED, (*CIFAR, *IMAGENET)),
    ),
    Claim(
        "table 1",
        "On ImageNet-Subset in 10 and 25 steps, only one row is above it.",
        check_lead("table1", PODNET_BALANCED, SUBSET[1:], place=2),
    ),
)

TEN_EQUAL = (
    Claim(
        "4.2.1, table 2",
        "In ten equal steps of ImageNet, IL-Baseline rises from 46.65 to 64.15, and in the top 5 from 68.74 to 85.65.",
        tuple(check_number(f"{name_setting(c)}: {row}", "table2", row, c) for c in TOPS for row in (IL, IL_BALANCED)),
    ),
    Claim(
        "4.2.1, table 2",
        "There, IL-Baseline with Balanced is better than BiC.",
        compare("table2", IL_BALANCED, "BiC", TOPS[1:]),
    ),
    Claim(
        "4.2.1, table 2",
        "There, it is competitive with SS-IL.",
        compare("table2", IL_BALANCED, "SS-IL", TOPS, SIMILAR),
    ),
    Claim(
        "4.2.1, table 2",
        "There, Meta does not improve on Balanced.",
        compare("table2", IL_BALANCED, IL_META, TOPS),
    ),
    Claim(
        "4.2.1, table 2",
        "There, Balanced improves LUCIR and PODNet.",
        compare("table2", LUCIR_BALANCED, "LUCIR", TOPS) + compare("table2", PODNET_BALANCED, "PODNet", TOPS),
    ),
    Claim(
        "4.2.1, table 2",
        "There, the average of LUCIR differs little with and without Balanced.",
        compare("table2", LUCIR_BALANCED, "LUCIR", TOPS[:1], SIMILAR),
    ),
    Claim(
        "4.2.1",
        "There, LUCIR ends at 51.41 with Balanced, which is significantly higher than 48.30 without.",
        (
            check_number("with Balanced", "text", EQUAL_BALANCED, "imagenet-final"),
            check_number("without", "text", EQUAL_LUCIR, "imagenet-final"),
            Check(
                "with − without",
                subtract(("text", EQUAL_BALANCED, "imagenet-final"), ("text", EQUAL_LUCIR, "imagenet-final")),
            ),
        ),
    ),
    Claim(
        "4.2.1",
        "There, LUCIR without its fine-tuning drops to an average of 56.41, and ends at 40.44.",
        (
            check_number("average", "text", UNTUNED, "imagenet-average"),
            check_number("final", "text", UNTUNED, "imagenet-final"),
            Check("average, with − without", subtract(("table2", "LUCIR", TOPS[0]), ("text", UNTUNED, TOPS[0]))),
            Check(
                "final, with − without",
                subtract(("text", EQUAL_LUCIR, "imagenet-final"), ("text", UNTUNED, "imagenet-final")),
            ),
        ),
    ),
)
