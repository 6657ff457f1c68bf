"""`equipoise show`: what was recorded, in tables and pictures."""

import json
import os
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise import methods
from equipoise.cli import run_command
from equipoise.paper.match import load_records as read_records
from equipoise.settings import to_plain
from equipoise.step import plan_for

DIGITS = ("run", "il-baseline", "--dataset", "digits", "--epochs", "1", "--base", "4", "--steps", "2")


pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Real runs: three seeds of Balanced, one of Standard and one of Meta."""
    folder = tmp_path_factory.mktemp("recorded")
    cases = {f"balanced-{seed}": ["--remedy", "balanced", "--seed", str(seed)] for seed in (0, 1, 2)}
    cases |= {"standard": ["--remedy", "standard"], "meta": ["--remedy", "meta"]}
    for name, words in cases.items():
        words = [*DIGITS, "--memory", "5", *words, "--store", str(folder / "store"), "--out", str(folder / name)]
        assert run_command(words) == 0
    return folder


@pytest.fixture
def runs(recorded, tmp_path):
    for name in ("balanced-0", "balanced-1", "balanced-2", "standard", "meta"):
        shutil.copytree(recorded / name, tmp_path / "runs" / name)
    return Path("runs")


def result(folder):
    return json.loads((Path(folder) / "result.json").read_text())


def changed(folder, to, settings):
    """A copy of a run with other settings, by their flat names; those of the machine are not the run's."""
    shutil.copytree(folder, to)
    r = result(to)
    for name, value in settings.items():
        *parts, last = name.split(".")
        inside = r if parts[:1] == ["machine"] else r["run"]
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[last] = value
    if "protocol.base" in settings:  # in every step what was in the last
        p, last = r["run"]["protocol"], r["steps"][-1]
        each = (10 - p["base"]) // p["steps"]
        times = range(p["steps"] + 1)
        r["steps"] = [last | {"step": t, "classes": p["base"] + each * t, "by_step": [50.0] * (t + 1)} for t in times]
        r |= {"average_incremental_accuracy": last["top1"], "average_incremental_accuracy_top5": last["top5"]}
        r["alpha"] = [None for _ in times]
    (to / "result.json").write_text(json.dumps(r))
    return to


