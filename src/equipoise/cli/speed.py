"""Measures how fast this machine trains: with a loop as in public code bases, and with ours on each engine.

Every row trains ResNet-32 on images of CIFAR's shape, the whole step included: batches, augmentation, net, loss,
backward pass and SGD.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from ..data.augment import Crop
from ..data.images import Images
from ..data.randomness import generator
from ..engine.cuda_graph import ENGINES, Engine
from ..engine.device import use_device
from ..engine.train import Callbacks, Conditions, Epoch, Position, fit
from ..errors import RunError
from ..learner.state import new_net, place
from ..learner.step import embed
from ..losses import distillation
from ..method import Method
from ..methods.il_baseline import ILBaseline
from ..nets import Net
from ..remedies import Balanced
from ..runs.environment import count_cores
from ..step import Recipe, Shape, Stage, Step

SHAPE = (3, 32, 32)
OLD, ALL = 50, 60
MEAN = torch.tensor([0.5071, 0.4866, 0.4409]) * 255
STD = torch.tensor([0.2673, 0.2564, 0.2762]) * 255


@dataclass(frozen=True)
class Row:
    """A way to train: as the public code bases do, or ours by engine; `packed` processes at once."""

    engine: Engine | None
    teacher: bool
    packed: int = 1

    def __str__(self) -> str:
        name = "DataLoader, PIL, eager, fp32" if self.engine is None else f"ours, {self.engine}"
        return name + (f", {self.packed} at once" if self.packed > 1 else "")


class Setting(NamedTuple):
    """Settings common to all rows."""

    device: torch.device
    bf16: bool
    """of ours"""
    images: int
    """in an epoch"""
    batch: int


def list_rows(device: torch.device, packed: Sequence[int]) -> list[Row]:
    """The rows that a device can have."""
    engines: Sequence[Engine] = tuple(reversed(ENGINES)) if device.type == "cuda" else ("eager",)
    rows = []
    for teacher in (False, True):
        rows += [Row(None, teacher), *(Row(engine, teacher) for engine in engines)]
        rows += [Row(engines[-1], teacher, k) for k in packed]
    return rows


def make_images(images: int) -> Images:
    """Random images with random labels; speed does not depend on what they show."""
    gen = generator(0, "bench")
    x = torch.randint(0, 256, (images, *SHAPE), dtype=torch.uint8, generator=gen)
    return Images(x, torch.randint(0, ALL, (images,), generator=gen))


def make_net(sizes: Sequence[int], device: torch.device, method: Method = ILBaseline(), shape: Shape = SHAPE) -> Net:
    """A method's net for images of this shape, by default ResNet-32 with a linear head, after steps of these sizes."""
    net, gen = new_net(method, shape, MEAN, STD, generator(0, "net")), generator(0, "rows")
    for size in sizes:
        net.head.widen(size, gen)
    return place(net, device)


class Stretch(NamedTuple):
    """Training between two moments of the machine's clock, which all its processes share."""

    images: int
    began: float
    ended: float


def combine(stretches: Sequence[Stretch]) -> float:
    """Images a second of all of them, from when the first began to when the last ended."""
    seconds = max(s.ended for s in stretches) - min(s.began for s in stretches)
    return sum(s.images for s in stretches) / seconds


def run_our_loop(row: Row, on: Setting, start: Barrier | None = None) -> Stretch:
    """Two epochs of the product's own loop, after one to warm up."""
    assert row.engine is not None
    method, stage = ILBaseline(Balanced()), Stage("train", Recipe(epochs=3, batch=on.batch))
    s = make_step(method, make_images(on.images).to(on.device), row.teacher)
    epochs: list[Epoch] = []
    times: list[float] = []

    def note(e: Epoch) -> None:
        if e.epoch == 1 and start is not None:
            start.wait()
        epochs.append(e)
        times.append(time.monotonic())

    with use_device(on.device):
        fit(method, s, stage, Position(), Conditions(0, Crop(), on.bf16, row.engine), Callbacks(note))
    seen = (now.images_per_second * (now.seconds - before.seconds) for before, now in pairwise(epochs))
    return Stretch(round(sum(seen)), times[0], times[-1])


