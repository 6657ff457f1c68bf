"""`equipoise show`: results in the terminal, and as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from ..errors import UsageError
from ..report.terminal import figures_for, for_output, load_results, print_result, print_table
from .words import hint, parse


@dataclass
class Show:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""

    dirs: Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold such folders"""
    figures: Annotated[Path | None, hint("none are made")] = None
    """folder to write the accuracy curve and the confusion matrices to, as PNG"""


def show_verb(argv: list[str]) -> None:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""
    f = parse(Show, "show", argv)
    if not f.dirs:
        raise UsageError("say which folders to show: equipoise show DIR [DIR ...]")
    results = load_results(f.dirs)
    console = for_output()
    if len(results) == 1:
        print_result(results[0], console)
    else:
        print_table(results, console)
    if f.figures is not None:
        for path in figures_for(results, f.figures):
            print(f"wrote {path}")
