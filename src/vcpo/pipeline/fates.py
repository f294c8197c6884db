"""What becomes of the groups of a run: which events may follow which.

::

    planned ──► running ──► finished ──► trained at step s
       │           │            ├──────► filtered (dropped by the pacing policy; its step was skipped)
       │           └────────────┴──────► failed (the sampler, the grader or the learner's step raised)
       └──────────────────────────────► filtered (not needed again)

A group comes to life as *running*; *planned* are only those that an interruption or a rollback has undone. Members of
a group move together, so the rules are about groups. An event that does not fit raises IllegalTransition. Events come
from the learner's main thread and from the collector thread; nothing here touches the disk (``vcpo.pipeline.ledger``
does).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from vcpo.observe.clock import now
from vcpo.observe.ledger import State
from vcpo.records import Group, Trajectory

NOT_NEEDED = "not needed: started before an interruption, and the resumed run finished without it"
SKIPPED = "step skipped: "

_NEXT: dict[State, tuple[State, ...]] = {
    State.PLANNED: (State.RUNNING,),  # and filtered, by ``not_needed`` alone
    State.RUNNING: (State.FINISHED, State.FAILED, State.PLANNED),
    State.FINISHED: (State.TRAINED, State.FILTERED, State.FAILED, State.PLANNED),
}


class IllegalTransition(RuntimeError):
    """An event for a group that cannot have it. A defect of the program."""


@dataclass(frozen=True)
class Member:
    """What is known of one finished response. unscored: why it has no reward or nothing to train, else ``None``."""

    start_version: int
    reward: float | None
    response_tokens: int
    stop_reason: str
    unscored: str | None


@dataclass(frozen=True)
class GroupFate:
    """Where one group is. step: optimizer steps done with the one that decided it. Times in Unix seconds."""

    number: int
    problem_id: str | None
    state: State
    reason: str | None = None
    step: int | None = None
    members: tuple[Member, ...] = ()
    asked_at: float | None = None
    graded_at: float | None = None
    ended_at: float | None = None


class Fates:
    """The open groups, and what has changed since the last ``take``. Safe to use from several threads.

    seconds: processor time spent in here so far.
    """

    def __init__(self, planned: Iterable[GroupFate] = (), next_group: int = 0, done: Iterable[int] = ()) -> None:
        """planned: of the ledger that is continued. Groups below ``next_group`` and those in ``done`` have ended."""
        self._lock = threading.Lock()
        self._open = {fate.number: fate for fate in planned}
        self._ended = _Numbers(next_group, done)
        self._changed: dict[int, GroupFate] = {}
        self.seconds = 0.0

    def started(self, number: int, problem_id: str) -> None:
        """Its responses are being asked for."""
        with self._timed():
            if number in self._open:
                self._check(number, State.RUNNING)
            elif number in self._ended:
                raise IllegalTransition(f"group {number} cannot be running: it has ended before")
            self._set(GroupFate(number, problem_id, State.RUNNING, asked_at=now()))

    def graded(self, group: Group) -> None:
        """All its responses have come and are graded."""
        with self._timed():
            fate = self._check(group.id, State.FINISHED)
            members = tuple(_member(trajectory) for trajectory in group.trajectories)
            self._set(replace(fate, state=State.FINISHED, members=members, graded_at=now()))

    def given_up(self, numbers: Iterable[int]) -> None:
        """A rollback has undone their responses; they are asked for again with other weights."""
        with self._timed():
            for number in numbers:
                fate = self._check(number, State.PLANNED)
                self._set(GroupFate(number, fate.problem_id, State.PLANNED))

    def trained(self, step: int, numbers: Iterable[int], skipped: str | None) -> None:
        """They were the minibatch of ``step``. skipped: why it made no update, or ``None``."""
        with self._timed():
            for number in numbers:
                if skipped is None:
                    self._end(number, State.TRAINED, None, step)
                else:
                    self._end(number, State.FILTERED, SKIPPED + skipped, step)

    def dropped(self, step: int, reasons: Mapping[int, str]) -> None:
        """The pacing policy dropped these groups when the minibatch of ``step`` was made."""
        with self._timed():
            for number, reason in reasons.items():
                self._end(number, State.FILTERED, reason, step)

    def failed(self, numbers: Iterable[int], reason: str) -> None:
        """They are lost by an error."""
        with self._timed():
            for number in numbers:
                self._end(number, State.FAILED, reason, None)

    @contextlib.contextmanager
    def failing(self, what: str, numbers: Collection[int] | Callable[[], Collection[int]]) -> Iterator[None]:
        """If the block raises, these groups, or those that the function then gives, have failed at ``what``."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = f"{what}: {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
            self.failed(numbers() if callable(numbers) else numbers, reason)
            raise

    def not_needed(self, step: int) -> None:
        """The run is finished: what an interruption has undone and nobody asked for again is not needed."""
        with self._timed():
            for fate in [fate for fate in self._open.values() if fate.state is State.PLANNED]:
                self._close(fate, State.FILTERED, NOT_NEEDED, step)

    def take(self) -> dict[int, GroupFate]:
        """The groups that have changed since the last call, by number."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return changed

    def give_back(self, changed: Mapping[int, GroupFate]) -> None:
        """What was taken could not be written; later changes of the same groups stay."""
        with self._lock:
            self._changed = {**changed, **self._changed}

    def _check(self, number: int, state: State) -> GroupFate:
        fate = self._open.get(number)
        if fate is None or state not in _NEXT[fate.state]:
            absent = "it has ended before" if number in self._ended else "it was never started"
            raise IllegalTransition(
                f"group {number} cannot be {state}: {absent if fate is None else f'it is {fate.state}'}"
            )
        return fate

    def _set(self, fate: GroupFate) -> None:
        self._open[fate.number] = self._changed[fate.number] = fate

    def _end(self, number: int, state: State, reason: str | None, step: int | None) -> None:
        self._close(self._check(number, state), state, reason, step)

    def _close(self, fate: GroupFate, state: State, reason: str | None, step: int | None) -> None:
        del self._open[fate.number]
        self._ended.add(fate.number)
        self._changed[fate.number] = replace(fate, state=state, reason=reason, step=step, ended_at=now())

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        with self._lock:
            begin = time.thread_time()  # while a thread waits for Python's lock, another one works
            yield
            self.seconds += time.thread_time() - begin


class _Numbers:
    """A growing set of numbers that are nearly all there: those below the first gap take no memory."""

    def __init__(self, gap: int, above: Iterable[int]) -> None:
        self._gap = gap
        self._above = set(above)

    def __contains__(self, number: int) -> bool:
        return number < self._gap or number in self._above

    def add(self, number: int) -> None:
        self._above.add(number)
        while self._gap in self._above:
            self._above.remove(self._gap)
            self._gap += 1


def _member(trajectory: Trajectory) -> Member:
    reward = None if trajectory.grade is None else trajectory.grade.reward
    failure = None if trajectory.grade is None else trajectory.grade.failure
    untrained = None if trajectory.mask_T.any() else "no token to train"
    unscored = failure or "no reward" if reward is None else untrained
    return Member(
        trajectory.start_version,
        None if reward is None else float(reward),
        len(trajectory.response_ids_T),
        trajectory.stop_reason.value,
        unscored,
    )
