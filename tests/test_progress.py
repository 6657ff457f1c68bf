"""How a queue stands, told from made-up folders, number by number; and how far a learner is, in one line."""

from __future__ import annotations

import errno
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from equipoise import (
    CHOOSE,
    LUCIR,
    BalancedFinetuning,
    Finetune,
    ILBaseline,
    Learner,
    Meta,
    Plan,
    PODNet,
    Recipe,
    Stage,
    UsageError,
)
from equipoise.data import datasets
from equipoise.engine.train import Callbacks, Epoch, Position
from equipoise.learner import progress
from equipoise.runs.folder import read_last_epoch
from equipoise.runs.plan import Training
from equipoise.runs.progress import (
    QueueStatus,
    QueueWatch,
    Watch,
    compute_fraction_done,
    describe_queue,
    read_queue_status,
)
from equipoise.runs.queue import Job, estimate_cost, sort_longest_first
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run


def line(step: int, epoch: int, speed: float = 100.0) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "done": epoch / 10, "images_per_second": speed, "loss": 1.0}


def job(folder: Path, group: str = "", images: Any = (1000, 200, 300), *lines: Any) -> Job:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return Job(Run(ILBaseline(), Data("digits")), Machine("cpu"), folder, group, list(images))


def test_what_is_left_goes_by_the_last_epoch(tmp_path: Path) -> None:
    a = job(tmp_path / "a", "", (1000, 200, 300), line(0, 10), line(1, 3, 50.0))
    b = job(tmp_path / "b", "", (1000, 200, 300), line(0, 4, 70.0))
    c = job(tmp_path / "c")
    assert read_queue_status([a, b, c], [a, b]) == QueueStatus(0, 0, 2, 1, 140 + 300 + 600 + 500 + 1500, 120.0)
    assert read_queue_status([a, b, c], [b]) == QueueStatus(0, 0, 1, 2, 140 + 300 + 600 + 500 + 1500, 70.0), (
        "a is at rest"
    )
    assert read_queue_status([c], []) == QueueStatus(0, 0, 0, 1, 1500, 0.0)


def test_a_step_with_several_stages_goes_by_its_images(tmp_path: Path) -> None:
    """What is left of a step is the part of its images, not of its epochs, that is not done."""
    late = {**line(1, 1, 50.0), "stage": "refit", "done": 0.95}
    a = job(tmp_path / "a", "", (1000, 200, 300), line(0, 10), line(1, 10), late)
    assert read_queue_status([a], [a]) == QueueStatus(0, 0, 1, 0, pytest.approx(10 + 300), 50.0)


STEPS = [[Training("train", 4, 250)], [Training("train", 4, 100), Training("refit", 10, 20)], []]


@pytest.mark.parametrize(
    ("t", "stage", "epochs", "done"),
    [
        (0, "train", 1, 0.25),
        (0, "train", 0.5, 0.125),
        (1, "train", 4, 2 / 3),
        (1, "refit", 1, 0.7),
        (1, "refit", 10, 1),
    ],
)
def test_how_much_of_a_step_is_done(t: int, stage: str, epochs: float, done: float) -> None:
    assert compute_fraction_done(STEPS[t], stage, epochs) == pytest.approx(done)


@pytest.mark.parametrize(
    ("t", "stage", "epoch", "left", "words"),
    [
        (0, "train", 1, 750 + 600, "step 0/2, epoch 1/4: loss 0.5000, 10 images/s, 2 min 15 s left"),
        (1, "train", 3, 300, "step 1/2, epoch 3/4: loss 0.5000, 10 images/s, 30 s left"),
        (1, "refit", 9, 20, "step 1/2, fine-tuning on the memory, epoch 9/10: loss 0.5000, 10 images/s, 2.0 s left"),
    ],
)
def test_a_watch_knows_how_long_it_takes(t: int, stage: str, epoch: int, left: float, words: str) -> None:
    watch = Watch()
    watch.begin(STEPS)
    epochs = next(part.epochs for part in STEPS[t] if part.stage == stage)
    e = Epoch(t, stage, epoch, epochs, 0.5, 0.1, None, 10.0, 1.0)
    assert watch.estimate_time_left(e) == pytest.approx(left / 10) and watch.describe_epoch(e) == words
    assert watch.describe_epoch(e._replace(alpha=0.25)).count(", α 0.250,") == 1


