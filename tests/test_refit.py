"""The refit on the memory and its switches: what each does, where it is recorded, what is shared, what is refused."""

from __future__ import annotations

import copy
import io
import json
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from squares import images

from equipoise import Balanced, ILBaseline, Learner, Method, Recipe, Relaxed, RunError, UsageError
from equipoise.cli import command, parsed_run, run_name
from equipoise.engine.train import Epoch
from equipoise.learner import step as step_module
from equipoise.learner.record import describe, flat, method_from
from equipoise.method import REFIT, Refit, Step
from equipoise.methods.bounds import FineTuning
from equipoise.methods.lucir import LUCIR
from equipoise.methods.ncm import NCM
from equipoise.methods.podnet import PODNet
from equipoise.runs.progress import LiveWatch, PlainWatch, Watch
from equipoise.runs.run import Run, prepare, run

TUNED = ILBaseline(mitigation="balanced-finetuning")
REFITTED = [TUNED, LUCIR(finetune=True), LUCIR(mitigation="balanced-finetuning"), PODNet()]
IDS = ["il-baseline", "lucir", "lucir-balanced", "podnet"]
RECIPE: dict[str, Any] = {"epochs": 7, "lr": 0.3, "milestones": (0.25, 0.5), "decay": 0.5, "batch": 9}
RECIPE |= {"weight_decay": 0.01}
SAID: dict[str, Any] = {**RECIPE, "what": "all", "statistics": "move", "taught": True}


def saying(method: Method, **said: Any) -> Any:
    return replace(method, **{f"refit_{name}": value for name, value in said.items()})


