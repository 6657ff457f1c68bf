"""Break the source in 46 ways, one at a time, and see whether the quick tests of that part notice.

    python tests/mutations.py            # all of them: minutes on one core, in a copy of the source
    python tests/mutations.py herding    # those whose description has that word

Not one of the tests. Prints a line for each mutation and how many were caught; the exit code is how many were not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A place in the source, what to write there instead, and the tests that ought to fail."""

    what: str
    path: str
    find: str
    write: str
    tests: str


MUTATIONS = (
    # Mathematics
    Mutation(
        "weights in the softmax count by half", "losses.py", ".log(), -math.inf)", ".log() / 2, -math.inf)", "equations"
    ),
    Mutation("distillation is not scaled by T²", "losses.py", ".mean() * T**2)", ".mean() * T)", "equations"),
    Mutation("margin ranking turned round", "losses.py", "m - own + rivals", "m + own - rivals", "lucir"),
    Mutation(
        "NCA leaves the own class out", "losses.py", "masked_fill(own, 0)", "masked_fill(own, -torch.inf)", "podnet"
    ),
    Mutation("half the gradient of POD-spatial", "losses.py", "zip(2 * d, ctx", "zip(d, ctx", "podnet"),
    Mutation(
        "loss rescaling upside down", "losses.py", "weight=1 / n.clamp_min(1)", "weight=n.clamp_min(1)", "remedies"
    ),
    Mutation(
        "separated softmax: one mean",
        "losses.py",
        "/ kinds.sum(1).clamp_min(1)",
        "/ kinds.sum().clamp_min(1)",
        "remedies",
    ),
    Mutation(
        "herding may choose an image twice",
        "data/memory.py",
        "free[classes, i] = False",
        "free[classes, i] = True",
        "memory",
    ),
    Mutation(
        "herding ignores what is chosen", "data/memory.py", "chosen_sum += D[classes, i]", "chosen_sum += 0", "memory"
    ),
    Mutation("α weighs the new classes", "remedies.py", "float) * n, n)", "float) * n, 2 * n)", "equations remedies"),
    Mutation("a training begins at the last number", "losses.py", "(1 - w) * read(first)", "w * read(first)", "ramps"),
    Mutation("α does not change", "engine/train.py", "done=epoch /", "done=0 * epoch /", "ramps"),
    Mutation(
        "ε in percent of an old class", "remedies.py", "torch.where(past, 0, n).max()", "n.min()", "equations remedies"
    ),
    Mutation(
        "LUCIR without the root",
        "methods/lucir.py",
        'math.sqrt(ratio if self.ratio == "code" else 1 / ratio)',
        '(ratio if self.ratio == "code" else 1 / ratio)',
        "lucir",
    ),
    Mutation(
        "PODNet's factor of old classes",
        "methods/podnet.py",
        "math.sqrt(s.N / s.sizes[-1])",
        "math.sqrt(s.n_old / s.sizes[-1])",
        "podnet",
    ),
    Mutation("BiC distils four times as hard", "methods/bic.py", "z_old, 2.0) / 4", "z_old, 2.0)", "comparisons"),
    Mutation("iCaRL reverses the colours", "methods/icarl.py", "x.flip(3)", "x.flip(1)", "icarl"),
    Mutation(
        "iCaRL's sigmoids forget the teacher of old images",
        "methods/icarl.py",
        "q[:, z_old.shape[1] :]], 1)",
        "q[:, z_old.shape[1] :]], 1).where(y[:, None] >= z_old.shape[1], q)",
        "icarl",
    ),
    Mutation("LwF distils with the factor T²", "methods/lwf.py", " / self.T**2", "", "lwf"),
    Mutation(
        "EEIL leaves out the most recent head", "methods/eeil.py", "else s.sizes[:-1]", "else s.sizes[:-2]", "eeil"
    ),
    Mutation("EEIL is taught by the step before", "methods/eeil.py", 'teacher="as this stage began"', "", "eeil"),
    Mutation("EEIL's noise is on the mean of the gradients", "methods/eeil.py", " / stage.recipe.batch**2", "", "eeil"),
    Mutation("contrast around black", "data/augment.py", "mean + (one - mean) *", "one *", "eeil"),
    Mutation("SS-IL's learning rate stays", "methods/ss_il.py", "own.lr / (plan.t + 1)", "own.lr", "comparisons"),
    Mutation(
        "SPB weighs new classes by the old", "methods/spb.py", "s.sizes[-1] / s.n_old", "s.n_old / s.sizes[-1]", "spb"
    ),
    Mutation(
        "TPCIL forgets a mean", "methods/tpcil.py", "w * (x - (w * x).sum(-1, keepdim=True) / n)", "w * x", "tpcil"
    ),
    Mutation(
        "GeoDL keeps half the angle",
        "nets/subspaces.py",
        "torch.sinc(2 * t / math.pi)",
        "torch.sinc(t / math.pi)",
        "geodl",
    ),
    Mutation("GeoDL keeps all directions", "nets/subspaces.py", "in range(side - max(1, side - 2))", "in ()", "geodl"),
    Mutation("SPB-I classifies all copies", "methods/spb_i.py", "plain = len(z) // 4", "plain = len(z)", "spb"),
    Mutation(
        "SPB-M hears one classifier", "methods/spb_m.py", "log_softmax(2).logsumexp(0)", "log_softmax(2)[0]", "spb"
    ),
    Mutation(
        "the crop is a pixel off when mirrored",
        "data/augment.py",
        "w - 1 - 2 * self.pad - across",
        "w - 2 * self.pad - across",
        "training",
    ),
    Mutation("α follows the wrong sign", "engine/meta.py", "total.append(-group.lr", "total.append(group.lr", "meta"),
    Mutation(
        "Meta looks ahead without the clamp",
        "engine/meta.py",
        "    if recipe.clamp:  # what",
        "    if False:  # what",
        "meta",
    ),
    # The engine, and a step
    Mutation(
        "no L2 penalty",
        "engine/sgd.py",
        "torch._foreach_add_(b, torch._foreach_add(g, w, alpha=group.decay))",
        "torch._foreach_add_(b, g)",
        "training",
    ),
    Mutation(
        "epochs are rounded down",
        "engine/batches.py",
        "(2 * epochs * self.length + self.size)",
        "(2 * epochs * self.length)",
        "training",
    ),
    Mutation(
        "momentum is forgotten on resuming",
        "engine/train.py",
        "n: at.momentum.get(n, torch.zeros_like(w))",
        "n: torch.zeros_like(w)",
        "checkpoint toys",
    ),
    Mutation(
        "gradient noise fades more slowly",
        "engine/train.py",
        "** 0.55))  # the",
        "** 0.45))  # the",
        "training toys equations",
    ),
    Mutation(
        "the learning rate never falls",
        "engine/train.py",
        "fill_(recipe.lr_at(epoch)",
        "fill_(recipe.lr_at(0)",
        "training",
    ),
    Mutation("looking ahead changes batch norms", "engine/meta.py", "{name: b.clone() for", "{name: b for", "meta"),
    Mutation("α is updated a batch late", "engine/train.py", "i % every == 0 for", "i % every == 1 for", "meta"),
    Mutation(
        "held-out images are trained on",
        "learner/step.py",
        "everything, held = everything[trained],",
        "everything, held = everything,",
        "learner",
    ),
    Mutation(
        "a total memory never shrinks",
        "learner/step.py",
        "memory.keep(self.memory, self.images.y[self.memory], m)",
        "self.memory",
        "contract",
    ),
    # Saving
    Mutation(
        "momentum is not saved",
        "learner/state.py",
        'tensors |= {f"momentum.{k}": v for k, v in live.at.momentum.items()}',
        "pass",
        "checkpoint toys",
    ),
    Mutation(
        "a changed tensor file is believed",
        "learner/saved.py",
        "if hashlib.sha256(data).hexdigest() != digest:",
        "if False:",
        "checkpoint",
    ),
    Mutation(
        "a shared step survives a changed loss",
        "runs/environment.py",
        '"step.py", "losses.py", ',
        '"step.py", ',
        "run resume",
    ),
    # Records
    Mutation("new classes are all classes", "runs/metrics.py", "right[step > 0]", "right[step >= 0]", "protocol run"),
    Mutation(
        "forgetting from the last accuracy",
        "runs/metrics.py",
        "max(known) - after",
        "known[-1] - after",
        "protocol run",
    ),
    Mutation(
        "the average leaves the base step out",
        "runs/resume.py",
        'np.mean([r["top1"] for r in records])',
        'np.mean([r["top1"] for r in records[1:]])',
        "run",
    ),
    Mutation(
        "other settings in a folder are taken for these",
        "runs/folder.py",
        "if there.get(k) != here.get(k)]",
        "if False]",
        "run folders",
    ),
)


