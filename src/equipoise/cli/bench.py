"""Images a second on whatever machine this is: a loop as the public code bases write it, and ours in each form.

Every row trains ResNet-32 on images of CIFAR's shape, the whole step included: batches, augmentation, net, loss,
backward pass and SGD. Rows are compared within one call, on one machine.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from ..data.augment import Crop
from ..data.images import Images
from ..engine.cuda_graph import ENGINES, Engine
from ..engine.device import working_on
from ..engine.train import Epoch, Position, fit
from ..errors import RunError
from ..learner.state import new_net, place
from ..losses import Balanced, distillation
from ..method import Recipe, Step
from ..methods.il_baseline import ILBaseline
from ..nets import Net
from ..randomness import generator
from ..runs.environment import cores, hardware, versions
from ..runs.mps import multi_process_service

SHAPE = (3, 32, 32)
OLD, ALL = 50, 60
MEAN = torch.tensor([0.5071, 0.4866, 0.4409]) * 255
STD = torch.tensor([0.2673, 0.2564, 0.2762]) * 255


@dataclass(frozen=True)
class Row:
    """A way to train: `loader` as the public code bases do, or ours by engine; `packed` processes at once."""

    engine: Engine | None
    teacher: bool
    packed: int = 1

    def __str__(self) -> str:
        name = "DataLoader, PIL, eager, fp32" if self.engine is None else f"ours, {self.engine}"
        return name + (f", {self.packed} at once" if self.packed > 1 else "")


def synthetic(images: int) -> Images:
    """Random images with random labels; speed does not depend on what they show."""
    gen = generator(0, "bench")
    x = torch.randint(0, 256, (images, *SHAPE), dtype=torch.uint8, generator=gen)
    return Images(x, torch.randint(0, ALL, (images,), generator=gen))


def net_of(classes: int, device: torch.device) -> Net:
    """ResNet-32 with a linear head."""
    net = new_net(ILBaseline(), SHAPE, MEAN, STD, generator(0, "net"))
    net.head.widen(classes, generator(0, "rows"))
    return place(net, device)


class Stretch(NamedTuple):
    """Training between two moments of the machine's clock, which all its processes share."""

    images: int
    began: float
    ended: float


def combined(stretches: Sequence[Stretch]) -> float:
    """Images a second of all of them, from when the first began to when the last ended."""
    seconds = max(s.ended for s in stretches) - min(s.began for s in stretches)
    return sum(s.images for s in stretches) / seconds


def ours(row: Row, images: int, batch: int, device: torch.device, bf16: bool, start: Barrier | None) -> Stretch:
    """Two epochs of the product's own loop, after one to warm up."""
    assert row.engine is not None
    data = synthetic(images).to(device)
    net, method = net_of(ALL, device), ILBaseline(Balanced())
    teacher = net_of(OLD, device).eval().requires_grad_(False) if row.teacher else None
    n = torch.bincount(data.y, minlength=ALL).float()
    past = torch.arange(ALL, device=device) < (OLD if row.teacher else 0)
    lam = method.loss.lam(n, past)
    s = Step(int(row.teacher), OLD if row.teacher else 0, (OLD, ALL - OLD), n, lam, data, None, net, teacher)
    momentum = {name: torch.zeros_like(w) for name, w in net.named_parameters()}
    epochs: list[Epoch] = []
    times: list[float] = []

    def note(e: Epoch) -> None:
        if e.epoch == 1 and start is not None:
            start.wait()
        epochs.append(e)
        times.append(time.monotonic())

    with working_on(device):
        recipe = Recipe(epochs=3, batch=batch)
        fit(method, s, recipe, Crop(), 0, bf16, Position(momentum), note, engine=row.engine)
    seen = (now.images_per_second * (now.seconds - before.seconds) for before, now in pairwise(epochs))
    return Stretch(round(sum(seen)), times[0], times[-1])


class PerImage(Dataset[tuple[Tensor, int]]):
    """A data set as the public code bases have it: every image goes through PIL, by itself, in a worker process."""

    def __init__(self, images: Images) -> None:
        self.x = images.x.permute(0, 2, 3, 1).contiguous().numpy()
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


def loader(row: Row, images: int, batch: int, device: torch.device) -> float:
    """Images a second of a DataLoader loop: worker processes, fp32, one kernel after the other."""

    class Plain(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.net.head(self.net.backbone(x)[0])[0]
            return z

    net = Plain(net_of(ALL, device)).train()
    teacher = Plain(net_of(OLD, device)).eval() if row.teacher else None
    workers = min(8, cores())
    batches = DataLoader(
        PerImage(synthetic(images)), batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True
    )
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=2e-4)
    for epoch in range(2):
        began, seen = time.perf_counter(), 0
        for x, y in batches:
            x, y = x.to(device), y.to(device)
            z = net(x)
            loss = F.cross_entropy(z, y)
            if teacher is not None:
                with torch.no_grad():
                    z_old = teacher(x)
                loss = loss + distillation(z, z_old, 2.0)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            loss.item()  # they log it
            seen += len(y)
        if epoch:
            return seen / (time.perf_counter() - began)
    raise AssertionError("unreachable")


def worker(row: Row, images: int, batch: int, device: str, bf16: bool, threads: int, start: Barrier, out: Any) -> None:
    """One of several processes that train at once."""
    torch.set_num_threads(threads)
    out.put(ours(row, images, batch, torch.device(device), bf16, start))


