"""The local runtime's processes: staleness, failures, and no orphans. Real processes, no learner."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_cases import config_with, rollouts_of, take
from vcpo.pipeline.local import LocalRollouts
from vcpo.pipeline.rollouts import response_seed
from vcpo.pipeline.supervision import SamplerDied
from vcpo.records import Grade, Problem
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.registry import make_task

pytestmark = pytest.mark.slow

SECONDS = 5.0  # within which a failure must reach the user


class FailingTask:
    """The sort task until the given number of groups, then an exception of the user's own grader."""

    def __init__(self, after: int) -> None:
        self._task = make_task("sort", {"digits": 4})
        self._left = after

    def train_problem(self, position: int, seed: int) -> Problem:
        return self._task.train_problem(position, seed)

    def eval_problems(self, count: int) -> list[Problem]:
        return self._task.eval_problems(count)

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("the user's grader divided by zero")
        return self._task.grade(problems, completions)


def go_on(rollouts: LocalRollouts, steps: range) -> None:
    """Publish and take minibatches as a learner that changes nothing."""
    for step in steps:
        rollouts.publish(step)
        rollouts.minibatch(step)


@pytest.mark.parametrize(
    "runtime",
    [
        {"in_flight_updates": True},
        {"in_flight_updates": True, "recompute_kv_cache": True},
        {"in_flight_updates": False},
    ],
    ids=["in-flight", "in-flight-recompute", "drained"],
)
def test_minibatches_are_whole_in_order_and_within_the_staleness_bound(runtime: dict[str, Any]) -> None:
    config = config_with(**runtime, samplers=2)
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        for step in range(12):
            groups = rollouts.minibatch(step)
            assert [g.id for g in groups] == [2 * step, 2 * step + 1]
            for group in groups:
                assert [t.index for t in group.trajectories] == [0, 1]
                for t in group.trajectories:
                    assert t.grade is not None
                    assert step - 2 <= t.start_version <= step
                    assert (t.versions_T >= t.start_version).all()
                    assert (t.versions_T <= step).all()
                    if not config.runtime.in_flight_updates:  # type: ignore[union-attr]
                        assert (t.versions_T == t.start_version).all()
            rollouts.publish(step + 1)


def wait_for_groups(rollouts: LocalRollouts, count: int) -> None:
    """Until so many graded groups are waiting; woken by the collector."""
    with rollouts._changed:
        assert rollouts._changed.wait_for(lambda: len(rollouts._ready) >= count, timeout=30)


def test_what_became_too_old_is_dropped_and_replaced() -> None:
    """Seven minibatches of two are ready before the first step; those still there at version 2 break a bound of 1."""
    config = config_with(max_staleness=1, pacing={"name": "drop_stale", "max_ahead": 6})
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        wait_for_groups(rollouts, 14)
        trained = []
        for step in range(6):
            groups = rollouts.minibatch(step)
            assert len(groups) == 2
            for group in groups:
                trained.append(group.id)
                assert len(group.trajectories) == 2
                assert all(step - 1 <= t.start_version <= step for t in group.trajectories)
            rollouts.publish(step + 1)
            if step == 2:
                # of the first fourteen, four were trained in time
                assert rollouts.metrics()["dropped_groups/stale"] == 10
        metrics = rollouts.metrics()
        progress = rollouts._starter.progress
        assert len(set(trained)) == 12
        assert progress.next_group + len(progress.done) == 12 + metrics["dropped_groups"]


def test_pace_rejects_what_waits_beyond_the_target() -> None:
    pacing = {"name": "pace", "max_ahead": 6, "target_occupancy": 1.0, "smoothing": 1.0}
    config = config_with(max_staleness=4, pacing=pacing)
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        wait_for_groups(rollouts, 14)
        first = rollouts.minibatch(0)
        # all equally stale: twelve over the target go, those started first before the others
        assert rollouts.metrics()["dropped_groups/rejected"] == 12
        assert rollouts.metrics()["reject_rate"] == 12
        assert rollouts.metrics()["waiting_groups"] == 14
        assert sorted(g.id for g in first) == [12, 13]
        rollouts.publish(1)
        # responses that cross versions are scored by the learner's model
        for step in range(1, 6):
            groups = rollouts.minibatch(step)
            assert all(step - 4 <= t.start_version <= step for g in groups for t in g.trajectories)
            rollouts.publish(step + 1)


def test_a_low_effective_sample_size_makes_new_groups_start_later() -> None:
    config = config_with(max_staleness=4, target_ess=0.5)
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        wait_for_groups(rollouts, 10)
        for step in range(8):
            groups = rollouts.minibatch(step)
            rollouts.observe({"ess": 0.1 if step == 0 else 0.9})
            rollouts.publish(step + 1)
            # five minibatches had started at version 0; the limit of 2 lets the sixth start at version 3
            lags = {step - t.start_version for group in groups for t in group.trajectories}
            if step <= 4:
                assert lags == {step}
            else:
                assert max(lags) <= 3
            assert rollouts.metrics()["staleness_limit"] == (2 if step < 5 else 3)


