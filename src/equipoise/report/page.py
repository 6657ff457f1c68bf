"""The page of a report: one HTML file, made of the values that `collect.py` gathers.

The file asks nothing of the network and holds no date: made again from the same records, it is the same byte by byte.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote

from .headline import difference, headline, ours_of
from .markup import Html, counted, fixed, h, is_known, join, signed

Plain = Mapping[str, Any]


def page(data: Plain) -> str:
    """The whole HTML text."""
    sections = [one for one in sections_of(data) if one is not None]
    links = [h("a", title, href=f"#{id}") for id, title, _ in sections]
    parts = {
        "title": join(data.get("title") or "Report"),
        "subtitle": join(data.get("subtitle") or ""),
        "made": show_versions(data["made"]) if data.get("made") else "",
        "links": join(links),
        "main": join([h("section", h("h2", title), body, id=id) for id, title, body in sections]),
        "css": asset("page.css"),
        "js": asset("page.js"),
    }
    # All in one pass: a name that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], asset("page.html"))


def asset(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def sections_of(data: Plain) -> Iterator[tuple[str, str, object] | None]:
    """Id, title and content of every section; None for one of which there is nothing."""
    lines, tables, figures, runs = (data.get(name) or [] for name in ("headline", "tables", "figures", "runs"))
    caption = h("p", data["headline_caption"], class_="caption") if data.get("headline_caption") else ""
    titles = {run["id"]: run["title"] for run in runs}
    yield ("glance", "At a glance", [caption, headline(lines)]) if lines else None
    yield ("tables", "Tables", [key(data), [paper_table(table, titles) for table in tables]]) if tables else None
    yield ("figures", "Figures", h("div", list(map(figure_of, figures)), class_="figures")) if figures else None
    yield ("costs", "Cost", costs_of(data["costs"])) if data.get("costs") else None
    yield "runs", "Runs", run_list(runs) if runs else h("p", "No runs yet.", class_="nothing")


def address(id: str) -> str:
    """What a link to the element of that id leads to."""
    return f"#{quote(id, safe='')}"


def show_versions(made: Plain) -> Html:
    """What the numbers were made with."""
    parts = [f"Equipoise {made['equipoise']}", counted(made["runs"], "run"), ", ".join(made.get("hardware") or [])]
    parts += [f"torch {', '.join(made['torch'])}"] if made.get("torch") else []
    return join(" · ".join(filter(None, parts)))


# Numbers in cells -------------------------------------------------------------------------------------------------


def cell_words(cell: Plain) -> list[object]:
    """The paper's number and ours in a cell, ours large; what is not measured stays quiet."""
    paper = h("span", fixed(cell["paper"]), class_="paper") if is_known(cell.get("paper")) else ""
    if is_known(cell.get("ours")):
        apart = difference(cell["difference"], cell["state"]) if is_known(cell.get("difference")) else ""
        under = [paper, " ", apart, "ʲ" if cell.get("why") else ""]
        return [h("span", ours_of(cell), class_="ours"), h("span", under, class_="under")]
    if cell["state"] in ("quoted", "none"):
        return [paper]
    needs = str(cell.get("why") or "needs data").replace("-", "\u2011")  # a data set's name stays on one line
    why = h("span", needs, class_="why") if cell["state"] == "needs data" else "–"
    return [h("span", why, class_="ours quiet"), h("span", paper, class_="under")]


def cell_sentence(cell: Plain) -> str:
    """The numbers of a cell in words, for those who cannot see which is which."""
    measured, why = is_known(cell.get("ours")), cell.get("why")
    spread = f" ± {fixed(cell['std'])}" if is_known(cell.get("std")) else ""
    ours = f"measured {fixed(cell.get('ours'))}{spread} ({counted(cell['seeds'], 'seed')})"
    parts = [ours if measured else why or "not measured"]
    parts += [f"paper {fixed(cell['paper'])}"] if is_known(cell.get("paper")) else []
    parts += [f"difference {signed(cell['difference'])}, {cell['state']}"] if is_known(cell.get("difference")) else []
    return "; ".join([*parts, *([why] if measured and why else [])])


def sort_key(cell: Plain | None) -> dict[str, object]:
    """What a cell is sorted by: ours before what only the paper has, so that the two are never mixed."""
    if cell is not None and is_known(cell.get("ours")):
        return {"data_rank": 0, "data_key": cell["ours"]}
    if cell is not None and is_known(cell.get("paper")):
        return {"data_rank": 1, "data_key": cell["paper"]}
    return {}


# Tables -----------------------------------------------------------------------------------------------------------


def sort_header(title: str, number: bool = True) -> Html:
    """The head of a column, which sorts its rows."""
    return h("th", h("button", title, type="button"), scope="col", class_="number" if number else None)


