"""One sandboxed process: started ahead, given one piece of code, ended with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vcpo.sandbox.process_tree import descendants, kill_below, usage
from vcpo.sandbox.protocol import Limits, Result, Status
from vcpo.sandbox.runner import HEADER, READY

LONGEST_START = 30.0  # seconds until Python must be up
_SET_UP = 2.0  # seconds for which an end waits for that
_FIRST_LOOK, _LOOKS_APART = 0.05, 0.1  # seconds between looks at memory and number of processes
_DRAIN = 0.5  # seconds in which the pipes of an ended process must run dry
_CHUNK = 1 << 16
_HELPERS = 1  # processes below ours that are not the code's: bubblewrap's own, or the supervisor


@dataclass(frozen=True)
class Launch:
    """How a sandboxed Python is started.

    command: with the runner's arguments; passed: file descriptors that it keeps, to be closed after the start.
    directory: where it starts, if that matters; cleanup: to be called when it has ended.
    in_namespace: everything in the sandbox dies with the process, by the kernel's doing.
    """

    command: Sequence[str]
    passed: Sequence[int] = ()
    directory: str | None = None
    cleanup: Callable[[], None] | None = None
    in_namespace: bool = True


class SandboxProcess:
    """To be started in a thread that lives as long as the sandbox may: the kernel ends it with that thread."""

    def __init__(self, launch: Callable[[int], Launch], environment: dict[str, str], limits: Limits) -> None:
        """launch: makes the command for a socket's file descriptor. Raises OSError when it cannot be started."""
        self._limits = limits
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(LONGEST_START)
        self._is_closed = False
        self._ending = threading.RLock()  # a socket that is closed while another thread reads could be somebody else's
        self._cleanup: Callable[[], None] | None = None
        passed: Sequence[int] = ()
        try:
            made = launch(theirs.fileno())
            passed, self._cleanup, self._in_namespace = made.passed, made.cleanup, made.in_namespace
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                made.command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                cwd=made.directory,
                pass_fds=(theirs.fileno(), *passed),
                start_new_session=True,
            )
        except BaseException:
            self._connection.close()
            if self._cleanup is not None:
                self._cleanup()
            raise
        finally:
            theirs.close()
            for descriptor in passed:
                os.close(descriptor)

    def wait_until_ready(self, seconds: float = LONGEST_START) -> bool:
        """Whether Python is up in it; waits so long for it. From any thread: what says so stays where it is."""
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        said = b""
        if waiting.poll(1000 * seconds):
            with contextlib.suppress(OSError):
                said = self._connection.recv(1, socket.MSG_PEEK)
        return said == READY and self._process.poll() is None

    def last_words(self) -> str:
        """What a process that never got ready has written; stops it."""
        self._process.kill()
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            _, stderr = self._process.communicate(timeout=5)
            return bytes(stderr).decode(errors="replace").strip()[-2000:]
        return ""

    def run(self, code: str, stdin: str) -> Result:
        """Hand over the code and see it through; once."""
        begin = time.monotonic()
        data = code.encode(errors="surrogatepass")
        try:
            self._connection.sendall(HEADER.pack(len(data)) + data)
            watch = _Watch(self._process, self._limits, stdin.encode(errors="surrogatepass"), begin)
        except OSError:  # there is nobody to send to, or no process to watch
            return Result(Status.SANDBOX_FAILURE, None, "", "", time.monotonic() - begin, "it has ended before its use")
        try:
            ended, detail = watch.until_the_end()
            if ended is not None:
                self.stop()
            watch.drain()
        finally:
            watch.close()
        stdout, stderr = watch.texts()
        seconds = time.monotonic() - begin
        if ended is not None:
            return Result(ended, None, stdout, stderr, seconds, detail)
        status, exit_code, detail = _how_it_ended(self._process.wait(), stderr, seconds, self._limits)
        return Result(status, exit_code, stdout, stderr, seconds, detail)

    def stop(self) -> None:
        """End the process and all below it; from any thread, any number of times, also when it is closed."""
        with self._ending:
            if self._is_closed:
                return
            # bubblewrap's inner process outlives an outer one that is killed while it still sets up
            is_set_up = self._in_namespace and self.wait_until_ready(_SET_UP)
            if not is_set_up and self._process.poll() is None:
                kill_below(self._process.pid, seconds=5)
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Stop it and give everything back; in the thread that uses it."""
        with self._ending:
            if self._is_closed:
                return
            self.stop()
            self._is_closed = True
            self._connection.close()
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                with contextlib.suppress(OSError):  # of flushing what nobody reads
                    assert stream is not None
                    stream.close()
            if self._cleanup is not None:
                self._cleanup()


class _Watch:
    """Feeds a process, keeps what it writes, and says when it is over or has gone too far."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, stdin: bytes, begin: float) -> None:
        self._process, self._limits, self._begin = process, limits, begin
        self._stdin = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        self._written: list[bytearray] = []
        self._open = 0
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._written.append(bytearray())
            self._selector.register(stream.fileno(), selectors.EVENT_READ, self._written[-1])
            self._open += 1
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
        self._end = os.pidfd_open(process.pid)
        self._selector.register(self._end, selectors.EVENT_READ, "end")

    def until_the_end(self) -> tuple[Status | None, str]:
        """What must be stopped and why; ``None`` when the process has ended by itself."""
        look = self._begin + _FIRST_LOOK
        deadline = self._begin + self._limits.wall_seconds
        while True:
            now = time.monotonic()
            if now >= deadline:
                return Status.TIMEOUT, "over the limit of wall-clock seconds"
            if now >= look:
                problem = self._overuse()
                if problem is not None:
                    return problem
                look = now + _LOOKS_APART
            for key, _ in self._selector.select(max(0.0, min(deadline, look) - now)):
                if key.data == "end":
                    return None, ""
                self._serve(key)
            if self._too_much():
                return Status.OUTPUT_LIMIT, "over the output limit"

    def drain(self) -> None:
        """Read what is left in the pipes, within the limit."""
        deadline = time.monotonic() + _DRAIN
        while self._open and not self._too_much() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.02):
                if key.data != "end":
                    self._serve(key)

    def texts(self) -> tuple[str, str]:
        """stdout and stderr."""
        stdout, stderr = (bytes(w[: self._limits.output]).decode(errors="replace") for w in self._written)
        return stdout, stderr

    def close(self) -> None:
        """Give back what is this object's own."""
        self._selector.close()
        os.close(self._end)

    def _serve(self, key: selectors.SelectorKey) -> None:
        descriptor = key.fd
        if key.data == "stdin":
            try:
                self._stdin = self._stdin[os.write(descriptor, self._stdin[:_CHUNK]) :] if self._stdin else self._stdin
            except BlockingIOError:
                return
            except OSError:  # nobody reads it
                self._stdin = self._stdin[:0]
            if not self._stdin:
                self._selector.unregister(descriptor)
                assert self._process.stdin is not None
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            return
        with contextlib.suppress(BlockingIOError):
            part = os.read(descriptor, _CHUNK)
            key.data.extend(part)
            if not part:
                self._selector.unregister(descriptor)
                self._open -= 1

    def _too_much(self) -> bool:
        return any(len(written) > self._limits.output for written in self._written)

    def _overuse(self) -> tuple[Status, str] | None:
        memory, threads = usage(descendants(self._process.pid))
        if memory > self._limits.memory:
            return Status.MEMORY, "over the memory limit"
        if threads > self._limits.processes + _HELPERS:
            return Status.KILLED, "over the limit of processes and threads"
        return None


def _how_it_ended(code: int, stderr: str, seconds: float, limits: Limits) -> tuple[Status, int | None, str]:
    """Of a process that has ended by itself: 128 and more is a signal, as shells say it."""
    if code < 0:
        return Status.SANDBOX_FAILURE, None, "it was ended from outside"
    number: Any = code - 128
    if number in signal.valid_signals():
        if number == signal.SIGXCPU or (number == signal.SIGKILL and seconds >= limits.cpu_seconds):
            return Status.TIMEOUT, None, "over the limit of processor seconds"
        return Status.KILLED, None, f"ended by {signal.Signals(number).name}"
    if code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return Status.MEMORY, 1, "over the memory limit"
    return (Status.ERROR if code else Status.OK), code, ""
