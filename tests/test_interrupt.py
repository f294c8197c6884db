"""Signals and sudden deaths, with real processes: what is saved, what is said, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from run_cases import (
    REWARDS,
    gone_within,
    has_steps,
    samplers_of,
    start_vcpo,
    tiny_config,
    tiny_recipe,
    train_steps,
    wait_until,
)
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory

pytestmark = pytest.mark.slow

START = 180.0  # generous: imports on a busy machine
END = 60.0
FAILURE = 5.0  # within which a failure must have ended the run


def finish(process: subprocess.Popen[str], seconds: float = END) -> str:
    """Its output, once it has ended by itself."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {seconds} s:\n{process.communicate()[0]}") from None


def test_ctrl_c_in_lockstep_saves_and_the_resumed_run_finishes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe(tmp_path / "r.yaml", "training.max_steps=100000", "runtime.max_staleness=2")
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(has_steps(run, 3), START, "three steps", process)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"stopped after step {step}; continue with: vcpo train" in said
    assert find_damage(checkpoint) is None
    assert train_steps(run) == list(range(1, step + 1))
    more = tiny_config(run, f"training.max_steps={step + 3}", "runtime.max_staleness=2")
    train(more, mode="resume", make_report=False)
    assert train_steps(run) == list(range(1, step + 4))
    assert (run / "model" / "config.json").is_file()


def test_signals_to_the_whole_process_group_of_a_local_run_save_and_it_can_be_resumed(tmp_path: Path) -> None:
    """SIGINT as a terminal sends it, then SIGTERM as a batch system does to the resumed run."""
    run = tmp_path / "run"
    changes = ("training.max_steps=100000", "runtime=local", "reward.processes=1")
    recipe = tiny_recipe(tmp_path / "r.yaml", *changes)
    saved = 0
    for number, mode in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        process = start_vcpo("train", recipe, *mode, cwd=tmp_path)
        wait_until(has_steps(run, saved + 3), START, "three more steps", process)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        said = finish(process)
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert gone_within(children, FAILURE)
        if saved:
            assert f"resuming at step {saved}" in said
        saved = int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-"))
        assert train_steps(run) == list(range(1, saved + 1))
        assert all(line["lag_max"] <= 4 for line in read_metrics(run / "metrics.jsonl"))


def test_ctrl_c_while_the_samplers_are_starting_saves_too(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "r.yaml", "runtime=local", "runtime.samplers=2")
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(lambda: len(samplers_of(process)) == 2, START, "two samplers", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert gone_within(children, FAILURE)
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000000"]
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "interrupted"


def test_samplers_end_by_themselves_when_the_main_process_is_killed(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "r.yaml", "training.max_steps=100000", "runtime=local", "runtime.samplers=2")
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(has_steps(tmp_path / "run", 2), START, "two steps", process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(samplers_of(process)) == 2
    process.kill()
    process.wait()
    assert gone_within(children, FAILURE)
    # what it leaves behind is a run that a resume starts again
    assert RunDirectory(tmp_path / "run").sessions()[-1].get("outcome") is None


def test_where_none_may_be_replaced_a_killed_sampler_ends_the_run_naming_the_process(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path / "r.yaml",
        "training.max_steps=100000",
        "runtime=local",
        "runtime.samplers=2",
        "runtime.max_restarts=0",
    )
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(has_steps(tmp_path / "run", 2), START, "two steps", process)
    first, second = samplers_of(process)
    os.kill(first.pid, signal.SIGKILL)
    killed = time.monotonic()
    said = finish(process)
    assert time.monotonic() - killed < FAILURE
    assert process.returncode not in (0, 130), said
    assert f"(pid {first.pid}) died with exit code -9 (killed; out of memory?)" in said
    assert gone_within([second], FAILURE)
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "failed"


def test_an_exception_of_a_reward_function_ends_the_run_with_its_own_message(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path / "r.yaml",
        "training.max_steps=100000",
        "runtime=local",
        f"reward.reward_funcs=[{REWARDS}:raises_later]",
    )
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(has_steps(tmp_path / "run", 1), START, "one step", process)
    children = psutil.Process(process.pid).children(recursive=True)
    reached = time.monotonic()  # a few groups later it raises
    said = finish(process)
    assert time.monotonic() - reached < 2 * FAILURE
    assert gone_within(children, FAILURE)
    assert process.returncode not in (0, 130), said
    assert "ZeroDivisionError: the judge has no more paper" in said
    assert "raised by reward function 'raises_later'" in said
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "failed"


def test_ctrl_c_in_a_comparison_lets_every_run_save(tmp_path: Path) -> None:
    """The runs have sessions of their own, so that a terminal's Ctrl-C reaches only the comparison."""
    recipe = tiny_recipe(tmp_path / "r.yaml", "training.max_steps=100000")
    out = tmp_path / "out"
    process = start_vcpo(
        "compare", recipe, "--methods=vcpo,tis", "--seeds=1-2", "--jobs=2", f"--out={out}", cwd=tmp_path
    )

    def started() -> list[Path]:
        return [path.parent for path in out.glob("runs/*/metrics.jsonl") if has_steps(path.parent, 1)()]

    wait_until(lambda: len(started()) == 2, START, "a step of two runs", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert gone_within(children, FAILURE)
    runs = started()
    assert len(runs) == 2  # the others were never started
    for run in runs:
        (checkpoint,) = list_checkpoints(run / "checkpoints")
        assert find_damage(checkpoint) is None
        assert RunDirectory(run).sessions()[-1]["outcome"] == "interrupted"