def scrolling(label: str, table: Html) -> Html:
    """A box in which a wide table scrolls by itself, by the keyboard too."""
    return h("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def command_box(command: str | None) -> Html | str:
    """A command to run again, with a button that copies it. It is broken between words, never within `--flag`."""
    if not command:
        return ""
    words = [h("span", word) if word.strip() else word for word in re.split("( +)", command)]
    button = h("button", "Copy", type="button", class_="copy", aria_live="polite")
    return h("div", h("code", words), button, class_="command")


def table_cell(id: str, where: str, cell: Plain | None, titles: Mapping[str, str]) -> Html:
    """A cell; a click on it shows its numbers in words, the command that measures it, and the runs it comes from."""
    if cell is None:
        return h("td")
    runs = cell.get("runs") or []
    if not cell.get("command") and not runs:
        return h("td", h("div", cell_words(cell), class_="cell"), **sort_key(cell))
    sentence = cell_sentence(cell)
    links = [h("li", h("a", titles[run], href=address(f"run-{run}")) if run in titles else run) for run in runs]
    from_runs = [h("p", f"From {'these runs' if len(runs) > 1 else 'this run'}:"), h("ul", links)] if runs else ""
    words = [h("p", h("b", where), ": ", sentence), command_box(cell.get("command")), from_runs]
    button = h("button", cell_words(cell), type="button", class_="cell", aria_label=sentence, popovertarget=id)
    return h("td", button, h("div", words, class_="detail", id=id, popover=True), **sort_key(cell))


def group_headers(columns: Sequence[Plain]) -> Html | str:
    """Neighbouring columns of one group share a heading."""
    groups = [(name, len(list(own))) for name, own in itertools.groupby(columns, lambda column: column["group"])]
    if not any(name for name, _ in groups):
        return ""
    heads = [h("th", h("span", name) if name else "", colspan=n, scope="colgroup") for name, n in groups]
    return h("tr", h("td"), heads, class_="groups")


def paper_table(table: Plain, titles: Mapping[str, str]) -> Html:
    """A table of the paper; quoted rows have a body of their own and are sorted among themselves."""
    id, columns, rows = f"table-{table['id']}", table.get("columns") or [], table.get("rows") or []
    bodies: list[Html] = []
    for kind, quoted in (("measured", False), ("quoted", True)):
        lines = []
        for i, row in enumerate(rows):
            if bool(row.get("quoted")) != quoted:
                continue
            cells = {cell["column"]: cell for cell in row.get("cells") or []}
            tag = [" ", h("span", "quoted", class_="tag")] if quoted else ""
            name = h("th", row["name"], tag, scope="row", data_rank=0, data_key=row["name"])
            where = [", ".join(filter(None, (row["name"], c["group"], c["title"]))) for c in columns]
            numbers = [
                table_cell(f"cell-{table['id']}-{i}-{j}", where[j], cells.get(column["id"]), titles)
                for j, column in enumerate(columns)
            ]
            lines.append(h("tr", name, numbers))
        bodies += [h("tbody", lines, class_=kind)] if lines else []
    heads = [sort_header(table.get("names") or "method", number=False), *(sort_header(c["title"]) for c in columns)]
    head = h("thead", group_headers(columns), h("tr", heads))
    metric = table.get("metric") or ""
    caption = h("p", table.get("caption"), f" {metric[:1].upper()}{metric[1:]}." if metric else "", class_="caption")
    body = scrolling(table["title"], h("table", head, bodies, class_="paper"))
    return h("section", h("h3", table["title"]), caption, body, id=id, class_="table")


def number_in(text: str) -> float | None:
    """The number that a text is; None for other texts."""
    return float(text.replace(",", "").replace("−", "-")) if re.fullmatch(r"[−+-]?[\d,]*\.?\d+", text) else None


def plain_table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table of strings; columns of numbers are aligned and sorted as such."""
    numeric = [i > 0 and any(number_in(row[i]) is not None for row in rows) for i in range(len(columns))]

    def cell(i: int, text: str) -> Html:
        found = number_in(text) if numeric[i] else text
        keys: dict[str, object] = {} if found is None else {"data_rank": 0, "data_key": found}
        return h("td" if i else "th", text, scope=None if i else "row", class_="number" if numeric[i] else None, **keys)

    heads = [sort_header(title or "name", number) for title, number in zip(columns, numeric)]
    body = [h("tr", [cell(i, text) for i, text in enumerate(row)]) for row in rows]
    return scrolling(label, h("table", h("thead", h("tr", heads)), h("tbody", body), class_="plain"))


def key(data: Plain) -> list[Html | str]:
    """How to read a cell; what the marks mean comes with the data."""
    states = data.get("states") or {"close": "", "near": "", "off": ""}
    marks = [
        h("li", h("i", class_="state"), ": ".join(filter(None, (state, words))), class_=f"difference {state}")
        for state, words in states.items()
    ]
    links = [h("li", h("a", table["title"], href=address(f"table-{table['id']}"))) for table in data["tables"]]
    words = (
        "In a cell, large: measured here; below it, the paper’s number and the difference. Click a cell for its "
        "command and its runs, a header to sort."
    )
    jump = h("ul", links, class_="key jump") if len(links) > 2 else ""
    return [h("p", words, class_="key"), h("ul", marks, class_="key"), jump]


def costs_of(costs: Plain) -> Html:
    """The table of costs, of strings."""
    table = plain_table(costs["title"], costs.get("columns") or [], costs.get("rows") or [])
    return h("section", h("h3", costs["title"]), h("p", costs["caption"], class_="caption"), table, class_="table")


# Figures ----------------------------------------------------------------------------------------------------------


def figure_of(figure: Plain) -> Html:
    """A figure as it was drawn, with its title and caption."""
    drawn = Html(figure["svg"]) if figure.get("svg") else h("p", "Nothing measured yet.", class_="nothing")
    if figure["kind"] == "confusion":  # too wide for a phone
        drawn = scrolling(figure["title"], drawn)
    caption = h("figcaption", figure["caption"])
    return h("figure", h("h3", figure["title"]), drawn, caption, id=f"figure-{figure['id']}", class_=figure["kind"])


# Runs -------------------------------------------------------------------------------------------------------------

STEPS = {"step": "step", "classes": "classes", "top1": "all", "top5": "top 5", "base": "base", "new": "new"}
STEPS |= {"latest": "latest", "alpha": "α", "seconds": "seconds"}
"""what is shown of a step, and its heading"""
DIGITS = {"step": 0, "classes": 0, "alpha": 3, "seconds": 1}
"""of numbers that do not have two"""


def run_list(runs: Sequence[Plain]) -> list[Html]:
    """The runs, and a box that hides those in which not every word stands."""
    box = h(
        "input", id="filter", type="search", placeholder="Filter by words", autocomplete="off", spellcheck="false",
        aria_label="Filter the runs by words",
    )  # fmt: skip
    count = h("span", counted(len(runs), "run"), class_="count", role="status")
    return [h("div", box, count, class_="filter"), h("div", list(map(run_entry, runs)), class_="runs")]


def run_entry(run: Plain) -> Html:
    """All about a run, which unfolds."""
    numbers = [
        h("span", h("small", name), " ", fixed(run.get(name)))
        for name in ("average", "final")
    ]  # fmt: skip
    title = h("summary", h("span", run["title"], class_="title"), h("span", numbers, class_="numbers"))
    facts = {"average": "average", "final": "final", "final, base classes": "base", "final, new classes": "new"}
    where = {name: run.get(name) for name in ("hardware", "versions", "seconds", "reused")} | {"record": run["id"]}
    again = [h("h4", "Run it again"), command_box(run["command"])] if run.get("command") else ""
    steps = [h("h4", "Accuracy after each step"), steps_table(run)] if run.get("steps") else ""
    parts = [
        definitions("facts", {name: fixed(run.get(key)) for name, key in facts.items()}),
        again,
        h("div", h("div", steps), h("div", matrix_of(run)), class_="pair"),
        [h("h4", "Where it ran"), definitions("where", where)],
        [h("h4", "Settings"), definitions("settings", run.get("settings") or {})],
    ]
    return h("details", title, h("div", parts, class_="run"), id=f"run-{run['id']}")


def steps_table(run: Plain) -> Html:
    """The accuracies of a run after each step."""
    used = [k for k in STEPS if k != "alpha" or any(step.get("alpha") is not None for step in run["steps"])]
    rows = [[fixed(step.get(k), DIGITS.get(k, 2)) for k in used] for step in run["steps"]]
    return plain_table(f"Steps of {run['title']}", [STEPS[k] for k in used], rows)


def matrix_of(run: Plain) -> list[Html]:
    """The confusion matrix of a run."""
    from .figures import matrix_image  # matplotlib is slow to import, and only pictures need it

    head = h("h4", "Confusion after the last step")
    if not run.get("confusion"):
        return [head, h("p", "No confusion matrix in the record.", class_="nothing")]
    words = "Rows are true classes, in learning order; columns are predicted ones. The brighter, the more images."
    picture = h("img", src=matrix_image(run["confusion"], run["id"]), alt=words, class_="matrix")
    return [head, picture, h("p", words, class_="caption")]


def definitions(kind: str, values: Plain) -> Html:
    """Names and values side by side; what is not known is left out."""
    known = {name: value for name, value in values.items() if value is not None and value != ""}
    rows = [h("div", h("dt", name), h("dd", value)) for name, value in known.items()]
    return h("dl", rows, class_=kind)
