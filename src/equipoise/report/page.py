"""The page of a report: its data as types, and the one HTML file that is made of them.

The file asks nothing of the network and holds no date: made again from the same records, it is the same byte by byte.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NotRequired, TypedDict


class Made(TypedDict):
    """What the numbers were made with."""

    equipoise: str
    runs: int
    hardware: list[str]
    torch: list[str]


class Headline(TypedDict):
    """One line of the chart at the top; `ours` is None for what is not measured yet."""

    name: str
    ours: float | None
    std: float | None
    paper: float | None
    seeds: int
    state: NotRequired[str]


class Column(TypedDict):
    """A column of a table; neighbours of one group share a heading above theirs."""

    id: str
    group: str
    title: str


class Cell(TypedDict):
    """The paper's number beside ours, how they compare, and how to measure it again."""

    column: str
    paper: float | None
    ours: float | None
    std: float | None
    seeds: int
    difference: float | None
    state: Literal["close", "better", "near", "off", "measured", "missing", "needs data", "quoted", "none"]
    why: str | None
    """why nothing is measured, or why with joined batches instead of short ones"""
    command: str | None
    runs: list[str]


class Row(TypedDict):
    """A method; quoted ones were not run by the paper's authors and stand apart from measured ones."""

    name: str
    quoted: bool
    cells: list[Cell]


class Table(TypedDict):
    """A table of the paper; `names` stands above its first column, "method" if it is not given."""

    id: str
    title: str
    caption: str
    metric: str
    names: NotRequired[str]
    columns: list[Column]
    rows: list[Row]


class Axis(TypedDict):
    """The horizontal axis; symlog is linear on [0, threshold] and logarithmic above."""

    label: str
    scale: Literal["linear", "log", "symlog"]
    threshold: NotRequired[float | None]
    ticks: NotRequired[list[float] | None]


class Label(TypedDict):
    """The vertical axis, whose range follows from the values."""

    label: str


class Series(TypedDict):
    """A line; those of one group share a colour, so that a dashed one can be told to belong to a solid one."""

    name: str
    x: list[float]
    y: list[float | None]
    spread: list[float | None] | None
    dashed: bool
    group: int


class Lines(TypedDict):
    """A line chart."""

    id: str
    kind: Literal["lines"]
    title: str
    caption: str
    x: Axis
    y: Label
    series: list[Series]


class Panel(TypedDict):
    """The confusion matrix of a run, by the run's id."""

    name: str
    run: str


class Confusion(TypedDict):
    """Confusion matrices beside one another."""

    id: str
    kind: Literal["confusion"]
    title: str
    caption: str
    panels: list[Panel]


class Costs(TypedDict):
    """A plain table, of strings."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]


class StepRow(TypedDict):
    """Accuracies after a step of a run."""

    step: int
    classes: int
    top1: float | None
    top5: float | None
    base: float | None
    new: float | None
    latest: float | None
    seconds: float | None
    alpha: float | None


class RunEntry(TypedDict):
    """A run: its settings, what it measured, and where."""

    id: str
    title: str
    command: str | None
    average: float | None
    final: float | None
    base: float | None
    new: float | None
    settings: dict[str, str]
    steps: list[StepRow]
    confusion: list[list[int]] | None
    class_order: list[int] | list[str]
    base_classes: int
    hardware: str
    versions: str
    seconds: float | None
    reused: str | None


class Data(TypedDict):
    """Everything on the page.

    `states` says in words what close, better, near and off mean, `headline_caption` what the chart at the top shows.
    """

    title: str
    subtitle: str
    made: Made
    states: NotRequired[dict[str, str]]
    headline_caption: NotRequired[str]
    headline: list[Headline]
    tables: list[Table]
    figures: list[Lines | Confusion]
    costs: Costs | None
    runs: list[RunEntry]


def page(data: Mapping[str, Any]) -> str:
    """The whole HTML text for `data`, which is a `Data`."""
    runs = [{**run, "confusion": packed(run.get("confusion"), run.get("id"))} for run in data.get("runs") or []]
    text = json.dumps(finite({**data, "runs": runs}), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(str(data.get("title") or "Report")),
        "subtitle": html.escape(str(data.get("subtitle") or "")),
        "css": asset("page.css"),
        "js": asset("charts.js") + asset("page.js"),
        "data": text.replace("<", "\\u003c"),  # neither </script> nor <!-- may stand there, whatever a name holds
    }
    # All in one pass: a name that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], asset("page.html"))


def asset(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for: the accuracies of a run that diverged."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def packed(matrix: Sequence[Sequence[int]] | None, name: object = None) -> dict[str, Any] | None:
    """A matrix of counts as `size` and the base64 of its cells.

    Row by row, each count that is not zero as two numbers: how many zeros come before it, and itself; each in groups
    of seven bits, the lowest first, the eighth bit set in all but the last. Most cells are zero and most others small:
    a tenth of what the list would take.
    """
    if not matrix:
        return None
    size = len(matrix)
    counts = [int(count) for row in matrix for count in row]
    if any(len(row) != size for row in matrix) or min(counts) < 0:
        raise ValueError(f"the confusion matrix of run {name!r} is not a square of counts")
    out = bytearray()
    zeros = 0
    for count in counts:
        if not count:
            zeros += 1
            continue
        for number in (zeros, count):
            while number > 127:
                out.append(number & 127 | 128)
                number >>= 7
            out.append(number)
        zeros = 0
    return {"size": size, "cells": base64.b64encode(bytes(out)).decode("ascii")}
