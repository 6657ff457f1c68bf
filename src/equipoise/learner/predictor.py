"""What is known and how it answers: the half of a learner that does not learn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.images import Images
from ..data.inputs import as_images, image_shape
from ..engine.predict import outputs
from ..errors import UsageError
from ..method import Method
from ..nets import Out
from ..step import Learned
from .arguments import check_shape
from .state import Live, State


class Predictor:
    """Classes that were learned, and predictions of them, also while a step is under way."""

    method: Method
    state_: State
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
    def _now(self) -> State:
        return self._live.state if self._live else self.state_

    def logits(self, images: Any) -> Tensor:
        """z of every image (n, classes), fp32, on the learner's device."""
        x = as_images(images)
        check_shape(image_shape(x), self._now.shape)
        if not len(x):
            raise UsageError("there are no images")
        return self.logits_at(x, None)

    def logits_at(self, x: Tensor, where: Tensor | None) -> Tensor:
        """The same of the images at these positions."""
        known = Learned(self._now.sizes, self._now.extra)
        with torch.no_grad():  # while a stage trains what is noted, it has gradients
            return torch.cat([self.method.scores(out, known) for out in self.outputs(x, where)])

    def outputs(self, x: Tensor, where: Tensor | None = None, chunk: int | None = None) -> Iterator[Out]:
        """The net's output, chunk by chunk, as in prediction."""
        if self._now.net is None:
            raise UsageError("nothing has been learned yet: call learn first")
        return outputs(self._now.net, x, where, self.method.views, chunk=chunk)

    def predict(self, images: Any) -> np.ndarray[Any, Any]:
        """The label of each image."""
        best = self.logits(images).argmax(1).tolist()
        classes = self.classes_
        kinds = {type(c) for c in classes}
        labels = np.empty(len(best), dtype=object)
        for i, k in enumerate(best):  # one by one: numpy would take a tuple for a row
            labels[i] = classes[k]
        return np.array(labels.tolist()) if kinds in ({int}, {str}, {float}) and len(labels) else labels

    def predict_proba(self, images: Any) -> np.ndarray[Any, Any]:
        """The probability of each class of `classes_` for each image: the softmax of the plain logits."""
        z: np.ndarray[Any, Any] = self.logits(images).softmax(1).cpu().numpy()
        return z
