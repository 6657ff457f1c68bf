"""A learner in two lines: its settings as one would type them, and what it knows; numbers and times in words."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from ..errors import format_count
from .arguments import name_source

if TYPE_CHECKING:
    from . import Learner

NAMED = 8
"""classes that are named at most; of more, the first ones"""


def write_learner(learner: Learner) -> str:
    """The method, the memory, the device and every other setting that is not the default; then what is learned."""
    budget = str(learner.budget_)
    settings = [write_value(learner.method), f"memory={budget if budget.isdecimal() else repr(budget)}"]
    for name, parameter in inspect.signature(type(learner)).parameters.items():
        value = getattr(learner, name, parameter.default)
        if name == "backbone" and value is not None:
            settings.append(f"backbone={name_source(value)}")
        elif name not in ("method", "memory", "device") and value != parameter.default:
            settings.append(f"{name}={write_value(value)}")
    return f"{type(learner).__name__}({', '.join(settings)}, device={str(learner.device_)!r})\n{write_state(learner)}"


def write_value(value: Any) -> str:
    """A value as one would type it: a dataclass by the fields that are not its defaults, its remedy without a name."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    written = []
    for f in fields(value):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if (own := getattr(value, f.name)) != default:
            written.append(write_value(own) if f.name == "remedy" else f"{f.name}={write_value(own)}")
    return f"{type(value).__name__}({', '.join(written)})"


def write_state(learner: Learner) -> str:
    """What is learned, what is kept, and where a step under way is."""
    classes, steps = learner.classes_, len(learner.sizes_)
    if not classes:
        return "nothing learned yet"
    named = ", ".join(map(repr, classes[:NAMED])) + (", ..." if len(classes) > NAMED else "")
    kept = learner.state_.exemplars if learner.state_.kept is None else learner.state_.kept
    words = f"{format_count(len(classes), 'class', 'classes')} in {format_count(steps, 'step')} ({named})"
    words += f", {format_count(0 if kept is None else len(kept), 'image')} in memory"
    if learner.unfinished_:
        e = learner.progress_
        words += f"; step {steps - 1} is under way" + (f": {e.stage}, epoch {e.epoch} of {e.epochs}" if e else "")
    return words


def duration(seconds: float) -> str:
    """Seconds as people write them."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 72:
        return f"{hours / 24:.0f} days"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
