"""Pictures of results, as PNG: accuracy by number of classes, and confusion after log(1 + x)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from ..runs.folder import Result

COLOURS = ("#8c8c8c", "#1f6fb4", "#d9730d", "#2c8a4b", "#8e4fb0", "#b8322a", "#0e8a92", "#a08a00")

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
        axis.grid(color="#e6e6e6")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(curves) > 4 else {}
        axis.legend(title="loss (average)", frameon=False, fontsize=9, title_fontsize=9, **beside)
    axes[0][0].set_ylabel("accuracy on all of them, %")
    return written(figure, path)


def confusions(panels: Sequence[tuple[str, Result]], path: Path) -> Path:
    """The confusion matrix after the last step for each result: rows are true classes, in learning order."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.3 * columns, 3.5 * rows),
        squeeze=False,
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, result) in zip(axes.flat, panels):
        axis.set_visible(True)
        counts = np.log1p(np.array(result["confusion"]))
        axis.imshow(counts, cmap="magma", interpolation="nearest")
        if len(counts) <= 20:
            axis.set_xticks(range(len(counts)), result["class_order"])
            axis.set_yticks(range(len(counts)), result["class_order"])
        axis.axvline(result["run"]["base"] - 0.5, color="white", linewidth=0.8, linestyle=":")
        axis.axhline(result["run"]["base"] - 0.5, color="white", linewidth=0.8, linestyle=":")
        axis.set_title(f"{name}: {result['final']['top1']:.1f}%", fontsize=10)
        axis.tick_params(labelbottom=True, labelleft=True)
    for axis in axes[-1]:
        axis.set_xlabel("predicted")
    for axis in axes[:, 0]:
        axis.set_ylabel("true class, in learning order")
    return written(figure, path)


def written(figure: plt.Figure, path: Path) -> Path:
    """Write a figure and let it go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)
    return path
