"""The paper's claims and what the records say of them, ready to be rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import format_count
from ..paper.claims import CLAIMS, SECTIONS, Cells, Judged, Verdict, judge
from ..paper.match import ONE, SEVERAL
from .grid import Grid, Line, Shown, render_markdown
from .tables import JOINED

TITLE = "Claim by claim"
CAPTION = (
    "Every sentence of the paper with a number or an order in it, in our words, and what the records say of it. A "
    f"number holds within {SEVERAL:.1f} points of the paper's ({ONE:.1f} with fewer than three seeds), a difference "
    "only with its sign. An order holds if the difference is above 0. What is “similar”, “competitive” or “almost” so "
    f"holds if ours are no further apart than the paper's own numbers, up to {SEVERAL:.1f} points ({ONE:.1f}). A claim "
    "of several settings holds if it does in all of them, “so far” if some are not run yet; one of “some” of them if "
    "it does in one"
)
MADE = (
    "Made from [the records](../results/README.md) by `equipoise paper claims --no-run --format markdown`. The numbers "
    "are those of cells of [the tables](../results/report/README.md); what the paper quotes from others is compared "
    "with as it is printed. Left out are sentences that no run decides: definitions, what costs by construction, and "
    "what might be combined."
)
COLOURED = {"holds": "close", "holds so far": "near", "does not hold": "off", "not run yet": "missing"}
"""the states of a claim, and that of the cell that shows it"""
MARKS = {True: "holds", False: "does not hold", None: "not run yet"}
FIELDS = ("claim", "where", "check", "rule", "paper", "ours", "seeds", "joined", "verdict")


def judge_claims(cells: Cells) -> list[Verdict]:
    """All claims of the paper, judged."""
    return judge(CLAIMS, cells)


def make_claims_grid(verdicts: Sequence[Verdict]) -> Grid:
    """A row for each claim."""
    return Grid(
        id="claims",
        title=TITLE,
        caption=f"{CAPTION}.{explain_joined(verdicts)} {count_states(verdicts)}",
        columns=[("", name) for name in ("where", "the paper", "measured", "seeds", "verdict")],
        rows=[Line(f"{k}. {one.claim.text}", show_verdict(one)) for k, one in enumerate(verdicts, 1)],
        commands=[],
        numbers=[FIELDS, *list_checks(verdicts)],
        sentences=True,
    )


def show_verdict(one: Verdict) -> list[Shown]:
    """The cells of a claim."""
    ours = format_range([format_ours(judged) for judged in one.checks])
    seeds = sorted({judged.seeds for judged in one.checks if judged.ours is not None})
    return [
        Shown(one.claim.where),
        Shown(format_range([format_number(judged, judged.paper) for judged in one.checks])),
        Shown(ours, state="measured" if seeds else "missing"),
        Shown(" to ".join(map(str, dict.fromkeys((*seeds[:1], *seeds[-1:])))) or "–"),
        Shown(describe_verdict(one), state=COLOURED[one.state]),
    ]


def describe_verdict(one: Verdict) -> str:
    """The verdict, with the number of checks that it rests on where there are several."""
    good, bad, _ = one.counts
    if len(one.checks) == 1 or one.state == "not run yet":
        return one.state
    if one.state == "does not hold":
        return f"does not hold ({bad} of {good + bad} fail)"
    return f"{one.state} ({good} of {len(one.checks)})"


def format_number(judged: Judged, value: float | None) -> str:
    """A number of a check; empty if there is none."""
    return "" if value is None else judged.check.form.format(value).replace("-", "−")


def format_ours(judged: Judged) -> str:
    """The measured number of a check, marked where joined batches stand in."""
    number = format_number(judged, judged.ours)
    return number + JOINED if number and judged.joined else number


def format_range(texts: Sequence[str]) -> str:
    """Up to four numbers one by one, more as a range; a dash for none."""
    known = [text for text in texts if text]
    if len(known) <= 4:
        return "; ".join(known) or "–"
    low, *_, high = sorted(known, key=parse)
    return f"{low} to {high}"


def parse(text: str) -> float:
    """The number of a text of `format_ours`."""
    return float(text.rstrip(f"%{JOINED}").replace("−", "-"))


def explain_joined(verdicts: Sequence[Verdict]) -> str:
    """A sentence about joined batches, if they stand in anywhere."""
    checks = [judged for one in verdicts for judged in one.checks]
    if not any(judged.joined for judged in checks if judged.ours is not None):
        return ""
    return f" {JOINED} with joined batches, where runs with short ones have no record yet; the two are not compared."


def count_states(verdicts: Sequence[Verdict]) -> str:
    """How many claims hold, and so on, as a sentence."""
    counts = Counter(one.state for one in verdicts)
    words = ", ".join(f"{state} {counts[state]}" for state in COLOURED if counts[state])
    return f"{format_count(len(verdicts), 'claim').capitalize()}: {words}."


def list_checks(verdicts: Sequence[Verdict]) -> Iterator[tuple[object, ...]]:
    """A line for each check."""
    for k, one in enumerate(verdicts, 1):
        for judged in one.checks:
            check, known = judged.check, judged.ours is not None
            paper, ours = ("" if value is None else f"{value:.4f}" for value in (judged.paper, judged.ours))
            yield (
                *(f"{k}. {one.claim.text}", one.claim.where, check.what, check.rule, paper, ours),
                *(judged.seeds if known else 0, "yes" if known and judged.joined else "no", MARKS[judged.holds]),
            )


def show_checks(verdicts: Sequence[Verdict], first: int = 1) -> list[list[str]]:
    """A row for each check, as text: the number of its claim, what it is of, both numbers, seeds and verdict."""
    return [
        [
            f"{k}. {judged.check.what}",
            format_number(judged, judged.paper) or "–",
            format_ours(judged) or "–",
            "–" if judged.ours is None else str(judged.seeds),
            MARKS[judged.holds],
        ]
        for k, one in enumerate(verdicts, first)
        for judged in one.checks
    ]


CHECKS = ("check", "the paper", "measured", "seeds", "verdict")
"""the columns of `show_checks`"""


def collect_claims(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The values of the claims, as strings."""
    grid = make_claims_grid(verdicts)
    return {
        "title": grid.title,
        "caption": grid.caption,
        "columns": ["claim", *(name for _, name in grid.columns)],
        "rows": [[line.name, *(cell.text for cell in line.cells)] for line in grid.rows],
        "states": [COLOURED[one.state] for one in verdicts],
        "check_columns": list(CHECKS),
        "checks": show_checks(verdicts),
    }


def write_claims(verdicts: Sequence[Verdict]) -> str:
    """A page of Markdown: the claims of each section of the paper, and below them every check."""
    whole = make_claims_grid(verdicts)
    parts = [f"# {TITLE}", f"{whole.caption}", MADE]
    at = 0
    for title, claims in SECTIONS.items():
        own = verdicts[at : at + len(claims)]
        part = whole._replace(title=title, caption=count_states(own), rows=whole.rows[at : at + len(claims)])
        rows = [f"| {' | '.join(row)} |" for row in show_checks(own, at + 1)]
        parts += [
            render_markdown(part).strip().replace("### ", "## ", 1),
            "<details><summary>Every check</summary>",
            "\n".join([f"| {' | '.join(CHECKS)} |", "| --- |" + " ---: |" * (len(CHECKS) - 1), *rows]),
            "</details>",
        ]
        at += len(claims)
    return "\n\n".join(parts) + "\n"
