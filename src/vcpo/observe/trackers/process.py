"""A tracker's process: metrics come in as lines of JSON, the end of the input is the end of the run.

So it ends whichever way the run ends, ``kill -9`` included, and still hands over what it has been given. The first line
is ``{"tracker", "run"}``, every other one ``{"step", "kind", "metrics"}``. It answers with lines ``{"note"}`` and, as
the last one when something failed, ``{"error"}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any

from vcpo.observe.trackers.protocol import TrackedRun, make_tracker

CLOSING_SECONDS = 60.0  # for a tracker to hand over the rest, when nobody is left who waits for it


def main() -> int:
    """Returns the exit code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what trackers print must not mix with the answers
    try:
        _track(sys.stdin, answers)
    except BaseException as error:
        words = " ".join(str(error).split())
        _say(answers, error=f"{type(error).__name__}: {words}"[:500])
        return 1
    return 0


def _track(lines: IO[str], answers: IO[str]) -> None:
    first = json.loads(next(lines))
    run = first["run"]
    tracker = make_tracker(first["tracker"], TrackedRun(**{**run, "directory": Path(run["directory"])}))
    if tracker.note:
        _say(answers, note=tracker.note)
    for line in lines:
        record = json.loads(line)
        tracker.log(record["step"], record["kind"], record["metrics"])
    last = threading.Timer(CLOSING_SECONDS, _end_all)
    last.daemon = True
    last.start()
    tracker.close()


def _say(answers: IO[str], **fields: Any) -> None:
    try:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()
    except OSError:
        pass  # the run is gone


def _end_all() -> None:
    """End this process and those that its tracker has started; it leads a process group of its own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # no exit handlers: whatever a tracker still wants to wait for, it has been closed
    os._exit(code)
