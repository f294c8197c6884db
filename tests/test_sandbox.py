"""Executors: what they promise beside containment. The server of these tests is a real one, for HTTP at least."""

from __future__ import annotations

import base64
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vcpo.errors import UserError
from vcpo.sandbox import bubblewrap
from vcpo.sandbox.http import HttpExecutor
from vcpo.sandbox.options import SandboxOptions, check_sandbox, make_executor
from vcpo.sandbox.pool import SandboxPool, Throttle
from vcpo.sandbox.process import Launch, SandboxProcess
from vcpo.sandbox.protocol import Limits, Result, SandboxFailed, Status, settled
from vcpo.sandbox.runner import __file__ as RUNNER
from vcpo.sandbox.seccomp import filter_program
from vcpo.sandbox.unprotected import Unprotected

LIMITS = Limits(wall_seconds=5, cpu_seconds=2, memory=128 << 20, output=4096)
UNSAFE = {"executor": "subprocess", "allow_unsafe": True}


@pytest.fixture
def unprotected() -> Iterator[SandboxPool]:
    pool = SandboxPool(Unprotected(LIMITS, (), ()).start, warm=1, throttle=Throttle(2))
    yield pool
    pool.close()


# the pool, with processes that need nothing of the machine


def test_a_program_that_runs_away_dies_without_namespaces_too(unprotected: SandboxPool, tmp_path: Path) -> None:
    there = tmp_path / "there"
    result = unprotected.run(
        f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        open({str(there)!r}, 'w').write(str(os.getpid()))\n        time.sleep(600)\n"
        f"    os._exit(0)\nos.wait()\n"
        f"while not os.path.exists({str(there)!r}) or not open({str(there)!r}).read():\n    pass"
    )
    assert result.status is Status.OK
    assert not Path(f"/proc/{there.read_text()}").exists()


def test_limits_hold_without_namespaces_too(unprotected: SandboxPool) -> None:
    assert unprotected.run("x = 'a' * 10**12").status is Status.MEMORY
    assert unprotected.run("while True: print('x' * 100)").status is Status.OUTPUT_LIMIT
    assert unprotected.run("import sys; sys.exit(7)").exit_code == 7
    pool = SandboxPool(Unprotected(Limits(wall_seconds=0.2), (), ()).start, warm=0, throttle=Throttle(1))
    assert pool.run("import time; time.sleep(600)").status is Status.TIMEOUT
    pool.close()


def test_each_run_has_a_directory_of_its_own_that_is_gone_afterwards(unprotected: SandboxPool) -> None:
    first, second = (unprotected.run("import os; open('x', 'x'); print(os.getcwd())") for _ in range(2))
    assert first.stdout != second.stdout
    assert not Path(first.stdout.strip()).exists()


def test_a_sandbox_that_died_while_it_waited_is_replaced() -> None:
    made: list[SandboxProcess] = []
    unprotected = Unprotected(LIMITS, (), ())

    def start() -> SandboxProcess:
        made.append(unprotected.start())
        if len(made) == 1:
            made[0].stop()
        return made[-1]

    pool = SandboxPool(start, warm=1, throttle=Throttle(1))
    assert pool.run("print(1)").stdout == "1\n"
    assert len(made) >= 2
    pool.close()


def test_a_sandbox_that_cannot_be_started_is_a_failure_and_no_result() -> None:
    def start() -> SandboxProcess:
        raise OSError("no more processes")

    pool = SandboxPool(start, warm=2, throttle=Throttle(1))
    result = pool.run("print(1)")
    pool.close()
    assert result.status is Status.SANDBOX_FAILURE
    with pytest.raises(SandboxFailed, match=r"^the sandbox failed: it could not be started$"):
        settled(result)


def test_what_is_ended_from_outside_is_a_failure_and_no_result(unprotected: SandboxPool) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(unprotected.run("while True: pass")))
    thread.start()
    while not unprotected.running:
        pass
    unprotected.close()
    thread.join()
    assert results[0].status is Status.SANDBOX_FAILURE


# one process, which several threads know


def bare(directory: Path, *command: str) -> SandboxProcess:
    """The runner without limits, or a command, as if it were in a namespace."""
    runner = (sys.executable, "-I", "-S", RUNNER)

    def launch(socket: int) -> Launch:
        limits = ["5", str(1 << 30), str(1 << 20), "-", "64", "--"]
        return Launch(command or [*runner, str(socket), "-", *limits], directory=str(directory))

    return SandboxProcess(launch, {}, LIMITS)


