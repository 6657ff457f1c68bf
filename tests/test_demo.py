"""`equipoise demo`: the main job on embedded data, and whether what it says is what it measured."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from squares import digits_of

from equipoise import Method, Recipe
from equipoise.cli import demo, run_command

CASES = {"5": ("standard", "balanced", "meta"), "0": ("standard", "balanced", "relaxed")}


pytestmark = pytest.mark.usefixtures("isolated")


def said_of(text):
    """What the sentence claims: points against Standard by memory and remedy, and Standard's own accuracy."""
    (sentence,) = [line for line in text.splitlines() if line.startswith("In average incremental accuracy")]
    assert sentence.endswith(".")
    parts = dict(zip(("5", "0"), sentence.split(";"), strict=True))
    assert "with 5 images per class in memory" in parts["5"] and "without memory" in parts["0"]
    claims = {}
    for memory, part in parts.items():
        for remedy, points, where in re.findall(r"(\w+) ends ([\d.]+) points (above|below) standard", part):
            claims[memory, remedy] = float(points) if where == "above" else -float(points)
        claims[memory, "standard"] = float(re.search(r"\(([\d.]+)%\)", part)[1])
    return claims


def picture(path):
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    height, width, _ = pixels.shape
    assert 500 <= height <= 3000 and 1000 <= width <= 3000
    assert len(np.unique(pixels @ [1 << 16, 1 << 8, 1])) > 50, "colours"
    assert 0.02 < (pixels.min(2) < 200).mean() < 0.98
    edges = pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]
    assert [edge.min() > 250 for edge in edges] == [True] * 4, f"{path} is cut off: top, bottom, left, right"
    return pixels


@pytest.fixture
def half():
    with digits_of(70):
        yield


