"""One run: a method on a data set under a protocol, from settings to `result.json`; resumable and idempotent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from .. import files, methods, remedies
from ..data.augment import Crop
from ..data.datasets import Dataset, load, split
from ..data.images import Images
from ..data.inputs import image_shape
from ..data.memory import Budget
from ..data.protocol import class_order, step_sizes
from ..errors import check, unknown
from ..learner import Learner, record
from ..losses import LOSSES
from ..method import Method, Recipe
from ..methods.il_baseline import ILBaseline
from ..settings import given, later
from .environment import UNKNOWN, method_code
from .folder import BASED, FILES, Result, check_run_folder, claim_run_folder, find_result, locked
from .progress import Watch
from .resume import Attempt
from .shared_steps import Store, keys


@dataclass(frozen=True)
class Run:
    """Everything that determines a result. The same object is the flags, the record and the cache key."""

    method: Method = field(default_factory=ILBaseline)
    """how to learn"""
    dataset: str = "cifar100"
    """digits (embedded) or cifar100"""
    base: int | None = None
    """classes of the base step; half of all if none are named"""
    steps: int | None = None
    """steps after the base step; 5 if neither this nor an increment is given"""
    increment: int | None = None
    """classes of each step after the base step, instead of a number of steps"""
    order: str = "1993"
    """order of the classes: a NumPy seed, `natural`, or a file that lists the labels"""
    validation: float = later(0.0)
    """fraction of the training images of every class to set aside and measure on, instead of the test images"""
    memory: str = "20"
    """exemplars kept: 20 of every class, total:2000 in all, 0, or all"""
    select: Literal["herding", "random"] = "herding"
    """how exemplars are chosen"""
    recipe: Recipe | None = None
    """how to optimise; None for the method's own recipe"""
    brightness: float = later(0.0)
    """how much darker or brighter training images become at most, as a fraction; PODNet's own code has 63/255"""
    seed: int = 0
    """of weights, batches, augmentation and everything else that is random"""
    device: str = "auto"
    """auto, cpu or cuda"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""
    engine: Literal["auto", "fused", "compiled", "captured", "eager"] = "auto"
    """how training steps are launched, which changes only their speed: auto is fused on a GPU, eager on a CPU"""


@dataclass(frozen=True)
class Plan:
    """A run made definite: the data in learning order, the steps, and one learner with all settings resolved."""

    run: Run
    """what was asked for"""
    data: Dataset
    """as it was loaded"""
    train: Images
    """on the device; labels are positions in the learning order"""
    test: Images
    """likewise; of a run with validation, the images that were set aside"""
    order: list[int]
    """the data set's labels in learning order"""
    sizes: tuple[int, ...]
    """classes of each step"""
    learner: Learner
    """with nothing learned yet"""
    settings: dict[str, Any]
    """everything that determines the result, as it is recorded"""

    def edges(self, t: int) -> tuple[int, int]:
        """N_{t-1} and N_t."""
        return sum(self.sizes[:t]), sum(self.sizes[: t + 1])

    def keys(self) -> list[str]:
        """The key of the state after each step."""
        s = self.settings
        counts = torch.bincount(self.train.y)[: self.sizes[0]]
        equal = bool((counts == counts[0]).all())
        at_base = self.run.method.at_base() if equal else self.run.method
        always = {k: s[k] for k in ("seed", "device", "precision", "recipe", "method_code")} | {
            # The order in which a CPU adds depends on how many threads it adds with.
            "threads": torch.get_num_threads() if s["device"] == "cpu" else None,
            "data": self.data.fingerprint,
            "augment": s["augment"],
            "normalise": [self.data.mean, self.data.std],
        }
        if s["validation"]:  # else not even its name: the keys are what they were before there was this setting
            always["validation"] = s["validation"]
        base = {"method": record.describe(at_base)}
        later = {"method": record.describe(self.run.method), "memory": s["memory"], "select": s["select"]}
        brought = [self.order[slice(*self.edges(t))] for t in range(len(self.sizes))]
        return list(keys(always, base, later, brought))

    def images_to_train(self) -> list[int]:
        """How many images each step trains on, over all epochs: for the time left."""
        recipe, _ = self.learner.settings_for(image_shape(self.train.x))
        counts = torch.bincount(self.train.y).tolist()
        return training_images(self.run.method, recipe, self.learner.budget_, self.sizes, counts)


