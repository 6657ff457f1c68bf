"""Nobody's files: what is not ours is refused before anything is computed, and never deleted or overwritten."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equipoise.runs.plan
from equipoise import DataError, Learner, Recipe, UsageError
from equipoise.cli import run_command
from equipoise.data import datasets
from equipoise.files import MANIFEST, Lease, claim_folder, remove_stale
from equipoise.runs.progress import PlainWatch
from equipoise.runs.queue import Job, map
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run
from equipoise.runs.tensorboard import TensorBoard
from equipoise.runs.workers import Local

BRIEF = ["il-baseline", "--dataset", "digits", "--steps", "1", "--epochs", "2", "--memory", "3", "--device", "cpu"]
RECORDS = Path(__file__).parent.parent / "results" / "cifar100"
TEN = datasets.load("digits").train
pytestmark = pytest.mark.usefixtures("isolated")


def contents(folder: str | Path = ".") -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def write(*names: str) -> dict[str, bytes]:
    """Files of a user; all that is in this folder."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"precious {name}")
    return {name: Path(name).read_bytes() for name in names}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said by a command that does nothing at all, whatever there is."""
    before = contents()
    capsys.readouterr()
    assert run_command(list(words)) == 2
    assert contents() == before
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said.removeprefix("equipoise: ").strip()


@pytest.fixture
def forbid_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*words: Any) -> Any:
        raise AssertionError("data is loaded")

    monkeypatch.setattr(equipoise.runs.plan, "load", load)


def records(folder: str = "records") -> Path:
    """A folder of two records, which make a figure."""
    for source in (*RECORDS.glob("il-baseline_standard_*_e0e469"), *RECORDS.glob("il-baseline_balanced_*_71bc5c")):
        Path(folder, source.name).mkdir(parents=True)
        shutil.copy(source / "result.json", Path(folder, source.name))
    return Path(folder)


# Folders of others

OTHERS = (
    "checkpoint/mine.pt",
    "metrics.jsonl",
    "run.json",
    "result.json",
    "based",
    "model",
    "log.txt",
    "notes",
    ".env",
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("forbid_data")
def test_a_run_refuses_a_folder_of_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"mine/{name}")
    said = refused(capsys, "run", *BRIEF, "--out", "mine")
    assert said == f"mine holds {name.split('/')[0]}, which equipoise did not write: name a new or an empty folder"


@pytest.mark.usefixtures("forbid_data")
def test_a_run_refuses_the_working_directory(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    write("project/model/learner-mine.safetensors", "project/tensorboard/events", "project/.lock")
    monkeypatch.chdir("project")
    words = ["run", *BRIEF, "--out", ".", "--store", "none"]
    assert refused(capsys, *words).startswith(". holds .lock, which equipoise did not write")
    assert refused(capsys, *words, "--tensorboard").startswith("tensorboard holds events, which")


@pytest.mark.usefixtures("forbid_data")
def test_what_only_looks_like_a_record_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{}", "[1]", '{"steps": [], "run": {}}'):
        Path("mine").mkdir(exist_ok=True)
        Path("mine/result.json").write_text(text)
        assert "mine holds result.json" in refused(capsys, "run", *BRIEF, "--out", "mine")
    Path("mine/result.json").unlink()
    Path("mine/result.json").mkdir()
    assert "mine holds result.json" in refused(capsys, "run", *BRIEF, "--out", "mine")


@pytest.mark.usefixtures("forbid_data")
def test_a_lock_with_words_in_it_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    write("mine/.lock")
    assert "mine holds .lock" in refused(capsys, "run", *BRIEF, "--out", "mine")


@pytest.mark.usefixtures("forked")
def test_a_queue_refuses_the_folder_of_any_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sweep", *BRIEF, "--seed", "0,1", "--workers", "1", "--out", "runs", "--store", "none"]
    assert run_command(words) == 0
    (folder,) = Path("runs").glob("*seed-1*")
    shutil.rmtree(folder)
    (done,) = Path("runs").glob("*")
    write(f"{folder}/log.txt", f"{folder}/error.txt", "runs/notes")
    shutil.rmtree(done)
    monkeypatch.setattr(equipoise.runs.plan, "load", lambda *words: pytest.fail("data is loaded"))
    assert refused(capsys, *words).startswith(f"{folder} holds error.txt, which")


@pytest.mark.usefixtures("forked")
def test_a_worker_is_not_begun_in_a_folder_of_others() -> None:
    before = write("mine/log.txt", "mine/error.txt", "mine/warnings.txt")
    recipe = Recipe(epochs=1, batch=32)
    one = Run(data=Data("digits"), protocol=Protocol(steps=1), recipe=recipe)
    jobs = [Job(one, Machine("cpu"), Path(name)) for name in ("mine", "good")]
    map(run, jobs, Local(workers=1))
    assert "mine holds error.txt, which equipoise did not write" in (jobs[0].failure or "")
    assert contents("mine") == before and jobs[1].result is not None


@pytest.mark.parametrize("name", ["README.md", "index.html", "figures/alpha-notes.png", "tables/memory-mine.csv", "x"])
def test_a_report_refuses_a_folder_of_others(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = records()
    write(f"mine/{name}")
    monkeypatch.setattr("equipoise.report.load_records", lambda *words: pytest.fail("records are read"))
    said = refused(capsys, "report", str(folder), "--out", "mine")
    assert said.startswith(f"mine holds {name.split('/')[0]}, which equipoise did not write")


@pytest.mark.parametrize("name", ["accuracy.png", "store/x", "standard_memory-0_seed-0/run.json", "notes"])
@pytest.mark.usefixtures("forbid_data")
def test_a_demo_refuses_a_folder_of_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"mine/{name}")
    assert f"mine holds {name.split('/')[0]}, which" in refused(capsys, "demo", "--out", "mine")


@pytest.mark.parametrize(
    "words",
    [
        *(["run", *BRIEF, *out] for out in (["--out", ""], ["--out="], ["--out", "x", "--data", ""], ["--store", ""])),
        ["sweep", *BRIEF, "--out", ""],
        ["sweep", *BRIEF, "--out="],
        ["sweep", "--runs", ""],
        ["report", "records", "--out", ""],
        ["report", ""],
        ["bench", "--out", ""],
        ["bench", "--out="],
        ["demo", "--out", ""],
        ["paper", "--results", ""],
        ["show", ""],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("forbid_data")
def test_an_empty_path_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    records()
    assert " is empty: name a " in refused(capsys, *words)


# Our own folders


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_a_foreign_file_beside_ours_survives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put there while the run is interrupted, next to ours in every folder."""
    words = ["run", *BRIEF, "--out", "run", "--store", "none", "--checkpoint", "0", "--tensorboard"]

    class Interrupted(PlainWatch):
        def end_epoch(self, e: Any) -> None:
            if (e.step, e.epoch) == (1, 1):
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("equipoise.cli.run.PlainWatch", Interrupted)
        assert run_command(words) == 1
    capsys.readouterr()
    partial = Path("run/.run.json.123.partial")
    partial.write_text("half")
    mine = write(
        *(f"run/{name}" for name in ("notes", ".mine.1.partial", ".run.json.partial")),
        *(f"run/checkpoint/{name}" for name in ("learner-mine.safetensors", f"learner-{'0' * 16}.safetensors", "x")),
        *(f"run/model/{name}" for name in ("learner-mine.safetensors", ".mine.partial", "notes")),
        *(f"run/tensorboard/{name}" for name in ("events.out.tfevents.1.mine", "notes")),
    )
    assert run_command(words) == 0
    assert "step 0 done" not in capsys.readouterr().err, "it went on from the checkpoint"
    assert not partial.exists()
    assert {name: data for name, data in contents("run").items() if name in mine} == mine
    ours = {"run.json", "metrics.jsonl", "result.json", "model", "tensorboard", MANIFEST, ".lock"}
    assert names_in("run") == ours | {"checkpoint", "notes", ".mine.1.partial", ".run.json.partial"}
    assert names_in("run/checkpoint") == {"learner-mine.safetensors", f"learner-{'0' * 16}.safetensors", "x"}
    before = contents("run")
    assert run_command(words) == 0 and contents("run") == before


