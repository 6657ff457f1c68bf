"""The command `equipoise`, end to end on digits: what it prints, what it writes, and what it says to bad input."""

import contextlib
import dataclasses
import errno
import fcntl
import gc
import importlib.metadata
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from forks import Command
from rich.console import Console
from squares import digits_of

import equipoise
from equipoise import (
    LUCIR,
    NCM,
    Balanced,
    BalancedFinetuning,
    Finetune,
    ILBaseline,
    Meta,
    PODNet,
    Recipe,
    Relaxed,
    files,
    methods,
    paper,
)
from equipoise.__main__ import main
from equipoise.cli import VERBS, run_command
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import COUNTS, SHAPES
from equipoise.errors import UsageError
from equipoise.files import MANIFEST
from equipoise.method import Method
from equipoise.methods.around import Around
from equipoise.methods.dde import DDE
from equipoise.remedies import REMEDIES, OldImages, Remedy
from equipoise.runs import command as commands
from equipoise.runs.plan import resolve
from equipoise.runs.progress import LiveWatch, PlainWatch, Watch
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.runs.shared_steps import find_default_store
from equipoise.settings import to_plain
from equipoise.step import plan_for

DIGITS = ("run", "il-baseline", "--dataset", "digits")
BRIEF = (*DIGITS, "--epochs", "2")
SHORT = (*BRIEF, "--steps", "1")
"""two steps of five classes: the shortest run there is"""


pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture(scope="module", autouse=True)
def few():
    with digits_of(50):
        yield


@pytest.fixture
def all_digits():
    """As another process has them."""
    with digits_of(140):
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What an undisturbed run of SHORT measures."""
    folder = tmp_path_factory.mktemp("straight")
    assert run_command([*SHORT, "--store", "none", "--out", str(folder)]) == 0
    return measured(folder)


def result(folder="run"):
    return json.loads((Path(folder) / "result.json").read_text())


def metrics(folder="run"):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def measured(folder="run"):
    """What a result says about the learner, without times and places."""
    r = result(folder)
    steps = [{k: v for k, v in step.items() if not k.endswith("seconds")} for step in r["steps"]]
    same = ("average_incremental_accuracy", "average_incremental_accuracy_top5", "final", "forgetting", "confusion")
    return steps, {k: r[k] for k in same}, r["alpha"], [(m["step"], m["epoch"], m["loss"]) for m in metrics(folder)]


def contents(folder="run"):
    files = (p for p in sorted(Path(folder).rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p): p.read_bytes() for p in files}


def done(capsys, *words):
    """The command succeeds; what it printed."""
    capsys.readouterr()
    code = run_command([str(w) for w in words])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "Traceback" not in said.err
    return said


def refused(capsys, code, *words):
    """The command fails with this code and exactly one sentence; the sentence."""
    capsys.readouterr()
    assert run_command([str(w) for w in words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not re.match(r"step \d|steps \d", line)]  # progress before it
    assert len(lines) == 1, said.err
    assert lines[0].startswith("equipoise: ")
    assert len(lines[0]) > len("equipoise: ") + 10
    return lines[0]


def started(*words, **how):
    """The real command, from the interpreter's start to its end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; the child would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen([sys.executable, "-m", "equipoise", *map(str, words)], text=True, **how)


def wait_for(process, what, limit=60.0):
    end = time.monotonic() + limit
    while not what():
        if process.poll() is not None:
            pytest.fail(f"ended too early with {process.returncode}: {process.communicate()[1]}")
        assert time.monotonic() < end, "took too long"
        time.sleep(0.02)


def lines_in(path):
    return path.read_text().count("\n") if path.is_file() else 0


def forbid_training(monkeypatch):
    def fit(*args, **more):
        raise AssertionError("trained again")

    monkeypatch.setattr("equipoise.learner.fit", fit)


# What is there to be asked ----------------------------------------------------------------------------------


def test_no_words_print_the_usage_and_are_an_error(capsys):
    assert run_command([]) == 2
    out = capsys.readouterr().out
    assert out.startswith("usage: equipoise VERB")
    assert all(f"\n  {verb} " in out for verb in ("run", "show", "demo"))


def test_the_help_of_a_run_begins_with_what_one_needs_and_groups_the_rest(capsys):
    out = done(capsys, "run", "lucir", "--remedy", "meta", "--help").out
    first = ["dataset", "remedy", "steps", "memory", "out"]
    usage, _, rest, top, *groups = out.split("\n\n")
    assert re.findall(r"--([\w-]+)", usage) == ["help", *first] and usage.endswith("[FLAGS]")
    assert rest.endswith("at the mean of their features.") and list(flags_in(top)) == first
    titles = [f"{group} options" for group in ("method", "remedy", "protocol", "recipe", "machine")]
    assert [group.splitlines()[0] for group in groups] == titles
    begins = ["lambda-base", "alpha-lr", "validation", "epochs", "device"]
    assert [next(iter(flags_in(group))) for group in groups] == begins
    plain = re.findall(r"^  --[\w-]+(?:, --[\w-]+| (?:INT|FLOAT|PATH|VALUE)(?: \.\.\.)?)?(?= )", out, re.MULTILINE)
    assert len(plain) == len(flags_in(out)) and all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_the_command_names_the_verbs(capsys, flag):
    out = done(capsys, flag).out
    assert all(f"\n  {verb} " in out for verb in VERBS)
    assert "--version" in out and "--debug" in out


def test_version(capsys):
    assert done(capsys, "--version").out == f"equipoise {equipoise.__version__}, torch {torch.__version__}\n"


def test_the_installed_command_is_the_module():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="equipoise")
    assert script.load() is main


def flags_in(text):
    """Every flag of a help text, with what stands behind it."""
    flags, name = {}, None
    for line in text.splitlines():
        inside = line.strip().strip("│|").strip()  # a frame of signs or of letters, as the encoding allows
        if found := re.match(r"(?:-h, )?--([A-Za-z][\w-]*)", inside):
            name = found[1]
        elif re.search("─{3}|-{3}", line) or inside.endswith(" options"):
            name = None
        if name:
            flags[name] = f"{flags.get(name, '')} {inside}".strip()
    return flags


