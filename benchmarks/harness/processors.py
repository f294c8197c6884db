"""How much processor time a run takes, with everything that it starts: sandboxes end within milliseconds of work.

The kernel adds the time of a process that has ended to its parent's account when the parent takes note of it. So the
accounts of the processes that live, each with those of its ended children, hold all of it, but for what is killed
together with the parent of what it has started.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vcpo.sandbox.process_tree import descendants

_TICK = os.sysconf("SC_CLK_TCK")
_APART = 0.2  # seconds between samples


def seconds_of_tree(pid: int) -> float:
    """Processor seconds so far of a process, of those below it, and of their children that have ended."""
    total = 0
    for each in [pid, *descendants(pid)]:
        try:
            after_the_name = Path(f"/proc/{each}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        except OSError:  # has just ended
            continue
        total += sum(map(int, after_the_name.split()[11:15]))  # utime, stime, cutime, cstime
    return total / _TICK


class ProcessorTime:
    """Samples the processor time of a process and all below it, until it is closed."""

    def __init__(
        self,
        pid: int,
        read: Callable[[int], float] = seconds_of_tree,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._read, self._clock = pid, read, clock
        self._times: list[float] = []
        self._seconds: list[float] = []
        self._closed = threading.Event()
        self.sample()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Take note of the present time. It never falls: what is counted between two parents comes back."""
        now, seconds = self._clock(), self._read(self._pid)
        self._times.append(now)
        self._seconds.append(max([seconds, *self._seconds[-1:]]))

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
