"""Sampler processes with the real vLLM: staleness, weights, deaths. Runs in our environment (make test-vllm)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from rollout_cases import config_with, rollouts_of, take
from vcpo.config import RunConfig
from vcpo.pipeline.supervision import SamplerDied
from vcpo.vllm_environment import DEFAULT_PYTHON

PYTHON = Path(__file__).parents[2] / DEFAULT_PYTHON
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM's environment (make vllm)"),
]

INIT = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ENGINE = {"name": "vllm", "python": str(PYTHON), "kv_cache_gb": 0.1}


def vllm_config(**runtime: object) -> RunConfig:
    return config_with(init=INIT, engine=ENGINE, **runtime)


def test_weights_are_swapped_in_flight_within_the_bound_and_proven_by_checksum() -> None:
    with rollouts_of(vllm_config()) as (rollouts, model):
        assert take(rollouts, range(6)) == list(range(12))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all logits equal: every token has probability 1 / vocabulary
        rollouts.publish(6)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        uniform = -torch.tensor(float(vocabulary)).log().item()
        last = []
        for step in range(6, 12):
            for t in (t for group in rollouts.minibatch(step) for t in group.trajectories):
                new = t.versions_T >= 6
                assert t.logprobs_T[new] == pytest.approx(uniform, abs=1e-6)
                last.append(int(t.versions_T[-1]))
            rollouts.publish(step + 1)
        assert max(last) >= 6
        assert rollouts.metrics()["served_version"] >= 6
        assert rollouts.metrics()["sampler_restarts"] == 0


def test_a_killed_sampler_is_replaced_and_nothing_is_lost() -> None:
    notes: list[str] = []
    with rollouts_of(vllm_config(), notes=notes) as (rollouts, _):
        trained = take(rollouts, range(2))
        pid = rollouts._samplers[0].process.pid
        os.kill(pid, signal.SIGKILL)
        trained += take(rollouts, range(2, 12))
        assert trained == list(range(24))
        assert rollouts.metrics()["sampler_restarts"] == 1
    assert f"sampler 0 (pid {pid}) died with exit code -9 (killed; out of memory?); it was started again" in notes[0]


def test_a_sampler_that_hangs_is_killed_and_replaced() -> None:
    notes: list[str] = []
    with rollouts_of(vllm_config(hang_timeout=20.0), notes=notes) as (rollouts, _):
        trained = take(rollouts, range(1))
        pid = rollouts._samplers[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        trained += take(rollouts, range(1, 10))
        assert trained == list(range(20))
    assert f"sampler 0 (pid {pid}) hung: it made no decoding step for" in notes[0]


def test_one_that_does_not_become_ready_in_time_is_ended_with_the_reason() -> None:
    with rollouts_of(vllm_config(start_timeout=1.0, max_restarts=0)) as (rollouts, _):
        rollouts.publish(0)
        with pytest.raises((SamplerDied, KeyboardInterrupt)):
            rollouts.minibatch(0)
        assert "(runtime.start_timeout), and was killed" in str(rollouts.failure)


def test_what_vllm_cannot_do_ends_the_run_with_its_own_words() -> None:
    """Its attention on the CPU has no kernel for heads of eight numbers."""
    config = config_with(init={**INIT, "hidden_size": 16}, engine=ENGINE, max_restarts=0)
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        with pytest.raises((SamplerDied, KeyboardInterrupt)):
            rollouts.minibatch(0)
        assert isinstance(rollouts.failure, SamplerDied)
        assert "head" in str(rollouts.failure)
        assert "traceback of the sampler process" in str(rollouts.failure)