def asked(run: Run, classes: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    """What a run asks for, made definite for a data set of that many classes and images of that shape.

    All of it is known without the data. Two runs that agree in it are the same, on whatever machine they are done.
    """
    base = run.base if run.base is not None else classes // 2
    steps = 5 if run.steps is None and run.increment is None else run.steps
    sizes = step_sizes(classes, base, steps, run.increment)
    return {
        **record.flat(run.method),
        "dataset": run.dataset,
        "base": base,
        "steps": len(sizes) - 1,
        "increment": sizes[1],
        "order": run.order,
        "validation": float(run.validation),
        "memory": str(Budget.parse(run.memory)),
        "select": run.select,
        "seed": int(run.seed),
        "recipe": record.describe(run.recipe or run.method.recipe(shape)),
    }


def sizes_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """How many classes each step brings, by settings that `asked` made definite."""
    base, increment, steps = (int(settings[name]) for name in ("base", "increment", "steps"))
    return (base,) + (increment,) * steps


def run_from(settings: Mapping[str, Any]) -> Run:
    """The run that was recorded with these settings; a setting that came later is what it is by default."""
    if settings["loss"] not in LOSSES:
        raise unknown("loss", str(settings["loss"]), LOSSES)
    kinds = methods.named(settings["method"]), LOSSES[settings["loss"]]
    known = {k: v for k, v in settings.items() if v is not None and k != "loss"}
    own, loss = ({f.name: known[f.name] for f in fields(kind) if f.name in known} for kind in kinds)
    method = record.method_from({"name": settings["method"], **own, "loss": {"name": settings["loss"], **loss}})
    same = ("dataset", "base", "steps", "order", "validation", "memory", "select", "seed")
    more = {k: settings[k] for k in same if k in settings}
    brightness = settings.get("augment", {}).get("brightness", 0.0)
    return Run(method, recipe=record.recipe_from(settings["recipe"]), brightness=brightness, **more)


def training_images(
    method: Method, recipe: Recipe, budget: Budget, sizes: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """How many images each step trains on, over all epochs, where class k has counts[k] of them."""
    totals = []
    for t in range(len(sizes)):
        old, now = sum(sizes[:t]), sum(sizes[: t + 1])
        kept = [min(budget.share(old), c) for c in counts[:old]]
        images = remedies.length(method.mitigation, kept, list(counts[old:now]), method.old_share)
        totals.append(recipe.epochs * images if method.learns(t) else 0)
    return totals


def prepare(run: Run, data: Path | None = None, progress: bool = True, loaded: Dataset | None = None) -> Plan:
    """Check everything that can be checked before anything is computed, and load the data unless it is `loaded`."""
    budget = Budget.parse(run.memory)
    check("seed", run.seed, least=0, whole=True)
    check("validation", run.validation, least=0, below=1)
    _learner(run, budget, augment=Crop(brightness=run.brightness))  # a bad one is said before data is looked for
    run = replace(run, seed=int(run.seed), validation=float(run.validation), brightness=float(run.brightness))
    loaded = loaded or load(run.dataset, data, progress)
    classes = len(loaded.classes)
    order = class_order(run.order, classes)
    settings = asked(run, classes, image_shape(loaded.train.x))
    sizes = sizes_of(settings)
    run.method.check_memory(*(budget.share(sum(sizes[:t])) for t in range(1, len(sizes))))
    run.method.check_refit(budget.share(sum(sizes[:2])))
    augment = replace(loaded.augment, brightness=run.brightness)
    learner = _learner(run, budget, augment=augment, normalise=(loaded.mean, loaded.std))
    # Labels become positions in the learning order, in both sets: the classes seen so far are those below N_t.
    position = torch.empty(classes, dtype=torch.long)
    position[torch.tensor(order)] = torch.arange(classes)
    parts = split(loaded, run.validation, run.seed)
    train, test = (Images(part.x, position[part.y]).to(learner.device_) for part in parts)
    settings |= {
        "method_code": method_code(run.method),
        "class_order": order,
        "device": learner.device_.type,
        "precision": "bf16" if learner.bf16_ else "fp32",
        "augment": record.describe(augment),
        "normalise": [list(loaded.mean), list(loaded.std)],
        "data": loaded.fingerprint,
    }
    return Plan(run, loaded, train, test, order, sizes, learner, settings)


def _learner(run: Run, budget: Budget, **more: Any) -> Learner:
    same = {k: getattr(run, k) for k in ("select", "recipe", "seed", "device", "precision", "engine")}
    return Learner(run.method, budget, **same, **more)


def run_name(asked: Run) -> str:
    """A folder name that says the most and is different for different settings."""
    parts = [asked.method.name, asked.method.loss.name, asked.dataset, f"memory-{asked.memory}", f"seed-{asked.seed}"]
    if asked.validation:
        parts.append(f"validation-{asked.validation:g}")
    # Without settings that came later the name is what it was before: such folders are found again.
    settings = [_words(v) if isinstance(v, Method | Recipe) else repr(v) for v in given(asked).values()]
    return "_".join(parts).replace(":", "-") + "_" + record.digest(settings)[:6]


def _words(value: Method | Recipe) -> str:
    """As a dataclass shows itself, but without settings that came later and were not given."""
    return f"{type(value).__qualname__}({', '.join(f'{k}={v!r}' for k, v in given(value).items())})"


def run(
    run: Run,
    out: str | Path,
    *,
    data: Path | None = None,
    store: Store | None = None,
    watch: Watch | None = None,
    checkpoint_every: float = 30.0,
    evaluate_every: int = 0,
) -> Result:
    """Do a run in the folder `out`, or go on with it, or return its recorded result.

    Args:
        run: the settings.
        out: the run's folder; it holds run.json, metrics.jsonl, result.json and the final model, whose labels are the
            data set's.
        data: where the data set lies, if it is not embedded.
        store: where steps are shared with other runs; None to share none.
        watch: who is told of the progress.
        checkpoint_every: seconds between checkpoints; 0 for one at every epoch.
        evaluate_every: epochs between looks at the test (or validation) images on the way, for metrics.jsonl (of
            steps that are trained here, not of reused ones); 0 for none.
    """
    check("checkpoint", checkpoint_every, least=0)
    check("evaluate-every", evaluate_every, least=0, whole=True)
    watch = watch or Watch()
    folder = files.as_folder(out)
    check_run_folder(folder)
    plan = prepare(run, data)
    if (recorded := find_result(folder, plan.settings)) is not None:
        return recorded
    if store is not None and plan.settings["method_code"] == UNKNOWN:
        watch.say("steps are not shared: the source of the method is not in a file")
        store = None
    with locked(folder):
        if (recorded := find_result(folder, plan.settings)) is not None:  # of another process, meanwhile
            return recorded
        claim_run_folder(folder)
        if store is not None:
            store.open()
        files.remove_partials(folder, FILES)
        for inside in (folder / "checkpoint", folder / "model"):
            files.remove_leftovers(inside)
        files.check_saved(folder / "model")  # what would be refused after training is refused now
        files.write_json(folder / "run.json", plan.settings)
        attempt = Attempt(plan, folder, store, watch, checkpoint_every, evaluate_every)
        with attempt.hearing_ctrl_c():
            result = attempt.carry_out()
        plan.learner.rename(dict(enumerate(plan.order))).save(folder / "model")
        files.write_json(folder / "result.json", result)
        files.remove(folder / "checkpoint")
        (folder / BASED).unlink(missing_ok=True)
        return result
