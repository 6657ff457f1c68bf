"""Fine-tuning on the memory: what each of its settings does, where it is recorded, what is shared, what is refused."""

from __future__ import annotations

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
from steps import Trained, note_trainings

from equipoise import (
    LUCIR,
    NCM,
    Balanced,
    BalancedFinetuning,
    ClassOversampling,
    Finetune,
    ILBaseline,
    Learner,
    Method,
    Plan,
    PODNet,
    Recipe,
    Relaxed,
    RunError,
    Stage,
    Standard,
    UsageError,
)
from equipoise.cli import run_command
from equipoise.engine.train import Epoch
from equipoise.methods import KINDS
from equipoise.methods.bounds import FineTuning
from equipoise.runs.command import name_folder
from equipoise.runs.plan import Training, prepare
from equipoise.runs.progress import LiveWatch, PlainWatch, Watch
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.settings import from_plain, to_plain
from equipoise.step import EVERYTHING, ROWS

TUNED = ILBaseline(BalancedFinetuning())
REFITTED = [TUNED, LUCIR(finetune=Finetune(20)), LUCIR(BalancedFinetuning()), PODNet()]
IDS = ["il-baseline", "lucir", "lucir-balanced", "podnet"]
RECIPE: dict[str, Any] = {"epochs": 7, "lr": 0.3, "milestones": (0.25, 0.5), "batch": 9, "weight_decay": 0.01}
RECIPE |= {"clamp": 0.7}
SAID: dict[str, Any] = {**RECIPE, "what": "all", "batch_norm": "train", "distil": True}
PLAN = Plan(1, (3, 2), (1, 8, 8), (4, 4, 4, 12, 12), 4, 4)


def finetune_of(method: Any) -> Finetune:
    """The settings, where they are: the remedy's, or the method's own."""
    found = method.remedy.finetune if isinstance(method.remedy, BalancedFinetuning) else method.finetune
    assert isinstance(found, Finetune)
    return found


def saying(method: Any, **said: Any) -> Any:
    changed = replace(finetune_of(method), **said)
    if isinstance(method.remedy, BalancedFinetuning):
        return method.with_remedy(BalancedFinetuning(changed))
    return replace(method, finetune=changed)


def refit_of(method: Method) -> Stage:
    *_, refit = method.stages(PLAN)
    assert isinstance(refit, Stage) and refit.name == "refit" and refit.images == "memory"
    assert refit.remedy == Standard(), "the memory is balanced by itself"
    return refit


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    return note_trainings(monkeypatch)


def learned(method: Method, **recipe: Any) -> Any:
    made = Learner(method, 4, recipe=Recipe(epochs=2, lr=0.05, batch=16, **recipe), device="cpu")
    for classes in (range(3), range(3, 5)):
        made.learn(*images(classes))
    return made


# What each says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
def test_each_setting_changes_what_it_names_and_nothing_else(method: Method) -> None:
    own = refit_of(method)
    assert own.groups == ROWS and own.objective is None and own.gradient_noise == 0
    for name, value in SAID.items():
        now = refit_of(saying(method, **{name: value}))
        if name in RECIPE:
            assert now == replace(own, recipe=replace(own.recipe, **{name: value}))
        elif name == "what":
            assert now == replace(own, groups=EVERYTHING)
        elif name == "distil":
            assert now == replace(own, teacher="previous")
        else:
            assert now == replace(own, batch_norm="train")
    assert refit_of(saying(method, distil=False)).teacher is None
    assert SAID.keys() == vars(Finetune()).keys()


def test_the_rate_is_the_one_that_was_asked_for() -> None:
    recipe = refit_of(saying(TUNED, epochs=8, lr=0.4, milestones=(0.25, 0.5))).recipe
    assert [recipe.lr_at(k) for k in range(8)] == pytest.approx([0.4] * 2 + [0.04] * 2 + [0.004] * 4)
    constant = refit_of(saying(TUNED, milestones=())).recipe
    assert {constant.lr_at(k) for k in range(20)} == {0.01}