def test_a_folder_without_anything_of_others_is_left_without_a_checkpoint() -> None:
    assert run_command(["run", *BRIEF, "--out", "run", "--store", "none", "--checkpoint", "0"]) == 0
    assert names_in("run") == {"run.json", "metrics.jsonl", "result.json", "model", MANIFEST, ".lock"}
    Path("run/result.json").unlink()
    assert run_command(["run", *BRIEF, "--out", "run", "--store", "none"]) == 0, "what is ours is made again"
    assert len(names_in("run/model")) == 2


def test_tensorboard_of_others_is_refused_in_our_own_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    Path("run/result.json").unlink()
    write("run/tensorboard/events.out.tfevents.1.host.2.0")
    monkeypatch.setattr(equipoise.runs.plan, "load", lambda *words: pytest.fail("data is loaded"))
    said = refused(capsys, *words, "--tensorboard")
    assert said.startswith("run/tensorboard holds events.out.tfevents.1.host.2.0, which equipoise did not write")


def test_no_tensorboard_of_the_working_directory_is_in_the_way() -> None:
    write("tensorboard/mine")
    Local(workers=1, tensorboard=True)
    with pytest.raises(UsageError, match="tensorboard holds mine"):
        TensorBoard(Path())


def test_a_model_of_others_in_our_folder_is_refused_before_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    Path("run/result.json").unlink()
    Path("run/metrics.jsonl").unlink()
    write("run/model/learner.json")
    assert "run/model holds learner.json" in refused(capsys, *words)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "result.json"])
