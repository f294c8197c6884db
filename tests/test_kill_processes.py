"""``kill -9`` of any process of a local run at any moment: the run goes on or is resumed, and nothing is lost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kill_process_cases import KilledProcesses, ProcessResult, kill_processes
from run_cases import train_steps
from vcpo.observe.ledger import read_ledger
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints

pytestmark = pytest.mark.slow

SEED = 20260202
STEPS, GROUPS, MEMBERS, STALENESS = 40, 2, 4, 2
COMMON = (
    "runtime=local",
    f"runtime.max_staleness={STALENESS}",
    "runtime.max_restarts=50",
    f"training.max_steps={STEPS}",
    "reward.processes=1",
    "reward.max_failures=50",
    "checkpoint.save_steps=1",
    "logging.trajectory_steps=1",
    "model.device=cpu",
)
RUNS = [
    KilledProcesses(
        "one-sampler",
        (*COMMON, "eval.eval_steps=20", "eval.num_problems=4", "eval.background=true"),
        sessions=7,
        samplers=1,
        graders=2,
    ),
    KilledProcesses(
        "two-samplers-that-drop",
        (*COMMON, "runtime.samplers=2", "runtime.pacing={name: drop_stale, max_ahead: 3}", "reward.processes=2"),
        sessions=5,
        samplers=2,
        graders=2,
    ),
]
NAMES = [run.name for run in RUNS]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProcessResult]:
    directory = tmp_path_factory.mktemp("kill")
    results = kill_processes(RUNS, directory, SEED)
    left = [path.name for path in (directory / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torch")] == []
    return {run.name: result for run, result in zip(RUNS, results, strict=True)}


def rows(run: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        return connection.execute(
            "SELECT group_id, member, problem_id, state, step, start_version FROM trajectories ORDER BY 1, 2"
        ).fetchall()


def test_every_kind_of_process_was_killed_and_every_start_went_on(killed: dict[str, ProcessResult]) -> None:
    for name, result in killed.items():
        assert result.problems == [], f"{name}, seed {SEED}"
    counts = {what: sum(r.kills(what) for r in killed.values()) for what in ("sampler", "grader", "learner", "all")}
    assert sum(counts.values()) >= 50, counts
    assert all(count >= 5 for count in counts.values()), counts


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_done_once_and_within_the_bound(killed: dict[str, ProcessResult], name: str) -> None:
    run = Path(killed[name].path)
    assert train_steps(run) == list(range(1, STEPS + 1))
    for line in read_metrics(run / "metrics.jsonl"):
        assert line["kind"] == "eval" or line["lag_max"] <= STALENESS, line["step"]
    assert all(find_damage(path) is None for path in list_checkpoints(run / "checkpoints"))
    assert list(run.rglob("*.tmp")) == []


def test_no_evaluation_beside_the_training_is_recorded_twice(killed: dict[str, ProcessResult]) -> None:
    lines = read_metrics(Path(killed["one-sampler"].path) / "metrics.jsonl")
    evaluated = [line["step"] for line in lines if line["kind"] == "eval"]
    assert len(evaluated) == len(set(evaluated)) > 0
    assert set(evaluated) <= {0, 20, 40}


@pytest.mark.parametrize("name", NAMES)
def test_no_trajectory_is_lost_or_trained_twice(killed: dict[str, ProcessResult], name: str) -> None:
    run, how = Path(killed[name].path), f"seed {SEED}: {killed[name].sessions}"
    table = rows(run)
    members = Counter(row[0] for row in table)
    assert sorted(members) == list(range(len(members))), how
    assert set(members.values()) == {MEMBERS}, how
    states = Counter(row[3] for row in table)
    assert states["trained"] == STEPS * GROUPS * MEMBERS, how
    assert sum(states[state] for state in ("trained", "filtered", "failed")) == len(table), how
    assert read_ledger(run / "ledger.sqlite").planned == len(table)
    # what the minibatches themselves say, which no part of the ledger has written
    trained = {}
    for step, path in saved_steps(run).items():
        for group in load_minibatch(path).groups:
            assert group.id not in trained, how
            trained[group.id] = step
            for trajectory in group.trajectories:
                versions = trajectory.versions_T
                assert step - 1 - STALENESS <= trajectory.start_version == versions[0], how
                assert (versions[1:] >= versions[:-1]).all(), how
                assert versions[-1] <= step - 1, how
    assert trained == {row[0]: row[4] for row in table if row[3] == "trained"}, how
    assert Counter(trained.values()) == dict.fromkeys(range(1, STEPS + 1), GROUPS), how


@pytest.mark.parametrize("name", NAMES)
def test_every_group_has_the_prompt_that_its_number_stands_for(killed: dict[str, ProcessResult], name: str) -> None:
    run = Path(killed[name].path)
    planned = {row[0]: row[2] for row in rows(run)}
    undisturbed = {row[0]: row[2] for row in rows(run.with_name("counted"))}
    shared = planned.keys() & undisturbed.keys()
    assert len(shared) >= STEPS * GROUPS
    assert {number: planned[number] for number in shared} == {number: undisturbed[number] for number in shared}


def test_where_nothing_is_dropped_training_is_in_the_order_of_starting(killed: dict[str, ProcessResult]) -> None:
    table = rows(Path(killed["one-sampler"].path))
    steps = [row[4] for row in table if row[3] == "trained"]
    assert steps == sorted(steps)
