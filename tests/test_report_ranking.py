"""Who wins, and when nobody can say."""

from __future__ import annotations

import pytest

from vcpo.report.ranking import late_accuracy, paired_difference, rank


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.3], 0.3),
        ([0.1, 0.5], 0.5),
        ([0.1, 0.4, 0.5], 0.5),
        ([0.1, 0.4, 0.5, 0.7], 0.6),
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.3, 0.6], 0.6),
    ],
)
def test_late_accuracy_is_the_mean_of_the_last_third_rounded_up(accuracies: list[float], expected: float) -> None:
    assert late_accuracy(accuracies) == pytest.approx(expected)


def test_a_run_without_evaluations_has_no_late_accuracy() -> None:
    with pytest.raises(ValueError, match="without evaluations"):
        late_accuracy([])


def by_seed(*scores: float) -> dict[int, float]:
    return dict(enumerate(scores, start=1))


def test_differences_are_taken_within_the_seeds_that_both_have() -> None:
    difference = paired_difference({1: 0.5, 2: 0.7, 4: 0.1}, {2: 0.6, 1: 0.2, 3: 0.9})
    assert difference is not None
    assert difference.seeds == [1, 2]
    assert difference.mean == pytest.approx(0.2)
    assert difference.interval is not None
    assert (difference.interval.low, difference.interval.high) == pytest.approx((0.1, 0.3))
    assert paired_difference({1: 0.5}, {2: 0.5}) is None


def test_a_difference_that_every_seed_shows_is_clear_although_the_seeds_scatter_more() -> None:
    # means 0.55 and 0.50, standard deviation 0.3 each: unpaired, they would not be told apart
    first, second = rank({"a": by_seed(0.1, 0.4, 0.6, 0.8), "b": by_seed(0.16, 0.44, 0.65, 0.85)})
    assert (first.variant, first.rank, first.tied, first.to_best) == ("b", 1, False, None)
    assert (second.variant, second.rank, second.tied) == ("a", 2, False)
    assert second.to_best is not None
    assert second.to_best.mean == pytest.approx(-0.05)
    assert second.to_best.interval is not None
    assert -0.06 <= second.to_best.interval.low < second.to_best.interval.high <= -0.04


def test_variants_whose_difference_changes_sign_are_tied() -> None:
    rows = rank(
        {"a": by_seed(0.5, 0.6, 0.4, 0.5), "b": by_seed(0.6, 0.5, 0.5, 0.5), "worse": by_seed(0.1, 0.1, 0.0, 0.1)}
    )
    assert [(row.variant, row.rank, row.tied) for row in rows] == [("b", 1, True), ("a", 1, True), ("worse", 3, False)]


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_tell_nothing_apart(seeds: int) -> None:
    rows = rank({"a": by_seed(*[0.1] * seeds), "b": by_seed(*[0.9] * seeds)})
    assert [(row.variant, row.rank, row.tied) for row in rows] == [("b", 1, True), ("a", 1, True)]
    assert rows[1].to_best is not None
    assert rows[1].to_best.mean == pytest.approx(-0.8)
    assert (rows[1].interval is None) == (seeds == 1)


def test_variants_without_a_score_come_last_and_unranked() -> None:
    rows = rank({"failed": {}, "a": by_seed(0.2, 0.3)})
    assert [(row.variant, row.rank, row.mean) for row in rows] == [
        ("a", 1, pytest.approx(0.25)),
        ("failed", None, None),
    ]
    assert rows[0].tied is False


def test_seeds_that_only_one_variant_has_do_not_decide_between_two() -> None:
    # b's mean is higher for a lucky fourth seed; where both were measured, a is better every time
    rows = rank({"a": by_seed(0.5, 0.6, 0.5), "b": by_seed(0.4, 0.5, 0.4, 1.0)})
    assert [(row.variant, row.rank) for row in rows] == [("b", 2), ("a", 1)]


def test_equal_scores_are_tied() -> None:
    rows = rank({"a": by_seed(0.5, 0.6, 0.7), "b": by_seed(0.5, 0.6, 0.7)})
    assert [(row.rank, row.tied) for row in rows] == [(1, True), (1, True)]
