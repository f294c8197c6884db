"""What runs in a grading process: it loads the task and the reward functions, then grades what it is sent.

Its only contact with the learner is one socket. What comes was pickled by the learner, which may be believed. What
goes back is JSON, because the code that runs here may have been talked into anything by the text that it reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from vcpo.config import parse_config
from vcpo.errors import UserError
from vcpo.pipeline.grading import make_task_and_grader
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.records import Grade

_LONGEST = 300  # characters of an exception's message


def main(socket_number: int, trace_number: int) -> None:
    """Serve the learner until it closes its end of the socket.

    socket_number, trace_number: inherited file descriptors. To the second goes what only the interpreter itself can
    still say: where the process is when the time is over, or when it crashes.
    """
    for number in (socket_number, trace_number):
        os.set_inheritable(number, False)  # a program that a reward function starts must not keep them open
    # The run saves before it ends, and needs grades until then. A handler of Python's is no concern of programs that
    # are started from here, which an ignored signal would be.
    for ending in ENDING_SIGNALS:
        signal.signal(ending, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    with contextlib.suppress(OSError):  # Linux: short of memory, end this process rather than the learner
        Path("/proc/self/oom_score_adj").write_text("500")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed is seen before a kill
    with Connection(socket_number) as learner, os.fdopen(trace_number, "w") as trace:
        faulthandler.enable(trace)
        with contextlib.suppress(EOFError, OSError):  # the learner is gone, or has no more use for this process
            _serve(learner, trace)


def _serve(learner: Connection, trace: TextIO) -> None:
    plain, timeout = learner.recv()
    loaded: list[Any] = []
    _send(learner, _outcome(lambda: loaded.extend(make_task_and_grader(parse_config(plain)))))
    if not loaded:
        return
    _, grader = loaded
    while True:
        problem, answers = learner.recv()
        trace.seek(0)
        trace.truncate()
        faulthandler.dump_traceback_later(timeout, file=trace)
        outcome = _outcome(lambda: {"grades": [_row(grade) for grade in grader.grade(problem, answers)]})  # noqa: B023
        faulthandler.cancel_dump_traceback_later()
        _send(learner, outcome)


def _outcome(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What the work gives, or what went wrong in it, as plain data."""
    try:
        return work() or {}
    except UserError as error:
        return {"user_error": str(error)}
    except BaseException as error:  # a reward function may well call sys.exit
        return {"error": _one_line(error), "traceback": traceback.format_exc()}


def _one_line(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the user's own exception class
        message = "(its message cannot be shown)"
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{': ' if message else ''}{message[:_LONGEST]}{notes}"


def _row(grade: Grade) -> tuple[float | None, bool, dict[str, float], str | None]:
    return grade.reward, grade.correct, grade.parts, grade.failure


def _send(learner: Connection, outcome: dict[str, Any]) -> None:
    learner.send_bytes(json.dumps(outcome).encode())
