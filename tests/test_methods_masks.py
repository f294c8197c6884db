"""Which tokens each mask drops: at points computed by hand, at infinite ratios, and as properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.methods.masks import (
    MASKS,
    DivergentNegatives,
    GeometricBand,
    LogClip,
    Mask,
    SecondMoment,
    TokenBand,
    TotalVariation,
)
from vcpo.methods.ratios import TokenRatios
from vcpo.methods.spec import MethodSpec
from vcpo.methods.weighing import Statistics, batch_statistics, weigh
from vcpo.methods.weights import Truncate

INF = math.inf


def tokens_of(
    logs: Sequence[Sequence[float]], signs: Sequence[int], pi: Sequence[Sequence[float]] | None = None
) -> TokenRatios:
    """Log-ratios and the sign of the advantage of each trajectory; ``pi``: the learner's probabilities."""
    lengths = torch.tensor([len(row) for row in logs])
    probabilities = pi or [[0.5] * len(row) for row in logs]
    return TokenRatios(
        log_ratios_N=torch.tensor([x for row in logs for x in row], dtype=torch.float64),
        logprobs_N=torch.tensor([p for row in probabilities for p in row], dtype=torch.float64).log(),
        lengths_B=lengths,
        sign_N=torch.tensor(signs, dtype=torch.float64).repeat_interleave(lengths),
    )


def dropped(mask: Mask, tokens: TokenRatios) -> list[bool]:
    statistic = mask.statistic(tokens) if mask.uses_batch else math.nan
    values: list[bool] = mask.drops(tokens, statistic).tolist()
    return values


def test_token_band_by_hand() -> None:
    tokens = tokens_of([[math.log(x) for x in (0.49, 0.51, 1.0, 1.99, 2.01)]], [0])
    assert dropped(TokenBand(0.5, 2.0), tokens) == [True, False, False, False, True]
    assert dropped(TokenBand(0.0, 2.0), tokens_of([[-INF, 0.0, INF]], [1])) == [False, False, True]
    assert dropped(TokenBand(0.5, 2.0), tokens_of([[-INF, 0.0, INF]], [1])) == [True, False, True]


def test_geometric_band_by_hand() -> None:
    logs = [[1.0, -0.999], [1.0, -0.995], [-0.0012], [INF, 0.0], [-INF, 0.0]]
    expected = [False, False, True, True, True, True, True, True, True]
    assert dropped(GeometricBand(), tokens_of(logs, [1, 1, -1, 1, 1])) == expected
    assert dropped(GeometricBand(0.0, 1.002), tokens_of(logs[2:], [-1, 1, 1])) == [False, True, True, False, False]


def test_second_moment_by_hand() -> None:
    # of the tokens that a step moves away: squares 0.01, 0.04, 0.09 and 1; the mean of the first three is 0.0467
    logs = [[0.1, 0.2, -3.0], [-0.3, -1.0, 5.0], [9.0, -9.0]]
    tokens = tokens_of(logs, [1, -1, 0])
    assert dropped(SecondMoment(0.04), tokens) == [False] * 3 + [True, True] + [False] * 3
    assert dropped(SecondMoment(0.047), tokens) == [False] * 4 + [True] + [False] * 3
    assert dropped(SecondMoment(0.286), tokens) == [False] * 8
    assert dropped(SecondMoment(0.009), tokens) == [True, True, False, True, True, False, False, False]


def test_second_moment_without_a_token_that_moves_away_drops_none() -> None:
    assert dropped(SecondMoment(), tokens_of([[-9.0, 0.0], [3.0]], [1, -1])) == [False] * 3


def test_second_moment_drops_infinite_ratios_that_move_away_and_only_those() -> None:
    tokens = tokens_of([[INF, 0.1, -INF], [-INF, -0.1, INF], [INF, -INF]], [1, -1, 0])
    assert dropped(SecondMoment(), tokens) == [True, False, False, True, False, False, False, False]


moving = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=8), min_size=1, max_size=6)


@given(moving, st.floats(0, 1), st.randoms())
@settings(deadline=None)
def test_second_moment_keeps_the_largest_set_within_its_budget(
    logs: list[list[float]],
    budget: float,
    random,  # type: ignore[no-untyped-def]
) -> None:
    signs = [random.choice([-1, 0, 1]) for _ in logs]
    tokens = tokens_of(logs, signs)
    drops = dropped(SecondMoment(budget), tokens)
    flat = [(x, s) for row, s in zip(logs, signs, strict=True) for x in row]
    away = [x * s > 0 for x, s in flat]
    assert not any(d and not a for d, a in zip(drops, away, strict=True))
    kept = sorted(x * x for (x, _), d, a in zip(flat, drops, away, strict=True) if a and not d)
    out = sorted(x * x for (x, _), d in zip(flat, drops, strict=True) if d)
    if kept:
        assert sum(kept) / len(kept) <= budget * (1 + 1e-9)
    if kept and out:
        assert kept[-1] <= out[0]
    if out:  # maximal: with the smallest of those that were dropped, and its equals, the mean would be too large
        more = kept + [x for x in out if x == out[0]]
        assert sum(more) / len(more) > budget * (1 - 1e-9)


