"""What alarms do to a run: every action, in lockstep runs with rules that no run can obey."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from run_cases import (
    InterruptAfter,
    assert_equal_weights,
    final_weights,
    timeless_metrics,
    tiny_config,
    tiny_recipe,
    train_steps,
)
from vcpo.cli import app
from vcpo.config import RunConfig
from vcpo.errors import StoppedByWatchdog
from vcpo.observe.alarms import read_alarms
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.compare import plan
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory


def guarded(path: Path, action: str, *changes: str, first: int = 3, cooldown: int = 50) -> RunConfig:
    """A tiny run whose ESS rule raises an alarm at step ``first``; the other rules are off."""
    rules = [f"watchdog.{m}=null" for m in ("max_weight_share", "kl", "grad_norm", "entropy", "reward")]
    return tiny_config(
        path,
        "watchdog.enabled=true",
        f"watchdog.action={action}",
        f"watchdog.ess={{below: 2.0, count: {first}, window: {first}, cooldown: {cooldown}}}",
        "watchdog.response_length=null",
        *rules,
        "runtime.max_staleness=3",
        "training.max_steps=9",
        "checkpoint.save_steps=50",
        *changes,
    )


def of_steps(run: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


def stopped_after(config: RunConfig, step: int, mode: Any = "new") -> Path:
    """Interrupted while the step is logged; what the run then holds can be looked at."""
    with pytest.raises(KeyboardInterrupt):
        train(config, mode=mode, make_report=False, progress=InterruptAfter(step))
    return Path(config.output_dir)


def test_a_warning_changes_nothing_but_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(guarded(tmp_path / "run", "warn"), make_report=False)
    assert of_steps(run, "alarm") == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    (alarm,) = read_alarms(run)
    assert (alarm["step"], alarm["metric"], alarm["action"], alarm["bound"]) == (3, "ess", "warn", 2.0)
    # step 3 trains groups 4 and 5, of which three responses are named with their shares
    assert len(alarm["trajectories"]) == 3
    assert {culprit["group"] for culprit in alarm["trajectories"]} <= {4, 5}
    shares = [culprit["value"] for culprit in alarm["trajectories"]]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(of_steps(run, "max_weight_share")[2])
    said = " ".join(capsys.readouterr().out.split())
    assert "watchdog, step 3: ess was below 2 in 3 of the last 3 steps" in said
    assert alarm["trajectories"][0]["trajectory"] in said
    plain = train(guarded(tmp_path / "plain", "warn", "watchdog.enabled=false"), make_report=False)
    assert_equal_weights(final_weights(run), final_weights(plain))
    assert "alarm" not in read_metrics(plain / "metrics.jsonl")[0]
    assert not (plain / "alarms.jsonl").exists()


def test_damping_lowers_the_learning_rate_for_so_many_steps(tmp_path: Path) -> None:
    config = guarded(tmp_path / "run", "damp", "watchdog.damp_factor=0.25", "watchdog.damp_steps=4", "method=tis")
    run = train(config, make_report=False)
    assert of_steps(run, "learning_rate") == pytest.approx([1e-2] * 3 + [2.5e-3] * 4 + [1e-2] * 2)


def test_draining_trains_on_fresh_responses_for_so_many_steps(tmp_path: Path) -> None:
    run = train(guarded(tmp_path / "run", "drain", "watchdog.drain_steps=2"), make_report=False)
    assert of_steps(run, "lag_max") == [0, 1, 2, 0, 0, 3, 3, 3, 3]


def test_a_rollback_restores_weights_and_optimizer_bit_for_bit(tmp_path: Path) -> None:
    changes = ("checkpoint.save_steps=1", "watchdog.rollback.healthy_after=1")
    run = stopped_after(guarded(tmp_path / "run", "rollback", *changes, first=4), 4)
    # an alarm at 4 speaks against the checkpoint of 3, which is removed; that of 2 had a quiet step after it
    good, restored = run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000004"
    assert sorted((run / "checkpoints").iterdir()) == [good, restored]
    weights = [load_file(path / "model" / "model.safetensors") for path in (good, restored)]
    assert_equal_weights(*weights)
    states = [load_file(path / "state.safetensors") for path in (good, restored)]
    learners = [{k: v for k, v in state.items() if k.startswith("learner.")} for state in states]
    assert_equal_weights(*learners)
    # the restored weights have the number of the step that they take the place of, and nothing else is sampled from
    assert {key.split("/")[0] for key in states[1] if key.startswith("snapshots.")} == {"snapshots.4"}
    assert json.loads((restored / "state.json").read_text())["learner"]["version"] == 4
    assert read_alarms(run)[0]["back_to_step"] == 2


def test_after_a_rollback_versions_rise_and_no_trajectory_is_trained_twice_or_stale(tmp_path: Path) -> None:
    changes = ("checkpoint.save_steps=2", "logging.trajectory_steps=1", "watchdog.rollback.healthy_after=1")
    run = train(guarded(tmp_path / "run", "rollback", *changes, first=5), make_report=False)
    assert train_steps(run) == list(range(1, 10))
    assert of_steps(run, "lag_max") == [0, 1, 2, 3, 3, 0, 1, 2, 3]
    trained = []
    for step, path in saved_steps(run).items():
        for group in load_minibatch(path).groups:
            trained.append(group.id)
            for trajectory in group.trajectories:
                assert step <= 5 or trajectory.start_version >= 5
                assert trajectory.start_version < step
    assert trained == list(range(18))
    # what follows is a function of the restored weights: the update of step 6 is not made from those of step 5
    assert read_alarms(run)[0]["back_to_step"] == 2


def test_without_an_older_checkpoint_it_goes_back_to_the_start(tmp_path: Path) -> None:
    changes = ("warm_start.steps=2", "warm_start.batch_size=4")
    run = stopped_after(guarded(tmp_path / "run", "rollback", *changes), 3)
    start, restored = sorted((run / "checkpoints").iterdir())
    assert (start.name, restored.name) == ("step-000000", "step-000003")
    assert_equal_weights(*(load_file(path / "model" / "model.safetensors") for path in (start, restored)))


def test_a_rollback_can_switch_the_method_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    changes = ("method=tis", "watchdog.rollback.method=vcpo", "checkpoint.save_steps=2")
    whole = train(guarded(tmp_path / "whole", "rollback", *changes), make_report=False)
    lines = [line for line in read_metrics(whole / "metrics.jsonl") if line["kind"] == "train"]
    assert ["norm_max" in line for line in lines] == [False] * 3 + [True] * 6
    config = guarded(tmp_path / "parts", "rollback", *changes)
    stopped_after(config, 2)
    stopped_after(config, 3, "resume")
    stopped_after(config, 5, "resume")
    parts = train(config, mode="resume", make_report=False)
    assert timeless_metrics(parts) == timeless_metrics(whole)
    assert read_alarms(parts) == read_alarms(whole)
    assert_equal_weights(final_weights(parts), final_weights(whole))


def test_the_window_and_the_cool_down_continue_after_an_interruption(tmp_path: Path) -> None:
    changes = ("watchdog.damp_steps=3", "training.max_steps=12")
    whole = train(guarded(tmp_path / "whole", "damp", *changes, first=3, cooldown=4), make_report=False)
    assert of_steps(whole, "alarm") == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    for step in (2, 4, 8):
        config = guarded(tmp_path / str(step), "damp", *changes, first=3, cooldown=4)
        stopped_after(config, step)
        parts = train(config, mode="resume", make_report=False)
        assert timeless_metrics(parts) == timeless_metrics(whole)


def test_a_stop_saves_says_why_and_can_be_resumed_under_other_orders(tmp_path: Path) -> None:
    config = guarded(tmp_path / "run", "stop")
    with pytest.raises(StoppedByWatchdog, match=r"the watchdog stopped the run at step 3: ess was below 2"):
        train(config, make_report=False)
    directory = RunDirectory(tmp_path / "run")
    session = directory.sessions()[-1]
    assert (session["outcome"], session["step"]) == ("stopped", 3)
    assert session["reason"].startswith("the watchdog stopped the run at step 3")
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step-000003"]
    assert not directory.final_model.exists()
    run = train(guarded(tmp_path / "run", "warn"), mode="resume", make_report=False)
    assert train_steps(run) == list(range(1, 10))
    assert directory.is_finished


def test_after_the_last_rollback_an_alarm_warns_or_stops_the_run(tmp_path: Path) -> None:
    most = "watchdog.rollback.max_rollbacks=2"
    warned = train(guarded(tmp_path / "warned", "rollback", most, first=2, cooldown=0), make_report=False)
    assert [line["action"] for line in read_alarms(warned)] == ["rollback", "rollback", "warn", "warn"]
    config = guarded(tmp_path / "run", "rollback", most, "watchdog.rollback.then=stop", first=2, cooldown=0)
    with pytest.raises(StoppedByWatchdog, match="at step 6 after 2 rollbacks: ess was below 2"):
        train(config, make_report=False)
    actions = [(line["step"], line["action"], line["back_to_step"]) for line in read_alarms(tmp_path / "run")]
    # the second time it goes back to the checkpoint that the first rollback wrote, which holds the same weights
    assert actions == [(2, "rollback", 0), (4, "rollback", 2), (6, "stop", None)]


def test_the_command_line_ends_with_code_3(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path / "recipe.yaml",
        "watchdog={enabled: true, action: stop, ess: {below: 2.0, count: 1, window: 1}}",
    )
    result = CliRunner().invoke(app, ["train", str(recipe)])
    assert result.exit_code == 3
    assert "the watchdog stopped the run at step 1: ess was below 2" in result.output


def test_a_watchdog_that_is_off_leaves_the_directories_of_comparisons_as_they_were(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "recipe.yaml")
    names = [
        plan(recipe, ["vcpo"], [1], overrides, tmp_path)[0].directory.name
        for overrides in ({}, {"watchdog.action": "stop"}, {"watchdog.enabled": True})
    ]
    assert [a == b for a, b in itertools.pairwise(names)] == [True, False]


@pytest.mark.slow
def test_in_the_local_runtime_a_rollback_samples_the_same_prompts_again(tmp_path: Path) -> None:
    changes = ("runtime=local", "runtime.max_staleness=2", "logging.trajectory_steps=1", "training.max_steps=8")
    run = train(guarded(tmp_path / "run", "rollback", *changes), make_report=False)
    trained = []
    for step, path in saved_steps(run).items():
        for group in load_minibatch(path).groups:
            trained.append(group.id)
            assert all(step <= 3 or t.start_version >= 3 for t in group.trajectories)
            assert all(step - 1 - t.start_version <= 2 for t in group.trajectories)
    assert trained == list(range(16))
    assert of_steps(run, "lag_max")[3] == 0


@pytest.mark.slow
def test_in_the_local_runtime_a_drain_trains_what_is_in_flight_and_then_fresh_responses(tmp_path: Path) -> None:
    changes = ("runtime=local", "runtime.max_staleness=2", "watchdog.drain_steps=2", "training.max_steps=8")
    run = train(guarded(tmp_path / "run", "drain", *changes), make_report=False)
    # steps 4 and 5 were started before the alarm at 3; steps 6 and 7 start when nothing else is in flight
    assert of_steps(run, "lag_max")[5:7] == [0, 0]
    assert [line.get("staleness_limit") for line in read_metrics(run / "metrics.jsonl")][2:7] == [0, 0, 0, 0, None]
