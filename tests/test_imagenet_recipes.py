"""What methods are set to on ImageNet, number by number, and where each is said."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.data.datasets import COUNTS
from equipoise.method import Method
from equipoise.methods.bic import BiC
from equipoise.methods.dde import DDE
from equipoise.methods.eeil import EEIL
from equipoise.methods.geodl import GeoDL
from equipoise.methods.icarl import ICaRL
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.lucir import LUCIR
from equipoise.methods.lwf import LwF
from equipoise.methods.mnemonics import Mnemonics
from equipoise.methods.podnet import PODNet
from equipoise.methods.spb import SPB
from equipoise.methods.ss_il import SSIL
from equipoise.methods.tpcil import TPCIL
from equipoise.nets.backbones import PODNetResNet18, ResNet18
from equipoise.paper.cells import make_run
from equipoise.remedies import Balanced, Relaxed
from equipoise.runs.plan import compute_sizes, plan_steps, resolve
from equipoise.runs.settings import Protocol
from equipoise.step import EVERYTHING, ROWS, Stage

BOTH, SUBSET, WHOLE = ("imagenet-subset", "imagenet"), ("imagenet-subset",), ("imagenet",)
PAPER, TEXT = "the paper, on training", "the paper's text"
LUCIR_CODE = "LUCIR's script for ImageNet"
LUCIR_WHOLE = "LUCIR's script that fine-tunes, for the whole of ImageNet"
PODNET_CODE, PODNET_WHOLE = "PODNet's options for 100 classes", "PODNet's options for 1,000 classes"
AS_LUCIR = {"epochs": 90, "lr": 0.1, "falls": (30, 60), "factor": 0.1, "batch": 128, "weight_decay": 1e-4}

ORIGINALS: list[tuple[str, Method, tuple[str, ...], str, dict[str, Any]]] = [
    (
        f"{PAPER}: 100 epochs, 0.1 divided by 10 after 30, 60, 80 and 90, batches of 256, 1e-4",
        ILBaseline(), BOTH, "train",
        {"epochs": 100, "lr": 0.1, "falls": (30, 60, 80, 90), "factor": 0.1, "batch": 256, "weight_decay": 1e-4},
    ),
    ("the paper says SGD with momentum, and 0.9 is assumed", ILBaseline(), BOTH, "train", {"momentum": 0.9}),
    ("the paper: temperature 2", ILBaseline(), BOTH, "", {"T": 2.0}),
    (f"{LUCIR_CODE}: 90 epochs, 0.1, times 0.1 at 30 and 60, 128, 1e-4", LUCIR(), BOTH, "train", AS_LUCIR),
    (f"{LUCIR_CODE}: lambda 10, K 2, margin 0.5", LUCIR(), BOTH, "", {"lambda_base": 10.0, "K": 2, "m": 0.5}),
    (f"{LUCIR_CODE}: no fine-tuning for the subset", LUCIR(), SUBSET, "refit", {}),
    (
        f"{LUCIR_WHOLE}: 20 epochs at 0.01, times 0.1 at 10, rows only, batch norms at rest",
        LUCIR(), WHOLE, "refit",
        {"epochs": 20, "lr": 0.01, "falls": (10,), "factor": 0.1, "batch": 128, "weight_decay": 1e-4,
         "batch_norm": "eval", "groups": ROWS},
    ),
    (f"{TEXT}: a remedy replaces the fine-tuning", LUCIR(Balanced()), WHOLE, "refit", {}),
    (
        f"{PODNET_CODE}: 90 epochs, 0.05 with a cosine to 0, batches of 64, 5e-4, gradients clamped at 5",
        PODNet(), SUBSET, "train",
        {"epochs": 90, "lr": 0.05, "schedule": "cosine", "batch": 64, "weight_decay": 5e-4, "clamp": 5.0},
    ),
    (
        f"{PODNET_WHOLE}: the same with 1e-4, since a late correction",
        PODNet(), WHOLE, "train",
        {"epochs": 90, "lr": 0.05, "schedule": "cosine", "batch": 64, "weight_decay": 1e-4, "clamp": 5.0},
    ),
    (f"{PODNET_CODE}: 8 for stage outputs, 10 for the embedding", PODNet(), BOTH, "",
     {"lambda_c": 8.0, "lambda_f": 10.0}),
    (
        f"{PODNET_CODE}: fine-tuned for 20 epochs at 0.01, rows only, batch norms go on",
        PODNet(), SUBSET, "refit",
        {"epochs": 20, "lr": 0.01, "falls": (), "batch": 64, "weight_decay": 5e-4, "batch_norm": "train",
         "groups": ROWS},
    ),
    (f"{PODNET_WHOLE}: fine-tuned with 1e-4", PODNet(), WHOLE, "refit", {"epochs": 20, "weight_decay": 1e-4}),
    ("LUCIR's code for iCaRL is its own recipe", ICaRL(), BOTH, "train", AS_LUCIR),
    ("LUCIR's code has no mirrored images in the means for ImageNet", ICaRL(), BOTH, "", {"mirror": False}),
    ("Mnemonics' hosts have LUCIR's recipe", LwF(), BOTH, "train", AS_LUCIR),
    (
        "EEIL: 40 epochs at 0.1, a tenth after every 10, batches of 128, 1e-4",
        EEIL(), BOTH, "train",
        {"epochs": 40, "lr": 0.1, "falls": (10, 20, 30), "factor": 0.1, "batch": 128, "weight_decay": 1e-4},
    ),
    (
        "EEIL: fine-tuned for 30 epochs at 0.01, a tenth after every 10, all weights",
        EEIL(), BOTH, "refit",
        {"epochs": 30, "lr": 0.01, "falls": (10, 20), "factor": 0.1, "batch": 128, "weight_decay": 1e-4,
         "groups": EVERYTHING},
    ),
    (
        "BiC's code: 100 epochs, 0.1 for batches of 256, times 0.1 at 30, 60, 80 and 90, 1e-4",
        BiC(), BOTH, "train",
        {"epochs": 100, "lr": 0.1, "falls": (30, 60, 80, 90), "factor": 0.1, "batch": 256, "weight_decay": 1e-4},
    ),
    ("BiC's code: 200 epochs for the bias, at the same fractions", BiC(), BOTH, "bias",
     {"epochs": 200, "lr": 0.1, "falls": (60, 120, 160, 180), "batch": 256}),
    (
        "SS-IL's code: 100 epochs, 0.1 / (t + 1), times 0.1 at 40 and 80, 128 new and 32 old images, 1e-4",
        SSIL(), BOTH, "train",
        {"epochs": 100, "lr": 0.05, "falls": (40, 80), "factor": 0.1, "batch": 160, "weight_decay": 1e-4},
    ),
    ("DDE's commands: LUCIR's recipe", DDE(), BOTH, "train", AS_LUCIR),
    ("DDE's command for the subset: ten neighbours", DDE(), SUBSET, "", {"neighbours": 10}),
    ("DDE's command for the subset: lambda 5, where LUCIR's has 10", DDE(), SUBSET, "host", {"lambda_base": 5.0}),
    ("DDE's command for the whole: one neighbour", DDE(), WHOLE, "", {"neighbours": 1}),
    ("DDE's command for the whole: lambda 10", DDE(), WHOLE, "host", {"lambda_base": 10.0}),
    ("DDE's command for the whole: LUCIR's fine-tuning", DDE(), WHOLE, "refit", {"epochs": 20, "lr": 0.01}),
    ("DDE around PODNet is not published: PODNet's own", DDE(host=PODNet()), BOTH, "host", {"lambda_c": 8.0}),
    ("GeoDL's README: lambda 10, and LUCIR's ranking left out", GeoDL(), SUBSET, "", {"lambda_base": 10.0, "K": 0}),
    ("GeoDL trains as LUCIR", GeoDL(), SUBSET, "train", AS_LUCIR),
    ("TPCIL's later code: 15 for the subset", TPCIL(), BOTH, "", {"lambda_tpl": 15.0, "anchors": 100}),
    ("TPCIL trains as LUCIR", TPCIL(), BOTH, "train", AS_LUCIR),
    (
        "SPB: later steps of 50 epochs in batches of 64, 0.01 for the classifier, times 0.1 at 30, 1e-4",
        SPB(), BOTH, "train",
        {"epochs": 50, "lr": 0.01, "falls": (30,), "factor": 0.1, "batch": 64, "weight_decay": 1e-4},
    ),
    ("SPB: a base step of 90 epochs in batches of 128, 0.1, times 0.1 at 30 and 60", SPB(), BOTH, "base", AS_LUCIR),
    ("Mnemonics' evaluation: LUCIR's recipe", Mnemonics(host=LUCIR()), BOTH, "train", AS_LUCIR),
]  # fmt: skip
"""where it is said, the method, the data sets, which training or settings, and what is said of them"""


@pytest.mark.parametrize(
    ("source", "method", "datasets", "part", "said"), ORIGINALS, ids=[line[0] for line in ORIGINALS]
)
def test_methods_are_set_on_imagenet_as_their_sources_say(
    source: str, method: Method, datasets: tuple[str, ...], part: str, said: dict[str, Any]
) -> None:
    for dataset in datasets:
        run = make_run(method, dataset, Protocol(steps=5, memory=method.default_memory))
        run = resolve(run, len(COUNTS[dataset]), run.data.shape)
        sizes = compute_sizes(run, len(COUNTS[dataset]))
        base, later, *_ = plan_steps(run, sizes, COUNTS[dataset], run.data.shape)
        if part in ("", "host"):
            owner = run.method if part == "" else run.method.host  # type: ignore[attr-defined]
            assert {name: getattr(owner, name) for name in said} == said, source
            continue
        stages = run.method.stages(base if part == "base" else later)
        found = [one for one in stages if isinstance(one, Stage) and one.name == ("train" if part == "base" else part)]
        assert len(found) == (1 if said else 0), source
        for stage in found:
            found_here = describe(stage)
            assert {name: found_here[name] for name in said} == said, source


def describe(stage: Stage) -> dict[str, Any]:
    """A training as it is: after which epochs the learning rate falls, and to which part, and all that it has."""
    recipe = stage.recipe
    rates = [recipe.lr_at(k) for k in range(recipe.epochs)]
    falls = tuple(k for k in range(1, recipe.epochs) if rates[k] < rates[k - 1])
    factor = rates[falls[0]] / rates[0] if falls else 1.0
    return {**vars(stage), **vars(recipe), "falls": falls, "factor": round(factor, 9)}


def test_nets_and_crops_are_those_for_large_images() -> None:
    """PODNet's first convolution has no stride; LUCIR's last block no ReLU."""
    shape = (3, 224, 224)
    for method, kind, conv, relu in (
        (ILBaseline(), ResNet18, (7, 2), True),
        (LUCIR(), ResNet18, (7, 2), False),
        (PODNet(), PODNetResNet18, (3, 1), False),
    ):
        net = method.backbone(shape)
        assert type(net) is kind and net.pools and net.width == 512 and len(net.stages) == 4
        assert (net.conv.kernel_size[0], net.conv.stride[0]) == conv
        assert net.stages[3][1].last_relu is relu  # type: ignore[index, union-attr]


def test_epsilon_is_that_of_the_paper() -> None:
    """0.2% of 1,300 images: 2.6."""
    assert Relaxed().value(1300) == pytest.approx(2.6) == Relaxed("0.2%").value(1300.0)
