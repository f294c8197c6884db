"""The program inside a sandbox: gets ready, waits for one piece of code, becomes it, ends.

A file of its own, run by a bare Python without this package. What the outside trusts does not depend on it: once the
code runs, everything in this process is the code's to change.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import os
import resource
import site
import socket
import struct
import sys
import threading
import traceback
import types

HEADER = struct.Struct("!Q")
READY = b"R"


def main() -> None:
    """Arguments: socket, user to become (or -), limits, then directories for ``sys.path``, --, modules to load."""
    connection, user, cpu_seconds, memory, file_size, processes, open_files, *rest = sys.argv[1:]
    directories, modules = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    sys.path += directories
    # before the user changes: it may not be allowed to raise what it has
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, int(file_size))
    _limit(resource.RLIMIT_NOFILE, int(open_files))
    _limit(resource.RLIMIT_AS, int(memory))
    if processes != "-":
        _limit(resource.RLIMIT_NPROC, int(processes))
    if user != "-":
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    site.setquit()  # exit() and quit(), which programs use
    for name in modules:
        importlib.import_module(name)
    with socket.socket(fileno=int(connection)) as pipe:
        pipe.sendall(READY)
        code = _receive(pipe, HEADER.unpack(_receive(pipe, HEADER.size))[0])
    # not before: while it waited, the sandbox has used next to nothing; one more second to act on the signal
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(cpu_seconds), used + int(cpu_seconds) + 1))
    _become(code)


def _become(code: bytes) -> None:
    path = os.path.join(os.getcwd(), "program.py")
    with open(path, "wb") as file:
        file.write(code)
    sys.argv = [path]
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.spec_from_file_location("__main__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = module
    _end(_outcome(spec.loader, module, path))


def _outcome(loader: importlib.abc.Loader, module: types.ModuleType, path: str) -> int:
    """Run the program; its exit code."""
    try:
        loader.exec_module(module)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _print_as_python_does(error, path)
        return 1
    return 0


def _end(exit_code: int) -> None:
    """As Python ends, but without tidying up its memory, which takes several times as long as a small program."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except AttributeError:  # there is none
            pass
        except (OSError, ValueError):
            exit_code = exit_code or 120  # as Python says it
    os._exit(exit_code)


def _print_as_python_does(error: BaseException, path: str) -> None:
    """Without the frames of this file and of the import system."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))


def _receive(pipe: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = pipe.recv(min(size - len(received), 1 << 20))
        if not part:
            os._exit(0)  # no code will come
        received += part
    return bytes(received)


if __name__ == "__main__":
    main()
