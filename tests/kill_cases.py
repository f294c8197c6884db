"""Runs that are killed with SIGKILL at any line of their own code, again and again, and resumed until they finish.

``python kill_cases.py JOB.json`` imports everything once and forks a child for every attempt. A child traces its own
lines and kills itself before the n-th one, so a moment is a number: nothing sleeps, and what has failed can be done
again. Half of the moments are spread over all lines that a run passes; the other half over the places in the code
that write files, however rarely a run passes them, with those of ``pathlib`` and ``shutil`` below: there a moment lies
between two system calls of one function.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import vcpo

if TYPE_CHECKING:
    from vcpo.config import RunConfig
    from vcpo.pipeline.run_directory import Mode

SOURCE = Path(vcpo.__file__).parent
WRITING = tuple(
    str(SOURCE / name)
    for name in (
        *("pipeline/run.py", "pipeline/run_directory.py", "pipeline/checkpoint.py", "pipeline/ledger.py"),
        *("pipeline/guard.py", "pipeline/warm_start.py", "observe/", "report/html.py"),
    )
)
OF_PATHS = {"open", "write_text", "write_bytes", "rename", "replace", "unlink", "mkdir", "rmdir"}
MOST_ATTEMPTS = 200
SECONDS = 120.0  # for one attempt; none takes more than a few


@dataclass(frozen=True)
class Killed:
    """A run configuration and how often it is to be killed at least.

    changes: to the tiny run of ``run_cases``. report: whether it writes its report, which takes most of its time.
    """

    name: str
    changes: Sequence[str]
    kills: int
    report: bool = False


@dataclass
class Attempt:
    """One start of a run, killed before it passed ``place`` (any of the package's lines if empty) for the n-th time.

    where: that line, or how it ended.
    """

    place: str
    n: int
    where: str
    killed: bool


@dataclass
class Chain:
    """One run directory from its first start to its end."""

    path: str
    attempts: list[Attempt] = field(default_factory=list)


@dataclass
class Result:
    """What became of one configuration.

    whole: the uninterrupted run. lines: how many of the package it passed. places: those that write, and how often
    it passed them. problems: tracebacks, with their moments.
    """

    whole: str = ""
    lines: int = 0
    places: dict[str, int] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(attempt.killed for chain in self.chains for attempt in chain.attempts)


class LineCounter:
    """A trace function that counts lines and ends the process before the n-th.

    lines: of the package. places: how often each line that writes was passed.
    """

    def __init__(self, place: str = "", n: int = 0, last_words: int = 2) -> None:
        """As in ``Attempt``; 0 never ends it. last_words: a file descriptor that is told the line."""
        self.lines = 0
        self.places: Counter[str] = Counter()
        self._place = place
        self._n = n
        self._last_words = last_words
        self._tracers: dict[Any, Callable[..., Any] | None] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        try:
            return self._tracers[code]
        except KeyError:
            tracer = self._tracers[code] = self._tracer_of(code)
            return tracer

    def _tracer_of(self, code: CodeType) -> Callable[..., Any] | None:
        name = code.co_filename
        if name.startswith(WRITING) or name == shutil.__file__:
            return self._writing
        if name == pathlib.__file__:
            return self._writing if code.co_name in OF_PATHS else None
        return self._counting if name.startswith(str(SOURCE)) else None

    def _counting(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if not self._place and self.lines == self._n:
                self._end(frame)
        return self._counting

    def _writing(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.places[place] += 1
            if (self.places[place] if place == self._place else 0 if self._place else self.lines) == self._n != 0:
                self._end(frame)
        return self._writing

    def _end(self, frame: FrameType) -> None:
        code = frame.f_code
        os.write(self._last_words, f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_lines(job: Sequence[Killed], directory: Path, seed: int) -> list[Result]:
    """Do it in a process of its own, all configurations at once."""
    run_driver(Path(__file__), {"directory": str(directory), "seed": seed, "runs": [asdict(killed) for killed in job]})
    return [_result(directory / killed.name / "result.json") for killed in job]


def run_driver(script: Path, job: dict[str, Any], more: Mapping[str, str] = {}) -> None:
    """Run a script with a job and wait for it. more: of its environment."""
    directory = Path(job["directory"])
    (directory / "job.json").write_text(json.dumps(job))
    settings = {"VCPO_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, script, str(directory / "job.json")],
        env={**os.environ, **settings, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def _result(path: Path) -> Result:
    data = json.loads(path.read_text())
    chains = [Chain(c["path"], [Attempt(**attempt) for attempt in c["attempts"]]) for c in data.pop("chains")]
    return Result(**{**data, "chains": chains})


def _main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    import_everything(Path(job["directory"]))
    if os.path.isdir("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    workers = {}
    for run in job["runs"]:
        path = Path(job["directory"]) / run["name"]
        path.mkdir()
        log = path / "worker.log"
        workers[fork(partial(_work, Killed(**run), path, job["seed"]), log)] = log
    failed = [log for pid, log in workers.items() if os.waitpid(pid, 0)[1] != 0]
    for log in failed:
        print(log.read_text(), file=sys.stderr)
    sys.exit(bool(failed))


def import_everything(directory: Path) -> None:
    """What a run imports late, too, so that no child pays for it."""
    import torch

    torch.set_num_threads(1)
    for name in ("torch.utils.tensorboard", "vcpo.report.html", "vcpo.pipeline.run", "vcpo.pipeline.local"):
        importlib.import_module(name)
    from matplotlib.figure import Figure

    from run_cases import tiny_config
    from vcpo.models.loading import load_model
    from vcpo.report.figures import inline_svg

    load_model(tiny_config(directory / "unused").model, 0)
    figure = Figure()
    figure.subplots().set_title("$x$")  # fonts and the parser of formulas
    inline_svg(figure, "x")


def fork(action: Callable[[], object], log: Path) -> int:
    """Run ``action`` in a child whose output goes to ``log``; exit status 0, or 1 after an exception."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.settrace(None)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _work(killed: Killed, directory: Path, seed: int) -> None:
    """Everything about one configuration; the result goes to ``result.json``."""
    result = Result(str(directory / "whole"))
    rng = random.Random(f"{seed} {killed.name}")
    counts = directory / "count.json"
    if wait(fork(lambda: _count_lines(killed, directory / "whole", counts), directory / "whole.log")) != 0:
        raise AssertionError((directory / "whole.log").read_text())
    result.lines, result.places = json.loads(counts.read_text())
    owed = _one_of_each_file(result.places, rng)
    while result.kills < killed.kills and len(result.chains) < MOST_ATTEMPTS and not result.problems:
        chain = Chain(str(directory / f"chain-{len(result.chains)}"))
        result.chains.append(chain)
        _run_chain(killed, chain, result, rng, owed)
    (directory / "result.json").write_text(json.dumps(asdict(result)))


def _one_of_each_file(places: Iterable[str], rng: random.Random) -> list[str]:
    """A place that writes in every file that has one, in a random order."""
    files: dict[str, list[str]] = {}
    for place in sorted(places):
        files.setdefault(place.split(":")[0], []).append(place)
    chosen = [rng.choice(its) for its in files.values()]
    rng.shuffle(chosen)
    return chosen


def _run_chain(killed: Killed, chain: Chain, result: Result, rng: random.Random, owed: list[str]) -> None:
    """owed: places at which nothing has been killed yet; they come first, where a place has its turn."""
    path = Path(chain.path)
    log = path.with_suffix(".log")
    while len(chain.attempts) < MOST_ATTEMPTS:
        # a third of a run is little more than what a start takes, so some attempts must come further
        place, n = "", rng.randint(1, round(result.lines * rng.choice([0.3, 0.9])))
        if rng.random() < 0.5:
            place, n = (owed.pop(), 1) if owed else (rng.choice(sorted(result.places)), 0)
            n = n or rng.randint(1, result.places[place])
        reading, writing = os.pipe()
        status = wait(fork(partial(_train_until, killed, path, place, n, writing), log))
        os.close(writing)
        where = os.read(reading, 1000).decode()
        os.close(reading)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        attempt = Attempt(place, n, where or f"status {status}", was_killed)
        chain.attempts.append(attempt)
        if status != 0 and not was_killed:
            result.problems.append(f"{chain}: the run failed:\n{log.read_text()[-6000:]}")
            return
        readers = path.with_suffix(".readers.log")
        if wait(fork(lambda: read_everything(path), readers)) != 0:
            result.problems.append(f"{chain}: what is left cannot be read:\n{readers.read_text()[-6000:]}")
            return
        if not was_killed:
            return
    result.problems.append(f"{chain}: it does not come to an end")


def wait(pid: int) -> int:
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"an attempt hangs for more than {SECONDS} s")
        time.sleep(0.002)


