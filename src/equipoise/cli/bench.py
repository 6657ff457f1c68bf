"""`equipoise bench`: images a second on this machine. Compare rows of one call only."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..engine.device import resolve_device, resolve_precision
from ..errors import UsageError, check
from ..files import write_json
from ..report.terminal import make_console
from ..runs.environment import count_cores, describe_hardware, list_versions
from ..runs.mps import run_mps
from .arguments import Bench
from .large import measure_large, print_large
from .speed import Row, Setting, count_work, list_rows, measure, measure_limits
from .systems import measure_methods, print_methods


def do_bench(f: Bench) -> None:
    """Measure images a second on this machine: a usual DataLoader loop, and ours with each engine."""
    device = resolve_device(f.device)
    if f.size is None and not f.methods and f.rows is not None:
        raise UsageError("--rows chooses among the rows for large images or of methods: add --size 224 or --methods")
    images = (25_600 if device.type == "cuda" else 256) if f.images is None else f.images
    check("images", images, least=2 * f.batch, whole=True)
    if f.out is not None:  # before a minute is spent
        f.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=f.out.parent):
            pass
        if f.out.is_dir():
            raise UsageError(f"--out {f.out} is a folder: name a file")
    console, on = make_console(), Setting(device, resolve_precision(f.precision, device), images, f.batch)
    if f.methods:
        record = measure_methods(on, f.rows, f.limit, console)
        print_methods(record, console)
    elif f.size is not None:
        record = measure_large(on, f.size, f.rows, f.limit, console)
        print_large(record, console)
    else:
        record = measure_all(on, f.packed, console)
        print_record(record, console)
    if f.out is not None:
        write_json(f.out, record)
        print(f"recorded in {f.out}")


def measure_all(on: Setting, packed: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure every row, and return all of it as a record."""
    flops, moved = count_work(on.device, on.bf16)
    peak, bandwidth = measure_limits(on.device, on.bf16)
    if on.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(on.device)  # what is recorded is that of training
    rows = list_rows(on.device, packed)
    speeds = measure_rows([row for row in rows if row.packed == 1], on, console)
    with run_mps():  # not earlier: when it ends, it would wait for this process too
        speeds |= measure_rows([row for row in rows if row.packed > 1], on, console)
    floor = max(flops / peak, moved / bandwidth)
    return {
        "batch": on.batch,
        "images": on.images,
        "precision": "bf16" if on.bf16 else "fp32",
        "flops_per_image": flops,
        "bytes_per_image": moved,
        "measured_flops_per_second": peak,
        "measured_bytes_per_second": bandwidth,
        "versions": list_versions(),
        "cores": count_cores(),
        "rows": [make_entry(row, speeds, floor) for row in rows],
        "hardware": describe_hardware(on.device),
    }


def measure_rows(rows: Sequence[Row], on: Setting, console: Console) -> dict[Row, float]:
    """Images a second of these rows, each printed as soon as it is known."""
    speeds: dict[Row, float] = {}
    for row in rows:
        speeds[row] = measure(row, on)
        words = f"{row}{', teacher' if row.teacher else ''}: {speeds[row]:,.0f} images/s"
        console.print(words, highlight=False)
    return speeds


def make_entry(row: Row, speeds: Mapping[Row, float], floor: float) -> dict[str, Any]:
    """A row of the record: beside its speed, its ratio to the DataLoader loop, and the fraction of the limit.

    A teacher is one more forward pass: a third of the FLOPs and of the bytes of training.
    """
    speed = speeds[row]
    first = next(other for one, other in speeds.items() if one.teacher == row.teacher)
    return {
        "row": str(row),
        "teacher": row.teacher,
        "packed": row.packed,
        "images_per_second": speed,
        "ratio": speed / first,
        "fraction_of_limit": speed * floor * (4 / 3 if row.teacher else 1),
    }


def print_record(record: Mapping[str, Any], console: Console) -> None:
    """Print a table of all rows, and how the limit is computed."""
    title = f"ResNet-32, batch {record['batch']}, whole training step, {record['precision']}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "teacher", "images/s", "ratio", "of the limit"):
        table.add_column(name, justify="left" if name in ("", "teacher") else "right")
    for r in record["rows"]:
        columns = (f"{r['images_per_second']:,.0f}", f"{r['ratio']:.2f}", f"{100 * r['fraction_of_limit']:.1f}%")
        table.add_row(r["row"], "yes" if r["teacher"] else "no", *columns)
    console.print(table)
    machine = record["hardware"]
    flops, moved = record["flops_per_image"], record["bytes_per_image"]
    peak, bandwidth = record["measured_flops_per_second"], record["measured_bytes_per_second"]
    console.print(
        f"{machine.get('gpu', machine['cpu'])}, torch {record['versions']['torch']}; the limit, "
        f"{1 / max(flops / peak, moved / bandwidth):,.0f} images/s without teacher, is {flops / 1e6:.0f} MFLOP and "
        f"{moved / 1e6:.1f} MB an image, at {peak / 1e12:.2f} TFLOP/s and {bandwidth / 1e9:.0f} GB/s, which a matrix "
        "product and a copy reached here",
        highlight=False,
        soft_wrap=True,
    )
