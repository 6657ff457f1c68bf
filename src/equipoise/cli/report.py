"""`equipoise report`: the page, the tables and the figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from ..report import report
from .words import parse


@dataclass
class Report:
    """Make the page, the tables and the figures from records alone."""

    results: Positional[Path]
    """folder of records"""
    out: Path = Path("report")
    """folder to write to"""


def report_verb(argv: list[str]) -> None:
    """Make one page, and every table and figure, of the paper's numbers and the recorded ones beside them."""
    f = parse(Report, "report", argv)
    for path in report(f.results, f.out):
        print(f"wrote {path}")