def refit_of(method: Method) -> Refit:
    found = method.refitting()
    assert found is not None
    return found


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Each training: its name, its step and its position, and the net before it."""
    found: list[dict[str, Any]] = []
    fit = step_module.fit

    def spy(method: Any, s: Step, recipe: Recipe, *args: Any, **more: Any) -> Any:
        net, momentum = copy.deepcopy(s.net), dict(args[3].momentum)
        found.append({"stage": more.get("stage", "train"), "s": s, "recipe": recipe, "net": net, "momentum": momentum})
        return fit(method, s, recipe, *args, **more)

    monkeypatch.setattr(step_module, "fit", spy)
    return found


def learned(method: Method, **recipe: Any) -> Any:
    made = Learner(method, 4, recipe=Recipe(epochs=2, lr=0.05, batch=16, **recipe), device="cpu")
    for classes in (range(3), range(3, 5)):
        made.learn(*images(classes))
    return made


# What each says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
def test_what_is_not_said_is_the_methods_own(method: Method) -> None:
    assert method.refitting() == method.refit() and refit_of(method).what == "classifier"
    for name, value in SAID.items():
        now, own = refit_of(saying(method, **{name: value})), refit_of(method)
        if name in RECIPE:
            assert now == replace(own, recipe=replace(own.recipe, **{name: value}))
        else:
            assert now == replace(own, **{name: value})
    assert SAID.keys() == set(REFIT)


def test_the_rate_is_the_one_that_was_asked_for() -> None:
    recipe = refit_of(saying(TUNED, epochs=8, lr=0.4, milestones=(0.25, 0.5))).recipe
    assert [recipe.lr_at(k) for k in range(8)] == pytest.approx([0.4] * 2 + [0.04] * 2 + [0.004] * 4)
    halved = refit_of(saying(TUNED, epochs=4, lr=0.4, milestones=(0.5,), decay=0.5)).recipe
    assert [halved.lr_at(k) for k in range(4)] == pytest.approx([0.4, 0.4, 0.2, 0.2])
    constant = refit_of(saying(TUNED, milestones=())).recipe
    assert {constant.lr_at(k) for k in range(20)} == {0.01}


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("statistics", ["rest", "move"])
def test_all_weights_are_trained_if_asked(method: Method, statistics: str, trainings: list[dict[str, Any]]) -> None:
    made = learned(saying(method, what="all", statistics=statistics, epochs=3))
    assert [t["stage"] for t in trainings] == ["train", "train", "refit"]
    refit, net = trainings[-1], made.state_.net
    assert refit["recipe"].epochs == 3 and torch.bincount(refit["s"].data.y).tolist() == [4] * 5
    before = refit["net"]
    assert refit["momentum"].keys() == dict(before.named_parameters()).keys(), "the rows of old classes are awake"
    for name, w in net.named_parameters():
        assert not w.requires_grad and not torch.equal(w, dict(before.named_parameters())[name]), name
    moved = {k: not torch.equal(b, dict(before.named_buffers())[k]) for k, b in net.named_buffers() if "running" in k}
    assert moved and set(moved.values()) == {statistics == "move"}
    made.learn(*images(range(5, 7)))
    assert made.logits(images(range(3))[0]).shape == (36, 7), "and the next step goes on from there"


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("statistics", ["rest", "move"])
def test_only_the_classifier_is_trained_otherwise(
    method: Method, statistics: str, trainings: list[dict[str, Any]]
) -> None:
    net = learned(saying(method, statistics=statistics, epochs=2)).state_.net
    for name, value in net.backbone.state_dict().items():
        moves = statistics == "move" and ("running" in name or "num_batches" in name)
        assert torch.equal(value, trainings[-1]["net"].backbone.state_dict()[name]) != moves, name


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("taught", [True, False])
def test_the_previous_net_goes_on_teaching_or_not(
    method: Method, taught: bool, trainings: list[dict[str, Any]]
) -> None:
    made = learned(saying(method, taught=taught, epochs=1, what="all"))  # features are what most teach
    assert (trainings[-1]["s"].teacher is not None) == taught
    other = learned(saying(method, taught=not taught, epochs=1, what="all"))
    assert not torch.equal(*(one.logits(images(range(5))[0]) for one in (made, other)))


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("last", ["joined", "short"])
def test_its_epochs_end_as_those_of_the_step_do(method: Method, last: str, trainings: list[dict[str, Any]]) -> None:
    learned(saying(method, epochs=1), last=last)
    assert [t["recipe"].last for t in trainings] == [last] * 3


def test_a_method_from_outside_has_the_switches_too() -> None:
    @dataclass(frozen=True)
    class Mine(ILBaseline):
        name: ClassVar[str] = "refits-its-own-way"
        sizes: tuple[int, ...] = (1, 2)

        def refit(self) -> Refit:
            return Refit(Recipe(epochs=2, lr=0.5))

    found = refit_of(Mine(refit_lr=0.25))
    assert (found.recipe.epochs, found.recipe.lr) == (2, 0.25)
    assert ILBaseline(Balanced(), "none", 3.0).T == 3.0, "settings that came later are given by name"


# Records, keys and names --------------------------------------------------------------------------------------


def test_a_record_names_only_what_was_said() -> None:
    assert describe(TUNED).keys() == {"name", "loss", "mitigation", "T"}
    assert not [name for name in flat(PODNet()) if name.startswith("refit")]
    said = saying(TUNED, **SAID)
    plain = json.loads(json.dumps(describe(said)))
    assert {k for k in plain if k.startswith("refit_")} == {f"refit_{name}" for name in REFIT}
    assert plain["refit_milestones"] == [0.25, 0.5] and method_from(plain) == said
    assert method_from(describe(saying(TUNED, milestones=()))).refit_milestones == ()  # type: ignore[attr-defined]
    old = {"name": "il-baseline", "mitigation": "none", "T": 2.0, "loss": {"name": "standard"}}
    assert method_from(old) == ILBaseline()


def test_base_steps_are_shared_and_later_ones_are_not() -> None:
    small: dict[str, Any] = {"dataset": "digits", "steps": 1, "device": "cpu"}
    for plain in (TUNED, LUCIR(finetune=True), PODNet(), FineTuning(mitigation="balanced-finetuning")):
        mine = prepare(Run(plain, **small)).keys()
        for name, value in SAID.items():
            theirs = prepare(Run(saying(plain, **{name: value}), **small)).keys()
            assert theirs[0] == mine[0] and theirs[1] != mine[1], name
    base = Method.at_base(saying(TUNED, **SAID))
    assert base == ILBaseline()


def test_names_of_folders_differ_by_what_was_said() -> None:
    asked = [Run(saying(TUNED, **said)) for said in ({}, *({k: v} for k, v in SAID.items()))]
    assert len({run_name(one) for one in asked}) == 1 + len(SAID)


def test_a_saved_learner_keeps_what_was_said(tmp_path: Path) -> None:
    method = saying(LUCIR(finetune=True), milestones=(0.5,), taught=False)
    Learner(method, 4, device="cpu").save(tmp_path)
    assert Learner.load(tmp_path).method == method


# The command --------------------------------------------------------------------------------------------------

DIGITS = ["run", "il-baseline", "--dataset", "digits", "--epochs", "1", "--steps", "1", "--memory", "3"]
ASKED = [*DIGITS, "--mitigation", "balanced-finetuning"]


@pytest.mark.usefixtures("isolated")
def test_the_flags_reach_the_refit_and_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ASKED, "--refit-epochs", "2", "--refit-lr", "0.02", "--refit-milestones", "0.5", "--refit-what", "all"]
    words += ["--refit-statistics", "move", "--refit-taught", "True"]
    words += ["--refit-decay", "0.5", "--refit-batch", "20", "--refit-weight-decay", "0.001"]
    shorter = [*words, "--last", "short"]
    assert command([*ASKED, "--out", "own"]) == 0 and command([*words, "--out", "said"]) == 0
    own, said = (json.loads(Path(name, "result.json").read_text()) for name in ("own", "said"))
    assert own["refit"]["what"] == "classifier" and own["refit"]["recipe"]["epochs"] == 20
    assert not own["refit"]["taught"] and not [k for k in own["run"] if k.startswith("refit")]
    refit = said["refit"]
    recipe = {k: refit["recipe"][k] for k in RECIPE}
    assert recipe == {
        "epochs": 2, "lr": 0.02, "milestones": [0.5], "decay": 0.5, "batch": 20, "weight_decay": 0.001
    }  # fmt: skip
    assert (refit["what"], refit["statistics"], refit["taught"]) == ("all", "move", True)
    recorded = {k: v for k, v in said["run"].items() if k.startswith("refit_")}
    assert recorded == {"refit_what": "all", "refit_statistics": "move", "refit_taught": True} | {
        f"refit_{k}": v for k, v in recipe.items()
    }
    assert said["reused"]["steps"] == [0] and said["steps"][1]["top1"] != own["steps"][1]["top1"]
    for result in (own, said):
        base, *later = (step["refitting_seconds"] for step in result["steps"])
        assert base == 0 and all(0 < seconds < 60 for seconds in later)
    capsys.readouterr()
    assert command([*words, "--out", "said"]) == 0, "the same command agrees with its record"
    assert command([*ASKED, "--out", "said"]) == 1
    assert "refit_lr (there 0.02, here None)" in capsys.readouterr().err
    assert command([*shorter, "--out", "short"]) == 0
    short = json.loads(Path("short", "result.json").read_text())
    assert short["refit"] == refit | {"recipe": refit["recipe"] | {"last": "short"}}
    assert command(["show", "own", "said"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "refit epochs" in table and "[0.5]" in table and "–" in table


REFUSED = [
    (ILBaseline(Balanced(), refit_lr=0.1), 4, "refit-lr"),
    (ILBaseline(refit_taught=False), 4, "refit-taught"),
    (ILBaseline(mitigation="class-oversampling", refit_what="all"), 4, "refit-what"),
    (LUCIR(refit_epochs=5), 4, "refit-epochs"),
    (LUCIR(Relaxed(), finetune=True, refit_epochs=5), 4, "refit-epochs"),
    (LUCIR(finetune=True, refit_epochs=5), 0, "refit-epochs"),
    (PODNet(Balanced(), refit_milestones=()), 4, "refit-milestones"),
    (PODNet(Balanced(), refit_weight_decay=0.0), 4, "refit-weight-decay"),
    (PODNet(refit_statistics="rest", finetune=False), 4, "refit-statistics"),
    (NCM(refit_lr=1.0), 4, "refit-lr"),
]


@pytest.mark.parametrize(("method", "memory", "name"), REFUSED)
def test_what_is_said_of_a_refit_that_there_is_not_is_refused(method: Method, memory: int, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} .* not done here: .*memory above 0$") as caught:
        Learner(method, memory)
    assert "\n" not in str(caught.value)


BAD = [
    *({"epochs": v} for v in (0, 1.5)),
    *({"lr": v} for v in (0.0, -1.0, float("nan"))),
    *({"milestones": v} for v in ((0.0,), (1.5,), 0.5)),
    {"decay": 0.0},
    *({"batch": v} for v in (1, 2.5)),
    {"weight_decay": -1.0},
    {"what": "head"},
    {"statistics": "still"},
    {"taught": "never"},
]


@pytest.mark.parametrize("said", BAD, ids=str)
def test_what_cannot_be_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"^in the refit, .*{next(iter(said))[:5]}.* must be .*, not ") as caught:
        Learner(saying(LUCIR(finetune=True), **said))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        [*DIGITS, "--loss", "balanced", "--refit-lr", "0.1"],
        [*DIGITS, "--refit-taught", "True"],
        [*ASKED, "--refit-epochs", "0"],
        [*ASKED, "--refit-milestones", "0.5", "2"],
        [*ASKED, "--refit-lr", "nan"],
        [*ASKED, "--refit-batch", "1"],
    ],
    ids=lambda words: "_".join(words[-3:]),
)
@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_it_before_anything_is_made(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*words, "--out", "run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("equipoise: ") and said.err.count("\n") == 1 and "refit" in said.err
    assert not Path("run").exists() and not Path("store").exists()


@pytest.mark.usefixtures("isolated")
def test_a_refit_that_diverges_says_which_rate_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*ASKED, "--refit-lr", "1e30", "--out", "run"]) == 1
    assert "lower --refit-lr" in capsys.readouterr().err.splitlines()[-1]


def test_an_older_folder_agrees_and_another_refit_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = parsed_run(ASKED[1:], "run")
    result = run(asked, tmp_path)
    assert "refit" not in (tmp_path / "run.json").read_text(), "as older versions wrote it"
    monkeypatch.setattr("equipoise.learner.step.fit", None)
    assert run(asked, tmp_path) == result
    with pytest.raises(RunError, match=r"settings: refit_what \(there None, here all\);"):
        run(replace(asked, method=saying(TUNED, what="all")), tmp_path)


# Its progress -------------------------------------------------------------------------------------------------


def test_who_learns_hears_of_the_refit_and_learns_the_same() -> None:
    made = [Learner(PODNet(), 4, recipe=Recipe(epochs=2, batch=16), device="cpu") for _ in range(2)]
    told: list[tuple[int, int, int]] = []
    own: list[int] = []
    for classes in (range(3), range(3, 5), range(5, 6)):
        x, y = images(classes)
        made[0].learn(x, y)
        made[1].learn(x, y, lambda one: own.append(len(told)), refit=lambda e: told.append((e.step, e.epoch, e.epochs)))
    assert told == [(t, k, 20) for t in (1, 2) for k in range(1, 21)]
    assert own == [0] * 4 + [20] * 2, "the callback hears of the step's own epochs only, which come before"
    x, _ = images(range(6))
    assert torch.equal(made[0].logits(x), made[1].logits(x))


class Refits(Watch):
    """Notes epochs of steps and of refits, and says stop in one of the latter."""

    def __init__(self, stop: tuple[int, int] | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.stop = stop

    def epoch(self, e: Epoch) -> None:
        self.told.append(("train", e.step, e.epoch))

    def refit(self, e: Epoch) -> None:
        self.told.append(("refit", e.step, e.epoch))
        if (e.step, e.epoch) == self.stop:
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_stopped_in_a_refit_does_it_again(tmp_path: Path) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _, asked = parsed_run([*ASKED[1:], "--refit-epochs", "3"], "run")
    straight, watch = tmp_path / "straight", Refits()
    run(asked, straight, watch=watch)
    assert watch.told == [("train", 0, 1), ("train", 1, 1), *(("refit", 1, k) for k in (1, 2, 3))]
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "stopped", watch=Refits((1, 2)))
    again = Refits()
    run(asked, tmp_path / "stopped", watch=again)
    assert again.told == [("refit", 1, k) for k in (1, 2, 3)]
    texts = [(folder / "metrics.jsonl").read_text() for folder in (straight, tmp_path / "stopped")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    one, other = ([(e["step"], e["epoch"], e["loss"]) for e in each] for each in lines)
    assert one == other == [(t, 1, e["loss"]) for t, e in enumerate(lines[0])], "a refit is no epoch of the step"
    assert len({json.dumps(json.loads((f / "result.json").read_text())["confusion"]) for f in tmp_path.iterdir()}) == 1


LINE = r"step 1/1, refitting on the memory, epoch (\d)/3: loss [\d.]+"


@pytest.mark.usefixtures("isolated")
def test_plain_lines_tell_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command([*ASKED, "--refit-epochs", "3", "--out", "few"]) == 0
    assert re.findall(LINE, capsys.readouterr().err) == ["3"], "seconds apart, and the last"
    monkeypatch.setattr("equipoise.cli.PlainWatch", lambda: PlainWatch(every=0))
    assert command([*ASKED, "--refit-epochs", "3", "--out", "all"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [found[1] for line in lines if (found := re.fullmatch(LINE, line))] == ["1", "2", "3"]


def test_the_live_display_tells_of_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    watch = LiveWatch(console)
    watch.begin({"recipe": {"epochs": 1}}, [10, 10])
    watch.refit(Epoch(1, 2, 3, 0.5, 0.01, None, 100.0, 1.0))
    watch.close()
    assert watch.bar.tasks[0].fields["words"] == "step 1/1, refitting on the memory, epoch 2/3: loss 0.5000"
