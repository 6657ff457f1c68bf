"""Cells of the paper's tables on ImageNet and parts of it, whose images one must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ..data.folders import NAMES, SIZES
from ..data.listing import DEFAULT_SUBSET, SUBSETS, Subset
from ..errors import RunError, UsageError
from ..paper import DATASETS, Cell, Table
from ..paper.cells import find_images_needed
from ..runs.settings import Run


def list_cell_runs(tables: Sequence[Table]) -> list[Run]:
    """The runs of all cells of these tables."""
    return [cell.run for table in tables for row in table.rows for cell in row.cells if cell.run is not None]


def choose_subset(tables: Sequence[Table], subset: Subset | None) -> list[Table]:
    """The tables with the runs on ImageNet-Subset by one of its definitions; None for the default."""
    if not any(run.data.name == "imagenet-subset" for run in list_cell_runs(tables)):
        if subset is not None:
            raise UsageError("--subset belongs to --dataset imagenet-subset: remove it")
        return list(tables)

    def define(cell: Cell) -> Cell:
        if cell.run is None or cell.run.data.name != "imagenet-subset":
            return cell
        column = replace(cell.column, group=f"{cell.column.group} ({subset})")
        return replace(cell, column=column, run=replace(cell.run, data=replace(cell.run.data, subset=subset)))

    return list(tables) if subset in (None, DEFAULT_SUBSET) else [table.map(define) for table in tables]


def describe_subset(tables: Sequence[Table]) -> str:
    """By which definition the runs on ImageNet-Subset are; empty if there are none."""
    runs = [run for run in list_cell_runs(tables) if run.data.name == "imagenet-subset"]
    subset = next((run.data.subset or DEFAULT_SUBSET for run in runs), None)
    return f"ImageNet-Subset is {SUBSETS[subset]} ({subset})" if subset else ""


def place_images(tables: Sequence[Table], images_on: Literal["device", "disk"] | None) -> list[Table]:
    """The tables with the images of ImageNet on the device or on the disk; None for wherever they fit."""
    if images_on is not None and not any(map(find_images_needed, list_cell_runs(tables))):
        raise UsageError(f"--images-on belongs to --dataset {' or '.join(SIZES)}: remove it")

    def place(cell: Cell) -> Cell:
        if cell.run is None or find_images_needed(cell.run) is None:
            return cell
        return replace(cell, run=replace(cell.run, data=replace(cell.run.data, images_on=images_on)))

    return [table.map(place) for table in tables]


def has_only_folders(tables: Sequence[Table]) -> bool:
    """Whether all runs are on ImageNet, so that --data is a folder of its images, and not that of CIFAR-100."""
    return {run.data.name for run in list_cell_runs(tables)} <= {*NAMES}


def refuse_without_images(tables: Sequence[Table]) -> None:
    """Refuse cells on images that one must have where these are not named."""
    needed = list_images_needed(tables)
    whose = " and ".join(DATASETS[name] for name in needed)
    if has_only_folders(tables):
        raise UsageError(f"these cells need the images of {whose}, which no download gives: name their folder: --data")
    if needed:
        there = " or ".join(name for name in SIZES if name.removesuffix("-subset") in needed)
        raise RunError(
            f"cells that need the images of {whose} are left empty: to measure them, name --dataset {there}, and the "
            "folder of its images with --data"
        )


def list_images_needed(tables: Sequence[Table]) -> list[str]:
    """The data sets whose images the cells of these tables need, and no download gives."""
    return list(dict.fromkeys(filter(None, map(find_images_needed, list_cell_runs(tables)))))
