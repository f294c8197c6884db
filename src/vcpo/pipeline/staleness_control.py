"""The staleness limit that follows the effective sample size: lowered when it is too small, raised when it recovers.

``runtime.max_staleness`` is a guess made before the run. How much staleness a run bears shows in the effective sample
size (ESS), so this controller holds the ESS of the minibatches at or above ``runtime.target_ess`` by moving the limit
that is in force, between 0 and ``max_staleness``. The rule is the one of congestion control, additive increase and
multiplicative decrease [D]: a minibatch below the target halves the limit (rounded down), one at or above it raises the
limit by 1. It backs off quickly, because the ESS falls from healthy to collapsed within about ten steps, and probes
slowly. It begins at ``max_staleness``.

Where responses are in flight, groups that have been started under one limit are still trained when another is in force,
and their ESS says nothing about it. A change shows first when a group that was started after it is as old as it allows,
so after a change between ``k`` and ``k'`` the ESS of the next ``max(k, k')`` steps is not looked at: a loop that reacts
before its last action shows oscillates.

``drain`` sets the limit to 0 for some steps, whatever else holds: the next minibatches are trained on at lag 0. Where
responses are in flight, those that the old limit let start are trained first, which takes as many steps as it was.

The rule has no randomness and no clock; its state is three integers.
"""

from __future__ import annotations

from collections.abc import Mapping


class StalenessControl:
    """How many steps old a policy may be at most, now."""

    def __init__(self, max_staleness: int, target_ess: float | None, in_flight: bool) -> None:
        """in_flight: a new limit reaches only groups that start from now on; otherwise the next minibatch obeys it."""
        self._limit = max_staleness
        self._max_staleness = max_staleness
        self._target_ess = target_ess
        self._in_flight = in_flight
        self._wait = 0
        self._drained = 0

    @property
    def limit(self) -> int:
        """In optimizer steps, for what starts next; ``max_staleness`` unless a target or a drain lowers it."""
        return 0 if self._drained else self._limit

    def drain(self, steps: int) -> None:
        """Hold the limit at 0 for so many minibatches, and for those that are in flight."""
        if self._in_flight:
            steps += self.limit
        self._drained = max(self._drained, steps)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of the step just done, of which only ``ess`` is used.

        A step without it (nothing was scored) changes nothing. One that is not a number counts as below the target.
        """
        if self._drained:
            self._drained -= 1
            if self._in_flight and not self._drained:
                self._wait = self._limit
            return
        if self._target_ess is None:
            return
        if self._wait:
            self._wait -= 1
            return
        if "ess" not in metrics:
            return
        before = self._limit
        # written so that NaN is low
        self._limit = min(before + 1, self._max_staleness) if metrics["ess"] >= self._target_ess else before // 2
        if self._in_flight and self._limit != before:
            self._wait = max(before, self._limit)

    def metrics(self) -> dict[str, float]:
        """``staleness_limit``: nothing where no ESS is to be held and nothing is drained."""
        return {} if self._target_ess is None and not self._drained else {"staleness_limit": float(self.limit)}

    def state(self) -> dict[str, int]:
        """Plain numbers that continue the control."""
        return {"limit": self._limit, "wait": self._wait, "drained": self._drained}

    def load_state(self, state: Mapping[str, int]) -> None:
        """The inverse of ``state``."""
        self._limit = min(state["limit"], self._max_staleness)
        self._wait = state["wait"]
        self._drained = state.get("drained", 0)
