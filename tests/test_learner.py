"""Whole updates against one computed trajectory by trajectory (``learner_cases.slow_update``)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from learner_cases import FAMILIES, make_groups, make_model, slow_logprobs, slow_update
from vcpo.config import TrainingSection
from vcpo.errors import UserError
from vcpo.gradnorm import recorder
from vcpo.learner import gradient
from vcpo.learner.learner import Learner, StepResult
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.methods.weights import Truncate
from vcpo.records import Group

VCPO = METHODS["vcpo"]
# equal rewards, a trajectory that could not be scored, and rewards that are no mere 0 and 1
REWARDS: list[list[float | None]] = [[1, 0, 0, 1], [0.5, 0.5, 0.5], [0, 1, None, 2.0], [1, 0], [3.0]]


def training(**options: Any) -> TrainingSection:
    return TrainingSection.model_validate(
        {"learning_rate": 1e-3, "max_grad_norm": 1e9, "adam_epsilon": 1e-4, **options}
    )


def updated(
    model: Any, groups: Sequence[Group], spec: MethodSpec, temperature: float = 1.0, **options: Any
) -> tuple[Any, StepResult]:
    """A copy of the model after one step, and the step's result."""
    model = copy.deepcopy(model)
    return model, Learner(model, spec, training(**options), temperature).step(groups)


def distance(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def assert_update_matches(
    model: Any, groups: Sequence[Group], spec: MethodSpec, temperature: float = 1.0, tolerance: float = 1e-11
) -> StepResult:
    gradient, ess = slow_update(model, groups, spec, temperature)
    ours, result = updated(model, groups, spec, temperature)
    assert result.skipped is None
    assert result.metrics["ess"] == pytest.approx(ess, rel=10 * tolerance)
    share = min(1.0, ess / spec.ess_on_policy)
    scale = {"constant": 1.0, "sqrt_ess": math.sqrt(share), "linear_ess": share}[spec.step_size]
    assert result.metrics["step_scale"] == pytest.approx(scale, rel=10 * tolerance)
    assert result.metrics["learning_rate"] == pytest.approx(1e-3 * scale, rel=10 * tolerance)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=10 * tolerance)

    slow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow.parameters(), lr=1e-3 * scale, weight_decay=0.1, eps=1e-4)
    for parameter, g in zip(slow.parameters(), gradient, strict=True):
        parameter.grad = -g
    optimizer.step()
    assert distance(model, slow) > 1e-5
    assert distance(ours, slow) < tolerance
    return result


SIMPLE = ["vcpo", "tis", "tis_token", "tis_geometric", "grpo", "rloo", "reinforce"]


