"""What is known and how it answers: the half of a learner that does not learn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..data.augment import Augment, fit_pixels
from ..data.images import Images
from ..data.inputs import as_batch, as_pixels, get_image_shape
from ..data.labels import as_array, as_label, as_labels
from ..data.stored import Pixels
from ..engine.predict import compute_outputs
from ..engine.train import Epoch
from ..errors import DataError, UsageError
from ..method import Method
from ..nets import Out
from ..step import Learned
from .arguments import check_shape
from .state import Live, State


class Predictor:
    """Classes that were learned, and predictions of them, also while a step is under way."""

    method: Method
    augment: Augment | None
    state_: State
    progress_: Epoch | None
    """where the stage under way is, in a callback"""
    _live: Live | None

    @property
    def classes_(self) -> list[Hashable]:
        """The labels learned so far (those being learned included), in the order of `predict_proba`'s columns."""
        return list(self._now.classes)

    @property
    def sizes_(self) -> tuple[int, ...]:
        """How many classes each step brought."""
        return self._now.sizes

    @property
    def alphas_(self) -> list[float | None]:
        """The last α of each finished step; None where it was not learned."""
        return list(self._now.alphas)

    @property
    def exemplars_(self) -> Images | None:
        """The memory: images sorted by class, best first; labels are positions in `classes_`."""
        return self.state_.exemplars

    @property
    def unfinished_(self) -> bool:
        """Whether a step is under way, as in a callback or after loading what a callback saved."""
        return self._live is not None

    @property
    def stage_(self) -> str:
        """The training of the step that is under way; empty if none is."""
        stage = self._live.stages[self._live.at.stage] if self._live and self._live.stages else ""
        return stage if isinstance(stage, str) else stage.name

    @property
    def chooses_next_(self) -> bool:
        """Whether the step under way has trained all that comes before the choice of its exemplars."""
        live = self._live
        if live is None or self.progress_ is None or self.progress_.epoch < self.progress_.epochs:
            return False
        after = live.stages[live.at.stage + 1 :]
        return bool(after) and isinstance(after[0], str)

    @property
    def _now(self) -> State:
        return self._live.state if self._live else self.state_

    def rename(self, names: Mapping[Hashable, Hashable]) -> Self:
        """Give classes other labels, such as names for numbers; what is learned stays."""
        if self._live is not None:
            raise UsageError("a step is under way: rename classes before or after it")
        if not isinstance(names, Mapping):
            raise UsageError(f"rename takes a dict from labels to labels, not {names!r}")
        if unknown := [name for name in names if name not in self.state_.classes]:
            raise UsageError(f"there is no class {unknown[0]!r} to rename")
        classes = [as_label(names.get(c, c)) for c in self.state_.classes]
        if len(set(classes)) < len(classes):
            raise UsageError("two classes would have the same label")
        self.state_.classes = classes
        return self

    def logits(self, images: Any) -> Tensor:
        """z of every image (n, classes), fp32, on the learner's device; one image is a batch of it."""
        known, crop = self._now.shape, self.augment
        x = as_pixels(images if known is None else as_batch(images, known, crop), crop)
        check_shape(get_image_shape(x), known)
        if not len(x):
            raise UsageError("there are no images")
        return self.logits_at(x, None)

    def logits_at(self, x: Pixels, where: Tensor | None) -> Tensor:
        """The same of the images at these positions."""
        known = Learned(self._now.sizes, self._now.extra)
        with torch.no_grad():  # while a stage trains what is noted, it has gradients
            return torch.cat([self.method.scores(out, known) for out in self.outputs(x, where)])

    def check_that_it_answers(self) -> None:
        """Refuse what is noted besides the net where it does not fit the net."""
        if self._now.shape is not None:
            x = torch.zeros(1, *self._now.shape, dtype=torch.uint8)
            if (found := self.logits_at(x, None).shape[1]) != len(self.classes_):
                raise DataError(f"it tells {found} classes apart, and has labels for {len(self.classes_)}")

    def outputs(self, x: Pixels, where: Tensor | None = None, chunk: int | None = None) -> Iterator[Out]:
        """The net's output, chunk by chunk, as in prediction."""
        if self._now.net is None:
            raise UsageError("nothing has been learned yet: call learn first")
        return compute_outputs(self._now.net, fit_pixels(x, self.augment), where, self.method.views, chunk=chunk)

    def predict(self, images: Any) -> np.ndarray[Any, Any]:
        """The label of each image, as it was learned; of one image, an array of one label."""
        labels: np.ndarray[Any, Any] = as_array(self._now.classes)[self.logits(images).argmax(1).cpu().numpy()]
        return labels

    def predict_proba(self, images: Any) -> np.ndarray[Any, Any]:
        """The probability of each class of `classes_` for each image: the softmax of the plain logits."""
        z: np.ndarray[Any, Any] = self.logits(images).softmax(1).cpu().numpy()
        return z

    def score(self, images: Any, labels: Any) -> float:
        """The fraction of these images whose label is predicted.

        An image of a class that has not been learned counts as wrong. Where no label at all is a known one, they are
        likely of another kind than those that were learned, such as "3" for 3: that is refused.
        """
        z = self.logits(images)
        index = {label: k for k, label in enumerate(self._now.classes)}
        names = as_labels(labels, len(z))
        found = [index.get(name, -1) for name in names]
        if max(found) < 0:
            known = ", ".join(map(repr, self._now.classes[:5]))
            raise UsageError(f"none of these labels was learned, such as {names[0]!r}: the classes are {known}")
        return (z.argmax(1).cpu() == torch.tensor(found)).double().mean().item()
