"""What a learner knows, and how that becomes tensors and JSON and back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data.images import Images
from ..data.labels import as_labels, label_from_plain, label_to_plain
from ..data.ragged import Ragged
from ..data.randomness import generator
from ..engine.train import Position
from ..errors import DataError, UsageError, check
from ..method import Method
from ..nets import Net
from ..nets.modules import ModuleBackbone, ModuleSource, make_backbone
from ..step import Shape, Stages


@dataclass
class State:
    """What a learner knows after a step, or in one: everything that the next step depends on."""

    net: Net | None = None
    classes: list[Hashable] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    """classes of each step"""
    shape: Shape | None = None
    """of an image: channels, height, width"""
    exemplars: Images | None = None
    """the memory, with pixels of its own; labels are positions in `classes`"""
    kept: Tensor | None = None
    """the memory, as positions in images that the caller keeps, instead"""
    keeper: str = ""
    """fingerprint of those images"""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """what is learned besides the net, or noted (s.state)"""
    alphas: list[float | None] = field(default_factory=list)
    """the last α of each step"""


@dataclass
class Live:
    """A step under way: the state it is leading to, how far it is, and the data it is about."""

    state: State
    at: Position
    data: str
    """fingerprint of the images and labels"""
    chosen: Tensor | None = None
    """the exemplars, once they are chosen: positions among the step's images, followed by those of the memory"""
    pixels: Tensor | None = None
    """what a method keeps in place of their pixels"""
    teacher: Net | None = None
    """the net as the stage began, where it teaches"""
    stages: Stages = ()
    """of the step"""

    @property
    def net(self) -> Net:
        """The net that is trained."""
        if self.state.net is None:
            raise TypeError("a step under way has a net")
        return self.state.net


def new_net(
    method: Method, shape: Shape, mean: Tensor, std: Tensor, gen: torch.Generator, source: ModuleSource | None = None
) -> Net:
    """A net for images of that shape, with fresh weights and no classes: the method's own, or around a module."""
    # Modules draw their first weights from the global generator; it is left as it was.
    with torch.random.fork_rng(devices=[]):
        backbone = method.backbone(shape) if source is None else make_backbone(source, shape, gen)
        head = method.head(backbone.width)
    if method.needs_maps and isinstance(backbone, ModuleBackbone) and not backbone.gives_maps:
        raise UsageError(
            f"{method.name} compares the outputs of stages, and the backbone gives features only: let it return "
            "(features, [stage outputs]), or take another method"
        )
    backbone.initialise(gen)
    return Net(backbone, head, mean, std)


