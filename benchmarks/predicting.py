"""Images a second that a ResNet-32 answers to in fp32, by how its weights lie in memory and by the size of a chunk.

`python benchmarks/predicting.py` prints them, and the error of the embeddings against float64.
"""

from __future__ import annotations

import copy
import time

import torch

from equipoise.bench import net_of, synthetic
from equipoise.train import working_on

LAYOUTS = {"last": torch.channels_last, "first": torch.contiguous_format}


def main() -> None:
    """Measure and print."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, chunks = (10_000, (500, 1000, 2500, 5000)) if device.type == "cuda" else (200, (100, 200))
    net = net_of(100, device).eval().requires_grad_(False)
    x = synthetic(images).x.to(device)
    with torch.no_grad(), working_on(device, tuned=False):
        exact = copy.deepcopy(net).double()(x[:100]).h
        for name, layout in LAYOUTS.items():
            laid = copy.deepcopy(net).to(memory_format=layout)  # type: ignore[call-overload]
            error = (laid(x[:100]).h.double() - exact).norm() / exact.norm()
            print(f"channels {name}: error {float(error):.1e}")
            for chunk in chunks:
                for _ in range(3):  # the last counts
                    began = time.perf_counter()
                    h = torch.cat([laid(part).h for part in torch.split(x, chunk)])
                    float(h.sum())  # waits for the GPU
                    seconds = time.perf_counter() - began
                print(f"  {chunk} at a time: {images / seconds:,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
