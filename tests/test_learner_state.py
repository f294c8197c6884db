"""Schedules, optimizer state, coarse dtypes, and the numbers that a step reports."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from learner_cases import make_groups, make_model
from test_learner import distance, training, updated
from vcpo.learner.learner import Learner
from vcpo.learner.schedule import scheduled_learning_rate
from vcpo.methods.spec import METHODS
from vcpo.records import Grade, StopReason

VCPO = METHODS["vcpo"]


def rates(**options: object) -> list[float]:
    section = training(learning_rate=1.0, max_steps=6, **options)
    return [scheduled_learning_rate(section, version) for version in range(6)]


def test_learning_rate_schedules_by_hand() -> None:
    assert rates() == [1.0] * 6
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(lr_scheduler_type="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = [0.5, 1.0, 1.0, *(0.5 * (1 + math.cos(math.pi * x)) for x in (0.25, 0.5, 0.75))]
    assert rates(lr_scheduler_type="cosine", warmup_steps=2) == pytest.approx(cosine)
    assert rates(warmup_steps=12)[-1] == 0.5
    assert scheduled_learning_rate(training(lr_scheduler_type="linear", max_steps=3), 9) == 0.0


def test_step_uses_the_schedule_times_the_scale_for_this_step_only() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=1.0)
    learner = Learner(model, VCPO, training(warmup_steps=4), 1.0)
    for expected in (0.25, 0.5, 0.75):
        metrics = learner.step(groups).metrics
        assert 0 < metrics["step_scale"] < 1
        assert metrics["learning_rate"] == pytest.approx(expected * 1e-3 * metrics["step_scale"])
        assert [g["lr"] for g in learner.optimizer.adamw.param_groups] == [metrics["learning_rate"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_continues_exactly(dtype: torch.dtype) -> None:
    model = make_model("qwen2", dtype=dtype)
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=0.3)
    learner = Learner(model, VCPO, training(warmup_steps=5), 1.0)
    learner.step(groups)
    groups[0].trajectories[0].logprobs_T[0] = np.nan
    assert learner.step(groups).skipped
    groups[0].trajectories[0].logprobs_T[0] = -1.0
    numbers, tensors = learner.state()
    numbers = json.loads(json.dumps(numbers))
    tensors = load(save({name: t.contiguous() for name, t in tensors.items()}))

    copied = copy.deepcopy(model)
    resumed = Learner(copied, VCPO, training(warmup_steps=5), 1.0)
    resumed.load_state(numbers, tensors)
    assert resumed.version == 2
    for _ in range(2):
        assert learner.step(groups).metrics == resumed.step(groups).metrics
        assert distance(model, copied) == 0.0
    assert numbers["consecutive_skips"] == 1


def test_state_of_a_learner_that_has_not_stepped() -> None:
    model = make_model("gpt2")
    numbers, tensors = Learner(model, VCPO, training(), 1.0).state()
    learner = Learner(copy.deepcopy(model), VCPO, training(), 1.0)
    learner.load_state(numbers, tensors)
    assert learner.version == 0


@pytest.mark.parametrize("name", ["vcpo", "tis"])
def test_updates_smaller_than_bfloat16_can_hold_are_not_lost(name: str) -> None:
    model = make_model("qwen2", dtype=torch.bfloat16)
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=0.3)
    start = copy.deepcopy(model).float()
    options = {"learning_rate": 1e-4, "weight_decay": 0.0, "adam_epsilon": 1e-8, "max_tokens_per_microbatch": 20}
    learner = Learner(model, METHODS[name], training(**options), 1.0)
    for _ in range(8):
        learner.step(groups)
    _, tensors = learner.state()
    for (key, parameter), original in zip(model.named_parameters(), start.parameters(), strict=True):
        master = tensors[f"{key}.master"]
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), parameter)
        moved = original.detach().abs() > 0.1  # there, one update of 1e-4 is below bfloat16's resolution
        assert (master - original)[moved].abs().max() > 3e-4


def test_bfloat16_microbatches_sum_in_float32() -> None:
    model = make_model("qwen2", dtype=torch.bfloat16)
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=0.3)
    whole, one = updated(model, groups, VCPO)
    cut, many = updated(model, groups, VCPO, max_tokens_per_microbatch=1)
    assert many.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=0.02)
    assert distance(whole, cut) < 0.02


def test_frozen_parameters_stay() -> None:
    model = make_model("gpt2", tied=False)
    model.transformer.wte.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=0.3)
    for name in ("vcpo", "tis"):
        Learner(model, METHODS[name], training(), 1.0).step(groups)
    assert torch.equal(model.transformer.wte.weight, before.transformer.wte.weight)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_metrics_by_hand() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0], [2, 2, None]], drift=0.5)
    first, second = groups
    first.trajectories[0].start_version, first.trajectories[0].versions_T[:] = 3, 4
    first.trajectories[1].start_version, first.trajectories[1].versions_T[:] = 1, 2
    for trajectory in second.trajectories:
        trajectory.start_version, trajectory.versions_T[:] = 5, 5
    second.trajectories[2].stop_reason = StopReason.LENGTH
    second.trajectories[0].grade = Grade(2.0, correct=False, parts={"format": 0.5})
    learner = Learner(model, VCPO, training(), 1.0)
    learner.version = 5
    result = learner.step(groups)
    metrics = result.metrics
    assert metrics["reward"] == pytest.approx(5 / 4)
    assert metrics["reward_std"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["zero_std_groups"] == 0.5
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    assert metrics["unscored"] == 1
    assert metrics["reward_parts/format"] == 0.5
    assert metrics["length_limited_share"] == pytest.approx(1 / 5)
    trajectories = [t for g in groups for t in g.trajectories]
    assert metrics["response_length"] == pytest.approx(sum(len(t.response_ids_T) for t in trajectories) / 5)
    assert metrics["packed_tokens"] == sum(len(t.prompt_ids) + len(t.response_ids_T) for t in trajectories)
    trained = [int(t.mask_T.sum()) for t in trajectories]
    assert metrics["tokens"] == sum(trained[:4])
    assert metrics["staleness_mean"] == pytest.approx((trained[0] * 1 + trained[1] * 3) / sum(trained))
    assert metrics["staleness_max"] == 3
    assert (metrics["lag_mean"], metrics["lag_max"]) == (pytest.approx(6 / 5), 4)
    ratios = result.log_ratios_B[:4]
    assert metrics["log_ratio_mean"] == pytest.approx(sum(ratios) / 4)
    assert (metrics["log_ratio_min"], metrics["log_ratio_max"]) == pytest.approx((min(ratios), max(ratios)))
    assert metrics["kl"] == pytest.approx(-sum(ratios) / sum(trained[:4]))
    assert result.weights_B == pytest.approx([min(math.exp(x), 8.0) for x in result.log_ratios_B])
    assert result.squared_norms_B is not None
    assert [math.isnan(n) for n in result.squared_norms_B] == [False, False, True, True, True]
    assert metrics["norm_max"] == pytest.approx(math.sqrt(max(result.squared_norms_B[:2])))
    weights = [math.exp(2 * x) * n for x, n in zip(ratios, result.squared_norms_B[:2], strict=False)]
    baseline = weights[0] / sum(weights)
    assert metrics["baseline_mean"] == pytest.approx(baseline)
    assert result.advantages_B == pytest.approx([(1 - baseline) / 0.5, -baseline / 0.5, 0, 0, 0])
    assert learner.version == 6


def test_token_level_reports_shares_and_weights_of_tokens() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0]], drift=2.0, given=False)
    _, result = updated(model, groups, METHODS["tis_token"])
    assert 0 < result.metrics["truncated_share"] < 1
    tokens = sum(len(t.response_ids_T) for t in groups[0].trajectories)
    assert (result.metrics["truncated_share"] * tokens) % 1 == pytest.approx(0.0, abs=1e-9)
    assert result.squared_norms_B is None
    assert max(result.weights_B) <= 8.0