@pytest.mark.usefixtures("half")
def test_the_demo(capsys, monkeypatch):
    """In half its epochs, of half the images. What is asserted of accuracies, a wrong sign would break."""
    monkeypatch.setitem(Method.recipes, "tiny", Recipe(epochs=10, lr=0.1, batch=32))
    assert run_command(["demo", "--seeds", "1", "--out", "demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    folders = {
        (m, remedy): Path(f"demo/{remedy}_memory-{m}_seed-0") for m, remedies in CASES.items() for remedy in remedies
    }
    results = {case: json.loads((folder / "result.json").read_text()) for case, folder in folders.items()}
    average = {case: r["average_incremental_accuracy"] for case, r in results.items()}

    for (memory, remedy), r in results.items():
        s = r["run"]
        assert (s["method"]["remedy"]["name"], s["protocol"]["memory"], s["data"]["name"]) == (remedy, memory, "digits")
        assert (s["method"]["name"], s["protocol"]["base"], s["protocol"]["steps"]) == ("il-baseline", 5, 5)
        assert average[memory, remedy] == pytest.approx(np.mean([step["top1"] for step in r["steps"]]))
        assert f"{remedy}, memory {memory}, seed 0: average incremental accuracy {average[memory, remedy]:.2f}%" in out
    # What the paper is about.
    assert average["5", "balanced"] >= average["5", "standard"] + 15 and average["5", "balanced"] > 65
    assert average["0", "balanced"] > average["0", "standard"] + 5
    assert average["0", "relaxed"] > average["0", "standard"] + 5

    table = [line.split() for line in out.splitlines() if re.match(r" +[05] +[a-z]+ +\d", line)]
    for row, (memory, remedy) in zip(table, results, strict=True):
        final = results[memory, remedy]["final"]
        numbers = [average[memory, remedy], final["top1"], final["base"], final["new"]]
        assert row == [memory, remedy, *(f"{v:.2f}" for v in numbers)]
    for case, claim in said_of(out).items():
        true = average[case] if case[1] == "standard" else average[case] - average[case[0], "standard"]
        assert claim == pytest.approx(true, abs=0.0501)
    for name in ("accuracy.png", "confusion.png"):
        assert f"picture: demo/{name}" in out
        picture(f"demo/{name}")
    assert re.search(r"^6 runs, ", out, re.MULTILINE)
    assert not Path("store").exists() and not list(Path("home").iterdir())  # all of it is in its own folder

    # Again: nothing is trained, and the same is said.
    def fit(*args, **more):
        raise AssertionError("trained again")

    monkeypatch.setattr("equipoise.learner.fit", fit)
    assert run_command(["demo", "--seeds", "1", "--out", "demo"]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[:-1] == out.splitlines()[:-1]


# With made-up results, which cost nothing -------------------------------------------------------------------


def made_up(average, final=(50.0, 60.0, 40.0)):
    steps = [{"classes": n, "top1": average + 7 - n} for n in range(5, 11)]
    return {
        "average_incremental_accuracy": average,
        "final": dict(zip(("top1", "base", "new"), final)),
        "steps": steps,
        "confusion": np.eye(10, dtype=int).tolist(),
        "class_order": list(range(10)),
        "run": {"protocol": {"base": 5}},
    }


def by_case(averages):
    return {case: [made_up(a) for a in values] for case, values in averages.items()}


def test_the_sentence_says_above_and_below():
    averages = {
        ("5", "standard"): [40.0, 44.0],
        ("5", "balanced"): [70.2, 74.0],
        ("5", "meta"): [30.0, 31.0],
        ("0", "standard"): [60.0, 60.0],
        ("0", "balanced"): [20.0, 21.0],
        ("0", "relaxed"): [60.0, 60.5],
    }
    claims = said_of(demo.describe_results(by_case(averages)))
    expected = {("5", "standard"): 42.0, ("5", "balanced"): 30.1, ("5", "meta"): -11.5}
    expected |= {("0", "standard"): 60.0, ("0", "balanced"): -39.5}
    assert {k: claims[k] for k in expected} == pytest.approx(expected)
    assert claims["0", "relaxed"] == pytest.approx(0.25, abs=0.0501)


def test_the_sentence_does_not_make_a_difference_of_none():
    words = demo.describe_results(
        by_case({(m, remedy): [50.0] for m, remedies in CASES.items() for remedy in remedies})
    )
    assert "above" not in words and "below" not in words
    assert words.count("like standard") == 4
    assert "0.0 points like" not in words  # points are above or below, not like


@pytest.fixture
def quick(monkeypatch):
    """The demo without training: each run's accuracy follows from its settings."""
    done = []

    def run(run, out, machine, options):
        remedy, memory = run.method.remedy.name, run.protocol.memory
        assert (machine.device, options.store) == ("cpu", out.parent / "store")
        done.append((run.seed, memory, remedy))
        rank = {"standard": 30.0, "balanced": 60.0, "meta": 55.0, "relaxed": 20.0}[remedy] + int(memory)
        return made_up(rank + run.seed**2, (rank + run.seed, rank, rank - run.seed))

    monkeypatch.setattr(demo, "run", run)
    return done


def test_three_seeds_of_six_cases_make_a_table(capsys, quick):
    assert run_command(["demo"]) == 0
    out = capsys.readouterr().out
    assert quick == [(seed, m, remedy) for seed in range(3) for m, remedies in CASES.items() for remedy in remedies]
    assert "mean ± deviation over 3 seeds" in out
    # Averages are rank + (0, 1, 4): mean 5/3, deviation √(13/3); the final ones rank + (0, 1, 2) and rank - (0, 1, 2).
    row = next(line for line in out.splitlines() if re.match(r" +5 +balanced +\d", line))
    assert re.split(r"\s{2,}", row.strip()) == [
        "5",
        "balanced",
        "66.67 ± 2.08",
        "66.00 ± 1.00",
        "65.00 ± 0.00",
        "64.00 ± 1.00",
    ]
    claims = said_of(out)
    assert (claims["5", "balanced"], claims["5", "meta"], claims["0", "relaxed"]) == (30.0, 25.0, -10.0)
    assert re.search(r"^18 runs, ", out, re.MULTILINE)
    assert picture("demo/accuracy.png").shape != picture("demo/confusion.png").shape


@pytest.mark.parametrize("name", ["demo [new] pictures", "a" * 60 + "/" + "b" * 60])
def test_paths_are_printed_so_that_they_can_be_copied(capsys, quick, monkeypatch, name):
    monkeypatch.setattr(demo, "draw", lambda results, out: [out / "accuracy.png", out / "confusion.png"])
    assert run_command(["demo", "--seeds", "1", "--out", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("picture: ")] == [
        f"picture: {name}/accuracy.png",
        f"picture: {name}/confusion.png",
    ]


def test_a_terminal_gets_a_bar(quick, monkeypatch):
    monkeypatch.setattr(demo, "draw", lambda results, out: [])
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    demo.run_demo(Path("demo"), range(2), console)
    text = console.file.getvalue()
    assert "relaxed, memory 0, seed 1" in text and "\x1b[2K" in text
    assert said_of(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))["5", "balanced"] == 30.0


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--seeds", "-1"]])
def test_no_seeds_are_refused(capsys, words):
    assert run_command(["demo", *words]) == 2
    assert capsys.readouterr().err == f"equipoise: --seeds must be 1 or more, not {words[1]}\n"
    assert not Path("demo").exists()


def test_a_folder_with_a_picture_of_somebody_else_is_left_alone(capsys, quick):
    Path("mine").mkdir()
    Path("mine/accuracy.png").write_bytes(b"holiday")
    assert run_command(["demo", "--out", "mine"]) == 2
    assert "mine holds accuracy.png, which equipoise did not write" in capsys.readouterr().err
    assert quick == [] and [p.name for p in Path("mine").iterdir()] == ["accuracy.png"]
    assert Path("mine/accuracy.png").read_bytes() == b"holiday"


def test_a_folder_that_is_a_file(capsys):
    Path("demo").write_text("precious")
    assert run_command(["demo"]) in (1, 2)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith("equipoise: ") and "demo" in err
    assert "Errno" not in err
    assert Path("demo").read_text() == "precious"
