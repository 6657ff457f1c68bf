"""The page of a report: one HTML file, made of the values from `collect.py`.

The file asks nothing of the network and holds no date: made again from the same records, it is the same byte by byte.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote

from ..errors import format_count
from .headline import render_difference, render_headline, render_ours
from .markup import Html, h, join
from .words import STEPS, format_number, format_signed, format_steps, is_known

Plain = Mapping[str, Any]


def render_page(data: Plain) -> str:
    """The HTML of the page."""
    sections = list(make_sections(data))
    parts = {
        "title": join(data["title"]),
        "subtitle": join(data["subtitle"]),
        "made": show_versions(data["made"]),
        "links": join([h("a", title, href=f"#{id}") for id, title, _ in sections]),
        "main": join([h("section", h("h2", title), body, id=id) for id, title, body in sections]),
        "css": read_asset("page.css"),
        "js": read_asset("page.js"),
    }
    # All in one pass: a name that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], read_asset("page.html"))


def read_asset(name: str) -> str:
    """The text of a file in this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def make_sections(data: Plain) -> Iterator[tuple[str, str, object]]:
    """Id, title and content of every section that is not empty, and of the runs."""
    tables, runs = data["tables"], data["runs"]
    if data["headline"]:
        caption = h("p", data["headline_caption"], class_="caption")
        yield "glance", "At a glance", [caption, render_headline(data["headline"])]
    if tables:
        titles = {run["id"]: run["title"] for run in runs}
        yield "tables", "Tables", [render_legend(data), [render_paper_table(table, titles) for table in tables]]
    if data.get("gaps"):
        gaps = data["gaps"]
        yield "gaps", "Gaps", add_title(gaps, render_plain_table(gaps["title"], gaps["columns"], gaps["rows"]))
    if data.get("claims"):
        yield "claims", data["claims"]["title"], render_claims(data["claims"])
    if data["figures"]:
        yield "figures", "Figures", h("div", list(map(render_figure, data["figures"])), class_="figures")
    if data["costs"]:
        costs = data["costs"]
        table = render_plain_table(costs["title"], costs["columns"], costs["rows"])
        yield "costs", "Cost", add_title(costs, table)
    yield "runs", "Runs", render_runs(runs) if runs else h("p", "No runs yet.", class_="nothing")


def link_to(id: str) -> str:
    """The address of the element with this id."""
    return f"#{quote(id, safe='')}"


def show_versions(made: Plain) -> Html:
    """The versions and hardware behind the numbers."""
    versions = f"Equipoise {made['equipoise']}", format_count(made["runs"], "run"), ", ".join(made["hardware"])
    return join(" · ".join([*versions, f"torch {', '.join(made['torch'])}"]))


# Numbers in cells -------------------------------------------------------------------------------------------------


def render_numbers(cell: Plain) -> list[object]:
    """The paper's number and ours in a cell, ours in large type, if it is measured."""
    paper = h("span", format_number(cell["paper"]), class_="paper") if is_known(cell["paper"]) else ""
    if is_known(cell["ours"]):
        apart = render_difference(cell["difference"], cell["state"]) if is_known(cell["difference"]) else ""
        under = [paper, " ", apart, "ʲ" if cell["why"] else ""]
        return [h("span", render_ours(cell), class_="ours"), h("span", under, class_="under")]
    if cell["state"] in ("quoted", "none"):
        return [paper]
    needs = str(cell["why"]).replace("-", "\u2011")  # a data set's name stays on one line
    why = h("span", needs, class_="why") if cell["state"] == "needs data" else "–"
    return [h("span", why, class_="ours quiet"), h("span", paper, class_="under")]


def describe_cell(cell: Plain) -> str:
    """The numbers of a cell in words, for screen readers."""
    spread = f" ± {format_number(cell['std'])}" if is_known(cell["std"]) else ""
    ours = f"measured {format_number(cell['ours'])}{spread} ({format_count(cell['seeds'], 'seed')})"
    parts = [ours if is_known(cell["ours"]) else cell["why"] or "not measured"]
    if is_known(cell["paper"]):
        parts.append(f"{cell['source']} {format_number(cell['paper'])}")
    if is_known(cell["difference"]):
        parts.append(f"difference {format_signed(cell['difference'])}, {cell['state']}")
    if is_known(cell["ours"]) and cell["why"]:
        parts.append(cell["why"])
    return "; ".join(parts)


def make_sort_key(cell: Plain) -> dict[str, object]:
    """The sort key of a cell: measured cells come before those with a published number only."""
    for rank, name in enumerate(("ours", "paper")):
        if is_known(cell[name]):
            return {"data_rank": rank, "data_key": cell[name]}
    return {}