def is_caught(mutation: Mutation, copy: Path) -> bool:
    """Whether one of the tests fails on a copy of the source that is broken so."""
    path = copy / "src" / "equipoise" / mutation.path
    text = path.read_text()
    if mutation.find not in text:
        raise SystemExit(f"{mutation.path} does not hold {mutation.find!r}: bring this list up to date")
    path.write_text(text.replace(mutation.find, mutation.write, 1))
    try:
        tests = [f"tests/test_{name}.py" for name in mutation.tests.split()]
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        path_first = {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        code = subprocess.run(words, cwd=copy, env=os.environ | path_first, capture_output=True).returncode
        if code > 1:
            raise SystemExit(f"{mutation.what}: the tests could not be run (pytest ended with {code})")
        return code == 1
    finally:
        path.write_text(text)


def main() -> int:
    """Try all mutations, or those that are named; returns how many were not noticed."""
    chosen = [m for m in MUTATIONS if all(word in m.what for word in sys.argv[1:])]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in ("src", "tests", "results", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, copy)
        for mutation in chosen:
            began = time.perf_counter()
            found = is_caught(mutation, copy)
            caught += found
            print(
                f"{'caught' if found else 'MISSED'}  {time.perf_counter() - began:4.0f} s  {mutation.what}", flush=True
            )
    print(f"{caught} of {len(chosen)} caught")
    return len(chosen) - caught


if __name__ == "__main__":
    sys.exit(main())
