"""Local runs whose processes are killed with SIGKILL: samplers, graders, the learner, all at once; then resumed.

``python kill_process_cases.py JOB.json`` works as ``kill_cases`` does. The moments are counted in lines of the package
that the learner's process passes, in all of its threads. Killing samplers and graders does not end a session, so one
start of the run takes several of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from kill_cases import SOURCE, fork, import_everything, read_everything, run_driver, started, wait
from run_cases import gone_within

SECONDS = 60.0  # within which nothing of a killed run is left; a sampler that is starting looks up once it has loaded


@dataclass(frozen=True)
class KilledProcesses:
    """A run configuration and what is killed in it.

    changes: to the tiny run of ``run_cases``. sessions: how often the learner is killed, every second time with all of
    its processes. samplers, graders: killed in each session, at moments of their own.
    """

    name: str
    changes: Sequence[str]
    sessions: int
    samplers: int
    graders: int


@dataclass
class Session:
    """One start of a run. planned: what is killed before which line. done: what was, and where the learner was."""

    planned: list[tuple[int, str]]
    done: list[str] = field(default_factory=list)


@dataclass
class ProcessResult:
    """What became of one configuration. problems: with their sessions."""

    path: str = ""
    lines: int = 0
    sessions: list[Session] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def kills(self, what: str) -> int:
        """How many times ``sampler``, ``grader``, ``learner`` or ``all`` were killed."""
        return sum(line.startswith(what) for session in self.sessions for line in session.done)


class ProcessKiller:
    """A trace function that counts lines of the package in all threads and kills what is due."""

    def __init__(self, planned: Sequence[tuple[int, str]], words: int) -> None:
        """words: a file descriptor that is told of every kill, in one line each."""
        self.lines = 0
        self._planned = sorted(planned)
        self._words = words
        self._within = str(SOURCE)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(self._within) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            while self._planned and self.lines >= self._planned[0][0]:
                self._kill(self._planned.pop(0)[1], frame)
        return self._line

    def _kill(self, what: str, frame: FrameType) -> None:
        code = frame.f_code
        here = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        children = psutil.Process().children(recursive=True)
        if what in ("sampler", "grader"):
            mark = "vcpo.pipeline.sampler_process" if what == "sampler" else "vcpo.pipeline.grading_worker"
            found = [child for child in children if mark in " ".join(_command(child))]
            if found:
                _end(found[self.lines % len(found)])
                os.write(self._words, f"{what}: {here}\n".encode())
            return
        pids = " ".join(str(child.pid) for child in children)
        os.write(self._words, f"{what}: {here}; processes {os.getpid()} {pids}\n".encode())
        for child in children if what == "all" else ():
            _end(child)
        os.kill(os.getpid(), signal.SIGKILL)


def kill_processes(job: Sequence[KilledProcesses], directory: Path, seed: int) -> list[ProcessResult]:
    """Do it in a process of its own, all configurations at once."""
    data = {"directory": str(directory), "seed": seed, "runs": [asdict(killed) for killed in job]}
    (directory / "tmp").mkdir()
    run_driver(Path(__file__), data, {"TMPDIR": str(directory / "tmp")})
    return [_result(directory / killed.name / "result.json") for killed in job]


def _result(path: Path) -> ProcessResult:
    data = json.loads(path.read_text())
    return ProcessResult(**{**data, "sessions": [Session(**session) for session in data["sessions"]]})


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
        process.kill()


def _work(killed: KilledProcesses, directory: Path, seed: int) -> None:
    rng = random.Random(f"{seed} {killed.name}")
    result = ProcessResult(str(directory / "run"))
    _session(killed, directory / "counted", [], result, directory / "lines")
    result.lines = int((directory / "lines").read_text())
    result.sessions.clear()
    while len(result.sessions) < 3 * killed.sessions and not result.problems:
        last = "all" if len(result.sessions) % 2 else "learner"
        end = rng.randint(1, result.lines // 4)
        others = ["sampler"] * killed.samplers + ["grader"] * killed.graders
        planned = [(rng.randint(1, end), other) for other in others]
        if result.kills("learner") + result.kills("all") < killed.sessions:
            planned.append((end, last))
        if not _session(killed, Path(result.path), planned, result):
            break
    (directory / "result.json").write_text(json.dumps(asdict(result)))


def _session(
    killed: KilledProcesses,
    path: Path,
    planned: list[tuple[int, str]],
    result: ProcessResult,
    lines: Path | None = None,
) -> bool:
    """One start; whether it was killed. lines: where to write how many lines there were."""
    session = Session(planned)
    result.sessions.append(session)
    log, words = path.with_suffix(".log"), path.with_suffix(".words")
    words.write_text("")
    descriptor = os.open(words, os.O_WRONLY | os.O_APPEND)
    status = wait(fork(partial(_train, killed, path, planned, descriptor, lines), log))
    os.close(descriptor)
    session.done = words.read_text().splitlines()
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if status != 0 and not was_killed:
        result.problems.append(f"{session}: the run failed:\n{log.read_text()[-6000:]}")
    if was_killed:
        pids = list(map(int, session.done[-1].partition("; processes ")[2].split()))
        _nothing_is_left(pids, f"{session}", result)
        readers = path.with_suffix(".readers.log")
        if wait(fork(partial(read_everything, path), readers)) != 0:
            result.problems.append(f"{session}: what is left cannot be read:\n{readers.read_text()[-6000:]}")
    return was_killed


def _nothing_is_left(pids: list[int], what: str, result: ProcessResult) -> None:
    left = []
    for pid in pids:
        try:
            left.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    if not gone_within(left, SECONDS):
        result.problems.append(f"{what}: still there: {left}")
    shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    ours = [name for name in shared if any(str(pid) in name.replace("-", "_").split("_") for pid in pids)]
    if ours:
        result.problems.append(f"{what}: shared memory is left: {ours}")


def _train(killed: KilledProcesses, path: Path, planned: list[tuple[int, str]], words: int, lines: Path | None) -> None:
    from vcpo.pipeline.run import train

    config, mode = started(path, killed.changes)
    killer = ProcessKiller(planned, words)
    threading.settrace(killer.trace)
    sys.settrace(killer.trace)
    train(config, mode=mode, make_report=False)
    sys.settrace(None)
    if lines is not None:
        lines.write_text(str(killer.lines))


def _main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    import_everything(Path(job["directory"]))
    workers = {}
    for run in job["runs"]:
        path = Path(job["directory"]) / run["name"]
        path.mkdir()
        killed = KilledProcesses(**run)
        workers[fork(partial(_work, killed, path, job["seed"]), path / "worker.log")] = path / "worker.log"
    failed = [log for pid, log in workers.items() if os.waitpid(pid, 0)[1] != 0]
    for log in failed:
        print(log.read_text(), file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    _main(sys.argv[1])
