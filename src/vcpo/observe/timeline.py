"""Where the time of a run goes: what every process does when, in files that join to one Chrome trace.

With ``logging.timeline_steps=N`` the processes of a run record the first N optimizer steps of every start, each into
its own file of the run directory: ``timeline/learner.jsonl``, ``timeline/sampler-0.jsonl``. One line is one event in
the Chrome trace format, so that a process that is killed leaves all but its last tenth of a second readable.
``vcpo timeline RUN`` joins the files (``vcpo.observe.trace``).

How a process records::

    timeline = Timeline.open(run_dir, "sampler-0", last_step)   # or Timeline.off()
    with timeline.span("load weights", version=7):              # one span
        ...
    begin = timeline.now()                                      # many short spans of one kind become one
    finished = engine.step()
    timeline.more("decode", begin, "decode v7", tokens=64, seconds_of={"prefill": 0.002})
    timeline.counter("waiting groups", 12)
    timeline.step_is(7)       # the newest version here; from ``last_step`` on, nothing more is recorded
    timeline.close()

A span costs two readings of the clock and an append. The clock is the system's monotonic one, which all processes of a
machine share. Spans of one thread may lie within each other, but must not overlap otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

DIRECTORY = "timeline"
STEP = "step"  # the kind of the mark at the end of an optimizer step

_FLUSH_AFTER = 100_000_000  # ns
_LONGEST_MERGED = 100_000_000  # ns, so that a kill loses no more than that
_LONGEST_GAP = 1_000_000  # ns; after a longer one a new span begins


def clear_timeline(run_dir: Path) -> None:
    """Remove what an earlier start has recorded; the learner's process calls it before any process records."""
    shutil.rmtree(run_dir / DIRECTORY, ignore_errors=True)


