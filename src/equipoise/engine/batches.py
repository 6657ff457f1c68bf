"""Batches of fixed shape, prepared on the device: the loop transfers nothing during an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..data.augment import Augment, AugmentedEpoch, Normalisation
from ..data.images import Images
from ..data.randomness import generator
from ..method import Method
from ..nets import Net
from ..step import Embed, More, Step
from .pixels import count_numbers, cut, cut_normalised, settle

Order = Callable[[int], Tensor]
"""positions of the images of the k-th epoch"""
Draw = Callable[[tuple[int, int], int], Tensor]
"""random numbers for the augmentation of (batches, images); the second argument names the generator"""
Arrange = Callable[[Tensor, int], Tensor]
"""batches in another order; the second argument names the generator"""


class Table:
    """Batches as positions, the random numbers of their augmentation, what follows from these, and a counter."""

    def __init__(self, images: Images, crop: Augment, most: int, size: int) -> None:
        self.images, self.crop, self.size = images, crop, size
        device = images.y.device
        self.which = torch.zeros(most, size, dtype=torch.long, device=device)
        self.drawn = torch.zeros(most, size, crop.random_numbers, dtype=torch.long, device=device)
        count = count_numbers(crop, images.x)
        self.settled = self.drawn.new_zeros(most, size, count) if count else self.drawn
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.normalisation: Normalisation | None = None
        """if set, the images come normalised"""

    def lay_out(self, batches: Tensor, drawn: Tensor) -> None:
        """Set the next batches: positions (batches, size) and random numbers."""
        self.which[: len(batches)].copy_(batches)
        self.drawn[: len(batches)].copy_(drawn)
        if self.settled is not self.drawn:
            self.settled[: len(batches)].copy_(settle(self.crop, self.images.x, batches, drawn))
        self.at.zero_()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the augmented images and the labels of the next batch."""
        which = self.which.index_select(0, self.at)[0]
        settled = self.settled.index_select(0, self.at)[0]
        self.at += 1
        if self.normalisation is not None:
            x = cut_normalised(self.crop, self.images.x, which, settled, self.normalisation)
            return x, self.images.y[which]
        return cut(self.crop, self.images.x, which, settled), self.images.y[which]


class Batches(Table):
    """Batches of equal size cut from a stream of epochs. A batch may span two epochs.

    Any part of the stream can be loaded without what came before.
    """

    def __init__(
        self,
        images: Images,
        crop: Augment,
        size: int,
        order: Order,
        draw: Draw,
        most: int = 0,
        arrange: Arrange = lambda batches, name: batches,
    ) -> None:
        """`most` batches are laid out at a time, by default one epoch's; `arrange` may order all of those anew."""
        self.order, self.draw, self.arrange = order, draw, arrange
        self.length = len(order(0))
        size = min(size, self.length)
        super().__init__(images, crop, most or -(-self.length // size) + 1, size)

    def count_batches(self, epochs: int) -> int:
        """Number of batches in so many epochs, rounded to the nearest."""
        return (2 * epochs * self.length + self.size) // (2 * self.size)

    def load(self, first: int, last: int, name: int) -> Tensor:
        """Lay out the batches first, ..., last - 1; `name` names their random numbers. Returns their positions."""
        batches = self.find(first, last, name)
        if len(batches):
            self.lay_out(batches, self.draw((last - first, self.size), name))
        return batches

    def find(self, first: int, last: int, name: int) -> Tensor:
        """The positions of these batches."""
        begin, end = first * self.size, last * self.size
        epochs = range(begin // self.length, -(-end // self.length))
        if not epochs:
            return self.which[:0]
        stream = torch.cat([self.order(k) for k in epochs])
        begin -= epochs.start * self.length
        return self.arrange(stream[begin : begin + (last - first) * self.size].view(-1, self.size), name)


def find_epoch(sources: Sequence[Batches], epoch: int) -> list[Tensor]:
    """The positions of an epoch's batches: of the stream of batches and, if there is one, of that of short batches."""
    train, *short = sources
    found = train.find(train.count_batches(epoch), train.count_batches(epoch + 1), epoch)
    return [found, *(source.find(epoch, epoch + 1, epoch) for source in short)]


def shuffle(n: int, gen: torch.Generator) -> Tensor:
    """The numbers from 0 to n − 1 in a random order."""
    return torch.randperm(n, generator=gen, device=gen.device)


def join_batches(sources: Sequence[Table], batches: Sequence[Tensor]) -> AugmentedEpoch:
    """The images of the batches that several sources have laid out, as they are augmented."""
    drawn = [source.drawn[: len(which)].flatten(0, 1) for source, which in zip(sources, batches)]
    where = torch.cat([which.flatten() for which in batches])
    return AugmentedEpoch(sources[0].crop, where, torch.cat(drawn))


def remember_epoch(embed: Embed) -> Embed:
    """`embed`, but the features of an epoch are computed once for each net, and then remembered."""
    known: dict[Net, Tensor] = {}

    def embed_once(net: Net, where: Tensor | AugmentedEpoch, view: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if isinstance(where, Tensor) or view is not None:
            return embed(net, where, view)
        if net not in known:
            known[net] = embed(net, where)
        return known[net]

    return embed_once


class SecondStream(Table):
    """The second stream of batches: images of the data set, or pixels in the state that replace the memory's."""

    def __init__(self, s: Step, images: Images, more: More, crop: Augment, most: int) -> None:
        if more.pixels is not None:
            images = Images(s.state[more.pixels], s.images.y[s.memory])
        super().__init__(images, crop, most, more.where.shape[1])
        self.more, self.mean, self.std = more, s.net.mean, s.net.std

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the images, in units of pixels, and the labels of the next batch."""
        x, y = super().next_batch()
        return (x * self.std + self.mean if self.more.normalised else x), y


class SecondStreams:
    """The second stream beside each of several streams of batches, where the method has one."""

    def __init__(self, method: Method, s: Step, stage: str, sources: Sequence[Table], seed: int) -> None:
        self.method, self.s, self.stage, self.sources, self.seed = method, s, stage, sources, seed
        self.made: dict[int, SecondStream] = {}

    def load(self, batches: Sequence[Tensor], epoch: int) -> list[Tensor]:
        """Lay them out beside the batches of an epoch; returns the positions that each batch reads, with theirs."""
        gen = partial(generator, self.seed, self.s.t, self.stage, device=self.s.n.device)
        whole, embed = join_batches(self.sources, batches), remember_epoch(self.s.embed)
        read = [*batches]
        for k, (source, which) in enumerate(zip(self.sources, batches)):
            s, whole = replace(self.s, epoch=whole, embed=embed), replace(whole, first=whole.first + which.numel())
            more = self.method.more(s, which, gen("more", epoch, k)) if len(which) else None
            if more is None:
                continue
            if k not in self.made:
                self.made[k] = SecondStream(self.s, source.images, more, source.crop, len(source.which))
            drawn = more.drawn
            if drawn is None:
                drawn = source.crop.draw(tuple(more.where.shape), gen("augment more", epoch, k))
            self.made[k].lay_out(more.where, drawn)
            read[k] = which if more.pixels is not None else torch.cat([which, more.where], 1)
        return read
