"""What an executor of hostile code takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MEBIBYTE = 1 << 20


class Status(Enum):
    """How a run ended. All but SANDBOX_FAILURE are what the code has earned."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # another exit code, as after an exception
    TIMEOUT = "timeout"  # over the limit of seconds, on the clock or of processor time
    MEMORY = "memory"  # over the memory limit
    OUTPUT_LIMIT = "output limit"  # wrote more than it may
    KILLED = "killed"  # ended by a signal, its own or the kernel's, or had too many processes
    SANDBOX_FAILURE = "sandbox failure"  # nothing is known about the code; the sandbox is at fault


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    wall_seconds, cpu_seconds: on the clock, and of processor time per process.
    memory: bytes, for each process and for all of them together.
    output: bytes of stdout, and as many of stderr.
    file_size: bytes of one file; the working directory holds twice as much.
    processes: processes and threads at a time, the first one included.
    open_files: of one process.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory: int = 512 * MEBIBYTE
    output: int = 64 * 1024
    file_size: int = 16 * MEBIBYTE
    processes: int = 16
    open_files: int = 64


@dataclass(frozen=True)
class Result:
    """What came of a run.

    exit_code: of the code's process; ``None`` where it was ended from outside or by a signal.
    stdout, stderr: as far as the limit allows; what is no UTF-8 is replaced by U+FFFD.
    seconds: on the clock, from the moment the code was handed over.
    detail: a few words about an end that is neither OK nor ERROR, the same for every run that ends this way.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float
    detail: str = ""


class Executor(Protocol):
    """Runs Python code. Its methods may be called from any thread, several at a time."""

    def run(self, code: str, stdin: str = "") -> Result:
        """Run a program from its start to its end, in a world of its own of which nothing is left afterwards.

        Never raises for anything that the code does. May wait for other runs before it starts.
        """
        ...

    def close(self) -> None:
        """End what is running and give everything back."""
        ...


class SandboxFailed(RuntimeError):
    """The sandbox is at fault, so nothing is known about the code. The message is one of a few constant sentences."""


def settled(result: Result) -> Result:
    """The result, if it says anything about the code. Raises SandboxFailed otherwise."""
    if result.status is Status.SANDBOX_FAILURE:
        raise SandboxFailed(f"the sandbox failed: {result.detail}")
    return result
