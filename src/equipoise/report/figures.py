"""Pictures of results, as PNG or SVG: curves, and confusion after log(1 + x)."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from ..runs.record import Result
from .series import BY_CLASSES, Figure, Series, make_curve

COLOURS = ("#8c8c8c", "#1f6fb4", "#d9730d", "#2c8a4b", "#8e4fb0", "#b8322a", "#0e8a92", "#a08a00")
"""line colours; the page's style sheet has them for both themes, as --series-0 to --series-7"""
MARKERS = "os^D"
"""line markers: lines differ in shape as well as in colour"""
INK, GRID = "#000000", "#e6e6e6"

Curves = Sequence[tuple[str, Sequence[Result]]]


def draw(figure: Figure) -> plt.Figure:
    """A figure of `series.py`."""
    if figure["kind"] == "confusion":
        return draw_matrices([(one["name"], one["result"]) for one in figure["panels"]])
    drawn, axis = plt.subplots(figsize=(5.2, 4.2))
    draw_lines(axis, figure["title"], figure["x"], figure["series"])
    columns = 3 if len(figure["series"]) == 3 else 2
    # The legend is read by rows: the paper's line beside ours.
    handles = [line for k in range(columns) for line in axis.get_lines()[k::columns]]
    drawn.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=columns)
    return drawn


def draw_accuracy(panels: Mapping[str, Curves], path: Path) -> Path:
    """A panel for each title: accuracy on all classes so far, by their number; mean over seeds and its deviation."""
    width = sum(5.2 + 2.8 * (len(curves) > 4) for curves in panels.values())  # many curves have their legend beside
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.9), sharey=True, squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items()):
        series = []
        for group, (name, results) in enumerate(curves):
            average = np.mean([result["average_incremental_accuracy"] for result in results])
            series.append(make_curve(f"{name} ({average:.1f})", group, results))
        draw_lines(axis, title, BY_CLASSES, series)
        axis.set_ylim(0, 102)
        axis.label_outer()
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(curves) > 4 else {}
        axis.legend(title="remedy (average)", frameon=False, fontsize=9, title_fontsize=9, **beside)
    return save_png(figure, path)


def draw_lines(axis: plt.Axes, title: str, x: Mapping[str, Any], series: Sequence[Series]) -> None:
    """Lines over numbers; a dashed line has the colour of the line that it is compared with."""
    for s in series:
        group = s["group"]
        colour, marker = COLOURS[group % len(COLOURS)], MARKERS[(group + group // len(COLOURS)) % len(MARKERS)]
        style: dict[str, Any] = {"linestyle": "--", "alpha": 0.7} if s["dashed"] else {"marker": marker}
        axis.plot(s["x"], s["y"], color=colour, markersize=4, label=s["name"], **style)
        if s["spread"]:
            at, low, high = zip(*((x, y - d, y + d) for x, y, d in zip(s["x"], s["y"], s["spread"]) if d is not None))
            if len(at) == len(s["x"]):
                axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            else:  # a band would reach over points of one seed
                axis.vlines(at, low, high, color=colour, alpha=0.5, linewidth=1.5)
    axis.set_xscale(x["scale"], **({"linthresh": x["threshold"]} if x["scale"] == "symlog" else {}))
    ticks = sorted({value for s in series for value in s["x"]})
    if len(ticks) <= 12:
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(x["label"], fontsize=9)
    axis.set_ylabel("accuracy, %", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_confusions(panels: Sequence[tuple[str, Result]], path: Path) -> Path:
    """The confusion matrix after the last step for each result, as PNG."""
    return save_png(draw_matrices(panels), path)


def draw_matrices(panels: Sequence[tuple[str, Result]]) -> plt.Figure:
    """The confusion matrix after the last step for each result, in one scale: rows are true classes, as learned."""
    most = max(max(map(max, result["confusion"])) for _, result in panels)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (3.3 * columns + 0.6, 3.5 * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", sharex=True, sharey=True
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, result) in zip(axes.flat, panels):
        axis.set_visible(True)
        counts, base = np.log1p(np.array(result["confusion"])), result["run"]["protocol"]["base"]
        image = axis.imshow(counts, cmap="magma", interpolation="nearest", vmin=0, vmax=math.log1p(most))
        if len(counts) <= 20:
            axis.set_xticks(range(len(counts)), result["class_order"])
            axis.set_yticks(range(len(counts)), result["class_order"])
        axis.axvline(base - 0.5, color="white", linewidth=0.8, linestyle=":")
        axis.axhline(base - 0.5, color="white", linewidth=0.8, linestyle=":")
        axis.set_title(f"{name}: {result['final']['top1']:.1f}%", fontsize=10)
        axis.tick_params(labelbottom=True, labelleft=True)
    for axis in axes[-1]:
        axis.set_xlabel("predicted")
    for axis in axes[:, 0]:
        axis.set_ylabel("true class, in learning order")
    ticks = [n for n in (0, 1, 3, 10, 30, 100, 300, 1000) if n <= most]
    bar = figure.colorbar(image, ax=axes, ticks=np.log1p(ticks), label="images", aspect=40, shrink=0.6)
    bar.ax.set_yticklabels(map(str, ticks))
    return figure


def save_png(figure: plt.Figure, path: Path) -> Path:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)
    return path


def render_svg(figure: plt.Figure, title: str) -> str:
    """A figure as part of a page that has its title, with the page's colours and fonts; equal figures, equal text."""
    out = io.StringIO()
    for axis in figure.axes:
        axis.set_title("" if axis.get_title() == title else axis.get_title(), fontsize=10)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # so that no two figures name a part alike
        size = {"bbox_inches": "tight", "pad_inches": 0.08}
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None}, **size)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    label = html.escape(title).replace("\\", r"\\")
    changes = {
        "<svg ": f'<svg role="img" aria-label="{label}" ',
        r"<metadata>.*?</metadata>|<style.*?</style>": "",
        r'<g id="[^"]*">': "<g>",  # names that would be those of other figures too
        r"'DejaVu Sans'[^;\"]*": "var(--sans)",
        r"(?<=[ \"])(fill|stroke): " + INK: r"\1: currentColor",
        "stroke: " + GRID: "stroke: var(--faint)",
    }
    changes |= {f": {colour}": f": var(--series-{k})" for k, colour in enumerate(COLOURS)}
    for old, new in changes.items():
        text = re.sub(old, new, text, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", text)


def encode_matrix(matrix: Sequence[Sequence[int]], name: object = None) -> str:
    """A confusion matrix after log(1 + x), a pixel for a cell, as the address of a PNG that holds it."""
    size = len(matrix)
    if any(len(row) != size or min(row) < 0 for row in matrix):
        raise ValueError(f"the confusion matrix of run {name!r} is not a square of counts")
    counts = np.log1p(np.array(matrix, dtype=np.float64))
    picture = Image.fromarray(np.rint(255 * counts / max(1.0, counts.max())).astype(np.uint8))
    colours = matplotlib.colormaps["magma"](np.arange(256), bytes=True)[:, :3]
    picture.putpalette(colours.tobytes())
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
