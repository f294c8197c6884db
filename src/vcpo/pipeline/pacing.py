"""Pacing policies: how far the samplers may run ahead, what is dropped, and which groups the next step trains on.

``bounded``
    Starts are paced, training is in the order of starting, nothing is dropped (``vcpo.pipeline.pacer``). The default.
``drop_stale``
    What most asynchronous systems do: train on what is finished first, and drop a finished group whose oldest response
    was started more than the staleness limit ago. Slow prompts are dropped more often than quick ones, which is why
    this is an option to compare with and not the default.
``pace``
    ``drop_stale`` that also rejects the stalest waiting groups when too many are waiting (``vcpo.pipeline.pace``).

The limit is ``runtime.max_staleness``, or less where ``runtime.target_ess`` lowers it. No policy trains a group at a
lag over ``max_staleness``. With the dropping policies at most ``(max_ahead + 1)`` minibatches of groups are started and
neither trained nor dropped; every dropped group is replaced by one that starts at once, with the weights of that
moment, so the next minibatch can always be filled.

A group is judged once it is finished: an unfinished one holds nobody up, since training does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from vcpo.config import BoundedPacing, DropStalePacing, Pacing
from vcpo.pipeline.pace import Pace
from vcpo.pipeline.pacer import Pacer
from vcpo.records import Group

Scores = Callable[[Sequence[Group]], list[float]]
"""Groups to the prefix-forgetting score of each (``vcpo.pipeline.prefix_forgetting``)."""


class PacingPolicy(Protocol):
    """One rule. ``waiting`` are the finished groups that are neither trained nor dropped, first finished first.

    reasons: every reason for which the policy may drop a group.
    """

    reasons: tuple[str, ...]

    def ahead(self, limit: int) -> int:
        """Minibatches of groups that may be started beyond the one that is trained next."""
        ...

    def drops(self, step: int, limit: int, waiting: Sequence[Group], first_look: bool) -> dict[int, str]:
        """The waiting groups to drop before step ``step``, by number, with the reason for each.

        limit: the largest lag in force. Asked whenever groups have finished while the step's minibatch is not complete;
        first_look: for the first time for this step.
        """
        ...

    def choose(self, waiting: Sequence[Group], unfinished: Collection[int]) -> list[int] | None:
        """The numbers of the groups that the next step trains on, in order; ``None`` while they are not all there.

        unfinished: the numbers of those that have been started and are still being decoded or graded.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """The policy's own numbers at the last first look."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain numbers that continue the policy."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        ...


class Bounded:
    """Nothing is dropped, and groups are trained in the order in which they were started."""

    reasons: tuple[str, ...] = ()

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step

    def ahead(self, limit: int) -> int:
        """As far as the limit allows."""
        return limit

    def drops(self, step: int, limit: int, waiting: Sequence[Group], first_look: bool) -> dict[int, str]:
        """Nothing."""
        return {}

    def choose(self, waiting: Sequence[Group], unfinished: Collection[int]) -> list[int] | None:
        """Those with the lowest numbers, once all of them have finished."""
        finished = [group.id for group in waiting]
        chosen = sorted([*finished, *unfinished])[: self._groups_per_step]
        return (
            chosen if len(chosen) == self._groups_per_step and chosen[-1] < min(unfinished, default=math.inf) else None
        )

    def metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def state(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is none."""


