"""Queues of runs: shared steps are computed once, failures harm nobody, and a killed queue goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import Command
from squares import digits_of

import equipoise.runs.plan
import equipoise.runs.workers
from equipoise import Balanced, EquipoiseError, ILBaseline, Meta, Recipe, Standard, UsageError
from equipoise.cli import run_command
from equipoise.cli.words import expand_lists, pop_flag, read_runs
from equipoise.runs.folder import claim_run_folder
from equipoise.runs.mps import PRIORITY
from equipoise.runs.progress import Watch
from equipoise.runs.queue import Job, find_critical, has_base, map, report_failures
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run
from equipoise.runs.shared_steps import SharedSteps
from equipoise.runs.worker import choose_gpu, conclude_try
from equipoise.runs.workers import Local, count_default_workers, next_job

QUICK = Recipe(epochs=2, lr=0.05, batch=32)
CPU = Machine("cpu")


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    with digits_of(40):
        yield


def small(remedy: Any = None, recipe: Recipe = QUICK, seed: int = 0) -> Run:
    return Run(ILBaseline(remedy or Standard()), Data("digits"), Protocol(6, 2, memory="4"), recipe, seed)


def job_of(run: Run, folder: Path, *more: Any, machine: Machine = CPU, **others: Any) -> Job:
    return Job(run, machine, folder, *more, **others)


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what depends on when and where it was computed."""
    steps = [{k: v for k, v in s.items() if not k.endswith("seconds")} for s in result["steps"]]
    left_out = ("seconds", "reused", "machine", "versions", "steps")
    return {k: v for k, v in result.items() if k not in left_out} | {"steps": steps}


def hold(folder: str, key: str, ready: Any) -> None:
    with SharedSteps(Path(folder)).claim(key):
        ready.set()
        time.sleep(60)


@pytest.mark.usefixtures("forked")
def test_a_claim_keeps_others_waiting_until_its_holder_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(str(tmp_path), "ab" * 16, ready), daemon=True)
    holder.start()
    assert ready.wait(60)
    waited: list[float] = []

    def on_wait() -> None:
        waited.append(time.monotonic())
        holder.kill()  # a process that dies gives its claim up

    with SharedSteps(tmp_path).claim("ab" * 16, on_wait):
        assert len(waited) == 1
    with SharedSteps(tmp_path).claim("cd" * 16, on_wait):
        assert len(waited) == 1  # another step is free
    holder.join()


@pytest.mark.usefixtures("forked")
def test_a_queue_gives_what_single_runs_give(tmp_path: Path) -> None:
    runs = [small(Standard()), small(Balanced()), small(Meta())]
    jobs = [job_of(one, tmp_path / str(i)) for i, one in enumerate(runs)]
    told: list[int] = []
    map(run, jobs, Local(workers=2, options=Options(store=tmp_path / "store")), lambda busy: told.append(len(busy)))
    assert [job.failure for job in jobs] == [None] * 3
    assert max(told) == 2 and told[-1] == 0
    for i, (one, job) in enumerate(zip(runs, jobs)):
        assert job.result is not None
        assert plain(job.result) == plain(run(one, tmp_path / f"alone-{i}", CPU))
    # One base step for all three: computed by one of them, waited for or found by the others.
    reused = [job.result["reused"] for job in jobs if job.result]
    assert sorted(r is None for r in reused) == [False, False, True]


@pytest.mark.usefixtures("forked")
def test_a_failing_run_harms_no_other_and_is_not_tried_in_vain(tmp_path: Path) -> None:
    bad = small(recipe=Recipe(epochs=2, lr=1e9, batch=32))
    jobs = [job_of(bad, tmp_path / "bad"), job_of(small(), tmp_path / "good")]
    map(run, jobs, Local(workers=1))
    assert jobs[0].result is None and "diverged" in (jobs[0].failure or "") and jobs[0].tries == 1
    assert jobs[1].result is not None and jobs[1].failure is None


