"""The chart at the top of the page: measured and published numbers, one row for each cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Html, h
from .words import format_number, format_signed, is_known

Plain = Mapping[str, Any]


def render_ours(cell: Plain) -> list[object]:
    """The measured number with its deviation, in different font weights."""
    std = cell["std"]
    return [format_number(cell["ours"]), h("span", f" ± {format_number(std)}", class_="std") if is_known(std) else ""]


def render_difference(value: float, state: str | None) -> Html:
    """The difference from the paper's number, with a mark for its size."""
    return h("span", h("i", class_="state") if state else "", format_signed(value), class_=f"difference {state or ''}")


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` of them."""
    rough = (high - low or 1) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next((k for k in (1, 2, 5) if k * power >= rough), 10)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def render_headline(rows: Sequence[Plain]) -> Html:
    """The chart at the top: a ring for the paper, a dot for ours; where they agree the dot lies in the ring."""
    known = [v for row in rows for v in (row["paper"], *compute_ends(row)) if is_known(v)]
    ticks = round_ticks(min(known), max(known))

    def x(value: float) -> str:
        return f"{100 * (value - ticks[0]) / (ticks[-1] - ticks[0]):.3f}%"

    def line(name: str, a: float, b: float, top: str = "50%", bottom: str = "50%") -> Html:
        return h("line", class_=name, x1=x(a), x2=x(b), y1=top, y2=bottom)

    def row_of(row: Plain) -> Html:
        ours, paper, measured = row["ours"], row["paper"], is_known(row["ours"])
        parts = [line("grid", v, v, "0", "100%") for v in ticks]
        parts += [line("link", paper, ours)] if measured else []
        parts += [line("whisker", min(compute_ends(row)), max(compute_ends(row)))] if len(compute_ends(row)) > 1 else []
        parts += [h("circle", class_="ring", cx=x(paper), cy="50%", r=6.5)]
        parts += [h("circle", class_="dot", cx=x(ours), cy="50%", r=3.8)] if measured else []
        track = h("td", h("svg", parts, aria_hidden="true"), class_="track")
        apart = render_difference(ours - paper, row["state"]) if measured else ""
        numbers = [h("td", render_ours(row), class_="ours" if measured else "paper")]
        numbers += [h("td", format_number(paper), class_="paper"), h("td", apart, class_="paper")]
        return h("tr", h("th", row["name"], scope="row"), track, numbers)

    def circle(name: str, r: float) -> Html:
        return h("svg", h("circle", class_=name, cx=8, cy=8, r=r), width=16, height=16, aria_hidden="true")

    names = [[circle("dot", 3.8), "measured"], [circle("ring", 6.5), "paper"], "difference"]
    head = h("tr", h("td"), h("td", class_="track"), [h("th", name, scope="col") for name in names])
    labels = [h("text", f"{v:g}".replace("-", "−"), class_="tick", x=x(v), y=14, text_anchor="middle") for v in ticks]
    foot = h("tr", h("td"), h("td", h("svg", labels), class_="track"), h("td", colspan=3))
    body = h("tbody", list(map(row_of, rows)))
    return h("table", h("thead", head), body, h("tfoot", foot, aria_hidden="true"), class_="headline")


def compute_ends(row: Plain) -> list[float]:
    """The measured number minus and plus its deviation."""
    ours, std = row["ours"], row["std"]
    if not is_known(ours):
        return []
    return [ours - std, ours + std] if is_known(std) else [ours]
