"""mean@n, pass@k, maj@n and their intervals against slow counting."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.pipeline.eval_metrics import estimates, logged_k, majority_correct, mean_correct, pass_at_k
from vcpo.report.bootstrap import wilson_share

VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7)


def slow_pass_at_k(correct: Sequence[bool], k: int) -> Fraction:
    """Every subset of k responses is looked at."""
    subsets = list(itertools.combinations(correct, k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


def slow_majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Fraction:
    """Every outcome of the two lots: which of the winning answers, then which response stands for it."""
    winners: list[str] = []
    for answer in set(answers) - {None}:
        assert answer is not None
        if all(answers.count(answer) >= answers.count(other) for other in set(answers) - {None}):
            winners.append(answer)
    if not winners:
        return Fraction(0)
    total = Fraction(0)
    for winner in winners:
        theirs = [c for answer, c in zip(answers, correct, strict=True) if answer == winner]
        total += Fraction(sum(theirs), len(theirs))
    return total / len(winners)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(correct: list[bool]) -> None:
    for k in range(1, len(correct) + 1):
        assert pass_at_k(correct, k) == pytest.approx(float(slow_pass_at_k(correct, k)), abs=1e-12)
    assert pass_at_k(correct, 1) == pytest.approx(mean_correct(correct), abs=1e-12)
    assert pass_at_k(correct, len(correct)) == float(any(correct))


def test_pass_at_k_by_hand_and_where_floats_of_binomials_would_overflow() -> None:
    # 1 - (2 choose 2) / (4 choose 2), and 1 - (3 choose 3) / (4 choose 3)
    assert pass_at_k([True, True, False, False], 2) == pytest.approx(5 / 6)
    assert pass_at_k([True, False, False, False], 3) == pytest.approx(3 / 4)
    many = [True] + [False] * 4999
    assert pass_at_k(many, 2500) == pytest.approx(0.5)


def test_pass_at_k_is_unbiased_for_independent_responses() -> None:
    p, n, k = Fraction(3, 10), 5, 3
    expected = sum(
        p ** sum(outcome) * (1 - p) ** (n - sum(outcome)) * slow_pass_at_k(outcome, k)
        for outcome in itertools.product([True, False], repeat=n)
    )
    assert expected == 1 - (1 - p) ** k  # of the slow way, exactly
    estimated = sum(
        float(p ** sum(outcome) * (1 - p) ** (n - sum(outcome))) * pass_at_k(outcome, k)
        for outcome in itertools.product([True, False], repeat=n)
    )
    assert estimated == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_responses(k: int) -> None:
    with pytest.raises(ValueError, match="there are 2 responses"):
        pass_at_k([True, False], k)


@given(VOTES)
def test_the_majority_is_what_the_lots_decide_on_average(votes: list[tuple[str | None, bool]]) -> None:
    answers, correct = [answer for answer, _ in votes], [c for _, c in votes]
    assert majority_correct(answers, correct) == pytest.approx(float(slow_majority(answers, correct)), abs=1e-12)


@given(VOTES, st.randoms())
def test_the_majority_does_not_depend_on_the_order(votes: list[tuple[str | None, bool]], rng: object) -> None:
    shuffled = list(votes)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert majority_correct(*zip(*votes, strict=True)) == majority_correct(*zip(*shuffled, strict=True))


def test_the_majority_by_hand() -> None:
    assert majority_correct(["7", "7", "9"], [True, True, False]) == 1
    assert majority_correct(["7", "9", "9"], [True, False, False]) == 0
    assert majority_correct(["7", "9"], [True, False]) == 0.5  # a tie is one half, not the first one's luck
    assert majority_correct([None, None, "7"], [False, False, True]) == 1  # no answer has no vote
    assert majority_correct([None, None], [False, False]) == 0


def test_intervals_are_the_quantiles_of_all_resamples() -> None:
    """Four problems have 256 resamples with equal chances, so the bootstrap's distribution is known exactly."""
    values = [0.0, 1 / 3, 1 / 3, 1.0]
    means = sorted(statistics.fmean(drawn) for drawn in itertools.product(values, repeat=4))
    (found,) = estimates([values])
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.interval is not None
    # 2.5% of 256 is between the 6th and the 7th; 10,000 draws may miss by a neighbour
    assert means[3] <= found.interval.low <= means[9]
    assert means[-10] <= found.interval.high <= means[-4]


def test_intervals_agree_with_resampling_one_problem_after_another() -> None:
    drawer = np.random.default_rng(3)
    values = [drawer.integers(0, 4, size=40) / 3, drawer.integers(0, 2, size=40).astype(float)]
    rng = random.Random(5)
    for row, found in zip(values, estimates(values), strict=True):
        means = sorted(statistics.fmean(rng.choices(row.tolist(), k=40)) for _ in range(10_000))
        assert found.interval is not None
        assert (found.interval.low, found.interval.high) == pytest.approx((means[249], means[9749]), abs=0.026)


def test_where_all_problems_agree_the_interval_is_wilsons() -> None:
    none, every, alike = estimates([[0.0] * 30, [1.0] * 30, [0.5] * 30])
    assert none.interval == wilson_share(0, 30)
    assert every.interval == wilson_share(30, 30)
    assert alike.interval is not None
    assert alike.interval.low == alike.interval.high == 0.5


def test_a_single_problem_has_no_interval() -> None:
    (found,) = estimates([[1 / 3]])
    assert found.interval is None


def test_logged_k_are_powers_of_two_and_n() -> None:
    assert [logged_k(n) for n in (1, 2, 3, 4, 12)] == [[], [2], [2, 3], [2, 4], [2, 4, 8, 12]]
