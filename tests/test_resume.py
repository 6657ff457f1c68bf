"""A run that is killed at any moment and started again ends as if nothing had happened, to the last bit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from attempts import NEVER, Moment, attempt
from forks import FORKS, ForkedProcess
from squares import digits_of
from torch import Tensor

import equipoise
from equipoise import (
    LUCIR,
    Balanced,
    BalancedFinetuning,
    DataError,
    Finetune,
    ILBaseline,
    Learner,
    Meta,
    Method,
    PODNet,
    Recipe,
)
from equipoise.runs.progress import Watch
from equipoise.runs.record import read_result
from equipoise.runs.run import run as run_on
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run

SECONDS = {f"{what}seconds" for what in ("", "training_", "preparing_", "refitting_", "evaluating_", "saving_")}
TIMES = SECONDS | {"images_per_second"}
EPOCHS = 4
CPU = Machine("cpu", "fp32")
EACH = 30
"""digits of each class to train on"""

FINETUNE = Finetune(3, 0.05, batch=32)
METHODS: dict[str, Method] = {
    "balanced": ILBaseline(Balanced()),
    "meta": ILBaseline(Meta(every=5)),
    "podnet": PODNet(finetune=Finetune(3, 0.05, batch=32, clamp=5.0, milestones=(), batch_norm="train")),
    "lucir": LUCIR(finetune=Finetune(3, 0.05, batch=16, what="all")),
    "balanced-finetuning": ILBaseline(BalancedFinetuning(FINETUNE)),
}
REFITS = ("podnet", "lucir", "balanced-finetuning")
"""those with a second stage"""


def long(method: Method) -> Run:
    """3 steps of 4 epochs."""
    recipe = Recipe(epochs=EPOCHS, lr=0.05, batch=64)
    return Run(method, Data("digits"), Protocol(4, 2, memory="5"), recipe)


def short(method: Method | None = None, seed: int = 0) -> Run:
    """2 steps of 2 epochs."""
    protocol = Protocol(8, 1, memory="2", select="random")
    return Run(method or ILBaseline(Balanced()), Data("digits"), protocol, Recipe(2, 0.05, batch=512), seed)


SHORT: dict[str, Run] = {
    "short": short(),
    "short-refit": short(ILBaseline(BalancedFinetuning(Finetune(2, 0.05, batch=32, distil=False)))),
}


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    with digits_of(EACH):
        yield


def run(one: Run, out: Path, every: float = 30.0, store: Path | None = None, watch: Watch | None = None) -> Any:
    return run_on(one, out, CPU, Options(store=store, checkpoint=every), watch)


# From the interpreter's start to its end, with nothing from another process.
ALONE = f"""
import os, sys
import torch
from pathlib import PosixPath
from attempts import attempt
from attempts import NEVER, Moment, attempt
from forks import FORKS, ForkedProcess
from squares import digits_of
from equipoise import *
from equipoise.runs.settings import Data, Protocol, Run

torch.set_num_threads(1)
os.fsync = lambda fd: None  # as in conftest.py
with digits_of({EACH}):
    attempt(*eval(sys.argv[1]))
