"""The command line: run and sweep, whose flags come from dataclasses, and what becomes of every error."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro
from rich.console import Console

from .. import __version__, methods
from ..data.datasets import SHAPES
from ..errors import EquipoiseError, UsageError, check, failed_gpu, first_line, sentence, unknown
from ..files import INFO
from ..losses import LOSSES, Loss
from ..method import Method, Recipe
from ..report.terminal import for_output, print_result, print_table
from ..runs import queue
from ..runs.progress import Both, LiveWatch, PlainWatch, Watch
from ..runs.queue_progress import QueueWatch
from ..runs.run import Run, run, run_name
from ..runs.shared_steps import Store, store_folder
from ..runs.tensorboard import TensorBoard
from ..runs.workers import Local
from . import verbs
from .verbs import hint
from .words import every_choice, run_lines, taken

T = TypeVar("T")
PATHS = ("--out", "--data", "--store", "--results", "--figures", "--runs")
"""flags that name a file or a folder"""


@dataclass(frozen=True)
class Flags(Run):
    """What `equipoise run METHOD` takes: the fields of a run, one of a loss's, and where things are."""

    loss: str = "standard"
    """classification loss: standard, balanced, meta or relaxed"""
    alpha: Annotated[float | None, hint("1.0")] = None
    """balanced: importance of old classes in the softmax; below 1, they are protected more"""
    epsilon: Annotated[str | None, hint("0.2%")] = None
    """relaxed: λ of old classes, a count or a percentage of the images of the largest new class"""
    alpha_lr: Annotated[float | None, hint("10.0")] = None
    """meta: learning rate of α; not in the paper, whose algorithm prints none (that is, 1)"""
    every: Annotated[int | None, hint("10")] = None
    """meta: optimisation steps from one update of α to the next"""
    hold: Annotated[float | None, hint("0.1")] = None
    """meta: fraction of the memory per class that is held out, at least one image of every class"""
    count: Annotated[str | None, hint("train")] = None
    """meta: what n_i counts, the images trained on (train) or these and the held-out ones (all)"""
    out: Annotated[Path | None, hint("runs/ and a name made of the settings")] = None
    """the run's folder"""
    data: Annotated[Path | None, hint("$EQUIPOISE_DATA or ~/.cache/equipoise/data, filled by a download")] = None
    """folder with the data set's files"""
    store: Annotated[str | None, hint("$EQUIPOISE_STORE or ~/.cache/equipoise/store")] = None
    """folder where steps are shared with other runs; `none` to share none"""
    checkpoint: float = 30.0
    """seconds between checkpoints"""
    evaluate_every: int = 0
    """epochs between looks at the test (or validation) images on the way, for metrics.jsonl; 0 for none"""
    tensorboard: bool = False
    """write scalars and figures for TensorBoard into the run's folder"""

    def made_loss(self) -> Loss:
        """The loss that the flags describe; a flag of another loss is an error."""
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        kind = LOSSES[self.loss]
        own = {f.name for f in dataclasses.fields(kind)}
        given = {k: getattr(self, k) for k in ("alpha", "epsilon", "alpha_lr", "every", "hold", "count")}
        values = {k: v for k, v in given.items() if v is not None}
        for name in values.keys() - own:
            owner = next(n for n, k in LOSSES.items() if name in {f.name for f in dataclasses.fields(k)})
            raise UsageError(f"--{name.replace('_', '-')} belongs to --loss {owner}, not to --loss {self.loss}")
        return kind(**values)

    def run_with(self, kind: type[Method], method: Method, recipe: Recipe) -> Run:
        """The run that the flags describe."""
        settings = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(Run) if f.name not in ("method", "recipe")
        }
        own = {**_values(method), "loss": self.made_loss()}
        return Run(method=kind(**own), recipe=Recipe(**_values(recipe)), **settings)


@dataclass(frozen=True)
class Many(Flags):
    """Those of `equipoise sweep`, which takes its own three itself, before the others are read run by run."""

    out: Annotated[Path | None, hint("runs")] = None
    """folder for all runs, each in one of its own"""
    workers: Annotated[int | None, hint("4 for each GPU, else one for each core")] = None
    """runs at a time"""
    runs: Annotated[Path | None, hint("none")] = None
    """file with the words of a run in each line; what is given here is added to each"""


