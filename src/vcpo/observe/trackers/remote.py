"""Trackers as the run sees them: loggers that never wait and never fail.

A tracker imports slowly, talks to a network and has bugs of its own, so each has a process. What goes wrong there is
noted once, and the tracker is off from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vcpo.observe.logger import Kind
from vcpo.observe.trackers.protocol import TrackedRun

FILE_NAME = "tracking.json"

_MOST_WAITING = 10_000  # lines that a tracker has not read yet
_END_SECONDS = 30.0


class RemoteTracker:
    """One tracker in its process. ``log`` puts a line into a queue, and a thread hands it over."""

    def __init__(
        self,
        tracker: str,
        run: TrackedRun,
        note: Callable[[str], None],
        end_seconds: float = _END_SECONDS,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """
        note: told, in one sentence, where the tracked run can be seen, and why the tracker is off; from a thread.
        end_seconds: how long ``close`` waits for what has not been handed over; then the tracker is killed.
        """
        self._name = tracker
        self._note = note
        self._end_seconds = end_seconds
        self._lock = threading.Lock()
        self._off = False
        self._closing = False
        self._lines: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._threads: list[threading.Thread] = []
        plain = {"directory": str(run.directory.resolve()), "project": run.project, "name": run.name, "id": run.id}
        self._lines.put(json.dumps({"tracker": tracker, "run": {**plain, "config": run.config}}, default=str))
        try:
            # a session of its own: Ctrl-C is for the run, and what the tracker starts can be ended with it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vcpo.observe.trackers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            self._turn_off(f"could not be started: {error}")
            return
        for target in (self._write, self._read):
            self._threads.append(threading.Thread(target=target, name=f"vcpo-{tracker}", daemon=True))
            self._threads[-1].start()

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics; never waits."""
        if self._off:
            return
        values = {name: float(value) for name, value in metrics.items()}
        try:
            self._lines.put_nowait(json.dumps({"step": step, "kind": kind, "metrics": values}))
        except queue.Full:
            self._turn_off(f"has not taken {self._lines.maxsize:,} lines of metrics")
            self._kill()

    def close(self) -> None:
        """Let the tracker hand over what it has, for a limited time. Safe to call twice."""
        with self._lock:
            if self._closing or not self._threads:
                return
            self._closing = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        try:
            self._process.wait(0.0 if self._off else self._end_seconds)
        except subprocess.TimeoutExpired:
            self._turn_off(f"was not done {self._end_seconds:g} s after the end of the run")
        self._kill()
        for thread in self._threads:
            thread.join(5)

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # the reader tells why a tracker has ended
            while (line := self._lines.get()) is not None:
                stream.write(line + "\n")
                stream.flush()
            stream.close()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        reason = ""
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                answer: dict[str, Any] = json.loads(line)
                if "note" in answer:
                    self._note(answer["note"])
                reason = answer.get("error", "")
        code = self._process.wait()
        if code and not self._off:
            self._turn_off(reason or f"ended with exit code {code}")

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            if self._off:
                return
            self._off = True
        self._note(f"{self._name} gets no more metrics of this run: it {_as_verb(reason)}; metrics.jsonl has them all")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)

    def _kill(self) -> None:
        """End the process and those that the tracker has started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def _as_verb(reason: str) -> str:
    verbs = ("could", "has", "was", "ended")
    return reason if reason.startswith(verbs) else f"failed with {reason}"


def tracked_run(directory: Path, project: str, name: str | None, config: Mapping[str, Any]) -> TrackedRun:
    """What trackers are told about the run in ``directory``, whose id is made or found there. Raises OSError."""
    path = directory / FILE_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        found = uuid.uuid4().hex[:12]
        path.write_text(json.dumps({"id": found}) + "\n", encoding="utf-8")
    return TrackedRun(directory, project, name or directory.resolve().name, str(found), config)
