"""Measures training on large images, such as ImageNet's: ResNet-18 and PODNet's ResNet-18, and the crop alone.

The images have different sizes and lie on the device. Every row but those of the crop is a whole step of the product's
own loop: crop, flip, normalisation, net, loss, backward pass and SGD.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..data.augment import Normalisation, ResizedCrop
from ..data.images import Images
from ..data.ragged import Ragged
from ..data.randomness import generator
from ..engine.cuda_graph import Engine, capture_step
from ..engine.device import use_device
from ..engine.pixels import cut, cut_normalised, has_resize_kernel, settle
from ..engine.train import Callbacks, Conditions, Epoch, Position, fit
from ..method import Method
from ..methods.il_baseline import ILBaseline
from ..methods.podnet import PODNet
from ..remedies import Balanced
from ..runs.environment import describe_hardware, list_versions
from ..step import Stage, plan_for
from .reproduce import match_rows
from .speed import ALL, MEAN, STD, Setting, count_work, make_step, measure_limits

STORED = 4096
"""different images on the device: far more than a cache holds, and a gigabyte at 224 pixels"""
METHODS: Mapping[str, tuple[Method, int]] = {
    "resnet18": (ILBaseline(Balanced()), 1),
    "podnet": (PODNet(), 4),
}
"""by the names of their nets in rows: the methods that are trained, and the work of an image relative to ResNet-18's"""


@dataclass(frozen=True)
class LargeRow:
    """A net and an engine to train with; without a net, the crop alone."""

    net: str = ""
    engine: Engine = "eager"
    teacher: bool = False

    def __str__(self) -> str:
        return f"{self.net} {self.engine}{' teacher' if self.teacher else ''}" if self.net else "crop"


def list_large_rows(device: torch.device, patterns: str | None) -> list[LargeRow]:
    """The rows that a device can have, of these names, patterns or parts of names."""
    engines: Sequence[Engine] = ("compiled", "captured", "fused") if device.type == "cuda" else ("eager",)
    rows = [LargeRow()]
    rows += [LargeRow(net, engine, teacher) for engine in engines for net in METHODS for teacher in (False, True)]
    if patterns is None:
        return rows
    chosen = match_rows(patterns, [str(row) for row in rows])
    return [row for row in rows if str(row) in chosen]