def test_samplers_use_the_weights_that_were_published() -> None:
    """The recorded log-probs are those of the published weights, which differ from the ones the sampler loaded."""
    with rollouts_of(config_with(max_staleness=0)) as (rollouts, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all logits equal: every token has probability 1 / vocabulary
        rollouts.publish(0)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        for group in rollouts.minibatch(0):
            for t in group.trajectories:
                assert t.logprobs_T == pytest.approx(-torch.tensor(float(vocabulary)).log().item(), abs=1e-6)


class Deadly:
    """A prompt that ends the process that receives it."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (3,)


class DeadlyFourthPrompt(PromptSource):
    def next(self) -> Any:
        problem, prompt_ids, next_position = super().next()
        return problem, Deadly() if next_position == 4 else prompt_ids, next_position


def test_every_version_is_proven_by_its_checksum() -> None:
    with rollouts_of(config_with(max_staleness=0)) as (rollouts, _):
        for step in range(3):
            take(rollouts, range(step, step + 1))
            assert rollouts.metrics()["served_version"] == step


def test_weights_that_were_not_swapped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with rollouts_of(config_with(max_restarts=0)) as (rollouts, _):
        monkeypatch.setattr("vcpo.pipeline.shared_weights._combined", lambda sums: 1)
        rollouts.publish(0)
        with pytest.raises((SamplerDied, KeyboardInterrupt)):
            rollouts.minibatch(0)
        assert "the engine's weights are not those of version 0: checksums differ" in str(rollouts.failure)


@pytest.mark.parametrize("samplers", [1, 2])
def test_a_killed_sampler_is_replaced_and_nothing_is_lost(samplers: int) -> None:
    notes: list[str] = []
    with rollouts_of(config_with(samplers=samplers), notes=notes) as (rollouts, _):
        trained = take(rollouts, range(2))
        pid = rollouts._samplers[0].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        trained += take(rollouts, range(2, 20))
        with rollouts._changed:
            assert rollouts._changed.wait_for(lambda: rollouts.metrics()["sampler_restarts"] == 1, timeout=30)
        assert trained == list(range(40))
        assert rollouts.metrics()["failed_groups"] == 0
    assert f"sampler 0 (pid {pid}) died with exit code -9 (killed; out of memory?); it was started again" in notes[0]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
def test_a_sampler_that_hangs_is_killed_and_replaced() -> None:
    notes: list[str] = []
    with rollouts_of(config_with(hang_timeout=1.0, max_restarts=50), notes=notes) as (rollouts, _):
        trained = take(rollouts, range(1))
        pid = rollouts._samplers[0].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        trained += take(rollouts, range(1, 10))
        assert trained == list(range(20))
    assert f"sampler 0 (pid {pid}) hung: it made no decoding step for 1 s (runtime.hang_timeout)" in notes[0]


def test_a_prompt_that_kills_its_sampler_is_isolated_after_three_tries_and_replaced() -> None:
    notes: list[str] = []
    with rollouts_of(config_with(), notes=notes, prompts=DeadlyFourthPrompt) as (rollouts, _):
        trained = take(rollouts, range(6))
        assert trained == [0, 1, 2, *range(4, 13)]
        metrics = rollouts.metrics()
        assert (metrics["failed_groups"], metrics["sampler_restarts"]) == (1, 3)
        fates = rollouts._starter.fates.take()
        assert fates[3].state == "failed"
        assert fates[3].reason is not None
        assert fates[3].reason.startswith("its sampler died with it 3 times, the last time alone: sampler 0 (pid")
        assert rollouts._starter.progress.next_group == 13
    assert any(note.startswith("group 3 was given up") for note in notes)


def test_a_sampler_that_always_dies_ends_the_run_with_its_own_error() -> None:
    """NaN weights make the engine refuse to sample; its exception must come back, not a hang."""
    notes: list[str] = []
    with rollouts_of(config_with(max_restarts=1), notes=notes) as (rollouts, model):
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        rollouts.publish(0)
        with pytest.raises((SamplerDied, KeyboardInterrupt)):
            rollouts.minibatch(0)
        assert isinstance(rollouts.failure, SamplerDied)
        assert "RuntimeError: the model's logits are not finite" in str(rollouts.failure)
        assert "sampler 0 (pid" in str(rollouts.failure)
    assert len(notes) == 1  # of the first death
    assert "RuntimeError: the model's logits are not finite" in notes[0]


def test_an_exception_in_a_grader_is_raised_as_it_is() -> None:
    with rollouts_of(config_with(), FailingTask(after=2)) as (rollouts, _):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            go_on(rollouts, range(5))
        assert isinstance(rollouts.failure, ZeroDivisionError)
        assert str(rollouts.failure) == "the user's grader divided by zero"


def test_response_seeds_differ_between_members_groups_and_runs() -> None:
    seeds = {response_seed(s, g, i) for s in range(3) for g in range(50) for i in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_engine_that_talks_nonsense_is_ended_and_named(tmp_path: Path) -> None:
    """It runs under another interpreter, which is a script here."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\nos.write(int(sys.argv[3]), b'\\0\\0\\0\\4junk')\n")
    python.chmod(0o755)
    config = config_with(engine={"name": "vllm", "python": str(python)}, max_restarts=1)
    notes: list[str] = []
    with rollouts_of(config, notes=notes) as (rollouts, _):
        rollouts.publish(0)
        with pytest.raises((SamplerDied, KeyboardInterrupt)):
            rollouts.minibatch(0)
        assert "sent what is no message, and was killed" in str(rollouts.failure)
    assert len(notes) == 1


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals")
def test_a_sampler_that_is_still_loading_ends_with_the_learner(tmp_path: Path) -> None:
    """The connection closes in the middle of what would take minutes."""
    program = (
        "import time; from vcpo.pipeline import sampler_process as s; s._open_engine = lambda *_: time.sleep(600)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\n{program}s.main(*map(int, sys.argv[3:6]))\n")
    python.chmod(0o755)
    config = config_with(engine={"name": "vllm", "python": str(python)})
    with rollouts_of(config) as (rollouts, _):
        sampler = rollouts._samplers[0]
        socket.socket(fileno=os.dup(sampler.pipe.fileno())).shutdown(socket.SHUT_RDWR)
        assert sampler.process.wait(60) == 0
