"""The figures of a report, drawn, and the numbers in them as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.folder import Result
from .figures import COLOURS, GRID, draw_matrices, plt

MARKERS = "os^D"
"""of lines: shape as well as colour tells them apart"""


def draw(figure: Mapping[str, Any], results: Mapping[str, Result]) -> plt.Figure:
    """A figure of `series.py`."""
    if figure["kind"] == "confusion":
        return draw_matrices([(one["name"].rpartition(":")[0], results[one["run"]]) for one in figure["panels"]])
    return draw_lines(figure)


def draw_lines(figure: Mapping[str, Any]) -> plt.Figure:
    """Lines over numbers; a dashed line has the colour of the line that it is compared with."""
    drawn, axis = plt.subplots(figsize=(5.2, 4.2))
    series: Sequence[Mapping[str, Any]] = figure["series"]
    for s in series:
        group = s["group"]
        colour, marker = COLOURS[group % len(COLOURS)], MARKERS[(group + group // len(COLOURS)) % len(MARKERS)]
        style: dict[str, Any] = {"linestyle": "--", "alpha": 0.7} if s["dashed"] else {"marker": marker}
        axis.plot(s["x"], s["y"], color=colour, markersize=4, label=s["name"], **style)
        if s["spread"]:
            low, high = zip(*((y - d, y + d) for y, d in zip(s["y"], s["spread"])))
            axis.fill_between(s["x"], low, high, color=colour, alpha=0.15, linewidth=0)
    x = figure["x"]
    if x["scale"] == "log":
        axis.set_xscale("log")
    elif x["scale"] == "symlog":
        axis.set_xscale("symlog", linthresh=x["threshold"])
    ticks = x["ticks"] if x["ticks"] and len(x["ticks"]) <= 12 else None
    if ticks:
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
    axis.set_title(figure["title"], fontsize=11)
    axis.set_xlabel(x["label"], fontsize=9)
    axis.set_ylabel(figure["y"]["label"], fontsize=9)
    axis.tick_params(labelsize=9)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    columns = 3 if len(series) == 3 else 2  # of which the legend is read by rows: the paper's line beside ours
    handles = [line for k in range(columns) for line in axis.get_lines()[k::columns]]
    drawn.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=columns)
    return drawn


def numbers(figure: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    """The points of a figure of curves, or the counts of its matrices that are not 0, a line each.

    Equal records give equal bytes.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if figure["kind"] == "confusion":
        writer.writerow(("panel", "true", "predicted", "images"))
        for panel in figure["panels"]:
            name = panel["name"].rpartition(":")[0]
            for i, row in enumerate(results[panel["run"]]["confusion"]):
                writer.writerows((name, i, j, count) for j, count in enumerate(row) if count)
        return out.getvalue()
    writer.writerow(("series", "x", "y", "spread"))
    for s in figure["series"]:
        spread = s["spread"] or [None] * len(s["x"])
        for x, y, d in zip(s["x"], s["y"], spread):
            writer.writerow((s["name"], f"{x:g}", f"{y:.4f}", "" if d is None else f"{d:.4f}"))
    return out.getvalue()
