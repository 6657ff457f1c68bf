"""Images a second that a ResNet-32 answers to in fp32: with weights as they lie in memory, and as `Learner` lays them.

`python benchmarks/predicting.py` prints both, by the number of images that are asked for at once. On a GPU weights lie
with channels last, as bf16 convolutions like it; fp32 ones are faster with channels first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise import ILBaseline, Learner, Recipe
from equipoise.cli.speed import make_images
from equipoise.engine.device import use_device


def speed(answer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Images a second, the best of five times."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        float(answer(x).sum())  # waits for the GPU
        best = min(best, time.perf_counter() - began)
    return len(x) / best


def main() -> None:
    """Measure and print."""
    cuda = torch.cuda.is_available()
    images = make_images(10_000 if cuda else 200)
    learner = Learner(ILBaseline(), memory=0, recipe=Recipe(epochs=1))
    learner.learn(images.x[:128], images.y[:128])
    net = learner.state_.net
    assert net is not None

    def as_they_lie(x: Tensor) -> Tensor:
        with torch.no_grad(), use_device(learner.device_, tuned=False):
            return torch.cat([net(part).z for part in torch.split(x, 1000)])

    x = images.x.to(learner.device_)
    for count in (1, 100, 1000, 10_000) if cuda else (1, 100):
        both = (speed(answer, x[:count]) for answer in (as_they_lie, learner.logits))
        print("{} at once: {:,.0f} images/s as weights lie, {:,.0f} by Learner".format(count, *both), flush=True)


if __name__ == "__main__":
    main()