"""


def attempt_alone(*arguments: Any) -> int:
    """An attempt by an interpreter of its own; minus the signal that killed it, or its exit code."""
    here = [Path(equipoise.__file__).parents[1], Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, here)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", ALONE, repr(arguments)], env=environment).returncode


def start(
    settings: Run, out: Path, store: Path | None = None, every: float = 0.0, fatal: int = 0, at: Moment = NEVER
) -> ForkedProcess:
    """Begin an attempt."""
    process = FORKS.Process(target=attempt, args=(settings, out, store, every, fatal, at))
    process.start()
    return process


def end(process: ForkedProcess) -> int:
    """Wait for it to end; minus the signal that killed it, or its exit code."""
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), "an attempt failed: its error is on stderr"
    return process.exitcode


# What must be the same


def tensors(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def outcome(folder: Path) -> tuple[Any, list[Any]]:
    result = {k: v for k, v in read_result(folder).items() if k not in ("versions", "machine", "reused")}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return timeless(result), [timeless(json.loads(line)) for line in lines]


def assert_same(folder: Path, straight: Path) -> None:
    a, b = tensors(folder / "model"), tensors(straight / "model")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert outcome(folder) == outcome(straight)
    assert not (folder / "checkpoint").exists()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs that nothing happened to, without checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    runs = {**{name: long(method) for name, method in METHODS.items()}, **SHORT}
    for name, one in runs.items():
        run(one, folder / name, every=1e9)
    return {name: folder / name for name in runs}


# Killed from outside


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_random(pid: int, log: Path, rng: random.Random) -> None:
    """SIGKILL after one to four more epochs and a little while; of a process that may have ended by then."""
    goal, deadline = lines(log) + rng.randint(1, 4), time.monotonic() + 60
    while lines(log) < goal and time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.001)
    time.sleep(rng.choice([0, 0, rng.uniform(0, 0.05)]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check_log(log: Path, straight: Path, kills: int, lost: int = 2) -> None:
    """Not many epochs were trained twice: a kill costs the one under way and one that was not yet saved."""
    epochs = lines(straight / "metrics.jsonl")
    assert lines(log) <= epochs + lost * kills, f"{kills} kills made it train {lines(log)} epochs"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("name", "with_store"),
    [*((name, False) for name in METHODS), ("balanced-finetuning", True)],
    ids=lambda value: value if isinstance(value, str) else "with a store" if value else "alone",
)
def test_killed_at_random_moments(name: str, with_store: bool, straight: dict[str, Path], tmp_path: Path) -> None:
    """Four times at most; `make kills` kills 200 times."""
    rng = random.Random(f"{name} {with_store}")
    for again in range(5):  # on a busy machine it may be done before it is killed, which says nothing
        out, log = tmp_path / f"run-{again}", tmp_path / f"run-{again}.log"
        store = tmp_path / f"store-{again}" if with_store else None
        kills, done = 0, False
        while not done:
            process = start(long(METHODS[name]), out, store)
            if kills < 4:
                assert process.pid is not None
                kill_at_random(process.pid, log, rng)
            done = end(process) == 0
            kills += not done
        check_log(log, straight[name], kills)
        assert_same(out, straight[name])
        if kills:
            return
    pytest.fail("it was never killed")


def test_killed_with_the_interpreter(straight: dict[str, Path], tmp_path: Path) -> None:
    """Nothing is shared by the attempts but the folder; the first one ends itself at its tenth renaming."""
    out, log = tmp_path / "run", tmp_path / "run.log"
    settings = long(METHODS["balanced"])
    assert attempt_alone(settings, out, None, 0.0, 10, NEVER) == -signal.SIGKILL
    assert 3 <= lines(log) < 3 * EPOCHS
    assert attempt_alone(settings, out, None, 0.0, 0, NEVER) == 0
    check_log(log, straight["balanced"], 1)
    assert_same(out, straight["balanced"])


# Killed by itself, in every stage


MOMENTS = {
    "in the base step": (0, "train", 2),
    "at the end of the base step": (0, "train", EPOCHS),
    "before the first choice": (0, "before the choice", 0),
    "after the first choice": (0, "after the choice", 0),
    "in training": (1, "train", 1),
    "at the end of training": (1, "train", EPOCHS),
    "before the choice": (1, "before the choice", 0),
    "after the choice": (1, "after the choice", 0),
    "in fine-tuning": (1, "refit", 1),
    "at the end of fine-tuning": (2, "refit", 3),
}


# What a method has to save does not depend on a store: one method goes through all four.
HOW = {"every epoch is saved": (0.0, False), "ends of stages are saved, with a store": (1e9, True)}
MORE = {"every epoch is saved, with a store": (0.0, True), "ends of stages are saved": (1e9, False)}


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, how) for name in METHODS for how in HOW), *(("balanced-finetuning", how) for how in MORE)],
)
def test_killed_in_every_stage(name: str, how: str, straight: dict[str, Path], tmp_path: Path) -> None:
    """One run that is killed at all of these moments, one after the other."""
    every, with_store = (HOW | MORE)[how]
    out, log, store = tmp_path / "run", tmp_path / "run.log", tmp_path / "store" if with_store else None
    moments = [at for at in MOMENTS.values() if at[1] != "refit" or name in REFITS]
    for at in moments:
        assert end(start(long(METHODS[name]), out, store, every, at=at)) == -signal.SIGKILL, at
        assert not (out / "result.json").exists()
    if name in REFITS and every == 0:
        info = json.loads((out / "checkpoint" / "learner.json").read_text())
        assert (info["live"]["stage"], info["live"]["epoch"]) == (2, 3)
    assert end(start(long(METHODS[name]), out, store, every)) == 0
    assert_same(out, straight[name])
    if every == 0:
        check_log(log, straight[name], 0)  # each epoch was saved before the kill, and none was trained twice


def test_an_alpha_that_was_learned_is_compared(straight: dict[str, Path]) -> None:
    """Of what must be the same, to see that there is something to compare."""
    assert read_result(straight["meta"])["alpha"][1:] != [1.0, 1.0]
    for name in REFITS:
        stages = [json.loads(line)["stage"] for line in (straight[name] / "metrics.jsonl").read_text().splitlines()]
        assert stages == ["train"] * EPOCHS + 2 * (["train"] * EPOCHS + ["refit"] * 3)


# Killed by itself, at every moment at which a file gets its name


@pytest.mark.parametrize(
    ("name", "with_store"), [("short", False), ("short", True), ("short-refit", False)], ids=["alone", "store", "refit"]
)
def test_killed_at_every_renaming(name: str, with_store: bool, straight: dict[str, Path], tmp_path: Path) -> None:
    """Before the n-th file of a run is renamed, for every n: there is no bad moment."""
    n = 0
    while True:
        n += 1
        out, store = tmp_path / f"run-{n}", tmp_path / f"store-{n}" if with_store else None
        killed = end(start(SHORT[name], out, store, fatal=n)) != 0
        if killed:
            assert not (out / "result.json").exists()
            assert end(start(SHORT[name], out, store)) == 0
        assert_same(out, straight[name])
        if not killed:
            break
    # The manifest, run.json, metrics.jsonl, the two files of a checkpoint after each epoch and between the steps and of
    # the model, result.json; in the store the two files of each step, and one to see whether it can be written to.
    epochs = {"short": 4, "short-refit": 6}[name]
    assert n - 1 == 3 + 2 * (epochs + 1) + 2 + 1 + 5 * with_store


def test_killed_while_saving_the_first_checkpoint(straight: dict[str, Path], tmp_path: Path) -> None:
    """Its folder is there by then, but what is in it is not a checkpoint."""
    out = tmp_path / "run"
    for fatal in (4, 4, 3):  # the manifest is there from the first attempt on
        assert end(start(short(), out, fatal=fatal)) == -signal.SIGKILL
        assert (out / "checkpoint").is_dir() and not (out / "checkpoint" / "learner.json").exists()
    assert end(start(short(), out)) == 0
    assert_same(out, straight["short"])


# Interrupted in this process


class StopAt(Watch):
    def __init__(self, step: int, epoch: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error = (step, epoch), error
        self.seen: list[tuple[int, int]] = []

    def end_epoch(self, e: Any) -> None:
        self.seen.append((e.step, e.epoch))
        if self.seen[-1] == self.at:
            raise self.error


@pytest.mark.parametrize("name", ["balanced", "meta"])
def test_interrupted_and_run_again(name: str, straight: dict[str, Path], tmp_path: Path) -> None:
    expected = [(t, e) for t in range(3) for e in range(1, EPOCHS + 1)]

    def check(seen: list[tuple[int, int]], begin: int, end: int) -> None:
        """It went on with the epoch at which it had been interrupted, or with the next one."""
        assert seen in (expected[begin:end], expected[begin + 1 : end] if begin else None)

    begin = 0
    for at in ((0, 2), (1, 1), (1, 3), (2, 4)):
        watch = StopAt(*at)
        with pytest.raises(KeyboardInterrupt):
            run(long(METHODS[name]), tmp_path, watch=watch, every=0)
        check(watch.seen, begin, expected.index(at) + 1)
        begin = expected.index(at)
        assert not (tmp_path / "result.json").exists()
    watch = StopAt(-1, -1)
    run(long(METHODS[name]), tmp_path, watch=watch, every=0)
    check(watch.seen, begin, len(expected))
    assert_same(tmp_path, straight[name])


def test_without_checkpoints_in_a_step_only_whole_steps_are_kept(straight: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(long(METHODS["balanced"]), tmp_path, watch=StopAt(2, 3), every=1e9)
    watch = StopAt(-1, -1)
    run(long(METHODS["balanced"]), tmp_path, watch=watch, every=1e9)
    assert watch.seen == [(2, e) for e in range(1, EPOCHS + 1)]
    assert_same(tmp_path, straight["balanced"])


def test_alpha_is_part_of_the_checkpoint(straight: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(long(METHODS["meta"]), tmp_path, watch=StopAt(1, 3), every=0)
    saved = tensors(tmp_path / "checkpoint")["live.extra.alpha"]
    epoch = json.loads((tmp_path / "checkpoint" / "learner.json").read_text())["live"]["epoch"]
    line = json.loads((straight["meta"] / "metrics.jsonl").read_text().splitlines()[EPOCHS + epoch - 1])
    assert (line["step"], line["epoch"]) == (1, epoch) and epoch in (2, 3)
    assert saved.item() == pytest.approx(line["alpha"], abs=1e-6) and saved.item() != 1


def test_other_settings_do_not_take_over_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(short(), tmp_path, watch=StopAt(1, 2), every=0)
    with pytest.raises(equipoise.RunError, match="seed"):
        run(short(seed=1), tmp_path)
    assert Learner.load(tmp_path / "checkpoint").unfinished_


def test_a_store_that_fills_up_meanwhile_is_used(straight: dict[str, Path], tmp_path: Path) -> None:
    """Interrupted in step 1; by the time it goes on, another run has put steps 1 and 2 into the store."""
    store = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        run(long(METHODS["balanced"]), tmp_path / "one", watch=StopAt(1, 3), every=1e9)
    run(long(METHODS["balanced"]), tmp_path / "two", store=store)
    watch = StopAt(-1, -1)
    result = run(long(METHODS["balanced"]), tmp_path / "one", store=store, watch=watch)
    assert watch.seen == [] and result["reused"]["steps"] == [0, 1, 2]
    assert_same(tmp_path / "one", straight["balanced"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "no tensors", "broken json", "no learner"])
def test_a_corrupt_checkpoint_is_named(damage: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(short(), tmp_path, watch=StopAt(1, 2), every=0)
    folder = tmp_path / "checkpoint"
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-1] ^= 128
        file.write_bytes(data)
    elif damage == "truncated":
        file.write_bytes(data[:1000])
    elif damage == "no tensors":
        file.unlink()
    else:
        (folder / "learner.json").write_text("{" if damage == "broken json" else "{}")
    with pytest.raises(DataError, match=str(folder)):
        run(short(), tmp_path)
    assert folder.is_dir() and not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_a_full_disk_at_a_checkpoint(when: int, straight: dict[str, Path], tmp_path: Path) -> None:
    """The run stops; when there is room again, it goes on. 1 and 2: the first checkpoint's two files."""
    true, calls = os.fsync, []

    def full(fd: int) -> None:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        if "/checkpoint/" in name:
            calls.append(name)
            if len(calls) == when:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            run(short(), tmp_path, every=0)
    run(short(), tmp_path, every=0)
    assert_same(tmp_path, straight["short"])
