"""From records to what people read: tables, figures and one page. Needs no GPU, and equal records give equal files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import paper
from ..checkpoint import write_file
from ..compare import FilledRow, fill, recorded
from ..errors import DataError
from ..paper import Table
from . import tables
from .collect import DATASETS, collected
from .page import page
from .pictures import numbers, picture

FORMS = {"md": tables.markdown, "tex": tables.latex, "csv": tables.comma_separated}


def report(results: Path, out: Path) -> list[Path]:
    """Write `index.html`, `README.md`, and every table and figure by itself; returns the first two."""
    records = recorded(results)
    if not records.found:
        raise DataError(f"{results} holds no result of a run: make some with equipoise paper, or name another folder")
    data = collected(records)
    filled = [(table, fill(table, records)) for table in (t.on(*DATASETS) for t in paper.tables()) if not table.alone]
    for table, rows in filled:
        for ending, form in FORMS.items():
            write_file(out / "tables" / f"{table.id}.{ending}", form(table, rows).encode())
    by_id = {found.id: found.result for found in records.found}
    for figure in data["figures"]:
        if figure["kind"] == "lines":
            write_file(out / "figures" / f"{figure['id']}.csv", numbers(figure).encode())
        picture(figure, by_id, out / "figures" / f"{figure['id']}.png")
    write_file(out / "README.md", markdown(data, filled).encode())
    write_file(out / "index.html", page(data).encode())
    return [out / "index.html", out / "README.md"]


def markdown(data: Mapping[str, Any], filled: Sequence[tuple[Table, list[FilledRow]]]) -> str:
    """The whole report in Markdown, with pictures beside it."""
    made = data["made"]
    parts = [
        f"# {data['title']}",
        f"{data['subtitle']} Made of {made['runs']} recorded runs on {' and '.join(made['hardware'])}, torch "
        f"{', '.join(made['torch'])}. Numbers in italics are quoted from other papers.",
    ]
    parts += [tables.markdown(table, rows).rstrip() for table, rows in filled if table.id.startswith("table")]
    if data["costs"]:
        parts.append(cost_table(data["costs"]))
    for figure in data["figures"]:
        parts += [f"### {figure['title']}", figure["caption"], f"![{figure['title']}](figures/{figure['id']}.png)"]
    parts.append("`tables/` has each table as Markdown, LaTeX and CSV, the CSV with the command that measures a cell.")
    return "\n\n".join(parts) + "\n"


def cost_table(costs: Mapping[str, Any]) -> str:
    """What a loss costs, as Markdown."""
    columns = costs["columns"]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in costs["rows"]]
    return f"### {costs['title']}\n\n{costs['caption']}\n\n" + "\n".join(lines)
