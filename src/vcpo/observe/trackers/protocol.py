"""What a tracker is, and finding one by name.

Built-in trackers register with one line here. A user's own is named ``package.module:Name`` or ``path/to/file.py:Name``
in ``logging.report_to``. All of them run in processes of their own (``vcpo.observe.trackers.process``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vcpo.errors import UserError, suggest
from vcpo.observe.logger import Logger
from vcpo.plugins import load_object, split_spec

BUILT_IN: dict[str, str] = {
    "wandb": "vcpo.observe.trackers.wandb_tracker:WandbTracker",
    "trackio": "vcpo.observe.trackers.trackio_tracker:TrackioTracker",
    "mlflow": "vcpo.observe.trackers.mlflow_tracker:MLflowTracker",
}
"""Name (that of the extra and of the package that is imported) and class."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run.

    id: made when the run is new and kept in its directory, so that a resumed run continues the same tracker run.
    name: for people; two runs may have the same. config: the effective configuration as plain data.
    """

    directory: Path
    project: str
    name: str
    id: str
    config: Mapping[str, Any]


class Tracker(Logger, Protocol):
    """A logger that is made from a ``TrackedRun``. It may be slow, raise or hang: the run goes on without it.

    note: one sentence that is shown once the tracker has started, such as where the run can be seen; may be empty.
    """

    note: str


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for a name that is none, and for a tracker whose package is not installed, naming the extra."""
    for name in names:
        if ":" in name:
            try:
                split_spec(name)
            except ValueError as error:
                raise UserError(f"logging.report_to: {error}") from None
        elif name not in BUILT_IN:
            raise UserError(f"logging.report_to: unknown tracker {name!r}{suggest(name, BUILT_IN)}")
        else:
            spec = importlib.util.find_spec(name)
            # a directory called like the package, as some trackers leave behind, is no installation
            if spec is None or spec.origin is None:
                raise UserError(
                    f"logging.report_to has {name!r}, which is not installed: pip install 'vcpo[{name}]', or leave it"
                    " out"
                )


def make_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker, started. Raises whatever its package or the user's code raises."""
    factory: Callable[[TrackedRun], Tracker] = load_object(BUILT_IN.get(name, name))
    return factory(run)
