"""Pictures of results, as PNG or SVG: curves, and confusion after log(1 + x)."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from ..runs.folder import Result

COLOURS = ("#8c8c8c", "#1f6fb4", "#d9730d", "#2c8a4b", "#8e4fb0", "#b8322a", "#0e8a92", "#a08a00")
"""of lines; the page's style sheet has them for both themes, as --series-0 to --series-7"""
INK, GRID = "#000000", "#e6e6e6"

Curves = Sequence[tuple[str, Sequence[Result]]]


def accuracy_curves(panels: Mapping[str, Curves], path: Path) -> Path:
    """A panel for each title: accuracy on all classes so far, by their number; mean over seeds and its deviation."""
    width = sum(5.2 + 2.8 * (len(curves) > 4) for curves in panels.values())  # many curves have their legend beside
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.9), sharey=True, squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items()):
        ticks: set[int] = set()
        for colour, (name, results) in zip(COLOURS * len(curves), curves):
            x = [record["classes"] for record in results[0]["steps"]]
            y = np.array([[record["top1"] for record in result["steps"]] for result in results])
            ticks.update(x)
            average = np.mean([result["average_incremental_accuracy"] for result in results])
            axis.plot(x, y.mean(0), color=colour, marker="o", markersize=4, label=f"{name} ({average:.1f})")
            if len(results) > 1:
                spread = y.std(0, ddof=1)
                axis.fill_between(x, y.mean(0) - spread, y.mean(0) + spread, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("classes learned")
        axis.set_xticks(sorted(ticks) if len(ticks) <= 12 else [min(ticks), max(ticks)])
        axis.set_ylim(0, 102)
        axis.grid(color=GRID)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(curves) > 4 else {}
        axis.legend(title="remedy (average)", frameon=False, fontsize=9, title_fontsize=9, **beside)
    axes[0][0].set_ylabel("accuracy on all of them, %")
    return save_png(figure, path)


def confusions(panels: Sequence[tuple[str, Result]], path: Path) -> Path:
    """The confusion matrix after the last step for each result, as PNG."""
    return save_png(draw_matrices(panels), path)


def draw_matrices(panels: Sequence[tuple[str, Result]]) -> plt.Figure:
    """The confusion matrix after the last step for each result: rows are true classes, in learning order."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (3.3 * columns, 3.5 * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", sharex=True, sharey=True
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, result) in zip(axes.flat, panels):
        axis.set_visible(True)
        counts, base = np.log1p(np.array(result["confusion"])), result["run"]["protocol"]["base"]
        axis.imshow(counts, cmap="magma", interpolation="nearest")
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
    return figure


def save_png(figure: plt.Figure, path: Path) -> Path:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)
    return path


def svg(figure: plt.Figure, title: str) -> str:
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


def matrix_image(matrix: Sequence[Sequence[int]], name: object = None) -> str:
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