@pytest.mark.parametrize("name", SIMPLE)
def test_update_of_each_method_equals_the_slow_one(name: str) -> None:
    model = make_model("gpt2")
    assert_update_matches(model, make_groups(model, REWARDS, drift=1.0), METHODS[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_update_of_each_model_family_equals_the_slow_one(family: str) -> None:
    # transformers computes RMSNorm in float32 whatever the model's dtype
    model = make_model(family)
    assert_update_matches(model, make_groups(model, REWARDS, drift=1.0), VCPO, tolerance=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "applied": {"opob_weighting": "applied"},
    "reference": {"opob_weighting": "reference"},
    "shared baseline": {"opob_scope": "minibatch"},
    "shared baseline, applied": {"opob_scope": "minibatch", "opob_weighting": "applied"},
    "shared baseline, no scale": {"opob_scope": "minibatch", "scale_rewards": "none"},
    "no scale": {"scale_rewards": "none"},
    "token mean": {"loss_aggregation": "token_mean"},
    "trajectory sum": {"loss_aggregation": "trajectory_sum"},
    "geometric": {"ratio_level": "geometric", "weight": Truncate(1.1)},
    "token ratios": {"ratio_level": "token", "weight": Truncate(2.0)},
    "token ratios, applied": {"ratio_level": "token", "weight": Truncate(2.0), "opob_weighting": "applied"},
    "no ratio": {"ratio_level": "none"},
    "no cap": {"weight": Truncate(None)},
    "low cap": {"weight": Truncate(0.5)},
    "linear step": {"step_size": "linear_ess", "ess_on_policy": 0.6},
    "constant step": {"step_size": "constant"},
    "group mean": {"baseline": "group_mean"},
    "leave one out": {"baseline": "leave_one_out"},
    "no baseline": {"baseline": "none"},
}


@pytest.mark.parametrize("mode", ["gram", "single"])
@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
@pytest.mark.parametrize("most_waiting", [1, 2**24])
def test_update_does_not_depend_on_how_norms_are_made(
    mode: str, max_tokens: int, most_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    expected, result = updated(model, groups, VCPO)
    monkeypatch.setattr(gradient, "WAITING_ELEMENTS", most_waiting)
    monkeypatch.setattr(recorder, "SMALL_ELEMENTS", 300)
    ours, other = updated(model, groups, VCPO, max_tokens_per_microbatch=max_tokens, gradient_norm_mode=mode)
    assert distance(expected, ours) < 1e-12
    assert result.squared_norms_B == pytest.approx(other.squared_norms_B, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("parts", VARIANTS.values(), ids=VARIANTS.keys())
def test_update_of_each_variant_equals_the_slow_one(parts: dict[str, Any]) -> None:
    model = make_model("gpt2", tied=False)
    assert_update_matches(model, make_groups(model, REWARDS, drift=1.0), replace(VCPO, **parts))


@pytest.mark.parametrize("name", ["vcpo", "tis_token"])
def test_temperature_is_applied_to_the_learners_logprobs(name: str) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=0.0, temperature=0.6)
    result = assert_update_matches(model, groups, METHODS[name], temperature=0.6, tolerance=1e-10)
    assert result.metrics["ess"] == pytest.approx(1.0, abs=1e-9)
    assert result.metrics["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ["vcpo", "tis", "tis_token"])
@pytest.mark.parametrize("max_tokens", [1, 15, 40])
def test_update_does_not_depend_on_the_microbatches(name: str, max_tokens: int) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    whole, expected = updated(model, groups, METHODS[name])
    cut, result = updated(model, groups, METHODS[name], max_tokens_per_microbatch=max_tokens)
    assert distance(whole, cut) < 1e-12
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)
    assert result.advantages_B == pytest.approx(expected.advantages_B, rel=1e-9)


@pytest.mark.parametrize("max_tokens", [1, 30])
def test_shared_baseline_waits_for_every_microbatch(max_tokens: int) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    spec = replace(VCPO, opob_scope="minibatch", scale_rewards="none")
    whole, _ = updated(model, groups, spec)
    cut, _ = updated(model, groups, spec, max_tokens_per_microbatch=max_tokens)
    assert distance(whole, cut) < 1e-12


@given(st.permutations(range(5)), st.randoms())
@settings(max_examples=5, deadline=None)
def test_update_does_not_depend_on_the_order_of_groups_and_members(order: list[int], random) -> None:  # type: ignore[no-untyped-def]
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    expected, _ = updated(model, groups, VCPO)
    moved = [groups[i] for i in order]
    for group in moved:
        random.shuffle(group.trajectories)
    result, _ = updated(model, moved, VCPO, max_tokens_per_microbatch=25)
    assert distance(expected, result) < 1e-12


@given(st.floats(0.01, 100), st.floats(-10, 10))
@settings(max_examples=5, deadline=None)
def test_scaled_and_shifted_rewards_give_the_same_update(scale: float, shift: float) -> None:
    model = make_model("gpt2")
    rewards = [[1, 0, 0.25], [0, 3]]
    moved = [[scale * r + shift for r in group] for group in rewards]
    expected, _ = updated(model, make_groups(model, rewards, drift=1.0), VCPO)
    result, _ = updated(model, make_groups(model, moved, drift=1.0), VCPO)
    assert distance(expected, result) < 1e-9


@pytest.mark.parametrize("name", ["vcpo", "tis", "tis_token", "grpo", "rloo"])
def test_equal_rewards_give_exactly_zero_gradient(name: str) -> None:
    model = make_model("gpt2")
    noisy = 7 * 0.1
    assert noisy != 0.7
    groups = make_groups(model, [[0.7, noisy, 0.7], [0, 0], [1, 1, 1]], drift=1.0)
    after, result = updated(model, groups, METHODS[name], weight_decay=0.0)
    assert result.metrics["grad_norm"] == 0.0
    assert result.skipped is None
    assert distance(model, after) == 0.0
    assert 0 < result.metrics["ess"] < 1


def test_trajectories_of_equal_rewards_count_in_ess_and_in_the_average() -> None:
    model = make_model("gpt2")
    rewards: list[list[float | None]] = [[1, 0], [1, 1, 1, 1]]
    groups = make_groups(model, rewards, drift=1.0, given=False)
    result = assert_update_matches(model, groups, VCPO)
    _, alone = updated(model, groups[:1], VCPO)
    assert alone.metrics["ess"] != pytest.approx(result.metrics["ess"])
    assert result.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"] * 2 / 6, rel=1e-9)


def test_unscored_trajectories_change_nothing() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1, None], [None, None], [0, 1]], drift=1.0)
    pruned = [
        Group(g.id, g.problem, g.next_position, [t for t in g.trajectories if t.grade.reward is not None])  # type: ignore[union-attr]
        for g in groups
    ]
    with_them, result = updated(model, groups, VCPO)
    without, expected = updated(model, pruned, VCPO)
    assert distance(with_them, without) < 1e-12
    assert result.metrics["unscored"] == 3
    for key in ("ess", "reward", "grad_norm", "kl", "tokens", "baseline_mean", "entropy"):
        assert result.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-9)
    assert len(result.log_ratios_B) == 8


def test_responses_without_a_trained_token_change_nothing() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 1], [0, 1]], drift=1.0)
    expected, _ = updated(model, groups, VCPO)
    spare = copy.deepcopy(groups[0].trajectories[0])
    spare.mask_T[:] = False
    empty = replace(
        spare,
        response_ids_T=np.zeros(0, np.int64),
        mask_T=np.zeros(0, bool),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=np.zeros(0, np.int64),
    )
    groups[0].trajectories += [spare, empty]
    after, result = updated(model, groups, VCPO)
    assert distance(expected, after) < 1e-12
    assert result.metrics["untrained"] == 2
    assert result.log_ratios_B[3:5] == [0.0, 0.0]


