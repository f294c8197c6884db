"""trackio (extra ``trackio``): a local dashboard, or one in a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Mapping

from vcpo.observe.logger import Kind
from vcpo.observe.trackers.protocol import TrackedRun


class TrackioTracker:
    """Metrics ``train/NAME`` and ``eval/NAME``; local unless ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` is set.

    trackio knows runs by their names, so the run's id is a part of it.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.note = f"trackio: see the run with: trackio show --project {run.project}"

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({f"{kind}/{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Waits until everything is stored."""
        self._run.finish()
