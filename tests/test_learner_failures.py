"""Numbers that must not reach the weights: NaN, infinity, nothing to train on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner_cases import make_groups, make_model, slow_update
from test_learner import distance, training, updated
from vcpo.learner.learner import Learner
from vcpo.methods.spec import METHODS
from vcpo.methods.weights import Truncate
from vcpo.records import Group

ALL = list(METHODS)
VCPO = METHODS["vcpo"]


def poisoned(groups: list[Group], group: int, index: int, value: float) -> list[Group]:
    groups = copy.deepcopy(groups)
    groups[group].trajectories[index].logprobs_T[-1] = value
    return groups


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("max_tokens", [20, 10_000])
def test_nan_log_ratio_skips_the_step_and_names_the_trajectory(name: str, max_tokens: int) -> None:
    model = make_model("gpt2")
    groups = poisoned(make_groups(model, [[1, 0, 1], [0, 1]]), 1, 1, math.nan)
    after, result = updated(model, groups, METHODS[name], max_tokens_per_microbatch=max_tokens)
    assert result.skipped == "the log-ratio of group 8 response 1 is NaN"
    assert distance(model, after) == 0.0
    assert result.metrics["skipped"] == 1.0
    assert result.metrics["learning_rate"] == result.metrics["step_scale"] == 0.0
    assert math.isnan(result.metrics["ess"])
    assert len(result.log_ratios_B) == 5


def test_nan_in_a_group_that_does_not_contribute_skips_too() -> None:
    model = make_model("gpt2")
    groups = poisoned(make_groups(model, [[1, 0, 1], [1, 1]]), 1, 0, math.nan)
    after, result = updated(model, groups, VCPO)
    assert result.skipped == "the log-ratio of group 8 response 0 is NaN"
    assert distance(model, after) == 0.0


def test_nan_of_an_unscored_trajectory_does_not_matter() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1, None]])
    expected, _ = updated(model, groups, VCPO)
    after, result = updated(model, poisoned(groups, 1, 2, math.nan), VCPO)
    assert result.skipped is None
    assert distance(expected, after) < 1e-12


def test_given_tokens_with_any_logprob_do_not_matter() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    expected, _ = updated(model, groups, VCPO)
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.logprobs_T[~trajectory.mask_T] = [math.nan, -math.inf][: int((~trajectory.mask_T).sum())]
    after, result = updated(model, groups, VCPO)
    assert result.skipped is None
    assert distance(expected, after) == 0.0


@pytest.mark.parametrize("name", ["vcpo", "tis", "tis_token"])
def test_infinite_ratio_gives_the_cap_and_the_smallest_ess(name: str) -> None:
    """Like a ratio that is large but finite, as far as the update is concerned."""
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    infinite = poisoned(groups, 0, 1, -math.inf)
    after, result = updated(model, infinite, METHODS[name])
    large, expected = updated(model, poisoned(groups, 0, 1, -300.0), METHODS[name])
    assert result.skipped is None
    assert result.metrics["ess"] == expected.metrics["ess"] == pytest.approx(1 / 5)
    assert result.metrics["max_weight_share"] == 1.0
    assert result.metrics["log_ratio_max"] == math.inf
    assert distance(after, large) < 1e-9
    if name != "tis_token":
        assert result.weights_B[1] == 8.0
    if name == "vcpo":
        assert result.metrics["step_scale"] == pytest.approx(math.sqrt(1 / 5))


def test_ratio_of_zero_contributes_nothing() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    after, result = updated(model, poisoned(groups, 0, 1, math.inf), VCPO)
    tiny, _ = updated(model, poisoned(groups, 0, 1, 300.0), VCPO)
    assert result.skipped is None
    assert result.weights_B[1] == 0.0
    assert distance(after, tiny) < 1e-12


def test_no_weight_at_all_skips_the_step() -> None:
    model = make_model("gpt2")
    groups = poisoned(poisoned(make_groups(model, [[1, 0]]), 0, 0, math.inf), 0, 1, math.inf)
    after, result = updated(model, groups, VCPO)
    assert result.skipped == "the effective sample size is undefined: every importance ratio is 0"
    assert distance(model, after) == 0.0


def test_infinite_weight_without_a_cap_skips_the_step() -> None:
    model = make_model("gpt2")
    groups = poisoned(make_groups(model, [[1, 0, 1], [0, 1]]), 0, 2, -1000.0)
    after, result = updated(model, groups, replace(METHODS["tis"], weight=Truncate(None)))
    assert result.skipped == (
        "the importance weight of group 7 response 2 is not finite (method.weight does not bound it)"
    )
    assert distance(model, after) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["vcpo", "grpo"])
def test_reward_that_is_no_finite_number_skips_the_step(value: float, name: str) -> None:
    model = make_model("gpt2")
    after, result = updated(model, make_groups(model, [[1, 0, value], [0, 1]]), METHODS[name])
    assert result.skipped == "the reward of group 7 response 2 is not a finite number"
    assert distance(model, after) == 0.0


@pytest.mark.parametrize("name", ALL)
def test_minibatch_without_a_scored_trajectory_is_skipped(name: str) -> None:
    model = make_model("gpt2")
    after, result = updated(model, make_groups(model, [[None, None], [None]]), METHODS[name])
    assert result.skipped == "no trajectory has both a reward and a trained token"
    assert distance(model, after) == 0.0
    assert result.metrics["unscored"] == 3.0
    assert "ess" not in result.metrics


def break_backward(model: Any, token: int) -> None:
    """Make the gradient, not the forward pass, NaN wherever a token stands."""
    where = {}

    def remember(module: Any, inputs: Any, output: torch.Tensor) -> None:
        where["rows"] = inputs[0][..., None] == token

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            rows = where["rows"]
            output.register_hook(lambda g: g.masked_fill(rows, torch.nan))

    model.transformer.wte.register_forward_hook(remember)
    model.transformer.h[0].register_forward_hook(spoil)


@pytest.mark.parametrize("max_tokens", [30, 10_000])
@pytest.mark.parametrize("name", ["vcpo", "tis"])
def test_gradient_that_is_not_finite_skips_the_step_and_names_the_trajectory(name: str, max_tokens: int) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    victim = groups[0].trajectories[2]
    victim.prompt_ids[0] = 0  # a token that occurs nowhere else
    before = copy.deepcopy(model)
    learner = Learner(model, METHODS[name], training(max_tokens_per_microbatch=max_tokens), 1.0)
    break_backward(model, token=0)
    result = learner.step(groups)
    assert result.skipped == "the gradient of group 7 response 2 is not finite"
    assert distance(model, before) == 0.0


def test_a_step_after_a_skipped_one_is_as_if_it_had_not_been() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    expected, _ = updated(model, groups, VCPO)
    learner = Learner(model, VCPO, training(max_tokens_per_microbatch=20), 1.0)
    assert learner.step(poisoned(groups, 1, 1, math.nan)).skipped
    assert learner.step(groups).skipped is None
    assert learner.version == 2
    assert distance(model, expected) < 1e-12


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]])
    bad = poisoned(groups, 0, 0, math.nan)
    learner = Learner(model, VCPO, training(max_skipped_steps=2), 1.0)
    step: Callable[[list[Group]], Any] = learner.step
    step(bad), step(bad), step(groups), step(bad), step(bad)
    with pytest.raises(RuntimeError, match="3 steps in a row were skipped; the last one: the log-ratio of group 7"):
        step(bad)


def test_uniform_drift_is_invisible_to_ess_and_shown_beside_it() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=0.0, given=False)
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.logprobs_T -= np.float32(2.0 / len(trajectory.logprobs_T))
    _, result = updated(model, groups, VCPO)
    assert result.metrics["ess"] == pytest.approx(1.0, abs=1e-9)
    assert result.metrics["log_ratio_mean"] == pytest.approx(2.0, abs=1e-5)
    assert result.metrics["kl_k3"] > 0.01
    _, ess = slow_update(model, groups, VCPO)
    assert ess == pytest.approx(1.0, abs=1e-9)