def measure(row: Row, images: int, batch: int, device: torch.device, bf16: bool) -> float:
    """Images a second of a row, all its processes together."""
    if row.engine is None:
        return loader(row, images, batch, device)
    if row.packed == 1:
        return combined([ours(row, images, batch, device, bf16, None)])
    context = multiprocessing.get_context("spawn")
    start, out = context.Barrier(row.packed), context.Queue()
    args = (row, images, batch, str(device), bf16, 1, start, out)
    processes = [context.Process(target=worker, args=args, daemon=True) for _ in range(row.packed)]
    for process in processes:
        process.start()
    stretches: list[Stretch] = []
    while len(stretches) < row.packed:
        try:
            stretches.append(out.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):  # it has said why; the others would wait for it
                for process in processes:
                    process.terminate()
                raise RunError(f"a process of the row {row} died") from None
    for process in processes:
        process.join()
    return combined(stretches)


def counted(device: torch.device, bf16: bool) -> tuple[float, float]:
    """FLOPs, and the fewest bytes through memory, that training on one image takes.

    FLOPs: those of the forward pass, times three. Bytes: each convolution's output is written and read once going
    forward, and read twice, with its gradient written and read, going back.
    """
    net = net_of(ALL, device)
    outputs: list[int] = []
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            m.register_forward_hook(lambda _m, _x, y: outputs.append(y.numel()))
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, *SHAPE, dtype=torch.uint8, device=device))
    size = 2 if bf16 else 4
    return 3.0 * counter.get_total_flops(), 6.0 * sum(outputs) * size


def ceilings(device: torch.device, bf16: bool) -> tuple[float, float]:
    """What this machine was seen to do: FLOP/s of a large matrix product, and bytes/s of a large copy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())  # of the whole machine, as packed rows use it
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


def rows_for(device: torch.device, packed: Sequence[int]) -> list[Row]:
    """What makes sense on a device."""
    engines: Sequence[Engine] = tuple(reversed(ENGINES)) if device.type == "cuda" else ("eager",)
    rows = []
    for teacher in (False, True):
        rows += [Row(None, teacher), *(Row(engine, teacher) for engine in engines)]
        rows += [Row(engines[-1], teacher, k) for k in packed]
    return rows


def bench(
    device: torch.device, bf16: bool, images: int, batch: int, packed: Sequence[int], console: Console
) -> dict[str, Any]:
    """Measure every row, print them as one table, and return all of it as a record."""
    flops, moved = counted(device, bf16)
    peak, bandwidth = ceilings(device, bf16)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what is recorded is that of training
    floor = max(flops / peak, moved / bandwidth)
    record: dict[str, Any] = {
        "batch": batch,
        "images": images,
        "precision": "bf16" if bf16 else "fp32",
        "flops_per_image": flops,
        "bytes_per_image": moved,
        "measured_flops_per_second": peak,
        "measured_bytes_per_second": bandwidth,
        "versions": versions(),
        "cores": cores(),
        "rows": [],
    }
    rows = rows_for(device, packed)
    speeds: dict[Row, float] = {}

    def measured(some: Iterable[Row]) -> None:
        for row in some:
            speeds[row] = measure(row, images, batch, device, bf16)
            words = f"{row}{', teacher' if row.teacher else ''}: {speeds[row]:,.0f} images/s"
            console.print(words, highlight=False)

    measured(row for row in rows if row.packed == 1)
    with multi_process_service():  # not before: it would wait for this process too, when it ends
        measured(row for row in rows if row.packed > 1)
    record["hardware"] = hardware(device)
    first: dict[bool, float] = {}
    for row in rows:
        speed = speeds[row]
        first.setdefault(row.teacher, speed)
        entry = {"row": str(row), "teacher": row.teacher, "packed": row.packed, "images_per_second": speed}
        # A teacher is one more forward pass: a third of the FLOPs and of the bytes of training.
        entry |= {
            "ratio": speed / first[row.teacher],
            "fraction_of_limit": speed * floor * (4 / 3 if row.teacher else 1),
        }
        record["rows"].append(entry)
    table = Table(title=f"ResNet-32, batch {batch}, whole training step, {record['precision']}", box=box.SIMPLE_HEAD)
    for name in ("", "teacher", "images/s", "ratio", "of the limit"):
        table.add_column(name, justify="left" if name in ("", "teacher") else "right")
    for r in record["rows"]:
        columns = (f"{r['images_per_second']:,.0f}", f"{r['ratio']:.2f}", f"{100 * r['fraction_of_limit']:.1f}%")
        table.add_row(r["row"], "yes" if r["teacher"] else "no", *columns)
    console.print(table)
    found = record["hardware"]
    console.print(
        f"{found.get('gpu', found['cpu'])}, torch {record['versions']['torch']}; the limit, {1 / floor:,.0f} images/s "
        f"without teacher, is {flops / 1e6:.0f} MFLOP and {moved / 1e6:.1f} MB an image, "
        f"at {peak / 1e12:.2f} TFLOP/s and {bandwidth / 1e9:.0f} GB/s, which a matrix product and a copy reached here",
        highlight=False,
        soft_wrap=True,
    )
    return record
