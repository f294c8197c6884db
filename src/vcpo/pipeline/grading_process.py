"""One grading process as the learner sees it: started, asked, and ended with everything that it has started itself.

The process is a program of its own (not one of multiprocessing's, which would run the user's main script again). A
second, tiny process guards it: it waits for the end of the learner, however sudden, and then kills the group of the
first one, which may be in the middle of something that never looks up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vcpo.config import RewardSection
from vcpo.errors import UserError
from vcpo.records import Answer, Problem

_WORKER = "import sys; sys.path[:] = sys.argv[3:]\n"
_WORKER += "from vcpo.pipeline.grading_worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
_GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"

_LOOK = 0.05  # seconds between two looks at the memory of a process that grades
_GRACE = 0.2  # seconds over the time-out in which the process may still write down where it is
_LONGEST = 1 << 26  # bytes of an answer
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = sysconfig.get_path("stdlib")


class Lost(Exception):
    """The process has ended, or has been ended because its time was over. The message is one line, without its number.

    traceback: of where it was, as far as it is known. died: it has ended by itself, or somebody has ended it.
    """

    def __init__(self, reason: str, traceback: str, died: bool) -> None:
        super().__init__(reason)
        self.traceback = traceback
        self.died = died


class GradingProcess:
    """Starts with the process; ``loaded`` waits until it has loaded what it needs.

    To be started in a thread that blocks the signals which end a run: the process is deaf to them from its first
    instruction on.
    """

    def __init__(self, plain_config: dict[str, Any], section: RewardSection) -> None:
        """plain_config: of the run. section: of it, for the limits of one question."""
        timeout = self._timeout = section.timeout
        self._max_memory = section.max_memory
        self._loaded_bytes = 0
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        ours, theirs = socket.socketpair()
        with theirs:
            passed = theirs.fileno(), self._trace.fileno()
            command = [sys.executable, "-c", _WORKER, *map(str, passed), *sys.path]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
        # isolated, without site: it imports nothing
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(self._process.pid)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        # a process that does not even read must not hold up its supervisor
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout) + 1, 0))
        self._pipe = Connection(ours.detach())
        self._is_loaded = False
        self._killing = threading.Lock()
        self._is_killed = False
        with contextlib.suppress(OSError):  # it has ended, which ``loaded`` tells
            self._pipe.send((plain_config, timeout))

    @property
    def pid(self) -> int:
        """Of the process, for messages."""
        return self._process.pid

    def loaded(self) -> dict[str, Any]:
        """Wait until task and reward functions are loaded: empty, or what went wrong (as from ``ask``).

        There is no time-out, because a reward model may take minutes. Raises Lost.
        """
        if self._is_loaded:
            return {}
        outcome = self._receive(None)
        self._is_loaded = not outcome
        self._loaded_bytes = _memory_of(self.pid)
        return outcome

    def has_ended(self) -> bool:
        """Whether a loaded process has ended although nothing has been asked."""
        return self._is_loaded and self._pipe.poll(0)

    def ask(self, problem: Problem, answers: list[Answer]) -> dict[str, Any]:
        """What came of grading: ``grades``, or ``user_error``, or ``error`` with its ``traceback``.

        Raises Lost after the time-out, over the memory limit and when the process ends, UserError for a problem that
        cannot be sent.
        """
        try:
            self._pipe.send((problem, answers))
        except OSError:
            raise self._lost() from None
        except Exception as error:  # of making bytes of it, before any is sent
            raise UserError(
                f"problem {problem.id!r} cannot be sent to the grading process ({type(error).__name__}: {error}):"
                " give it columns that can be pickled, or grade in the run's own process with reward.processes=0"
            ) from None
        return self._receive(self._timeout + _GRACE)

    def kill(self) -> None:
        """End it with its whole process group; from any thread, also while another one waits for an answer."""
        with self._killing:
            if self._is_killed:
                return
            self._is_killed = True
            self._guard.kill()
            self._guard.communicate()
            # before the process is waited for: until then its number cannot become another's
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of one that has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Kill it and give everything back; in the thread that asks it."""
        self.kill()
        self._pipe.close()
        self._trace.close()

    def _receive(self, seconds: float | None) -> dict[str, Any]:
        try:
            self._wait(seconds)
            outcome: dict[str, Any] = json.loads(self._pipe.recv_bytes(_LONGEST))
        except (EOFError, OSError, ValueError):  # ValueError: something else was written into the socket
            raise self._lost() from None
        return outcome

    def _wait(self, seconds: float | None) -> None:
        """Until there is something to receive. ``None``: the process is loading and may take what it needs."""
        if seconds is None:
            self._pipe.poll(None)
            return
        # looks are counted, not what a clock says: while the whole run is suspended, the grader has no time either
        while not self._pipe.poll(min(_LOOK, seconds)):
            seconds -= _LOOK
            if seconds <= 0:
                raise self._lost(f"no grade within {self._timeout:g} s")
            taken = (_memory_of(self.pid) - self._loaded_bytes) / 2**30
            if self._max_memory is not None and taken > self._max_memory:
                raise self._lost(f"grading took more than {self._max_memory:g} GiB of memory (reward.max_memory)")

    def _lost(self, reason: str | None = None) -> Lost:
        """reason: why it is ended; None: it has ended."""
        self.kill()
        self._trace.seek(0)
        trace = self._trace.read(_LONGEST).decode(errors="replace")
        died = reason is None
        if reason is None:
            reason = f"the grading process {_how_it_ended(self._process.returncode)}"
        return Lost(reason + _place(trace), trace, died)


def _memory_of(pid: int) -> int:
    """Bytes of memory that a process occupies; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def _place(trace: str) -> str:
    """Where the interpreter said that it was: the innermost line outside of Python's own library, if there is one."""
    # most recent call first; the main thread is the last one, unless one is marked as that of a crash
    _, _, current = trace.partition("Current thread ")
    block = current.partition("\n\n")[0] if current else trace.rpartition("Thread 0x")[2]
    frames = _FRAME.findall(block)
    own = [frame for frame in frames if not frame[0].startswith((_LIBRARY, "<"))]
    for file, line, function in (own or frames)[:1]:
        return f", in {function} ({file}, line {line})"
    return ""
