"""How much processor time the machine has spent, by what the kernel counts for all processors together.

Of the machine and not of the run: a sandbox ends with nobody who takes its account. On a machine with other work the
numbers mean nothing, as all times do then.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_APART = 0.2  # seconds between samples


def busy_seconds(stat: str) -> float:
    """Processor seconds since the start of the machine, from the text of ``/proc/stat``: neither idle nor stolen."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, stat.split()[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / _TICK


class ProcessorTime:
    """Samples the processor time until it is closed."""

    def __init__(
        self,
        read: Callable[[], float] = lambda: busy_seconds(Path("/proc/stat").read_text(encoding="ascii")),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._times: list[float] = []
        self._seconds: list[float] = []
        self._closed = threading.Event()
        self.sample()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Take note of the present time."""
        self._times.append(self._clock())
        self._seconds.append(self._read())

    def between(self, begin: float, end: float) -> float:
        """Processor seconds between two times of the monotonic clock, linear between samples."""
        return self._at(end) - self._at(begin)

    def close(self) -> None:
        """End the sampling."""
        self._closed.set()
        self._thread.join()

    def _at(self, moment: float) -> float:
        after = bisect.bisect_left(self._times, moment)
        if after in (0, len(self._times)):
            return self._seconds[min(after, len(self._times) - 1)]
        (t0, t1), (s0, s1) = self._times[after - 1 : after + 1], self._seconds[after - 1 : after + 1]
        return s0 + (s1 - s0) * (moment - t0) / (t1 - t0)

    def _go_on(self) -> None:
        while not self._closed.wait(_APART):
            self.sample()
