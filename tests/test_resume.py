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
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import equipoise
from equipoise import Balanced, DataError, ILBaseline, Learner, Meta, Recipe
from equipoise.losses import Loss
from equipoise.runs.folder import read_result
from equipoise.runs.progress import Watch
from equipoise.runs.run import Run, run
from equipoise.runs.shared_steps import Store

SECONDS = {f"{what}seconds" for what in ("", "training_", "preparing_", "evaluating_", "saving_")}
TIMES = SECONDS | {"images_per_second"}
EPOCHS = 4


def long(loss: Loss) -> Run:
    """3 steps of 4 epochs."""
    recipe = Recipe(epochs=EPOCHS, lr=0.05, batch=32)
    protocol: dict[str, Any] = {"dataset": "digits", "base": 4, "steps": 2, "memory": "5", "recipe": recipe}
    return Run(ILBaseline(loss=loss), **protocol, device="cpu", precision="fp32")


def short() -> Run:
    """2 steps of 2 epochs."""
    protocol: dict[str, Any] = {"dataset": "digits", "base": 8, "steps": 1, "memory": "2", "select": "random"}
    return Run(
        ILBaseline(loss=Balanced()), **protocol, recipe=Recipe(2, 0.05, batch=128), device="cpu", precision="fp32"
    )


# The text of what runs in processes of its own. Each does one attempt and notes the epochs that it trains; `fatal`
# is the number of the renaming of a file at which it kills itself, just before it.
ATTEMPT = """
import os, signal, sys
from pathlib import Path
import torch
from equipoise import Balanced, ILBaseline, Meta, Recipe
from equipoise.data import datasets
from equipoise.runs.progress import Watch
from equipoise.runs.run import Run, run
from equipoise.runs.shared_steps import Store

torch.set_num_threads(1)

class Log(Watch):
    def __init__(self, path):
        self.path = path
    def epoch(self, e):
        with open(self.path, "a") as f:
            print(os.getpid(), e.step, e.epoch, file=f)

def attempt(settings, out, store, every, fatal):
    true, calls = os.replace, []
    def replace(*args, **more):
        calls.append(args)
        if len(calls) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return true(*args, **more)
    os.replace = replace
    log = Log(Path(out).with_suffix(".log"))
    run(settings, out, store=Store(Path(store)) if store else None, watch=log, checkpoint_every=every)
"""

# One attempt in one process, from the interpreter's start to its end.
ONE = (
    ATTEMPT
    + """
attempt(eval(sys.argv[1]), *eval(sys.argv[2]))
"""
)

