"""Python in a process of its own with limits, and nothing else: for code that is trusted.

The code may read and change whatever its user may, use the network, see and end other processes of that user.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from vcpo.sandbox.process import Launch, SandboxProcess
from vcpo.sandbox.protocol import Limits
from vcpo.sandbox.runner import __file__ as RUNNER

WARNING = (
    "task.sandbox.executor is subprocess: code that the model writes runs as this user, and may read, change and delete"
    " this user's files, use the network and end this user's processes; only times, sizes and numbers are limited"
)
# it outlives the code, becomes the parent of what runs away (PR_SET_CHILD_SUBREAPER), and ends what is left
_SUPERVISOR = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.prctl(36, 1, 0, 0, 0)
libc.prctl(1, signal.SIGKILL, 0, 0, 0)
child = os.fork()
if child == 0:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
for descriptor in (0, 1, 2, int(sys.argv[6])):
    os.close(descriptor)
while True:
    pid, status = os.wait()
    if pid == child:
        break
while True:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for other in file.read().split():
                os.kill(int(other), signal.SIGKILL)
        os.wait()
    except ChildProcessError:
        break
    except ProcessLookupError:
        pass
os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""


class Unprotected:
    """Starts processes in directories of their own. Raises as ``Bubblewrap`` does."""

    def __init__(self, limits: Limits, packages: tuple[str, ...], preload: tuple[str, ...]) -> None:
        self._limits, self._packages, self._preload = limits, packages, preload

    def start(self) -> SandboxProcess:
        """A new process, getting ready. Raises OSError when it cannot be started."""
        environment = {"LANG": "C.UTF-8", "PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return SandboxProcess(self._launch, environment, self._limits)

    def _launch(self, socket: int) -> Launch:
        limits = self._limits
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        directory = tempfile.mkdtemp(prefix="vcpo-tool-")
        runner = [python, "-I", "-S", "-B", str(Path(RUNNER).resolve()), str(socket), "-"]
        # the number of processes is only watched: the limit of the kernel would count all of this user
        runner += [str(max(1, round(limits.cpu_seconds))), str(limits.memory), str(limits.file_size), "-"]
        runner += [str(limits.open_files), *self._packages, "--", *self._preload]
        return Launch(
            [python, "-I", "-S", "-B", "-c", _SUPERVISOR, *runner],
            directory=directory,
            cleanup=lambda: shutil.rmtree(directory, ignore_errors=True),
            in_namespace=False,
        )
