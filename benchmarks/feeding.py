"""Images a second from shards on the disk, against what the disk reads in order and, on a GPU, against training.

    python benchmarks/feeding.py                                  4,096 images like ImageNet's, 1.1 GB, in a new folder
    python benchmarks/feeding.py --images 51200 --folder DIR      more of them, in DIR, where they stay
    python benchmarks/feeding.py --folder DIR --occupy            with less free memory than the shards are large
    python benchmarks/feeding.py --train compiled                 training as well: resident, and from the shards

Shards are read in order, eight mebibytes at a time by one thread and by eight; then as a training reads them, in
shuffled blocks, checked, and copied to the device. Each is done with the shards in the page cache and with the cache
emptied of them, which `posix_fadvise` does on a local disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from equipoise.cli.large import LargeRow, measure_training
from equipoise.cli.speed import ALL, Setting
from equipoise.data.images import Images
from equipoise.data.index import COLUMNS, Index, name_shard
from equipoise.data.randomness import generator
from equipoise.data.shards import THREADS, Shards
from equipoise.data.stored import Stored
from equipoise.engine.device import resolve_device, resolve_precision, use_device
from equipoise.engine.feed import Feed

HEIGHT, WIDTH = 256, 341
IN_A_SHARD = 1024
PIECE = 2**23


def make_shards(folder: Path, count: int, device: torch.device) -> Images:
    """So many images of noise, in shards that are written where they are missing."""
    one, rng = 3 * HEIGHT * WIDTH, np.random.default_rng(0)
    noise = rng.bytes(one * IN_A_SHARD)
    sums = [zlib.crc32(noise[one * k : one * (k + 1)]) for k in range(IN_A_SHARD)]
    row = np.arange(count)
    shards = -(-count // IN_A_SHARD)
    for number in range(shards):
        path = folder / name_shard(number)
        if not path.is_file() or path.stat().st_size != len(noise):
            with path.open("wb") as f:
                f.write(noise)
                f.flush()
                os.fsync(f.fileno())
    columns = {name: np.zeros(count, np.int64) for name in COLUMNS}
    columns |= {"shard": row // IN_A_SHARD, "offset": row % IN_A_SHARD * one, "label": row % ALL}
    columns |= {"height": np.full(count, HEIGHT), "width": np.full(count, WIDTH)}
    columns["checksum"] = np.array(sums)[row % IN_A_SHARD]
    found = Shards(folder, Index(("noise",), columns, b"", [len(noise)] * shards, {}))
    size = torch.tensor([[HEIGHT, WIDTH]]).expand(count, 2).contiguous()
    return Images(Stored(found, torch.from_numpy(row), size, 224), torch.from_numpy(row % ALL), "noise").to(device)


def empty_cache(x: Stored) -> None:
    """Drop the shards from the page cache."""
    for number in range(len(x.shards.index.shards)):
        with (x.shards.folder / name_shard(number)).open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_in_order(x: Stored, threads: int) -> None:
    """Read all shards, some mebibytes at a time."""

    def read(number: int) -> None:
        buffer = bytearray(PIECE)
        with (x.shards.folder / name_shard(number)).open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(len(x.shards.index.shards))))


def bring_all(source: Feed, batch: int) -> None:
    """Bring an epoch to the device, batch after batch, and do nothing with it."""
    x = source.stored
    which = torch.arange(len(x) // batch * batch, device=x.device).view(-1, batch)
    batches = source.arrange(which, generator(0, device=x.device))
    source.lay_out([batches])
    for _ in source.follow(batches):
        pass


def report(name: str, x: Stored, action: Callable[[], None]) -> None:
    """Time an action on all images with the shards in the page cache, if they fit in there, and without."""
    rates, cores = [], 0.0
    for cold in (False, True):
        if cold:
            empty_cache(x)
        began, cpu = time.perf_counter(), time.process_time()
        action()
        rates.append(len(x) / (time.perf_counter() - began))
        cores = cores or len(x) / (time.process_time() - cpu)
    gb = 3 * HEIGHT * WIDTH / 1e9
    words = (f"{rate:7,.0f} images/s ({rate * gb:5.2f} GB/s)" for rate in rates)
    print("{:24} {} cached, {} cold; {:,.0f} for each second of a core".format(name, *words, cores), flush=True)


def report_feed(x: Stored, batch: int) -> None:
    """Time an epoch that is brought to the device; its memory is there already, as in all epochs but the first."""
    source = Feed(x, torch.zeros(0, dtype=torch.long, device=x.device))
    bring_all(source, batch)
    report("as a training reads", x, lambda: bring_all(source, batch))


def occupy(x: Stored) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory that is written to, until half as much is available as the shards are large."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    held = np.ones(max(0, available - int(x.bytes.sum()) // 2), np.uint8)
    print(f"{len(held) / 1e9:.1f} GB of memory occupied, and the shards have {int(x.bytes.sum()) / 1e9:.1f} GB")
    return held


@contextlib.contextmanager
def read_nothing_ahead() -> Iterator[None]:
    """Read no image of an epoch before it begins."""
    lay_out = Feed.lay_out
    with mock.patch.object(Feed, "lay_out", lambda source, parts, ahead=list: lay_out(source, parts)):
        yield


def train(images: Images, on: Setting, engine: str) -> None:
    """Train ResNet-18 on the images from the shards, cached and cold, and in memory.

    Cold is with the cache emptied before each epoch, which reads every image once. Then nothing is read ahead of an
    epoch, since it would come from the cache: so the first images of an epoch are waited for, and the rate is a lower
    bound, the closer the larger the epoch.
    """
    row, x, rates = LargeRow("resnet18", engine), images.x, []  # type: ignore[arg-type]
    assert isinstance(x, Stored)
    for name in ("from the shards, cached", "from the shards, cold", "resident"):
        cold = "cold" in name
        tell = (lambda epoch: empty_cache(x)) if cold else (lambda epoch: None)
        with use_device(on.device), read_nothing_ahead() if cold else contextlib.nullcontext():
            entry = measure_training(row, on, images.compact() if name == "resident" else images, tell)
        rates.append(entry["images_per_second"])
        print(f"training {entry['engine']}, {name}: {rates[-1]:,.0f} images/s", flush=True)
    print("of resident: {:.1f}% cached, {:.1f}% cold".format(*(100 * rate / rates[-1] for rate in rates[:2])))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--occupy", action="store_true")
    parser.add_argument("--train", metavar="ENGINE", default="")
    f = parser.parse_args()
    device = resolve_device(f.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = f.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        images = make_shards(folder, f.images, device)
        x = images.x
        assert isinstance(x, Stored)
        held = occupy(x) if f.occupy else None
        read_in_order(x, THREADS)
        report("in order, one thread", x, lambda: read_in_order(x, 1))
        report(f"in order, {THREADS} threads", x, lambda: read_in_order(x, THREADS))
        report_feed(x, f.batch)
        if f.train:
            train(images, Setting(device, resolve_precision("auto", device), f.images, f.batch), f.train)
        del held


if __name__ == "__main__":
    main()
