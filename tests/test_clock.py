"""The time of day may jump by hours: no record goes back with it, and no decision depends on it."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from run_cases import InterruptAfter, assert_equal_weights, final_weights, tiny_config, train_steps
from vcpo.cli import app
from vcpo.observe.clock import SteadyClock
from vcpo.observe.metrics import read_metrics
from vcpo.observe.summary import summarize
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory

HOUR = 3600.0


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the time of day finds it hours away from the last one."""
    real, rng = time.time, random.Random(1)
    monkeypatch.setattr(time, "time", lambda: real() + rng.uniform(-9 * HOUR, 9 * HOUR))


@pytest.mark.usefixtures("jumping")
def test_a_clock_goes_on_from_where_it_began() -> None:
    clock = SteadyClock()
    begin, passed = clock(), time.monotonic()
    times = [clock() for _ in range(1000)]
    assert times == sorted(times)
    assert times[-1] - begin == pytest.approx(time.monotonic() - passed, abs=10)


def test_a_clock_begins_with_the_time_of_day() -> None:
    before = time.time()
    assert before - 1 <= SteadyClock()() <= time.time() + 1


@pytest.mark.usefixtures("jumping")
def test_a_run_under_a_jumping_clock_is_the_same_run_with_times_in_order(tmp_path: Path) -> None:
    changes = ("runtime.max_staleness=2", "eval.eval_steps=2", "eval.num_problems=4", "logging.tensorboard=true")
    begin = time.monotonic()
    config = tiny_config(tmp_path / "run", *changes)
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(3))
    run = train(config, mode="resume")
    most = time.monotonic() - begin
    assert train_steps(run) == [1, 2, 3, 4, 5, 6]

    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT asked_at, graded_at, ended_at FROM trajectories ORDER BY group_id").fetchall()
    assert len(rows) == 6 * 2 * 4
    for asked, graded, ended in rows:
        assert 0 <= graded - asked <= most
        assert 0 <= ended - graded <= most
    asked_at = [row[0] for row in rows]
    assert asked_at == sorted(asked_at)  # groups are asked for in the order of their numbers
    times = [line["time"] for line in read_metrics(run / "metrics.jsonl")]
    assert times == sorted(times)
    for session in RunDirectory(run).sessions():
        assert 0 <= session["ended"] - session["started"] <= most
    seconds = summarize(run).seconds
    assert seconds is not None
    assert 0 < seconds <= most

    shown = CliRunner().invoke(app, ["ledger", str(run)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "planned 48" in " ".join(shown.output.split())
    assert (run / "report.html").is_file()


def test_the_weights_do_not_depend_on_the_time_of_day(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    steady = train(tiny_config(tmp_path / "steady", "runtime.max_staleness=2"), make_report=False)
    request.getfixturevalue("jumping")
    jumping = train(tiny_config(tmp_path / "jumping", "runtime.max_staleness=2"), make_report=False)
    assert_equal_weights(final_weights(steady), final_weights(jumping))
