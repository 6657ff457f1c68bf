"""Any torch module as a backbone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import UsageError, format_count, get_first_line
from .backbones import Backbone

ModuleSource = nn.Module | Callable[[], nn.Module]
"""a module, which is copied, or a function (or class) that makes one"""


class ModuleBackbone(Backbone):
    """A module that gives features (images, width) for normalised images, or those and a list of stage outputs.

    Its weights begin as they came. Those that need no gradient stay as they are, and so do the statistics of batch
    norms that they are of.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.module = module
        h, maps = self.try_out(shape)
        self.width, self.gives_maps = h.shape[1], bool(maps)
        # Read now: a learner freezes and unfreezes weights as it goes.
        self.frozen = frozenset(name for name, w in self.named_parameters() if not w.requires_grad)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.still = [m for m in norms if m.affine and not m.weight.requires_grad]
        self.check_weights()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The features and the stage outputs of a batch, if there are any."""
        found = self.module(x)
        return (found, []) if isinstance(found, Tensor) else (found[0], list(found[1]))

    def initialise(self, gen: torch.Generator) -> None:
        """Nothing: the weights are the module's."""

    def train(self, mode: bool = True) -> Self:
        """Train mode, but for frozen batch norms."""
        super().train(mode)
        for norm in self.still:
            norm.eval()
        return self

    def try_out(self, shape: tuple[int, int, int]) -> tuple[Tensor, list[Tensor]]:
        """What it gives for two black images; refused if that is not features."""
        size = f"{shape[1]} x {shape[2]} with {format_count(shape[0], 'channel')}"
        try:
            with torch.no_grad():
                found = self.module.eval()(torch.zeros(2, *shape))
        except Exception as error:  # of the user's code: whatever it is
            raise UsageError(f"the backbone fails on images of {size}: {get_first_line(error)}") from error
        h, maps = found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, [])
        if not is_batch(h, 2):
            what = tuple(h.shape) if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise UsageError(
                "the backbone must give features (images, width), or a pair of those and a list of stage outputs; of "
                f"2 images of {size} it gives {what}. nn.AdaptiveAvgPool2d(1) and nn.Flatten() make features of maps"
            )
        if not all(is_batch(one, 4) for one in maps):
            raise UsageError("the stage outputs of a backbone must be (images, channels, height, width)")
        return h, list(maps)

    def check_weights(self) -> None:
        """Refuse weights that could not be saved."""
        for name, value in self.module.state_dict().items():
            if not isinstance(value, Tensor):
                raise UsageError(f"the backbone keeps {name}, which is no tensor and could not be saved")
        every = [w for _, w in self.module.named_parameters(remove_duplicate=False)]
        if len({id(w) for w in every}) < len(every):
            raise UsageError("the backbone has the same weights in two places, and could not be saved: copy them")


def is_batch(value: Any, ndim: int) -> bool:
    """Whether this is what a net gives for two images, in so many dimensions."""
    return (
        isinstance(value, Tensor)
        and value.ndim == ndim
        and len(value) == 2
        and value.numel() > 0
        and value.is_floating_point()
    )


def make_backbone(source: ModuleSource, shape: tuple[int, int, int], gen: torch.Generator) -> ModuleBackbone:
    """A backbone of a fresh module: weights that it draws are of the seed of `gen`.

    To be called where the global generator is put back, since modules draw from that.
    """
    torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=gen)))
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise UsageError(f"backbone must make a torch module, not a {type(module).__name__}")
    if any(value.is_meta for value in (*module.parameters(), *module.buffers())):
        raise UsageError("the backbone is on the meta device, where weights have no numbers: make it on the CPU")
    # A function may return the same module every time: each net has weights of its own.
    return ModuleBackbone(copy.deepcopy(module).to("cpu", torch.float32), shape)
