"""`equipoise show`: results in the terminal, and as pictures."""

from __future__ import annotations

from ..report.terminal import draw_figures, load_results, make_console, print_result, print_table
from .arguments import Show


def do_show(f: Show) -> None:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""
    results = load_results(f.dirs)
    console = make_console()
    if len(results) == 1:
        print_result(results[0], console)
    else:
        print_table(results, console)
    if f.figures is not None:
        for path in draw_figures(results, f.figures):
            print(f"wrote {path}")