@pytest.mark.usefixtures("forked")
def test_a_folder_that_cannot_be_used_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["good", "file", "file/below", "full", "closed"]
    (tmp_path / "file").touch()
    jobs = [job_of(small(), tmp_path / name) for name in reversed(places)]
    make, look = Path.mkdir, Path.is_file

    def mkdir(path: Path, *words: Any, **more: Any) -> None:
        if path.name == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, *words, **more)

    def is_file(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "is_file", is_file)
    map(run, jobs, Local(workers=1))
    closed, full, below, file, good = jobs
    assert good.result is not None and good.failure is None
    assert (closed.failure or "").startswith(f"no permission to use {tmp_path / 'closed'}")
    assert (full.failure or "").startswith(f"no space left for {tmp_path / 'full'}")
    assert (below.failure or "").startswith(f"{tmp_path / 'file' / 'below'} cannot be used (not a directory)")
    assert (file.failure or "").startswith(f"{tmp_path / 'file'} is a file, not a folder: name")


@pytest.mark.usefixtures("forked")
def test_a_worker_that_is_killed_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.runs.worker.PAUSE", 0.1)
    job = job_of(small(recipe=Recipe(epochs=12, lr=0.05, batch=32)), tmp_path / "a")
    killed: list[int] = []

    def kill(busy: Any) -> None:
        metrics = tmp_path / "a" / "metrics.jsonl"
        if not killed and metrics.is_file() and metrics.read_text().count("\n") >= 3:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)

    map(run, [job], Local(workers=1), kill)
    assert killed and job.tries == 1 and job.failure is None, "what it did before was not in vain"
    assert job.result is not None
    assert plain(job.result) == plain(run(job.run, tmp_path / "straight", CPU))


@pytest.mark.usefixtures("forked")
def test_a_killed_queue_leaves_no_worker_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sweep", "il-baseline", "--dataset", "digits", "--epochs", "15", "--seed", "0,1", "--memory", "4"]
    words += ["--workers", "2", "--out", "runs", "--store", "store"]
    queue = Command(words, tmp_path)
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("runs/*/metrics.jsonl"))) < 2:
        assert time.monotonic() < deadline and queue.poll() is None
        time.sleep(0.05)
    queue.kill()
    deadline = time.monotonic() + 20
    for folder in tmp_path.glob("runs/*"):  # nobody is left at work in the folders
        with (folder / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
    monkeypatch.chdir(tmp_path)
    assert run_command(words) == 0
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2


def long_queue(folder: Path, workers: int = 2, start: str = "fork") -> Command:
    """The command at two runs that take long."""
    words = ["sweep", "il-baseline", "--dataset", "digits", "--epochs", "400", "--seed", "0,1", "--store", "none"]
    return Command([*words, "--workers", str(workers), "--out", "runs"], folder, start)


def last_words(queue: Command) -> str:
    """What it said until it ended; it is not left behind if it does not."""
    try:
        return queue.communicate(timeout=60)[1]
    finally:
        queue.kill()


def test_ctrl_c_lets_the_workers_save(tmp_path: Path) -> None:
    queue = long_queue(tmp_path)
    deadline = time.monotonic() + 90
    while len([p for p in tmp_path.glob("runs/*/metrics.jsonl") if p.read_text().count("\n") > 2]) < 2:
        assert time.monotonic() < deadline and queue.poll() is None
        time.sleep(0.05)
    os.killpg(queue.pid, signal.SIGINT)
    said = last_words(queue)
    assert queue.returncode == 1 and "stopped; the same command goes on" in said and "Traceback" not in said
    assert len(list(tmp_path.glob("runs/*/checkpoint/learner.json"))) == 2


@pytest.mark.parametrize(("all_hear", "workers"), [(True, 2), (False, 1)])
def test_ctrl_c_while_workers_start_ends_them_without_a_word(all_hear: bool, workers: int, tmp_path: Path) -> None:
    queue = long_queue(tmp_path, workers, "spawn")
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("runs/*/log.txt"))) < workers:
        assert time.monotonic() < deadline and queue.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # they are importing now
    if all_hear:
        os.killpg(queue.pid, signal.SIGINT)
    else:  # who hears it then hands it on
        queue.send_signal(signal.SIGINT)
    said = last_words(queue)
    assert queue.returncode == 1 and "stopped; the same command goes on" in said and "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/metrics.jsonl")), "it was early enough"
    assert ["KeyboardInterrupt" in p.read_text() for p in tmp_path.glob("runs/*/log.txt")] == [True] * workers


