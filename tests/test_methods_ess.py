from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.methods.ess import effective_sample_size, largest_weight_share
from vcpo.methods.step_size import step_scale
from vcpo.methods.weights import Truncate

COLLAPSING = [400.0, 50.0, 9.0, 6.0, 4.0, 3.0, 3.0, 3.0]

weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=30)
log_ratios = st.lists(st.floats(-700, 700), min_size=1, max_size=30)


def ess_of(values: list[float]) -> float:
    return float(effective_sample_size(torch.tensor(values, dtype=torch.float64).log()))


@given(weights)
@settings(deadline=None)
def test_ess_equals_its_definition_in_exact_fractions(values: list[int]) -> None:
    exact = Fraction(sum(values) ** 2, len(values) * sum(v * v for v in values))
    assert ess_of([float(v) for v in values]) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("log_weight", [-1000.0, -16.0, 0.0, 3.3, 1000.0])
@pytest.mark.parametrize("count", [1, 7, 512])
def test_equal_weights_give_exactly_one_whatever_their_size(log_weight: float, count: int) -> None:
    assert float(effective_sample_size(torch.full((count,), log_weight, dtype=torch.float64))) == 1.0


def test_infinite_weights_count_as_equal_and_outweigh_finite_ones() -> None:
    assert float(effective_sample_size(torch.tensor([math.inf, 5.0, 0.0, -math.inf]))) == 0.25
    assert float(effective_sample_size(torch.tensor([math.inf, 5.0, math.inf, 0.0]))) == 0.5
    assert float(largest_weight_share(torch.tensor([math.inf, 5.0, math.inf, 0.0]))) == 0.5


def test_weights_of_zero_count_in_the_batch_size() -> None:
    assert float(effective_sample_size(torch.tensor([0.0, -math.inf, 0.0, -math.inf]))) == 0.5


@pytest.mark.parametrize("values", [[0.0, math.nan], [math.inf, math.nan], [-math.inf, -math.inf], []])
def test_unknown_ess_is_nan_and_never_becomes_a_step_size(values: list[float]) -> None:
    ess = float(effective_sample_size(torch.tensor(values)))
    assert math.isnan(ess)
    assert math.isnan(step_scale("sqrt_ess", ess, 1.0))
    assert math.isnan(step_scale("constant", ess, 1.0))


@given(log_ratios, st.floats(-50, 50), st.randoms())
@settings(deadline=None)
def test_ess_ignores_order_and_a_common_factor(values: list[float], shift: float, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(values)
    random.shuffle(shuffled)
    expected = float(effective_sample_size(torch.tensor(values, dtype=torch.float64)))
    moved = torch.tensor([v + shift for v in shuffled], dtype=torch.float64)
    assert float(effective_sample_size(moved)) == pytest.approx(expected, rel=1e-9)


@given(log_ratios)
@settings(deadline=None)
def test_ess_lies_between_one_over_b_and_one(values: list[float]) -> None:
    ess = float(effective_sample_size(torch.tensor(values, dtype=torch.float64)))
    assert 1 / len(values) * (1 - 1e-12) <= ess <= 1


def test_truncated_weights_would_hide_the_collapse() -> None:
    raw = torch.tensor(COLLAPSING, dtype=torch.float64).log()
    assert float(effective_sample_size(raw)) == pytest.approx(0.176, abs=1e-3)
    assert float(effective_sample_size(Truncate(2.0)(raw, raw, math.nan).log())) == 1.0


def test_mean_of_microbatch_values_is_not_the_ess_of_the_minibatch() -> None:
    assert ess_of([1, 1, 1, 1]) == ess_of([2, 2, 2, 2]) == 1.0
    assert ess_of([1, 1, 1, 1, 2, 2, 2, 2]) == pytest.approx(0.9, rel=1e-12)


def test_largest_weight_share_by_hand() -> None:
    share = float(largest_weight_share(torch.tensor(COLLAPSING, dtype=torch.float64).log()))
    assert share == pytest.approx(400 / 478, rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "ess", "on_policy", "expected"),
    [
        ("sqrt_ess", 0.25, 1.0, 0.5),
        ("sqrt_ess", 0.11, 0.44, 0.5),
        ("sqrt_ess", 0.7, 0.55, 1.0),
        ("linear_ess", 0.25, 1.0, 0.25),
        ("linear_ess", 0.11, 0.44, 0.25),
        ("linear_ess", 0.7, 0.55, 1.0),
        ("constant", 0.01, 1.0, 1.0),
    ],
)
def test_step_scale_by_hand(rule, ess: float, on_policy: float, expected: float) -> None:  # type: ignore[no-untyped-def]
    assert step_scale(rule, ess, on_policy) == pytest.approx(expected, rel=1e-12)
