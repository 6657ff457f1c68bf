"""Learner: the user's door. It meets new classes over time, keeps the old ones, and predicts at any moment."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from .. import files
from ..data.augment import Augment, Crop, fit_pixels
from ..data.images import Images
from ..data.inputs import Statistics, as_statistics, check_statistics
from ..data.memory import Budget
from ..engine.cuda_graph import Engine
from ..engine.device import reset_torch_settings, resolve_device, resolve_engine, resolve_precision
from ..engine.train import Callbacks, Conditions, Epoch, Position, fit
from ..errors import UsageError, check_choice
from ..method import Method
from ..methods.il_baseline import ILBaseline
from ..nets.backbones import choose_scale
from ..nets.modules import ModuleSource
from ..step import Recipe, Shape, Stage, Step, plan_for
from . import saved
from .arguments import check_arguments, check_backbone, check_format, check_same_source, describe, read_arguments
from .predictor import Predictor
from .progress import Progress
from .state import Live, State, pack, unpack
from .step import Before, check_position, gather, other_data, plan_step, read_images
from .words import write_learner

ENTERING = threading.Lock()
"""held while a learner is asked whether it is learning"""


class Learner(Predictor):
    """A classifier that learns class after class.

    >>> learner = Learner(ILBaseline(Balanced()), memory=20)
    >>> learner.learn(images, labels).learn(more_images, more_labels).predict(images)

    `learn` either finishes or leaves the learner as it was. All settings are stored unchanged; what is learned
    ends in an underscore.
    """

    def __init__(
        self,
        method: Method | None = None,
        memory: int | str | Budget = 20,
        *,
        backbone: ModuleSource | None = None,
        select: Literal["herding", "random"] = "herding",
        recipe: Recipe | None = None,
        augment: Augment | None = None,
        normalise: Statistics | None = None,
        seed: int = 0,
        device: str | torch.device = "auto",
        precision: str = "auto",
        engine: str = "auto",
    ) -> None:
        """Settings.

        Args:
            method: how to learn; IL-Baseline with the balanced loss is `ILBaseline(Balanced())`.
            memory: exemplars to keep: 20 of every class, "total:2000" in all, or 0.
            backbone: a torch module, which is copied, or a function that makes one; None for the method's own. Of
                normalised images (n, channels, height, width), 32-bit floats, it gives features (n, width), or a pair:
                those, and a list of stage outputs. All its weights are trained but those that need no gradient.
            select: how exemplars are chosen.
            recipe: how to optimise; None for the method's own recipe for images of that size.
            augment: crop and flip; None for shifts by an eighth and mirroring (tiny images: one pixel, no mirror).
                ResizedCrop(224) for colour images of different sizes, in a list: boxes are cut out and resized.
            normalise: mean and standard deviation per channel, pixels counted from 0 to 1; None to measure
                them on the first images that are learned.
            seed: of everything random.
            device: auto, cpu or cuda, or a torch.device.
            precision: auto (bf16 on a GPU that has it), fp32 or bf16.
            engine: how training steps are launched, which changes only their speed: auto, fused, compiled, captured,
                eager.
        """
        check_arguments(method, recipe, augment, select, seed)
        check_backbone(backbone)
        check_statistics(normalise)
        self.method = ILBaseline() if method is None else method
        self.memory = memory
        self.backbone = backbone
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
        self._engines: dict[str, Engine] = {}  # that were used, by stage
        self.progress_: Epoch | None = None
        self.state_ = State()
        self._live: Live | None = None
        self._learning = False
        self.method.check(self.budget_.share(1))

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not in the middle of `learn`, even if it was made there."""
        return {**self.__dict__, "_learning": False}

    def __repr__(self) -> str:
        return write_learner(self)

    @property
    def engine_used_(self) -> Engine:
        """How training steps were launched: not by the requested engine where that does not support the model."""
        return next(iter(self._engines.values()), self.engine_)

    # Learning -----------------------------------------------------------------------------------------------

    def learn(
        self,
        images: Any,
        labels: Any,
        callback: Callable[[Learner], None] | None = None,
        tick: Callable[[float], None] | None = None,
        verbose: bool | None = None,
    ) -> Self:
        """Learn the classes of these images beside those already known.

        Args:
            images: uint8, numpy or torch, (n, height, width, channels), (n, channels, height, width) or
                (n, height, width). Or `Images` on the learner's device whose labels count the classes in learning
                order: they stay where they are, and exemplars are positions in them until `own_exemplars`.
            labels: as many labels, of any hashable kind, none of a class already learned. Of `Images`, the classes to
                learn, such as range(50, 60).
            callback: called at the end of every epoch with the learner, which can predict and be saved then;
                `learner.progress_` says where it is. It does not change what is learned.
            tick: called after every batch with the epochs of the stage done so far, such as 2.25.
            verbose: whether to show on standard error how long it will take here and how far it is; None to do so
                in a terminal only.
        """
        check_choice("verbose", verbose, None, True, False)
        for name, function in (("callback", callback), ("tick", tick)):
            if function is not None and not callable(function):
                raise UsageError(f"{name} must be a function, not {function!r}")

        def on_epoch(epoch: Epoch) -> None:
            self.progress_ = epoch
            if callback is not None:
                callback(self)

        interrupted = self._live
        with self._alone(), reset_torch_settings(self.device_):
            try:
                before, self._live = self._open(images, labels)
                with Progress(before, self._live, verbose) as progress:
                    self._train(before, self._live, progress.watch(Callbacks(on_epoch, tick or (lambda epochs: None))))
                self.state_, self._live = self._live.state, None
            except BaseException:
                self._live = interrupted
                raise
            finally:
                self.progress_ = None
        return self

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing else may be learned until the block is left, neither by a callback nor by another thread."""
        with ENTERING:
            if self._learning:
                words = "learn is under way, around this callback or in another thread: call it when that has returned"
                raise UsageError(words)
            self._learning = True
        try:
            yield
        finally:
            self._learning = False

    def _train(self, before: Before, live: Live, tell: Callbacks) -> None:
        """The stages of a step that are not done yet, then its end."""
        for k, stage in enumerate(live.stages):
            if k < live.at.stage:
                continue
            if k > live.at.stage:
                live.at, live.teacher = Position(k), None
            if isinstance(stage, str):
                live.chosen = before.choose(live, self.select)
            elif before.has_images(stage, live):
                method, s, on = self._enter(before, live, stage)
                self._engines[stage.name] = fit(method, s, stage, live.at, on, tell)
                before.leave(method, s, stage, live)
        before.finish(live)

    def _open(self, images: Any, labels: Any) -> tuple[Before, Live]:
        """What the step is made from, and where it stands: at its beginning, or where it was stopped."""
        old = self.state_
        data, new, where = read_images(images, labels, old, self._live, self.device_, self.augment)
        everything, memory = gather(data, old)
        plan = plan_step(old, len(new), everything, torch.cat([where, memory]), self.budget_, self.recipe)
        stays = isinstance(images, Images) and everything is data
        before = Before(self.method, old, plan, everything, where, memory, stays, self.seed, self.backbone)
        fingerprint = data.fingerprint(where)
        if self._live is not None:
            if fingerprint != self._live.data:
                raise other_data(old)
            return before, replace(copy.deepcopy(self._live), stages=before.stages)
        if old.sizes:
            self.method.check(self.budget_.share(len(old.classes)))
        if len(where) + len(before.memory) < 2:
            raise UsageError("a step needs at least two images to train on")
        given = None if self.normalise is None else as_statistics(self.normalise, data.x.shape[1])
        return before, replace(before.begin(new, given, fingerprint), stages=before.stages)

    def _enter(self, before: Before, live: Live, stage: Stage) -> tuple[Method, Step, Conditions]:
        """A stage from where it stands: the method, what it may see, and how it is computed."""
        method, s = before.enter(live, stage)
        # An engine that failed is neither tried nor warned of again in every step.
        engine = self._engines.get(stage.name, self.engine_used_)
        requested = self.engine == engine and stage.name not in self._engines
        return method, s, Conditions(self.seed, self.crop_for(s.shape), self.bf16_, engine, requested)

    def own_exemplars(self, images: Images) -> Self:
        """Take over the pixels of exemplars that are positions in these images."""
        if self.state_.kept is not None:
            own = images[self.state_.kept].compact()
            self.state_.exemplars, self.state_.kept = replace(own, x=fit_pixels(own.x, self.augment)), None
        return self

    def crop_for(self, shape: Shape) -> Augment:
        """The augmentation of images of that shape."""
        tiny = choose_scale(shape) == "tiny"
        return self.augment or (Crop(pad=1, flip=False) if tiny else Crop(pad=max(shape[1:]) // 8))

    def recipe_for(self, shape: Shape) -> Recipe:
        """How the base step is optimised on images of that shape."""
        return self.recipe or self.method.recipe(plan_for(shape))

    # Saving -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, note: dict[str, Any] | None = None) -> None:
        """Save into the folder `path`: safetensors and JSON, replaced as one. In a callback, with the step so far.

        A learner saved in a callback goes on where it was: load it and call `learn` with the same data.
        `note` is kept beside it for the caller.
        """
        tensors, info = pack(self.state_, self._live)
        saved.save(files.as_folder(path), tensors, {**describe(self), **info, "note": note})

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device | None = None, backbone: ModuleSource | None = None
    ) -> Learner:
        """The learner saved in the folder `path`, on `device` or else where it was, if there is such a device here.

        Never executes code of the folder; a learner with a `backbone` of yours is given that again.
        """
        if device is not None:
            resolve_device(device)
        tensors, info = saved.load(files.as_folder(path))
        with saved.readable(path):
            check_format(info)
            arguments, own = read_arguments(info["learner"], device), info["learner"]["backbone"]
        check_same_source(path, own, backbone)
        with saved.readable(path):
            learner = cls(**arguments, backbone=backbone)
            with reset_torch_settings(learner.device_):
                learner._take(tensors, info)
                learner.check_that_it_answers()
        return learner

    def restore(self, path: str | Path, check_note: Callable[[Any], None] = lambda note: None) -> Any:
        """Take over what was learned by the learner saved in `path`, but keep these settings; returns its note.

        `check_note` may refuse the note by a `DataError`, before anything is taken over.
        """
        tensors, info = saved.load(Path(path))
        with saved.readable(path), reset_torch_settings(self.device_):
            check_format(info)
            check_note(info["note"])
            self._take(tensors, info)
            return info["note"]

    def _take(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        state, live = unpack(tensors, info, self.method, self.device_, self.backbone)
        if live is not None:
            check_position(live, self.method, self.budget_, self.recipe)
        self.state_, self._live = state, live
