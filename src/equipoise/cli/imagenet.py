"""Cells of the paper's tables on ImageNet, whose images one must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ..data.folders import NAMES
from ..data.listing import DEFAULT_SUBSET, SUBSETS, Subset
from ..errors import RunError, UsageError
from ..paper import Cell, Table
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
        raise UsageError("--images-on belongs to --dataset imagenet or imagenet-subset: remove it")

    def place(cell: Cell) -> Cell:
        if cell.run is None or find_images_needed(cell.run) is None:
            return cell
        return replace(cell, run=replace(cell.run, data=replace(cell.run.data, images_on=images_on)))

    return [table.map(place) for table in tables]


def has_only_folders(tables: Sequence[Table]) -> bool:
    """Whether all runs are on ImageNet, so that --data is a folder of its images, and not that of CIFAR-100."""
    return {run.data.name for run in list_cell_runs(tables)} <= {*NAMES}


def refuse_without_images(tables: Sequence[Table]) -> None:
    """Refuse cells on ImageNet where its images are not named."""
    if has_only_folders(tables):
        raise UsageError("these cells need the images of ImageNet, which no download gives: name their folder: --data")
    if any(map(find_images_needed, list_cell_runs(tables))):
        raise RunError(
            "cells that need the images of ImageNet are left empty: to measure them, name --dataset imagenet-subset "
            "or imagenet, and the folder of its images with --data"
        )
