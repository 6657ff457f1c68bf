"""From records to what people read: tables, figures and one page. Needs no GPU, and equal records give equal files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import paper
from ..errors import DataError
from ..files import check_folder, claim_folder, remove_stale, write_file
from ..paper import Table
from ..paper.match import FilledRow, fill, recorded
from . import costs, tables
from .collect import collect_data
from .page import page
from .series import DATASETS

COSTS = {"md": costs.markdown, "tex": costs.latex, "csv": costs.comma_separated}


def report(results: Path, out: Path) -> list[Path]:
    """Write `index.html`, `README.md`, and every table and figure by itself; returns the first two."""
    from .figures import plt, save_png, svg  # matplotlib is slow to import, and only pictures need it
    from .pictures import draw, numbers

    check_folder(out, "report")
    records = recorded(results)
    if not records.found:
        raise DataError(f"{results} holds no result of a run: make some with equipoise paper, or name another folder")
    data = collect_data(records)
    filled = [(table, fill(table, records)) for table in (t.on(*DATASETS) for t in paper.tables()) if not table.alone]
    by_id = {found.id: found.result for found in records.found}
    texts = {"README.md": markdown(data, filled)}
    for table, rows in filled:
        texts[f"tables/{table.id}.md"] = tables.markdown(table, rows, commands=True)
        texts[f"tables/{table.id}.tex"] = tables.latex(table, rows, commands=True)
        texts[f"tables/{table.id}.csv"] = tables.comma_separated(table, rows)
    for ending, write in COSTS.items() if data["costs"] else ():
        texts[f"tables/costs.{ending}"] = write(data["costs"], True)
    texts |= {f"figures/{figure['id']}.csv": numbers(figure, by_id) for figure in data["figures"]}
    pictures = [f"figures/{figure['id']}.png" for figure in data["figures"]]
    names = ["index.html", *texts, *pictures]
    claim_folder(out, "report", names)
    remove_stale(out, "report", names)  # of records that are no longer there
    for name, text in texts.items():
        write_file(out / name, text.encode())
    for figure, name in zip(data["figures"], pictures):
        drawn = draw(figure, by_id)
        save_png(drawn, out / name)
        figure["svg"] = svg(drawn, figure["title"])
        plt.close(drawn)
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
    parts += [tables.markdown(table, rows).rstrip() for table, rows in filled if not table.figure]
    if data["costs"]:
        parts.append(costs.markdown(data["costs"]).rstrip())
    for figure in data["figures"]:
        parts += [f"### {figure['title']}", figure["caption"], f"![{figure['title']}](figures/{figure['id']}.png)"]
    parts.append("`tables/` has each table as Markdown, LaTeX and CSV, with the command that measures each cell.")
    return "\n\n".join(parts) + "\n"
