"""Gradient alignment control over consecutive steps, by hand with plain AdamW."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from learner_cases import make_groups, make_model
from test_learner import distance, training
from vcpo.learner.learner import Learner
from vcpo.methods.gradient_control import LimitAlignment
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.records import Grade, Group

LOW, HIGH = 0.1, 0.9
GAC = replace(METHODS["gac"], gradient_control=LimitAlignment(LOW, HIGH))
FIRST = [[1, 0, 1, 0], [0, 1, 1]]
SECOND = [[1, 0, 1, 0], [1, 1, 0]]  # shares a group with the first
OPPOSITE = [[0, 1, 0, 1], [0, 0, 1]]


def graded(model: Any, rewards: list[list[float]]) -> list[Group]:
    groups = make_groups(model, [[0.0] * len(group) for group in rewards])
    for group, values in zip(groups, rewards, strict=True):
        for trajectory, reward in zip(group.trajectories, values, strict=True):
            trajectory.grade = Grade(reward)
    return groups


def raw_gradient(learner: Learner, groups: list[Group]) -> list[Tensor]:
    gradient = learner.examine(groups).gradient
    return [gradient[name] for name, _ in learner.model.named_parameters()]


def dot(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def cosine(a: list[Tensor], b: list[Tensor]) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def start(spec: MethodSpec = GAC, **options: Any) -> tuple[Learner, Any, torch.optim.AdamW]:
    """A learner, and a copy of its model with an optimizer of its own."""
    model = make_model("gpt2")
    slow = copy.deepcopy(model)
    learner = Learner(model, spec, training(max_skipped_steps=0, **options), 1.0)
    return learner, slow, torch.optim.AdamW(slow.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4)


def slow_step(model: Any, optimizer: torch.optim.AdamW, gradient: list[Tensor]) -> None:
    for parameter, g in zip(model.parameters(), gradient, strict=True):
        parameter.grad = g.clone()
    optimizer.step()


def test_parallel_part_is_limited_between_the_thresholds_and_left_alone_below() -> None:
    learner, slow, optimizer = start()
    model = learner.model
    first, second, opposite = (graded(model, rewards) for rewards in (FIRST, SECOND, OPPOSITE))

    before = raw_gradient(learner, first)
    result = learner.step(first)
    assert "gradient_cosine" not in result.metrics
    slow_step(slow, optimizer, before)
    assert distance(model, slow) < 1e-12

    g = raw_gradient(learner, second)
    c = cosine(g, before)
    assert LOW < c < HIGH
    parallel = [dot(g, before) / dot(before, before) * p for p in before]
    across = [x - p for x, p in zip(g, parallel, strict=True)]
    slow_step(slow, optimizer, [x + LOW / c * p for x, p in zip(across, parallel, strict=True)])
    result = learner.step(second)
    assert result.skipped is None
    assert result.metrics["gradient_cosine"] == pytest.approx(c, rel=1e-9)
    assert distance(model, slow) < 1e-12

    # compared with the second gradient as it was before it was changed; a negative cosine changes nothing
    third = raw_gradient(learner, opposite)
    assert cosine(third, g) < 0
    slow_step(slow, optimizer, third)
    result = learner.step(opposite)
    assert result.metrics["gradient_cosine"] == pytest.approx(cosine(third, g), rel=1e-9)
    assert distance(model, slow) < 1e-12


def test_gradient_that_repeats_the_previous_one_is_skipped_and_is_no_failure() -> None:
    learner, _, _ = start()
    groups = graded(learner.model, FIRST)
    learner.step(groups)
    weights = copy.deepcopy(learner.model)
    _, tensors = learner.state()
    moments = {name: t.clone() for name, t in tensors.items() if "exp_avg" in name}
    for number in (2, 3, 4):
        result = learner.step(groups)
        assert result.skipped is not None
        assert result.skipped.startswith("the gradient repeats the previous one (cosine ")
        assert result.metrics["skipped"] == 1
        assert result.metrics["learning_rate"] == result.metrics["step_scale"] == 0
        assert result.metrics["gradient_cosine"] >= HIGH
        assert learner.version == number
    assert distance(learner.model, weights) == 0
    assert all(tensors[name].equal(moment) for name, moment in moments.items())
    assert learner.step(graded(learner.model, OPPOSITE)).skipped is None


def test_previous_gradient_is_part_of_the_saved_state() -> None:
    learner, _, _ = start()
    first, second = graded(learner.model, FIRST), graded(learner.model, SECOND)
    learner.step(first)
    numbers, tensors = learner.state()
    numbers = json.loads(json.dumps(numbers))
    tensors = load(save({name: t.contiguous() for name, t in tensors.items()}))
    resumed = Learner(copy.deepcopy(learner.model), GAC, training(max_skipped_steps=0), 1.0)
    resumed.load_state(numbers, tensors)
    for groups in (second, second, first):
        assert learner.step(groups) == resumed.step(groups)
        assert distance(learner.model, resumed.model) == 0


def test_skips_by_control_do_not_count_among_failures_nor_end_their_row() -> None:
    learner, _, _ = start(max_grad_norm=1e9)
    good = graded(learner.model, FIRST)
    bad = copy.deepcopy(good)
    bad[0].trajectories[1].logprobs_T[0] = np.nan
    tolerant = Learner(copy.deepcopy(learner.model), GAC, training(max_skipped_steps=1), 1.0)
    tolerant.step(good)
    tolerant.step(bad)
    assert "repeats" in str(tolerant.step(good).skipped)
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        tolerant.step(bad)


def test_cosine_is_measured_without_a_control_unless_switched_off() -> None:
    spec = METHODS["grpo"]
    learner, _, _ = start(spec)
    first, second = graded(learner.model, FIRST), graded(learner.model, SECOND)
    before = raw_gradient(learner, first)
    learner.step(first)
    c = cosine(raw_gradient(learner, second), before)
    quiet, _, _ = start(spec, gradient_cosine=False)
    quiet.step(first)
    assert learner.step(second).metrics["gradient_cosine"] == pytest.approx(c, rel=1e-9)
    assert "gradient_cosine" not in quiet.step(second).metrics
    assert distance(learner.model, quiet.model) == 0


@pytest.mark.parametrize(
    ("cosine_now", "factor"),
    [(-1.0, 1.0), (0.0, 1.0), (0.2, 1.0), (0.4, 0.5), (0.79, 0.2 / 0.79), (0.8, None), (1.0, None)],
)
def test_zones_of_the_control_by_hand(cosine_now: float, factor: float | None) -> None:
    assert LimitAlignment(0.2, 0.8).parallel_factor(cosine_now) == pytest.approx(factor)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.6, 0.5), (0.5, 1.5), (math.nan, 0.5)])
def test_impossible_thresholds_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < low <= high <= 1"):
        LimitAlignment(low, high)