# Many attempts, each a process of its own, forked from one that has only imported what takes long to import.
MANY = (
    ATTEMPT
    + """
datasets.load("digits")
for line in sys.stdin:
    settings, arguments = eval(line)
    pid = os.fork()
    if pid == 0:
        try:
            attempt(settings, *arguments)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
)


def python(script: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    here = str(Path(equipoise.__file__).parents[1])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, text=True, **more)


class Zygote:
    """Starts attempts, one at a time."""

    def __init__(self) -> None:
        self.process = python(MANY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, settings: Run, out: Path, store: Path | None = None, every: float = 0.0, fatal: int = 0) -> int:
        """Begin an attempt; its process id."""
        assert self.process.stdin and self.process.stdout
        print(f"({settings!r}, {(str(out), str(store or ''), every, fatal)!r})", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """Wait for it to end; minus the signal that killed it, or its exit code."""
        assert self.process.stdout
        code = int(self.process.stdout.readline())
        assert code in (0, -signal.SIGKILL), "an attempt failed: its error is on stderr"
        return code


@pytest.fixture(scope="module")
def zygote() -> Any:
    one = Zygote()
    yield one
    one.process.communicate()
    assert one.process.returncode == 0


# What must be the same


def tensors(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def outcome(folder: Path) -> tuple[Any, list[Any]]:
    result = {k: v for k, v in read_result(folder).items() if k not in ("versions", "hardware", "reused")}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return timeless(result), [timeless(json.loads(line)) for line in lines]


def assert_same(folder: Path, straight: Path) -> None:
    a, b = tensors(folder / "model"), tensors(straight / "model")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert outcome(folder) == outcome(straight)
    assert not (folder / "checkpoint").exists()


LOSSES: dict[str, Loss] = {"balanced": Balanced(), "meta": Meta(every=5)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs that nothing happened to, without checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    for name, loss in LOSSES.items():
        run(long(loss), folder / name, checkpoint_every=1e9)
    run(short(), folder / "short", checkpoint_every=1e9)
    return {name: folder / name for name in (*LOSSES, "short")}


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


def check_log(log: Path, kills: int, lost: int = 2) -> None:
    """Not many epochs were trained twice: a kill costs the one under way and one that was not yet saved."""
    assert lines(log) <= 3 * EPOCHS + lost * kills, f"{kills} kills made it train {lines(log)} epochs"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_store", [False, True], ids=["alone", "with a store"])
@pytest.mark.parametrize("loss", LOSSES)
def test_killed_at_random_moments(
    loss: str, with_store: bool, seed: int, zygote: Zygote, straight: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(f"{loss} {with_store} {seed}")
    for again in range(5):  # on a busy machine it may be done before it is killed, which says nothing
        out, log = tmp_path / f"run-{again}", tmp_path / f"run-{again}.log"
        store = tmp_path / f"store-{again}" if with_store else None
        kills, done = 0, False
        while not done:
            pid = zygote.start(long(LOSSES[loss]), out, store)
            if kills < 4:
                kill_at_random(pid, log, rng)
            done = zygote.end() == 0
            kills += not done
        check_log(log, kills)
        assert_same(out, straight[loss])
        if kills:
            return
    pytest.fail("it was never killed")


def test_killed_with_the_interpreter(straight: dict[str, Path], tmp_path: Path) -> None:
    """Nothing is shared by the attempts but the folder; the first one ends itself at its tenth renaming."""
    out, log = tmp_path / "run", tmp_path / "run.log"
    assert python(ONE, repr(long(Balanced())), repr((str(out), "", 0.0, 10))).wait() == -signal.SIGKILL
    assert 3 <= lines(log) < 3 * EPOCHS
    assert python(ONE, repr(long(Balanced())), repr((str(out), "", 0.0, 0))).wait() == 0
    check_log(log, 1)
    assert_same(out, straight["balanced"])


# Killed by itself, at every moment at which a file gets its name


@pytest.mark.parametrize("with_store", [False, True], ids=["alone", "with a store"])
def test_killed_at_every_renaming(with_store: bool, zygote: Zygote, straight: dict[str, Path], tmp_path: Path) -> None:
    """Before the n-th file of a run is renamed, for every n: there is no bad moment."""
    n = 0
    while True:
        n += 1
        out, store = tmp_path / f"run-{n}", tmp_path / f"store-{n}" if with_store else None
        zygote.start(short(), out, store, fatal=n)
        killed = zygote.end() != 0
        if killed:
            assert not (out / "result.json").exists()
            zygote.start(short(), out, store)
            assert zygote.end() == 0
        assert_same(out, straight["short"])
        if not killed:
            break
    # The manifest, run.json, metrics.jsonl, a checkpoint in each step and one between them, the model, result.json
    assert n - 1 >= 12 + 4 * with_store


def test_killed_while_saving_the_first_checkpoint(zygote: Zygote, straight: dict[str, Path], tmp_path: Path) -> None:
    """Its folder is there by then, but what is in it is not a checkpoint."""
    out = tmp_path / "run"
    for fatal in (4, 4, 3):  # the manifest is written the first time only
        zygote.start(short(), out, fatal=fatal)
        assert zygote.end() == -signal.SIGKILL
        assert (out / "checkpoint").is_dir() and not (out / "checkpoint" / "learner.json").exists()
    zygote.start(short(), out)
    assert zygote.end() == 0
    assert_same(out, straight["short"])


# Interrupted in this process


class StopAt(Watch):
    def __init__(self, step: int, epoch: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error = (step, epoch), error
        self.seen: list[tuple[int, int]] = []

    def epoch(self, e: Any) -> None:
        self.seen.append((e.step, e.epoch))
        if self.seen[-1] == self.at:
            raise self.error


NEVER = (-1, -1)


@pytest.mark.parametrize("loss", LOSSES)
def test_interrupted_and_run_again(loss: str, straight: dict[str, Path], tmp_path: Path) -> None:
    expected = [(t, e) for t in range(3) for e in range(1, EPOCHS + 1)]

    def check(seen: list[tuple[int, int]], begin: int, end: int) -> None:
        """It went on with the epoch at which it had been interrupted, or with the next one."""
        assert seen in (expected[begin:end], expected[begin + 1 : end] if begin else None)

    begin = 0
    for at in ((0, 2), (1, 1), (1, 3), (2, 4)):
        watch = StopAt(*at)
        with pytest.raises(KeyboardInterrupt):
            run(long(LOSSES[loss]), tmp_path, watch=watch, checkpoint_every=0)
        check(watch.seen, begin, expected.index(at) + 1)
        begin = expected.index(at)
        assert not (tmp_path / "result.json").exists()
    watch = StopAt(*NEVER)
    run(long(LOSSES[loss]), tmp_path, watch=watch, checkpoint_every=0)
    check(watch.seen, begin, len(expected))
    assert_same(tmp_path, straight[loss])


def test_without_checkpoints_in_a_step_only_whole_steps_are_kept(straight: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(long(Balanced()), tmp_path, watch=StopAt(2, 3), checkpoint_every=1e9)
    watch = StopAt(*NEVER)
    run(long(Balanced()), tmp_path, watch=watch, checkpoint_every=1e9)
    assert watch.seen == [(2, e) for e in range(1, EPOCHS + 1)]
    assert_same(tmp_path, straight["balanced"])


def test_alpha_is_part_of_the_checkpoint(straight: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(long(LOSSES["meta"]), tmp_path, watch=StopAt(1, 3), checkpoint_every=0)
    saved = tensors(tmp_path / "checkpoint")["live.extra.alpha"]
    epoch = json.loads((tmp_path / "checkpoint" / "learner.json").read_text())["live"]["epoch"]
    line = json.loads((straight["meta"] / "metrics.jsonl").read_text().splitlines()[EPOCHS + epoch - 1])
    assert (line["step"], line["epoch"]) == (1, epoch) and epoch in (2, 3)
    assert saved.item() == pytest.approx(line["alpha"], abs=1e-6) and saved.item() != 1


def test_other_settings_do_not_take_over_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(short(), tmp_path, watch=StopAt(1, 2), checkpoint_every=0)
    other = Run(**{**vars(short()), "seed": 1})
    with pytest.raises(equipoise.RunError, match="seed"):
        run(other, tmp_path)
    assert Learner.load(tmp_path / "checkpoint").unfinished_


def test_a_store_that_fills_up_meanwhile_is_used(straight: dict[str, Path], tmp_path: Path) -> None:
    """Interrupted in step 1; by the time it goes on, another run has put steps 1 and 2 into the store."""
    store = Store(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        run(long(Balanced()), tmp_path / "one", watch=StopAt(1, 3), checkpoint_every=1e9)
    run(long(Balanced()), tmp_path / "two", store=store)
    watch = StopAt(*NEVER)
    result = run(long(Balanced()), tmp_path / "one", store=store, watch=watch)
    assert watch.seen == [] and result["reused"]["steps"] == [0, 1, 2]
    assert_same(tmp_path / "one", straight["balanced"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "no tensors", "broken json", "no learner"])
def test_a_corrupt_checkpoint_is_named(damage: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(short(), tmp_path, watch=StopAt(1, 2), checkpoint_every=0)
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
            run(short(), tmp_path, checkpoint_every=0)
    run(short(), tmp_path, checkpoint_every=0)
    assert_same(tmp_path, straight["short"])
