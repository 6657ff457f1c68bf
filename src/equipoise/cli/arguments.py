"""The verbs of the command, and the flags of those that do not depend on a method. Fast to import.

A field without a default, or with `()`, is a positional argument. The docstring says what a default of None means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError, check


@dataclass
class Show:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""

    dirs: tuple[Path, ...]
    """folders to show: of runs, or folders that hold such folders"""
    figures: Path | None = None
    """folder to write the accuracy curve and the confusion matrices to, as PNG (default: none are made)"""


@dataclass
class Paper:
    """Reproduce the paper's tables: list them, run what is missing, and print measured beside published numbers."""

    names: tuple[str, ...] = ()
    """table1 to table6, confusion, epsilon, text, comparators, quoted, unprinted, batches, choice, orders, anytime,
    separated, schedules, tails, mini-imagenet, bounds, costs; claims, the paper's sentences judged by these; without
    any, a list of them. Runs are done in this order"""
    dataset: str | None = None
    """only the cells of one data set; `digits` rehearses a table on the embedded images, in minutes (default: all)"""
    subset: Literal["first100", "seed1993"] | None = None
    """definition of ImageNet-Subset: the first 100 classes in sorted order, or those drawn with NumPy's seed 1993
    (default: first100)"""
    rows: str | None = None
    """only rows of these names (podnet), patterns (podnet*) or parts of names (balanced), with commas (default: all)"""
    seeds: int | None = None
    """seeds of each run, from 0; all runs with one seed come before those with the next
    (default: 1, and to print what is recorded: all there are)"""
    dry_run: bool = False
    """list the missing runs, with the time and memory they would take here, and run nothing; without names, add the
    time to the list of tables"""
    no_run: bool = False
    """print what is recorded, and run nothing"""
    results: Path = Path("results")
    """folder of records, to which new runs are added"""
    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal"
    """how the tables are printed"""
    commands: bool = False
    """print the command of each cell below its table; in CSV it has a column anyway"""
    workers: int | None = None
    """runs at a time (default: 4 for each GPU, else one for each core; of ImageNet one)"""
    minutes: float | None = None
    """start no run after so many minutes; those that were started are finished (default: no limit)"""
    device: str = "auto"
    """auto, cpu or cuda"""
    data: Path | None = None
    """folder with the data set's files; for ImageNet, that of its images, or what was packed of them
    (default: $EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download; ImageNet has none)"""
    images_on: Literal["device", "disk"] | None = None
    """where images of ImageNet are during training: all on the device, or on the disk, in an order that it can follow
    (default: device up to 64 GiB)"""
    store: str | None = None
    """folder where steps are shared with other runs; `none` to share none
    (default: $EQUIPOISE_STORE or ~/.cache/equipoise/store)"""
    checkpoint: float = 30.0
    """seconds between checkpoints"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into each run's folder"""

    def __post_init__(self) -> None:
        check("seeds", 1 if self.seeds is None else self.seeds, least=1, whole=True)
        check("minutes", 1 if self.minutes is None else self.minutes, above=0)
        if self.dry_run and self.no_run:
            raise UsageError("--dry-run lists what is missing and --no-run prints what is there: ask for one of them")


@dataclass
class Pack:
    """Decode the images of a folder once, so that runs need not; it goes on where it was stopped.

    DIR has a folder for each class, or such folders in train and val. Runs pack by themselves what is not packed.
    """

    dir: Path
    """folder of images, which keeps them"""
    out: Path | None = None
    """folder to write to (default: one in DIR, where runs find it)"""
    size: int | None = None
    """side of the squares that a net is to see (default: 224; images of one size of up to 64 pixels as they are)"""
    short_side: int | None = None
    """short side of training images in pixels; smaller ones are not enlarged (default: 8/7 of the size, so 256)"""
    square: bool = False
    """store only the centre square of training images; of test images it always is"""
    subset: Literal["first100", "seed1993"] | None = None
    """pack only the classes of ImageNet-Subset: the first 100, or those drawn with seed 1993 (default: all classes)"""
    workers: int | None = None
    """processes (default: one for each core)"""

    def __post_init__(self) -> None:
        check("workers", 1 if self.workers is None else self.workers, least=1, whole=True)


@dataclass
class Report:
    """Make a page, tables and figures that compare recorded numbers with those of the paper."""

    results: Path
    """folder of records"""
    out: Path = Path("report")
    """folder to write to"""


@dataclass
class Demo:
    """Learn handwritten digits one by one, with and without memory, with each loss of the paper; about a minute."""

    out: Path = Path("demo")
    """folder for the runs and the pictures"""
    seeds: int = 3
    """how many seeds"""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UsageError(f"--seeds must be 1 or more, not {self.seeds}")


@dataclass
class Bench:
    """Measure images a second on this machine: a usual DataLoader loop, and ours with each engine."""

    size: int | None = None
    """train ResNet-18 and PODNet's ResNet-18 on crops of this size, 224 as of ImageNet, out of larger images that lie
    on the device (default: ResNet-32 on images of CIFAR's size)"""
    methods: bool = False
    """train every method in a step after the base step, with a teacher and 20 images of each class in memory"""
    rows: str | None = None
    """with --size or --methods: only rows of these names (crop), patterns (podnet*) or parts of names (compiled), with
    commas (default: all)"""
    limit: float = 600
    """with --size or --methods: no row begins after so many seconds"""
    images: int | None = None
    """images in an epoch; each row trains three, the first to warm up (default: 25,600 on a GPU, 256 on a CPU). With
    --methods an epoch has at most 6,000, and there are more of them"""
    batch: int = 128
    """images in a batch"""
    packed: tuple[int, ...] = (2, 4, 8)
    """how many runs at once; with --size or --methods, one"""
    device: str = "auto"
    """auto, cpu or cuda"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of ours; auto is bf16 on a GPU that has it, else fp32"""
    out: Path | None = None
    """JSON file for the record (default: none is written)"""

    def __post_init__(self) -> None:
        check("batch", self.batch, least=2, whole=True)
        check("limit", self.limit, above=0)
        if self.methods and self.size is not None:
            raise UsageError("--methods trains on images of CIFAR's size: remove --size")
        if self.size is not None:  # smaller images have other nets
            check("size", self.size, least=65, most=2**12, whole=True)
        for k in self.packed:
            check("packed", k, least=2, whole=True)


ARGUMENTS: dict[str, type] = {
    "show": Show, "paper": Paper, "report": Report, "pack": Pack, "demo": Demo, "bench": Bench,
}  # fmt: skip
VERBS = {
    "run": "Train a method through a protocol and record the result; resume it if it was stopped.",
    "sweep": "Do many runs, several at a time: as run, but a value may be a list such as --seed 0,1,2.",
    **{verb: str(kind.__doc__).partition("\n\n")[0] for verb, kind in ARGUMENTS.items()},
}
"""every verb, and what it does"""