def test_a_folder_in_place_of_a_file_is_refused_before_training(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    Path("run/result.json").unlink()
    Path("run", name).unlink(missing_ok=True)
    Path("run", name).mkdir()
    monkeypatch.setattr(Learner, "learn", lambda *_, **__: pytest.fail("it is trained"))
    assert f"run/{name} is a folder, where a file is to be written" in refused(capsys, *words)


def test_a_file_in_place_of_the_model_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    Path("run/result.json").unlink()
    shutil.rmtree("run/model")
    Path("run/model").write_text("mine")
    monkeypatch.setattr(Learner, "learn", lambda *_, **__: pytest.fail("it is trained"))
    assert "run/model is a file, where a folder is to be written" in refused(capsys, *words)
    assert Path("run/model").read_text() == "mine"


def test_a_model_that_is_gone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0 and "its model is not" not in capsys.readouterr().out
    shutil.rmtree("run/model")
    assert run_command(words) == 0 and "its model is not in run/model" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [None, 3, "x", []])
def test_settings_of_a_wrong_kind_are_refused(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    Path("run/result.json").unlink()
    Path("run/model").rename("run/checkpoint")
    assert run_command(words) == 1
    said = capsys.readouterr().err
    assert "run/checkpoint is not a learner that this version can read: it was not saved by a run" in said
    recorded = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**recorded, "run": settings}))
    assert run_command(words) == 1 and "run/run.json does not hold the settings of a run" in capsys.readouterr().err


def test_a_record_without_the_fingerprint_of_its_data_is_another_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *BRIEF, "--out", "run", "--store", "none"]
    assert run_command(words) == 0
    recorded = json.loads(Path("run/result.json").read_text())
    Path("run/result.json").write_text(json.dumps({**recorded, "resolved": "x"}))
    assert run_command(words) == 1 and "other settings: fingerprint of the data" in capsys.readouterr().err


def test_a_nul_in_a_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "contains NUL" in refused(capsys, "run", *BRIEF, "--out", "a\0b")


def test_a_record_by_itself_is_returned_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *BRIEF, "--store", "none"]
    assert run_command([*words, "--out", "run"]) == 0
    said = capsys.readouterr().out
    Path("kept").mkdir()
    shutil.copy("run/result.json", "kept")
    write("kept/notes")
    before = contents()
    for verb in ([*words, "--out", "kept"], ["show", "kept"]):
        assert run_command(verb) == 0
        assert said.split("recorded in")[0].strip() == capsys.readouterr().out.split("recorded in")[0].strip()
    assert contents() == before


def test_a_report_replaces_its_own_files_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    folder = records()
    words = ["report", str(folder), "--out", "report"]
    assert run_command(words) == 0
    first = contents("report")
    names = json.loads(Path("report", MANIFEST).read_text())["names"]
    assert {f"report/{name}" for name in (*names, MANIFEST)} == set(first)
    figures = [name for name in names if name.startswith("figures/steps-")]
    assert figures
    mine = write("report/figures/alpha-notes.png", "report/tables/memory-mine.csv", "report/notes")
    Path("report/README.md").write_text("old")
    assert run_command(words) == 0
    assert contents("report") == first | mine
    for path in folder.rglob("result.json"):  # now of a rehearsal, which is in no figure
        result = json.loads(path.read_text())
        path.write_text(
            json.dumps({**result, "run": {**result["run"], "data": {**result["run"]["data"], "name": "digits"}}})
        )
    assert run_command(words) == 0
    left = contents("report")
    assert not any(f"report/{name}" in left for name in figures)
    assert {name: data for name, data in left.items() if name in mine} == mine
    assert {f"report/{name}" for name in json.loads(Path("report", MANIFEST).read_text())["names"]} <= set(left)
    # A user's file of a name that was ours once.
    write(f"report/{figures[0]}")
    shutil.rmtree(folder)
    assert f"report holds {figures[0]}, which" in refused(capsys, "report", str(records()), "--out", "report")


