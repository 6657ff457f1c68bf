"""One run: a method on a data set under a protocol, from settings to `result.json`; resumable and idempotent."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from .. import files
from ..learner import saved
from .folder import FILES, check_run_folder, claim_run_folder, find_result, lock_folder
from .plan import Prepared, prepare
from .progress import Watch
from .record import Result
from .resume import Attempt
from .settings import Machine, Options, Run
from .shared_steps import SharedSteps


def run(
    run: Run,
    out: str | Path,
    machine: Machine = Machine(),
    options: Options = Options(),
    watch: Watch | None = None,
) -> Result:
    """Start or resume a run in the folder `out`, or return its recorded result.

    Args:
        run: the settings.
        out: the run's folder; it holds run.json, metrics.jsonl, result.json and the final model, whose labels are the
            data set's.
        machine: where it is computed.
        options: where the data and shared steps are, and how often it is saved and measured.
        watch: receives the events of the run.
    """
    folder = files.as_folder(out)
    check_run_folder(folder)
    watch = watch or Watch()
    plan = prepare(run, machine, options.data)
    if (recorded := find_result(folder, plan.settings)) is not None:
        return recorded
    with lock_folder(folder):
        if (recorded := find_result(folder, plan.settings)) is not None:  # of another process, meanwhile
            return recorded
        claim_run_folder(folder)
        attempt = Attempt(plan, folder, open_shared_steps(plan, options, watch), watch, options)
        remove_leftovers(folder)
        files.write_json(folder / "run.json", plan.settings)
        with attempt.catch_ctrl_c():
            attempt.resume()
            while (t := attempt.t) < len(plan.sizes):
                with attempt.begin_step():  # may reuse several steps
                    t = attempt.t
                    classes = range(*plan.edges(t))
                    plan.learner.learn(plan.train, classes, attempt.at_epoch_end, attempt.tick, verbose=False)
                attempt.end_step(t)
        result = attempt.make_result()
        labels: dict[Hashable, Hashable] = dict(enumerate(plan.order))
        plan.learner.own_exemplars(plan.train).rename(labels).save(folder / "model")
        files.write_json(folder / "result.json", result)
        saved.remove(folder / "checkpoint")
        return result


def open_shared_steps(plan: Prepared, options: Options, watch: Watch) -> SharedSteps | None:
    """Open the store of shared steps; None if nothing is shared."""
    if options.store is None:
        return None
    if "" in plan.compute_keys():
        watch.say("steps are not shared: the source of the method is not in a file")
        return None
    shared = SharedSteps(options.store)
    shared.open()
    return shared


def remove_leftovers(folder: Path) -> None:
    """Remove the partial files of a killed process, and refuse foreign files in the model folder."""
    files.remove_partials(folder, FILES)
    for inside in (folder / "checkpoint", folder / "model"):
        saved.remove_leftovers(inside)
    saved.check_saved(folder / "model")
    files.check_no_folder(folder / "result.json")