def shown(capsys, *words):
    capsys.readouterr()
    code = run_command(["show", *map(str, words)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    return said.out


def refused(capsys, code, *words):
    capsys.readouterr()
    assert run_command(["show", *map(str, words)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1 and said.err.startswith("equipoise: ")
    return said.err


def table(text):
    """The rows of a table as dicts, by the names of its columns."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch(r" *[─-]+ *", line))
    names = re.split(r"\s{2,}", lines[rule - 1].strip())
    rows = []
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        rows.append(dict(zip(names, re.split(r"\s{2,}", line.strip()), strict=True)))
    return " ".join(" ".join(lines[: rule - 1]).split()), rows


def over(folders, get):
    values = [get(result(f)) for f in folders]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


MEASURED = {
    "average": lambda r: r["average_incremental_accuracy"],
    "final": lambda r: r["final"]["top1"],
    "base": lambda r: r["final"]["base"],
    "new": lambda r: r["final"]["new"],
    "forgetting": lambda r: r["forgetting"],
}


@pytest.mark.parametrize("name", ["standard", "meta"])
def test_one_run_is_shown_step_by_step(capsys, runs, name):
    r = result(runs / name)
    out = shown(capsys, runs / name)
    title, rows = table(out)
    assert title.startswith(f"il-baseline, {name.capitalize()}, digits, memory 5, seed 0")
    keys = {"all": "top1", "top 5": "top5", "base": "base", "new": "new", "latest": "latest"}
    assert len(rows) == 3
    for row, step, alpha in zip(rows, r["steps"], r["alpha"], strict=True):
        numbers = {k: "–" if step[v] is None else f"{step[v]:.2f}" for k, v in keys.items()}
        numbers |= {"step": str(step["step"]), "classes": str(step["classes"]), "seconds": f"{step['seconds']:.1f}"}
        assert row == {**numbers, "α": "–" if alpha is None else f"{alpha:.3f}"}
    assert [row["classes"] for row in rows] == ["4", "7", "10"]
    assert rows[0]["new"] == "–" != rows[1]["new"]
    assert (rows[1]["α"] == "–") == (name == "standard")
    assert f"average incremental accuracy {r['average_incremental_accuracy']:.2f}%" in out
    assert f"forgetting {r['forgetting']:.2f} points" in out


def test_seeds_become_mean_and_deviation(capsys, runs):
    folders = [runs / f"balanced-{seed}" for seed in (0, 1, 2)]
    title, rows = table(shown(capsys, *folders))
    assert rows == [{"remedy": "Balanced", "seeds": "3", **{k: over(folders, get) for k, get in MEASURED.items()}}]
    assert all(w in title for w in ("il-baseline", "digits", "classes 4 + 2 × 3", "memory 5", "epochs 1"))


def test_a_folder_stands_for_the_runs_in_it(capsys, runs):
    out = shown(capsys, runs)
    assert out == shown(capsys, *sorted(runs.iterdir()))
    _, rows = table(out)
    assert [(row["remedy"], row["seeds"]) for row in rows] == [("Balanced", "3"), ("Meta", "1"), ("Standard", "1")]
    for row, name in zip(rows[1:], ("meta", "standard")):
        assert {k: row[k] for k in MEASURED} == {k: f"{get(result(runs / name)):.2f}" for k, get in MEASURED.items()}
    folders = [runs / f"balanced-{seed}" for seed in (0, 1, 2)]
    assert rows[0]["average"] == over(folders, MEASURED["average"])


def test_what_differs_has_a_column_and_what_does_not_is_in_the_title(capsys, runs):
    other = changed(runs / "balanced-0", runs / "x", {"method.remedy.alpha": 0.5, "protocol.memory": "total:99"})
    title, rows = table(shown(capsys, runs / "balanced-0", other))
    assert [(row["remedy"], row["memory"]) for row in rows] == [("Balanced", "5"), ("Balanced α 0.5", "total:99")]
    assert "memory" not in title and "classes 4 + 2 × 3" in title


@pytest.mark.parametrize("settings", [{"protocol.select": "random"}, {"method.T": 4.0}], ids=str)
def test_rows_of_different_settings_can_be_told_apart(capsys, runs, settings):
    other = changed(runs / "balanced-0", runs / "x", settings)
    _, rows = table(shown(capsys, runs / "balanced-0", other))
    assert len(rows) == 2
    words = [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]
    assert words[0] != words[1]


def test_a_remedy_is_always_told(capsys, runs):
    kind = {"method.remedy": {"name": "memory-oversampling", "share": 0.2}}
    one, two = (changed(runs / "standard", runs / f"more-{seed}", {"seed": seed, **kind}) for seed in (0, 1))
    assert "il-baseline, Memory oversampling share 0.2, digits" in shown(capsys, one)
    assert [row["remedy"] for row in table(shown(capsys, one, two))[1]] == ["Memory oversampling share 0.2"]
    text = shown(capsys, one, runs / "standard")
    assert {row["remedy"] for row in table(text)[1]} == {"Standard", "Memory oversampling share 0.2"}
    assert "share" not in table(text)[1][0], "it is told once"


def test_a_run_that_is_named_twice_counts_once(capsys, runs):
    once = [runs / "balanced-0", runs / "balanced-1"]
    expected = over(once, MEASURED["average"])
    for folders in (once, [*once, runs / "balanced-0"]):
        _, rows = table(shown(capsys, *folders))
        assert [(row["seeds"], row["average"]) for row in rows] == [("2", expected)]


def test_a_wide_table_keeps_each_number_on_one_line(capsys, runs):
    more = {"method.remedy.alpha": 0.25, "protocol.memory": "total:2000", "protocol.base": 2, "protocol.steps": 8}
    changed(runs / "balanced-0", runs / "x", more)
    folders = [runs / f"balanced-{seed}" for seed in (0, 1, 2)]
    out = shown(capsys, runs)
    assert over(folders, MEASURED["average"]) in out and "total:2000" in out and "2 + 8 × 1" in out
    several = {
        "protocol.order": "natural",
        "protocol.select": "random",
        "data.brightness": 0.25,
        "method.T": 4.0,
        "method.bias": False,
        "method.remedy": {"name": "loss-rescaling"},
        "class_names": "of some length",
        "another_setting": "as long as this",
    }
    changed(runs / "balanced-0", runs / "y", several)
    out = shown(capsys, runs)
    assert "…" not in out and over(folders, MEASURED["average"]) in out and max(map(len, out.splitlines())) > 160


def of_method(runs, name, to, **settings):
    """A copy of a run as if done by another method, with that one's own settings and recipe."""
    method = methods.find_method(name)()
    own = {"method": to_plain(method), "recipe": to_plain(method.recipe(plan_for((3, 32, 32))))}
    return changed(runs / "standard", runs / to, {**own, "data.name": "cifar100", **settings})


def test_a_recipe_of_its_own_is_no_difference_between_methods(capsys, runs):
    one, other = (of_method(runs, name, name) for name in ("il-baseline", "lucir"))
    assert result(one)["run"]["recipe"]["weight_decay"] != result(other)["run"]["recipe"]["weight_decay"]
    _, rows = table(shown(capsys, one, other))
    assert [row["method"] for row in rows] == ["il-baseline", "lucir"]
    assert rows[0].keys() == {"method", "remedy", "epochs", "seeds", *MEASURED}
    third = of_method(runs, "lucir", "y", **{"method.imprint": False, "recipe.decay": 0.3})
    _, rows = table(shown(capsys, one, other, third))
    assert [(row["decay"], row["imprint"]) for row in rows] == [("0.1", "–"), ("0.1", "True"), ("0.3", "False")]
    assert not {"milestones", "weight decay", "K"} & rows[0].keys()


def test_a_setting_of_one_run_has_its_value_beside_another(capsys, runs):
    one, short = of_method(runs, "il-baseline", "w"), of_method(runs, "il-baseline", "x", **{"recipe.last": "short"})
    assert [row["last"] for row in table(shown(capsys, one, short))[1]] == ["joined", "short"]
    third = of_method(runs, "podnet", "y")
    _, rows = table(shown(capsys, short, third))
    assert [(row["method"], row["last"]) for row in rows] == [("il-baseline", "short"), ("podnet", "joined")]
    _, rows = table(shown(capsys, third, changed(third, runs / "z", {"method.spatial": "paper"})))
    assert [row["spatial"] for row in rows] == ["code", "paper"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("protocol.order", "0"), ("machine.precision", "bf16"), ("protocol.select", "random"), ("data.brightness", 0.25)],
)
def test_a_protocol_of_its_own_is_one(capsys, runs, name, value):
    one, other = of_method(runs, "il-baseline", "x"), of_method(runs, "lucir", "y", **{name: value})
    _, rows = table(shown(capsys, one, other))
    short = name.partition(".")[2]
    assert rows[0][short] != rows[1][short] == str(value)
    third = of_method(runs, "lucir", "z", **{"recipe.batch": 64})
    assert [row["batch"] for row in table(shown(capsys, one, third))[1]] == ["128", "64"]


def test_a_method_that_is_not_installed_is_shown_by_its_own_names(capsys, runs):
    own = {"method": {"name": "mine", "strength": 3, "remedy": {"name": "own-kind", "x": 1}}}
    one = changed(runs / "balanced-0", runs / "x", own)
    other = changed(one, runs / "y", {"method.strength": 4})
    assert table(shown(capsys, one))[0].startswith("mine, Own kind, digits")
    _, rows = table(shown(capsys, one, other, runs / "balanced-0"))
    assert [(row["method"], row["remedy"], row["strength"]) for row in rows] == [
        ("mine", "Own kind", "3"),
        ("mine", "Own kind", "4"),
        ("il-baseline", "Balanced", "–"),
    ]


# Bad input --------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_shown(capsys, runs):
    assert "nowhere does not exist" in refused(capsys, 1, "nowhere")
    assert "nowhere does not exist" in refused(capsys, 1, runs / "standard", "nowhere")
    Path("file").touch()
    assert "file is not a folder" in refused(capsys, 1, "file")
    Path("empty").mkdir()
    said = refused(capsys, 1, "empty")
    assert "empty has no result.json" in said and "name the folder of a run" in said
    (runs / "standard" / "result.json").unlink()
    said = refused(capsys, 1, runs / "standard")
    assert "runs/standard has no result.json" in said and "not finished" in said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"average_incremental_accuracy": 1, "steps": [], "run": {}}']
)
def test_a_corrupt_result_is_named(capsys, caplog, runs, text):
    (runs / "meta" / "result.json").write_text(text)
    assert "runs/meta/result.json is" in refused(capsys, 1, runs / "meta")
    alone = shown(capsys, runs / "standard", runs / "balanced-0")
    assert run_command(["show", *map(str, (runs / "standard", runs / "meta", runs / "balanced-0"))]) == 0
    assert capsys.readouterr().out == alone
    assert caplog.messages[0].startswith("skipped: ") and "runs/meta/result.json is" in caplog.messages[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": 5},
        {"steps": [{}]},
        {"average_incremental_accuracy": "x"},
        {"confusion": []},
        {"confusion": [[1, 2], [3]]},
        {"class_order": None},
        {"steps": [{"top1": 5}]},
        {"forgetting": "x"},
        {"alpha": ["x"]},
        {"machine": None},
        {"run": {"method": {}}},
        {"final": {"top1": "a", "base": 1, "new": 2}},
        {"average_incremental_accuracy": 50.0},
        {"average_incremental_accuracy_top5": 99.999},
        {"average_incremental_accuracy": None},
        {"average_incremental_accuracy": -1},
        {"confusion": np.eye(10, dtype=int).tolist()},
        {"confusion": np.zeros((10, 10), dtype=int).tolist()},
        {"confusion": [[0.5]]},
        {"class_order": [*range(9)]},
        {"alpha": [None]},
        {"alpha": [-1, None, None]},
        {"forgetting": 5e9},
        {"forgetting": 10**400},
        {"reused": "x"},
        {"reused": {"steps": [0]}},
        {"versions": {"torch": [1]}},
        {"class_order": [0] * 10},
        {"class_order": [None] * 10},
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_a_result_with_no_numbers_where_numbers_belong_is_named(capsys, caplog, runs, damage):
    (runs / "meta" / "result.json").write_text(json.dumps(result(runs / "meta") | damage))
    assert "runs/meta/result.json is not the result of a run (" in refused(capsys, 1, runs / "meta")
    for read in (lambda: run_command(["show", str(runs)]), lambda: read_records(runs)):  # the latter for a report
        caplog.clear()
        read()
        (message,) = caplog.messages
        assert message.startswith("skipped: ") and "runs/meta/result.json is not the result of a run (" in message


def test_a_report_is_made_of_the_others_where_a_result_is_damaged(caplog, runs):
    (runs / "meta" / "result.json").write_text(json.dumps(result(runs / "meta") | {"steps": 5}))
    assert run_command(["report", str(runs), "--out", "of-the-others"]) == 0
    (message,) = caplog.messages
    assert message.startswith("skipped: ") and "runs/meta/result.json is not the result of a run (" in message
    page = Path("of-the-others/index.html").read_text()
    assert "balanced-0" in page and "runs/meta" not in page


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("run", {"seed": "x"}),
        ("run", {"seed": True}),
        ("run", {"seed": -1}),
        ("run", {"seed": 10**400}),
        ("run", {"method": ["a"]}),
        ("run", {"method": {"name": "il-baseline", "remedy": "balanced"}}),
        ("run.protocol", {"memory": None}),
        ("run.protocol", {"steps": 4}),
        ("run.protocol", {"base": "4"}),
        ("run.protocol", {"select": "best"}),
        ("run.recipe", {"epochs": "x"}),
        ("run.recipe", {"schedule": "zigzag"}),
        ("run.recipe", {"lr": True}),
        ("run.data", {"validation": 2}),
        ("steps.0", {"top1": 101}),
        ("steps.1", {"classes": 99}),
        ("steps.1", {"by_step": [1.0]}),
        ("steps.1", {"step": 0}),
        ("steps.1", {"seconds": -5}),
        ("steps.1", {"seconds": 10**400}),
        ("steps.2", {"top1": 1.0}),
        ("steps.2", {"new": None}),
        ("final", {"new": 3.0}),
    ],
    ids=str,
)
def test_settings_and_numbers_that_do_not_fit_together_are_named(capsys, runs, part, changes):
    r = result(runs / "meta")
    inside = r
    for name in part.split("."):
        inside = inside[int(name) if name.isdigit() else name]
    inside |= changes
    (runs / "meta" / "result.json").write_text(json.dumps(r))
    assert "runs/meta/result.json is not the result of a run (" in refused(capsys, 1, runs / "meta")


