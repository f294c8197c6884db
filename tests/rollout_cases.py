"""Sampler processes without a learner, for tests of what they hand in and of how they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from run_cases import children_running
from vcpo.config import RunConfig, parse_config
from vcpo.models.loading import end_token_ids, load_model
from vcpo.pipeline.grading import Grader, InProcessGrading
from vcpo.pipeline.local import LocalRollouts
from vcpo.pipeline.rollouts import GroupStarter
from vcpo.records import SamplingParams
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.registry import make_task

_SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}


def config_with(
    *, init: Mapping[str, int] = _SMALL, engine: str | Mapping[str, Any] = "torch", **runtime: Any
) -> RunConfig:
    """Two answers of up to six tokens to each of two prompts per step. init: sizes of the model."""
    return parse_config(
        {
            "model": {"init": dict(init)},
            "task": {"name": "sort", "digits": 4},
            "sampling": {
                "num_generations": 2,
                "max_prompt_length": 5,
                "max_completion_length": 6,
                "slots": 4,
                "engine": engine,
            },
            "training": {"prompts_per_step": 2, "max_steps": 50},
            "runtime": {"name": "local", "max_staleness": 2, **runtime},
        }
    )


@contextmanager
def rollouts_of(
    config: RunConfig, task: Any = None, notes: list[str] | None = None, prompts: type[PromptSource] = PromptSource
) -> Iterator[tuple[LocalRollouts, torch.nn.Module]]:
    task = task or make_task("sort", {"digits": 4})
    model, tokenizer = load_model(config.model, config.seed)
    sampling = config.sampling
    params = SamplingParams(max_tokens=sampling.max_completion_length, stop_token_ids=end_token_ids(model, tokenizer))
    source = prompts(task, tokenizer, config.seed, sampling.max_prompt_length, "skip")
    grading = InProcessGrading(Grader(task, None))
    said = [] if notes is None else notes
    rollouts = LocalRollouts(config, model, params, GroupStarter(source), grading, note=said.append)
    try:
        yield rollouts, model
    finally:
        rollouts.close()
        assert children_running("sampler_process") == []


def take(rollouts: LocalRollouts, steps: range) -> list[int]:
    """Publish and take minibatches as a learner that changes nothing; the groups in the order of training."""
    trained = []
    for step in steps:
        rollouts.publish(step)
        for group in rollouts.minibatch(step):
            assert [t.index for t in group.trajectories] == [0, 1]
            assert all(step - 2 <= t.start_version <= step for t in group.trajectories)
            trained.append(group.id)
    return trained
