"""The clock of a run's records: Unix seconds that never go back while the process lives.

The time of day may jump by hours, when a machine is told the right time or wakes up. Decisions use durations alone
(``time.monotonic``); what is written with a date must not jump either, or the ledger would tell of responses that were
graded before they were asked for.
"""

from __future__ import annotations

import time


class SteadyClock:
    """The time of day at its making, and the seconds that have passed since.

    Called, it gives Unix seconds. The time that the machine was asleep counts where the system can tell (Linux).
    """

    def __init__(self) -> None:
        self._begin = time.time() - _passed()

    def __call__(self) -> float:
        return self._begin + _passed()


def _passed() -> float:
    """Seconds since some moment before the process; unlike ``time.monotonic`` it goes on while a machine sleeps."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


now = SteadyClock()
"""Unix seconds, for everything that this process writes down."""
