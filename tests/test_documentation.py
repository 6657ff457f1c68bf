"""What the documents show is run here: a reader who copies it gets what it says."""

from __future__ import annotations

import gc
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise
from equipoise import Balanced, Batch, Learner, Meta, Method, Out, Recipe, Standard, UsageError
from equipoise.cli import run_command
from equipoise.cli.request import Request, parse_request
from equipoise.data.datasets import load
from equipoise.methods import find_built_in, find_methods
from equipoise.remedies import REMEDIES
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run

ROOT = Path(__file__).parents[1]
QUICK = Recipe(epochs=3, lr=0.05, batch=32)


def part(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training images of some digits, and their labels."""
    train = load("digits").train
    where = train.find_positions(first, last)
    return train.x[where], train.y[where]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The methods of docs/adding-a-method.md, imported as a user's file would be."""
    folder = tmp_path_factory.mktemp("toy")
    complete, _, *others = blocks(ROOT / "docs/adding-a-method.md")
    (folder / "keep_features.py").write_text("\n".join([complete, *others]))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("keep_features")
    sys.path.remove(str(folder))


@pytest.fixture
def toy(toys: Any) -> type[Method]:
    """The complete method of the first block."""
    return toys.KeepFeatures  # type: ignore[no-any-return]


def test_the_toy_method_learns_by_its_formula(toy: type[Method]) -> None:
    learner = Learner(toy(Balanced()), memory=5, recipe=QUICK, device="cpu")
    (x, y), (more_x, more_y) = part(0, 5), part(5, 7)
    learner.learn(x, y)
    assert (learner.logits(x).argmax(1) == y).float().mean() > 0.8
    learner.learn(more_x, more_y)
    assert learner.classes_ == list(range(7))
    x, y = part(0, 7)
    assert np.mean(learner.predict(x) == y.numpy()) > 0.5


def test_the_method_in_stages_trains_and_freezes_what_it_says(toys: Any, tmp_path: Path) -> None:
    recipe = Recipe(epochs=10, lr=0.5, batch=32)  # the backbone learns at a tenth of it
    shifted, seen = Learner(toys.Shifted(), memory=5, recipe=recipe, device="cpu"), []
    shifted.learn(*part(0, 5))
    assert "gamma" not in shifted.state_.extra
    shifted.learn(*part(5, 7), lambda now: seen.append((now.stage_, [*now._live.net.state_dict().values()])))  # type: ignore[union-attr]
    assert [stage for stage, _ in seen] == ["train"] * 10 + ["shift"] * 3
    last, after = seen[9][1], shifted.state_.net.state_dict().values()  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(last, after))  # only γ is learned in the second stage
    gamma = shifted.state_.extra["gamma"]
    assert gamma < 0  # it takes from the new classes, which have more images
    x, y = part(0, 7)
    z = shifted.logits(x)
    bare = Learner(toys.KeepFeatures(), device="cpu")
    bare.state_ = shifted.state_
    assert torch.allclose(z[:, :5], bare.logits(x)[:, :5])
    assert torch.allclose(z[:, 5:], bare.logits(x)[:, 5:] + gamma)
    assert np.mean(shifted.predict(x) == y.numpy()) > 0.6
    assert (shifted.predict(x) >= 5).sum() < (bare.predict(x) >= 5).sum()
    shifted.save(tmp_path / "shifted")
    assert torch.equal(Learner.load(tmp_path / "shifted").logits(x), z)
    with pytest.raises(UsageError, match=r"shifted does not support the remedy balanced .it corrects"):
        Learner(toys.Shifted(Balanced()), memory=5)
    with pytest.raises(UsageError, match="at least 2"):
        Learner(toys.Shifted(), memory=1)


def test_the_method_with_images_beside_counts_them_and_predicts_by_means(toys: Any) -> None:
    learner = Learner(toys.Beside(Balanced()), memory=5, recipe=QUICK, device="cpu")
    learner.learn(*part(0, 5)).learn(*part(5, 7))
    seen = learner.state_.extra["seen"]
    batches = 3 * (2 * 280) // 32 + 1  # of 32 images each, from a stream of epochs with as many old images as new ones
    assert seen.sum() == 32 * batches and seen[:5].min() > 100
    assert abs(seen[:5].sum() - seen[5:].sum()) < 32
    means = learner.state_.extra["means"]
    assert means.shape[0] == 7 and torch.allclose(means.norm(dim=1), torch.ones(7))
    x, y = part(0, 7)
    assert learner.logits(x).abs().max() <= 1.0001  # cosines
    assert np.mean(learner.predict(x) == y.numpy()) > 0.5
    plain = Learner(toys.KeepFeatures(Balanced()), memory=5, recipe=QUICK, device="cpu")
    plain.learn(*part(0, 5)).learn(*part(5, 7))
    assert not torch.equal(plain.logits(x), learner.logits(x))