def test_fine_tuning_has_a_recipe_of_its_own_and_ends_epochs_as_the_step() -> None:
    """Whatever the training's momentum, schedule and factor at a milestone are."""
    user = replace(TUNED.recipe(PLAN), momentum=0.3, decay=0.5, last="short", schedule="cosine", lr=0.7, batch=99)
    *_, refit = saying(TUNED, epochs=4, lr=0.4).stages(replace(PLAN, recipe=user))
    assert (refit.recipe.momentum, refit.recipe.decay, refit.recipe.last) == (0.9, 0.1, "short")
    assert [refit.recipe.lr_at(k) for k in range(4)] == pytest.approx([0.4, 0.4, 0.04, 0.04])
    assert refit.recipe.batch == 128


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("statistics", ["eval", "train"])
def test_all_weights_are_trained_if_asked(method: Method, statistics: str, trainings: list[Trained]) -> None:
    made = learned(saying(method, what="all", batch_norm=statistics, epochs=3))
    assert [one.stage.name for one in trainings] == ["train", "train", "refit"]
    refit, net = trainings[-1], made.state_.net
    assert refit.stage.recipe.epochs == 3 and torch.bincount(refit.s.y).tolist() == [4] * 5
    before = refit.net
    assert not refit.at.momentum, "momentum begins at 0"
    for name, w in net.named_parameters():
        assert not w.requires_grad and not torch.equal(w, dict(before.named_parameters())[name]), name
    moved = {k: not torch.equal(b, dict(before.named_buffers())[k]) for k, b in net.named_buffers() if "running" in k}
    assert moved and set(moved.values()) == {statistics == "train"}
    made.learn(*images(range(5, 7)))
    assert made.logits(images(range(3))[0]).shape == (36, 7), "and the next step goes on from there"


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("statistics", ["eval", "train"])
def test_only_the_classifier_is_trained_otherwise(method: Method, statistics: str, trainings: list[Trained]) -> None:
    net = learned(saying(method, batch_norm=statistics, epochs=2)).state_.net
    for name, value in net.backbone.state_dict().items():
        moves = statistics == "train" and ("running" in name or "num_batches" in name)
        assert torch.equal(value, trainings[-1].net.backbone.state_dict()[name]) != moves, name


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("distil", [True, False])
def test_the_previous_net_goes_on_teaching_or_not(method: Method, distil: bool, trainings: list[Trained]) -> None:
    made = learned(saying(method, distil=distil, epochs=1, what="all"))  # features are what most teach
    assert (trainings[-1].s.teacher is not None) == distil
    other = learned(saying(method, distil=not distil, epochs=1, what="all"))
    assert not torch.equal(*(one.logits(images(range(5))[0]) for one in (made, other)))


@pytest.mark.parametrize("method", REFITTED, ids=IDS)
@pytest.mark.parametrize("last", ["joined", "short"])
def test_its_epochs_end_as_those_of_the_step_do(method: Method, last: str, trainings: list[Trained]) -> None:
    learned(saying(method, epochs=1), last=last)
    assert [one.stage.recipe.last for one in trainings] == [last] * 3


def test_a_method_from_outside_has_fine_tuning_too(trainings: list[Trained]) -> None:
    @dataclass(frozen=True)
    class Mine(ILBaseline):
        name: ClassVar[str] = "refits-its-own-way"
        finetune: Finetune = Finetune(2, 0.5)  # noqa: RUF009

    learned(Mine())
    assert [(one.t, one.stage.name) for one in trainings] == [(0, "train"), (1, "train"), (1, "refit")]
    assert (trainings[-1].stage.recipe.epochs, trainings[-1].stage.recipe.lr) == (2, 0.5)
    assert [one.stage.name for one in trainings if one.t] == ["train", "refit"]
    trainings.clear()
    learned(Mine(Balanced()))
    assert [one.stage.name for one in trainings] == ["train", "train"], "a loss of its own takes its place"


# Records, keys and names --------------------------------------------------------------------------------------


def test_a_record_names_every_setting() -> None:
    for method in REFITTED:
        said = saying(method, **SAID)
        plain = json.loads(json.dumps(to_plain(said)))
        found = plain["remedy"]["finetune"] if isinstance(method.remedy, BalancedFinetuning) else plain["finetune"]
        assert found.keys() == SAID.keys() and found["milestones"] == [0.25, 0.5]
        assert from_plain(Method, plain, KINDS) == said
    assert from_plain(Method, to_plain(saying(TUNED, milestones=())), KINDS) == saying(TUNED, milestones=())


def test_base_steps_are_shared_and_later_ones_are_not() -> None:
    def keys(method: Method) -> list[str | None]:
        return prepare(Run(method, Data("digits"), Protocol(steps=1)), Machine("cpu")).compute_keys()

    for plain in (TUNED, LUCIR(finetune=Finetune(20)), PODNet(), FineTuning(BalancedFinetuning())):
        mine = keys(plain)
        for name, value in SAID.items():
            if getattr(finetune_of(plain), name) == value:
                continue
            theirs = keys(saying(plain, **{name: value}))
            assert None not in theirs and theirs[0] == mine[0] and theirs[1] != mine[1], name
    assert saying(TUNED, **SAID).at_base() == ILBaseline()


def test_names_of_folders_differ_by_what_was_said() -> None:
    runs = [Run(saying(TUNED, **said)) for said in ({}, *({k: v} for k, v in SAID.items()))]
    assert len({name_folder(one) for one in runs}) == 1 + len(SAID)


