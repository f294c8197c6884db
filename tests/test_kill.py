"""``kill -9`` at any moment: a run that is resumed until it finishes is the run that was never killed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kill_cases import Killed, Result, kill_at_lines
from run_cases import REWARDS, assert_equal_weights, final_weights, timeless_metrics, train_steps
from vcpo.observe.alarms import read_alarms
from vcpo.observe.ledger import read_ledger
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints

pytestmark = pytest.mark.slow

SEED = 20260201
STEPS, GROUPS, MEMBERS = 6, 2, 4  # of the tiny run: steps, groups per step, responses per group
EVALUATING = ("eval.eval_steps=2", "eval.num_problems=4")
LOCKSTEP = [
    # everything that a run can write, and a warm start
    Killed(
        "everything",
        (
            *EVALUATING,
            "runtime.max_staleness=2",
            "warm_start.steps=3",
            "warm_start.batch_size=4",
            "checkpoint.save_steps=1",
            "logging.tensorboard=true",
            "logging.transcript_steps=1",
            "logging.trajectory_steps=2",
        ),
        8,
        report=True,
    ),
    # weights that change within a response; a controlled limit; two reward functions
    Killed(
        "in-flight",
        (
            *EVALUATING,
            "runtime.lag=in_flight",
            "runtime.max_staleness=3",
            "runtime.target_ess=0.95",
            f"reward.reward_funcs=[{REWARDS}:digit_mean, {REWARDS}:first_unscored]",
            "checkpoint.save_steps=2",
            "checkpoint.save_total_limit=1",
        ),
        18,
    ),
    # an alarm at step 4 and a rollback, which removes checkpoints
    Killed(
        "rollback",
        (
            "runtime.max_staleness=2",
            "checkpoint.save_steps=1",
            "logging.trajectory_steps=1",
            "watchdog.enabled=true",
            "watchdog.action=rollback",
            "watchdog.rollback.healthy_after=1",
            "watchdog.ess={below: 2.0, count: 4, window: 4, cooldown: 50}",
        ),
        18,
    ),
    # every group of another lag; a schedule; prompts that are passed over
    Killed(
        "mixed",
        (
            *EVALUATING,
            "runtime.lag=mixed",
            "runtime.max_staleness=3",
            "method=tis",
            "training.lr_scheduler_type=cosine",
            "sampling.long_prompts=skip",
            "task={name: dataset, path: ROWS, eval_path: ROWS}",
            "checkpoint.save_steps=2",
        ),
        18,
    ),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    directory = tmp_path_factory.mktemp("kill")
    rows = [{"prompt": "12=" if i % 3 else "123456=", "answer": "12"} for i in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = [_on_cpu(kind, directory / "rows.jsonl") for kind in LOCKSTEP]
    results = kill_at_lines(job, directory, SEED)
    return {kind.name: result for kind, result in zip(job, results, strict=True)}


def _on_cpu(kind: Killed, rows: Path) -> Killed:
    changes = (*(change.replace("ROWS", str(rows)) for change in kind.changes), "model.device=cpu")
    return replace(kind, changes=changes)


def finished(result: Result) -> list[tuple[Path, str]]:
    """The runs that came to their end, and how, for messages."""
    return [(Path(chain.path), f"seed {SEED}: {chain}") for chain in result.chains]


def test_runs_are_killed_often_enough_and_everywhere(killed: dict[str, Result]) -> None:
    for name, result in killed.items():
        assert result.problems == [], name
    attempts = [a for result in killed.values() for chain in result.chains for a in chain.attempts if a.killed]
    assert len(attempts) >= 60
    files = {attempt.where.split(":")[0] for attempt in attempts}
    assert files >= {"checkpoint.py", "ledger.py", "metrics.py"}, files
    assert len(files) >= 15, files


@pytest.mark.parametrize("name", [k.name for k in LOCKSTEP])
def test_the_final_run_is_bit_for_bit_the_uninterrupted_one(killed: dict[str, Result], name: str) -> None:
    result = killed[name]
    whole = Path(result.whole)
    for run, how in finished(result):
        assert_equal_weights(final_weights(whole), final_weights(run))
        assert timeless_metrics(run) == timeless_metrics(whole), how
        assert train_steps(run) == list(range(1, STEPS + 1)), how
        assert [p.name for p in list_checkpoints(run / "checkpoints")] == [
            p.name for p in list_checkpoints(whole / "checkpoints")
        ], how
        assert all(find_damage(path) is None for path in list_checkpoints(run / "checkpoints")), how
        assert list(run.rglob("*.tmp")) == [], how


@pytest.mark.parametrize("name", [k.name for k in LOCKSTEP])
def test_no_trajectory_is_lost_or_trained_twice(killed: dict[str, Result], name: str) -> None:
    result = killed[name]
    for run, how in finished(result):
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            rows = connection.execute("SELECT group_id, member, state, step FROM trajectories ORDER BY 1, 2").fetchall()
        # lockstep trains in the order of starting: group g is trained by step g // GROUPS + 1
        expected = [(g, m, "trained", g // GROUPS + 1) for g in range(STEPS * GROUPS) for m in range(MEMBERS)]
        assert rows == expected, how
        assert not (run / "ledger.sqlite-wal").exists(), how
        summary, other = read_ledger(run / "ledger.sqlite"), read_ledger(Path(result.whole) / "ledger.sqlite")
        assert summary == other, how
        assert summary.planned == sum(summary.fates.values()) == STEPS * GROUPS * MEMBERS


@pytest.mark.parametrize("name", [k.name for k in LOCKSTEP])
def test_everything_else_that_a_run_records_is_there_once(killed: dict[str, Result], name: str) -> None:
    result = killed[name]
    whole = Path(result.whole)
    for run, how in finished(result):
        assert saved_steps(run).keys() == saved_steps(whole).keys(), how
        for step, path in saved_steps(run).items():
            groups, others = (load_minibatch(p).groups for p in (path, saved_steps(whole)[step]))
            assert [group.id for group in groups] == list(range((step - 1) * GROUPS, step * GROUPS)), how
            for group, other in zip(groups, others, strict=True):
                for one, its in zip(group.trajectories, other.trajectories, strict=True):
                    assert one.response_ids_T.tolist() == its.response_ids_T.tolist(), how
                    assert one.versions_T.tolist() == its.versions_T.tolist(), how
                    assert one.grade == its.grade, how
        assert read_alarms(run) == read_alarms(whole), how
        assert [p.name for p in sorted(run.glob("transcripts/*"))] == [
            p.name for p in sorted(whole.glob("transcripts/*"))
        ]
        for path in run.glob("transcripts/*"):
            assert path.read_text() == (whole / "transcripts" / path.name).read_text(), how
        sessions = json.loads((run / "environment.json").read_text())
        assert sessions[-1]["outcome"] == "finished", how
        # "finished": killed while it wrote the report
        assert all(session.get("outcome", "finished") == "finished" for session in sessions[:-1]), how


def test_the_alarm_of_the_guarded_run_led_to_a_rollback(killed: dict[str, Result]) -> None:
    (alarm,) = read_alarms(Path(killed["rollback"].whole))
    assert (alarm["step"], alarm["action"], alarm["back_to_step"]) == (4, "rollback", 2)


def test_tensorboard_shows_every_step_once(killed: dict[str, Result]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run, how in finished(killed["everything"]):
        events = EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        shown = [(event.step, pytest.approx(event.value)) for event in events.Scalars("train/reward")]
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
        assert [(line["step"], line["reward"]) for line in lines] == shown, how
