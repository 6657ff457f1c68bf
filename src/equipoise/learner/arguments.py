"""The arguments of a learner: checked, saved as JSON and read again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .. import methods
from ..data.augment import Augment, read_augment
from ..engine.device import resolve_device
from ..errors import DataError, RunError, UsageError, check, check_choice, format_count
from ..method import Method
from ..nets.modules import ModuleSource
from ..remedies import Remedy
from ..settings import from_plain, to_plain
from ..step import Recipe, Shape

FORMAT = 1
"""of saved learners; raised when an older version could not read them"""
KINDS = {"method": Method, "recipe": Recipe}
SAVED = (*KINDS, "augment", "select", "normalise", "seed", "device", "precision")


def check_arguments(
    method: Method | None, recipe: Recipe | None, augment: Augment | None, select: str, seed: int
) -> None:
    """Refuse arguments of a wrong kind."""
    if method is not None and not isinstance(method, Method):
        raise UsageError(f"method must be a Method such as ILBaseline(), not {method!r}")
    if method is not None and not isinstance(method.remedy, Remedy):
        raise UsageError(f"a method's remedy must be a Remedy such as Balanced(), not {method.remedy!r}")
    for f in fields(method) if method is not None else ():
        if callable(getattr(Method, f.name, None)):
            words = f"{type(method).__name__} has a field {f.name}, which is a function of every method: rename it"
            raise UsageError(words)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a Recipe(), not {recipe!r}")
    if augment is not None and not isinstance(augment, Augment):
        raise UsageError(f"augment must be a Crop() or a ResizedCrop(), not {augment!r}")
    check_choice("select", select, "herding", "random")
    check("seed", seed, least=0, whole=True)


def check_backbone(backbone: Any) -> None:
    """Refuse what neither is a module nor makes one."""
    if backbone is not None and not callable(backbone):
        raise UsageError(f"backbone must be a torch module or a function that makes one, not {backbone!r}")


def check_same_source(path: str | Path, saved: object, backbone: ModuleSource | None) -> None:
    """Refuse to load a learner without the backbone it was made with, or with one where it had none."""
    check_backbone(backbone)
    if not isinstance(saved, str | None):
        raise DataError(f"{path} is not a learner that this version can read: its backbone is no name")
    if saved is not None and backbone is None:
        raise UsageError(f"{path} was learned with a backbone of its own, {saved}: load it with backbone=... as well")
    if saved is None and backbone is not None:
        raise UsageError(f"{path} was learned with the method's own backbone: load it without backbone=...")


def name_source(backbone: ModuleSource) -> str:
    """What a backbone of the user's is called."""
    return getattr(backbone, "__name__", type(backbone).__name__)


def describe(learner: Any) -> dict[str, Any]:
    """The arguments of a learner as they are saved, in a format of their own."""
    settings = {name: to_plain(getattr(learner, name)) for name in SAVED}
    settings |= {"memory": str(learner.budget_), "device": str(learner.device)}
    settings["backbone"] = None if learner.backbone is None else name_source(learner.backbone)
    return {"format": FORMAT, "learner": settings}


def check_format(info: Mapping[str, Any]) -> None:
    """Refuse what another version saved."""
    if info["format"] != FORMAT:
        raise DataError(f"saved in format {info['format']}; this version reads format {FORMAT}")


def read_arguments(plain: Mapping[str, Any], device: str | torch.device | None) -> dict[str, Any]:
    """The arguments that were saved so; on `device`, or where it was if that is here."""
    if device is None:
        try:
            resolve_device(plain["device"])
            device = plain["device"]
        except RunError:
            device = "auto"
    made: dict[str, Any] = {
        k: None if plain[k] is None else from_plain(v, plain[k], methods.KINDS) for k, v in KINDS.items()
    }
    made["augment"] = None if plain["augment"] is None else read_augment(plain["augment"])
    same = {name: plain[name] for name in ("memory", "select", "seed", "precision")}
    normalise = None if plain["normalise"] is None else tuple(plain["normalise"])
    return {**same, **made, "normalise": normalise, "device": device}


def find_new_classes(names: Sequence[Hashable], known: Sequence[Hashable]) -> list[Hashable]:
    """The classes of a step, sorted where they can be; none of them is known already."""
    new, old = list(dict.fromkeys(names)), set(known)
    again = [name for name in new if name in old]
    if again:
        raise UsageError(f"already learned: {', '.join(map(repr, again[:5]))}; each class comes in one step only")
    if not known and len(new) < 2:
        raise UsageError("the first step needs at least two classes")
    try:
        return sorted(new)  # type: ignore[type-var]
    except TypeError:  # labels of mixed kinds stay in the order they came
        return new


def check_shape(shape: Shape, known: Shape | None) -> None:
    """Refuse images of another shape than those learned first."""
    if known is not None and shape != known:
        words = (f"{h} x {w} with {format_count(c, 'channel')}" for c, h, w in (shape, known))
        raise UsageError("images are {}, but those learned first were {}".format(*words))
