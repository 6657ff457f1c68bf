"""Class-incremental learning that stays balanced between old and new classes.

>>> from equipoise import Learner, ILBaseline, Balanced
>>> learner = Learner(ILBaseline(loss=Balanced()), memory=20)
>>> learner.learn(images, labels).learn(more_images, more_labels).predict(images)
"""

from .augment import Crop
from .errors import DataError, EquipoiseError, RunError, UsageError
from .learner import Learner
from .losses import Balanced, Meta, Relaxed, Standard
from .method import Method, Out, Recipe, Step
from .methods.il_baseline import ILBaseline

__all__ = [
    "Balanced",
    "Crop",
    "DataError",
    "EquipoiseError",
    "ILBaseline",
    "Learner",
    "Meta",
    "Method",
    "Out",
    "Recipe",
    "Relaxed",
    "RunError",
    "Standard",
    "Step",
    "UsageError",
]
__version__ = "0.1.0"
