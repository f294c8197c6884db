"""A long run that measures its processes while it goes on: ``python memory_cases.py JOB.json``."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil

from run_cases import tiny_config
from vcpo.observe.progress import Progress

EVERY = 10  # steps between two looks
MEGABYTE = 2**20


@dataclass(frozen=True)
class Measured:
    """What a run measured. processes: by name, one row per look: step, resident bytes, file descriptors, threads.

    elements: by step, how many there are in all Python containers of the run's own process.
    """

    run: Path
    processes: defaultdict[str, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    elements: dict[int, int] = field(default_factory=dict)


def measured_run(directory: Path, changes: Sequence[str], counted_at: Sequence[int]) -> Measured:
    """Train in a process of its own. counted_at: steps after which elements are counted, which takes a while."""
    job, out = directory / "job.json", directory / "measured.jsonl"
    job.write_text(
        json.dumps({"run": str(directory / "run"), "changes": list(changes), "counted_at": list(counted_at)})
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VCPO_CACHE": str(directory / "cache")}
    done = subprocess.run(
        [sys.executable, __file__, job, out],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = Measured(directory / "run")
    for name, *row in map(json.loads, out.read_text().splitlines()):
        if name == "elements":
            measured.elements[row[0]] = row[1]
        else:
            measured.processes[name].append(row)
    return measured


class MeasuringProgress(Progress):
    """Looks at every process of the run every few steps, and keeps nothing of it itself."""

    def __init__(self, counted_at: Sequence[int], out: TextIO) -> None:
        super().__init__(10**6)
        self._own = psutil.Process()
        self._counted_at = counted_at
        self._out = out

    def log(self, step: int, kind: Any, metrics: Mapping[str, float]) -> None:
        super().log(step, kind, metrics)
        if step % EVERY == 0:
            self._look("learner", self._own, step)
            for child in self._own.children(recursive=True):
                self._look(_kind_of(child), child, step)
        if step in self._counted_at:
            self._write(["elements", step, count_elements()])

    def _look(self, name: str, process: psutil.Process, step: int) -> None:
        row = [step, process.memory_info().rss, process.num_fds(), process.num_threads()]
        self._write([f"{name} {process.pid}", *row])

    def _write(self, line: list[Any]) -> None:
        self._out.write(json.dumps(line) + "\n")


def count_elements() -> int:
    """How many elements all of Python's containers hold, those of plain numbers, too, which it does not list."""
    gc.collect()
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        for container in (thing, *gc.get_referents(thing)):
            if isinstance(container, dict | list | set | tuple | deque):
                seen[id(container)] = len(container)
    return sum(seen.values())


def _kind_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    marks = {"sampler_process": "sampler", "grading_worker": "grader"}
    return next((kind for mark, kind in marks.items() if mark in command), "other")


def _main(job_file: str, out_file: str) -> None:
    from vcpo.pipeline.run import train

    job = json.loads(Path(job_file).read_text())
    with Path(out_file).open("w") as out:
        progress = MeasuringProgress(job["counted_at"], out)
        train(tiny_config(Path(job["run"]), *job["changes"]), make_report=False, progress=progress)


if __name__ == "__main__":
    _main(*sys.argv[1:])
