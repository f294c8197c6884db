"""Sandboxes started ahead, each used for one run and then thrown away, a bounded number at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vcpo.sandbox.process import SandboxProcess
from vcpo.sandbox.protocol import Result, Status

_TRIES = 3  # sandboxes that are tried for one run, until one is up
_PAUSE = 0.2  # seconds before the next try to start one when that has failed


class Throttle:
    """At most so many runs at a time, and so many starts in a second; ``None`` is no limit."""

    def __init__(self, max_concurrent: int, per_second: float | None = None) -> None:
        self._places = threading.BoundedSemaphore(max_concurrent)
        self._apart = 0.0 if per_second is None else 1 / per_second
        self._next = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Wait for one's turn; the place is given back at the end of the block."""
        with self._places:
            if self._apart:
                with self._lock:
                    now = time.monotonic()
                    start = max(now, self._next)
                    self._next = start + self._apart
                time.sleep(start - now)
            yield


class SandboxPool:
    """An ``Executor``. Runs what it is given in the next sandbox that is ready."""

    def __init__(self, start: Callable[[], SandboxProcess], warm: int, throttle: Throttle) -> None:
        """start: raises OSError when there is no starting. warm: sandboxes kept ready; 0 starts each on demand."""
        self._start = start
        self._warm = warm
        self._throttle = throttle
        self._changed = threading.Condition()
        self._waiting = 0
        self._ready: deque[SandboxProcess | None] = deque()  # None: one could not be started
        self._running: set[SandboxProcess] = set()
        self._is_closed = False
        # all are started in one thread, which lives as long as the pool: the kernel ends a sandbox with its thread
        self._starter = threading.Thread(target=self._keep_ready, name="sandbox starter", daemon=True)
        self._starter.start()

    @property
    def running(self) -> int:
        """Sandboxes that are in use."""
        return len(self._running)

    def run(self, code: str, stdin: str = "") -> Result:
        """See ``Executor``."""
        with self._throttle.place():
            for _ in range(_TRIES):
                sandbox = self._take()
                if sandbox is None:
                    break
                try:
                    if sandbox.wait_until_ready():
                        return sandbox.run(code, stdin)
                finally:
                    with self._changed:
                        self._running.discard(sandbox)
                    sandbox.close()
        return Result(Status.SANDBOX_FAILURE, None, "", "", 0.0, "it could not be started")

    def close(self) -> None:
        """See ``Executor``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            running = list(self._running)
        for sandbox in running:
            sandbox.stop()
        self._starter.join()
        for idle in self._ready:
            if idle is not None:
                idle.close()
        self._ready.clear()

    def _take(self) -> SandboxProcess | None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._is_closed)
            self._waiting -= 1
            sandbox = None if self._is_closed else self._ready.popleft()
            if sandbox is not None:
                self._running.add(sandbox)
            self._changed.notify_all()
            return sandbox

    def _keep_ready(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._warm + self._waiting)
                if self._is_closed:
                    return
            sandbox = self._started()
            with self._changed:
                if sandbox is not None or self._waiting:
                    self._ready.append(sandbox)
                self._changed.notify_all()
                if sandbox is None:
                    self._changed.wait_for(lambda: self._is_closed, timeout=_PAUSE)

    def _started(self) -> SandboxProcess | None:
        try:
            return self._start()
        except OSError:
            return None
