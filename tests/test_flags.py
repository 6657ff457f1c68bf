"""How words become the values of a dataclass: every type that a flag may have, and the page that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from equipoise import UsageError
from equipoise.cli.flags import parse_arguments
from equipoise.errors import find_nearest


@dataclass
class Every:
    """Takes everything.

    In a second paragraph.
    """

    places: tuple[Path, ...]
    """folders"""
    whole: int = 3
    """a whole number"""
    real: float = 0.5
    """a number"""
    text: str = "a"
    """any text"""
    switch: bool = False
    """off, unless it is named"""
    on: bool = True
    """on, unless --no-on is"""
    choice: Literal["one", "two"] = "one"
    """which"""
    single: Literal["only"] = "only"
    """no choice"""
    several: tuple[int, ...] = (1, 2)
    """numbers"""
    choices: tuple[Literal["a", "b"], ...] = ("a",)
    """letters"""
    perhaps: int | None = None
    """a number, or none (default: as many as fit)"""
    maybe: bool | None = None
    """yes, no or neither"""
    either: float | str = "2%"
    """a number, or a percentage"""
    other: dict[str, int] | None = None
    """for Python"""
    two_words: int = 0
    """a name of two words"""


GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--whole 4", {"whole": 4}),
    ("--whole -4", {"whole": -4}),
    ("--whole=-4", {"whole": -4}),
    ("--whole 4 --whole 5", {"whole": 5}),
    ("--real 1e-3", {"real": 0.001}),
    ("--real -.5", {"real": -0.5}),
    ("--real -inf", {"real": float("-inf")}),
    ("--text a=b", {"text": "a=b"}),
    ("--text=--whole", {"text": "--whole"}),
    ("--text -1%", {"text": "-1%"}),
    ("--text -", {"text": "-"}),
    ("--text None", {"text": "None"}),
    ("--switch --no-on", {"switch": True, "on": False}),
    ("--switch --no-switch", {}),
    ("--choice two --single only", {"choice": "two"}),
    ("--several", {"several": ()}),
    ("--several 3 -4 5", {"several": (3, -4, 5)}),
    ("--several=3", {"several": (3,)}),
    ("--several 3 --several 4", {"several": (4,)}),
    ("--choices b a", {"choices": ("b", "a")}),
    ("--perhaps 5", {"perhaps": 5}),
    ("--perhaps 5 --perhaps None", {}),
    ("--maybe False", {"maybe": False}),
    ("--either 3", {"either": 3.0}),
    ("--either 3%", {"either": "3%"}),
    ("--two-words 1", {"two_words": 1}),
    ("--two_words 1", {"two_words": 1}),
]


@pytest.mark.parametrize(("words", "given"), GIVEN, ids=[words or "nothing" for words, _ in GIVEN])
def test_words_become_values(words: str, given: dict[str, Any]) -> None:
    assert parse_arguments(Every, "every", ["here", "--whole", "3", *words.split()]) == Every((Path("here"),), **given)


def test_words_after_no_flag_may_stand_anywhere() -> None:
    made = parse_arguments(Every, "every", ["a", "--whole", "4", "b", "--switch", "-1"])
    assert made == Every((Path("a"), Path("b"), Path("-1")), whole=4, switch=True)


REFUSED = {
    "--whole 1.0": "--whole: '1.0' is not a whole number",
    "--perhaps x": "--perhaps: 'x' is not a whole number",
    "--maybe yes": "--maybe: 'yes' is neither 'True' nor 'False'",
    "--choices a c": "--choices: 'c' is neither 'a' nor 'b'",
    "--single x": "--single: 'x' is not 'only'",
    "--several --whole 1.5": "--whole: '1.5' is not a whole number",
    "--other 3": "--other: it can be set in Python only",
    "--no-switch=1": "--no-switch takes no value",
    "--real --switch": "--real needs a value",
    "--swich": "unknown flag '--swich' (did you mean '--switch'?)",
    "--places x": "unknown flag '--places'",
}


@pytest.mark.parametrize(("words", "why"), REFUSED.items())
def test_words_that_fit_nothing_are_refused(words: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_arguments(Every, "every", ["here", *words.split()])
    assert str(refused.value) == f"{why}; equipoise every --help lists all flags"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        *(("oder", "order"), ("mem", "memory"), ("batch-size", "batch"), ("Epoch", "epochs")),
        *(("workers", None), ("e", None)),
    ],
)
def test_only_a_close_name_is_suggested(word: str, near: str | None) -> None:
    assert find_nearest(word, ["order", "memory", "batch", "epochs", "lr"]) == near


def test_the_help_explains_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    with pytest.raises(SystemExit) as end:
        parse_arguments(Every, "every", ["--unknown", "-h"])
    assert end.value.code == 0
    assert capsys.readouterr().out == PAGE


PAGE = """\
usage: equipoise every [--help] PLACES ... [--whole INT] [--real FLOAT]
       [--text VALUE] [--switch] [--on] [--choice VALUE]
       [--single VALUE] [--several INT ...] [--choices VALUE ...]
       [--perhaps INT] [--maybe VALUE] [--either VALUE] [--other VALUE]
       [--two-words INT]

Takes everything.

In a second paragraph.

  PLACES ...           folders
  --whole INT          a whole number (default: 3)
  --real FLOAT         a number (default: 0.5)
  --text VALUE         any text (default: a)
  --switch             off, unless it is named (default: False)
  --on, --no-on        on, unless --no-on is (default: True)
  --choice VALUE       which; one or two (default: one)
  --single VALUE       no choice; only (default: only)
  --several INT ...    numbers (default: 1 2)
  --choices VALUE ...  letters (default: a)
  --perhaps INT        a number, or none (default: as many as fit)
  --maybe VALUE        yes, no or neither (default: None)
  --either VALUE       a number, or a percentage (default: 2%)
  --other VALUE        for Python (default: None)
  --two-words INT      a name of two words (default: 0)
"""