def test_one_thread_does_not_take_from_another_the_word_that_a_sandbox_is_ready(tmp_path: Path) -> None:
    sandbox = bare(tmp_path)
    ready: list[bool] = []
    threads = [threading.Thread(target=lambda: ready.append(sandbox.wait_until_ready()), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)  # one that has missed it waits for 30 s
    assert ready == [True] * 3
    assert sandbox.run("print(1)", "").stdout == "1\n"
    sandbox.close()


def test_a_sandbox_may_be_stopped_when_its_thread_has_closed_it(tmp_path: Path) -> None:
    sandbox = bare(tmp_path, "/bin/true")
    sandbox.close()
    sandbox.stop()
    sandbox.close()


def test_a_sandbox_is_not_closed_while_another_thread_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = bare(tmp_path)
    closing = threading.Thread(target=sandbox.close)
    seen: list[bool] = []

    def ready(seconds: float) -> bool:
        if not seen:
            seen.append(False)
            closing.start()
            closing.join(0.2)
            seen[0] = closing.is_alive()
        return True

    monkeypatch.setattr(sandbox, "wait_until_ready", ready)
    sandbox.stop()
    closing.join()
    assert seen == [True]


def test_a_process_that_has_ended_with_its_socket_open_elsewhere_is_a_failure_and_no_result(tmp_path: Path) -> None:
    sandbox = bare(tmp_path, "/bin/sh", "-c", "sleep 5 & exit 0")
    while sandbox._process.poll() is None:
        pass
    result = sandbox.run("print(1)", "")
    assert (result.status, result.detail) == (Status.SANDBOX_FAILURE, "it has ended before its use")
    sandbox._connection.close()
    sandbox._process.kill()


def test_no_more_run_at_a_time_than_allowed(tmp_path: Path) -> None:
    pool = SandboxPool(Unprotected(LIMITS, (), ()).start, warm=0, throttle=Throttle(2))
    code = f"""
import os, time
mine = {str(tmp_path)!r} + "/" + str(os.getpid())
open(mine, "w")
print(len(os.listdir({str(tmp_path)!r})))
end = time.monotonic() + 0.05
while time.monotonic() < end:
    pass
os.remove(mine)
"""
    results: list[Result] = []
    threads = [threading.Thread(target=lambda: results.append(pool.run(code))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert len(results) == 6
    assert max(int(result.stdout) for result in results) <= 2


def test_modules_can_be_loaded_ahead_and_packages_allowed() -> None:
    options = SandboxOptions.model_validate({**UNSAFE, "warm": 0, "site_packages": True, "preload": ["packaging"]})
    executor = make_executor(options, warn=False)
    result = executor.run("import sys; print('packaging' in sys.modules, 'packaging' in globals())")
    executor.close()
    assert result.stdout == "True False\n"
    bare = make_executor(SandboxOptions.model_validate({**UNSAFE, "warm": 0}), warn=False)
    assert "ModuleNotFoundError" in bare.run("import packaging").stderr
    bare.close()


# options


def test_the_unsafe_executor_needs_a_word_and_says_what_it_does_not_protect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError, match=r"task\.sandbox\.allow_unsafe=true"):
        SandboxOptions(executor="subprocess")
    make_executor(SandboxOptions.model_validate(UNSAFE)).close()
    assert "may read, change and delete this user's files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"executor": "http"}, "need each other"),
        ({"url": "http://localhost"}, "need each other"),
        ({"executor": "http", "url": "localhost"}, "must begin with http"),
        ({"wall_seconds": 0.0}, "greater than 0"),
        ({"timeout": 1}, "Extra inputs"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SandboxOptions.model_validate(wrong)


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    bubblewrap.working_bubblewrap.cache_clear()
    with pytest.raises(UserError, match=r"not installed: apt-get install bubblewrap.*task\.sandbox\.executor"):
        check_sandbox(SandboxOptions())


def test_a_machine_that_forbids_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    bubblewrap.working_bubblewrap.cache_clear()
    with pytest.raises(UserError, match=r"does not work here: 'bwrap: No permissions .*user namespaces.*docker run"):
        check_sandbox(SandboxOptions())


def test_the_filter_is_a_whole_number_of_instructions_that_jump_inside_it() -> None:
    program = filter_program()
    if program is None:
        pytest.skip("the filter does not know this processor")
    assert len(program) % 8 == 0
    count = len(program) // 8
    for at in range(count):
        code, then, otherwise = (
            int.from_bytes(program[8 * at : 8 * at + 2], "little"),
            *program[8 * at + 2 : 8 * at + 4],
        )
        assert at + 1 + max(then, otherwise) < count or code == 0x06


# the client of a server


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start a server that answers with what a function makes of a request, and give its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[dict[str, Any]], Any], status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/run_code"
                assert self.headers["Content-Type"] == "application/json"
                said = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answered(status: str = "Success", run: dict[str, Any] | None = None, message: str = "") -> dict[str, Any]:
    """An answer with all of its documented fields."""
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


def finished(code: int = 0, stdout: str = "", stderr: str = "", status: str = "Finished") -> dict[str, Any]:
    return {"status": status, "execution_time": 0.02, "return_code": code, "stdout": stdout, "stderr": stderr}


def client(url: str) -> HttpExecutor:
    return HttpExecutor(url, LIMITS, Throttle(2))


def test_a_server_really_runs_the_code(serve: Callable[..., str], unprotected: SandboxPool) -> None:
    def run(request: dict[str, Any]) -> dict[str, Any]:
        assert request["language"] == "python"
        assert request["run_timeout"] == 5
        assert request["memory_limit_MB"] == 128
        result = unprotected.run(request["code"], request["stdin"])
        assert result.exit_code is not None
        run_result = finished(result.exit_code, result.stdout, result.stderr)
        return answered("Failed" if result.exit_code else "Success", run_result)

    executor = client(serve(run))
    result = executor.run("print(input() * 2)", "ab\n")
    assert (result.status, result.exit_code, result.stdout) == (Status.OK, 0, "abab\n")
    assert executor.run("1 / 0").status is Status.ERROR
    check_sandbox(SandboxOptions(executor="http", url=serve(run), wall_seconds=5, memory_mb=128))


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (answered("Failed", finished(3)), Status.ERROR),
        (answered("Failed", finished(-9)), Status.KILLED),
        (answered("Failed", finished(1, stderr="Traceback\nMemoryError\n")), Status.MEMORY),
        (answered("Failed", {**finished(), "return_code": None, "status": "TimeLimitExceeded"}), Status.TIMEOUT),
        (answered("Success", finished(0, "x" * 5000)), Status.OUTPUT_LIMIT),
        (answered("SandboxError", None, "no docker"), Status.SANDBOX_FAILURE),
        (answered("SandboxError", finished(0, "1")), Status.SANDBOX_FAILURE),
        (answered("Failed", finished(0, status="Error")), Status.SANDBOX_FAILURE),
        (answered("Success", None), Status.SANDBOX_FAILURE),
        (answered("Success", {**finished(), "return_code": "0"}), Status.SANDBOX_FAILURE),
        (answered("Success", {**finished(), "stdout": 3}), Status.SANDBOX_FAILURE),
        (answered("Great", finished()), Status.SANDBOX_FAILURE),
        ([], Status.SANDBOX_FAILURE),
        (b"{", Status.SANDBOX_FAILURE),
        (base64.b64decode("/////w=="), Status.SANDBOX_FAILURE),
    ],
)
def test_what_a_server_says_is_told_from_what_it_cannot_say(
    serve: Callable[..., str], answer: Any, status: Status
) -> None:
    result = client(serve(lambda request: answer)).run("print(1)")
    assert result.status is status
    assert len(result.stdout) <= LIMITS.output


def test_a_server_that_is_overloaded_or_gone_is_a_failure_and_no_result(serve: Callable[..., str]) -> None:
    overloaded = client(serve(lambda request: answered("Success", finished()), status=503)).run("print(1)")
    assert (overloaded.status, overloaded.detail) == (Status.SANDBOX_FAILURE, "the server answered with status 503")
    gone = client("http://127.0.0.1:9").run("print(1)")
    assert (gone.status, gone.detail) == (Status.SANDBOX_FAILURE, "the server did not answer")
    with pytest.raises(UserError, match=r"the server at http://127.0.0.1:9.*the server did not answer"):
        check_sandbox(SandboxOptions(executor="http", url="http://127.0.0.1:9"))


def test_the_benchmark_of_sandboxes_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    benchmark = importlib.import_module("sandbox")
    rows = [benchmark.measure("subprocess", calls=2, pause=0.0, callers=2)]
    assert rows[0]["calls_per_second"] > 0
    assert benchmark.table_of({"rows": rows}).splitlines()[2].startswith("| subprocess |")
