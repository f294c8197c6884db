"""A run on a virtual clock: samplers and a learner of any speed around the real pool, starter and control.

Time goes in ticks. A response makes one token per tick with the weights of that tick, as with in-flight updates. The
learner looks at the pool in every tick in which it is idle. Nothing here is random or takes real time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vcpo.config import LocalRuntime, Pacing
from vcpo.pipeline.pacing import GroupPool, make_policy
from vcpo.pipeline.rollouts import DataProgress, GroupStarter
from vcpo.pipeline.staleness_control import StalenessControl
from vcpo.records import Group, Problem, StopReason, Trajectory


def pacing_of(value: str | dict[str, Any]) -> Pacing:
    """The pacing section of a configuration, validated."""
    return LocalRuntime.model_validate({"name": "local", "pacing": value}).pacing


def finished_group(number: int, *responses: Sequence[int]) -> Group:
    """A group by the policy versions of the tokens of each response."""
    trajectories = [
        Trajectory(
            group_id=number,
            index=index,
            prompt_ids=np.array([1]),
            response_ids_T=np.zeros(len(versions), dtype=np.int64),
            mask_T=np.ones(len(versions), dtype=bool),
            logprobs_T=np.zeros(len(versions), dtype=np.float32),
            versions_T=np.array(versions, dtype=np.int64),
            stop_reason=StopReason.EOS,
            start_version=versions[0],
        )
        for index, versions in enumerate(responses)
    ]
    return Group(number, Problem(str(number), ""), number + 1, trajectories)


class CountedPrompts:
    """Prompts without text: the problem at position ``p`` is named ``p``."""

    skipped = truncated = 0
    have_environments = False

    def __init__(self, position: int) -> None:
        self._position = position

    def next(self) -> tuple[Problem, Any, int]:
        self._position += 1
        return Problem(str(self._position - 1), ""), np.array([1]), self._position


@dataclass
class Saved:
    """What a checkpoint would hold, as JSON."""

    version: int
    text: str


@dataclass
class VirtualRun:
    """One session. Lists of speeds are cycled through.

    token_counts: length of the response of each group in ticks; step_ticks: duration of each optimizer step;
    slots: groups decoded at the same time; ess: of a minibatch with the given lags.
    """

    pacing: Pacing
    max_staleness: int
    groups_per_step: int
    last_step: int
    token_counts: Sequence[int]
    step_ticks: Sequence[int]
    slots: int
    target_ess: float | None = None
    ess: Callable[[list[int]], float] = lambda lags: 1.0
    begin: Saved | None = None
    stop_after: int | None = None

    started: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    lags: list[list[int]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    most_open: int = 0
    saved: Saved | None = None

    def run(self) -> VirtualRun:
        self._version = 0
        progress = DataProgress()
        policy = make_policy(self.pacing, self.groups_per_step, lambda groups: [float(g.id % 3) for g in groups])
        self.pool = GroupPool(policy, self.groups_per_step, self.last_step)
        self.control = StalenessControl(self.max_staleness, self.target_ess, in_flight=True)
        if self.begin is not None:
            self._version = self.begin.version
            state = json.loads(self.begin.text)
            progress = DataProgress(**state["data"])
            self.pool.load_state(state["pool"])
            self.control.load_state(state["control"])
        self.starter = GroupStarter(CountedPrompts(progress.position), progress)  # type: ignore[arg-type]
        self._queue: list[int] = []
        self._decoding: dict[int, list[int]] = {}
        self._waiting: dict[int, Group] = {}
        self._start()
        last = self.last_step if self.stop_after is None else self.stop_after
        busy = 0
        batch: list[int] | None = None
        for _ in range(100_000):
            if batch is None:
                batch = self._next_minibatch()
                if batch is not None:
                    busy = self.step_ticks[self._version % len(self.step_ticks)]
            if batch is not None and busy == 0:
                self._finish_step()
                batch = None
                if self._version == last:
                    return self
                continue
            busy -= batch is not None
            self._decode()
        raise AssertionError("the learner waits for ever")

    def _start(self) -> None:
        for group in self.starter.start(self.pool.started_limit(self._version, self.control.limit)):
            assert group.problem.id == str(group.id)
            self.started.append(group.id)
            self._queue.append(group.id)
        self.most_open = max(self.most_open, len(self._queue) + len(self._decoding) + len(self._waiting))

    def _next_minibatch(self) -> list[int] | None:
        waiting = list(self._waiting.values())
        drops = self.pool.drops(self._version, self.control.limit, waiting)
        self.dropped += drops
        for number in drops:
            del self._waiting[number]
        self.starter.finish(drops)
        if drops:
            self._start()
        chosen = self.pool.choose(
            [group for group in waiting if group.id not in drops], [*self._queue, *self._decoding]
        )
        if chosen is None:
            return None
        groups = [self._waiting.pop(number) for number in chosen]
        self.starter.finish(chosen)
        self.trained.append(chosen)
        self.lags.append([self._version - t.start_version for group in groups for t in group.trajectories])
        return chosen

    def _finish_step(self) -> None:
        self._version += 1
        self.control.observe({"ess": self.ess(self.lags[-1])})
        self.limits.append(self.control.limit)
        state = {
            "data": vars(self.starter.progress),
            "pool": self.pool.state(),
            "control": self.control.state(),
        }
        self.saved = Saved(self._version, json.dumps(state))
        self._start()

    def _decode(self) -> None:
        while self._queue and len(self._decoding) < self.slots:
            self._decoding[self._queue.pop(0)] = []
        for number, versions in list(self._decoding.items()):
            versions.append(self._version)
            if len(versions) == self.token_counts[number % len(self.token_counts)]:
                self._waiting[number] = finished_group(number, self._decoding.pop(number))