def test_nothing_is_printed_where_the_output_is_closed(capsys, runs, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert run_command(["show", "runs/meta"]) == 0
    assert capsys.readouterr().err == ""


def test_names_are_printed_as_they_are(capsys, runs):
    r = result(runs / "meta")
    del r["reused"]  # as in a record from elsewhere
    r["run"]["method"]["name"] = "[red]x[/nope]"
    (runs / "meta" / "result.json").write_text(json.dumps(r))
    assert "[red]x[/nope]" in shown(capsys, runs / "meta") and "[red]x[/nope]" in shown(capsys, runs)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[" * 100_000], ids=lambda text: text[:9])
def test_what_is_no_json_is_named(capsys, runs, text):
    whole = (runs / "meta" / "result.json").read_text()
    start = '"average_incremental_accuracy": '
    at = whole.index(start) + len(start)
    (runs / "meta" / "result.json").write_text(whole[:at] + text + whole[whole.index(",", at) :])
    assert "runs/meta/result.json is damaged (" in refused(capsys, 1, runs / "meta")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes among the files of this system")
def test_a_pipe_in_place_of_a_record_is_not_waited_for(capsys, caplog, runs):
    (runs / "meta" / "result.json").unlink()
    os.mkfifo(runs / "meta" / "result.json")
    assert "runs/meta has no result.json" in refused(capsys, 1, runs / "meta")
    assert run_command(["show", str(runs)]) == 0 and "skipped: " in caplog.text


def test_a_seed_that_was_recorded_twice_counts_once(capsys, runs):
    before = shown(capsys, runs)
    shutil.copytree(runs / "balanced-1", runs / "once-more")
    assert shown(capsys, runs) == before


def test_kernels_of_a_gpu_are_told_apart(capsys, runs):
    for name, engine in (("balanced-0", "fused"), ("balanced-1", "fused"), ("balanced-2", "eager")):
        r = result(runs / name)
        r["machine"] |= {"device": "cuda", "engine": engine}
        (runs / name / "result.json").write_text(json.dumps(r))
    three = [runs / f"balanced-{k}" for k in range(3)]
    rows = table(shown(capsys, *three))[1]
    assert [(row["engine"], row["seeds"]) for row in rows] == [("fused", "2"), ("eager", "1")]
    for folder in (three[0], three[2]):  # where all was reused, no kernels are known
        r = result(folder)
        r["machine"]["engine"] = None
        (folder / "result.json").write_text(json.dumps(r))
    assert "engine" not in (said := shown(capsys, runs)) and "3" in said
    assert [row["seeds"] for row in table(said)[1]] == ["3", "1", "1"]


def test_more_settings_than_a_picture_has_room_for(capsys, runs):
    many = [changed(runs / "standard", runs / f"lr-{k}", {"recipe.lr": 0.1 + k}) for k in range(25)]
    assert run_command(["show", *map(str, many), "--figures", "some"]) == 2
    assert "at most 24 settings, and these are 25: name fewer folders" in capsys.readouterr().err


def test_pictures_where_none_can_be_written(capsys, runs):
    Path("file").write_text("precious")
    assert run_command(["show", str(runs), "--figures", "file"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith("equipoise: ") and "file" in err
    assert "Errno" not in err
    assert Path("file").read_text() == "precious"


# Pictures ---------------------------------------------------------------------------------------------------


def pixels(path):
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def near(picture, colour):
    """How many pixels have that colour, give or take a little."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(2) <= 8).sum())


def test_pictures_of_several_runs(capsys, runs):
    out = shown(capsys, runs, "--figures", "some/where")
    paths = [Path("some/where/accuracy.png"), Path("some/where/confusion.png")]
    assert [line for line in out.splitlines() if line.startswith("wrote ")] == [f"wrote {p}" for p in paths]
    assert sorted(Path("some/where").iterdir()) == paths
    for path in paths:
        picture = pixels(path)
        height, width, _ = picture.shape
        assert 400 <= height <= 3000 and 600 <= width <= 3000
        assert len(np.unique(picture @ [1 << 16, 1 << 8, 1])) > 50, "colours"
        assert 0.02 < (picture.min(2) < 200).mean() < 0.98
        edges = picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]
        assert [edge.min() > 250 for edge in edges] == [True] * 4, f"{path} is cut off: top, bottom, left, right"
    curves = pixels(paths[0])
    for colour in ("#8c8c8c", "#1f6fb4", "#d9730d"):  # a line for each of the three losses
        assert near(curves, colour) > 300
    assert near(curves, "#2c8a4b") < 10  # and no fourth


def test_pictures_show_the_numbers(capsys, runs):
    shown(capsys, runs / "standard", "--figures", "one")
    shown(capsys, runs / "standard", "--figures", "again")
    other = changed(runs / "standard", runs / "x", {})
    r = result(other)
    for step in r["steps"]:
        step["top1"] = 100 - step["top1"]
    r["confusion"] = np.eye(10, dtype=int).tolist()
    r["steps"][-1]["top1"] = r["final"]["top1"] = 100.0
    r["average_incremental_accuracy"] = np.mean([step["top1"] for step in r["steps"]])
    (other / "result.json").write_text(json.dumps(r))
    shown(capsys, other, "--figures", "other")
    for name in ("accuracy.png", "confusion.png"):
        assert (pixels(f"one/{name}") == pixels(f"again/{name}")).all()
        assert not np.array_equal(pixels(f"one/{name}"), pixels(f"other/{name}"))
    # The diagonal of ones is the brightest colour of the map, all else the darkest: ten cells and ninety.
    picture = pixels("other/confusion.png")
    bright, dark = near(picture, "#fcfdbf"), near(picture, "#000004")
    assert 0.08 < bright / (bright + dark) < 0.12


def test_without_figures_no_picture_is_made(capsys, runs):
    shown(capsys, runs)
    assert not list(Path().rglob("*.png"))