@given(moving, st.floats(0.001, 1))
@settings(deadline=None)
def test_second_moment_decides_the_same_of_numbers_that_another_pass_has_rounded_differently(
    logs: list[list[float]], budget: float
) -> None:
    """The mean is taken of one forward pass and the tokens are dropped in another, which may be packed differently."""
    logs = [[round(x, 3) for x in row] for row in logs]
    signs = [1 - 2 * (number % 2) for number in range(len(logs))]
    mask, tokens = SecondMoment(budget), tokens_of(logs, signs)
    statistic = mask.statistic(tokens)
    expected = mask.drops(tokens, statistic).tolist()
    for factor in (1 - 1e-9, 1 + 1e-9):
        again = tokens_of([[x * factor for x in row] for row in logs], signs)
        assert mask.drops(again, statistic).tolist() == expected


def test_divergent_negatives_by_hand() -> None:
    logs = [[-0.2, -0.9], [-0.2, -0.7], [-2.0, -2.0], [-2.0], [-INF, 0.0], [INF]]
    signs = [-1, -1, 1, 0, -1, -1]
    assert dropped(DivergentNegatives(0.5), tokens_of(logs, signs)) == (
        [True] * 2 + [False] * 2 + [False] * 2 + [False] + [True] * 2 + [False]
    )


def test_total_variation_by_hand() -> None:
    # from 0.5 to 0.71, 0.69, 0.29 and 0.31
    pi = [[0.71, 0.69, 0.29, 0.31]] * 3
    logs = [[math.log(p / 0.5) for p in row] for row in pi]
    expected = [True, False, False, False] + [False, False, True, False] + [False] * 4
    assert dropped(TotalVariation(), tokens_of(logs, [1, -1, 0], pi)) == expected
    assert dropped(TotalVariation(0.3, 0.2), tokens_of(logs, [1, -1, 0], pi)) == expected[:4] + [False] * 8


def test_total_variation_of_tokens_that_one_of_the_policies_cannot_sample() -> None:
    tokens = tokens_of([[INF, -INF], [INF, -INF]], [1, -1], [[0.5, 0.0], [0.5, 0.0]])
    # log pi - log mu cannot tell mu where pi is 0, but mu was positive: it sampled the token
    drops = dropped(TotalVariation(), tokens)
    assert drops[0]
    assert not drops[2]


def test_log_clip_by_hand() -> None:
    logs = [[0.3, 0.5, -2.0]] * 3
    tokens = tokens_of(logs, [1, -1, 0])
    mask = LogClip()
    assert dropped(mask, tokens) == [False, True, False] + [False, False, True] + [False] * 3
    assert mask.clamped(tokens).tolist() == [0.3, 0.4, -2.0, 0.3, 0.5, -0.4, 0.3, 0.5, -2.0]


def test_every_mask_has_points_by_hand() -> None:
    tested = {TokenBand, GeometricBand, SecondMoment, DivergentNegatives, TotalVariation, LogClip}
    assert tested == set(MASKS.values())


@pytest.mark.parametrize(
    "mask", [TokenBand(), GeometricBand(), SecondMoment(), LogClip(), DivergentNegatives()], ids=str
)
def test_an_infinite_ratio_that_is_dropped_leaves_no_nan(mask: Mask) -> None:
    for value, sign in ((INF, 1), (-INF, -1)):
        spec = MethodSpec(ratio_level="token", weight=Truncate(None), mask=mask)
        tokens = tokens_of([[value, 0.0], [0.0]], [sign, 1])
        statistics = batch_statistics(spec, tokens)
        weighing = weigh(spec, tokens, statistics)
        if dropped(mask, tokens)[0]:
            assert weighing.inner_N[0] == 0
            assert weighing.inner_N.isfinite().all()
            assert weighing.weights_B.isfinite().all()


def test_mask_and_weight_make_the_shares_that_are_reported() -> None:
    spec = MethodSpec(ratio_level="token", weight=Truncate(1.5), mask=TokenBand(0.5, 2.0))
    tokens = tokens_of([[math.log(x) for x in (0.4, 1.8, 1.0)], [math.log(3.0)]], [1, 1])
    weighing = weigh(spec, tokens, Statistics())
    assert weighing.inner_N.tolist() == pytest.approx([0, 1.5, 1, 0])
    assert weighing.outer_B.tolist() == [1, 1]
    assert weighing.weights_B.tolist() == pytest.approx([2.5 / 3, 0])
    assert weighing.dropped_B.tolist() == [1, 1]
    assert weighing.reduced_B.tolist() == [1, 1]  # 1.8 and 3: what a mask drops is counted apart


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TokenBand(2.0, 0.5), "low and high must satisfy 0 <= low <= high, not 2.0 and 0.5"),
        (lambda: TokenBand(-1.0, 2.0), "0 <= low <= high"),
        (lambda: GeometricBand(1.1, 1.0), "0 <= low <= high"),
        (lambda: GeometricBand(math.nan, 1.0), "0 <= low <= high"),
        (lambda: SecondMoment(-0.1), "budget must not be negative"),
        (lambda: DivergentNegatives(math.nan), "delta must be a number"),
        (lambda: TotalVariation(-0.1, 0.2), "low and high must not be negative"),
        (lambda: LogClip(0.4, -0.1), "low and high must not be negative"),
    ],
)
def test_impossible_options_are_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
