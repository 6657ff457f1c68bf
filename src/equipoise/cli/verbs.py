"""The small verbs of the command line: those that train nothing themselves. Flags and help come from dataclasses."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

from ..engine.device import resolve_device, resolve_precision
from ..errors import UsageError, check
from ..files import write_json
from ..report import report
from ..report.terminal import figures_for, for_output, load_results, print_result, print_table
from ..runs import queue
from ..runs.shared_steps import store_folder
from ..runs.workers import Local
from . import reproduce
from .demo import demo


def hint(text: str) -> Any:
    """What the help says instead of a default."""
    return arg(help_behavior_hint=f"(default: {text})", metavar="VALUE")


@dataclass
class Show:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""

    dirs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold such folders"""
    figures: Annotated[Path | None, hint("none are made")] = None
    """folder to write the accuracy curve and the confusion matrices to, as PNG"""


def show_verb(argv: list[str]) -> None:
    """Print the results of runs: mean ± deviation over seeds, and each step of a single run."""
    f = tyro.cli(Show, prog="equipoise show", args=argv)
    if not f.dirs:
        raise UsageError("say which folders to show: equipoise show DIR [DIR ...]")
    results = load_results(f.dirs)
    console = for_output()
    if len(results) == 1:
        print_result(results[0], console)
    else:
        print_table(results, console)
    if f.figures is not None:
        for path in figures_for(results, f.figures):
            print(f"wrote {path}")


@dataclass
class Demo:
    """Learn handwritten digits one by one, with and without memory, with each loss of the paper; three seeds."""

    out: Path = Path("demo")
    """folder for the runs and the pictures"""
    seeds: int = 3
    """how many seeds"""


def demo_verb(argv: list[str]) -> None:
    """Learn handwritten digits one by one, with and without memory, with each loss of the paper; about a minute."""
    f = tyro.cli(Demo, prog="equipoise demo", args=argv)
    if f.seeds < 1:
        raise UsageError(f"--seeds must be 1 or more, not {f.seeds}")
    demo(f.out, range(f.seeds), for_output())


@dataclass
class Bench:
    """Images a second on this machine: a DataLoader loop as others write it, and ours, as ratios in one table."""

    images: Annotated[int | None, hint("25,600 on a GPU, 256 on a CPU")] = None
    """images in an epoch; each row trains three, the first to warm up"""
    batch: int = 128
    """images in a batch"""
    packed: tuple[int, ...] = (2, 4, 8)
    """how many runs at once"""
    device: str = "auto"
    """auto, cpu or cuda"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of ours; auto is bf16 on a GPU that has it, else fp32"""
    out: Annotated[Path | None, hint("none is written")] = None
    """JSON file for the record"""


def bench_verb(argv: list[str]) -> None:
    """Measure images a second on this machine: a DataLoader loop as others write it, and ours in each form."""
    from .bench import bench

    f = tyro.cli(Bench, prog="equipoise bench", args=argv)
    device = resolve_device(f.device)
    images = (25_600 if device.type == "cuda" else 256) if f.images is None else f.images
    check("batch", f.batch, least=2, whole=True)
    for k in f.packed:
        check("packed", k, least=2, whole=True)
    check("images", images, least=2 * f.batch, whole=True)
    if f.out is not None:  # before a minute is spent
        f.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=f.out.parent):
            pass
        if f.out.is_dir():
            raise UsageError(f"--out {f.out} is a folder: name a file")
    record = bench(device, resolve_precision(f.precision, device), images, f.batch, f.packed, for_output())
    if f.out is not None:
        write_json(f.out, record)
        print(f"recorded in {f.out}")


@dataclass
class Paper:
    """The paper's tables and figures: what there is, what is recorded, and the button that does the rest."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """table1 to table6, confusion, epsilon, batches, separated, bounds, costs; without any, what there is"""
    dataset: Annotated[str | None, hint("all")] = None
    """only the cells of one data set; `digits` rehearses a table on the embedded images, in minutes"""
    rows: Annotated[str | None, hint("all")] = None
    """only some rows: names (podnet), patterns (podnet*) or parts of names (balanced), separated by commas"""
    seeds: Annotated[int | None, hint("1, and to print what is recorded: all there are")] = None
    """seeds of each run, from 0"""
    dry_run: bool = False
    """list the runs that are missing, with the time and the memory they would take here, and do nothing"""
    no_run: bool = False
    """print what is recorded, and run nothing"""
    results: Path = Path("results")
    """folder of records: looked into first, and where new runs are put"""
    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal"
    """how the tables are printed"""
    commands: bool = False
    """print the command of each cell below its table; in CSV it has a column anyway"""
    workers: Annotated[int | None, hint("4 for each GPU, else one for each core")] = None
    """runs at a time"""
    device: str = "auto"
    """auto, cpu or cuda"""
    data: Annotated[Path | None, hint("$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download")] = None
    """folder with the data set's files"""
    store: Annotated[str | None, hint("$EQUIPOISE_STORE or ~/.cache/equipoise/store")] = None
    """folder where steps are shared with other runs; `none` to share none"""
    checkpoint: float = 30.0
    """seconds between checkpoints"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into each run's folder"""


def paper_verb(argv: list[str]) -> None:
    """Reproduce the paper's tables: what there is, what is recorded, and doing the runs that are missing."""
    f = tyro.cli(Paper, prog="equipoise paper", args=argv)
    seeds = 1 if f.seeds is None else f.seeds
    check("seeds", seeds, least=1, whole=True)
    check("checkpoint", f.checkpoint, least=0)
    resolve_device(f.device)
    if f.dry_run and f.no_run:
        raise UsageError("--dry-run lists what is missing and --no-run prints what is there: ask for one of them")
    tables = reproduce.chosen(f.names, f.dataset, f.rows)
    console = for_output()
    if not f.results.exists():
        print(f"{f.results} is not there: nothing is recorded yet", file=sys.stderr)
    if not f.names:
        reproduce.overview(tables, f.results, seeds, None if f.no_run else f.device, console)
        return
    if f.no_run:
        reproduce.print_tables(tables, f.results, f.seeds, f.format, f.commands, console)
        return
    if f.dataset is not None:
        reproduce.refuse_what_needs(tables)
    if f.dry_run:
        reproduce.plan(tables, f.results, seeds, f.device, console)
        reproduce.refuse_what_needs(tables)
        return
    on = Local(store=store_folder(f.store), data=f.data, checkpoint_every=f.checkpoint, tensorboard=f.tensorboard)
    if f.workers is not None:
        on = replace(on, workers=f.workers)
    jobs = reproduce.reproduce(tables, f.results, seeds, f.device, on, console)
    reproduce.print_tables(tables, f.results, f.seeds, f.format, f.commands, console)
    queue.complain(jobs)
    reproduce.refuse_what_needs(tables)


@dataclass
class Report:
    """Make the page, the tables and the figures from records alone."""

    results: tyro.conf.Positional[Path]
    """folder of records"""
    out: Path = Path("report")
    """folder to write to"""


def report_verb(argv: list[str]) -> None:
    """Make one page, and every table and figure, of the paper's numbers and the recorded ones beside them."""
    f = tyro.cli(Report, prog="equipoise report", args=argv)
    for path in report(f.results, f.out):
        print(f"wrote {path}")