@contextlib.contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """As a process that is at work in a folder."""
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("forked")
def test_a_run_that_another_is_at_work_at_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done, taken_up, raced, free = jobs = [job_of(small(), tmp_path / name) for name in "abcd"]
    looks: Counter[Path] = Counter()
    look = equipoise.runs.workers.is_locked

    def held(folder: Path) -> bool:
        looks[folder] += 1
        # The other one comes between the first look and the worker.
        return look(folder) and not (folder == raced.folder and looks[folder] == 1)

    monkeypatch.setattr("equipoise.runs.workers.is_locked", held)
    with contextlib.ExitStack() as stack:
        others = {job.folder: stack.enter_context(contextlib.ExitStack()) for job in (done, taken_up, raced)}
        for folder, other in others.items():
            other.enter_context(at_work(folder))
        began = time.monotonic()

        def tell(busy: Any) -> None:
            # When only those are left that others are at work at, one of these is done by the other, two are left.
            if free.is_over and looks[raced.folder] > 2 and not busy and not done.is_over:
                assert not any(job.tries for job in (done, taken_up, raced)) and not done.is_over
                shutil.copy(free.folder / "result.json", done.folder)
                others[taken_up.folder].close()
                others[raced.folder].close()

        map(run, jobs, Local(workers=1), tell)
    assert [job.failure for job in jobs] == [None] * 4 and all(job.result for job in jobs)
    assert [job.tries for job in jobs] == [0, 1, 1, 1]
    assert "is using" in (raced.folder / "log.txt").read_text(), "it was begun, and lost the race"
    assert not list(tmp_path.glob("*/error.txt"))
    assert 2 < max(looks.values()) <= time.monotonic() - began + 1, "now and then, not all the time"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{job.folder}: another process is using it; waiting for it" for job in jobs[:3]], "once"


