"""Methods, losses and recipes as plain JSON and back, and the hash of such a description."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import methods
from ..data.augment import Crop
from ..engine.device import resolve_device
from ..errors import DataError, EquipoiseError, RunError, UsageError, unknown
from ..losses import LOSSES, Loss
from ..method import Method, Recipe
from ..remedies import as_made
from ..settings import came_later, given

if TYPE_CHECKING:
    from . import Learner

T = TypeVar("T")


def describe(value: Method | Loss | Recipe | Crop, in_full: bool = False) -> dict[str, Any]:
    """The fields of a description, with the name of its kind where there are several.

    Without those that came later and have their default, so that it is the same as it was before; unless `in_full`.
    """
    plain: dict[str, Any] = {"name": value.name} if isinstance(value, (Method, Loss)) else {}
    every = {f.name: getattr(value, f.name) for f in fields(value)}
    for name, one in (every if in_full else given(value)).items():
        if isinstance(one, np.generic):
            one = one.item()
        if isinstance(one, Loss):
            plain[name] = describe(one, in_full)
        else:
            plain[name] = plainly(one) if in_full else list(one) if isinstance(one, tuple) else one
    return plain


def plainly(value: Any) -> Any:
    """A value as JSON has it; what it cannot have in words."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)


def method_from(plain: dict[str, Any]) -> Method:
    """The method that `describe` described; its class must have been imported."""
    rest = as_made(plain).copy()
    loss = dict(rest.pop("loss"))
    kind = loss.pop("name")
    if kind not in LOSSES:
        raise unknown("loss", str(kind), LOSSES)
    name = rest.pop("name")
    if name not in methods.known():
        hint = "if it is your own, import the module that defines it first"
        raise DataError(f"{unknown('method', str(name), methods.known())}; {hint}")
    return _made(methods.known()[name], {**rest, "loss": _made(LOSSES[kind], loss)})


def usual(method: str) -> dict[str, Any]:
    """The defaults of what came later, of a method, a recipe and an augmentation: meant where it is not named."""
    kinds = (methods.known().get(method, Method), Recipe, Crop)
    return {f.name: plainly(f.default) for kind in kinds for f in came_later(kind)}


def recipe_from(plain: dict[str, Any]) -> Recipe:
    """The recipe that `describe` described."""
    return _made(Recipe, plain)


def crop_from(plain: dict[str, Any]) -> Crop:
    """The augmentation that `describe` described."""
    return _made(Crop, plain)


def _made(kind: type[T], values: dict[str, Any]) -> T:
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})  # JSON has no tuples
    except TypeError as error:
        raise DataError(f"not a {kind.__name__} of this version of Equipoise: {error}") from None
    except EquipoiseError as error:
        raise DataError(f"not a {kind.__name__}: {error}") from None


def digest(plain: Any) -> str:
    """A short hash of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def flat(method: Method) -> dict[str, Any]:
    """A method's settings as one level of names, the way the command line has them; absent ones are null."""
    loss = describe(method.loss)
    del loss["name"]
    own = {k: v for k, v in describe(method).items() if k not in ("name", "loss")}
    clash = own.keys() & {f.name for kind in (Recipe, Crop, *LOSSES.values()) for f in fields(kind)}
    if clash:
        raise UsageError(f"{type(method).__name__} has a field {min(clash)!r}, as losses or recipes have: rename it")
    return {
        "method": method.name,
        **own,
        "loss": method.loss.name,
        "alpha": loss.pop("alpha", None),
        "epsilon": loss.pop("epsilon", None),
        **loss,
    }


def settings_of(learner: Learner) -> dict[str, Any]:
    """A learner's settings, as they are saved."""
    return {
        "method": describe(learner.method),
        "memory": str(learner.budget_),
        "select": learner.select,
        "recipe": None if learner.recipe is None else describe(learner.recipe),
        "augment": None if learner.augment is None else describe(learner.augment),
        "normalise": None if learner.normalise is None else [list(map(float, v)) for v in learner.normalise],
        "seed": int(learner.seed),
        "device": learner.device,
        "precision": learner.precision,
    }


def arguments_from(plain: dict[str, Any], device: str | None) -> dict[str, Any]:
    """What to make a learner with that was saved so; on `device`, or where it was if that is here."""
    if device is None:
        try:
            resolve_device(plain["device"])
            device = plain["device"]
        except RunError:
            device = "auto"
    recipe, augment, normalise = plain["recipe"], plain["augment"], plain["normalise"]
    return {
        "method": method_from(plain["method"]),
        "memory": plain["memory"],
        "select": plain["select"],
        "recipe": None if recipe is None else recipe_from(recipe),
        "augment": None if augment is None else crop_from(augment),
        "normalise": None if normalise is None else (normalise[0], normalise[1]),
        "seed": plain["seed"],
        "device": device,
        "precision": plain["precision"],
    }
