"""`equipoise report`: the page, the tables and the figures."""

from __future__ import annotations

from ..report import report
from .arguments import Report


def do_report(f: Report) -> None:
    """Make one page, and every table and figure, of the paper's numbers and the recorded ones beside them."""
    for path in report(f.results, f.out):
        print(f"wrote {path}")