@pytest.mark.usefixtures("forked")
def test_two_queues_over_the_same_runs_end_with_all_results(tmp_path: Path) -> None:
    queues = [[job_of(small(seed=seed), tmp_path / str(seed), str(seed)) for seed in (0, 1)] for _ in range(2)]
    on = Local(workers=1, options=Options(store=tmp_path / "store"))
    threads = [threading.Thread(target=map, args=(run, jobs, on)) for jobs in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in queues[0] + queues[1]:
        assert job.failure is None and job.tries <= 1
    assert [job.result for job in queues[0]] == [job.result for job in queues[1]]
    assert [job.result["run"]["seed"] for job in queues[0] if job.result] == [0, 1]
    assert not list(tmp_path.glob("*/error.txt"))


@pytest.mark.usefixtures("forked")
def test_the_reason_of_a_failure_is_what_the_worker_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text("{")
    broken = job_of(small(), tmp_path / "a")
    killed = job_of(small(), tmp_path / "b", tries=9)
    assert conclude_try(killed, -9) and killed.failure == "killed by signal 9"
    good = job_of(small(), tmp_path / "c")
    map(run, [broken, good], Local(workers=1))
    assert "result.json is damaged" in (broken.failure or "") and good.result is not None


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("here", ["cuda", "cpu"])
def test_a_worker_that_sees_no_gpu_does_not_train_on_the_cpu_instead(
    here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a queue that began with one; where there is none, the CPU is meant."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: here == "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # workers look for themselves, and see none
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("equipoise.runs.worker.PAUSE", 0.01)
    job = job_of(small(), tmp_path / "a", machine=Machine())
    map(run, [job], Local(workers=1))
    if here == "cpu":
        assert job.failure is None and job.result is not None and job.result["machine"]["device"] == "cpu"
    else:
        assert (job.failure or "").startswith("device cuda was not found") and job.tries == 3
        assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_only_tries_in_vain_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared GPU, the fault of one run ends its neighbours too; these go on as long as they get further."""
    job = job_of(small(), tmp_path)

    def dies_at(step: int, epoch: int) -> bool:
        line = {"step": step, "epoch": epoch, "done": epoch / 9, "images_per_second": 1.0}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        job.tries += 1  # as `started` does
        return conclude_try(job, 1)

    assert not any(dies_at(0, epoch) for epoch in range(1, 9)) and job.tries == 0
    assert not dies_at(1, 1), "a later step is further, though its epochs count anew"
    soon = job.not_before - time.monotonic()
    assert not dies_at(1, 1) and not dies_at(0, 8) and job.tries == 2 and job.failure is None
    assert 1 < soon < 5 < 20 < job.not_before - time.monotonic(), "it is not begun again at once, and ever later"
    assert dies_at(1, 1) and job.failure == "the process ended with code 1"


def dying(run: Run, out: Path, *more: Any) -> None:
    """In place of a run: note that it was begun, and the first time end by a fault."""
    with (out.parent / "begun").open("a") as f:
        f.write(out.name)
    if (out.parent / "begun").read_text().count(out.name) == 1:
        os._exit(7)
    (out / "result.json").write_text("{}")


@pytest.mark.usefixtures("forked")
def test_a_run_that_dies_is_taken_up_again_before_others_are_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all one that would compute the base step anew that it was at; what was there before is no progress."""
    monkeypatch.setattr("equipoise.runs.worker.PAUSE", 0.5)
    jobs = [job_of(small(), tmp_path / name, "x") for name in "ab"]
    old = {"step": 0, "epoch": 3, "done": 0.3, "images_per_second": 1.0}
    (tmp_path / "a").mkdir()
    claim_run_folder(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    map(dying, jobs, Local(workers=1, options=Options(store=tmp_path / "store")))  # type: ignore[arg-type]
    assert (tmp_path / "begun").read_text() == "aabb"
    assert jobs[0].tries == 2, "the first one was in vain"


def warning(run: Run, out: Path, *more: Any) -> None:
    """In place of a run: warn of the same as all others, and of something of its own."""
    logging.getLogger("equipoise").warning("training cannot be fused here, and is slower")
    logging.getLogger("equipoise").warning("a word of %s", out.name)


@pytest.mark.usefixtures("forked")
def test_what_workers_warn_of_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    map(warning, [job_of(small(), tmp_path / name) for name in "ab"], Local(workers=1))  # type: ignore[arg-type]
    assert caplog.text.count("training cannot be fused here") == 1
    assert "a: a word of a" in caplog.text and "b: a word of b" in caplog.text
    assert "cannot be fused" in (tmp_path / "b" / "log.txt").read_text()


FAILING = """
from dataclasses import dataclass

import torch

from equipoise import ILBaseline


@dataclass(frozen=True)
class FailingGPU(ILBaseline):
    error: str = "OutOfMemoryError"
    words: str = ""

    def objective(self, s, b):
        raise getattr(torch, self.error)(self.words)
"""


@pytest.mark.usefixtures("forked")
def test_what_a_gpu_says_is_put_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_gpu.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)  # workers have it too
    monkeypatch.setattr("equipoise.runs.worker.TRIES", 1)
    method = importlib.import_module("failing_gpu").FailingGPU
    full = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.\nAnd more."
    lost = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later."
    methods = [method(error="OutOfMemoryError", words=full), method(error="AcceleratorError", words=lost)]
    jobs = [job_of(Run(one, Data("digits"), recipe=QUICK), tmp_path / str(i)) for i, one in enumerate(methods)]
    map(run, jobs, Local(workers=2))
    said = [job.failure or "" for job in jobs]
    assert said[0].startswith("the GPU is out of memory: lower --batch or --workers, or stop other processes")
    assert said[1].startswith("the GPU failed (CUDA error: unspecified launch failure): ")
    for job, words in zip(jobs, said):
        assert (job.folder / "error.txt").read_text() == f"{words}\n"  # one line
        assert "Traceback" in (job.folder / "log.txt").read_text()  # for whoever wants more


@pytest.mark.usefixtures("forked")
def test_the_same_run_twice_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "il-baseline", "--dataset", "digits", "--epochs", "1", "--base", "8", "--steps", "1"]
    assert run_command([*words, "--seed", "0,0", "--evaluate-every", "1", "--store", "none"]) == 0
    said = capsys.readouterr()
    assert "1 of 1 done" in said.err and "done" not in said.out, "the output is the table alone"
    (metrics,) = Path("runs").glob("*/metrics.jsonl")
    assert all("accuracy" in json.loads(line) for line in metrics.read_text().splitlines())
    assert run_command([*words, "--store", "a,b"]) == 2
    assert "--store is one for all runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        (["why"], "the run failed; repeat the command to retry it"),
        ([None, "why"], "1 of 2 runs failed; repeat the command to retry it"),
        (["why", "why"], "2 of 2 runs failed; repeat the command to retry them"),
    ],
)
def test_a_command_ends_with_how_many_runs_failed(failures: list[str | None], said: str, tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=f"^{said}$"):
        report_failures([job_of(small(), tmp_path, failure=why) for why in failures])


