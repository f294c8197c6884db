"""Asynchronous VCPO runs with the real vLLM, end to end. Runs in our environment (make test-vllm)."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from family_cases import save_family
from run_cases import gone_within, has_steps, samplers_of, start_vcpo, tiny_config, tiny_recipe, train_steps, wait_until
from vcpo.config import ModelSection
from vcpo.models.loading import load_model
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.run import train
from vcpo.vllm_environment import DEFAULT_PYTHON

PYTHON = Path(__file__).parents[2] / DEFAULT_PYTHON
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM's environment (make vllm)"),
]

START = 300.0
ENGINE = f"sampling.engine={{name: vllm, python: {PYTHON}, kv_cache_gb: 0.1}}"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the disk, with tied embeddings and heads that vLLM has a kernel for."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    init = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model, tokenizer = load_model(ModelSection.model_validate({"init": init}), seed=1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def overrides(model: Path, *more: str) -> list[str]:
    return [f"model={{path: {model}}}", ENGINE, "runtime={name: local, max_staleness: 2}", *more]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_asynchronous_run_learns_from_what_vllm_sampled(tmp_path: Path, saved_model: Path, dtype: str) -> None:
    model = f"model={{path: {saved_model}, dtype: {dtype}}}"
    config = tiny_config(tmp_path / "run", *overrides(saved_model, model, "training.max_steps=12"))
    train(config, make_report=False)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert max(line["lag_max"] for line in lines) <= 2
    assert all(line["sampler_restarts"] == 0 and line["failed_groups"] == 0 for line in lines)
    assert all(0 < line["ess"] <= 1 for line in lines)
    assert lines[-1]["served_version"] >= 9


def test_without_lag_the_learner_agrees_with_vllm_about_every_token(tmp_path: Path, saved_model: Path) -> None:
    """Seven updates, and at each the learner's log-probabilities of what was sampled with the same weights."""
    runtime = "runtime={name: local, max_staleness: 0}"
    config = tiny_config(tmp_path / "run", *overrides(saved_model, runtime, "training.max_steps=7"))
    train(config, make_report=False)
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if line["kind"] == "train":
            assert line["lag_max"] == 0
            assert abs(line["log_ratio_min"]) < 1e-4
            assert abs(line["log_ratio_max"]) < 1e-4
            assert line["ess"] == pytest.approx(1, abs=1e-6)


def test_adapters_are_trained_on_what_vllm_sampled_with_them_merged_in(tmp_path: Path) -> None:
    """Without lag, so that the learner, which has adapters, and vLLM, which has none, have to agree at every step."""
    base, run = tmp_path / "base", tmp_path / "run"
    save_family("gemma3", base, head_dim=32)
    lengths = ["sampling.max_prompt_length=60", "training.max_steps=6", "training.learning_rate=0.02"]
    runtime = "runtime={name: local, max_staleness: 0}"
    train(tiny_config(run, *overrides(base, f"model={{path: {base}, lora: {{r: 4}}}}", runtime, *lengths)))
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 7))
    for version, line in enumerate(lines):
        assert line["served_version"] == version
        assert line["lag_max"] == 0
        assert abs(line["log_ratio_min"]) < 1e-4
        assert abs(line["log_ratio_max"]) < 1e-4
        assert line["ess"] == pytest.approx(1, abs=1e-6)
    before, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (base, run / "model"))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "adapter")
    with torch.no_grad():
        old, new, expected = (m(input_ids=torch.arange(40)[None]).logits for m in (before, merged, adapted))
    assert (new - old).abs().max() > 0.1, "what was agreed on has not changed"
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-5)


def test_responses_of_several_turns(tmp_path: Path, saved_model: Path) -> None:
    task = "task={name: sort_hints, digits: 3}"
    lengths = ["sampling.max_completion_length=40", "sampling.max_prompt_length=8", "reward.reward_funcs=[]"]
    config = tiny_config(tmp_path / "run", *overrides(saved_model, task, *lengths, "training.max_steps=3"))
    train(config, make_report=False)
    assert train_steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize("steps", [0, 2], ids=["while it loads", "while it decodes"])
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path, saved_model: Path, steps: int) -> None:
    recipe = tiny_recipe(tmp_path / "r.yaml", *overrides(saved_model, "training.max_steps=100000"))
    process = start_vcpo("train", recipe, cwd=tmp_path)
    wait_until(lambda: bool(samplers_of(process)), START, "a sampler", process)
    if steps:
        wait_until(has_steps(tmp_path / "run", steps), START, "steps", process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert gone_within(children, 5.0)
