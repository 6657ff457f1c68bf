"""Learner: the user's door. It meets new classes over time, keeps the old ones, and predicts at any moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from .. import files
from ..data.augment import Crop
from ..data.images import Images
from ..data.inputs import as_images, as_labels, image_shape
from ..data.memory import Budget
from ..engine.device import resolve_device, resolve_engine, resolve_precision, working_on
from ..engine.train import Epoch
from ..errors import DataError, UsageError, check, check_choice
from ..losses import Loss
from ..method import Method, Recipe
from ..methods.il_baseline import ILBaseline
from ..nets import Out, backbones
from . import record, step
from .state import Live, State, pack, unpack

FORMAT = 1
"""of saved learners; raised when an older version could not read them"""

CHUNK = 1000 * 32 * 32
"""pixels that are predicted at a time, at most"""
FEW = 150
"""images that a GPU answers to sooner with weights as they lie in memory (benchmarks/README.md)"""


class Learner:
    """A classifier that learns class after class.

    >>> learner = Learner(ILBaseline(loss=Balanced()), memory=20)
    >>> learner.learn(images, labels).learn(more_images, more_labels).predict(images)

    `learn` either finishes or leaves the learner as it was. All settings are stored unchanged; what is learned
    ends in an underscore.
    """

    def __init__(
        self,
        method: Method | None = None,
        memory: int | str | Budget = 20,
        *,
        select: Literal["herding", "random"] = "herding",
        recipe: Recipe | None = None,
        augment: Crop | None = None,
        normalise: tuple[Sequence[float], Sequence[float]] | None = None,
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        engine: str = "auto",
    ) -> None:
        """Settings.

        Args:
            method: how to learn; IL-Baseline with the balanced loss is `ILBaseline(loss=Balanced())`.
            memory: exemplars to keep: 20 of every class, "total:2000" in all, or 0.
            select: how exemplars are chosen.
            recipe: how to optimise; None for the method's own recipe for images of that size.
            augment: crop and flip; None for shifts by an eighth and mirroring (tiny images: one pixel, no mirror).
            normalise: mean and standard deviation per channel, pixels counted from 0 to 1; None to measure
                them on the first images that are learned.
            seed: of everything random.
            device: auto, cpu or cuda.
            precision: auto (bf16 on a GPU that has it), fp32 or bf16.
            engine: how training steps are launched, which changes only their speed: auto, fused, compiled, captured,
                eager.
        """
        if method is not None and not isinstance(method, Method):
            raise UsageError(f"method must be a Method such as ILBaseline(), not {method!r}")
        if method is not None and not isinstance(method.loss, Loss):
            raise UsageError(f"a method's loss must be a Loss such as Balanced(), not {method.loss!r}")
        for name, value, kind in (("recipe", recipe, Recipe), ("augment", augment, Crop)):
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name} must be a {kind.__name__}(), not {value!r}")
        check_choice("select", select, "herding", "random")
        check("seed", seed, least=0, whole=True)
        self.method = ILBaseline() if method is None else method
        self.memory = memory
        self.select = select
        self.recipe = recipe
        self.augment = augment
        self.normalise = normalise
        self.seed = seed
        self.device = device
        self.precision = precision
        self.engine = engine
        self.budget_ = memory if isinstance(memory, Budget) else Budget.parse(memory)
        self.device_ = resolve_device(device)
        self.bf16_ = resolve_precision(precision, self.device_)
        self.engine_ = resolve_engine(engine, self.device_)
        self.progress_: Epoch | None = None
        self.state_ = State()
        self._live: Live | None = None
        self._learning = False
        self.method.check_memory(self.budget_.share(1))
        self.method.check_refit(self.budget_.share(1))

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not in the middle of `learn`, even if it was made there."""
        return {**self.__dict__, "_learning": False}

    # What is known ------------------------------------------------------------------------------------------

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
        return self._now.exemplars

    @property
    def unfinished_(self) -> bool:
        """Whether a step is under way, as in a callback or after loading what a callback saved."""
        return self._live is not None

    @property
    def _now(self) -> State:
        return self._live.state if self._live else self.state_

    # Learning -----------------------------------------------------------------------------------------------

    def learn(
        self,
        images: Any,
        labels: Any,
        callback: Callable[[Learner], None] | None = None,
        tick: Callable[[float], None] | None = None,
        refit: Callable[[Epoch], None] | None = None,
    ) -> Self:
        """Learn the classes of these images beside those already known.

        Args:
            images: uint8, numpy or torch, (n, height, width, channels), (n, channels, height, width) or
                (n, height, width).
            labels: as many labels, of any hashable kind, none of a class already learned.
            callback: called at the end of every epoch with the learner, which can predict and be saved then;
                `learner.progress_` says where it is. It does not change what is learned.
            tick: called after every batch with the epochs done so far, such as 2.25, to show that it goes on.
            refit: called at the end of every epoch of a refit on the memory, where the method has one, with what is
                known of it. By then the step's own epochs are over, and the callback is called no more.
        """
        if self._learning:
            raise UsageError("learn was called by its own callback: a step is learned after the other")
        x = as_images(images)
        names = as_labels(labels, len(x))
        if self._live is None:
            names_new = self._new_classes(names, x)
        else:
            names_new = self._now.classes[len(self.state_.classes) :]
        index = {name: len(self.state_.classes) + k for k, name in enumerate(names_new)}
        if any(name not in index for name in names):
            raise self._other_data()
        data = Images(x, torch.tensor([index[name] for name in names])).to(self.device_)
        live = step.begin(self, data, names_new) if self._live is None else self._continue(data)

        before = self._live
        self._live, self._learning = live, True
        try:
            step.train(self, live, data, callback, tick or (lambda epochs: None))
            step.finish(self, live, data, refit or (lambda epoch: None))
            self.state_, self._live = live.state, None
        except BaseException:
            self._live = before
            raise
        finally:
            self.progress_, self._learning = None, False
        return self

    def _new_classes(self, names: list[Hashable], x: Tensor) -> list[Hashable]:
        state = self.state_
        known = set(state.classes)
        new = list(dict.fromkeys(names))
        again = [name for name in new if name in known]
        if again:
            raise UsageError(f"already learned: {', '.join(map(repr, again[:5]))}; each class comes in one step only")
        if state.net is None and len(new) < 2:
            raise UsageError("the first step needs at least two classes")
        self._check_shape(x)
        try:
            return sorted(new)  # type: ignore[type-var]
        except TypeError:  # labels of mixed kinds stay in the order they came
            return new

    def _check_shape(self, x: Tensor) -> None:
        shape, known = image_shape(x), self._now.shape
        if known is not None and shape != known:
            words = ("{1} x {2} with {0} channel(s)".format(*one) for one in (shape, known))
            raise UsageError("images are {}, but those learned first were {}".format(*words))

    def _continue(self, data: Images) -> Live:
        assert self._live is not None
        if data.fingerprint() != self._live.data:
            raise self._other_data()
        return copy.deepcopy(self._live)

    def _other_data(self) -> UsageError:
        return UsageError(
            f"step {len(self.state_.sizes)} is not finished: call learn with the images and labels it was begun with"
        )

    def settings_for(self, shape: tuple[int, int, int]) -> tuple[Recipe, Crop]:
        """The recipe and the augmentation for images of shape (channels, height, width)."""
        tiny = backbones.scale(shape) == "tiny"
        usual = Crop(pad=1, flip=False) if tiny else Crop(pad=max(shape[1:]) // 8)
        return self.recipe or self.method.recipe(shape), self.augment or usual

    def rename(self, names: Mapping[Hashable, Hashable]) -> Self:
        """Give classes other labels, such as names for numbers; what is learned stays."""
        if self._live is not None:
            raise UsageError("a step is under way: rename classes before or after it")
        classes = [names.get(c, c) for c in self.state_.classes]
        if len(set(classes)) < len(classes):
            raise UsageError("two classes would have the same label")
        self.state_.classes = classes
        return self

    # Predicting ---------------------------------------------------------------------------------------------

    def logits(self, images: Any) -> Tensor:
        """z of every image (n, classes), fp32, on the learner's device."""
        state = self._now
        if state.net is None:
            raise UsageError("nothing has been learned yet: call learn first")
        x = as_images(images)
        self._check_shape(x)
        if not len(x):
            raise UsageError("there are no images")
        return torch.cat([self.method.scores(out, state.extra) for out in self.outputs(x)])

    def outputs(self, x: Tensor, chunk: int | None = None) -> Iterator[Out]:
        """The net's output, chunk by chunk, as in prediction; training is left as it was.

        A chunk is 1,000 images of 32 × 32 pixels or less, and fewer larger ones: as many pixels at most.
        """
        net = self._now.net
        assert net is not None
        chunk = chunk or max(1, CHUNK // max(CHUNK // 1000, x.shape[2] * x.shape[3]))
        # In fp32, also where training is in bf16: predicting is cheap, and rounded features choose other exemplars. A
        # GPU has its fast fp32 convolutions for channels that come first in memory, unlike its bf16 ones; weights are
        # laid out so in milliseconds, which a few images do not repay.
        anew = net.named_parameters() if len(x) > FEW else ()
        weights = {name: w.detach().contiguous() for name, w in anew}
        training = net.training
        net.eval()
        try:
            for part in torch.split(x, chunk):
                plain = torch.autocast(self.device_.type, enabled=False)
                with torch.no_grad(), plain, working_on(self.device_, tuned=False):
                    out = functional_call(net, weights, (part.to(self.device_),))
                yield out
        finally:
            net.train(training)

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

    # Saving -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, note: dict[str, Any] | None = None) -> None:
        """Save into the folder `path`: safetensors and JSON, replaced as one. In a callback, with the step so far.

        A learner saved in a callback goes on where it was: load it and call `learn` with the same data.
        `note` is kept beside it for the caller. Files of others in that folder are left alone; a `learner.json` that is
        no saved learner is refused.
        """
        tensors, info = pack(self.state_, self._live)
        files.save(files.as_folder(path), tensors, {"format": FORMAT, **record.settings_of(self), **info, "note": note})

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> Learner:
        """The learner saved in the folder `path`, on `device` or else where it was, if there is such a device here.

        Never executes code.
        """
        tensors, info = files.load(Path(path))
        with files.readable(path):
            learner = cls(**record.arguments_from(info, device))
            learner._take(tensors, info)
        return learner

    def restore(self, path: str | Path) -> Any:
        """Take over what was learned by the learner saved in `path`, but keep these settings; returns its note."""
        tensors, info = files.load(Path(path))
        with files.readable(path):
            self._take(tensors, info)
            return info["note"]

    def _take(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        if info["format"] != FORMAT:
            raise DataError(f"saved in format {info['format']}; this version reads format {FORMAT}")
        self.state_, self._live = unpack(tensors, info, self.method, self.device_)
