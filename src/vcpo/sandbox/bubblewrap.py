"""Python in namespaces of its own, by bubblewrap: no network, no files but Python's, no other processes, no rights.

As root the sandbox becomes a user that nobody else is. As another user it lives in a user namespace, which the machine
must allow.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path

from vcpo.errors import UserError
from vcpo.sandbox.process import Launch, SandboxProcess
from vcpo.sandbox.protocol import Limits, Status
from vcpo.sandbox.runner import __file__ as RUNNER
from vcpo.sandbox.seccomp import filter_program

_INSTEAD = (
    "; or set task.sandbox.executor to http, with the url of a SandboxFusion server, or to subprocess, which does not"
    " protect this machine from the code"
)
_FIRST_USER, _USERS = 50_000, 10_000  # numbers that the sandboxes' users have, where we are root
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache")


class Bubblewrap:
    """Makes the commands. ``as_root``: with the rights of root, without a user namespace."""

    environment = {  # noqa: RUF012
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin",
        # each thread counts as a process, and there may be as many as there are cores
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }

    def __init__(self, limits: Limits, packages: tuple[str, ...], preload: tuple[str, ...], as_root: bool) -> None:
        """packages: directories with packages that the code may import. preload: modules to load ahead."""
        self._limits, self._packages, self._preload, self._as_root = limits, packages, preload, as_root
        self._program = shutil.which("bwrap") or "bwrap"
        self._users = itertools.count(os.getpid() * 64)
        self._filter = filter_program()

    def start(self) -> SandboxProcess:
        """A new sandbox, getting ready. Raises OSError when the program cannot be started."""
        return SandboxProcess(self._launch, self.environment, self._limits)

    def _launch(self, socket: int) -> Launch:
        limits = self._limits
        command = [self._program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        command += ["--cap-drop", "ALL"]
        if self._as_root:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            user = str(_FIRST_USER + next(self._users) % _USERS)
            processes = limits.processes
        else:
            command += ["--unshare-user", "--uid", str(_FIRST_USER), "--gid", str(_FIRST_USER)]
            user = "-"
            processes = limits.processes + 1  # bubblewrap's own counts
        command += self._files()
        passed = []
        if self._filter is not None:
            descriptor = _readable(self._filter)
            passed.append(descriptor)
            command += ["--seccomp", str(descriptor)]
        command += ["--", *_python(), str(socket), user, str(max(1, round(limits.cpu_seconds))), str(limits.memory)]
        command += [str(limits.file_size), str(processes), str(limits.open_files)]
        command += [*self._packages, "--", *self._preload]
        return Launch(command, passed)

    def _files(self) -> list[str]:
        arguments = [*_directory("/dev"), *_directory("/etc"), *_directory("/usr")]
        for path in _LIBRARIES:
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                arguments += ["--ro-bind", path, path]
        python = Path(sys.base_prefix)
        own = [*(str(python / name) for name in ("lib", "lib64")), _python()[0], *self._packages]
        for path in own:
            if os.path.exists(path) and not path.startswith(("/usr/lib/", "/usr/lib64/")) and path not in _LIBRARIES:
                # otherwise they would be as private as on the machine
                arguments += [part for p in reversed(Path(path).parents[:-1]) for part in _directory(str(p))]
                arguments += ["--ro-bind", path, path]
        arguments += ["--ro-bind", RUNNER, "/runner.py"]
        for device in ("null", "zero", "full", "random", "urandom"):
            arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        for path, size in (("/tmp", 2 * self._limits.file_size), ("/dev/shm", self._limits.file_size)):
            arguments += ["--perms", "1777", "--size", str(size), "--tmpfs", path]
        return [*arguments, "--remount-ro", "/", "--chdir", "/tmp"]


@lru_cache(maxsize=8)
def working_bubblewrap(limits: Limits, packages: tuple[str, ...], preload: tuple[str, ...]) -> Bubblewrap:
    """Bubblewrap in a form that works here, found by a real run. Raises UserError with the reason where none does."""
    if sys.platform != "linux":
        raise UserError(f"bubblewrap, which runs the tool's code, only works on Linux{_INSTEAD}")
    if shutil.which("bwrap") is None:
        raise UserError(
            "bubblewrap, which runs the tool's code, is not installed: apt-get install bubblewrap (or dnf, apk,"
            f" pacman){_INSTEAD}"
        )
    said = ""
    for as_root in [True, False] if os.geteuid() == 0 else [False]:
        bubblewrap = Bubblewrap(limits, packages, preload, as_root)
        said = trial(bubblewrap)
        if not said:
            return bubblewrap
    raise UserError(
        f"bubblewrap, which runs the tool's code, does not work here: {said!r}. It needs version 0.8 or newer, and user"
        " namespaces, which containers and some distributions forbid unless they are told otherwise (docker run"
        f" --security-opt seccomp=unconfined; sysctl kernel.apparmor_restrict_unprivileged_userns=0){_INSTEAD}"
    )


def trial(bubblewrap: Bubblewrap) -> str:
    """What went wrong with a real run; empty when nothing did."""
    try:
        sandbox = bubblewrap.start()
    except OSError as error:
        return str(error)
    try:
        if not sandbox.wait_until_ready():
            lines = sandbox.last_words().splitlines()
            return lines[-1] if lines else "it ended without a word"
        result = sandbox.run("print(6 * 7)", "")
        if result.status is Status.OK and result.stdout == "42\n":
            return ""
        return f"print(6 * 7) ended with {result.status.value} {result.detail} {result.stderr[-500:]}"
    finally:
        sandbox.close()


def _python() -> list[str]:
    """A Python without site packages, environment and user directories, which runs ``/runner.py``."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return [os.path.realpath(base), "-I", "-S", "-B", "/runner.py"]


def _directory(path: str) -> list[str]:
    """Make it, for everybody to look into, unless it is there."""
    return ["--perms", "0755", "--dir", path]


def _readable(data: bytes) -> int:
    """A file descriptor from which the data can be read once; a filter fits into a pipe."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(data)
    return reader