@pytest.mark.usefixtures("forked")
def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    jobs = [job_of(small(), tmp_path / "a")]
    map(run, jobs, Local(workers=1))
    again = [job_of(small(), tmp_path / "a")]
    map(run, again, Local(workers=1))
    assert again[0].tries == 0 and again[0].result == jobs[0].result


@pytest.mark.usefixtures("forked")
def test_the_command_expands_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "il-baseline", "--dataset", "digits", "--epochs", "1", "--base", "8", "--steps", "1"]
    assert run_command([*words, "--remedy", "standard,balanced", "--seed=0,1", "--memory", "3", "--store", "s"]) == 0
    said = capsys.readouterr()
    assert "4 of 4 done" in said.err and "Standard" in said.out and "Balanced" in said.out
    results = [json.loads(p.read_text()) for p in Path("runs").glob("*/result.json")]
    assert {(r["run"]["method"]["remedy"]["name"], r["run"]["seed"]) for r in results} == {
        (remedy, seed) for remedy in ("standard", "balanced") for seed in (0, 1)
    }


@pytest.mark.parametrize(
    "words, part",
    [
        (["--remedy", "balanced,meta", "--memory", "1"], "meta"),
        (["--remedy", "balanced,blanced"], "did you mean 'balanced'"),
        (["--workers", "many"], "--workers"),
        (["--workers", "0"], "workers must be 1 or more"),
        (["--workers"], "--workers needs a value"),
        (["--steps", "5,3"], "--steps 3"),
    ],
)
def test_a_mistake_in_any_run_is_said_before_the_first_begins(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["sweep", "il-baseline", "--dataset", "digits", "--epochs", "1", *words]) == 2
    assert part in capsys.readouterr().err
    assert not list(tmp_path.rglob("run.json"))


def test_lists_and_flags_are_taken_apart() -> None:
    assert expand_lists(["m", "--a", "1,2", "--b=x,y"]) == [
        ["m", "--a", a, f"--b={b}"] for a in ("1", "2") for b in ("x", "y")
    ]
    assert pop_flag("--a", ["m", "--a", "1", "--b"]) == (["m", "--b"], "1")
    assert pop_flag("--a", ["m", "--a=1"]) == (["m"], "1")
    assert pop_flag("--a", ["m", "--ab", "1"]) == (["m", "--ab", "1"], None)


def test_there_is_at_least_one_worker(tmp_path: Path) -> None:
    assert count_default_workers() >= 1
    with pytest.raises(UsageError):
        map(run, [job_of(small(), tmp_path / "a")], Local(workers=0))


