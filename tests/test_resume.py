"""An interrupted and resumed run is the run that was never interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from run_cases import (
    InterruptAfter,
    assert_equal_weights,
    final_weights,
    timeless_metrics,
    tiny_config,
    train_steps,
)
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory


def interrupt(config: RunConfig, step: int, number: signal.Signals = signal.SIGINT) -> None:
    """Run until Ctrl-C comes while the given step is logged."""
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(step, number))


@pytest.mark.parametrize(
    ("method", "lag", "k"),
    [("vcpo", "fixed", 0), ("vcpo", "fixed", 3), ("vcpo", "mixed", 3), ("vcpo", "in_flight", 3), ("tis", "fixed", 3)],
)
def test_lockstep_continues_bit_for_bit(tmp_path: Path, method: str, lag: str, k: int) -> None:
    changes = (
        f"runtime.lag={lag}",
        f"runtime.max_staleness={k}",
        f"method={method}",
        "training.warmup_steps=5",
        "training.lr_scheduler_type=cosine",
        "training.max_steps=8",
        "eval.eval_steps=3",
        "eval.num_problems=4",
        "warm_start.steps=3",
        "warm_start.batch_size=4",
    )
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "halves", *changes)
    interrupt(config, 2)
    interrupt_again = InterruptAfter(5)  # a second interruption, with the ring in the middle of its history
    with pytest.raises(KeyboardInterrupt):
        train(config, mode="resume", make_report=False, progress=interrupt_again)
    halves = train(config, mode="resume", make_report=False)
    assert_equal_weights(final_weights(whole), final_weights(halves))
    assert timeless_metrics(whole) == timeless_metrics(halves)


def test_metrics_after_the_checkpoint_are_done_again_and_not_doubled(tmp_path: Path) -> None:
    """A killed run has metrics that its last checkpoint does not know."""
    changes = ("checkpoint.save_steps=2", "runtime.max_staleness=2", "eval.eval_steps=1", "eval.num_problems=4")
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "killed", *changes)
    interrupt(config, 5)
    newest = sorted((tmp_path / "killed" / "checkpoints").iterdir())[-1]
    assert newest.name == "step-000005"
    newest.rename(tmp_path / "lost")
    killed = train(config, mode="resume", make_report=False)
    assert train_steps(killed) == [1, 2, 3, 4, 5, 6]
    assert timeless_metrics(whole) == timeless_metrics(killed)


def test_the_data_position_and_the_counts_of_long_prompts_continue(tmp_path: Path) -> None:
    rows = [{"prompt": "12=" if i % 3 else "123456=", "answer": "12"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for policy in ("skip", "truncate"):
        changes = ("task=dataset", f"task.path={tmp_path}/rows.jsonl", f"sampling.long_prompts={policy}")
        whole = train(tiny_config(tmp_path / policy / "whole", *changes), make_report=False)
        config = tiny_config(tmp_path / policy / "halves", *changes)
        interrupt(config, 3)
        halves = train(config, mode="resume", make_report=False)
        assert timeless_metrics(whole) == timeless_metrics(halves)
        counted = [
            line[f"prompts_{'skipped' if policy == 'skip' else 'truncated'}"] for line in timeless_metrics(whole)
        ]
        assert counted == sorted(counted)
        assert counted[-1] > 0


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("checkpoint.save_steps=2", "runtime.max_staleness=1")
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "run", *changes)
    interrupt(config, 4)
    weights = tmp_path / "run" / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    capsys.readouterr()
    train(config, mode="resume", make_report=False)
    said = capsys.readouterr().out
    assert "step-000004' is damaged (model/model.safetensors does not match its checksum)" in said
    assert "resuming at step 2" in said
    assert_equal_weights(final_weights(whole), final_weights(tmp_path / "run"))
    assert timeless_metrics(whole) == timeless_metrics(tmp_path / "run")


def test_without_an_intact_checkpoint_it_starts_over_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("eval.eval_steps=3", "eval.num_problems=4", "logging.tensorboard=true")
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "run", *changes)
    interrupt(config, 2)
    (tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json").unlink()
    train(config, mode="resume", make_report=False)
    assert "no intact checkpoint: starting from the beginning" in capsys.readouterr().out
    assert timeless_metrics(whole) == timeless_metrics(tmp_path / "run")


def test_a_finished_run_says_so_and_gets_its_model_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path / "run")
    run = train(config, make_report=False)
    before, lines = final_weights(run), (run / "metrics.jsonl").read_text()
    (run / "model" / "model.safetensors").unlink()
    capsys.readouterr()
    train(config, mode="resume")
    assert "the run is finished (step 6)" in capsys.readouterr().out
    assert_equal_weights(before, final_weights(run))
    assert (run / "metrics.jsonl").read_text() == lines
    assert (run / "report.html").is_file()


def test_a_finished_run_can_go_on_to_more_steps_where_the_schedule_allows(tmp_path: Path) -> None:
    whole = train(tiny_config(tmp_path / "whole", "training.max_steps=8"), make_report=False)
    train(tiny_config(tmp_path / "run"), make_report=False)
    run = train(tiny_config(tmp_path / "run", "training.max_steps=8"), mode="resume", make_report=False)
    assert_equal_weights(final_weights(whole), final_weights(run))
    scheduled = "training.lr_scheduler_type=linear"
    train(tiny_config(tmp_path / "linear", scheduled), make_report=False)
    longer = tiny_config(tmp_path / "linear", scheduled, "training.max_steps=8")
    with pytest.raises(UserError, match=r"training\.max_steps was 6 and is now 8"):
        train(longer, mode="resume", make_report=False)


def test_an_interruption_is_recorded_and_its_checkpoint_is_of_the_finished_step(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    interrupt(config, 4, signal.SIGTERM)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]
    session = RunDirectory(tmp_path / "run").sessions()[-1]
    assert (session["outcome"], session["step"]) == ("interrupted", 4)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_local_continues_within_the_bound_with_every_step_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "runtime=local", "runtime.max_staleness=2", "training.max_steps=12")
    interrupt(config, 5)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000005"]
    numbers = json.loads((tmp_path / "run" / "checkpoints" / "step-000005" / "state.json").read_text())
    assert numbers["position"] == 10  # two prompts per step: those in flight are sampled again
    before = load_file(tmp_path / "run" / "checkpoints" / "step-000005" / "state.safetensors")
    run = train(config, mode="resume", make_report=False)
    assert train_steps(run) == list(range(1, 13))
    lines = read_metrics(run / "metrics.jsonl")
    assert all(line["lag_max"] <= 2 for line in lines)
    assert lines[5]["lag_max"] == 0  # step 6: what it trains on was sampled from the weights of the checkpoint
    after = load_file(run / "checkpoints" / "step-000012" / "state.safetensors")
    assert before.keys() == after.keys()