def test_what_is_over_is_counted_and_has_nothing_left(tmp_path: Path) -> None:
    jobs = [job(tmp_path / name, "", (1000, 200), line(0, 5)) for name in "abcd"]
    jobs[0].result = {}
    jobs[1].failure = jobs[2].failure = "no"
    assert read_queue_status(jobs, [jobs[3]]) == QueueStatus(1, 2, 1, 0, 700, 100.0)


def test_a_shared_base_step_is_counted_once_as_far_as_it_has_come(tmp_path: Path) -> None:
    jobs = [job(tmp_path / name, "x", (1000, 200)) for name in "ab"]
    jobs.append(job(tmp_path / "c", "x", (1000, 200), line(0, 6)))
    other = job(tmp_path / "d", "y", (500, 200))
    assert read_queue_status([*jobs, other], [jobs[2]]).left == 400 + 3 * 200 + 700
    assert read_queue_status([*jobs, other], [jobs[2]], shared=False).left == 1200 + 1200 + 600 + 700
    (tmp_path / "c" / "metrics.jsonl").write_text(json.dumps(line(0, 10)) + "\n")
    assert read_queue_status([*jobs, other], [jobs[2]]).left == 3 * 200 + 700, "c has it, so all have it"
    assert read_queue_status([*jobs, other], [jobs[2]], shared=False).left == 1200 + 1200 + 200 + 700


def test_a_base_step_is_there_by_a_result_or_its_last_epoch_alone(tmp_path: Path) -> None:
    gone, there = (job(tmp_path / name, "x", (1000, 200)) for name in "ab")
    gone.failure = "diverged"
    assert read_queue_status([gone, there], []).left == 1200, "it failed before there was one"
    (gone.folder / "metrics.jsonl").write_text(json.dumps(line(1, 1)) + "\n")
    assert read_queue_status([gone, there], []).left == 200, "it failed after"
    (gone.folder / "metrics.jsonl").unlink()
    gone.failure, gone.result = None, {}
    assert read_queue_status([gone, there], []).left == 200, "it is done"


def test_whoever_has_no_speed_yet_is_as_fast_as_the_others(tmp_path: Path) -> None:
    a = job(tmp_path / "a", "", (1000,), line(0, 1, 100.0))
    b = job(tmp_path / "b", "", (1000,), line(0, 1, 40.0))
    c, d = job(tmp_path / "c"), job(tmp_path / "d")
    nothing = job(tmp_path / "e", "", (0, 0))  # it trains on nothing, and never will have an epoch
    assert read_queue_status([a, b, c, d], [a, b, c]).speed == 210
    assert read_queue_status([a, b, c, d], [a, b, c, d]).speed == 280
    assert read_queue_status([a, b, c, d, nothing], [a, b, nothing]).speed == 140
    assert read_queue_status([a, b, c, d], [c, d]).speed == 0


