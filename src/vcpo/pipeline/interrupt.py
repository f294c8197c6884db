"""Ctrl-C and SIGTERM: finish the step, save, end. A second one ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# a terminal's Ctrl-C; a scheduler's end
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag that the run loop reads between two steps.

    abort: asked first; when it returns True the signal interrupts at once, because there is nothing to save (before the
        first step, where a run starts) or because something has failed elsewhere.
    note: told what the first signal does.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self.abort: Callable[[], bool] = lambda: True
        self._note = note
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in ENDING_SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self.abort():
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(RuntimeError):  # Python refuses to print inside an interrupted print
            self._note("interrupted: finishing this step, then saving (once more to end at once)")
