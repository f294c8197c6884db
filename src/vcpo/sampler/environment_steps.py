"""Steps of environments in threads: a bounded number at a time, each with a time-out.

A thread cannot be ended from outside. One that hangs is given up after the time-out, and no longer counts for the
bound; when as many hang as may run, the process is not worth going on with, and says so.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from vcpo.records import StopReason
from vcpo.tasks.environment import Environment, LimitedEnvironment, Observation, Turn


class Episode:
    """The environment of one response, made when it is first asked."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._closed = False
        self._lock = threading.Lock()

    def answer(self, turn: Turn) -> Observation:
        """The environment's answer; for one thread at a time, as ``limit_reached`` is."""
        return self._made().step(turn)

    def limit_reached(self, reason: StopReason, unfinished: Turn | None) -> Observation:
        """What the environment has to add when a limit has ended the response."""
        return cast(LimitedEnvironment, self._made()).limit_reached(reason, unfinished)

    def _made(self) -> Environment:
        if self._environment is None:
            environment = self._make()
            with self._lock:
                closed, self._environment = self._closed, environment
            if closed:  # while it was being made
                environment.close()
                raise RuntimeError("the response has ended")
        return self._environment

    def close(self) -> None:
        """Close the environment in a thread of its own, or as soon as it is made; from any thread, at any time."""
        with self._lock:
            self._closed, environment = True, self._environment
        if environment is not None:
            # what it raises is printed by the thread, and is no reason to stop sampling
            threading.Thread(target=environment.close, name="environment close", daemon=True).start()


@dataclass(frozen=True)
class Answer:
    """What became of a step: what the environment returned, or a sentence saying what went wrong.

    key: as given to ``start``. seconds: from the start of the step.
    """

    key: tuple[int, int]
    returned: object
    failure: str | None
    seconds: float


@dataclass(frozen=True)
class _Running:
    key: tuple[int, int]
    started: float


class EnvironmentSteps:
    """Starts steps, and hands out what has become of them; for use by one thread.

    clock: seconds, from any zero.
    """

    def __init__(self, max_concurrent: int, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_concurrent = max_concurrent
        self._timeout = timeout
        self._clock = clock
        self._pending: deque[tuple[tuple[int, int], Callable[[], object]]] = deque()
        self._running: dict[int, _Running] = {}
        self._given_up: set[int] = set()
        self._results: queue.SimpleQueue[tuple[int, object, BaseException | None, float]] = queue.SimpleQueue()
        self._next = 0

    @property
    def unfinished(self) -> int:
        """Steps started and not yet handed out."""
        return len(self._pending) + len(self._running)

    def start(self, key: tuple[int, int], work: Callable[[], object]) -> None:
        """Call ``work`` in a thread as soon as one may run."""
        self._pending.append((key, work))
        self._launch()

    def answers(self, wait: float = 0.0) -> list[Answer]:
        """Those that are there, those over the time-out included; waits up to ``wait`` seconds for the first one.

        Raises RuntimeError when too many steps hang.
        """
        found: list[Answer] = []
        while self._running:
            try:
                ticket, returned, error, ended = self._results.get(timeout=0 if found else wait)
            except queue.Empty:
                break
            if ticket in self._given_up:
                self._given_up.remove(ticket)
                continue
            step = self._running.pop(ticket)
            failure = None if error is None else _sentence(error)
            found.append(Answer(step.key, returned, failure, ended - step.started))
        found += self._overdue()
        self._launch()
        return found

    def _overdue(self) -> list[Answer]:
        now = self._clock()
        overdue = {t: step for t, step in self._running.items() if now - step.started > self._timeout}
        for ticket in overdue:
            del self._running[ticket]
            self._given_up.add(ticket)
        if len(self._given_up) > self._max_concurrent:
            raise RuntimeError(
                f"{len(self._given_up)} steps of environments hang since more than {self._timeout:g} s; environments"
                " should end their steps when they are closed"
            )
        sentence = f"the environment did not answer within {self._timeout:g} s"
        return [Answer(step.key, None, sentence, now - step.started) for step in overdue.values()]

    def _launch(self) -> None:
        while self._pending and len(self._running) < self._max_concurrent:
            key, work = self._pending.popleft()
            self._running[self._next] = _Running(key, self._clock())
            threading.Thread(target=self._run, args=(self._next, work), name="environment", daemon=True).start()
            self._next += 1

    def _run(self, ticket: int, work: Callable[[], object]) -> None:
        try:
            returned, error = work(), None
        except BaseException as raised:  # also SystemExit: without a result the response would wait for ever
            returned, error = None, raised
        self._results.put((ticket, returned, error, self._clock()))


def _sentence(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    detail = " ".join(str(error).split())[:500]
    return f"the environment raised {type(error).__name__}: {detail}{where}"