def place(net: Net, device: torch.device) -> Net:
    """The net on its device; on a GPU with channels last in memory, where bf16 convolutions are fastest."""
    net.to(device)
    if device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def pack(state: State, live: Live | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    if state.exemplars is not None:
        tensors |= pack_exemplars(state.exemplars)
    if state.kept is not None:
        tensors["memory.at"] = state.kept
    info: dict[str, Any] = {"state": _pack("", state, tensors)}
    if live is not None:  # its memory is the one above: a step changes it only when it ends
        tensors |= {f"momentum.{k}": v for k, v in live.at.momentum.items()}
        tensors |= {f"live.{k}": v for k in ("chosen", "pixels") if (v := getattr(live, k)) is not None}
        if live.teacher is not None:
            tensors |= {f"teacher.{k}": v for k, v in live.teacher.state_dict().items()}
        info["live"] = {
            "state": _pack("live.", live.state, tensors),
            "stage": live.at.stage,
            "epoch": live.at.epoch,
            "seconds": live.at.seconds,
            "data": live.data,
        }
    return tensors, info


def unpack(
    tensors: dict[str, Tensor], info: dict[str, Any], method: Method, device: torch.device, source: ModuleSource | None
) -> tuple[State, Live | None]:
    """The inverse of `pack`, on a device."""
    tensors = {k: v.to(device) for k, v in tensors.items()}
    state = _unpack("", info["state"], tensors, method, device, source)
    if "live" not in info:
        return state, None
    plain = info["live"]
    coming = _unpack("live.", plain["state"], tensors, method, device, source)
    live = Live(coming, Position(), plain["data"], tensors.get("live.chosen"), tensors.get("live.pixels"))
    # Copied into tensors like the weights, so that both are laid out in memory alike.
    like = dict(live.net.named_parameters()) | {f"state.{k}": v for k, v in coming.extra.items()}
    saved = _under("momentum.", tensors)
    momentum = {k: torch.zeros_like(w).copy_(saved[k].view_as(w)) for k, w in like.items() if k in saved}
    for name in ("stage", "epoch"):
        check(name, plain[name], least=0, whole=True)
    live.at = Position(plain["stage"], plain["epoch"], float(plain["seconds"]), momentum)
    if weights := _under("teacher.", tensors):
        live.teacher = _net(weights, len(coming.classes), coming.shape, method, device, source)
    return state, live


def _pack(prefix: str, state: State, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if state.net is not None:
        tensors |= {f"{prefix}net.{k}": v for k, v in state.net.state_dict().items()}
    tensors |= {f"{prefix}extra.{k}": v for k, v in state.extra.items()}
    return {
        "classes": [label_to_plain(c) for c in state.classes],
        "sizes": list(state.sizes),
        "shape": state.shape,
        "alphas": state.alphas,
        "keeper": state.keeper,
    }


def _unpack(
    prefix: str, plain: dict[str, Any], tensors: dict[str, Tensor], method: Method, device: torch.device,
    source: ModuleSource | None,
) -> State:  # fmt: skip
    if plain["sizes"] == [] == plain["classes"]:
        return State()
    check_state(plain, finished=not prefix)
    channels, height, width = plain["shape"]
    shape = (channels, height, width)
    classes = as_labels([label_from_plain(c) for c in plain["classes"]], len(plain["classes"]))
    if len(set(classes)) < len(classes):
        raise DataError("two classes have the same label")
    net = _net(_under(f"{prefix}net.", tensors), len(classes), shape, method, device, source)
    exemplars = unpack_exemplars(tensors, shape, len(classes)) if "memory.x" in tensors else None
    extra = _under(f"{prefix}extra.", tensors)
    sizes, alphas = tuple(plain["sizes"]), list(plain["alphas"])
    kept = tensors.get("memory.at")
    return State(net, classes, sizes, shape, exemplars, kept, plain["keeper"], extra, alphas)


def check_state(plain: dict[str, Any], finished: bool) -> None:
    """Refuse numbers that do not fit together; a step that is not finished has no α yet."""
    sizes, shape, alphas = plain["sizes"], plain["shape"], plain["alphas"]
    for size in (*sizes, *shape):
        check("a number of classes or of pixels", size, least=1, whole=True)
    for alpha in alphas:
        check("alpha", 1 if alpha is None else alpha, least=0)
    if len(shape) != 3 or sum(sizes) != len(plain["classes"]) or len(alphas) != len(sizes) - (not finished):
        raise DataError("its numbers of classes and steps do not fit together")
    if not isinstance(plain["keeper"], str):
        raise DataError("keeper is not the name of images")


def pack_exemplars(exemplars: Images) -> dict[str, Tensor]:
    """Pixels and labels; of images of different sizes, the pixels one after the other, and the sizes."""
    x = exemplars.x
    if not isinstance(x, Tensor):
        return {"memory.x": x.compact().pixels, "memory.size": x.size, "memory.y": exemplars.y}
    return {"memory.x": x, "memory.y": exemplars.y}


def unpack_exemplars(tensors: dict[str, Tensor], shape: Shape, classes: int) -> Images:
    """The inverse of `pack_exemplars`, for nets that see images of this shape."""
    pixels, size, y = tensors["memory.x"], tensors.get("memory.size"), tensors["memory.y"]
    if size is None:
        x: Tensor | Ragged = pixels
    elif size.dtype != torch.long or size.shape != (len(y), 2) or bool((size < 1).any()):
        raise DataError("its exemplars have no sizes")
    else:
        x = Ragged.pack(pixels, size, shape[1])
        if pixels.dtype != torch.uint8 or pixels.shape != (int(x.bytes.sum()),):
            raise DataError("its exemplars have other sizes than pixels")
    if x.shape[1:] != shape or not is_memory(y, classes):
        raise DataError("its exemplars are not images of its classes")
    return Images(x, y)


def is_memory(y: Tensor, classes: int) -> bool:
    """Whether these can be the labels of exemplars."""
    whole = y.dtype == torch.long and y.ndim == 1
    return whole and (not len(y) or (int(y.min()) >= 0 and int(y.max()) < classes))


def _net(
    weights: dict[str, Tensor], classes: int, shape: Shape | None, method: Method, device: torch.device,
    source: ModuleSource | None,
) -> Net:  # fmt: skip
    """A frozen net with these weights."""
    if shape is None:
        raise ValueError("a net has a shape of images")
    net = new_net(method, shape, weights["mean"], weights["std"], generator(0), source)
    check_weights(weights, net)
    net.head.widen(classes, generator(0))
    net = place(net, device)
    net.load_state_dict(weights)
    return net.eval().requires_grad_(False)


def check_weights(weights: dict[str, Tensor], net: Net) -> None:
    """Refuse the weights of another backbone than that of the net."""
    own = {f"backbone.{name}": value.shape for name, value in net.backbone.state_dict().items()}
    found = {name: value.shape for name, value in weights.items() if name.startswith("backbone.")}
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            raise DataError(f"its backbone is not the one that was given: they differ in {name}")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
