"""Sampler processes with the real vLLM: staleness, weights, deaths. Runs in our environment (make test-vllm)."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine_contract import ATOL, plain_logprobs
from family_cases import save_family, save_gemma3_for_images
from rollout_cases import config_with, rollouts_of, take
from vcpo.config import LoraSection, RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.models.lora import add_adapter, save_adapter, trained_parameters
from vcpo.pipeline.supervision import SamplerDied
from vcpo.records import StopReason
from vcpo.vllm_environment import DEFAULT_PYTHON

PYTHON = Path(__file__).parents[2] / DEFAULT_PYTHON
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM's environment (make vllm)"),
]

INIT = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ENGINE = {"name": "vllm", "python": str(PYTHON), "kv_cache_gb": 0.1}

# heads that vLLM's attention on the CPU is made for. Qwen2 is also in the contract and in the runs
FAMILIES: dict[str, dict[str, int]] = {
    "qwen2.5": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{family: {"head_dim": 32} for family in ("qwen3", "llama3.1", "llama3.2", "gemma3", "smollm2")},
}


def vllm_config(**runtime: object) -> RunConfig:
    return config_with(init=INIT, engine=ENGINE, **runtime)


def config_for(path: Path | str, **runtime: object) -> RunConfig:
    """As ``vllm_config``, with a model that has a tokenizer of its own."""
    plain = vllm_config(**runtime).to_plain()
    plain["model"] = {"path": str(path), "device": "cpu"}
    plain["sampling"] |= {"max_prompt_length": 60, "max_completion_length": 24}
    return parse_config(plain)


def save_adapter_of(base: Path, directory: Path) -> None:
    """An adapter that changes much, with a tokenizer that has tokens beyond its base model's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    add_adapter(model, LoraSection(r=3), seed=0)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<{i}>" for i in range(rows - len(tokenizer))])
    directory.mkdir()
    save_adapter(model, directory)
    tokenizer.save_pretrained(directory)


def assert_sampled_from(config: RunConfig) -> None:
    """Versions 0 and 1 of what is trained, with keys and values recomputed: each token is scored by its version's."""
    torch.manual_seed(1)
    assert config.model.path is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(config.model.path).expanduser())
    with rollouts_of(config) as (rollouts, model):
        model: Any = model
        model.set_attn_implementation("eager")
        policies = [copy.deepcopy(model)]
        trajectories = []
        for step in range(6):
            if step == 1:
                with torch.no_grad():
                    for parameter in trained_parameters(model).values():
                        parameter.add_(0.05 * torch.randn(parameter.shape))
                policies.append(copy.deepcopy(model))
            rollouts.publish(step)
            trajectories += [t for group in rollouts.minibatch(step) for t in group.trajectories]
        assert rollouts.metrics()["served_version"] >= 3
        assert rollouts.metrics()["sampler_restarts"] == 0
    assert {bool(version) for t in trajectories for version in t.versions_T} == {False, True}
    for t in trajectories:
        by_policy = np.stack([plain_logprobs(policy, t) for policy in policies])
        expected = by_policy[(t.versions_T > 0).astype(int), np.arange(len(t.versions_T))]
        np.testing.assert_allclose(t.logprobs_T, expected, atol=ATOL)
        assert np.abs(by_policy[1] - by_policy[0]).max() > 1000 * ATOL
        ids = t.response_ids_T[: -1 if t.stop_reason is StopReason.EOS else None]
        assert t.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_from_as_transformers_computes_it(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path, **FAMILIES[family])
    assert_sampled_from(config_for(tmp_path, recompute_kv_cache=True))


def test_an_adapter_is_sampled_from_merged_into_its_base_and_with_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("llama3.2", tmp_path / "base", **FAMILIES["llama3.2"])
    save_adapter_of(tmp_path / "base", tmp_path / "adapter")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_sampled_from(config_for("~/adapter", recompute_kv_cache=True))


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


def failure_of(config: RunConfig) -> BaseException | None:
    with rollouts_of(config) as (rollouts, _):
        rollouts.publish(0)
        with pytest.raises((SamplerDied, UserError, KeyboardInterrupt)):
            rollouts.minibatch(0)
        return rollouts.failure


def test_what_vllm_cannot_do_ends_the_run_with_its_own_words() -> None:
    engine = {**ENGINE, "kv_cache_gb": 1e-6}
    failure = failure_of(config_with(init=INIT, engine=engine, max_restarts=0))
    assert isinstance(failure, SamplerDied)
    assert "No available memory for the cache blocks" in str(failure)
    assert "traceback of the sampler process" in str(failure)


def test_heads_that_vllm_has_no_attention_for_are_refused() -> None:
    failure = failure_of(config_with(init={**INIT, "hidden_size": 16}, engine=ENGINE))
    assert isinstance(failure, UserError)
    assert "on a CPU: its attention heads have 8 numbers, and vLLM's attention there is made for 32, 64" in str(failure)


def test_a_model_for_images_is_refused(tmp_path: Path) -> None:
    save_family("gemma3", tmp_path / "text", **FAMILIES["gemma3"])
    parts = (kind.from_pretrained(tmp_path / "text") for kind in (AutoConfig, AutoTokenizer))
    save_gemma3_for_images(tmp_path / "images", *parts)
    failure = failure_of(config_for(tmp_path / "images"))
    assert isinstance(failure, UserError)
    assert "a model for more than text (gemma3); use sampling.engine=torch" in str(failure)