def _count_lines(killed: Killed, path: Path, out: Path) -> None:
    from run_cases import tiny_config
    from vcpo.pipeline.run import train

    counter = LineCounter()
    config = tiny_config(path, *killed.changes)
    _trace(counter)
    train(config, make_report=killed.report)
    sys.settrace(None)
    out.write_text(json.dumps([counter.lines, counter.places]))


def _train_until(killed: Killed, path: Path, place: str, n: int, last_words: int) -> None:
    from vcpo.pipeline.run import train

    config, mode = started(path, killed.changes)
    _trace(LineCounter(place, n, last_words))
    train(config, mode=mode, make_report=killed.report)


def started(path: Path, changes: Sequence[str]) -> tuple[RunConfig, Mode]:
    """The configuration, and how a user starts it who does so again and again whatever has happened."""
    from run_cases import tiny_config
    from vcpo.errors import UserError
    from vcpo.pipeline.run_directory import RunDirectory

    config = tiny_config(path, *changes)
    try:
        RunDirectory.check(config, "resume")
    except UserError as error:
        if "holds no run to resume" not in str(error):
            raise
        return config, "new"
    return config, "resume"


def _trace(counter: LineCounter) -> None:
    threading.settrace(counter.trace)
    sys.settrace(counter.trace)


def read_everything(path: Path) -> None:
    """Every reader, on whatever a killed run has left."""
    from rich.console import Console

    from vcpo.errors import UserError
    from vcpo.observe.alarms import read_alarms
    from vcpo.observe.ledger import read_ledger
    from vcpo.observe.metrics import read_metrics
    from vcpo.observe.summary import read_sessions
    from vcpo.observe.trajectories import load_minibatch, saved_steps
    from vcpo.pipeline.checkpoint import find_damage, list_checkpoints
    from vcpo.report.ledger import print_ledger
    from vcpo.report.runs import load_runs

    has_steps = False
    if (path / "metrics.jsonl").exists():
        (data,) = load_runs([path])
        has_steps = bool(data.train)
        assert len(read_metrics(path / "metrics.jsonl")) == len(data.train) + len(data.eval)
    try:
        print_ledger(read_ledger(path / "ledger.sqlite"), Console(file=io.StringIO()))
    except UserError as error:
        if has_steps or "no step of this run has been recorded" not in str(error):
            raise
    read_alarms(path)
    read_sessions(path)
    for minibatch in saved_steps(path).values():
        load_minibatch(minibatch)
    for checkpoint in list_checkpoints(path / "checkpoints"):
        find_damage(checkpoint)


if __name__ == "__main__":
    _main(sys.argv[1])