def make_large_images(on: Setting, size: int) -> Images:
    """Random images with random labels, like photographs: 4:3 or 3:4, with a shorter side of 8/7 of `size`."""
    count, short = min(STORED, on.images), round(size * 8 / 7)
    shapes = torch.tensor([[short, short * 4 // 3], [short * 4 // 3, short]], device=on.device)
    shapes = shapes[torch.arange(count, device=on.device) % 2]
    gen = generator(0, "bench", device=on.device)
    total = int(3 * shapes.prod(1).sum())
    pixels = torch.randint(0, 256, (total,), dtype=torch.uint8, generator=gen, device=on.device)
    labels = torch.randint(0, ALL, (count,), generator=gen, device=on.device)
    return Images(Ragged.pack(pixels, shapes, size), labels)


def measure_large(on: Setting, size: int, patterns: str | None, limit: float, console: Console) -> dict[str, Any]:
    """Measure the rows, each printed as soon as it is known, and return all of it as a record."""
    began = time.monotonic()
    rows = list_large_rows(on.device, patterns)
    peak, bandwidth = measure_limits(on.device, on.bf16)
    images = make_large_images(on, size)
    entries: list[dict[str, Any]] = []
    for row in rows:
        if time.monotonic() - began > limit:
            console.print(f"{row}: left out, {limit:,.0f} seconds are over", highlight=False)
            continue
        free_memory(on.device)
        with use_device(on.device):
            entry = measure_training(row, on, images) if row.net else measure_crop(on, images)
        entry = {"row": str(row)} | entry
        entry["fraction_of_limit"] = entry.pop("least_seconds")(peak, bandwidth) * entry["images_per_second"]
        entries.append(entry)
        words = f"{row}: {entry['images_per_second']:,.0f} images/s, {time.monotonic() - began:.0f} s so far"
        console.print(words, highlight=False)
    return {
        "size": size,
        "batch": on.batch,
        "images": on.images,
        "precision": "bf16" if on.bf16 else "fp32",
        "measured_flops_per_second": peak,
        "measured_bytes_per_second": bandwidth,
        "versions": list_versions(),
        "rows": entries,
        "hardware": describe_hardware(on.device),
    }


def free_memory(device: torch.device) -> None:
    """Give back what earlier rows held, and forget what was compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_training(
    row: LargeRow, on: Setting, images: Images, tell: Callable[[Epoch], None] = lambda e: None
) -> dict[str, Any]:
    """Two epochs of the product's own loop, after one to warm up; `tell` is called after each."""
    method, work = METHODS[row.net]
    size = images.x.shape[2]
    s = make_step(method, images, row.teacher, (3, size, size))
    where = torch.arange(max(on.images // work, 2 * on.batch), device=on.device) % len(images)
    s = replace(s, data=where, where=where)
    stage = Stage("train", replace(method.recipe(plan_for(s.shape)), epochs=3, batch=on.batch), method.trained)
    crop = ResizedCrop(size, brightness=63 / 255 if row.net == "podnet" else 0.0)
    epochs: list[Epoch] = []
    times = [time.monotonic()]

    def note(e: Epoch) -> None:
        epochs.append(e)
        times.append(time.monotonic())
        tell(e)

    used = fit(method, s, stage, Position(), Conditions(0, crop, on.bf16, row.engine, True), Callbacks(note))
    seen = sum(now.images_per_second * (now.seconds - before.seconds) for before, now in pairwise(epochs))
    flops, moved = count_work(on.device, on.bf16, method, s.shape)
    more = 4 / 3 if row.teacher else 1  # a teacher is one more forward pass
    return {
        "engine": used,
        "images_per_second": seen / (times[-1] - times[1]),
        "seconds_to_begin": times[1] - times[0],
        "peak_memory_mib": epochs[-1].mib,
        "flops_per_image": more * flops,
        "bytes_per_image": more * moved,
        "least_seconds": lambda peak, bandwidth: more * max(flops / peak, moved / bandwidth),
    }


def measure_crop(on: Setting, images: Images) -> dict[str, Any]:
    """The crop of twenty different batches, one after the other; on a GPU they are one graph, as within a step.

    They come as in training: on a GPU normalised, in its precision, else as grey levels.
    """
    size, gen = images.x.shape[2], generator(0, "crop", device=on.device)
    crop, x = ResizedCrop(size), images.x
    which = torch.randint(0, len(images), (20, on.batch), generator=gen, device=on.device)
    boxes = settle(crop, x, which, crop.draw((20, on.batch), gen))

    to = None
    if has_resize_kernel(on.device):
        to = Normalisation(MEAN.to(on.device), STD.to(on.device), torch.bfloat16 if on.bf16 else torch.float32)

    def cut_all() -> None:
        for k in range(20):
            cut(crop, x, which[k], boxes[k]) if to is None else cut_normalised(crop, x, which[k], boxes[k], to)

    cuts = capture_step(cut_all, []) if on.device.type == "cuda" else cut_all
    seconds = time_calls(cuts, on.device) / 20 / on.batch
    moved = 3 * boxes[..., 2].mul(boxes[..., 3]).double().mean().item()
    moved += 3 * size**2 * (1 if to is None else to.dtype.itemsize)
    return {
        "images_per_second": 1 / seconds,
        "microseconds_per_batch": 1e6 * seconds * on.batch,
        "bytes_per_image": moved,
        "bytes_per_second": moved / seconds,
        "least_seconds": lambda peak, bandwidth: moved / bandwidth,
    }


def time_calls(call: Callable[[], None], device: torch.device) -> float:
    """The median time of a call, in seconds."""
    times = []
    for _ in range(8 if device.type == "cuda" else 2):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[len(times[1:]) // 2]


def print_large(record: Mapping[str, Any], console: Console) -> None:
    """Print a table of all rows, and the limit."""
    title = f"{record['size']} pixels, batch {record['batch']}, whole training step, {record['precision']}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "engine", "images/s", "of the limit", "µs a batch", "peak MiB", "s to begin"):
        table.add_column(name, justify="left" if name in ("", "engine") else "right")
    for r in record["rows"]:
        memory, begin = r.get("peak_memory_mib"), r.get("seconds_to_begin")
        table.add_row(
            r["row"],
            r.get("engine", ""),
            f"{r['images_per_second']:,.0f}",
            f"{100 * r['fraction_of_limit']:.1f}%",
            f"{1e6 * record['batch'] / r['images_per_second']:,.0f}",
            "" if memory is None else f"{memory:,.0f}",
            "" if begin is None else f"{begin:,.1f}",
        )
    console.print(table)
    machine, peak = record["hardware"], record["measured_flops_per_second"]
    console.print(
        f"{machine.get('gpu', machine['cpu'])}, torch {record['versions']['torch']}; the limit is that of the FLOPs or "
        f"bytes of a row, whichever takes longer, at {peak / 1e12:.2f} TFLOP/s and "
        f"{record['measured_bytes_per_second'] / 1e9:.0f} GB/s, which a matrix product and a copy reached here",
        highlight=False,
        soft_wrap=True,
    )
