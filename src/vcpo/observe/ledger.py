"""``ledger.sqlite``: what has become of every trajectory of a run. The states, the table, and reading it.

One row per trajectory that the run has asked a sampler for. Its state is one of seven, each of which belongs to one of
the fates that a reader wants to know: trained, filtered, failed, in flight (and unrecorded, when an earlier ledger was
lost). Writing is ``vcpo.pipeline.ledger``'s; any program may read at the same time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vcpo.errors import UserError

FILE_NAME = "ledger.sqlite"
SCHEMA_VERSION = 1


class State(StrEnum):
    """Where a trajectory is."""

    PLANNED = "planned"  # undone by an interruption or a rollback: it will be sampled again
    RUNNING = "running"  # asked for, and its group not yet complete and graded
    FINISHED = "finished"  # graded, waiting for its minibatch
    TRAINED = "trained"  # part of the minibatch of an optimizer step
    FILTERED = "filtered"  # left out for the reason that is given
    FAILED = "failed"  # lost by the error that is given
    UNRECORDED = "unrecorded"  # done with, but the ledger that knew how is lost


IN_FLIGHT = (State.PLANNED, State.RUNNING, State.FINISHED)
FATES = ("trained", "filtered", "failed", "in flight", "unrecorded")

# the conditions make "exactly one fate, with its step or reason" a rule of the file itself
SCHEMA = f"""
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,          -- 0 .. num_generations - 1
    problem_id TEXT,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(state.value) for state in State)})),
    reason TEXT,                      -- of filtered, failed and unrecorded; of trained ones: why without a gradient
    step INTEGER,                     -- as in metrics.jsonl, optimizer steps done with the one that used or left it out
    start_version INTEGER,            -- the policy version that started it
    reward REAL,                      -- NULL: not scored (NaN is NULL, too)
    response_tokens INTEGER,
    stop_reason TEXT,
    asked_at REAL,                    -- Unix seconds: asked for; its group graded; its fate decided
    graded_at REAL,
    ended_at REAL,
    PRIMARY KEY (group_id, member),
    CHECK (state NOT IN ('trained', 'filtered') OR step IS NOT NULL),
    CHECK (state NOT IN ('filtered', 'failed', 'unrecorded') OR reason IS NOT NULL)
) WITHOUT ROWID
"""


def fate_of(state: State) -> str:
    """The fate that a state belongs to; one of ``FATES``."""
    return "in flight" if state in IN_FLIGHT else state.value


@dataclass(frozen=True)
class NotTrained:
    """The members of one group that share a state other than trained. step: ``None`` where there is none."""

    group: int
    problem: str | None
    state: State
    reason: str | None
    step: int | None
    trajectories: int


@dataclass(frozen=True)
class LedgerSummary:
    """The counts of a ledger at one moment.

    planned: all trajectories. counts: by state and reason (``None`` where a state needs none).
    lags: trained trajectories by policy lag at the start, in optimizer steps. not_trained: all others, by group.
    """

    planned: int
    counts: dict[tuple[State, str | None], int]
    lags: dict[int, int]
    not_trained: list[NotTrained]

    @property
    def fates(self) -> dict[str, int]:
        """Trajectories by fate, every fate named. They sum to ``planned``."""
        fates = dict.fromkeys(FATES, 0)
        for (state, _), count in self.counts.items():
            fates[fate_of(state)] += count
        return fates

    def only(self, state: str | None) -> LedgerSummary:
        """With nothing in ``not_trained`` but what is in this state or fate; everything for ``None``."""
        kept = [other for other in self.not_trained if state in (None, other.state.value, fate_of(other.state))]
        return replace(self, not_trained=kept)

    def to_plain(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return {
            "planned": self.planned,
            "fates": self.fates,
            "counts": [
                {"state": state.value, "reason": reason, "trajectories": count}
                for (state, reason), count in self.counts.items()
            ],
            "lags": {str(lag): count for lag, count in self.lags.items()},
            "not_trained": [{**vars(other), "state": other.state.value} for other in self.not_trained],
        }


def read_ledger(path: Path) -> LedgerSummary:
    """Read a ledger, also while its run is writing it.

    Raises UserError when there is none, when it cannot be read, or when its counts do not sum to what was planned.
    """
    none = UserError(f"{str(path.parent)!r} has no ledger ({path.name}): no step of this run has been recorded")
    if not path.is_file():
        raise none
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")  # everything below is of one moment
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                raise none  # the run was killed while it made the file
            return _summarize(connection)
    except (sqlite3.DatabaseError, ValueError) as error:
        raise UserError(f"the ledger {str(path)!r} cannot be read ({error})") from error


def _summarize(connection: sqlite3.Connection) -> LedgerSummary:
    (planned,) = connection.execute("SELECT COUNT(*) FROM trajectories").fetchone()
    rows = connection.execute("SELECT state, reason, COUNT(*) FROM trajectories GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2")
    counts = {(State(state), reason): count for state, reason, count in rows}
    if sum(counts.values()) != planned:
        raise ValueError(f"its counts sum to {sum(counts.values())}, but {planned} trajectories were planned")
    # the step that trained with version v is v + 1
    lags = connection.execute(
        "SELECT step - 1 - start_version, COUNT(*) FROM trajectories WHERE state = 'trained' GROUP BY 1 ORDER BY 1"
    )
    others = connection.execute(
        "SELECT group_id, problem_id, state, reason, step, COUNT(*) FROM trajectories WHERE state != 'trained'"
        " GROUP BY 1, 2, 3, 4, 5 ORDER BY 1"
    )
    return LedgerSummary(planned, counts, dict(lags), list(_not_trained(others)))


def _not_trained(rows: sqlite3.Cursor) -> Iterator[NotTrained]:
    for group, problem, state, reason, step, count in rows:
        yield NotTrained(group, problem, State(state), reason, step, count)