class Timeline:
    """The record of one process. Any of its threads may record; each has a track of its own.

    A full disk ends the record, not the run.
    """

    def __init__(self, path: Path | None, last_step: int) -> None:
        """path: appended to; ``None`` records nothing. last_step: the record ends when this step is reached."""
        self._path = path
        self.last_step = last_step
        self._events: list[dict[str, Any]] = []
        self._merged: dict[int, _Merged] = {}  # by thread
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._flushed = time.monotonic_ns()
        if path is not None:
            self._events.append({"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": path.stem}})
            self._write(make=True)

    @classmethod
    def open(cls, run_dir: Path, process: str, last_step: int) -> Timeline:
        """Record as ``process`` until ``last_step`` is reached. A restarted process continues the file."""
        return cls(run_dir / DIRECTORY / f"{process}.jsonl", last_step)

    @classmethod
    def off(cls) -> Timeline:
        """Records nothing."""
        return cls(None, 0)

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._path is not None

    def now(self) -> int:
        """Nanoseconds of the clock that all processes share."""
        return time.monotonic_ns()

    def span(self, kind: str, **args: Any) -> _Span:
        """A context manager: the time within it is spent on ``kind``. args: shown with the span."""
        return _Span(self, kind, args)

    def add(self, kind: str, begin: int, end: int, args: Mapping[str, Any]) -> None:
        """A span from ``begin`` to ``end``, both from ``now``."""
        if self._path is None:
            return
        self._end_merged()
        self._append(threading.get_native_id(), kind, kind, begin, end, args)
        self._flush_sometimes(end)

    def more(
        self, kind: str, begin: int, title: str = "", seconds_of: Mapping[str, float] | None = None, **amounts: float
    ) -> None:
        """A span from ``begin`` to now that goes on the thread's last one, if that has the same kind and title.

        seconds_of: the part of this time that belongs to other kinds. amounts: summed over what becomes one span, which
        also counts them (``times``).
        """
        if self._path is None:
            return
        end, thread = time.monotonic_ns(), threading.get_native_id()
        merged = self._merged.get(thread)
        if merged is None or not merged.goes_on(kind, title, begin):
            self._end_merged()
            merged = self._merged[thread] = _Merged(kind, title, begin)
        merged.add(end, amounts, seconds_of)
        self._flush_sometimes(end)

    def counter(self, name: str, value: float) -> None:
        """The value of a quantity from now on, drawn as a curve."""
        if self._path is None:
            return
        now = time.monotonic_ns()
        with self._lock:
            self._events.append(
                {"name": name, "ph": "C", "ts": now / 1000, "pid": os.getpid(), "args": {"value": value}}
            )
        self._flush_sometimes(now)

    def step_is(self, step: int) -> None:
        """The optimizer has done ``step`` steps, as far as this process knows. Ends the record at ``last_step``."""
        if self._path is None:
            return
        now = time.monotonic_ns()
        self._append(threading.get_native_id(), STEP, f"step {step}", now, now, {"step": step})
        if step >= self.last_step:
            self.close()

    def flush(self) -> None:
        """Write everything now, as before a wait in which the process may be killed."""
        if self._path is not None:
            self._end_merged()
            self._write()

    def close(self) -> None:
        """Write what is left; nothing is recorded from now on."""
        if self._path is not None:
            for thread in list(self._merged):
                self._end_merged(thread)
            self._write()
            self._path = None

    def _append(self, thread: int, kind: str, title: str, begin: int, end: int, args: Mapping[str, Any]) -> None:
        process = os.getpid()
        event: dict[str, Any] = {"name": title, "cat": kind, "ph": "X", "ts": begin / 1000, "dur": (end - begin) / 1000}
        if kind == STEP:
            event = {"name": title, "cat": kind, "ph": "i", "ts": begin / 1000, "s": "p"}
        with self._lock:
            if thread not in self._threads:
                self._threads.add(thread)
                name = {"name": threading.current_thread().name}
                self._events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": name})
            self._events.append({**event, "pid": process, "tid": thread, "args": dict(args)})

    def _end_merged(self, thread: int | None = None) -> None:
        if self._merged:
            thread = threading.get_native_id() if thread is None else thread
            merged = self._merged.pop(thread, None)
            if merged is not None:
                self._append(thread, merged.kind, merged.title or merged.kind, merged.begin, merged.end, merged.args)

    def _flush_sometimes(self, now: int) -> None:
        if now - self._flushed > _FLUSH_AFTER:
            self._flushed = now
            self._write()

    def _write(self, make: bool = False) -> None:
        with self._lock:
            path, events = self._path, self._events
            self._events = []
            if path is None:
                return
            try:
                if make:
                    path.parent.mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(event) for event in events]
                if make:
                    lines.insert(0, "")  # separates from a line that a killed process has not ended
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
            except OSError:
                self._path = None


class _Span:
    """The context manager of one span."""

    __slots__ = ("_args", "_begin", "_kind", "_timeline")

    def __init__(self, timeline: Timeline, kind: str, args: dict[str, Any]) -> None:
        self._timeline = timeline
        self._kind = kind
        self._args = args
        self._begin = 0

    def __enter__(self) -> None:
        self._timeline._end_merged()
        self._begin = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeline.add(self._kind, self._begin, time.monotonic_ns(), self._args)


class _Merged:
    """Spans of one kind that follow each other, as one."""

    def __init__(self, kind: str, title: str, begin: int) -> None:
        self.kind = kind
        self.title = title
        self.begin = begin
        self.end = begin
        self._times = 0
        self._amounts: dict[str, float] = {}
        self._seconds_of: dict[str, float] = {}

    def goes_on(self, kind: str, title: str, begin: int) -> bool:
        return (
            (self.kind, self.title) == (kind, title)
            and begin - self.end <= _LONGEST_GAP
            and self.end - self.begin <= _LONGEST_MERGED
        )

    def add(self, end: int, amounts: Mapping[str, float], seconds_of: Mapping[str, float] | None) -> None:
        self.end = end
        self._times += 1
        for name, amount in amounts.items():
            self._amounts[name] = self._amounts.get(name, 0) + amount
        for name, seconds in (seconds_of or {}).items():
            if seconds:
                self._seconds_of[name] = self._seconds_of.get(name, 0) + seconds

    @property
    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = {"times": self._times, **self._amounts}
        if self._seconds_of:
            args["seconds_of"] = self._seconds_of
        return args
