"""A long run takes no more memory at its end than at its beginning, in none of its processes."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from memory_cases import MEGABYTE, Measured, measured_run
from vcpo.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS, STALENESS = 2000, 3
EARLY, LATE = range(520, 801), range(1720, 2001)  # the first checkpoint, at 500, has imported what saving needs
BETWEEN = 1200  # steps between the middles of the two
COUNTED = 510, 2000  # counting takes much memory for a moment, so not between the two
# allocators take memory in blocks and give it back when they like; 3 MB are 2.5 kB per step, less than a kept response
GROWTH = 3 * MEGABYTE
SMALL = (
    f"training.max_steps={STEPS}",
    f"runtime.max_staleness={STALENESS}",
    "training.prompts_per_step=1",
    "sampling.num_generations=2",
    "sampling.max_completion_length=2",
    "task.digits=2",
    "checkpoint.save_steps=500",
    "logging.transcript_steps=50",
    "logging.trajectory_steps=500",
    "watchdog.enabled=true",
    "model.device=cpu",
)
RUNS = {"lockstep": ("runtime.name=lockstep",), "local": ("runtime=local", "reward.processes=1")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """Both at once: together they have work for two cores."""
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(measured_run, tmp_path_factory.mktemp(name), (*changes, *SMALL), COUNTED)
            for name, changes in RUNS.items()
        }
        return {name: future.result() for name, future in futures.items()}


def windows(rows: list[list[int]], column: int) -> tuple[list[int], list[int]]:
    """The values of a column in the early and in the late steps."""
    early, late = ([row[column] for row in rows if row[0] in window] for window in (EARLY, LATE))
    assert len(early) == len(late) == 29
    return early, late


@pytest.mark.parametrize("name", RUNS)
def test_resident_memory_is_flat_in_every_process(measured: dict[str, Measured], name: str) -> None:
    for process, rows in measured[name].processes.items():
        early, late = windows(rows, 1)
        growth = statistics.median(late) - statistics.median(early)
        assert growth < GROWTH, f"{process} grew by {growth / MEGABYTE:.1f} MB in {BETWEEN} steps"


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_kept_of_every_step(measured: dict[str, Measured], name: str) -> None:
    """Small things do not show in resident memory. One number per step, anywhere, would be 1,490 elements more."""
    first, last = COUNTED
    elements = measured[name].elements
    assert elements[last] - elements[first] < (last - first) / 2


@pytest.mark.parametrize("name", RUNS)
def test_file_descriptors_and_threads_are_not_collected(measured: dict[str, Measured], name: str) -> None:
    for process, rows in measured[name].processes.items():
        for column in (2, 3):
            early, late = windows(rows, column)
            assert max(late) <= max(early), process


def test_every_process_of_the_local_run_was_watched(measured: dict[str, Measured]) -> None:
    assert {process.split()[0] for process in measured["local"].processes} >= {"learner", "sampler", "grader"}


def test_the_backlog_is_bounded(measured: dict[str, Measured]) -> None:
    """What is finished and waiting is at most what may be ahead: one minibatch of one group for every step of lag."""
    lines = [line for line in read_metrics(measured["local"].run / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == STEPS
    assert max(line["waiting_groups"] for line in lines) <= STALENESS + 1
