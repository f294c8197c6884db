"""A process and everything below it, as /proc tells: what it uses, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, itself excluded; those that end or start meanwhile may be missing."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def usage(pids: list[int]) -> tuple[int, int]:
    """Resident bytes of processes, without those of files, with what they share counted for each; and threads."""
    memory, threads = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                _, resident, of_files = map(int, file.read().split()[:3])
            memory += (resident - of_files) * _PAGE
            threads += len(os.listdir(f"/proc/{pid}/task"))
    return memory, threads


def kill_below(pid: int, seconds: float) -> None:
    """Kill what is below ``pid`` until nothing is left, or for so long."""
    deadline = time.monotonic() + seconds
    while (pids := descendants(pid)) and time.monotonic() < deadline:
        for victim in pids:
            with contextlib.suppress(OSError):
                os.kill(victim, signal.SIGKILL)
        # ended ones are still listed until their parent has noticed
        if not any(_is_running(victim) for victim in pids):
            break


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
