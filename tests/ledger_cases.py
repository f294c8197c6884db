"""A run on a virtual clock that keeps a real ledger, and what tests read from one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pacing_cases import VirtualRun
from vcpo.pipeline.fates import Fates
from vcpo.pipeline.ledger import Ledger
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory

MEMBERS = 2

ROW = "group_id, member, problem_id, state, reason, step, start_version, reward, response_tokens, stop_reason"


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Every row without its times, in order; read as any other program would."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {ROW} FROM trajectories ORDER BY group_id, member").fetchall()


def states_of(path: Path) -> dict[int, set[str]]:
    """The states of the members of every group."""
    states: dict[int, set[str]] = {}
    for row in rows_of(path):
        states.setdefault(row[0], set()).add(row[3])
    return states


def graded_group(
    number: int, versions: tuple[int, ...] = (0, 0), rewards: tuple[float | None, ...] = (1.0, 0.0)
) -> Group:
    """A graded group whose responses have three tokens each. versions: at which they were started."""
    trajectories = [
        Trajectory(
            group_id=number,
            index=index,
            prompt_ids=np.array([1]),
            response_ids_T=np.zeros(3, dtype=np.int64),
            mask_T=np.ones(3, dtype=bool),
            logprobs_T=np.zeros(3, dtype=np.float32),
            versions_T=np.full(3, version),
            stop_reason=StopReason.EOS,
            start_version=version,
            grade=Grade(reward),
        )
        for index, (version, reward) in enumerate(zip(versions, rewards, strict=True))
    ]
    return Group(number, Problem(f"p{number}", ""), number + 1, trajectories)


@dataclass
class LedgerRun(VirtualRun):
    """The virtual run with its events told to ``fates``, which ``on_step`` may write.

    on_step: called after every step, once what can be saved of it is in ``saved``.
    """

    fates: Fates = field(default_factory=Fates)
    on_step: Callable[[LedgerRun], None] = lambda run: None

    def _start(self) -> None:
        self.starter.fates = self.fates
        super()._start()

    def _decode(self) -> None:
        before = set(self._waiting)
        super()._decode()
        for number, group in self._waiting.items():
            if number not in before:
                versions = tuple(t.start_version for t in group.trajectories)
                self.fates.graded(graded_group(number, versions * MEMBERS, (1.0,) * MEMBERS))

    def _next_minibatch(self) -> list[int] | None:
        before = len(self.dropped)
        chosen = super()._next_minibatch()
        self.fates.dropped(self._version + 1, dict.fromkeys(self.dropped[before:], "stale"))
        return chosen

    def _finish_step(self) -> None:
        self.fates.trained(self._version + 1, self.trained[-1], None)
        super()._finish_step()
        self.on_step(self)

    def check(self, ledger: Ledger) -> None:
        """What the run loop asserts when a run ends."""
        progress = self.starter.progress
        ledger.check(progress.next_group, progress.done, self.starter.next_number, self._version * self.groups_per_step)


def continued(path: Path, run: LedgerRun) -> Ledger:
    """The ledger as a run opens it that begins where ``run`` does; the run then writes to it."""
    data = {"next_group": 0, "done": []} if run.begin is None else json.loads(run.begin.text)["data"]
    ledger = Ledger(path, MEMBERS, data["next_group"], data["done"])
    run.fates = ledger.fates
    return ledger