def default_of(text):
    found = re.search(r"\(default: ([^()]*)\)$", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize(
    ("dataset", "own"),
    [
        (["--dataset", "digits"], {"epochs": "20", "lr": "0.05", "batch": "32"}),
        (["--dataset=digits"], {"epochs": "20", "lr": "0.05", "batch": "32"}),
        (["--dataset", "cifar100"], {"epochs": "250", "lr": "0.1", "batch": "128"}),
        ([], {"epochs": "250", "lr": "0.1", "batch": "128"}),
    ],
    ids=["digits", "=digits", "cifar100", "none"],
)
def test_help_of_run_lists_every_setting_with_its_default(capsys, dataset, own):
    flags = flags_in(done(capsys, "run", "il-baseline", *dataset, "--help").out)
    expected = {}
    for kind in (ILBaseline, Data, Protocol, Recipe, Machine, Options):
        common = [f for f in dataclasses.fields(kind) if "only" not in f.metadata]  # not those of folders of images
        common = [f for f in common if f.metadata.get("flag") is not False]
        expected |= {f.metadata.get("flag", f.name): str(f.default) for f in common}
    expected |= {"milestones": "0.4 0.6 0.8", "remedy": "standard", "base": "half of the classes", "steps": "5"}
    expected |= {"seed": "0", "tensorboard": "False", "out": "runs/ and a name made of the settings"}
    expected |= {"store": "$EQUIPOISE_STORE or ~/.cache/equipoise/store"}
    expected |= {"data": "$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download", **own}
    assert flags.keys() - {"help"} == {name.replace("_", "-") for name in expected}
    assert len(expected) >= 30
    for name, default in expected.items():
        text = flags[name.replace("_", "-")]
        assert default_of(text) == default, name
        assert len(text) > len(name) + len(default) + 25, f"--{name} is not explained: {text}"


COMBINATIONS = [
    (name, remedy)
    for name, kind in methods.find_built_in().items()
    for remedy in REMEDIES
    if kind.remedies is None or remedy in (*kind.remedies, "standard")
]
"""every method of the package with every remedy that it goes with"""


@pytest.mark.parametrize(("method", "remedy"), COMBINATIONS)
def test_a_run_has_at_most_40_flags_all_of_its_own_method_and_remedy(capsys, method, remedy):
    flags = flags_in(done(capsys, "run", method, "--remedy", remedy, "--help").out).keys() - {"help"}
    assert len({name.removeprefix("no-") for name in flags}) <= 40
    of_remedy = {f.name.replace("_", "-") for f in dataclasses.fields(REMEDIES[remedy]) if f.name != "finetune"}
    others = {f.name.replace("_", "-") for kind in REMEDIES.values() for f in dataclasses.fields(kind)}
    others -= {f.name.replace("_", "-") for kind in methods.find_built_in().values() for f in dataclasses.fields(kind)}
    assert of_remedy <= flags and not (others - of_remedy - {"finetune"}) & flags
    own = methods.find_method(method)()
    finetunes = remedy == "balanced-finetuning" or (own.finetuning() and REMEDIES[remedy].keeps_finetuning)
    shown = {"finetune-epochs", "finetune-lr", "finetune-batch", "finetune-weight-decay"}
    assert {name for name in flags if name.startswith("finetune")} == (shown if finetunes else set())


def test_defaults_in_the_help_are_those_of_the_method_and_the_remedy(capsys):
    flags = flags_in(done(capsys, "run", "podnet", "--help").out)
    assert (default_of(flags["finetune-lr"]), default_of(flags["schedule"])) == ("0.05", "cosine")
    flags = flags_in(done(capsys, "run", "lucir", "--remedy", "balanced-finetuning", "--help").out)
    assert (default_of(flags["finetune-epochs"]), default_of(flags["epochs"])) == ("20", "160")
    assert default_of(flags["remedy"]) == "standard"
    flags = flags_in(done(capsys, "run", "lucir", "--help").out)
    assert (default_of(flags["finetune-epochs"]), default_of(flags["imprint"])) == ("0", "True")


def test_the_help_names_the_remedies_that_a_method_takes(capsys):
    all_of_them = flags_in(done(capsys, "run", "il-baseline", "--help").out)["remedy"]
    assert all(remedy in all_of_them for remedy in REMEDIES)
    assert "loss-rescaling" not in flags_in(done(capsys, "run", "podnet", "--help").out)["remedy"]


# A command and its run ----------------------------------------------------------------------------------------


def parsed(*words):
    return parse_request(words, "run", Request)


def assert_round_trip(run, machine=None):
    """What is printed for a run is that run again, when it is parsed."""
    machine = machine or Machine()
    words = shlex.split(commands.write_command(run, machine))
    assert words[:2] == ["equipoise", "run"]
    again = parsed(*words[2:])
    assert again.machine == machine
    known = len(COUNTS[run.data.name]), SHAPES[run.data.name]
    assert to_plain(resolve(again.run, *known)) == to_plain(resolve(run, *known))


def runs_of(tables):
    cells = (cell for table in tables for row in table.rows for cell in row.cells)
    return list(dict.fromkeys(cell.run for cell in cells if cell.run is not None))


def test_the_command_of_each_run_of_the_papers_tables_is_that_run():
    runs = runs_of(paper.make_tables())
    assert len(runs) > 150 and {run.data.name for run in runs} == {*COUNTS} - {"digits"}
    for run in runs:
        assert_round_trip(run)
    for run in runs_of([paper.rehearse_on_digits(table) for table in paper.make_tables()]):
        assert_round_trip(run)


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Method):  # a host, whose switches and choices are no flags
        numbers = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: other(v) for k, v in numbers.items() if type(v) in (int, float)})
    if isinstance(value, (int, float)):
        return type(value)(value * 2 or 1) if value != 0.5 else 0.25
    return value


def changed(value):
    """A method or a remedy with other numbers, and the other choice of each switch."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    kept = {k: v for k, v in fields.items() if not isinstance(v, (Remedy, Finetune))}
    return dataclasses.replace(value, **{k: other(v) for k, v in kept.items()})


@pytest.mark.parametrize(("method", "remedy"), COMBINATIONS)
def test_the_command_of_each_method_with_each_remedy_is_that_run(method, remedy):
    kind = methods.find_method(method)
    for one in (kind().with_remedy(REMEDIES[remedy]()), changed(kind()).with_remedy(changed(REMEDIES[remedy]()))):
        assert_round_trip(Run(one, Data("digits"), Protocol(memory="total:40"), seed=3))
    recipe = dataclasses.replace(
        kind().recipe(plan_for(SHAPES["cifar100"])), epochs=7, schedule="steps", milestones=(0.25,), lr=0.3
    )
    protocol = Protocol(20, 16, "natural", "0", "random")
    assert_round_trip(Run(one, Data("cifar100", 0.1, 0.25), protocol, recipe), Machine("cpu", "fp32", "eager"))


@pytest.mark.parametrize(("method", "remedy"), COMBINATIONS)
def test_settings_without_effect_are_in_no_command(method, remedy):
    """Those of a fine-tuning that the remedy replaces, and milestones where the schedule has none."""

    def tune(one):
        if isinstance(one, Around):
            return dataclasses.replace(one, host=tune(one.host))
        own = {"finetune": dataclasses.replace(one.finetuning(), epochs=0, lr=0.3)} if one.finetuning() else {}
        return dataclasses.replace(one, **own)

    one = tune(changed(methods.find_method(method)())).with_remedy(changed(REMEDIES[remedy]()))
    for schedule in ("cosine", "cosine-late", "steps"):
        recipe = Recipe(epochs=7, schedule=schedule, milestones=(0.25,), decay=0.3)
        assert_round_trip(Run(one, Data("digits"), Protocol(memory="total:40"), recipe))


def test_a_run_that_only_python_can_set_has_no_command():
    tuned = LUCIR(finetune=Finetune(5, milestones=(0.2,))), LUCIR(BalancedFinetuning(Finetune(5)))
    for method in (*tuned, DDE(LUCIR(imprint=False))):
        with pytest.raises(UsageError, match=r"^(milestones|distil|imprint) can be set in Python only"):
            commands.write_command(Run(method, Data("digits")))
    with pytest.raises(UsageError, match="unknown data set 'mine'"):
        commands.write_command(Run(data=Data("mine")))


def test_the_fine_tuning_of_a_command():
    finetune = Finetune(epochs=3, lr=0.2, batch=50, weight_decay=0.01)
    assert_round_trip(Run(LUCIR(finetune=finetune), Data("digits")))
    own = dataclasses.replace(PODNet().finetune, epochs=0)
    assert_round_trip(Run(PODNet(finetune=own), Data("digits")))
    assert parsed("podnet", "--finetune-epochs", "0").run.method == PODNet(finetune=own)  # the rest stays PODNet's
    remedy = BalancedFinetuning(dataclasses.replace(finetune, distil=False))
    assert_round_trip(Run(LUCIR(remedy), Data("digits")))


def test_flags_become_the_run(tmp_path):
    request = parsed("lucir", "--remedy", "meta", "--hold-out", "0.3", "--no-imprint", "--K", "4", "--dataset=digits")
    assert request == Request(
        Run(LUCIR(Meta(hold_out=0.3), K=4, imprint=False), Data("digits")), options=Options(store=find_default_store())
    )
    words = ["--store", "none", "--data", "here", "--checkpoint", "3", "--evaluate-every", "2", "--engine", "eager"]
    request = parsed("ncm", *words, "--out", "there", "--tensorboard", "--no-unit-length")
    assert request.options == Options(Path("here"), None, 3.0, 2) and request.machine == Machine(engine="eager")
    assert (request.out, request.tensorboard, request.run) == (Path("there"), True, Run(NCM(unit_length=False)))
    assert parsed("il-baseline", "--remedy", "relaxed", "--epsilon", "2%").run.method == ILBaseline(Relaxed("2%"))
    assert parsed("il-baseline", "--remedy", "relaxed", "--epsilon", "2").run.method == ILBaseline(Relaxed(2.0))
    assert parsed("il-baseline", "--remedy", "meta", "--remedy", "balanced").run.method == ILBaseline(Balanced())


def test_a_recipe_like_the_methods_own_is_none():
    assert parsed("il-baseline").run.recipe is None
    assert parsed("il-baseline", "--lr", "0.1", "--epochs", "250").run.recipe is None
    assert parsed("il-baseline", "--lr", "0.2").run.recipe == Recipe(lr=0.2)
    assert parsed("il-baseline", "--lr", "0.1", "--dataset", "digits").run.recipe.lr == 0.1


def test_a_field_that_is_called_like_a_flag_of_every_run_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Clash(ILBaseline):
        name = "clash-of-flags"
        memory: int = 3

    with pytest.raises(UsageError, match=r"field memory.*rename"):
        parsed("clash-of-flags")
    del Clash
    gc.collect()  # it is not to be a word of the command line in later tests


def test_a_method_typed_at_a_prompt_has_flags_without_help(capsys):
    scope = {"__name__": "prompt"}
    exec(TYPED, scope)
    flags = flags_in(done(capsys, "run", "typed-here", "--help").out)
    assert default_of(flags["strength"]) == "2.5"
    assert parsed("typed-here", "--strength", "3").run.method.strength == 3.0
    scope.clear()
    gc.collect()


TYPED = """
from dataclasses import dataclass
from equipoise import Method

