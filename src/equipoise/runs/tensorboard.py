"""A live view of a run for TensorBoard: the usual scalars, and the confusion after every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..engine.train import Epoch
from ..errors import UsageError
from ..files import check_folder, claim_folder, remove_files
from .progress import Watch

SCALARS = ("top1", "top5", "base", "new", "latest")
"""of every step, by the number of classes"""
SUFFIX = ".equipoise"
EVENTS = f"events.out.tfevents.*{SUFFIX}"
"""the names of our files: TensorBoard's own, and an ending that tells them from others"""


def import_summary_writer() -> Any:
    """TensorBoard's writer, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter


class TensorBoard(Watch):
    """Writes events to the folder `tensorboard` of a run. Resuming rewrites the scalars, without duplicates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.open = folder / "tensorboard", import_summary_writer()
        check_folder(self.folder, "tensorboard", [EVENTS])
        self.writer: Any = None

    def show_past(self, lines: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> None:
        """Delete our old events, and write those of the epochs and steps so far."""
        self.close()
        claim_folder(self.folder, "tensorboard", [EVENTS])
        remove_files(self.folder, [EVENTS])
        self.writer = self.open(str(self.folder), filename_suffix=SUFFIX)
        for line in lines:
            self.end_epoch(Epoch(**{name: line[name] for name in Epoch._fields}))
        for record in records:
            self.end_step(record)

    def end_epoch(self, e: Epoch) -> None:
        """The scalars of an epoch, by the number of epochs of that stage so far."""
        at, stage = e.step * e.epochs + e.epoch, "training" if e.stage == "train" else e.stage
        for name in ("loss", "lr", "alpha", "images_per_second"):
            if (value := getattr(e, name)) is not None:
                self.writer.add_scalar(f"{stage}/{name}", value, at)

    def end_step(self, record: dict[str, Any]) -> None:
        """The accuracies after a step, by the number of classes."""
        for name in SCALARS:
            if record[name] is not None:
                self.writer.add_scalar(f"accuracy/{name}", record[name], record["classes"])
        self.writer.flush()

    def show_confusion(self, counts: Tensor) -> None:
        """The confusion matrix after a step, log(1 + x), true classes down."""
        shown = np.log1p(counts.cpu().numpy().astype(np.float32))
        self.writer.add_image("confusion", shown / max(shown.max(), 1e-9), len(counts), dataformats="HW")

    def close(self) -> None:
        """Flush and close the file."""
        if self.writer is not None:
            self.writer.close()
