"""`equipoise report`: the page, the tables and the figures."""

from __future__ import annotations

from ..report import report
from .arguments import Report


def do_report(f: Report) -> None:
    """Make a page, tables and figures that compare recorded numbers with those of the paper."""
    for path in report(f.results, f.out):
        print(f"wrote {path}")