def _values(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _same(kind: type) -> dict[str, Any]:
    return {k: vars(kind)[k] for k in ("__doc__", "name") if k in vars(kind)}


def _unchecked(kind: type[T]) -> type[T]:
    """The same dataclass without its check of values, which would else fail inside tyro, in tyro's words."""
    return type(kind.__name__, (kind,), {**_same(kind), "__post_init__": lambda self: None})


def parsed_run(argv: list[str], verb: str) -> tuple[Any, Run]:
    """The flags of `equipoise run`, and the run that they describe."""
    # The recipe depends on the images, and help shows its defaults: so the data set is looked up first.
    shape = SHAPES.get(taken("--dataset", argv)[1] or Flags.dataset, SHAPES[Flags.dataset])
    if argv and not argv[0].startswith("-") and argv[0] not in methods.known():
        raise unknown("method", argv[0], methods.known())
    kinds: dict[str, Callable[..., Any]] = {}
    for name, kind in methods.known().items():
        raw, recipe = _unchecked(kind), _unchecked(Recipe)
        usual = recipe(**_values(kind().recipe(shape)))
        own = [("method", raw, field(default_factory=raw)), ("recipe", recipe, field(default=usual))]
        bases = (Many if verb == "sweep" else Flags,)
        flags = dataclasses.make_dataclass(kind.__name__, own, bases=bases, frozen=True)
        flags.__doc__ = kind.__doc__
        kinds[name] = flags
    f: Any = tyro.extras.subcommand_cli_from_dict(
        kinds,
        prog=f"equipoise {verb}",
        description=inspect.getdoc(VERBS[verb]),
        args=argv,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    for flag in ("--milestones", "--decay"):
        if f.recipe.schedule != "steps" and any(word.split("=")[0] == flag for word in argv):
            other = f"{flag} belongs to --schedule steps, not to --schedule {f.recipe.schedule}"
            raise UsageError(f"{other}: add --schedule steps, or leave {flag} out")
    return f, f.run_with(methods.named(f.method.name), f.method, f.recipe)


def run_verb(argv: list[str]) -> None:
    """Train a method through a protocol and record the result; go on with it if it was stopped."""
    f, asked = parsed_run(argv, "run")
    out = f.out or Path("runs") / run_name(asked)
    folder = store_folder(f.store)
    store = None if folder is None else Store(folder)
    console = Console(stderr=True)
    watch: Watch = LiveWatch(console) if console.is_terminal else PlainWatch()
    if f.tensorboard:
        watch = Both(watch, TensorBoard(out))
    try:
        result = run(
            asked,
            out,
            data=f.data,
            store=store,
            watch=watch,
            checkpoint_every=f.checkpoint,
            evaluate_every=f.evaluate_every,
        )
    except (KeyboardInterrupt, RuntimeError) as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else failed_gpu(error)
        if why is None:
            raise
        there = (out / "checkpoint" / INFO).is_file()
        then = f"goes on from the last checkpoint in {out}" if there else "starts anew: there was no checkpoint yet"
        raise EquipoiseError(f"{why}; the same command {then}") from error
    finally:
        watch.close()
    print_result(result, for_output())
    print(f"recorded in {out / 'result.json'}")


def sweep_verb(argv: list[str]) -> None:
    """Do many runs, several at a time: as run, but a value may be a list such as --seed 0,1,2; and --workers N.

    --runs FILE takes the words of a run from each line of a file, and adds them before those given here.
    """
    argv, workers = taken("--workers", argv)
    argv, file = taken("--runs", argv)
    argv, out = taken("--out", argv)
    if workers is not None and not workers.isdecimal():
        raise UsageError(f"--workers must be a whole number, not {workers}")
    parent = Path(out or "runs")
    lines = [argv] if file is None else [words + argv for words in run_lines(Path(file))]
    parsed = [parsed_run(words, "sweep") for line in lines for words in every_choice(line)]
    flags = parsed[0][0]
    for name in ("store", "data", "checkpoint", "evaluate_every", "tensorboard"):
        if any(getattr(f, name) != getattr(flags, name) for f, _ in parsed):
            raise UsageError(f"--{name.replace('_', '-')} is one for all runs of a sweep")
    check("checkpoint", flags.checkpoint, least=0)
    check("evaluate-every", flags.evaluate_every, least=0, whole=True)
    jobs = queue.planned([asked for _, asked in parsed], parent, flags.data)
    on = Local(
        store=store_folder(flags.store),
        data=flags.data,
        checkpoint_every=flags.checkpoint,
        evaluate_every=flags.evaluate_every,
        tensorboard=flags.tensorboard,
        **({} if workers is None else {"workers": int(workers)}),
    )
    console = for_output()
    with QueueWatch(console, jobs, shared=on.store is not None) as watch:
        queue.map(run, jobs, on, watch.tell)
    done = [job.result for job in jobs if job.result]
    if done:
        print_table(done, console)
    queue.complain(jobs)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "run": run_verb,
    "sweep": sweep_verb,
    "show": verbs.show_verb,
    "paper": verbs.paper_verb,
    "report": verbs.report_verb,
    "demo": verbs.demo_verb,
    "bench": verbs.bench_verb,
}


def refuse_empty_path(verb: str, argv: list[str]) -> None:
    """Refuse `--out "$UNSET"`, which would become the working directory."""
    for before, word in zip([verb, *argv], argv):
        flag, equals, value = word.partition("=")
        if equals and not value and flag in PATHS:
            raise UsageError(f"{flag} is empty: name a folder")
        if not word and (before in PATHS or verb in ("report", "show")):
            raise UsageError(f"{before if before in PATHS else 'a path'} is empty: name a folder")


def usage() -> str:
    """What the command can do."""
    verbs = "\n".join(f"  {name:6} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items())
    return (
        f"usage: equipoise VERB ...\n\nClass-incremental learning that stays balanced.\n\n{verbs}\n\n"
        "  equipoise VERB --help lists a verb's flags; --version the version; --debug shows tracebacks."
    )


def command(argv: list[str]) -> int:
    """Do what the words say; returns the exit code."""
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"equipoise {__version__}, torch {torch.__version__}")
        return 0
    try:
        if argv[0] not in VERBS:
            raise unknown("command", argv[0], VERBS)
        refuse_empty_path(argv[0], argv[1:])
        VERBS[argv[0]](argv[1:])
        return 0
    except SystemExit as done:  # tyro has said what was wrong, or printed help
        return done.code if isinstance(done.code, int) else 1
    except KeyboardInterrupt:
        print("equipoise: stopped; the same command goes on where it was", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        said = sentence(error)
        if said is None:  # a fault of ours; even so, no page of code for somebody who asked for a result
            said = f"unexpected {type(error).__name__}: {first_line(error)}; --debug shows where"
        print(f"equipoise: {said}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
