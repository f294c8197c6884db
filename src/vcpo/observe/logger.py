"""What every destination of metrics has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Kind = Literal["train", "eval"]


class Logger(Protocol):
    """A destination of metrics. The run loop calls every logger with the same numbers."""

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one optimizer step or one evaluation.

        step: optimizer steps done. kind: ``train`` for the step's own numbers, ``eval`` for held-out problems.
        Values may be NaN or infinite; a logger must not fail on them.
        """
        ...

    def close(self) -> None:
        """Write out what is buffered; called once, also after a failure."""
        ...
