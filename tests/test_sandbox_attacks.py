"""Hostile and broken programs in the bubblewrap sandbox: each is contained, ends as it should, and we live."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_cases import ATTACKS, MARK, Attack
from vcpo.errors import UserError
from vcpo.sandbox.bubblewrap import Bubblewrap, trial
from vcpo.sandbox.options import SandboxOptions, check_sandbox
from vcpo.sandbox.pool import SandboxPool, Throttle
from vcpo.sandbox.protocol import Executor, Status
from vcpo.sandbox.seccomp import denied_calls

OPTIONS = SandboxOptions(wall_seconds=1.5, cpu_seconds=1, memory_mb=128, output_kb=16, file_mb=1, processes=8)


FORMS = ["root", "user namespace"]


@pytest.fixture(scope="module", params=FORMS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Executor]:
    try:
        check_sandbox(OPTIONS)
    except UserError as error:
        pytest.skip(str(error))
    as_root = request.param == "root"
    if as_root and os.geteuid() != 0:
        pytest.skip("only for root")
    bubblewrap = Bubblewrap(OPTIONS.limits, (), (), as_root)
    problem = trial(bubblewrap)
    if problem:
        pytest.skip(f"this form does not work here: {problem}")
    os.environ["VCPO_TEST_SECRET"] = "open sesame"
    executor = SandboxPool(bubblewrap.start, warm=2, throttle=Throttle(4))
    yield executor
    executor.close()
    del os.environ["VCPO_TEST_SECRET"]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the attacks are after."""
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("open sesame")
    secret.chmod(0o644)
    name = f"vcpo-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + name)
        unix.listen()
        tcp.settimeout(0)
        yield {
            "@SECRET@": str(secret),
            "@PORT@": str(tcp.getsockname()[1]),
            "@SOCKET@": name,
            "@PID@": str(os.getpid()),
        }
        with pytest.raises(BlockingIOError):  # nobody came
            tcp.accept()
    assert secret.read_text() == "open sesame"


def survivors() -> list[str]:
    """Processes of attacks that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == MARK:
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_contained(sandbox: Executor, outside: dict[str, str], attack: Attack) -> None:
    code = attack.code
    for word, meaning in outside.items():
        code = code.replace(word, meaning)
    result = sandbox.run(code, attack.stdin)
    assert result.status in attack.ends, result
    assert attack.stdout in result.stdout
    assert attack.stderr in result.stderr
    assert "sesame" not in result.stdout
    for leaked in ("open ", "raised ", "written "):
        assert leaked not in result.stdout
    limit = 16 * 1024
    assert len(result.stdout) <= limit
    assert len(result.stderr) <= limit
    if attack.exit_code is not None:
        assert result.exit_code == attack.exit_code
    deadline = time.monotonic() + 5
    while survivors() and time.monotonic() < deadline:
        os.sched_yield()
    assert not survivors()


def test_there_are_enough_attacks() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40


def test_every_system_call_of_the_filter_is_refused(sandbox: Executor) -> None:
    calls = denied_calls()
    if not calls:
        pytest.skip("the filter does not know this processor")
    result = sandbox.run(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {calls}.items():\n    ctypes.set_errno(0)\n"
        "    answer = libc.syscall(number, -1, 0, 0, 0, 0, 0)\n    print(name, answer, ctypes.get_errno())"
    )
    assert result.stdout.splitlines() == [f"{name} -1 {errno.EPERM}" for name in calls]


def test_nothing_passes_from_one_run_to_the_next(sandbox: Executor) -> None:
    poison = (
        "import builtins, sys, os\nbuiltins.print = lambda *a, **k: None\nbuiltins.len = None\n"
        "sys.meta_path.insert(0, type('X', (), {'find_spec': lambda *a: 1 / 0}))\n"
        "open('left', 'w').write('x')\nopen('/dev/shm/left', 'w').write('x')\nos.environ['LEFT'] = 'x'"
    )
    look = (
        "import os, sys, fractions\nprint(sorted(os.listdir('.')), os.listdir('/dev/shm'), 'LEFT' in os.environ,"
        " len(sys.meta_path))"
    )
    for _ in range(4):
        assert sandbox.run(poison).status is Status.OK
    results = [sandbox.run(look) for _ in range(4)]
    assert {result.stdout for result in results} == {"['program.py'] [] False 3\n"}


def test_the_program_does_not_know_its_runner(sandbox: Executor) -> None:
    result = sandbox.run(
        "import sys\nprint(__name__, sys.argv, sys.modules['__main__'].__name__)\ndef f():\n    1 / 0\nf()"
    )
    assert result.stdout == "__main__ ['/tmp/program.py'] __main__\n"
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "/tmp/program.py", line 5, in <module>\n'
    )
    assert "runner" not in result.stderr
