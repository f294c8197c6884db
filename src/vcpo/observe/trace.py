"""Reading the timeline of a run: one Chrome trace of all processes, and what share of the time each spent on what."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.errors import UserError
from vcpo.observe.timeline import DIRECTORY, STEP

Event = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """What one thread of one process has spent on one kind of work.

    times: spans, with those that were recorded as one counted singly. seconds: without those of the spans within.
    """

    process: str
    thread: str
    kind: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """The events of all processes by process name, in the order of writing, with times in microseconds."""

    events: dict[str, list[Event]]

    def to_chrome(self) -> dict[str, Any]:
        """The trace as Perfetto and ``chrome://tracing`` open it; times begin at 0."""
        every = [event for events in self.events.values() for event in events]
        start = min((event["ts"] for event in every if "ts" in event), default=0.0)
        shifted = [{**event, "ts": event["ts"] - start} if "ts" in event else event for event in every]
        names = [event for event in every if event["name"] == "process_name"]
        order = {process: place for place, process in enumerate(self.events)}
        for event in names:
            place = {"sort_index": order[event["args"]["name"]]}
            shifted.append({"name": "process_sort_index", "ph": "M", "pid": event["pid"], "args": place})
        return {"traceEvents": shifted, "displayTimeUnit": "ms"}

    def steps(self) -> dict[int, float]:
        """When the learner was done with each optimizer step, in seconds of the trace's clock."""
        learner = self.events.get("learner", [])
        return {event["args"]["step"]: event["ts"] / 1e6 for event in learner if event.get("cat") == STEP}

    def window(self, skip: int = 1) -> tuple[float, float]:
        """From the end of the ``skip``-th recorded step to that of the last one, in seconds.

        The first step waits until the samplers have been started, which says nothing about the others. Raises
        UserError when fewer steps have been recorded.
        """
        ends = sorted(self.steps().values())
        if len(ends) < skip + 1:
            raise UserError(
                f"the timeline holds {len(ends)} optimizer steps, of which the first {skip} are left out: record more"
                " with logging.timeline_steps"
            )
        return ends[max(skip, 1) - 1] if skip else self._begin(), ends[-1]

    def shares(self, begin: float, end: float) -> list[Share]:
        """The seconds between two times of the trace's clock, by process, thread and kind; the largest first."""
        found = []
        for process, events in self.events.items():
            threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            for thread in threads:
                spans = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
                of_kind = _own_seconds(spans, begin, end)
                found += [
                    Share(process, threads[thread], kind, round(times), seconds)
                    for kind, (times, seconds) in sorted(of_kind.items(), key=lambda item: -item[1][1])
                ]
        return found

    def _begin(self) -> float:
        return float(min(event["ts"] for events in self.events.values() for event in events if "ts" in event) / 1e6)


def read_trace(run_dir: Path) -> Trace:
    """Every whole line of every process' file, the learner's first; of a running, finished or killed run.

    Raises UserError when nothing has been recorded.
    """
    files = sorted((run_dir / DIRECTORY).glob("*.jsonl"), key=lambda path: (path.stem != "learner", path.stem))
    if not files:
        raise UserError(
            f"{str(run_dir)!r} has no timeline: record the first N optimizer steps with logging.timeline_steps=N"
        )
    return Trace({path.stem: list(_events(path)) for path in files})


def _events(path: Path) -> Iterable[Event]:
    for line in path.read_bytes().decode("utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:  # empty, or torn by a kill
            continue
        if isinstance(event, dict) and {"name", "ph", "pid"} <= event.keys():
            yield event


def _own_seconds(spans: list[Event], begin: float, end: float) -> dict[str, tuple[float, float]]:
    """Times and seconds of each kind between ``begin`` and ``end``, each span less those within it."""
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    around: list[Event] = []  # the spans that the present one lies in

    def count(kind: str, times: float, seconds: float) -> None:
        found[kind] = found[kind][0] + times, found[kind][1] + seconds

    for span in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        first, last = span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6
        while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"]:
            around.pop()
        inside = min(last, end) - max(first, begin)
        if inside >= 0:
            share = inside / (last - first) if last > first else 1.0
            parts = span["args"].get("seconds_of", {})
            for kind, seconds in parts.items():
                count(kind, 0, seconds * share)
            count(span["cat"], span["args"].get("times", 1) * share, inside - share * sum(parts.values()))
            if around:
                count(around[-1]["cat"], 0, -inside)
        around.append(span)
    return dict(found)