def test_a_saved_learner_keeps_what_was_said(tmp_path: Path) -> None:
    method = saying(LUCIR(finetune=Finetune(20)), milestones=(0.5,), distil=False)
    Learner(method, 4, device="cpu").save(tmp_path)
    assert Learner.load(tmp_path).method == method


# The command --------------------------------------------------------------------------------------------------

DIGITS = ["run", "il-baseline", "--dataset", "digits", "--epochs", "1", "--steps", "1", "--memory", "3"]
ASKED = [*DIGITS, "--remedy", "balanced-finetuning"]


@pytest.mark.usefixtures("isolated")
def test_the_flags_reach_fine_tuning_and_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ASKED, "--finetune-epochs", "2", "--finetune-lr", "0.02", "--finetune-batch", "20"]
    words += ["--finetune-weight-decay", "0.001"]
    assert run_command([*ASKED, "--out", "own"]) == 0 and run_command([*words, "--out", "said"]) == 0
    own, said = (json.loads(Path(name, "result.json").read_text()) for name in ("own", "said"))

    def refits(result: dict[str, Any]) -> list[dict[str, Any]]:
        found = [one for part in result["resolved"]["stages"] for one in part["stages"] if isinstance(one, dict)]
        return [one for one in found if one["name"] == "refit"]

    (one,), (other,) = refits(own), refits(said)
    assert one["recipe"]["epochs"] == 20 and one["teacher"] is None and one["batch_norm"] == "eval"
    recipe = {"epochs": 2, "lr": 0.02, "batch": 20, "weight_decay": 0.001}
    assert {k: other["recipe"][k] for k in recipe} == recipe
    recorded = said["run"]["method"]["remedy"]["finetune"]
    assert recorded == own["run"]["method"]["remedy"]["finetune"] | recipe
    assert said["reused"]["steps"] == [0] and said["steps"][1]["top1"] != own["steps"][1]["top1"]
    capsys.readouterr()
    assert run_command([*words, "--out", "said"]) == 0, "the same command agrees with its record"
    assert run_command([*ASKED, "--out", "said"]) == 1
    assert re.search(r"finetune.lr \(there 0.02, here 0.01\)", capsys.readouterr().err)
    assert run_command([*words, "--last", "short", "--out", "short"]) == 0
    (short,) = refits(json.loads(Path("short", "result.json").read_text()))
    assert short == other | {"recipe": other["recipe"] | {"last": "short"}}


REFUSED = [
    (LUCIR(Relaxed(), finetune=Finetune(5)), 4),
    (LUCIR(Balanced(), finetune=Finetune(5)), 4),
    (LUCIR(BalancedFinetuning(), finetune=Finetune(5)), 4),
    (LUCIR(finetune=Finetune(5)), 0),
    (PODNet(Balanced(), finetune=Finetune(5)), 4),
    (PODNet(Balanced(), finetune=Finetune(20, weight_decay=0.0)), 4),
]


@pytest.mark.parametrize(("method", "memory"), REFUSED)
def test_fine_tuning_that_would_not_be_done_is_refused(method: Method, memory: int) -> None:
    with pytest.raises(UsageError, match=r"^fine-tuning has no effect here: .* memory above 0$") as caught:
        Learner(method, memory)
    assert "\n" not in str(caught.value)
    Learner(method.with_remedy(ClassOversampling()), 4)


def test_fine_tuning_cannot_be_said_of_what_has_none() -> None:
    for kind in (ILBaseline, NCM, FineTuning):
        with pytest.raises(TypeError, match="finetune"):
            kind(finetune=Finetune())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "words",
    [
        [*DIGITS, "--finetune-lr", "0.1"],
        [*DIGITS, "--remedy", "balanced", "--finetune-lr", "0.1"],
        ["run", "lucir", *DIGITS[2:], "--remedy", "balanced", "--finetune-epochs", "5"],
        [*ASKED, "--finetune-epochs", "0"],
        [*ASKED, "--finetune-lr", "nan"],
        [*ASKED, "--finetune-batch", "1"],
        [*ASKED, "--finetune-weight-decay", "-1"],
    ],
    ids=lambda words: "_".join(words[-4:]),
)
@pytest.mark.usefixtures("isolated")
def test_the_command_refuses_it_before_anything_is_made(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*words, "--out", "run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("equipoise: ") and said.err.count("\n") == 1
    assert re.search("fine-?tun", said.err)
    assert not Path("run").exists() and not Path("store").exists()


@pytest.mark.usefixtures("isolated")
def test_fine_tuning_that_diverges_says_which_rate_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*ASKED, "--finetune-lr", "1e30", "--out", "run"]) == 1
    assert "lower --finetune-lr" in capsys.readouterr().err.splitlines()[-1]


