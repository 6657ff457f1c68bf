"""`equipoise show`: results in the terminal, and as pictures."""

from __future__ import annotations

from ..report.terminal import figures_for, for_output, load_results, print_result, print_table
from .arguments import Show


def show_verb(f: Show) -> None:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""
    results = load_results(f.dirs)
    console = for_output()
    if len(results) == 1:
        print_result(results[0], console)
    else:
        print_table(results, console)
    if f.figures is not None:
        for path in figures_for(results, f.figures):
            print(f"wrote {path}")
