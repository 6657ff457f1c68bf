"""Where the time of training ResNet-18 at 224 pixels goes, and what would make it faster: kernels, and variants.

    python benchmarks/resnet18.py --profile
    python benchmarks/resnet18.py --variants as-it-is kernels stem stem+sums

Every variant is a whole compiled step as in `equipoise bench --size 224 --rows "resnet18 compiled"`, with the same
weights and, but for rounding, the same results. The profile is of the kernels of a step as it is, by their total time.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from equipoise.cli.large import METHODS, LargeRow, free_memory, make_large_images, measure_training
from equipoise.cli.speed import Setting
from equipoise.engine import train
from equipoise.engine.cuda_graph import Engine
from equipoise.engine.device import resolve_device, resolve_precision, use_device
from equipoise.engine.kernels.resnet18 import Frozen, Training
from equipoise.engine.stand_ins import get_backbones
from equipoise.engine.train import Epoch
from equipoise.errors import get_first_line
from equipoise.nets import Features
from equipoise.nets.backbones import Residual
from equipoise.step import Step


def convolve_on_16_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """ResNet-18's first convolution, 7×7 with stride 2 on 3 channels, as 4×4 without a stride on 12, padded to 16.

    A pixel of the new image is 2×2 of the old one. The kernel is 8×8 with a row and a column of zeros, divided alike.
    """
    w = F.pad(F.pixel_unshuffle(F.pad(conv.weight, (1, 0, 1, 0)), 2), (0, 0, 0, 0, 0, 4))
    x = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1, 0, 4))
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last))


def convolve_on_32_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """PODNet's first convolution, 3×3 on 3 channels, as 1×1 on the 27 numbers that it multiplies, padded to 32."""
    height, width = x.shape[2:]
    x = F.pad(x, (1, 1, 1, 1))
    around = [x[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    w = F.pad(conv.weight.permute(0, 2, 3, 1).reshape(-1, 27), (0, 5))[:, :, None, None]
    x = F.pad(torch.cat(around, 1), (0, 0, 0, 0, 0, 5))
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last))


def wide_stem(self: Residual, x: Tensor) -> Tensor:
    """In place of `Residual.stem`: with as many channels as matrix units multiply at a time."""
    convolve = convolve_on_16_channels if self.conv.kernel_size == (7, 7) else convolve_on_32_channels
    x = F.relu(self.bn(convolve(self.conv, x)))
    return F.max_pool2d(x, 3, 2, 1)


def normalise_by_sums(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """In place of a batch norm's `forward`, in training: variances by sums of squares instead of Welford's way."""
    if not self.training:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    whole, count = x.float(), x.numel() // x.shape[1]
    mean = whole.sum((0, 2, 3)) / count
    var = ((whole * whole).sum((0, 2, 3)) / count - mean * mean).clamp_min(0)
    with torch.no_grad():
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.lerp_(mean, 0.1)
        self.running_var.lerp_(var * (count / (count - 1)), 0.1)
    factor = self.weight * (var + self.eps).rsqrt()
    offset = self.bias - mean * factor
    return (whole * factor[:, None, None] + offset[:, None, None]).to(x.dtype)


def fold_teacher(engine: Engine, s: Step) -> tuple[Features, Features | None]:
    """In place of `get_backbones`: only the student is compiled."""
    student, _ = get_backbones(engine, replace(s, teacher=None))
    if s.teacher is None:
        return student, None
    assert isinstance(s.teacher.backbone, Residual)
    return student, Frozen(s.teacher.backbone, torch.bfloat16 if s.n.is_cuda else torch.float32)


def use_kernels(engine: Engine, s: Step) -> tuple[Features, Features | None]:
    """In place of `get_backbones`: our own kernels between cuDNN's convolutions, and nothing compiled by torch."""
    assert isinstance(s.net.backbone, Residual)
    return Training(s.net.backbone), fold_teacher("captured", s)[1]


@contextlib.contextmanager
def try_all_algorithms() -> Iterator[None]:
    """Let cuDNN try all its algorithms, instead of ten, for each convolution."""
    before = torch.backends.cudnn.benchmark_limit
    torch.backends.cudnn.benchmark_limit = 0
    yield
    torch.backends.cudnn.benchmark_limit = before


def set_inductor(**settings: object) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Settings of torch's compiler."""

    def enter() -> contextlib.AbstractContextManager[object]:
        import torch._inductor.config as config

        return config.patch(settings)

    return enter


VARIANTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "as-it-is": contextlib.nullcontext,
    "algorithms": try_all_algorithms,
    "stem": lambda: patch.object(Residual, "stem", wide_stem),
    "sums": lambda: patch.object(nn.BatchNorm2d, "forward", normalise_by_sums),
    "folded": lambda: patch.object(train, "get_backbones", fold_teacher),
    "kernels": lambda: patch.object(train, "get_backbones", use_kernels),
    "descent": set_inductor(coordinate_descent_tuning=True),
    "autotune": set_inductor(max_autotune_pointwise=True),
}