@dataclass(frozen=True)
class Typed(Method):
    name = "typed-here"
    strength: float = 2.5
"""


def test_help_of_the_other_levels(capsys):
    assert "il-baseline" in done(capsys, "run", "--help").out
    many = flags_in(done(capsys, "sweep", "il-baseline", "--help").out)
    assert "runs at a time" in many["workers"] and "in each line" in many["runs"] and "all runs" in many["out"]
    assert default_of(many["out"]) == "runs"
    assert "workers" not in flags_in(done(capsys, "run", "il-baseline", "--help").out)
    show = flags_in(done(capsys, "show", "--help").out)
    assert default_of(show["figures"]) == "none are made"
    demo = flags_in(done(capsys, "demo", "--help").out)
    assert (default_of(demo["out"]), default_of(demo["seeds"])) == ("demo", "3")


# Good input -------------------------------------------------------------------------------------------------


def rows(text):
    """The rows of a printed table that begin with a number."""
    return [line.split() for line in text.splitlines() if re.match(r" *\d+  ", line)]


def test_joint_training_keeps_everything_and_lwf_nothing_unless_told_otherwise(capsys):
    assert parsed("joint").run.protocol.memory == "all"
    assert parsed("lwf").run.protocol.memory == "0"
    assert parsed("lwf", "--memory", "total:2000").run.protocol.memory == "total:2000"
    assert parsed("joint", "--memory", "5").run.protocol.memory == "5"
    assert parsed("lucir").run.protocol.memory == "20"
    assert run_command(["run", "joint", "--dataset", "digits", "--memory", "20"]) == 2
    assert "needs all images in memory, which keeps 20: use --memory all" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["5", "total:40", "0"])
@pytest.mark.parametrize("remedy", sorted(REMEDIES))
def test_every_remedy_with_every_memory(capsys, all_digits, remedy, memory):
    if issubclass(REMEDIES[remedy], (OldImages, Meta)) and memory == "0":
        pytest.skip("refused; see below")
    said = done(capsys, *SHORT, "--remedy", remedy, "--memory", memory, "--out", "run")
    r = result()
    assert r["run"]["method"]["remedy"] == to_plain(REMEDIES[remedy]())
    assert (r["run"]["method"]["name"], r["run"]["protocol"]["memory"]) == ("il-baseline", memory)

    # What is printed is what is recorded.
    for row, step, alpha in zip(rows(said.out), r["steps"], r["alpha"], strict=True):
        values = [step[k] for k in ("top1", "top5", "base", "new", "latest")]
        shown = ["–" if v is None else f"{v:.2f}" for v in values] + ["–" if alpha is None else f"{alpha:.3f}"]
        assert row[:-1] == [str(step["step"]), str(step["classes"]), *shown]
    assert f"average incremental accuracy {r['average_incremental_accuracy']:.2f}%" in said.out
    assert f"forgetting {r['forgetting']:.2f} points" in said.out
    assert said.out.rstrip().endswith("recorded in run/result.json")
    assert (r["alpha"][1] is not None) == (remedy == "meta")

    # What is recorded agrees with itself.
    top1 = [step["top1"] for step in r["steps"]]
    assert [step["classes"] for step in r["steps"]] == [5, 10]
    assert r["average_incremental_accuracy"] == pytest.approx(sum(top1) / 2)
    assert r["final"]["top1"] == top1[-1]
    confusion = torch.tensor(r["confusion"])
    assert confusion.shape == (10, 10) and confusion.sum() == 1797 - 1400
    assert top1[-1] == pytest.approx(100 * confusion.trace().item() / confusion.sum().item())
    assert top1[0] > 80  # two epochs are enough for five digits
    trained = [(m["step"], m["epoch"]) for m in metrics() if m["stage"] == "train"]
    assert trained == [(0, 1), (0, 2), (1, 1), (1, 2)]
    refit = [(m["step"], m["epoch"]) for m in metrics() if m["stage"] == "refit"]
    assert refit == [(1, e) for e in range(1, 21)] * (remedy == "balanced-finetuning")
    assert equipoise.Learner.load("run/model").sizes_ == (5, 5)


def test_the_other_settings_reach_the_run(capsys):
    order = [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]
    Path("order.txt").write_text("3, 1, 4\n5 9 2 6,8 7 0\n")
    words = ["--base", "4", "--steps", "2", "--order", "order.txt", "--memory", "total:30", "--select", "random"]
    words += ["--remedy", "relaxed", "--epsilon", "1.5", "--T", "3", "--seed", "7", "--precision", "bf16"]
    words += ["--epochs", "2", "--lr", "0.01", "--milestones", "0.5", "0.75", "--decay", "0.5", "--batch", "16"]
    words += [
        "--momentum",
        "0.8",
        "--weight-decay",
        "0.001",
        "--last",
        "short",
        "--device",
        "cpu",
        "--out",
        "run",
    ]
    words += ["--weights", "ones", "--distil", "by-step", "--validation", "0.25", "--brightness", "0.125"]
    done(capsys, *DIGITS, *words)
    settings = result()["run"]
    recipe = {"epochs": 2, "lr": 0.01, "milestones": [0.5, 0.75], "decay": 0.5, "batch": 16, "momentum": 0.8}
    recipe |= {"weight_decay": 0.001, "clamp": 0.0, "schedule": "steps", "last": "short"}
    remedy = {"name": "relaxed", "epsilon": 1.5}
    method = {"name": "il-baseline", "remedy": remedy, "T": 3.0, "weights": "ones", "distil": "by-step"}
    data = {"name": "digits", "validation": 0.25, "brightness": 0.125}
    protocol = {"base": 4, "steps": 2, "order": "order.txt", "memory": "total:30", "select": "random"}
    assert settings == {"method": method, "data": data, "protocol": protocol, "recipe": recipe, "seed": 7}
    machine = result()["machine"]
    assert (machine["precision"], machine["device"], machine["engine"]) == ("bf16", "cpu", "eager")
    assert result()["class_order"] == order
    assert [m["lr"] for m in metrics()] == [0.01, 0.005] * 3


def test_the_rate_that_is_asked_for_is_that_of_the_first_epoch(capsys):
    done(capsys, *DIGITS, "--epochs", "1", "--steps", "1", "--lr", "0.02", "--out", "run")
    assert [m["lr"] for m in metrics()] == [0.02, 0.02]


def test_looking_at_the_test_images_on_the_way_changes_nothing(capsys, straight):
    done(capsys, *SHORT, "--store", "none", "--out", "looked", "--evaluate-every", "2")
    assert measured("looked") == straight
    top1 = [step["top1"] for step in result("looked")["steps"]]
    assert [m.get("accuracy") for m in metrics("looked")] == [None, top1[0], None, top1[1]]
    looks = [{"step": t, "stage": "train", "done": 1.0, "top1": top1[t]} for t in (0, 1)]
    assert result("looked")["looks"] == looks
    done(capsys, *SHORT, "--store", "none", "--out", "run")
    assert "looks" not in result()


def test_the_same_command_again_returns_the_record(capsys, monkeypatch):
    first = done(capsys, *SHORT, "--out", "run")
    before = contents()
    forbid_training(monkeypatch)
    again = done(capsys, *SHORT, "--out", "run")
    assert again.out == first.out
    assert again.err == ""
    assert contents() == before


def test_other_settings_in_the_same_folder_are_refused_one_by_one(capsys):
    done(capsys, *SHORT, "--out", "run")
    before = contents()
    cases = {
        ("--seed", "1"): "seed (there 0, here 1)",
        ("--remedy", "balanced"): (
            "method.remedy.name (there standard, here balanced), method.remedy.alpha (there None, here 1.0)"
        ),
        ("--memory", "total:90"): "protocol.memory (there 20, here total:90)",
        ("--lr", "0.1"): "recipe.lr (there 0.05, here 0.1)",
        ("--T", "3"): "method.T (there 2.0, here 3.0)",
        ("--brightness", "0.1"): "data.brightness (there 0.0, here 0.1)",
        ("--imbalance", "2"): "data.imbalance (there None, here 2.0)",
        ("--batch", "16", "--select", "random", "--weight-decay", "0"): (
            "protocol.select (there herding, here random), recipe.batch (there 32, here 16), "
            "recipe.weight_decay (there 0.0002, here 0.0)"
        ),
    }
    for words, differ in cases.items():
        said = refused(capsys, 1, *SHORT, "--out", "run", *words)
        assert said == f"equipoise: run belongs to a run with other settings: {differ}; choose another --out"
    said = refused(capsys, 1, *BRIEF, "--base", "4", "--steps", "3", "--out", "run")
    assert all(w in said for w in ("protocol.base (there 5, here 4)", "protocol.steps (there 1, here 3)"))
    said = refused(capsys, 1, *DIGITS, "--epochs", "3", "--steps", "1", "--out", "run")
    assert "settings: recipe.epochs (there 2, here 3);" in said
    said = refused(capsys, 1, *SHORT, "--order", "natural", "--out", "run")
    assert "order (there 1993, here natural)" in said and "class_order" in said
    assert contents() == before
    done(capsys, *SHORT, "--memory", "020", "--out", "run")  # the same, written otherwise


def test_another_machine_is_refused_where_there_is_more_to_compute(capsys, monkeypatch):
    words = (*SHORT, "--store", "none", "--checkpoint", "0", "--out", "run")
    interrupt_at(monkeypatch, 1, 1)
    refused(capsys, 1, *words)
    before = contents()
    said = refused(capsys, 1, *words, "--precision", "bf16")
    differ = "precision (there fp32, here bf16)"
    assert said == f"equipoise: run belongs to a run with other settings: {differ}; choose another --out"
    there = Path("run/run.json")
    recorded = json.loads(there.read_text())
    there.write_text(json.dumps({**recorded, "machine": {"device": "cuda", "precision": "bf16"}}))
    on_a_gpu = "equipoise: run is of a run on a GPU: use --device cuda where there is one, or choose another --out"
    assert refused(capsys, 1, *words) == on_a_gpu
    assert "seed (there 0, here 1)" in refused(capsys, 1, *words, "--seed", "1")
    there.write_bytes(before["run/run.json"])
    assert contents() == before
    done(capsys, *words)
    done(capsys, *words, "--precision", "bf16")  # a record is one, wherever it was made
    assert result()["machine"]["precision"] == "fp32"


def test_other_milestones_are_named_with_both_values(capsys):
    done(capsys, *SHORT, "--out", "run")
    said = refused(capsys, 1, *SHORT, "--milestones", "0.5", "--out", "run")
    assert "recipe.milestones (there [0.4, 0.6, 0.8], here [0.5])" in said


def test_a_folder_is_named_after_the_settings(capsys, monkeypatch):
    said = done(capsys, *SHORT, "--remedy", "balanced", "--memory", "total:40")
    (first,) = Path("runs").iterdir()
    assert first.name.startswith("il-baseline_balanced_digits_memory-total-40_seed-0_")
    assert f"recorded in {first / 'result.json'}" in said.out
    done(capsys, *SHORT, "--remedy", "balanced", "--memory", "total:40", "--lr", "0.01")
    assert len(list(Path("runs").iterdir())) == 2
    forbid_training(monkeypatch)
    done(capsys, *SHORT, "--remedy", "balanced", "--memory", "total:40")
    assert len(list(Path("runs").iterdir())) == 2


# Steps shared with other runs -------------------------------------------------------------------------------


def entries(folder):
    return sorted(path.parent for path in Path(folder).rglob("learner.json"))


def test_where_steps_are_shared(capsys, monkeypatch, straight):
    done(capsys, *SHORT, "--store", "none", "--out", "a")
    assert entries("store") == [] and not list(Path("home").rglob("*.json"))
    done(capsys, *SHORT, "--store", "mine", "--out", "b")
    assert len(entries("mine")) == 2 and entries("store") == []
    done(capsys, *SHORT, "--out", "c")
    assert len(entries("store")) == 2
    monkeypatch.delenv("EQUIPOISE_STORE")
    done(capsys, *SHORT, "--out", "d")
    assert len(entries("home/.cache/equipoise/store")) == 2
    assert [measured(x) for x in "abcd"] == [straight] * 4
    assert [result(x)["reused"] for x in "abcd"] == [None] * 4


def test_another_remedy_reuses_the_base_step_and_says_so(capsys):
    done(capsys, *SHORT, "--remedy", "standard", "--out", "a")
    said = done(capsys, *SHORT, "--remedy", "balanced", "--out", "b")
    assert "steps 0 to 0 reused from the store" in said.err
    assert "step 0 reused" in said.out
    assert "step 0/1" not in said.err and "step 1/1" in said.err
    reused = result("b")["reused"]
    assert reused["steps"] == [0]
    assert reused["seconds"] > 0
    done(capsys, *SHORT, "--remedy", "balanced", "--out", "c", "--store", "none")
    assert measured("b") == measured("c")
    assert measured("b")[0][1] != measured("a")[0][1]


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "no tensors", "not JSON", "other JSON"])
def test_a_corrupt_shared_step_is_computed_again(capsys, damage):
    done(capsys, *SHORT, "--out", "a")
    for entry in entries("store"):
        (tensors,) = entry.glob("*.safetensors")
        if damage == "truncated":
            os.truncate(tensors, 1000)
        elif damage == "other bytes":
            tensors.write_bytes(tensors.read_bytes()[:-4] + b"oops")
        elif damage == "no tensors":
            tensors.unlink()
        else:
            (entry / "learner.json").write_text("{" if damage == "not JSON" else "{}")
    said = done(capsys, *SHORT, "--out", "b")
    notes = [line for line in said.err.splitlines() if line.startswith("computing a shared step again: ")]
    assert len(notes) == 2 and all(str(Path("store")) in note for note in notes)
    assert result("b")["reused"] is None
    assert measured("b") == measured("a")
    said = done(capsys, *SHORT, "--out", "c")  # what was corrupt has been replaced
    assert "computing" not in said.err and result("c")["reused"]["steps"] == [0, 1]
    assert measured("c") == measured("a")


# Progress ---------------------------------------------------------------------------------------------------

EPOCH = r"step (\d)/5, epoch (\d)/2: loss ([\d.]+)(, α [\d.]+)?, ([\d,]+) images/s, (\d.*) left"


@pytest.mark.parametrize("remedy", ["standard", "meta"])
def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch, remedy):
    class EveryEpoch(PlainWatch):  # not only those seconds apart, and none in between
        tick = Watch.tick

    monkeypatch.setattr("equipoise.cli.run.PlainWatch", lambda: EveryEpoch(every=0))
    said = done(capsys, *BRIEF, "--remedy", remedy, "--out", "run")
    assert "\x1b" not in said.err and "\r" not in said.err
    epochs = [re.fullmatch(EPOCH, line) for line in said.err.splitlines() if "epoch" in line]
    assert len(epochs) == 12 and all(epochs)
    for e, m in zip(epochs, metrics(), strict=True):
        assert (int(e[1]), int(e[2]), e[3]) == (m["step"], m["epoch"], f"{m['loss']:.4f}")
        assert e[5] == f"{m['images_per_second']:,.0f}" and m["images_per_second"] > 10
        assert (e[4] is None) == (remedy != "meta" or m["step"] == 0)
    assert epochs[0][6] != "0.0 s" and epochs[-1][6] == "0.0 s"
    finished = [line for line in said.err.splitlines() if " done in " in line]
    for line, step in zip(finished, result()["steps"], strict=True):
        assert line.startswith(f"step {step['step']} done in ")
        assert f"{step['classes']} classes, accuracy {step['top1']:.2f}%" in line
    assert len(said.err.splitlines()) == 12 + 6


def test_plain_lines_are_few_where_epochs_are_short(capsys):
    said = done(capsys, *DIGITS, "--epochs", "4", "--steps", "1", "--out", "run")
    lines = [line for line in said.err.splitlines() if "epoch" in line]
    assert any("step 0/1, epoch 4/4" in line for line in lines) and any("step 1/1, epoch 4/4" in line for line in lines)
    assert len(lines) < 8


def test_plain_lines_come_within_long_epochs(capsys, monkeypatch, all_digits):
    monkeypatch.setattr("equipoise.cli.run.PlainWatch", lambda: PlainWatch(every=0))
    said = done(capsys, *SHORT, "--batch", "128", "--out", "run")
    within = [float(x) for x in re.findall(r"^step 0/1, ([\d.]+)%$", said.err, re.MULTILINE)]
    assert within == sorted(within) and within[-1] == 100.0 and len(within) >= 10  # 700 images, twice


def test_progress_in_a_terminal_is_a_live_display(capsys, monkeypatch):
    done(capsys, *BRIEF, "--remedy", "standard", "--out", "first")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 130, 0, 0))
    monkeypatch.setenv("TERM", "xterm-256color")
    words = (*BRIEF, "--remedy", "balanced", "--out", "run")
    process = Command(words, Path.cwd(), terminal=os.ttyname(slave))
    seen = os.read(master, 1 << 16)
    os.close(slave)  # not before the command has opened it
    with contextlib.suppress(OSError):  # how the end of a terminal shows on Linux
        while part := os.read(master, 1 << 16):
            seen += part
    os.close(master)
    text = seen.decode()
    process.communicate()
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert "\x1b[2K" in text  # lines are drawn over
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "steps 0 to 0 reused from the store" in plain and "[dim]" not in plain
    assert re.search(r"step \d/5, epoch 2/2: loss [\d.]+, [\d,]+ images/s, \d.* left", plain)
    for step in result()["steps"][1:]:
        assert f"step {step['step']} done in " in plain
        assert plain.count(f"{step['top1']:.2f}") >= 2  # live, and in the table
    assert f"average incremental accuracy {result()['average_incremental_accuracy']:.2f}%" in plain


def test_the_live_display_prints_a_path_as_it_is():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    LiveWatch(console).say("computing a shared step again: /data/runs[new]/x[/y] is corrupt")
    assert "/data/runs[new]/x[/y] is corrupt" in console.file.getvalue()


# Bad input: usage -------------------------------------------------------------------------------------------

BAD_WORDS = {
    "verb": (["runn"], ["command 'runn'", "did you mean 'run'?", "demo, pack, paper, report, run, show"]),
    "verb like nothing": (["xyz"], ["command 'xyz'", "demo, pack, paper, report, run, show"]),
    "method": (["run", "il-basline"], ["method 'il-basline'", "did you mean 'il-baseline'?"]),
    "data set": (["run", "il-baseline", "--dataset", "digit"], ["data set 'digit'", "did you mean 'digits'?"]),
    "data set 2": (["run", "il-baseline", "--dataset=cifar10"], ["data set 'cifar10'", "did you mean 'cifar100'?"]),
    "remedy": ([*DIGITS, "--remedy", "balanecd"], ["remedy 'balanecd'", "did you mean 'balanced'?", "meta, relaxed"]),
    "remedy in capitals": ([*DIGITS, "--remedy", "Meta"], ["remedy 'Meta'", "did you mean 'meta'?"]),
    "flag": ([*DIGITS, "--sed", "1"], ["flag '--sed'", "did you mean '--seed'?"]),
    "flag that was never there": ([*DIGITS, "--loss", "balanced"], ["flag '--loss'"]),
    "flag of what is for Python": (["run", "lucir", "--finetune-milestones", "1"], ["flag '--finetune-milestones'"]),
    "no method": (["run"], ["name a method first", "il-baseline, joint"]),
    "no method before the flags": (["run", "--seed", "1"], ["name a method first", "il-baseline, joint"]),
    "no method in a sweep": (["sweep", "--workers", "1"], ["name a method first: equipoise sweep METHOD"]),
    "nothing to show": (["show"], ["which folders to show"]),
    "no seeds": (["demo", "--seeds", "0"], ["--seeds must be 1 or more, not 0"]),
}


@pytest.mark.parametrize("words, parts", BAD_WORDS.values(), ids=BAD_WORDS)
def test_unknown_words_are_named_and_the_nearest_is_suggested(capsys, words, parts):
    said = refused(capsys, 2, *words)
    assert all(part in said for part in parts), said
    assert [p.name for p in Path().iterdir()] == ["home"]


OUT_OF_RANGE = {
    "alpha": ("balanced", "0", "-1", "nan", "inf", "1e39", "1e-60"),
    "epsilon": ("relaxed", "-1", "nan", "inf", "nan%", "-0.1%"),
    "alpha-lr": ("meta", "-1", "nan", "inf"),
    "every": ("meta", "0", "-1"),
    "hold-out": ("meta", "0", "1", "-0.1", "nan"),
    "T": ("standard", "0", "-2", "nan", "inf"),
    "epochs": ("standard", "0", "-1"),
    "lr": ("standard", "0", "-0.1", "nan", "inf"),
    "milestones": ("standard", "0", "1.5", "nan"),
    "decay": ("standard", "0", "1.5", "nan"),
    "batch": ("standard", "0", "1"),
    "momentum": ("standard", "1", "-0.1", "nan"),
    "weight-decay": ("standard", "-0.1", "nan", "inf"),
    "seed": ("standard", "-1"),
    "validation": ("standard", "-0.1", "1", "1.5", "nan", "inf"),
    "brightness": ("standard", "-0.1", "1.5", "nan"),
    "imbalance": ("standard", "0.9", "-1", "nan", "inf"),
    "checkpoint": ("standard", "-1", "nan"),
    "evaluate-every": ("standard", "-1"),
}


@pytest.mark.parametrize(
    ("name", "remedy", "value"), [(name, remedy, v) for name, (remedy, *values) in OUT_OF_RANGE.items() for v in values]
)
def test_numbers_out_of_range_are_refused(capsys, name, remedy, value):
    most = DIGITS if name == "epochs" else SHORT
    said = refused(capsys, 2, *most, "--out", "run", "--remedy", remedy, f"--{name}", value)
    found = re.search(
        rf"\b{name.removesuffix('s').replace('-', '[-_]')}s?\b.* must be .*, not \(?([^ ,)]+),?\)?$", said
    )
    assert found, said
    assert repr(float(found[1])) == repr(float(value.removesuffix("%")))  # nan too
    assert not Path("run").exists() and not Path("store").exists()  # so that nothing is in the way of a better one


def bad(remedy, *words, says, memory="20"):
    return [*words, "--remedy", remedy, "--memory", memory], says


BAD_SETTINGS = [
    *(
        bad(
            "standard",
            "--schedule",
            s,
            *words,
            says=[f"{words[0].split('=')[0]} belongs to --schedule steps", f" {s}:"],
        )
        for s in ("cosine", "cosine-late")
        for words in (
            ["--milestones", "0.5"],
            ["--milestones=0.5"],
            ["--milestones", "0.4", "0.6", "0.8"],
            ["--decay", "0.5"],
        )
    ),
    *(bad("relaxed", "--epsilon", v, says=["epsilon", "0.2%", repr(v)]) for v in ("few", "%", "1/2")),
    bad("meta", "--count", "some", says=["--count", "'train' nor 'all'", "'some'"]),
    *(bad("standard", "--steps", v, says=[f"--steps {v}", "5 classes", "1, 5"]) for v in ("2", "3", "6", "0", "-1")),
    *(bad("standard", "--base", v, says=[f"--base {v}", "2 to 9"]) for v in ("0", "1", "-5", "10", "11")),
    bad("standard", "--order", "nowhere.txt", says=["--order nowhere.txt", "seed", "'natural'", "file"]),
    bad("standard", "--order", ".", says=["--order .", "file"]),
    bad("standard", "--order", "4294967296", says=["order", "2**32"]),
    bad("standard", "--order", "²", says=["--order", "²"]),
    *(bad("standard", says=["memory", "total:2000", repr(v)], memory=v) for v in ("many", "-1", "1.5", "total:", "")),
    bad("standard", says=["memory", "'total:-4'"], memory="total:-4"),
    bad("standard", "--alpha", "0.5", says=["--alpha belongs to --remedy balanced, not to --remedy standard"]),
    bad("meta", "--alpha=0.5", says=["--alpha belongs to --remedy balanced, not to --remedy meta"]),
    bad("balanced", "--epsilon", "1", says=["--epsilon belongs to --remedy relaxed, not to --remedy balanced"]),
    bad("relaxed", "--alpha-lr", "1", says=["--alpha-lr belongs to --remedy meta, not to --remedy relaxed"]),
    bad("relaxed", "--alpha_lr", "1", says=["--alpha_lr belongs to --remedy meta, not to --remedy relaxed"]),
    bad("balanced", "--every", "5", says=["--every belongs to --remedy meta"]),
    bad("standard", "--hold-out", "0.5", says=["--hold-out belongs to --remedy meta"]),
    bad("standard", "--count", "all", says=["--count belongs to --remedy meta"]),
    bad("meta", "--share", "0.2", says=["--share belongs to --remedy memory-oversampling or separated-softmax, not"]),
    bad("balanced", "--mean", "all", says=["--mean belongs to --remedy separated-softmax, not to --remedy balanced"]),
    bad(
        "balanced",
        "--finetune-lr",
        "0.1",
        says=["--finetune-lr belongs to --remedy balanced-finetuning, not to --remedy balanced"],
    ),
    bad("standard", "--lambda-c", "5", says=["--lambda-c belongs to the method podnet, not to the method il-baseline"]),
    bad("standard", "--no-imprint", says=["--no-imprint belongs to the method geodl or lucir, not to the"]),
    bad("balanced-finetuning", "--finetune-epochs", "0", says=["finetune-epochs must be 1 or more"]),
    *(bad("meta", says=["meta", "at least 2 images of every", f" {v}:"], memory=v) for v in ("0", "1")),
    # Enough for 8 old classes, and for 4, but not for 9.
    bad("meta", says=["meta", "at least 2 images of every", " 1:"], memory="total:17"),
    bad("meta", says=["meta", "at least 2 images of every", " 0:"], memory="total:8"),
    bad("standard", "--validation", "0.001", says=["validation 0.001 sets aside 0 of the 140", "'0'", "at least 1"]),
    bad("standard", "--validation", "0.99", says=["validation 0.99 sets aside 139 of the 140", "leave at least 2"]),
    *(bad("relaxed", "--epsilon", v, says=["epsilon 0", "memory 0"]) for v in ("0", "0%", "0.0")),
    *(bad("standard", "--device", v, says=["auto, cpu or cuda", repr(v)]) for v in ("gpu", "mps", "cuda:x")),
]


@pytest.mark.parametrize("words, says", BAD_SETTINGS, ids=lambda v: "_".join(v[:2]) if v[0].startswith("--") else None)
def test_settings_that_cannot_be_are_refused(capsys, words, says, all_digits):
    said = refused(capsys, 2, *DIGITS, "--out", "run", *words)
    assert all(part in said for part in says), said
    assert not Path("run").exists() and not Path("store").exists()  # so that nothing is in the way of a better one


def test_milestones_of_a_method_with_a_cosine_of_its_own(capsys):
    """Its own recipe names milestones that do nothing; only those that are given are refused."""
    assert "--schedule cosine: add --schedule steps" in refused(capsys, 2, "run", "podnet", "--milestones", "0.5")
    assert parsed("podnet").run.recipe is None
    assert PODNet().recipe(plan_for(SHAPES["cifar100"])).milestones == Recipe().milestones
    recipe = parsed("podnet", "--schedule", "steps", "--milestones", "0.5").run.recipe
    assert recipe.lr_at(80) == pytest.approx(0.01)
    done(capsys, *SHORT, "--schedule", "cosine", "--out", "run")
    assert [m["lr"] for m in metrics()] == [0.05, 0.025] * 2


def test_the_smallest_budget_that_meta_accepts(capsys):
    done(capsys, *DIGITS, "--epochs", "1", "--remedy", "meta", "--memory", "total:18", "--out", "run")
    assert all(alpha is not None for alpha in result()["alpha"][1:])


def test_epsilon_zero_without_memory_is_balanced(capsys):
    done(capsys, *SHORT, "--remedy", "relaxed", "--epsilon", "0", "--memory", "0", "--out", "a")
    done(capsys, *SHORT, "--remedy", "balanced", "--memory", "0", "--out", "b")
    assert measured("a") == measured("b")


TYPING_ERRORS = [
    ("run il-baseline", "--epochs few", "--epochs: 'few' is not a whole number"),
    ("run il-baseline", "--epochs 1.5", "--epochs: '1.5' is not a whole number"),
    ("run il-baseline", "--epochs=3=4", "--epochs: '3=4' is not a whole number"),
    ("run il-baseline", "--epochs 1e3", "--epochs: '1e3' is not a whole number"),
    ("run il-baseline", "--seed 1,2", "--seed: '1,2' is not a whole number"),
    ("run il-baseline", "--base few", "--base: 'few' is not a whole number"),
    ("run il-baseline", "--lr fast", "--lr: 'fast' is not a number"),
    ("run il-baseline", "--lr=", "--lr: '' is not a number"),
    ("run il-baseline", "--momentum 0,9", "--momentum: '0,9' is not a number"),
    ("run il-baseline", "--milestones 0.5 late", "--milestones: 'late' is not a number"),
    ("run il-baseline", "--milestones 0.5,0.75", "--milestones: '0.5,0.75' is not a number"),
    ("run il-baseline", "--select best", "--select: 'best' is neither 'herding' nor 'random'"),
    (
        "run il-baseline",
        "--select Herding",
        "--select: 'Herding' is neither 'herding' nor 'random' (did you mean 'herding'?)",
    ),
    ("run il-baseline", "--last shrot", "--last: 'shrot' is neither 'joined' nor 'short' (did you mean 'short'?)"),
    ("run il-baseline", "--memory", "--memory needs a value"),
    ("run il-baseline", "--seed --lr 1", "--seed needs a value"),
    ("run il-baseline", "cifar100", "unexpected word 'cifar100'"),
    ("run il-baseline", "--seed 1 2", "unexpected word '2'"),
    ("run il-baseline", "epochs 3", "unexpected word 'epochs' (did you mean '--epochs'?)"),
    ("run il-baseline", "--epoch 3", "unknown flag '--epoch' (did you mean '--epochs'?)"),
    ("run il-baseline", "--remedys meta", "unknown flag '--remedys' (did you mean '--remedy'?)"),
    ("run il-baseline", "--EPOCHS 3", "unknown flag '--EPOCHS' (did you mean '--epochs'?)"),
    ("run il-baseline", "-seed 1", "unknown flag '-seed' (did you mean '--seed'?)"),
    ("run il-baseline", "-s 1", "unknown flag '-s'"),
    ("run il-baseline", "-- x", "unknown flag '--'"),
    ("run il-baseline", "--zzz 1", "unknown flag '--zzz'"),
    ("run il-baseline", "--tensorboard=yes", "--tensorboard takes no value"),
    ("run lucir", "--imprint=no", "--imprint takes no value"),
    ("run lucir", "--k 2", "unknown flag '--k' (did you mean '--K'?)"),
    ("run lucir", "--no-imprints", "unknown flag '--no-imprints' (did you mean '--no-imprint'?)"),
    ("sweep il-baseline", "--seed 0,x", "--seed: 'x' is not a whole number"),
    ("show", "", "say which folders to show: of runs, or folders that hold such folders"),
    ("show", "--figures", "--figures needs a value"),
    ("show", "x --figure y", "unknown flag '--figure' (did you mean '--figures'?)"),
    ("report", "", "say which folder of records"),
    ("report", "a b", "unexpected word 'b'"),
    ("demo", "--seeds few", "--seeds: 'few' is not a whole number"),
    ("demo", "3", "unexpected word '3'"),
    ("paper", "--seeds few", "--seeds: 'few' is not a whole number"),
    ("paper", "--format html", "--format: 'html' is neither 'terminal', 'markdown', 'latex' nor 'csv'"),
    ("paper", "table1 --no-runs", "unknown flag '--no-runs' (did you mean '--no-run'?)"),
    ("bench", "--packed 2 few", "--packed: 'few' is not a whole number"),
    ("bench", "--precision fp16", "--precision: 'fp16' is neither 'auto', 'fp32' nor 'bf16' (did you mean 'bf16'?)"),
]


@pytest.mark.parametrize(("command_", "words", "about"), TYPING_ERRORS, ids=lambda v: v.replace(" ", "_"))
def test_a_typing_error_is_one_sentence_which_names_the_help(capsys, command_, words, about):
    said = refused(capsys, 2, *command_.split(), *words.split())
    assert said == f"equipoise: {about}; equipoise {command_} --help lists all flags"
    assert [p.name for p in Path().iterdir()] == ["home"]
    assert done(capsys, *command_.split(), "--help").out.startswith(f"usage: equipoise {command_} [--help]")


@pytest.mark.parametrize("flag", ["--remedy", "--dataset"])
def test_a_flag_that_chooses_other_flags_needs_a_value(capsys, flag):
    for words in ([flag], [flag, "--lr", "1"]):
        assert refused(capsys, 2, "run", "il-baseline", *words) == f"equipoise: {flag} needs a value"


EMPTY = [
    [*SHORT, "--out", ""],
    [*SHORT, "--out="],
    [*SHORT, "--store", ""],
    [*SHORT, "--data="],
    ["sweep", "il-baseline", "--runs", ""],
    ["show", ""],
    ["show", "x", "--figures", ""],
    ["report", ""],
    ["report", "x", "--out", ""],
    ["paper", "--results", ""],
    ["demo", "--out="],
]


@pytest.mark.parametrize("words", EMPTY, ids=lambda words: "_".join([words[0], *words[-2:]]))
def test_an_empty_path_is_refused(capsys, words):
    """`--out "$UNSET"` would else mean the working directory."""
    said = refused(capsys, 2, *words)
    assert said.endswith("is empty: name a folder")
    assert [p.name for p in Path().iterdir()] == ["home"]


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "0 1 2 3 4 5 6 7 8 8", "0 1 2 3 4 5 6 7 8 10", "a b c", "0 -1 2", "\xff"]
)
def test_a_bad_order_file_is_named(capsys, text):
    Path("order.txt").write_bytes(text.encode("latin1"))
    said = refused(capsys, 1, *SHORT, "--order", "order.txt", "--out", "run")
    assert "order.txt must" in said
    assert not Path("run").exists()


def test_a_corrected_command_works_in_the_same_folder(capsys):
    refused(capsys, 2, *BRIEF, "--steps", "3", "--out", "run")
    refused(capsys, 2, *SHORT, "--remedy", "balanced", "--alpha", "nan", "--out", "run")
    refused(capsys, 2, *SHORT, "--remedy", "balanecd", "--out", "run")
    done(capsys, *SHORT, "--remedy", "balanced", "--alpha", "0.5", "--out", "run")
    assert result()["run"]["method"]["remedy"]["alpha"] == 0.5


# Bad input: the machine and its files -----------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there(capsys, device):
    said = refused(capsys, 1, *SHORT, "--device", device, "--out", "run")
    assert f"device {device} was not found" in said and "--device cpu" in said
    assert not Path("run").exists()


CIFAR = ("run", "il-baseline", "--dataset", "cifar100", "--out", "run", "--data")


def test_a_data_folder_that_is_not_there(capsys):
    assert "--data nowhere is not a folder" in refused(capsys, 1, *CIFAR, "nowhere")
    Path("file").touch()
    assert "--data file is not a folder" in refused(capsys, 1, *CIFAR, "file")
    assert sorted(p.name for p in Path().iterdir()) == ["file", "home"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "corrupt", "pickle", "archive"])
def test_a_bad_data_file_is_named(capsys, damage):
    data = Path("data")
    data.mkdir()
    bad = {"pickle": "train", "archive": "cifar-100-binary.tar.gz"}.get(damage, "train.bin")
    (data / bad).write_bytes(b"" if damage == "empty" else bytes(5000))
    (data / {"pickle": "test"}.get(damage, "test.bin")).write_bytes(bytes(5000))
    if damage == "corrupt":
        os.truncate(data / bad, 50_000 * 3074)  # the right size, and nothing else
    said = refused(capsys, 1, *CIFAR, "data")
    assert f"data/{bad} has " in said and "expected: delete it and put a good copy in its place" in said
    assert ("md5" in said) == (damage not in ("truncated", "empty"))
    assert not Path("run").exists()


WHOLE = {"average_incremental_accuracy": 50.0, "steps": [], "run": {}}


@pytest.mark.parametrize(
    "text",
    ["", '{"average_incremental_accuracy": 5', "[]", "null", "{}", "\xff", json.dumps(WHOLE), '{"run": 1, "steps": 2}'],
)
def test_a_corrupt_result_is_named_and_can_be_made_again(capsys, straight, text):
    done(capsys, *SHORT, "--out", "run")
    Path("run/result.json").write_bytes(text.encode("latin1"))
    said = refused(capsys, 1, *SHORT, "--out", "run")
    assert "run/result.json is" in said and "delete it" in said
    assert Path("run/result.json").read_bytes() == text.encode("latin1")
    Path("run/result.json").unlink()
    done(capsys, *SHORT, "--out", "run")
    assert measured() == straight


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_corrupt_settings_of_an_unfinished_run_are_named(capsys, monkeypatch, text):
    interrupt_at(monkeypatch, 1, 1)
    refused(capsys, 1, *SHORT, "--store", "none", "--checkpoint", "0", "--out", "run")
    Path("run/run.json").write_text(text)
    before = contents()
    assert "run/run.json " in refused(capsys, 1, *SHORT, "--out", "run")
    assert contents() == before


def interrupt_at(monkeypatch, step, epoch):
    """Ctrl-C, as it were, at the end of that epoch; only once."""
    once = []

    class Interrupted(PlainWatch):
        def end_epoch(self, e):
            super().end_epoch(e)
            if (e.step, e.epoch) == (step, epoch) and not once:
                once.append(True)
                raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.cli.run.PlainWatch", Interrupted)


@pytest.mark.parametrize(("step", "epoch"), [(0, 1), (1, 1), (1, 2)])
def test_an_interrupted_run_goes_on(capsys, monkeypatch, step, epoch):
    words = (*SHORT, "--remedy", "meta", "--memory", "5", "--store", "none", "--checkpoint", "0")
    done(capsys, *words, "--out", "straight")
    interrupt_at(monkeypatch, step, epoch)
    said = refused(capsys, 1, *words, "--out", "run")
    assert said == "equipoise: stopped; the same command goes on from the last checkpoint in run"
    assert not Path("run/result.json").exists()
    assert "other settings: seed (there 0, here 1)" in refused(capsys, 1, *words, "--seed", "1", "--out", "run")
    assert "not finished" in refused(capsys, 1, "show", "run")
    said = done(capsys, *words, "--out", "run")
    assert ("step 0 done" in said.err) == (step == 0)
    assert measured("run") == measured("straight")
    assert not Path("run/checkpoint").exists()


@pytest.mark.parametrize("damage", ["truncated", "no tensors", "not JSON", "other JSON", "other format"])
def test_a_corrupt_checkpoint_is_named_and_can_be_deleted(capsys, monkeypatch, straight, damage):
    words = (*SHORT, "--store", "none", "--checkpoint", "0")
    interrupt_at(monkeypatch, 1, 1)
    refused(capsys, 1, *words, "--out", "run")
    (tensors,) = Path("run/checkpoint").glob("*.safetensors")
    info = Path("run/checkpoint/learner.json")
    if damage == "truncated":
        os.truncate(tensors, 999)
    elif damage == "no tensors":
        tensors.unlink()
    elif damage == "other format":
        info.write_text(json.dumps({**json.loads(info.read_text()), "format": 99}))
    else:
        info.write_text("{" if damage == "not JSON" else "{}")
    before = contents()
    for _ in range(2):  # it does not get worse by trying
        said = refused(capsys, 1, *words, "--out", "run")
        assert damage == "other format" or "run/checkpoint" in said
        assert contents() == before
    for path in Path("run/checkpoint").iterdir():
        path.unlink()
    Path("run/checkpoint").rmdir()
    done(capsys, *words, "--out", "run")
    assert measured("run") == straight


def test_a_run_folder_that_is_a_file(capsys):
    Path("file").write_text("precious")
    said = refused(capsys, 2, *SHORT, "--out", "file")
    assert "file is a file, not a folder" in said
    assert Path("file").read_text() == "precious"


@pytest.mark.parametrize("flag", ["--out", "--store"])
def test_a_folder_inside_a_file_gets_a_sentence_for_people(capsys, flag):
    Path("file").write_text("precious")
    words = {"--out": "run", "--store": "none", flag: "file/x"}
    said = refused(capsys, 1, *SHORT, *(w for pair in words.items() for w in pair))
    assert "file" in said and "Errno" not in said
    done(capsys, *SHORT, "--out", "run", "--store", "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(capsys):
    Path("locked").mkdir(mode=0o500)
    said = refused(capsys, 1, *SHORT, "--out", "locked/run")
    assert "no permission to use locked/run" in said and "--out" in said
    Path("locked").chmod(0o700)
    done(capsys, *SHORT, "--out", "locked/run")


def test_no_permission_gets_a_sentence(capsys, monkeypatch):
    mkdir = os.mkdir

    def refusing(path, *args, **more):
        if str(path) == "run":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return mkdir(path, *args, **more)

    with monkeypatch.context() as m:
        m.setattr(os, "mkdir", refusing)
        said = refused(capsys, 1, *SHORT, "--out", "run")
    assert said == "equipoise: no permission to use run: choose another --out, --store or --data"
    done(capsys, *SHORT, "--out", "run")


FULL_AT = {
    "the settings": "run/run.json",
    "the metrics": "run/metrics.jsonl",
    "the checkpoint's tensors": "run/checkpoint/.*safetensors",
    "the checkpoint": "run/checkpoint/learner.json",
    "the model": "run/model/.*safetensors",
    "the result": "run/result.json",
}


@pytest.mark.parametrize("where", FULL_AT.values(), ids=FULL_AT)
def test_a_full_disk_loses_nothing(capsys, monkeypatch, straight, where):
    fsync, write_file = os.fsync, files.write_file
    writing, failed = [], []

    def noted(path, data):
        writing.append(str(path))
        write_file(path, data)

    def full(fd):
        if re.search(where, writing[-1]) and not failed:
            failed.append(writing[-1])
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(files, "write_file", noted)
    monkeypatch.setattr(os, "fsync", full)
    said = refused(capsys, 1, *SHORT, "--store", "store", "--out", "run")
    assert len(failed) == 1
    assert "no space left" in said and "repeat the command to resume" in said
    assert not Path(failed[0]).exists()
    hidden = {p.name for folder in ("run", "store") for p in Path(folder).rglob(".*")}
    assert hidden <= {".lock", MANIFEST}  # no debris
    done(capsys, *SHORT, "--store", "store", "--out", "run")
    assert measured("run") == straight


@pytest.mark.parametrize("where", ["store/.*safetensors", "store/.*learner.json"])
def test_a_step_that_cannot_be_shared_does_not_stop_the_run(capsys, monkeypatch, straight, where):
    write_file, failed = files.write_file, []

    def full(path, data):
        if re.search(where, str(path)):
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, data)

    monkeypatch.setattr(files, "write_file", full)
    said = done(capsys, *SHORT, "--store", "store", "--out", "run").err
    assert failed and "cannot be shared with other runs" in said and "No space left" in said
    assert entries("store") == [] and not list(Path("store").rglob("*.partial"))
    assert measured("run") == straight


def test_a_store_that_cannot_be_used_is_said_before_anything_is_computed(capsys):
    Path("file").write_text("")
    said = refused(capsys, 1, *SHORT, "--store", "file/store", "--out", "run")
    assert "file/store" in said and not Path("run/metrics.jsonl").exists()


def test_a_fault_of_ours_is_one_sentence(capsys, monkeypatch):
    def broken(*args, **more):
        raise ZeroDivisionError("by zero\nand more")

    monkeypatch.setattr("equipoise.cli.run.run", broken)
    assert refused(capsys, 1, *SHORT) == "equipoise: unexpected ZeroDivisionError: by zero; --debug shows where"


DETAILS = "\nCUDA kernel errors might be asynchronously reported at some other API call\nand more"
GONE = {
    "lost": torch.AcceleratorError(f"CUDA error: unspecified launch failure{DETAILS}"),
    "lost, in older words": RuntimeError(f"CUDA error: an illegal memory access was encountered{DETAILS}"),
    "broken": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}
FULL = {
    "full": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free. And more."),
    "full, says the driver": torch.AcceleratorError(f"CUDA error: out of memory{DETAILS}"),
    "full, says a compiler": RuntimeError("Triton Error [CUDA]: out of memory"),
}


def fail_at(monkeypatch, batch, error):
    """The GPU fails, as it were, in that batch of the run; only once."""
    step, batches = equipoise.engine.train.sgd_, []

    def failing(*args):
        batches.append(True)
        if len(batches) == batch:
            raise error
        step(*args)

    monkeypatch.setattr("equipoise.engine.train.sgd_", failing)


@pytest.mark.parametrize("error", GONE.values(), ids=GONE)
def test_a_gpu_that_is_lost_costs_what_came_after_the_checkpoint(capsys, monkeypatch, straight, error):
    words = (*SHORT, "--store", "none", "--checkpoint", "0", "--out", "run")
    fail_at(monkeypatch, 25, error)  # in the second step
    said = refused(capsys, 1, *words)
    first = str(error).splitlines()[0]
    assert said == f"equipoise: the GPU failed ({first}); the same command goes on from the last checkpoint in run"
    assert "step 0 done" not in done(capsys, *words).err
    assert measured("run") == straight


def test_a_gpu_that_is_lost_before_the_first_checkpoint(capsys, monkeypatch):
    fail_at(monkeypatch, 3, GONE["lost"])
    said = refused(capsys, 1, *SHORT, "--out", "run")
    assert said.endswith("the same command starts anew: there was no checkpoint yet")


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_gpu_without_room_says_what_to_lower(capsys, monkeypatch, error):
    fail_at(monkeypatch, 3, error)
    said = refused(capsys, 1, *SHORT, "--out", "run")
    assert said.startswith("equipoise: the GPU is out of memory: lower --batch, or stop other processes on the GPU")


def test_a_runtime_error_of_another_kind_is_a_fault_of_ours(capsys, monkeypatch):
    fail_at(monkeypatch, 3, RuntimeError("shapes do not fit"))
    said = refused(capsys, 1, *SHORT, "--out", "run")
    assert said == "equipoise: unexpected RuntimeError: shapes do not fit; --debug shows where"


def test_of_two_data_sets_the_last_one_counts_everywhere(capsys):
    done(capsys, "run", "il-baseline", "--dataset", "cifar100", "--dataset", "digits", "--epochs", "1", "--out", "run")
    recipe = result()["run"]["recipe"]
    assert (result()["run"]["data"]["name"], recipe["lr"], recipe["batch"]) == ("digits", 0.05, 32)


def test_training_that_diverges(capsys):
    said = refused(capsys, 1, *SHORT, "--lr", "1e9", "--out", "run")
    assert re.search(r"training diverged: the loss is (nan|inf) in step 0, epoch \d; lower --lr", said)
    assert not Path("run/result.json").exists()
    assert entries("store") == []  # nobody else gets to reuse it


def test_a_lower_rate_after_divergence_works_in_the_same_folder(capsys):
    refused(capsys, 1, *SHORT, "--lr", "1e9", "--out", "run")
    done(capsys, *SHORT, "--lr", "0.05", "--out", "run")
    assert result()["run"]["recipe"]["lr"] == 0.05


@pytest.mark.parametrize("at", [0, -1])
def test_debug_shows_the_traceback_too(capsys, at):
    words = [*DIGITS, "--steps", "3", "--out", "run"]
    assert "Traceback" not in refused(capsys, 2, *words)
    words.insert(at % (len(words) + 1), "--debug")
    assert run_command(words) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "split_classes" in err
    assert err.splitlines()[-1].startswith("equipoise: --steps 3 does not divide")


# In processes of their own ----------------------------------------------------------------------------------


def test_what_is_slow_to_import_waits_until_it_is_needed():
    """Every command and every worker of a queue would start later. Training does not need it, with Meta neither."""
    program = """
