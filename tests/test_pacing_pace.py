"""PACE: ages, effective staleness, the reject rate and the choice of what to reject, by numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacing_cases import finished_group, pacing_of
from vcpo.pipeline.pace import Pace, effective_staleness, token_ages
from vcpo.pipeline.pacing import GroupPool, make_policy
from vcpo.records import Group


def nothing_forgotten(groups: Sequence[Group]) -> list[float]:
    return [0.0] * len(groups)


def groups_finished_at(*versions: int) -> list[Group]:
    """One group for each version, sampled by it alone: no generation age."""
    return [finished_group(number, [version]) for number, version in enumerate(versions)]


def test_ages_are_token_means_and_add_up_to_the_ordinary_staleness() -> None:
    # one response of three tokens ending at version 5, one of one token at version 6; at version 7
    group = finished_group(0, [3, 3, 5], [6])
    waiting, generation = token_ages(group, 7)
    assert waiting == pytest.approx((2 + 2 + 2 + 1) / 4)
    assert generation == pytest.approx((2 + 2 + 0 + 0) / 4)
    assert waiting + generation == pytest.approx(np.mean([7 - 3, 7 - 3, 7 - 5, 7 - 6]))


def test_given_tokens_have_no_age_and_a_group_without_trained_ones_has_waited_since_its_start() -> None:
    group = finished_group(0, [3, 3, 5])
    group.trajectories[0].mask_T[:2] = False
    assert token_ages(group, 7) == (2.0, 0.0)
    group.trajectories[0].mask_T[:] = False
    assert token_ages(group, 7) == (4.0, 0.0)


def test_generation_age_counts_by_the_sharpened_percentile_of_what_was_forgotten() -> None:
    # the first group has no generation age and no percentile; of the others the scores' percentiles are 2/2 and 1/2
    staleness = effective_staleness([3.0, 0.0, 1.0], [0.0, 4.0, 2.0], [9.0, 0.5, 0.1], sharpening=4.0)
    assert staleness == pytest.approx([3.0, 4.0, 1.0 + 2.0 / 16])


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=10))
def test_equal_scores_leave_the_ordinary_staleness(ages: list[tuple[float, float]]) -> None:
    waiting, generation = [w for w, _ in ages], [g for _, g in ages]
    staleness = effective_staleness(waiting, generation, [0.3] * len(ages), sharpening=4.0)
    assert staleness == pytest.approx([w + g for w, g in ages])


def test_the_reject_rate_is_the_smoothed_excess_over_the_target() -> None:
    pace = Pace(target=4.0, smoothing=0.5, sharpening=4.0)
    eight = groups_finished_at(*[0] * 8)
    # excess 4: rate 0 -> 2 -> 3
    assert len(pace.rejects(1, eight, nothing_forgotten)) == 2
    assert pace.rate == 2.0
    assert len(pace.rejects(2, eight, nothing_forgotten)) == 3
    assert pace.rate == 3.0
    # excess 1: the rate of 2 remembers a fuller pool, but the pool does not go below its target
    assert len(pace.rejects(3, eight[:5], nothing_forgotten)) == 1
    assert pace.rate == 2.0
    # no excess: nothing is rejected, and the rate decays
    assert pace.rejects(4, eight[:3], nothing_forgotten) == []
    assert pace.rate == 1.0


def test_a_fraction_of_a_group_is_not_rejected() -> None:
    pace = Pace(target=2.0, smoothing=0.2, sharpening=4.0)
    six = groups_finished_at(*[0] * 6)
    # excess 4: rates 0.8, 1.44, 1.952, 2.3616
    assert [len(pace.rejects(step, six, nothing_forgotten)) for step in range(4)] == [0, 1, 1, 2]
    assert pace.rate == pytest.approx(2.3616)


def test_the_stalest_go_first_and_of_equals_the_one_that_was_started_first() -> None:
    pace = Pace(target=1.0, smoothing=1.0, sharpening=4.0)
    groups = groups_finished_at(3, 1, 4, 1)
    assert pace.rejects(5, groups, nothing_forgotten) == [1, 3, 0]


def test_a_prefix_that_is_still_what_the_policy_would_write_protects_a_long_response() -> None:
    """Both long responses have staleness 3; the quick group has 2, between what they effectively have."""
    faithful, forgotten = finished_group(0, [2, 8]), finished_group(1, [2, 8])
    quick = finished_group(2, [6])
    scores = {0: 0.01, 1: 0.9}
    pace = Pace(target=2.0, smoothing=1.0, sharpening=4.0)
    waiting = [faithful, forgotten, quick]
    # effective: 0 + 3/16, 0 + 3, 2
    assert pace.rejects(8, waiting, lambda groups: [scores[g.id] for g in groups]) == [1]
    two = Pace(target=1.0, smoothing=1.0, sharpening=4.0)
    assert two.rejects(8, waiting, lambda groups: [scores[g.id] for g in groups]) == [1, 2]


def test_a_group_is_scored_once_and_only_where_it_can_matter() -> None:
    asked: list[int] = []

    def scores(groups: Sequence[Group]) -> list[float]:
        asked.extend(group.id for group in groups)
        return [0.5] * len(groups)

    pace = Pace(target=2.0, smoothing=1.0, sharpening=4.0)
    still, moving = finished_group(0, [1, 1]), finished_group(1, [1, 2])
    pace.rejects(2, [still, moving], scores)
    assert asked == []  # nothing to reject, so nothing to rank
    later = finished_group(2, [0, 2])
    pace.rejects(3, [still, moving, later], scores)
    assert asked == [1, 2]
    newest = finished_group(3, [2, 3])
    pace.rejects(4, [moving, later, newest], scores)
    assert asked == [1, 2, 3]


def test_groups_over_the_age_cap_are_dropped_before_the_occupancy_is_counted() -> None:
    section = pacing_of({"name": "pace", "target_occupancy": 1.0, "smoothing": 1.0})
    pool = GroupPool(make_policy(section, 2, nothing_forgotten), 2, 10)
    waiting = groups_finished_at(0, 3, 1, 4, 5)
    # at version 5 with limit 3: groups 0 and 2 are stale; 3 are left, one over the target, and group 1 is the stalest
    assert list(pool.drops(5, 3, waiting)) == [0, 2, 1]
    assert pool.dropped == {"stale": 2, "rejected": 1}
    assert pool.metrics()["reject_rate"] == 1.0
    # rejections come once per step, the cap whenever something has finished
    assert pool.drops(5, 3, [*groups_finished_at(5, 5, 5, 5, 5), finished_group(9, [1])]) == {9: "stale"}
    assert pool.dropped == {"stale": 3, "rejected": 1}


def test_the_rate_continues_in_a_resumed_run() -> None:
    section = pacing_of({"name": "pace", "target_occupancy": 1.0, "smoothing": 0.5})
    one, other = (GroupPool(make_policy(section, 2, nothing_forgotten), 2, 10) for _ in range(2))
    one.drops(0, 5, groups_finished_at(*[0] * 10))  # excess 8: rate 4
    other.load_state(one.state())
    assert other.metrics()["reject_rate"] == 4.0
    assert other.dropped == {"stale": 0, "rejected": 4}
    # no excess: both decay to 2
    assert one.drops(1, 5, []) == other.drops(1, 5, []) == {}
    assert other.metrics()["reject_rate"] == 2.0