def make_step(method: Method, data: Images, taught: bool, shape: Shape = SHAPE) -> Step:
    """A step on these images: of ten new classes with a teacher of fifty, or the base step, of all sixty."""
    device, where = data.y.device, torch.arange(len(data), device=data.y.device)
    n = torch.bincount(data.y, minlength=ALL).float()
    sizes = (OLD, ALL - OLD) if taught else (ALL,)
    teacher = make_net(sizes[:1], device, method, shape).eval().requires_grad_(False) if taught else None
    s = Step(
        t=int(taught), sizes=sizes, shape=shape, n=n, lam=torch.ones_like(n), images=data, data=where,
        memory=where[:0], held=where[:0], where=where, net=make_net(sizes, device, method, shape), teacher=teacher,
        embed=partial(embed, data),
    )  # fmt: skip
    return replace(s, lam=method.lam(s))


class PerImage(Dataset[tuple[Tensor, int]]):
    """A data set as the public code bases have it: every image goes through PIL, by itself, in a worker process."""

    def __init__(self, images: Images) -> None:
        self.x = images.take_squares(torch.arange(len(images))).permute(0, 2, 3, 1).contiguous().numpy()
        self.y = images.y.tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        picture = ImageOps.expand(Image.fromarray(self.x[i]), 4)
        down, right, mirror = torch.randint(0, 9, (3,)).tolist()
        picture = picture.crop((right, down, right + 32, down + 32))
        if mirror % 2:
            picture = ImageOps.mirror(picture)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
        return (pixels - MEAN[:, None, None]) / STD[:, None, None], self.y[i]


def run_their_loop(row: Row, on: Setting) -> float:
    """Images a second of a DataLoader loop: worker processes, fp32, one kernel after the other."""
    net = make_net([ALL], on.device).train()
    teacher = make_net([OLD], on.device).eval() if row.teacher else None
    data, workers = PerImage(make_images(on.images)), min(8, count_cores())
    batches = DataLoader(data, on.batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True)
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=2e-4)
    for _ in range(2):  # the first to warm up
        began = time.perf_counter()
        for x, y in batches:
            x, y = x.to(on.device), y.to(on.device)
            z = compute_logits(net, x)
            loss = F.cross_entropy(z, y)
            if teacher is not None:
                with torch.no_grad():
                    z_old = compute_logits(teacher, x)
                loss = loss + distillation(z, z_old, 2.0)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            loss.item()  # they log it
    return len(batches) * on.batch / (time.perf_counter() - began)


def compute_logits(net: Net, x: Tensor) -> Tensor:
    """The logits of normalised images."""
    z: Tensor = net.head(*net.backbone(x))[0]
    return z


def work(row: Row, on: Setting, start: Barrier, out: Any) -> None:
    """One of several processes that train at once."""
    torch.set_num_threads(1)
    out.put(run_our_loop(row, on, start))


def measure(row: Row, on: Setting) -> float:
    """Images a second of a row, all its processes together."""
    if row.engine is None:
        return run_their_loop(row, on)
    if row.packed == 1:
        return combine([run_our_loop(row, on)])
    context = multiprocessing.get_context("spawn")
    start, out = context.Barrier(row.packed), context.Queue()
    processes = [context.Process(target=work, args=(row, on, start, out), daemon=True) for _ in range(row.packed)]
    for process in processes:
        process.start()
    stretches: list[Stretch] = []
    while len(stretches) < row.packed:
        try:
            stretches.append(out.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):  # its error is printed; the others would wait for it
                for process in processes:
                    process.terminate()
                raise RunError(f"a process of the row {row} died") from None
    for process in processes:
        process.join()
    return combine(stretches)


def count_work(
    device: torch.device, bf16: bool, method: Method = ILBaseline(), shape: Shape = SHAPE
) -> tuple[float, float]:
    """FLOPs, and the fewest bytes through memory, that training on one image takes.

    FLOPs: those of the forward pass, times three. Bytes: each convolution's output is written and read once going
    forward, and read twice, with its gradient written and read, going back.
    """
    net = make_net([ALL], device, method, shape).eval()
    outputs: list[int] = []
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            m.register_forward_hook(lambda _m, _x, y: outputs.append(y.numel()))
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, *shape, dtype=torch.uint8, device=device))
    size = 2 if bf16 else 4
    return 3.0 * counter.get_total_flops(), 6.0 * sum(outputs) * size


def measure_limits(device: torch.device, bf16: bool) -> tuple[float, float]:
    """What this machine reaches: FLOP/s of a large matrix product, and bytes/s of a large copy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count_cores())  # of the whole machine, as packed rows use it
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    source = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)

    def best(action: Any) -> float:
        times = []
        for _ in range(6):
            began = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    found = 2 * side**3 / best(lambda: a @ a), 2 * source.numel() * 4 / best(lambda: target.copy_(source))
    torch.set_num_threads(threads)
    return found