class Profiled:
    """Profiles the second epoch of a training: called at the end of each."""

    def __init__(self, cuda: bool) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def __call__(self, e: Epoch) -> None:
        """Start after the first epoch, stop after the second."""
        if e.epoch == 1:
            self.profiler.start()
        elif e.epoch == 2:
            self.profiler.stop()

    def show(self, batches: float, most: int) -> None:
        """Print kernels by their time in a step."""
        rows = [
            (e.self_device_time_total or e.self_cpu_time_total, e.count, e.key) for e in self.profiler.key_averages()
        ]
        print(f"kernels of a step: {sum(time for time, _, _ in rows) / batches:,.0f} µs")
        by_compiler = [row for row in rows if row[2].startswith("triton_")]
        others = [row for row in rows if row not in by_compiler]
        libraries = [row for row in others if re.search(r"cudnn|cutlass|xmma|conv|gemm|n[ch][hw][wc]", row[2], re.I)]
        for name, part in (("written by torch's compiler", by_compiler), ("of cuDNN and cuBLAS", libraries)):
            print(f"{sum(time for time, _, _ in part) / batches:9.1f} µs  {name}")
        for time, count, name in sorted(rows, reverse=True)[:most]:
            print(f"{time / batches:9.1f} µs  {count / batches:5.1f} times  {name[:150]}")


def main() -> None:
    """Measure what the command line names."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--variants", nargs="*", default=[], help=", ".join(VARIANTS) + ", joined by +")
    flags.add_argument("--profile", choices=VARIANTS, nargs="?", const="as-it-is", help="of which variant")
    flags.add_argument("--net", choices=METHODS, default="resnet18")
    flags.add_argument("--teacher", action="store_true")
    flags.add_argument("--batch", type=int, default=128)
    flags.add_argument("--size", type=int, default=224)
    flags.add_argument("--images", type=int, default=12_800)
    flags.add_argument("--most", type=int, default=60, help="kernels that are printed")
    f = flags.parse_args()
    device = resolve_device("auto")
    on = Setting(device, resolve_precision("auto", device), f.images, f.batch)
    images = make_large_images(on, f.size)
    row = LargeRow(f.net, "compiled" if device.type == "cuda" else "eager", f.teacher)
    with use_device(device):
        for name in f.variants:
            free_memory(device)
            with contextlib.ExitStack() as stack:
                for part in name.split("+"):
                    stack.enter_context(VARIANTS[part]())
                try:
                    found = measure_training(row, on, images)
                except Exception as error:  # the other variants are measured all the same
                    print(f"{row}, {name}: {get_first_line(error)}", flush=True)
                    continue
            speed, begin = found["images_per_second"], found["seconds_to_begin"]
            print(f"{row}, {name}: {speed:,.0f} images/s, {begin:.0f} s to begin", flush=True)
        if f.profile:
            free_memory(device)
            profiled = Profiled(device.type == "cuda")
            with VARIANTS[f.profile]():
                measure_training(row, on, images, profiled)
            profiled.show(f.images / METHODS[f.net][1] / f.batch, f.most)


if __name__ == "__main__":
    main()
