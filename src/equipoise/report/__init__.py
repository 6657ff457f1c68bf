"""Makes tables, figures and one page from records. Needs no GPU, and equal records give equal files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import paper
from ..errors import DataError
from ..files import check_folder, claim_folder, remove_stale, write_file
from ..paper.claims import find_cells
from ..paper.match import fill, load_records
from . import grid
from .claims import judge_claims, make_claims_grid
from .collect import collect_data
from .gaps import make_gaps
from .grid import Grid
from .page import render_page
from .series import DATASETS, list_points
from .tables import make_grid


def report(results: Path, out: Path) -> list[Path]:
    """Write `index.html`, `README.md`, and every table and figure by itself; returns the first two."""
    from .figures import draw, plt, render_svg, save_png  # matplotlib is slow to import, and only pictures need it

    check_folder(out, "report")
    records = load_records(results)
    if not records.found:
        raise DataError(f"{results} holds no result of a run: make some with equipoise paper, or name another folder")
    data = collect_data(records)
    filled = [(table, fill(table, records)) for table in (t.on(*DATASETS) for t in paper.make_tables())]
    grids = [(table, make_grid(table, rows)) for table, rows in filled if data["costs"] or not table.alone]
    more = [make_gaps(filled), make_claims_grid(judge_claims(find_cells(filled)))]
    texts = {"README.md": write_markdown(data, [*(made for table, made in grids if not table.figure), *more])}
    for made in [*(made for _, made in grids), *more]:
        texts[f"tables/{made.id}.md"] = grid.render_markdown(made, commands=True)
        texts[f"tables/{made.id}.tex"] = grid.render_latex(made, commands=True)
        texts[f"tables/{made.id}.csv"] = grid.write_csv(made.numbers)
    texts |= {f"figures/{figure['id']}.csv": list_points(figure) for figure in data["figures"]}
    pictures = [f"figures/{figure['id']}.png" for figure in data["figures"]]
    names = ["index.html", *texts, *pictures]
    claim_folder(out, "report", names)
    remove_stale(out, "report", names)  # of records that are no longer there
    for name, text in texts.items():
        write_file(out / name, text.encode())
    for figure, name in zip(data["figures"], pictures):
        drawn = draw(figure)
        save_png(drawn, out / name)
        figure["svg"] = render_svg(drawn, figure["title"])
        plt.close(drawn)
    write_file(out / "index.html", render_page(data).encode())
    return [out / "index.html", out / "README.md"]


def write_markdown(data: Mapping[str, Any], grids: Sequence[Grid]) -> str:
    """The whole report in Markdown, with pictures beside it."""
    made = data["made"]
    parts = [
        f"# {data['title']}",
        f"{data['subtitle']} Made of {made['runs']} recorded runs on {' and '.join(made['hardware'])}, torch "
        f"{', '.join(made['torch'])}. Numbers in italics are quoted from other papers.",
    ]
    parts += [grid.render_markdown(one).rstrip() for one in grids]
    for figure in data["figures"]:
        parts += [f"### {figure['title']}", figure["caption"], f"![{figure['title']}](figures/{figure['id']}.png)"]
    parts.append("`tables/` has each table as Markdown, LaTeX and CSV, with the command that measures each cell.")
    return "\n\n".join(parts) + "\n"
