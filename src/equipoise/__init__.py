"""Class-incremental learning that stays balanced between old and new classes.

>>> from equipoise import Learner, ILBaseline, Balanced
>>> learner = Learner(ILBaseline(Balanced()), memory=20)
>>> learner.learn(images, labels).learn(more_images, more_labels).predict(images)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.augment import Crop, ResizedCrop
    from .errors import DataError, EquipoiseError, RunError, UsageError
    from .learner import Learner
    from .method import Method
    from .methods.bic import BiC
    from .methods.bounds import FineTuning, Joint
    from .methods.dde import DDE
    from .methods.eeil import EEIL
    from .methods.geodl import GeoDL
    from .methods.icarl import ICaRL
    from .methods.il_baseline import ILBaseline
    from .methods.lucir import LUCIR
    from .methods.lwf import LwF
    from .methods.mnemonics import Mnemonics
    from .methods.ncm import NCM
    from .methods.podnet import PODNet
    from .methods.slda import SLDA
    from .methods.spb import SPB
    from .methods.spb_i import SPBI
    from .methods.spb_m import SPBM
    from .methods.ss_il import SSIL
    from .methods.tpcil import TPCIL
    from .nets import Batch, Out
    from .remedies import (
        Balanced,
        BalancedFinetuning,
        ClassOversampling,
        LossRescaling,
        MemoryOversampling,
        Meta,
        Relaxed,
        Remedy,
        SeparatedSoftmax,
        Standard,
    )
    from .step import CHOOSE, Finetune, Group, Plan, Recipe, Stage, Step

__all__ = [
    "CHOOSE", "DDE", "EEIL", "LUCIR", "NCM", "SLDA", "SPB", "SPBI", "SPBM", "SSIL", "TPCIL", "Balanced",
    "BalancedFinetuning", "Batch", "BiC", "ClassOversampling", "Crop", "DataError", "EquipoiseError", "FineTuning",
    "Finetune", "GeoDL", "Group", "ICaRL", "ILBaseline", "Joint", "Learner", "LossRescaling", "LwF",
    "MemoryOversampling", "Meta", "Method", "Mnemonics", "Out", "PODNet", "Plan", "Recipe", "Relaxed", "Remedy",
    "ResizedCrop", "RunError", "SeparatedSoftmax", "Stage", "Standard", "Step", "UsageError",
]  # fmt: skip
__version__ = "0.2.0"

_METHODS = (
    "bic", "bounds", "dde", "eeil", "geodl", "icarl", "il_baseline", "lucir", "lwf", "mnemonics", "ncm", "podnet",
    "slda", "spb", "spb_i", "spb_m", "ss_il", "tpcil",
)  # fmt: skip
_HOMES = (
    "data.augment",
    "errors",
    "learner",
    "method",
    "nets",
    "remedies",
    "step",
    *(f"methods.{name}" for name in _METHODS),
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing torch takes seconds."""
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f".{home}", __name__)
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