def visible(run: Run, out: Path, *more: Any) -> None:
    """In place of a run: note which GPUs it sees, and stay until all three are there, so that each has its slot."""
    (out / "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    deadline = time.monotonic() + 60
    while len(list(out.parent.glob("*/visible"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.usefixtures("forked")
def test_workers_are_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b, 5")
    # The last one names a GPU by its number among all that are visible.
    jobs = [
        job_of(small(), tmp_path / str(i), machine=Machine(device))
        for i, device in enumerate(["auto", "cuda", "cuda:1"])
    ]
    map(visible, jobs, Local(workers=3))  # type: ignore[arg-type]
    assert [(job.folder / "visible").read_text() for job in jobs] == ["GPU-b", "5", "GPU-b, 5"]


def noticed(run: Run, out: Path, *more: Any) -> None:
    """In place of a run: note what MPS would read."""
    (out / "priority").write_text(os.environ.get(PRIORITY, "normal"))


@pytest.mark.parametrize(
    ("costs", "workers", "first"),
    [
        ([56, 9, 9, 9, 9], 4, [0]),
        ([56, 40, 40, 40, 40, 40], 4, []),
        ([56, 50, 9, 9, 9], 4, [0, 1]),
        ([30, 10], 4, [0]),
        ([10, 10], 4, []),
        ([10], 4, []),
        ([10, 10, 10, 10, 10], 4, []),
        ([], 4, []),
        ([56, 9, 9], 1, []),
    ],
    ids=str,
)
def test_a_job_that_would_be_left_alone_at_the_end_goes_first(
    costs: list[int], workers: int, first: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PRIORITY, raising=False)
    jobs = [job_of(small(), tmp_path / str(i), images=[0, n]) for i, n in enumerate(costs)]
    assert find_critical(jobs, workers) == [jobs[i] for i in first]


def test_a_base_step_that_jobs_share_counts_once(tmp_path: Path) -> None:
    later = [10, 9, 9, 9]
    alone, shared = (
        [job_of(small(), tmp_path / str(i), group, images=[30, n]) for i, n in enumerate(later)] for group in ("", "x")
    )
    assert find_critical(alone, 2) == [] and find_critical(shared, 2) == shared


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("said", [None, "0"], ids=["by itself", "unless the user says otherwise"])
def test_others_yield_to_it_on_the_gpu(said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRIORITY, raising=False)
    if said is not None:
        monkeypatch.setenv(PRIORITY, said)
    jobs = [job_of(small(), tmp_path / str(i), images=[0, n]) for i, n in enumerate([9, 1])]
    map(noticed, jobs, Local(workers=2))  # type: ignore[arg-type]
    assert [(job.folder / "priority").read_text() for job in jobs] == ([said] * 2 if said else ["normal", "1"])


def noting(run: Run, out: Path, machine: Machine, options: Options, watch: Watch) -> None:
    """In place of a run: note that the watch is closed, and end well or badly."""
    watch.close = (out / "closed").touch  # type: ignore[method-assign]
    if out.name == "bad":
        raise UsageError("it cannot be")


@pytest.mark.usefixtures("forked")
def test_the_watch_of_a_worker_is_closed_however_that_ends(tmp_path: Path) -> None:
    jobs = [job_of(small(), tmp_path / name) for name in ("good", "bad")]
    map(noting, jobs, Local(workers=2))  # type: ignore[arg-type]
    assert jobs[1].failure == "it cannot be"
    assert all((job.folder / "closed").exists() for job in jobs)


def test_every_gpu_has_as_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, seen in ((0, [None] * 8), (1, [None] * 8), (2, ["0", "1"] * 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert [choose_gpu(slot) for slot in range(8)] == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,-1,5")  # CUDA sees those before the first that is none
    assert [choose_gpu(slot) for slot in range(4)] == ["4", "6", "4", "6"]


def test_a_slot_that_is_free_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[int] = []

    class Over:
        exitcode = 2

        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(
        "equipoise.runs.workers.start_process", lambda run, job, on, slot, *more: slots.append(slot) or Over()
    )
    map(run, [job_of(small(), tmp_path / str(i)) for i in range(5)], Local(workers=2))
    assert slots == [0, 1, 0, 1, 0]


def test_when_time_is_up_no_job_is_started_and_those_at_work_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies then is not started again either."""
    clock, started = [0.0], list[str]()

    class AtWork:
        exitcode = 1

        def __init__(self, job: Job) -> None:
            self.job, self.looks = job, 0

        def is_alive(self) -> bool:
            self.looks += 1
            clock[0] = max(clock[0], 10.0 * self.looks)
            return self.looks < 8

    def start(run: Any, job: Job, *more: Any) -> AtWork:
        started.append(job.folder.name)
        return AtWork(job)

    monkeypatch.setattr("equipoise.runs.workers.start_process", start)
    monkeypatch.setattr("equipoise.runs.workers.time.monotonic", lambda: clock[0])
    jobs = [job_of(small(), tmp_path / name) for name in "abc"]
    map(run, jobs, Local(workers=2, until=60.0))
    assert started == ["a", "b"] and clock[0] == 80.0, "both ended after the time was up"
    assert not any(job.is_over for job in jobs)


def test_nobody_is_begun_to_wait_for_a_base_step(tmp_path: Path) -> None:
    a, b, c = (job_of(small(), tmp_path / name, group) for name, group in (("a", "x"), ("b", "x"), ("c", "y")))
    on = Local(workers=3, options=Options(store=tmp_path / "store"))
    assert next_job([a, b, c], [], on) is a
    assert next_job([b, c], [a], on) is c and next_job([b], [a, c], on) is None
    assert next_job([b], [a], Local(workers=3)) is b  # nothing is shared: nothing is waited for
    a.folder.mkdir()
    line = {"step": 0, "epoch": 1, "done": 0.5, "images_per_second": 1.0}
    (a.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert not has_base(a) and next_job([b], [a], on) is None
    for further in ({"done": 1.0}, {"step": 1, "done": 0.1}):
        (a.folder / "metrics.jsonl").write_text(json.dumps(line | further) + "\n")
        assert has_base(a) and next_job([b], [a], on) is b
    assert next_job([b], [], on) is b  # whoever computed it is gone


@pytest.mark.usefixtures("forked")
def test_runs_come_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.txt"
    file.write_text("# what there is\n\nil-baseline --remedy standard,balanced  # two\n  fine-tuning --lr '0.02'\n")
    assert read_runs(file) == [["il-baseline", "--remedy", "standard,balanced"], ["fine-tuning", "--lr", "0.02"]]
    words = ["--dataset", "digits", "--epochs", "1", "--memory", "3", "--store", "none"]
    out = tmp_path / "out"
    load, calls = equipoise.runs.plan.load, []
    monkeypatch.setattr(equipoise.runs.plan, "load", lambda *words: calls.append(words) or load(*words))
    assert run_command(["sweep", "--runs", str(file), *words, "--workers", "1", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert len(calls) == 1, "the data is read once for all checks; the runs are other processes"
    assert "3 of 3 done" in said.err and "fine-tuning" in said.out and "Balanced" in said.out
    assert len(list(out.glob("*/result.json"))) == 3
    file.write_text("# nothing\n")
    assert run_command(["sweep", "--runs", str(file)]) == 2 and "names no run" in capsys.readouterr().err
    for text, code, words in (
        ("il-baseline --remedy 'open", 1, "no closing quotation"),
        ("il-baseline --out elsewhere", 2, "--out is one for all runs"),
        ("il-baseline --workers=7", 2, "--workers is one for all runs"),
        ("il-baseline --runs more", 2, "--runs is one for all runs"),
        (None, 1, "cannot be read"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert run_command(["sweep", "--runs", str(file)]) == code and words in capsys.readouterr().err
