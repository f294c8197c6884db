from __future__ import annotations

import math

import pytest
import torch

from vcpo.methods.diagnostics import k3_terms
from vcpo.methods.ratios import (
    sum_by_trajectory,
    trajectory_log_ratios,
)
from vcpo.methods.weights import Truncate


def test_sums_are_double_precision_and_empty_trajectories_sum_to_zero() -> None:
    values = torch.full((4097,), 0.1, dtype=torch.float32)
    sums = sum_by_trajectory(values, torch.tensor([4096, 0, 1]))
    tenth = float(values[0])
    assert sums.tolist() == [pytest.approx(4096 * tenth, rel=1e-14), 0.0, tenth]


def test_levels_by_hand() -> None:
    log_ratios, lengths = torch.tensor([2.0, -3.0], dtype=torch.float64), torch.tensor([4, 3])
    assert trajectory_log_ratios("sequence", log_ratios, lengths).tolist() == [2.0, -3.0]
    assert trajectory_log_ratios("geometric", log_ratios, lengths).tolist() == [0.5, -1.0]
    assert trajectory_log_ratios("none", log_ratios, lengths).tolist() == [0.0, 0.0]
    assert trajectory_log_ratios("token", log_ratios, lengths).tolist() == [0.0, 0.0]


def test_truncation_of_extreme_ratios() -> None:
    log_ratios = torch.tensor([math.log(4.0), math.log(9.0), 1e5, math.inf, -math.inf], dtype=torch.float64)
    assert Truncate(8.0)(log_ratios, log_ratios, math.nan).tolist() == [pytest.approx(4.0), 8.0, 8.0, 8.0, 0.0]
    assert Truncate(None)(log_ratios, log_ratios, math.nan)[2:].tolist() == [math.inf, math.inf, 0.0]
    assert Truncate(8.0)(torch.tensor([math.nan]), log_ratios, math.nan).isnan().all()


def test_kl_estimators_by_hand() -> None:
    log_ratios = torch.tensor([0.5, -1.0], dtype=torch.float64)
    by_hand = ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0)) / 2
    assert float(k3_terms(log_ratios).mean()) == pytest.approx(by_hand, rel=1e-12)
    assert float(k3_terms(torch.tensor([math.inf, 0.0])).mean()) == math.inf


def test_kl_estimators_are_unbiased_for_kl_of_sampler_from_learner() -> None:
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    learner = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((sampler * (sampler / learner).log()).sum())
    log_ratios = (learner / sampler).log()
    k1 = sum(float(p) * float(-x) for p, x in zip(sampler, log_ratios, strict=True))
    k3 = sum(float(p) * float(k3_terms(x)) for p, x in zip(sampler, log_ratios, strict=True))
    assert k1 == pytest.approx(exact, rel=1e-12)
    assert k3 == pytest.approx(exact, rel=1e-12)