import sys, torch, equipoise.cli, equipoise.runs.workers
from equipoise import ILBaseline, Learner, Meta, Recipe
learner = Learner(ILBaseline(Meta(every=1)), 4, recipe=Recipe(epochs=1), device="cpu")
for classes in ([0, 1], [2, 3]):
    learner.learn(torch.zeros(12, 1, 8, 8, dtype=torch.uint8), classes * 6)
assert learner.alphas_[1] is not None
print([m for m in sys.argv[1:] if m in sys.modules])
"""
    slow = ["sklearn", "scipy", "matplotlib", "tensorboard", "triton", "sympy"]
    done = subprocess.run([sys.executable, "-c", program, *slow], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_help_the_version_and_errors_of_usage_wait_for_nothing_slow():
    words = ["", "--help", "--version", "nothing", "show", "report", "demo 3", "demo --seeds 0", "paper --seeds 0"]
    words += ["bench --packed 1", *(f"{verb} --help" for verb in VERBS if verb not in ("run", "sweep"))]
    program = (
        "import sys; from equipoise.cli import run_command; codes = [run_command(w.split()) for w in sys.argv[1:]]"
    )
    program += "; print(codes, {'torch', 'numpy', 'rich', 'matplotlib'} & sys.modules.keys(), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert ended.stderr.splitlines()[-1] == f"{[2, 0, 0, *[2] * 7, *[0] * 6]} set()", ended.stderr


def test_where_there_are_no_greek_letters_the_help_has_question_marks():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = started("show", "--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "mean ? deviation" in out


def test_the_process_exits_with_the_code_and_one_sentence():
    process = started(*DIGITS, "--steps", "3", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("equipoise: --steps 3 does not divide")


def test_ctrl_c_outside_of_a_run_is_said_without_a_traceback(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.cli.show.do_show", interrupted)
    monkeypatch.setattr(sys, "argv", ["equipoise", "show", "x"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 1
    assert capsys.readouterr().err.strip() == "equipoise: stopped; the same command goes on where it was"


def test_two_processes_on_one_folder(capsys, all_digits):
    words = (*DIGITS, "--epochs", "16", "--steps", "1", "--store", "none", "--out", "run")
    first = Command(words, Path.cwd())
    try:
        wait_for(first, lambda: lines_in(Path("run/metrics.jsonl")) >= 1)
        said = refused(capsys, 1, *words)
        assert "another process is using run" in said and "--out" in said
        out, err = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 0, err
    assert f"average incremental accuracy {result()['average_incremental_accuracy']:.2f}%" in out
    assert [(m["step"], m["epoch"]) for m in metrics()] == [(t, e) for t in range(2) for e in range(1, 17)]
    assert done(capsys, *words).err == ""  # now it is free, and done


def test_ctrl_c_in_the_middle_of_training(capsys, all_digits):
    words = (*DIGITS, "--epochs", "9", "--steps", "1", "--checkpoint", "0", "--store", "none")
    process = Command([*words, "--out", "run"], Path.cwd())
    try:
        wait_for(process, lambda: lines_in(Path("run/metrics.jsonl")) >= 4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert out == "" and "Traceback" not in err
    said = [line for line in err.splitlines() if not line.startswith("step ")]
    # Heard after the last batch of an epoch or between two steps, it stops without a word before.
    assert said[:-1] in ([], ["stopping at the end of this epoch; Ctrl-C again stops at once"])
    assert said[-1] == "equipoise: stopped; the same command goes on from the last checkpoint in run"
    assert not Path("run/result.json").exists()
    again = done(capsys, *words, "--out", "run").err
    first = re.match(r"step (\d)/1, epoch (\d+)/9: ", again)
    assert (int(first[1]), int(first[2])) >= (0, 4), "it began anew"
    done(capsys, *words, "--out", "straight")
    assert measured("run") == measured("straight")
