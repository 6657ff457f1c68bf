"""How cost grows with classes and images: what `docs/scaling.md` says of this machine, and its arithmetic.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --only herding --classes 1000

Every time is that of one core (`time.process_time`), so that others on the machine count less: the median of some calls
after one to warm up; of herding and evaluation, one call. Features are random, of 512 numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from equipoise.cli.speed import make_net
from equipoise.data.memory import choose_by_herding
from equipoise.data.randomness import generator
from equipoise.engine.train import Position
from equipoise.learner.state import Live, State, pack
from equipoise.losses import distillation, weighted_cross_entropy
from equipoise.method import Method
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.podnet import PODNet
from equipoise.nets.heads import ProxyHead
from equipoise.runs.estimate import measure_process_memory
from equipoise.runs.metrics import confusion_matrix, summarise

WIDTH, BATCH, SHAPE = 512, 128, (3, 224, 224)
CLASSES = (100, 1_000, 10_000, 21_841)
CPU = torch.device("cpu")


def time_call(call: Callable[[], object], times: int = 5) -> float:
    """Seconds of a call: the median, after one to warm up."""
    found = []
    for _ in range(times + 1):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return sorted(found[1:])[times // 2]


def measure_head(method: Method, classes: int) -> None:
    """Head, loss, distillation from half of the classes, and their backward pass, for a batch of features."""
    gen = generator(0, "heads")
    h, y = torch.randn(BATCH, WIDTH, generator=gen), torch.randint(0, 100, (BATCH,), generator=gen)
    head, teacher, lam = method.head(WIDTH), method.head(WIDTH), torch.ones(classes)
    for part in (head, teacher):
        part.widen(classes // 2, gen)
    head.widen(classes - classes // 2, gen)
    weights = list(head.parameters())

    def step() -> None:
        z = head(h, [])[0]
        with torch.no_grad():
            z_old = teacher(h, [])[0]
        loss = weighted_cross_entropy(z, y, lam) + distillation(z, z_old, 2.0)
        torch.autograd.grad(loss, weights)

    size = sum(w.numel() for w in weights) * 4
    print(
        f"{method.name}, {classes:,} classes: {1e3 * time_call(step, 3):.1f} ms a batch of {BATCH}, "
        f"{size / 2**20:,.1f} MiB of weights",
        flush=True,
    )


def measure_herding(count: int, classes: int, keep: int) -> None:
    """The choice of exemplars of classes of so many images each."""
    h = torch.randn(classes * count, WIDTH, generator=generator(0, "herding"))
    y = torch.arange(classes).repeat_interleave(count)
    choose_by_herding(h[:count], y[:count], keep)  # to warm up
    before = measure_process_memory()
    began = time.process_time()
    choose_by_herding(h, y, keep)
    seconds = time.process_time() - began
    print(
        f"herding {keep} of {count:,} images in each of {classes:,} classes: {seconds:.1f} s, "
        f"{1e3 * seconds / classes:.0f} ms a class; features are {h.numel() * 4 / 2**20:,.0f} MiB, "
        f"and {measure_process_memory() - before:,.0f} MiB were needed besides",
        flush=True,
    )


def measure_proxies(count: int) -> None:
    """The first rows of a new class as PODNet finds them: a k-means, on the CPU."""
    gen, head = generator(0, "proxies"), ProxyHead(WIDTH)
    head.widen(1, gen)
    h = torch.randn(count, WIDTH, generator=gen)
    seconds = time_call(lambda: head.directions(h, torch.zeros(count).long(), gen), 3)
    print(f"first rows of a class of PODNet, from {count:,} images: {1e3 * seconds:.0f} ms", flush=True)


def measure_checkpoint(method: Method, classes: int) -> None:
    """A step under way, as it is saved: the net before, the net, momentum, and 20 exemplars of each class."""
    size = sum(t.numel() * t.element_size() for t in make_checkpoint(method, classes).values())
    print(
        f"checkpoint of {method.name}, {classes:,} classes: {size / 2**20:,.0f} MiB; exemplars as pixels would be "
        f"{20 * classes * 261_749 / 2**30:,.1f} GiB more",
        flush=True,
    )


def make_checkpoint(method: Method, classes: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint, half of whose classes are old."""
    old, net = (make_net(sizes, CPU, method, SHAPE) for sizes in ([classes // 2], [classes // 2, classes // 2]))
    kept = torch.arange(20 * classes)
    state = State(old, list(range(classes // 2)), (classes // 2,), SHAPE, kept=kept)
    coming = replace(state, net=net, classes=list(range(classes)), sizes=(classes // 2,) * 2)
    momentum = {name: torch.zeros_like(w) for name, w in net.named_parameters()}
    return pack(state, Live(coming, Position(momentum=momentum), ""))[0]


def measure_evaluation(classes: int) -> None:
    """Accuracies and the confusion matrix from logits of 50 test images of each class, at most 50,000."""
    gen, count = generator(0, "evaluation"), min(50 * classes, 50_000)
    z, y = torch.randn(count, classes, generator=gen), torch.randint(0, classes, (count,), generator=gen)
    accuracies = time_call(lambda: summarise(z, y, [classes // 2] * 2), 1)
    matrix = time_call(lambda: confusion_matrix(z, y, classes), 1)
    print(
        f"evaluation of {count:,} images, {classes:,} classes: accuracies {accuracies:.1f} s, the confusion matrix "
        f"{matrix:.2f} s; logits {z.numel() * 4 / 2**20:,.0f} MiB, the matrix {classes**2 * 8 / 2**20:,.1f} MiB",
        flush=True,
    )


def summarise_records() -> None:
    """What a later step of a recorded run on CIFAR-100 took beside its training, on the GPU: medians, in seconds."""
    parts = ("preparing", "evaluating", "saving")
    taken: dict[tuple[str, int], list[list[float]]] = {}
    for path in sorted(Path(__file__).parents[1].glob("results/cifar100/*/result.json")):
        record = json.loads(path.read_text())
        for step in record["steps"][1:]:
            named = [step[f"{part}_seconds"] for part in parts]
            training = step["training_seconds"] + step.get("refitting_seconds", 0.0)
            key = record["run"]["method"]["name"], len(record["steps"]) - 1
            taken.setdefault(key, []).append([*named, step["seconds"] - training - sum(named), training])
    for (name, steps), rows in sorted(taken.items()):
        medians = [f"{statistics.median(column):.2f}" for column in zip(*rows)]
        words = ", ".join(f"{part} {value}" for part, value in zip((*parts, "the rest", "training"), medians))
        print(f"{name} in {steps} steps, {len(rows)} steps: {words}")


def estimate_hours(
    classes: int, images: float, base: int, new: int, speeds: tuple[float, float]
) -> tuple[float, float]:
    """Hours of the base step and of all: 90 epochs, 20 exemplars a class, by images/s without and with a teacher."""
    first = seconds = base * images * 90 / speeds[0]
    for known in range(base, classes, new):
        seconds += (min(new, classes - known) * images + 20 * known) * 90 / speeds[1]
    return first / 3600, seconds / 3600


def print_arithmetic() -> None:
    """Hours of training by the speeds asked for on one H200."""
    data = {
        "ImageNet-Subset, 50 + 5 of 10": (100, 1294.0, 50, 10),
        "ImageNet, 500 + 5 of 100": (1_000, 1281.2, 500, 100),
        "ImageNet, 500 + 10 of 50": (1_000, 1281.2, 500, 50),
        "ImageNet, 10 of 100": (1_000, 1281.2, 100, 100),
        "ImageNet-21k, 10,921 + 10 of 1,092": (21_841, 650.0, 10_921, 1_092),
    }
    speeds = {"ResNet-18": ((16e3, 12e3), (22e3, 16e3)), "PODNet's": ((4e3, 3e3), (6e3, 4.5e3))}
    for (name, protocol), (net, both) in product(data.items(), speeds.items()):
        base, total = estimate_hours(*protocol, both[0])
        least = estimate_hours(*protocol, both[1])[1]
        print(f"{name}, {net}: base step {base:.1f} h, all {total:.1f} h; at the speeds to reach for {least:.1f} h")


def main() -> None:
    """Measure what the command line names."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("heads", "herding", "proxies", "checkpoints", "evaluation", "records", "arithmetic")
    flags.add_argument("--only", choices=parts, nargs="*", default=parts)
    flags.add_argument("--classes", type=int, default=5, help="that are herded")
    flags.add_argument("--images", type=int, nargs="*", default=[500, 1_300, 5_000], help="of each of them")
    flags.add_argument("--keep", type=int, default=20)
    f = flags.parse_args()
    methods = (ILBaseline(), PODNet())
    for name in f.only:
        if name == "heads":
            for method, classes in product(methods, CLASSES):
                measure_head(method, classes)
        elif name == "herding":
            for count in f.images:
                measure_herding(count, f.classes, f.keep)
        elif name == "proxies":
            for count in (500, 1_300):
                measure_proxies(count)
        elif name == "checkpoints":
            for method, classes in product(methods, CLASSES):
                measure_checkpoint(method, classes)
        elif name == "evaluation":
            for classes in CLASSES[:3]:
                measure_evaluation(classes)
        elif name == "records":
            summarise_records()
        else:
            print_arithmetic()


if __name__ == "__main__":
    main()
