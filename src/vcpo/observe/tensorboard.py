"""The same metrics as TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vcpo.observe.logger import Kind


class TensorBoardLogger:
    """Writes scalars ``train/NAME`` and ``eval/NAME`` under the run directory's ``tensorboard/``."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """resume_step: events of steps after it are hidden, because the resumed run does those steps again."""
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
