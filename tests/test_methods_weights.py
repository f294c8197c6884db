"""Each rule from ratios to weights at points computed by hand, at infinite ratios, and as properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcpo.methods.penalties import PENALTIES, KlByEss, SquaredLogRatio, SquaredRegret
from vcpo.methods.ratios import TokenRatios
from vcpo.methods.weights import (
    WEIGHTS,
    Band,
    CapByEss,
    Clamp,
    FlipPositives,
    GammaKernel,
    PpoClip,
    SelfNormalized,
    SoftGate,
    TaperNegatives,
    Truncate,
    Weight,
)

finite_logs = st.lists(st.floats(-50, 50), min_size=1, max_size=20)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights_of(rule: Weight, log_ratios: Tensor, sign: Tensor | float = 0.0) -> list[float]:
    signs = torch.as_tensor(sign, dtype=torch.float64).expand(log_ratios.shape)
    statistic = rule.statistic(log_ratios) if rule.uses_batch else math.nan
    values: list[float] = rule(log_ratios, signs, statistic).tolist()
    return values


# rule, sign of the advantage, ratio, weight
BY_HAND: list[tuple[Weight, int, float, float]] = [
    (Truncate(2.0), 1, 1.5, 1.5),
    (Truncate(2.0), -1, 7.0, 2.0),
    (Truncate(None), 1, 70.0, 70.0),
    (Band(0.5, 5.0), 1, 0.49, 0.0),
    (Band(0.5, 5.0), -1, 0.51, 0.51),
    (Band(0.5, 5.0), -1, 4.9, 4.9),
    (Band(0.5, 5.0), 1, 5.1, 0.0),
    (Clamp(0.5, 5.0), 1, 0.1, 0.5),
    (Clamp(0.5, 5.0), -1, 6.0, 5.0),
    (Clamp(0.5, 5.0), -1, 2.0, 2.0),
    (PpoClip(0.1, 0.3), 1, 1.29, 1.29),
    (PpoClip(0.1, 0.3), 1, 1.31, 0.0),
    (PpoClip(0.1, 0.3), 1, 0.01, 0.01),
    (PpoClip(0.1, 0.3), -1, 0.91, 0.91),
    (PpoClip(0.1, 0.3), -1, 0.89, 0.0),
    (PpoClip(0.1, 0.3), -1, 2.9, 2.9),
    (PpoClip(0.1, 0.3), -1, 3.1, 0.0),
    (PpoClip(0.1, 0.3, None), -1, 3.1, 3.1),
    (TaperNegatives(), 1, 9.0, 1.0),
    (TaperNegatives(), 0, 0.1, 1.0),
    (TaperNegatives(), -1, 9.0, 1.0),
    (TaperNegatives(), -1, 0.4, 0.4),
    (FlipPositives(), 1, 1.1, 1 / 1.1),
    (FlipPositives(), 1, 1.21, 0.0),
    (FlipPositives(), 1, 0.5, 2.0),
    (FlipPositives(), 1, 0.1, 3.0),
    (FlipPositives(), -1, 0.79, 0.0),
    (FlipPositives(), -1, 2.5, 2.5),
    (FlipPositives(), -1, 4.0, 3.0),
    (SoftGate(), 1, 1.0, 1.0),
    (SoftGate(2.0, 3.0), 1, 1.5, 4 * math.e / (1 + math.e) ** 2 * 1.5),
    (SoftGate(2.0, 3.0), -1, 1.5, 4 * math.exp(1.5) / (1 + math.exp(1.5)) ** 2 * 1.5),
    (GammaKernel(), 1, 1.0, 1.0),
    (GammaKernel(), -1, 1.0, 1.0),
    (GammaKernel(), 1, 2.0, 4 * math.exp(-3)),
    (GammaKernel(), 0, 2.0, 4 * math.exp(-3)),
    (GammaKernel(), -1, 2.0, 8 * math.exp(-2)),
]


@pytest.mark.parametrize(("rule", "sign", "ratio", "expected"), BY_HAND)
def test_weight_by_hand(rule: Weight, sign: int, ratio: float, expected: float) -> None:
    assert weights_of(rule, f64(math.log(ratio)), sign) == pytest.approx([expected], rel=1e-12)


def test_every_rule_has_points_by_hand() -> None:
    by_hand = {type(rule) for rule, *_ in BY_HAND} | {SelfNormalized, CapByEss}
    assert by_hand == set(WEIGHTS.values())


def test_self_normalised_weights_by_hand() -> None:
    assert weights_of(SelfNormalized(), f64(1, 2, 3, 6).log()) == pytest.approx([1 / 3, 2 / 3, 1, 2])


def test_cap_by_ess_by_hand() -> None:
    # (1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36 / 42
    assert weights_of(CapByEss(), f64(0.5, 1, 1.5).log()) == pytest.approx([0.5, 36 / 42, 36 / 42])


# at ratios 0, 1 and infinity, for a positive and a negative advantage; None: no finite weight can be given
AT_THE_LIMITS: dict[Weight, tuple[list[float], list[float]]] = {
    Truncate(8.0): ([0, 1, 8], [0, 1, 8]),
    Truncate(None): ([0, 1, math.inf], [0, 1, math.inf]),
    Band(0.5, 5.0): ([0, 1, 0], [0, 1, 0]),
    Band(0.0, 5.0): ([0, 1, 0], [0, 1, 0]),
    Clamp(0.0, 5.0): ([0, 1, 5], [0, 1, 5]),
    Clamp(0.5, 5.0): ([0.5, 1, 5], [0.5, 1, 5]),
    PpoClip(): ([0, 1, 0], [0, 1, 0]),
    PpoClip(1.0, 0.2, None): ([0, 1, 0], [0, 1, math.inf]),
    SelfNormalized(): ([0, 0, 3], [0, 0, 3]),
    TaperNegatives(): ([1, 1, 1], [0, 1, 1]),
    FlipPositives(): ([3, 1, 0], [0, 1, 3]),
    SoftGate(): ([0, 1, 0], [0, 1, 0]),
    GammaKernel(): ([0, 1, 0], [0, 1, 0]),
    CapByEss(): ([0, 1 / 3, 1 / 3], [0, 1 / 3, 1 / 3]),
}


@pytest.mark.parametrize("rule", AT_THE_LIMITS, ids=str)
def test_ratios_of_zero_and_infinity(rule: Weight) -> None:
    log_ratios = f64(-math.inf, 0.0, math.inf)
    positive, negative = AT_THE_LIMITS[rule]
    assert weights_of(rule, log_ratios, 1) == pytest.approx(positive)
    assert weights_of(rule, log_ratios, -1) == pytest.approx(negative)


@pytest.mark.parametrize("rule", AT_THE_LIMITS, ids=str)
def test_ratios_that_overflow_are_as_infinite_ones(rule: Weight) -> None:
    infinite, huge = f64(-math.inf, 0.0, math.inf), f64(-5000.0, 0.0, 5000.0)
    for sign in (1, -1):
        assert weights_of(rule, huge, sign) == pytest.approx(weights_of(rule, infinite, sign))


@pytest.mark.parametrize("rule", AT_THE_LIMITS, ids=str)
def test_nan_stays_nan_so_that_it_is_noticed(rule: Weight) -> None:
    if not rule.uses_batch and not isinstance(rule, TaperNegatives):
        for sign in (1, -1):
            values = weights_of(rule, f64(math.nan, 0.0), sign)
            assert math.isnan(values[0])
            assert math.isfinite(values[1])


@given(finite_logs)
@settings(deadline=None)
def test_self_normalised_weights_average_to_one(logs: list[float]) -> None:
    values = weights_of(SelfNormalized(), f64(*logs))
    assert sum(values) / len(values) == pytest.approx(1.0, rel=1e-9)


@given(finite_logs, st.floats(-100, 100))
@settings(deadline=None)
def test_self_normalised_weights_ignore_a_common_factor(logs: list[float], shift: float) -> None:
    moved = weights_of(SelfNormalized(), f64(*(x + shift for x in logs)))
    assert moved == pytest.approx(weights_of(SelfNormalized(), f64(*logs)), rel=1e-7)


@given(finite_logs)
@settings(deadline=None)
def test_cap_by_ess_is_never_above_one_nor_above_the_ratio(logs: list[float]) -> None:
    values = weights_of(CapByEss(), f64(*logs))
    assert all(0 <= value <= min(1.0, math.exp(x) * (1 + 1e-12)) for value, x in zip(values, logs, strict=True))
    assert max(values) >= min(1 / len(logs), math.exp(max(logs))) * (1 - 1e-9)


@given(st.sampled_from([1, -1]), st.floats(-20, 20))
@settings(deadline=None)
def test_kernels_are_finite_and_vanish_far_from_the_policy(sign: int, log: float) -> None:
    for rule in (SoftGate(), GammaKernel()):
        (value,) = weights_of(rule, f64(log), sign)
        assert 0 <= value < 2
        assert abs(log) < 7 or value < 1e-2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Truncate(0.0), "cap must be positive, or null for no truncation"),
        (lambda: Truncate(-1.0), "cap must be positive"),
        (lambda: Truncate(math.nan), "cap must be positive"),
        (lambda: Band(2.0, 1.0), "low and high must satisfy 0 <= low <= high, not 2.0 and 1.0"),
        (lambda: Band(-1.0, 1.0), "0 <= low <= high"),
        (lambda: Clamp(0.5, 0.1), "0 <= low <= high"),
        (lambda: PpoClip(-0.1, 0.2), "low must be in 0..1 and high not negative"),
        (lambda: PpoClip(1.1, 0.2), "low must be in 0..1"),
        (lambda: PpoClip(0.2, -0.2), "high not negative"),
        (lambda: PpoClip(0.2, 0.2, 1.0), "dual must be above 1, or null for no dual clip"),
        (lambda: FlipPositives(0.2, 0.2, 0.0), "cap must be positive"),
        (lambda: SoftGate(0.0), "tau_positive and tau_negative must be positive"),
        (lambda: GammaKernel(lambda_positive=0.0), "must be positive"),
        (lambda: SquaredLogRatio(-1e-3), "scale must not be negative"),
        (lambda: SquaredRegret(-1.0), "scale must not be negative"),
    ],
)
def test_impossible_options_are_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("..", r"\.\.").replace("(", r"\(")):
        make()


def tokens_of(logs: list[list[float]]) -> TokenRatios:
    log_ratios = f64(*(x for row in logs for x in row))
    lengths = torch.tensor([len(row) for row in logs])
    return TokenRatios(log_ratios, torch.zeros_like(log_ratios), lengths, torch.zeros_like(log_ratios))


def test_penalties_by_hand() -> None:
    tokens = tokens_of([[0.5, -1.0], [2.0]])
    assert SquaredLogRatio(0.1)(tokens, math.nan).tolist() == pytest.approx([-0.1, 0.2, -0.4])
    assert SquaredRegret(0.1)(tokens, math.nan).tolist() == pytest.approx([0.05, 0.05, -0.2])
    ratios = [math.exp(0.5), math.exp(-1), math.exp(2)]
    e = sum(ratios) ** 2 / sum(r * r for r in ratios) / 3
    rule = KlByEss()
    assert rule.statistic(tokens) == pytest.approx(e)
    assert rule(tokens, e).tolist() == pytest.approx([-(1 - e) * (1 - 1 / r) for r in ratios])
    assert set(PENALTIES.values()) == {SquaredLogRatio, SquaredRegret, KlByEss}


def test_penalty_by_ess_of_ratios_of_zero_and_infinity_is_finite() -> None:
    tokens = tokens_of([[-math.inf, math.inf], [0.0, 0.0]])
    rule = KlByEss()
    assert rule.statistic(tokens) == 0.25
    assert rule(tokens, 0.25).tolist() == pytest.approx([0.75 * math.expm1(20), -0.75, 0.0, 0.0])
