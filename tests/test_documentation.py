"""What the documents show is run here: a reader who copies it gets what it says."""

from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import Balanced, Learner, Meta, Method, Out, Recipe, Standard
from equipoise.cli import command
from equipoise.data.datasets import load
from equipoise.methods import known
from equipoise.runs.run import Run, run

ROOT = Path(__file__).parents[1]
QUICK = Recipe(epochs=3, lr=0.05, batch=32)


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Method]]:
    """The toy method of docs/adding-a-method.md, imported as a user's file would be."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "keep_features.py").write_text(blocks(ROOT / "docs/adding-a-method.md")[0])
    sys.path.insert(0, str(folder))
    yield importlib.import_module("keep_features").KeepFeatures
    sys.path.remove(str(folder))


def test_the_toy_method_learns_by_its_formula(toy: type[Method]) -> None:
    data = load("digits").train
    learner = Learner(toy(loss=Balanced()), memory=5, recipe=QUICK, device="cpu")
    first, second = data.of(0, 5), data.of(5, 7)
    learner.learn(first.x, first.y)
    before = learner.logits(first.x).argmax(1)
    assert (before == first.y).float().mean() > 0.8
    learner.learn(second.x, second.y)
    assert learner.classes_ == list(range(7))
    both = data.of(0, 7)
    assert np.mean(learner.predict(both.x) == both.y.numpy()) > 0.5


def test_the_toy_methods_objective_is_what_its_docstring_says(toy: type[Method]) -> None:
    gen = torch.Generator().manual_seed(0)
    z, h, h_old = (torch.randn(6, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    step: Any = type("S", (), {"t": 1, "lam": torch.ones(4, dtype=torch.float64)})()
    value = toy(loss=Standard(), w=3.0).objective(step, y, Out(z, h, [], {}), Out(z, h_old, [], {}))  # type: ignore[call-arg]
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
    assert "nameless" not in known()


def test_the_toy_method_runs_and_records(toy: type[Method], tmp_path: Path) -> None:
    asked = Run(toy(loss=Meta()), dataset="digits", base=8, steps=1, memory="4", recipe=QUICK, device="cpu")
    result = run(asked, tmp_path / "a")
    assert known()["keep-features"] is toy
    assert result["run"]["method"] == "keep-features"
    assert result["run"]["w"] == 5.0
    assert Learner.load(tmp_path / "a" / "model").method == asked.method


def test_the_readmes_library_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = load("digits").train
    first, second = data.of(0, 5), data.of(5, 7)
    scope: dict[str, Any] = {
        "images": first.x.numpy(),
        "labels": first.y.numpy(),
        "more_images": second.x.numpy(),
        "more_labels": second.y.numpy(),
    }
    text = blocks(ROOT / "README.md")[0]
    assert "Learner(" in text
    exec(compile(text, "README.md", "exec", dont_inherit=True), scope)
    loaded = scope["Learner"].load("model")
    assert loaded.classes_ == list(range(7))
    assert (loaded.predict(second.x) == scope["learner"].predict(second.x)).all()


def test_the_readme_names_the_two_commands_and_pictures_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", text)
    assert links and all((ROOT / link).exists() for link in links), links


def test_every_flag_of_the_documents_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        "run podnet",
        "run lucir",
        "run ncm",
        "sweep il-baseline",
        "paper",
        "report",
        "bench",
        "show",
        "demo",
    ):
        command([*words.split(), "--help"])
    helped = set(re.findall(r"--[a-zA-Z][a-zA-Z-]*", capsys.readouterr().out))
    for name in ("README.md", "docs/reproducing.md", "results/README.md"):
        said = set(re.findall(r"--[a-zA-Z][a-zA-Z-]*", (ROOT / name).read_text()))
        assert said <= helped, f"{name}: {said - helped}"


def test_every_link_between_documents_leads_somewhere() -> None:
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("results/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path}: {target}"
