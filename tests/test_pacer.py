"""The staleness bound holds whatever the speeds of samplers and learner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vcpo.pipeline.pacer import Pacer


@given(
    max_staleness=st.integers(0, 6),
    groups_per_step=st.integers(1, 4),
    speeds=st.lists(st.booleans(), max_size=200),
)
def test_no_group_is_trained_more_than_max_staleness_steps_after_its_start(
    max_staleness: int, groups_per_step: int, speeds: list[bool]
) -> None:
    """A virtual clock: at each tick either the learner steps (if it can) or one group starts (if it may)."""
    last_step = 10
    pacer = Pacer(max_staleness, groups_per_step)
    version, started_at = 0, []
    for learner_moves in speeds:
        if learner_moves and len(started_at) >= (version + 1) * groups_per_step and version < last_step:
            groups = range(version * groups_per_step, (version + 1) * groups_per_step)
            for group in groups:
                assert 0 <= version - started_at[group] <= max_staleness
            version += 1
        elif len(started_at) < pacer.started_limit(version, last_step):
            started_at.append(version)
    assert len(started_at) <= last_step * groups_per_step


def test_the_learner_is_never_starved_of_groups_that_it_needs_next() -> None:
    pacer = Pacer(max_staleness=0, groups_per_step=4)
    assert pacer.started_limit(version=3, last_step=10) == 16
    assert pacer.started_limit(version=9, last_step=10) == 40
    assert pacer.started_limit(version=10, last_step=10) == 40


def test_every_dropped_group_makes_room_for_one_more() -> None:
    pacer = Pacer(max_staleness=2, groups_per_step=4)
    assert pacer.started_limit(version=3, last_step=10) == 24
    assert pacer.started_limit(version=3, last_step=10, dropped=5) == 29
    assert pacer.started_limit(version=10, last_step=10, dropped=5) == 45