def test_one_trajectory_is_enough_for_a_method_without_baseline() -> None:
    model = make_model("gpt2")
    assert_update_matches(model, make_groups(model, [[1.0]]), METHODS["reinforce"])


@pytest.mark.parametrize("parts", [{}, {"ratio_level": "token"}, {"opob_scope": "minibatch"}])
def test_one_at_a_time_fallback_gives_the_same_update(parts: dict[str, Any]) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    spec = replace(VCPO, **parts)
    expected, _ = updated(model, groups, spec)
    # computes the same, but in a forward of its own that no rule can know
    layer = model.transformer.h[0].mlp.c_proj
    layer.__class__ = type("Renamed", (type(layer),), {"forward": lambda self, x: type(self).__base__.forward(self, x)})
    with pytest.raises(UserError, match=r"layer of type Renamed"):
        Learner(model, spec, training(), 1.0)
    learner = Learner(model, spec, training(max_tokens_per_microbatch=30, gradient_norm_fallback=True), 1.0)
    result = learner.step(groups)
    assert distance(expected, model) < 1e-12
    assert result.squared_norms_B is not None


def test_gradient_checkpointing_gives_the_same_update() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    expected, _ = updated(model, groups, VCPO)
    recomputing = copy.deepcopy(model)
    recomputing.activation_checkpointing_enable({"use_reentrant": False})
    calls: list[bool] = []
    recomputing.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    Learner(recomputing, VCPO, training(), 1.0).step(groups)
    assert distance(expected, recomputing) < 1e-12
    assert calls.count(True) == 2  # one packed pass, in which each layer is computed twice


def test_rows_are_not_kept_for_a_group_that_is_spread_or_a_model_that_recomputes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("gpt2")
    groups = make_groups(model, [[1, 0, 0, 1]], drift=1.0)
    asked: list[bool] = []
    measure = recorder.gram_squared_norms
    monkeypatch.setattr(recorder, "gram_squared_norms", lambda *use: asked.append(True) or measure(*use))
    updated(model, groups, VCPO, gradient_norm_mode="gram")
    assert asked
    asked.clear()
    updated(model, groups, VCPO, gradient_norm_mode="gram", max_tokens_per_microbatch=15)
    model.activation_checkpointing_enable({"use_reentrant": False})
    updated(model, groups, VCPO, gradient_norm_mode="gram")
    assert not asked


def test_dropout_is_off_with_and_without_gradient_checkpointing() -> None:
    model = make_model("gpt2")
    assert model.config.resid_pdrop > 0
    for recompute in (False, True):
        copied = copy.deepcopy(model).train()
        if recompute:
            copied.activation_checkpointing_enable({"use_reentrant": False})
        Learner(copied, METHODS["tis"], training(), 1.0)
        assert not any(m.training for m in copied.modules() if isinstance(m, nn.Dropout))


def test_token_metrics_are_means_over_the_trained_tokens() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    scored = [t for g in groups for t in g.trajectories if t.grade is not None and t.grade.reward is not None]
    log_ratios = np.concatenate(
        [
            (slow_logprobs(model, t.prompt_ids, t.response_ids_T).detach().numpy() - t.logprobs_T)[t.mask_T]
            for t in scored
        ]
    )
    cap = 1.2
    spec = replace(METHODS["tis_token"], weight=Truncate(cap))
    _, result = updated(model, groups, spec, max_tokens_per_microbatch=30)
    expected = {
        "kl": -log_ratios.mean(),
        "kl_k3": (np.exp(log_ratios) - 1 - log_ratios).mean(),
        "truncated_share": (np.exp(log_ratios) > cap).mean(),
    }
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["truncated_share"] < 1


def test_gradient_is_clipped_after_it_is_measured() -> None:
    model = make_model("gpt2")
    groups = make_groups(model, REWARDS, drift=1.0)
    gradient, _ = slow_update(model, groups, METHODS["tis"])
    after, result = updated(model, groups, METHODS["tis"], max_grad_norm=0.01)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    assert result.metrics["grad_norm"] == pytest.approx(norm)
    assert result.metrics["grad_clipped"] == 1.0
    slow = copy.deepcopy(model)
    for parameter, g in zip(slow.parameters(), gradient, strict=True):
        parameter.grad = -g * 0.01 / norm
    torch.optim.AdamW(slow.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4).step()
    assert distance(after, slow) < 1e-8


def test_steps_are_repeatable_bit_for_bit() -> None:
    model = make_model("qwen2", dtype=torch.float32)
    groups = make_groups(model, REWARDS, drift=1.0)
    first, one = updated(model, groups, VCPO, max_tokens_per_microbatch=30)
    second, two = updated(model, groups, VCPO, max_tokens_per_microbatch=30)
    assert distance(first, second) == 0.0
    assert one.metrics == two.metrics
