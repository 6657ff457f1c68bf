"""`equipoise run`: one run, from the command line to its result."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..errors import EquipoiseError, describe_gpu_failure
from ..learner.saved import INFO
from ..report.terminal import make_console, print_result
from ..runs.command import name_folder
from ..runs.progress import Both, LiveWatch, PlainWatch, Watch
from ..runs.run import run
from ..runs.tensorboard import TensorBoard
from .request import Request, parse_request


def do_run(argv: list[str]) -> None:
    """Train a method through a protocol and record the result; resume it if it was stopped."""
    request = parse_request(argv, "run", Request)
    out = request.out or Path("runs") / name_folder(request.run, request.machine)
    console = Console(stderr=True)
    watch: Watch = LiveWatch(console) if console.is_terminal else PlainWatch()
    if request.tensorboard:
        watch = Both(watch, TensorBoard(out))
    try:
        result = run(request.run, out, request.machine, request.options, watch)
    except (KeyboardInterrupt, RuntimeError) as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else describe_gpu_failure(error)
        if why is None:
            raise
        there = (out / "checkpoint" / INFO).is_file()
        then = f"goes on from the last checkpoint in {out}" if there else "starts anew: there was no checkpoint yet"
        raise EquipoiseError(f"{why}; the same command {then}") from error
    finally:
        watch.close()
    print_result(result, make_console())
    print(f"recorded in {out / 'result.json'}")
    if not (out / "model" / INFO).is_file():
        print(f"its model is not in {out / 'model'}: to train it again, choose another --out")