def test_the_folder_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    claim_folder(Path("run"), "run", ["run.json"])
    assert "of kind run, not report" in refused(capsys, "report", str(records()), "--out", "run")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 2, "kind": "report", "names": []}', "\xff"]
    + [
        json.dumps({"format": 1, "kind": "report", "names": names})
        for names in (None, "abc", [1], ["../x"], ["a/../../x"], ["/x"], [""])
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("report").mkdir()
    Path("report", MANIFEST).write_bytes(text.encode("latin1"))
    write("x")
    said = refused(capsys, "report", str(records()), "--out", "report")
    assert said.startswith(f"report/{MANIFEST} is not a manifest")


def test_half_a_manifest_is_ours() -> None:
    """A process was killed before anything else was written."""
    Path("run").mkdir()
    Path("run", f".{MANIFEST}.123.partial").write_text("{")
    Path("run/.lock").touch()
    assert run_command(["run", *BRIEF, "--out", "run", "--store", "none"]) == 0
    assert {"result.json", "model", MANIFEST} <= names_in("run")


def test_only_what_the_manifest_names_is_deleted() -> None:
    claim_folder(Path("x"), "report", ["a", "b", "c/d"])
    mine = write("x/e", "x/c/e")
    write("x/a", "x/b", "x/c/d")
    Path("x/link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="x holds link, which"):
        claim_folder(Path("x"), "report", ["link"])
    with pytest.raises(UsageError, match="x holds e, which"):
        claim_folder(Path("x"), "report", ["e", "f"])
    remove_stale(Path("x"), "report", ["b"])
    left = contents("x")
    assert left.keys() == {*mine, "x/b", f"x/{MANIFEST}"} and mine.items() <= left.items()
    write("x/a")
    with pytest.raises(UsageError, match="x holds a, which"):
        claim_folder(Path("x"), "report", ["a"])


# Saved learners


@pytest.fixture(scope="module")
def learners() -> list[Learner]:
    which = np.isin(TEN.y.numpy(), [0, 1])
    x, y = TEN.x.numpy()[which][:80], TEN.y.numpy()[which][:80]
    return [Learner(recipe=Recipe(epochs=1, batch=32), memory=3, seed=seed).learn(x, y) for seed in (0, 1)]


def test_saving_deletes_only_the_tensors_that_it_replaces(learners: list[Learner]) -> None:
    names = ("learner-mine.safetensors", f"learner-{'a' * 16}.safetensors", "x.safetensors", ".x.1.partial")
    mine = write(*(f"model/{name}" for name in names))
    for learner in (*learners, learners[0], learners[0]):
        learner.save("model")
        assert mine.items() <= contents("model").items()
        assert len(contents("model")) == len(mine) + 2
        assert Learner.load("model").seed == learner.seed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"lessons": 3}', '{"tensors": "../precious", "sha256": "0"}', "\xff"]
)
def test_saving_refuses_a_learner_json_of_others(text: str, learners: list[Learner]) -> None:
    write("model/notes", "precious")
    Path("model/learner.json").write_bytes(text.encode("latin1"))
    before = contents()
    with pytest.raises(UsageError, match=r"model holds learner.json, .*another folder"):
        learners[0].save("model")
    assert contents() == before


def test_saving_refuses_tensors_of_others(learners: list[Learner]) -> None:
    learners[0].save("model")
    (tensors,) = Path("model").glob("*.safetensors")
    write(f"other/{tensors.name}")
    before = contents()
    with pytest.raises(UsageError, match=f"other holds {tensors.name}"):
        learners[0].save("other")
    assert contents() == before


def test_a_save_that_was_cut_off_is_repeated(learners: list[Learner]) -> None:
    learners[0].save("model")
    Path("model/learner.json").unlink()
    with pytest.raises(DataError):
        Learner.load("model")
    learners[0].save("model")
    assert Learner.load("model").classes_ == [0, 1] and len(contents("model")) == 2


def test_an_empty_path_of_a_folder_is_an_error(learners: list[Learner]) -> None:
    before = contents()
    with pytest.raises(UsageError, match="is empty: name a"):
        learners[0].save("")
    with pytest.raises(UsageError, match="is empty: name a"):
        run(Run(data=Data("digits")), "", Machine("cpu"))
    assert contents() == before


# Leases


def test_a_lease_is_held_by_one(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", []
    assert not Lease(lock).is_held() and not lock.exists(), "to look makes no file"

    def refuse() -> None:
        told.append("busy")
        raise RuntimeError("no")

    with Lease(lock).hold(refuse):
        assert Lease(lock).is_held()
        with pytest.raises(RuntimeError, match="no"), Lease(lock).hold(refuse):
            pytest.fail("two hold it")
    assert told == ["busy"] and not Lease(lock).is_held()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES])
def test_where_there_are_no_locks_nobody_waits(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("equipoise.files.FileLock.acquire", fail)
    if number == errno.EACCES:
        with pytest.raises(PermissionError), Lease(tmp_path / "lock").hold():
            pytest.fail("it is not ours")
    else:
        with Lease(tmp_path / "lock").hold():
            pass