@pytest.mark.parametrize(
    "text, found",
    [
        ("", None),
        (json.dumps(line(0, 1)), None),  # not whole: it is being written
        (json.dumps(line(0, 1)) + "\n", line(0, 1)),
        (json.dumps(line(0, 1)) + "\n" + json.dumps(line(0, 2)) + "\n" + json.dumps(line(0, 3))[:-1], line(0, 2)),
        ("".join(json.dumps(line(1, i)) + "\n" for i in range(500)), line(1, 499)),
        ("{\n", None),
    ],
)
def test_the_last_whole_line_is_the_last_epoch(text: str, found: Any, tmp_path: Path) -> None:
    assert read_last_epoch(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_last_epoch(tmp_path) == found


@pytest.mark.parametrize(
    "now, words",
    [
        (QueueStatus(1, 0, 2, 3, 0.0, 0.0), "1 of 6 done, 2 running, 3 waiting"),
        (QueueStatus(1, 4, 2, 0, 500.0, 0.0), "1 of 7 done, 2 running, 4 failed"),
        (QueueStatus(0, 1, 2, 3, 9000.0, 100.0), "0 of 6 done, 2 running, 3 waiting, 1 failed, 1 min 30 s left"),
        (QueueStatus(3, 0, 0, 0, 0.0, 100.0), "3 of 3 done, 0 running"),
    ],
)
def test_it_is_said_in_one_line(now: QueueStatus, words: str) -> None:
    assert describe_queue(now) == words


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes only when it is told to."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr("equipoise.runs.progress.time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_without_a_terminal_lines_are_printed_beside_the_output(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = jobs = [job(tmp_path / name, "x", (1000, 200)) for name in "ab"]
    output = io.StringIO()

    def said(watch: QueueWatch, after: float, *busy: Job) -> str:
        clock.now += after
        watch.tell(busy)
        out, err = capsys.readouterr()
        assert out == output.getvalue() == ""
        return err

    with QueueWatch(Console(file=output), jobs) as watch:
        assert said(watch, 0) == "0 of 2 done, 0 running, 2 waiting\n"
        assert said(watch, 0, a) == "0 of 2 done, 1 running, 1 waiting\n", "a change is said at once"
        assert said(watch, 1, a) == said(watch, 50, a) == said(watch, 8, a) == ""
        assert said(watch, 3, a) == "0 of 2 done, 1 running, 1 waiting\n", "a minute has passed"
        (a.folder / "metrics.jsonl").write_text(json.dumps(line(0, 2, 10.0)) + "\n")
        assert said(watch, 1, a) == "", "files are not read all the time"
        assert said(watch, 2, a) == "0 of 2 done, 1 running, 1 waiting, 2 min 00 s left\n", "the time left is known"
        (a.folder / "metrics.jsonl").write_text(json.dumps(line(0, 4, 10.0)) + "\n")
        assert said(watch, 59, a) == ""
        assert said(watch, 2, a) == "0 of 2 done, 1 running, 1 waiting, 1 min 40 s left\n"
        a.result = {}
        assert said(watch, 0, b) == "1 of 2 done, 1 running\n"
        b.failure = "no"
        assert said(watch, 0) == "1 of 2 done, 0 running, 1 failed\n"
    jobs = [job(tmp_path / name, "x", (900,), line(0, epoch, 10.0)) for name, epoch in (("c", 0), ("d", 10))]
    with QueueWatch(Console(file=output), jobs) as watch:
        assert said(watch, 0, jobs[0]) == "0 of 2 done, 1 running, 1 waiting\n", "its base step is there already"
    with QueueWatch(Console(file=output), jobs, shared=False) as watch:
        told = "0 of 2 done, 1 running, 1 waiting, 1 min 30 s left\n"
        assert said(watch, 0, jobs[0]) == told, "but not for those who share nothing"


def test_in_a_terminal_a_bar_says_all_and_nothing_else(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = jobs = [job(tmp_path / name, "", (1000, 200)) for name in "ab"]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)

    def shown() -> str:
        """What the bar is now, without the line that it is drawn of."""
        watch.bar.refresh()
        return screen.getvalue().rsplit("\r", 1)[-1].rsplit("\x1b[2K", 1)[-1].strip("━╸╺ \n")

    with QueueWatch(console, jobs) as watch:
        watch.tell([a])
        assert shown() == "0 of 2 done, 1 running, 1 waiting"
        (a.folder / "metrics.jsonl").write_text(json.dumps(line(0, 5, 100.0)) + "\n")
        clock.now += 1
        watch.tell([a])
        assert shown() == "0 of 2 done, 1 running, 1 waiting", "files are not read all the time"
        clock.now += 1
        watch.tell([a])
        assert shown() == "0 of 2 done, 1 running, 1 waiting, 19 s left"
        a.result, b.failure = {}, "no"
        watch.tell([])
        assert shown() == "1 of 2 done, 0 running, 1 failed"
        (task,) = watch.bar.tasks
        assert (task.completed, task.total) == (2, 2)
    assert capsys.readouterr() == ("", "")


def test_what_takes_longest_is_begun_first() -> None:
    def made(method: Any, *images: int) -> Job:
        return Job(Run(method, Data("digits")), Machine("cpu"), Path("nowhere"), "", list(images))

    plain, lucir = made(ILBaseline(), 500, 1000), made(LUCIR(), 500, 1000)
    podnet, meta = made(PODNet(), 500, 1000), made(ILBaseline(Meta()), 500, 1000)
    assert [round(estimate_cost(one)) for one in (plain, lucir, meta, podnet)] == [1500, 1608, 1727, 1768]
    assert round(estimate_cost(made(LUCIR(Meta()), 500, 1000))) == 1859, "both"
    assert estimate_cost(made(PODNet(), 500)) == 500 and estimate_cost(made(PODNet())) == 0, (
        "no base step has a teacher"
    )
    longer, shorter = made(ILBaseline(), 500, 1269), made(ILBaseline(), 500, 1268)  # just more and less than PODNet
    same = made(ILBaseline(), 1000, 500)
    jobs = [plain, same, shorter, lucir, podnet, meta, longer]
    order = [longer, podnet, shorter, meta, lucir, plain, same]
    assert [id(one) for one in sort_longest_first(jobs)] == [id(one) for one in order]
    assert jobs[0] is plain, "the list itself is left alone"


# The line of a learner

RECIPE = Recipe(epochs=4, lr=0.05, batch=64)
TRAIN = datasets.load("digits").train


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def learn(*classes: int, learner: Learner | None = None, **settings: Any) -> Learner:
    learner = learner or Learner(ILBaseline(BalancedFinetuning(Finetune(3))), 5, recipe=RECIPE, device="cpu")
    where = TRAIN.find_positions(classes[0], classes[-1] + 1)
    return learner.learn(TRAIN.x[where], TRAIN.y[where], **settings)


def plain(text: str) -> list[str]:
    """The lines that a terminal showed, one after the other, without its commands."""
    lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")
    return [line for line, after in zip(lines, [*lines[1:], ""]) if line and line != after]


TIME = r"[\d.]+ s"


def test_nothing_is_shown_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    learn(5, 6, learner=learn(0, 1))
    assert capfd.readouterr() == ("", "")


def test_two_lines_are_printed_elsewhere_if_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    learn(2, 3, 4, learner=learn(0, 1), verbose=True)
    out, err = capfd.readouterr()
    announced, done = err.splitlines()
    work = r"step 1: 3 classes, 430 images, 7 epochs"
    assert out == "" and re.fullmatch(rf"{work}, about {TIME} on cpu", announced), announced
    assert re.fullmatch(rf"{work} in {TIME} on cpu", done), done


def test_a_terminal_has_one_line_that_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "EVERY", 0)
    monkeypatch.setattr("sys.stderr", terminal)
    learn(2, 3, 4, learner=learn(0, 1, verbose=False), callback=lambda now: print("hello"))
    shown = plain(terminal.getvalue())
    assert shown[0] == "step 1: 3 classes, 430 images, 7 epochs"
    assert re.fullmatch(rf"step 1: 3 classes, 430 images, 7 epochs in {TIME} on cpu", shown[-1])
    moves = [re.fullmatch(rf"step 1, epoch (\d)/7: {TIME} left of {TIME} on cpu \(3 classes.*", x) for x in shown[1:-1]]
    epochs = [int(found[1]) for found in moves if found]
    assert len(epochs) == len(moves) > 5 and epochs == sorted(epochs) and set(epochs) == set(range(2, 8))
    assert terminal.getvalue().count("\n") == 1, "else it would be several lines"
    assert capsys.readouterr().out == "hello\n" * 7, "what is printed goes where it would go anyway"
    before = terminal.getvalue()
    learn(5, 6, learner=learn(0, 1, verbose=False), verbose=False)
    assert terminal.getvalue() == before


def test_what_is_done_already_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def stop(now: Learner) -> None:
        if now.stage_ == "refit":
            now.save(tmp_path / "model")
            raise KeyError

    with pytest.raises(KeyError):
        learn(2, 3, learner=learn(0, 1), callback=stop, verbose=True)
    assert re.search(rf"\nstep 1: stopped after {TIME}, in epoch 6/7\n$", capfd.readouterr().err)
    learn(2, 3, learner=Learner.load(tmp_path / "model"), verbose=True)
    assert re.search(r"step 1: 2 classes, 290 images, the last 2 of 7 epochs in", capfd.readouterr().err)


def test_the_time_left_goes_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: 2 s for each image of an epoch's, after a first batch that took an hour."""
    clock, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stages = (
        Stage("train", replace(RECIPE, epochs=4)),
        CHOOSE,
        Stage("refit", replace(RECIPE, epochs=3), images="memory"),
    )
    plan = Plan(1, (2, 3), (1, 8, 8), (5, 5, 140, 140, 140), 5, 5)
    live: Any = SimpleNamespace(stages=stages, at=Position(0, 0))
    on = SimpleNamespace(x=torch.zeros(1))
    before: Any = SimpleNamespace(plan=plan, method=ILBaseline(), images=on)
    with progress.Progress(before, live, True) as line:
        monkeypatch.setattr(line, "say", lines.append)
        tell = line.watch(Callbacks())
        clock[0] = 3600.0
        tell.batch(0.5)
        assert line.left is None
        clock[0] += 430.0
        tell.batch(1.0)
        assert line.left == 2 * (3 * 430 + 3 * 25) and line.describe_position(1.0, clock[0]) == (
            "step 1, epoch 2/7: 45 min 30 s left of 1 h 52 min on cpu (3 classes, 430 images)"
        )
        live.at = Position(2, 0)
        clock[0] += 2 * 3 * 430
        tell.epoch(Epoch(1, "refit", 1, 3, 0.5, 0.1, None, 1.0, 1.0))
        assert line.left == 2 * 2 * 25 * (3 * 430 + 215) / (3 * 430 + 215 + 25)
        assert line.describe_position(1.0, clock[0]).startswith("step 1, epoch 6/7: ")
    assert len(lines) == 2 and lines[0] == "step 1: 3 classes, 430 images, 7 epochs, about 1 h 52 min on cpu"


def test_a_gpu_is_measured_at_the_end_of_an_epoch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    plan = Plan(0, (2,), (1, 8, 8), (100, 100))
    live: Any = SimpleNamespace(stages=(Stage("train", RECIPE),), at=Position(0, 0))
    before: Any = SimpleNamespace(plan=plan, method=ILBaseline(), images=SimpleNamespace(x=torch.zeros(1)))
    line = progress.Progress(before, live, True)
    line.device = "cuda"
    for clock[0], epochs in ((1.0, 0.25), (3.0, 0.5), (9.0, 1.0)):
        line.move(epochs)
        assert line.left is None
    line.move(1, ended=True)
    assert line.left == pytest.approx(3 * 200 * 8 / 150)


def test_a_run_is_shown_by_its_watch_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run(Run(ILBaseline(), Data("digits"), Protocol(base=8, steps=1), RECIPE), tmp_path / "run", Machine("cpu"))
    assert terminal.getvalue() == ""


class Gone(Terminal):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("verbose", [None, True])
@pytest.mark.parametrize("stream", ["none", "closed", "gone"])
def test_training_goes_on_where_nothing_can_be_shown(
    stream: str, verbose: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (closed := io.StringIO()).close()
    monkeypatch.setattr(progress, "EVERY", 0)
    monkeypatch.setattr("sys.stderr", {"none": None, "closed": closed, "gone": Gone()}[stream])
    assert learn(0, 1, verbose=verbose).classes_ == [0, 1]


def test_verbose_is_yes_or_no_or_where_there_is_a_terminal() -> None:
    with pytest.raises(UsageError, match="verbose must be None, True or False, not 'loud'"):
        learn(0, 1, verbose="loud")
    with pytest.raises(UsageError, match="verbose must be None, True or False, not array"):
        learn(0, 1, verbose=np.array([1, 2]))
