"""What a saved learner does when its files are changed at random: a `DataError`, or the same predictions as before.

    python tests/fuzz.py [COUNT] [SEED]

Three kinds of change in turn: bits and bytes of any file; JSON with other values, sealed anew as somebody would who
knows how; tensors of other shapes, kinds and names, sealed anew as well. In these two a learner may answer otherwise,
since it is another one, but it answers or is refused, in one sentence that names the file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from equipoise import NCM, SLDA, Balanced, BiC, DataError, ILBaseline, Learner, Meta, PODNet, Recipe, UsageError
from equipoise.data import datasets
from equipoise.learner.saved import INFO, name_tensors, seal

DIGITS = datasets.load("digits")
TEST = DIGITS.test.x[:20].numpy()
RECIPE = Recipe(epochs=1, lr=0.05, batch=32)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3.5, 1e308, 2**70, "", "0", "balanced", "\udcff", [], [1], [[0]], {}, {"tuple": [1]},
    {"float": "nan"}, {"name": "lucir"},
)  # fmt: skip


def make_models(folder: Path) -> list[Path]:
    """A few saved learners of several kinds, one of them in the middle of a step."""
    made = []

    def images_of(*classes: int) -> tuple[np.ndarray, list[Any]]:
        which = torch.cat([(DIGITS.train.y == c).nonzero()[:20, 0] for c in classes])
        names = ["zero", 1, ("two", 2), None, 2**60]
        return DIGITS.train.x[which].numpy(), [names[y] for y in DIGITS.train.y[which].tolist()]

    for k, method in enumerate([ILBaseline(Balanced()), ILBaseline(Meta()), PODNet(), NCM(), SLDA(), BiC()]):
        learner = Learner(method, memory=4, recipe=RECIPE).learn(*images_of(0, 1))
        learner.learn(*images_of(2, 3), callback=lambda one, k=k: one.save(folder / f"{k}-under-way"))
        learner.save(folder / str(k))
        made += [folder / str(k)] + ([folder / f"{k}-under-way"] if (folder / f"{k}-under-way").exists() else [])
    return made


def places(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every value within a JSON value: what holds it, and under which key."""
    for key in plain if isinstance(plain, dict) else range(len(plain)) if isinstance(plain, list) else ():
        yield plain, key
        yield from places(plain[key])


def nested(depth: int) -> Any:
    """A label of many tuples within tuples, as it is saved."""
    plain: Any = 0
    for _ in range(depth):
        plain = {"tuple": [plain]}
    return plain


def change_bytes(folder: Path, rng: random.Random) -> None:
    """Flip bits, cut, repeat or insert bytes in one of the files."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    at, kind = rng.randrange(len(data)), rng.randrange(5)
    if kind < 2:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at : at + rng.choice([1, 4, 4096])]
    elif kind == 3:
        data[at:at] = data[: rng.choice([1, 16, 300])]
    else:
        data[at] = rng.randrange(256)
    path.write_bytes(data)


def change_json(folder: Path, rng: random.Random) -> None:
    """Set, delete, swap or move values of the JSON, and seal it anew."""
    info = json.loads((folder / INFO).read_text())
    info.pop("seal")
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        everywhere = list(places(info))
        holder, key = rng.choice(everywhere)
        kind = rng.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 2:
            other, place = rng.choice(everywhere)
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder[key], list):
            holder[key] = holder[key][::-1] + holder[key][:1]
        elif isinstance(holder[key], (int, float)):
            holder[key] = holder[key] * rng.choice([-1, 2, 0.5, 10**6]) + rng.choice([0, 1])
    (folder / INFO).write_bytes(seal(info))


def change_tensors(folder: Path, rng: random.Random) -> None:
    """Drop, rename, reshape or fill tensors, and seal it anew."""
    info = json.loads((folder / INFO).read_text())
    info.pop("seal")
    path = folder / info["tensors"]
    tensors = safetensors.torch.load(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 6])):
        if not tensors:
            break
        name = rng.choice(sorted(tensors))
        value = tensors.pop(name)
        kind = rng.randrange(7)
        if kind == 1:
            tensors[rng.choice([name + "x", "memory.at", "live.chosen", "teacher.mean", "live.pixels"])] = value
        elif kind == 2:
            tensors[name] = value.flatten()[: rng.choice([0, 1, 7])]
        elif kind == 3:
            tensors[name] = value.to(rng.choice([torch.int8, torch.float64, torch.bool, torch.long]))
        elif kind == 4:
            tensors[name] = torch.full_like(value, rng.choice([0, 1, 200, 10**4]) % 128)
        elif kind == 5:
            tensors[name] = value[None]
        elif kind == 6 and value.is_floating_point():
            tensors[name] = value * float("nan")
    data = safetensors.torch.save(tensors)
    digest = hashlib.sha256(data).hexdigest()
    path.unlink()
    (folder / name_tensors(digest)).write_bytes(data)
    (folder / INFO).write_bytes(seal({**info, "tensors": name_tensors(digest), "sha256": digest}))


CHANGES = (change_bytes, change_json, change_tensors)


def fuzz(count: int, seed: int, work: Path) -> Counter[str]:
    """Change, load and predict `count` times; how often what came of it."""
    rng, outcomes = random.Random(seed), Counter[str]()
    models = make_models(work / "models")
    right = {model: Learner.load(model).predict_proba(TEST) for model in models}
    for k in range(count):
        change, model = CHANGES[k % len(CHANGES)], rng.choice(models)
        folder = work / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        change(folder, rng)
        outcome = f"{change.__name__}: {try_to_use(folder, right[model])}"
        outcomes[outcome] += 1
        if outcome.split(": ")[1] not in ("refused", "the same") and (change is change_bytes or "!" in outcome):
            kept = work / f"wrong-{k}"
            shutil.copytree(folder, kept)
            print(f"{k}: {outcome}, kept in {kept}")
    return outcomes


def try_to_use(folder: Path, right: Any) -> str:
    """Load and predict; what came of it, in a word."""
    try:
        learner = Learner.load(folder)
        found = learner.predict_proba(TEST)
        learner.predict(TEST)
    except (DataError, UsageError) as error:  # of usage, where it is to be loaded with a backbone
        return "refused" if str(folder) in str(error) and "\n" not in str(error) else f"! unclear: {str(error)[:200]}"
    except BaseException as error:
        return f"! {type(error).__name__}: {str(error)[:200]}"
    if found.shape == right.shape and np.array_equal(found, right):
        return "the same"
    return "another learner"


def main() -> None:
    """Fuzz as often as was asked for, and fail if anything crashed or answered wrongly."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, of tensors in odd shapes
    count, seed = (int(word) for word in (*sys.argv[1:], *("10000", "0")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as work:
        outcomes = fuzz(count, seed, Path(work))
    for outcome, n in sorted(outcomes.items()):
        print(f"{n:6d}  {outcome}")
    wrong = [o for o in outcomes if "!" in o or o == "change_bytes: another learner"]
    sys.exit(f"{sum(outcomes[o] for o in wrong)} of {count} went wrong" if wrong else 0)


if __name__ == "__main__":
    main()
