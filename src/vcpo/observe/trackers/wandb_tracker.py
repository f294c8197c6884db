"""Weights & Biases (extra ``wandb``)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from vcpo.observe.logger import Kind
from vcpo.observe.trackers.protocol import TrackedRun


class WandbTracker:
    """Metrics ``train/NAME`` and ``eval/NAME`` over ``step``; W&B's own environment variables say where to and how.

    ``WANDB_MODE=offline`` needs no account: the run lies in ``wandb/`` in the run directory, for ``wandb sync``.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        directory = None if os.environ.get("WANDB_DIR") else str(run.directory)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=directory,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        # W&B's own step must not fall, but evaluations may arrive late, and a resumed run does steps again
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        url = getattr(self._run, "url", None)
        self.note = f"W&B: {url}" if url else ""

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        """Waits until everything is uploaded, or in the file when offline."""
        self._run.finish()