def test_the_toy_methods_objective_is_what_its_docstring_says(toy: type[Method]) -> None:
    gen = torch.Generator().manual_seed(0)
    z, h, h_old = (torch.randn(6, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    step: Any = type("S", (), {"t": 1, "lam": torch.ones(4, dtype=torch.float64)})()
    value = toy(Standard(), w=3.0).objective(step, Batch(y, Out(z, h, [], {}), Out(z, h_old, [], {})))  # type: ignore[call-arg]
    ce = -torch.log_softmax(z, 1)[torch.arange(6), y].mean()
    cos = (h * h_old).sum(1) / (h.norm(dim=1) * h_old.norm(dim=1))
    assert torch.allclose(value, ce + 3.0 * (1 - cos).mean(), rtol=1e-9)


def test_the_documents_second_block_runs(toy: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"KeepFeatures": toy}
    exec(compile(blocks(ROOT / "docs/adding-a-method.md")[1], "adding-a-method.md", "exec", dont_inherit=True), scope)
    assert scope["result"]["average_incremental_accuracy"] > 30
    assert (tmp_path / "runs/keep-features/result.json").is_file()


def test_a_method_without_a_name_is_called_like_its_class() -> None:
    class Nameless(Method):
        pass

    assert Nameless.name == "nameless"
    del Nameless
    gc.collect()  # it is not to be a word of the command line in later tests
    assert "nameless" not in find_methods()


def test_the_toy_method_runs_and_records(toy: type[Method], tmp_path: Path) -> None:
    one = Run(toy(Meta()), Data("digits"), Protocol(base=8, steps=1, memory="4"), QUICK)
    result = run(one, tmp_path / "a", Machine(device="cpu"))
    assert find_methods()["keep-features"] is toy
    assert result["run"]["method"]["name"] == "keep-features"
    assert (result["run"]["method"]["w"], result["run"]["method"]["remedy"]["name"]) == (5.0, "meta")
    assert Learner.load(tmp_path / "a" / "model").method == one.method


def test_the_toy_method_is_a_word_of_the_command_line(
    toy: type[Method], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["run", "keep-features", "--w", "2", "--remedy", "balanced", "--dataset", "digits", "--steps", "1"]
    assert run_command([*words, "--epochs", "1", "--store", "none", "--out", str(tmp_path / "a")]) == 0
    assert Learner.load(tmp_path / "a" / "model").method == toy(Balanced(), w=2.0)  # type: ignore[call-arg]
    run_command(["run", "keep-features", "--help"])
    assert re.search(r"--w FLOAT +weight of the second term \(default: 5.0\)", capsys.readouterr().out)


def test_all_that_can_be_changed_in_a_method_is_in_the_document() -> None:
    text = (ROOT / "docs/adding-a-method.md").read_text()
    table = text[text.index("## What can be changed") :]
    inner = {
        "check",
        "check_needs",
        "overrides",
        "with_remedy",
        "reset_finetuning",
        "classify",
        "lam",
        "recipe_for",
        "finetuning",
        "refinements",
    }
    names = {name for name in vars(Method) if not name.startswith("_")} - inner
    names -= {"name", "title", "cost", "continues", "herds_unit_length", "check_needs"}
    lacking = {name for name in names if not re.search(rf"`{name}\b", table)}
    assert not lacking


def test_the_readmes_library_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are pasted: they bring their data."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    text = blocks(ROOT / "README.md")[0]
    exec(compile(text, "README.md", "exec", dont_inherit=True), scope)
    shown, score = capsys.readouterr().out, scope["learner"].score(scope["images"], scope["labels"])
    assert "10 classes in 2 steps" in shown and score > 0.8
    loaded = Learner.load("model")
    assert loaded.classes_ == list(range(10)) and loaded.score(scope["images"], scope["labels"]) == score


def test_the_advice_on_remedies_is_from_the_tables() -> None:
    """Each number that the sentences name is in a table of README, and the better one is the larger."""
    text = (ROOT / "README.md").read_text()
    advice = re.search(r"\*\*Which remedy to take\.\*\*.*?\n\n", text, re.S)
    assert advice is not None
    rows = [line for line in text.splitlines() if line.startswith("|")]

    def cell(row: str, number: str) -> bool:
        return any(line.startswith(row) and number in line for line in rows)

    for row, number in (
        ("| 5 | Balanced", "80.60"), ("| 5 | Standard", "39.97"), ("| 5 | Meta", "80.05"), ("| 0 | Balanced", "94.39"),
        ("| 0 | Balanced", "0.00"), ("| 0 | Balanced", "67.34"), ("| 0 | Relaxed", "14.76"), ("| 0 | Relaxed", "60.79"),
        ("| IL-Baseline, Meta", "64.12"), ("| IL-Baseline, Balanced", "62.11"), ("| LUCIR, Relaxed", "59.45"),
        ("| LUCIR, Balanced", "55.63"),
    ):  # fmt: skip
        assert number in advice[0] and cell(row, number), (row, number)
    assert set(re.findall(r"\d+\.\d\d", advice[0])) == {
        "80.60", "39.97", "80.05", "64.12", "62.11", "59.45", "55.63", "94.39", "0.00", "67.34", "14.76", "60.79"
    }  # fmt: skip


def test_the_tutorial_runs_and_says_what_comes_out(
    tmp_path: Path, isolated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block, in one Python. What is printed is compared without its numbers, which differ by machine.

    Of the commands, the first line that is printed.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = (ROOT / "docs/tutorial.md").read_text()
    scope: dict[str, Any] = {}
    printed = []
    for block in blocks(ROOT / "docs/tutorial.md"):
        exec(compile(block, "tutorial.md", "exec", dont_inherit=True), scope)
        printed.append(capsys.readouterr().out)
    printed = [out for out in printed if out]
    for command in re.findall(r"```sh\n(.*?)```", text, re.S)[0].splitlines():
        assert run_command(shlex.split(command)[1:]) == 0, command
    printed += [capsys.readouterr().out.splitlines()[0]]
    assert Path("report/index.html").is_file()
    assert json.loads(Path("one/result.json").read_text())["average_incremental_accuracy"] > 50

    def words(out: str) -> list[str]:
        return re.findall(r"[a-zA-Z_']+", out.replace("cuda", "cpu"))

    shown = re.findall(r"```text\n(.*?)```", text, re.S)
    assert len(shown) == len(printed) == 8
    assert [words(out) for out in shown] == [words(out) for out in printed]

    # What the text says of them.
    table = [[float(x) for x in re.findall(r"([\d.]+)%", line)] for line in printed[3].splitlines()]
    standard, balanced, raised, _, standard_0, balanced_0, relaxed_0 = table
    assert standard[1] < 10 and standard_0[1] < 10, "Standard forgets the first classes"
    assert balanced[0] > standard[0] + 30 and balanced[1] > 80, "Balanced keeps them"
    assert raised[2] > balanced[2] + 10, "a larger α learns more of the new ones"
    assert relaxed_0[2] > balanced_0[2] + 5, "so does Relaxed without memory"
    counts = np.array([[int(n) for n in re.findall(r"\d+", row)] for row in printed[2].splitlines()])
    assert counts.shape == (10, 10) and counts[:5].diagonal().sum() > 0.9 * counts[:5].sum()
    assert counts[9, :8].sum() > counts[9, 9], "most nines are taken for older classes"


def test_the_readme_names_the_two_commands_and_pictures_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", text)
    assert links and all((ROOT / link).exists() for link in links), links


def test_every_flag_of_the_documents_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in find_built_in().items():
        for remedy in kind.remedies or REMEDIES if kind.remedies != () else ["standard"]:
            run_command(["run", name, "--remedy", remedy, "--help"])
        run_command(["run", name, "--help"])
    for verb in (
        "paper",
        "report",
        "bench",
        "show",
        "demo",
        "pack",
        "sweep il-baseline",
        "run lucir --dataset imagenet-subset",
    ):
        run_command([*verb.split(), "--help"])
    helped = set(re.findall(r"--[a-zA-Z][a-zA-Z-]*", capsys.readouterr().out))
    for name in ("README.md", "docs/reproducing.md", "results/README.md", "results/make.sh", "CHANGELOG.md"):
        text = (ROOT / name).read_text().partition("\n## 0.1.0\n")[0]  # what has changed since then is history
        written = set(re.findall(r"--[a-zA-Z][a-zA-Z-]*", text))
        assert written <= helped | {"--version"}, f"{name}: {written - helped}"


def commands_in(path: Path) -> list[str]:
    """The commands for one run that a document shows whole."""
    return re.findall(r"equipoise run [a-z][a-z-]* --[^`\n]*", path.read_text())


def test_every_run_of_the_documents_can_be_parsed() -> None:
    found = [words for name in ("README.md", "docs/reproducing.md") for words in commands_in(ROOT / name)]
    assert len(found) >= 4
    for words in found:
        if "--help" not in words:
            parse_request(shlex.split(words)[2:], "run", Request)


def test_every_link_between_documents_leads_somewhere() -> None:
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("results/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path}: {target}"


def test_the_version_is_the_same_everywhere() -> None:
    version = equipoise.__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version  # type: ignore[index]