class DropStale:
    """Trains on what is finished first and drops what has become older than the limit."""

    reasons: tuple[str, ...] = ("stale",)

    def __init__(self, groups_per_step: int, max_ahead: int | None) -> None:
        self._groups_per_step = groups_per_step
        self._max_ahead = max_ahead

    def ahead(self, limit: int) -> int:
        """``max_ahead``, or as far as the limit."""
        return limit if self._max_ahead is None else self._max_ahead

    def drops(self, step: int, limit: int, waiting: Sequence[Group], first_look: bool) -> dict[int, str]:
        """Groups with a response that was started more than ``limit`` steps ago."""
        return {group.id: "stale" for group in waiting if step - oldest_start(group) > limit}

    def choose(self, waiting: Sequence[Group], unfinished: Collection[int]) -> list[int] | None:
        """The first to have finished."""
        count = self._groups_per_step
        return [group.id for group in waiting[:count]] if len(waiting) >= count else None

    def metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def state(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is none."""


class DropStaleThenReject(DropStale):
    """``pace``: the age cap first, then the rejections of PACE among what is left."""

    reasons: tuple[str, ...] = ("stale", "rejected")

    def __init__(self, groups_per_step: int, max_ahead: int | None, pace: Pace, scores: Scores) -> None:
        super().__init__(groups_per_step, max_ahead)
        self._pace = pace
        self._scores = scores

    def drops(self, step: int, limit: int, waiting: Sequence[Group], first_look: bool) -> dict[int, str]:
        """Groups over the limit and, once per step, the stalest ones that the reject rate asks for."""
        stale = super().drops(step, limit, waiting, first_look)
        if not first_look:
            return stale
        left = [group for group in waiting if group.id not in stale]
        return stale | dict.fromkeys(self._pace.rejects(step, left, self._scores), "rejected")

    def metrics(self) -> dict[str, float]:
        """``reject_rate``: groups per step, smoothed."""
        return {"reject_rate": self._pace.rate}

    def state(self) -> dict[str, Any]:
        """The smoothed rate."""
        return {"rate": self._pace.rate}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._pace.rate = float(state["rate"])


def make_policy(section: Pacing, groups_per_step: int, scores: Scores) -> PacingPolicy:
    """The policy that a configuration names. scores: used by ``pace`` alone."""
    if isinstance(section, BoundedPacing):
        return Bounded(groups_per_step)
    if isinstance(section, DropStalePacing):
        return DropStale(groups_per_step, section.max_ahead)
    pace = Pace(section.target_occupancy * groups_per_step, section.smoothing, section.sharpening)
    return DropStaleThenReject(groups_per_step, section.max_ahead, pace, scores)


class GroupPool:
    """A policy with the counts around it: what was dropped and why, and what was waiting when the learner came.

    dropped: groups dropped in the whole run, by reason. failed: groups that could not be sampled.
    """

    def __init__(self, policy: PacingPolicy, groups_per_step: int, last_step: int) -> None:
        self._policy = policy
        self._groups_per_step = groups_per_step
        self._last_step = last_step
        self._looked_at = -1
        self._waiting = 0
        self.dropped = dict.fromkeys(policy.reasons, 0)
        self.failed = 0

    def started_limit(self, version: int, limit: int) -> int:
        """Groups with a number below this may start while ``version`` steps are done and ``limit`` is in force."""
        pacer = Pacer(self._policy.ahead(limit), self._groups_per_step)
        return pacer.started_limit(version, self._last_step, sum(self.dropped.values()) + self.failed)

    def drops(self, step: int, limit: int, waiting: Sequence[Group]) -> dict[int, str]:
        """The waiting groups to drop now, by number, with the reason for each. They are counted with this call."""
        first_look = step > self._looked_at
        if first_look:
            self._looked_at, self._waiting = step, len(waiting)
        drops = self._policy.drops(step, limit, waiting, first_look)
        for reason in drops.values():
            self.dropped[reason] += 1
        return drops

    def choose(self, waiting: Sequence[Group], unfinished: Collection[int]) -> list[int] | None:
        """See ``PacingPolicy``."""
        return self._policy.choose(waiting, unfinished)

    def lost(self, count: int) -> None:
        """So many groups have failed and will never finish; others take their place."""
        self.failed += count

    def metrics(self) -> dict[str, float]:
        """waiting_groups: finished when the learner asked for its minibatch; dropped_groups: so far, also by reason.

        failed_groups: that could not be sampled, so far.
        """
        return {
            "waiting_groups": float(self._waiting),
            "dropped_groups": float(sum(self.dropped.values())),
            "failed_groups": float(self.failed),
            **{f"dropped_groups/{reason}": float(count) for reason, count in self.dropped.items()},
            **self._policy.metrics(),
        }

    def state(self) -> dict[str, Any]:
        """Plain data that continue the counts and the policy."""
        return {"dropped": dict(self.dropped), "failed": self.failed, "policy": self._policy.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``, for the same policy."""
        self.dropped = dict(state["dropped"])
        self.failed = int(state["failed"])
        self._policy.load_state(state["policy"])


def oldest_start(group: Group) -> int:
    """The policy version that started the group's oldest response."""
    return min(trajectory.start_version for trajectory in group.trajectories)