# Tables -----------------------------------------------------------------------------------------------------------


def render_header(title: str, number: bool = True) -> Html:
    """The header of a column; a click sorts by it."""
    return h("th", h("button", title, type="button"), scope="col", class_="number" if number else None)


def render_scroll_box(label: str, table: Html) -> Html:
    """A box in which a wide table scrolls by itself, by the keyboard too."""
    return h("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def render_command(command: str) -> Html:
    """A command to run again, with a button that copies it. It is broken between words, never within `--flag`."""
    words = [h("span", word) if word.strip() else word for word in re.split("( +)", command)]
    button = h("button", "Copy", type="button", class_="copy", aria_live="polite")
    return h("div", h("code", words), button, class_="command")


def render_cell(id: str, where: str, cell: Plain, titles: Mapping[str, str]) -> Html:
    """A cell; a click on it shows its numbers in words, the command that measures it, and the runs it comes from."""
    runs = cell["runs"]
    if not cell["command"] and not runs:
        return h("td", h("div", render_numbers(cell), class_="cell"), **make_sort_key(cell))
    sentence = describe_cell(cell)
    links = [h("li", h("a", titles[run], href=link_to(f"run-{run}")) if run in titles else run) for run in runs]
    from_runs = [h("p", f"From {'these runs' if len(runs) > 1 else 'this run'}:"), h("ul", links)] if runs else ""
    words = [h("p", h("b", where), ": ", sentence), render_command(cell["command"]), from_runs]
    button = h("button", render_numbers(cell), type="button", class_="cell", aria_label=sentence, popovertarget=id)
    return h("td", button, h("div", words, class_="detail", id=id, popover=True), **make_sort_key(cell))


def group_headers(columns: Sequence[Plain]) -> Html | str:
    """Headings above the columns: neighbours of one group share one."""
    groups = [(name, len(list(own))) for name, own in itertools.groupby(columns, lambda column: column["group"])]
    if not any(name for name, _ in groups):
        return ""
    heads = [h("th", h("span", name) if name else "", colspan=n, scope="colgroup") for name, n in groups]
    return h("tr", h("td"), heads, class_="groups")


def render_tag(row: Plain) -> Html:
    """The tag of a quoted row, which leads to the table that measures it, if there is one."""
    tag = h("span", "quoted", class_="tag")
    where = row["elsewhere"]
    return h("a", tag, href=link_to(f"table-{where}"), title=f"measured in the table {where}") if where else tag


def render_paper_table(table: Plain, titles: Mapping[str, str]) -> Html:
    """A table of the paper; quoted rows are in a separate body and sorted separately."""
    columns, bodies = table["columns"], {"measured": list[Html](), "quoted": list[Html]()}
    for i, row in enumerate(table["rows"]):
        cells = {cell["column"]: cell for cell in row["cells"]}
        tag = [" ", render_tag(row)] if row["quoted"] else ""
        line = [h("th", row["name"], tag, scope="row", data_rank=0, data_key=row["name"])]
        for j, column in enumerate(columns):
            where = ", ".join(filter(None, (row["name"], column["group"], column["title"])))
            cell = cells.get(column["id"])
            line.append(render_cell(f"cell-{table['id']}-{i}-{j}", where, cell, titles) if cell else h("td"))
        bodies["quoted" if row["quoted"] else "measured"].append(h("tr", line))
    heads = [render_header(table["names"], number=False), *(render_header(column["title"]) for column in columns)]
    head = h("thead", group_headers(columns), h("tr", heads))
    body = [h("tbody", lines, class_=kind) for kind, lines in bodies.items() if lines]
    box = render_scroll_box(table["title"], h("table", head, body, class_="paper"))
    return add_title(table, box, f"table-{table['id']}")


def add_title(table: Plain, box: Html, id: str | None = None) -> Html:
    """A table under its title and caption."""
    caption = h("p", table["caption"], class_="caption")
    return h("section", h("h3", table["title"]), caption, box, id=id, class_="table")


def parse_number(text: str) -> float | None:
    """Parse a text as a number; None if it is none."""
    return float(text.replace(",", "").replace("−", "-")) if re.fullmatch(r"[−+-]?[\d,]*\.?\d+", text) else None


def render_plain_table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table of strings; columns of numbers are aligned and sorted as such."""
    numeric = [i > 0 and any(parse_number(row[i]) is not None for row in rows) for i in range(len(columns))]

    def cell(i: int, text: str) -> Html:
        found = parse_number(text) if numeric[i] else text
        keys: dict[str, object] = {} if found is None else {"data_rank": 0, "data_key": found}
        return h("td" if i else "th", text, scope=None if i else "row", class_="number" if numeric[i] else None, **keys)

    heads = [render_header(title or "name", number) for title, number in zip(columns, numeric)]
    body = [h("tr", [cell(i, text) for i, text in enumerate(row)]) for row in rows]
    return render_scroll_box(label, h("table", h("thead", h("tr", heads)), h("tbody", body), class_="plain"))


def render_claims(claims: Plain) -> list[Html]:
    """The claims with their verdicts, and folded below them every check."""
    rows = []
    for row, state in zip(claims["rows"], claims["states"]):
        rows.append([*row[:-1], h("span", h("i", class_="state"), row[-1], class_=f"difference {state}")])
    table = render_plain_table(claims["title"], claims["columns"], rows)
    checks = render_plain_table("Every check", claims["check_columns"], claims["checks"])
    return [h("p", claims["caption"], class_="caption"), table, h("details", h("summary", "Every check"), checks)]


def render_legend(data: Plain) -> list[Html | str]:
    """How to read a cell; the data explains the marks."""
    marks = [
        h("li", h("i", class_="state"), f"{state}: {words}", class_=f"difference {state}")
        for state, words in data["states"].items()
    ]
    links = [h("li", h("a", table["title"], href=link_to(f"table-{table['id']}"))) for table in data["tables"]]
    words = (
        "In a cell, large: measured here; below it, the paper’s number and the difference. Click a cell for its "
        "command and its runs, a header to sort."
    )
    jump = h("ul", links, class_="key jump") if len(links) > 2 else ""
    return [h("p", words, class_="key"), h("ul", marks, class_="key"), jump]


# Figures ----------------------------------------------------------------------------------------------------------


def render_figure(figure: Plain) -> Html:
    """A figure as it was drawn, with its title and caption."""
    drawn = Html(figure["svg"])
    if figure["kind"] == "confusion":  # too wide for a phone
        drawn = render_scroll_box(figure["title"], drawn)
    caption = h("figcaption", figure["caption"])
    return h("figure", h("h3", figure["title"]), drawn, caption, id=f"figure-{figure['id']}", class_=figure["kind"])


# Runs -------------------------------------------------------------------------------------------------------------


def render_runs(runs: Sequence[Plain]) -> list[Html]:
    """The runs, and a search box that hides runs without all of its words."""
    box = h(
        "input", id="filter", type="search", placeholder="Filter by words", autocomplete="off", spellcheck="false",
        aria_label="Filter the runs by words",
    )  # fmt: skip
    count = h("span", format_count(len(runs), "run"), class_="count", role="status")
    return [h("div", box, count, class_="filter"), h("div", list(map(render_run, runs)), class_="runs")]


def render_run(run: Plain) -> Html:
    """The details of a run, folded."""
    from .figures import encode_matrix  # matplotlib is slow to import, and only pictures need it

    numbers = [h("span", h("small", name), " ", format_number(run[name])) for name in ("average", "final")]
    title = h("summary", h("span", run["title"], class_="title"), h("span", numbers, class_="numbers"))
    facts = {"average": "average", "final": "final", "final, base classes": "base", "final, new classes": "new"}
    where = {name: run[name] for name in ("hardware", "versions", "seconds", "reused")} | {"record": run["id"]}
    words = "Rows are true classes, in learning order; columns are predicted ones. The brighter, the more images."
    used = [name for name in STEPS if name != "alpha" or any(step["alpha"] is not None for step in run["steps"])]
    rows = format_steps(run["steps"], used)
    steps = render_plain_table(f"Steps of {run['title']}", [STEPS[name] for name in used], rows)
    matrix = h("img", src=encode_matrix(run["confusion"], run["id"]), alt=words, class_="matrix")
    confusion = [h("h4", "Confusion after the last step"), matrix, h("p", words, class_="caption")]
    parts = [
        render_definitions("facts", {name: format_number(run[key]) for name, key in facts.items()}),
        [h("h4", "Run it again"), render_command(run["command"])] if run["command"] else "",
        h("div", h("div", h("h4", "Accuracy after each step"), steps), h("div", confusion), class_="pair"),
        [h("h4", "Where it ran"), render_definitions("where", where)],
        [h("h4", "Settings"), render_definitions("settings", run["settings"])],
    ]
    return h("details", title, h("div", parts, class_="run"), id=f"run-{run['id']}")


def render_definitions(kind: str, values: Plain) -> Html:
    """Names and values side by side; unknown values are left out."""
    known = {name: value for name, value in values.items() if value is not None and value != ""}
    rows = [h("div", h("dt", name), h("dd", value)) for name, value in known.items()]
    return h("dl", rows, class_=kind)