SMALL = Run(TUNED, Data("digits"), Protocol(steps=1, memory="3"), Recipe(epochs=1, lr=0.05, batch=32))
CPU = Machine("cpu")


def test_a_folder_agrees_with_its_settings_and_with_no_other_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(SMALL, tmp_path, CPU)
    monkeypatch.setattr("equipoise.learner.fit", None)
    assert run(SMALL, tmp_path, CPU) == result
    with pytest.raises(RunError, match=r"finetune\.what \(there classifier, here all\)"):
        run(replace(SMALL, method=saying(TUNED, what="all")), tmp_path, CPU)


# Its progress -------------------------------------------------------------------------------------------------


def test_a_callback_hears_of_it_and_what_is_learned_is_the_same() -> None:
    made = [Learner(PODNet(), 4, recipe=Recipe(epochs=2, batch=16), device="cpu") for _ in range(2)]
    told: list[tuple[int, str, int, int]] = []

    def note(learner: Learner) -> None:
        e = learner.progress_
        assert e is not None and e.stage == learner.stage_
        told.append((e.step, e.stage, e.epoch, e.epochs))

    for classes in (range(3), range(3, 5), range(5, 6)):
        x, y = images(classes)
        made[0].learn(x, y)
        made[1].learn(x, y, note)
    trained = [[(t, "train", k, 2) for k in (1, 2)] for t in range(3)]
    refits = [[(t, "refit", k, 20) for k in range(1, 21)] for t in (1, 2)]
    assert told == [*trained[0], *trained[1], *refits[0], *trained[2], *refits[1]]
    x, _ = images(range(6))
    assert torch.equal(made[0].logits(x), made[1].logits(x))


class Stops(Watch):
    """Notes epochs, and says stop after one of them."""

    def __init__(self, stop: tuple[str, int, int] | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.stop = stop

    def end_epoch(self, e: Epoch) -> None:
        self.told.append((e.stage, e.step, e.epoch))
        if self.told[-1] == self.stop:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("method", [saying(TUNED, epochs=3), saying(PODNet(), epochs=3)], ids=lambda m: m.name)
def test_a_run_that_is_stopped_in_fine_tuning_goes_on_there(method: Method, tmp_path: Path) -> None:
    """With a checkpoint at every epoch: what is done is not done again, and not a number differs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    one, often = replace(SMALL, method=method), Options(checkpoint=0)
    straight, stopped, watch = tmp_path / "straight", tmp_path / "stopped", Stops()
    run(one, straight, CPU, often, watch)
    assert watch.told == [("train", 0, 1), ("train", 1, 1), *(("refit", 1, k) for k in (1, 2, 3))]
    with pytest.raises(KeyboardInterrupt):
        run(one, stopped, CPU, often, Stops(("refit", 1, 2)))
    again = Stops()
    run(one, stopped, CPU, often, again)
    assert again.told == [("refit", 1, 3)]
    lines = [
        [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (straight, stopped)
    ]
    epochs, other = ([(e["step"], e["stage"], e["epoch"], e["loss"], e["done"]) for e in each] for each in lines)
    assert epochs == other and [e[:3] for e in epochs] == [(t, stage, k) for stage, t, k in watch.told]
    done = [e[4] for e in epochs]
    assert done[0] == 1 and done[1:] == sorted(done[1:]) and done[-1] == 1 and done[1] < 1
    assert len({json.dumps(json.loads((f / "result.json").read_text())["confusion"]) for f in tmp_path.iterdir()}) == 1


LINE = r"step 1/1, fine-tuning on the memory, epoch (\d)/3: loss [\d.]+, .*"


def test_plain_lines_tell_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(SMALL, method=saying(TUNED, epochs=3))
    for every, said in ((5.0, ["3"]), (0.0, ["1", "2", "3"])):
        run(one, tmp_path / str(every), CPU, watch=PlainWatch(every=every))
        lines = capsys.readouterr().err.splitlines()
        told = [found[1] for line in lines if (found := re.fullmatch(LINE, line))]
        assert told == said, "seconds apart, and the last"


def test_the_live_display_tells_of_it() -> None:
    watch = LiveWatch(Console(file=io.StringIO(), force_terminal=True, width=120))
    train = Training("train", 1, 10)
    watch.begin([[train], [train, Training("refit", 3, 10)]])
    watch.end_epoch(Epoch(1, "refit", 2, 3, 0.5, 0.01, None, 100.0, 1.0))
    watch.close()
    words = watch.bar.tasks[0].description
    assert words.startswith("step 1/1, fine-tuning on the memory, epoch 2/3: loss 0.5000, ")
