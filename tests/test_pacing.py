"""Pacing policies at every combination of speeds: bounds, drops, counts, and what a resumed run does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacing_cases import Saved, VirtualRun, finished_group, pacing_of
from vcpo.config import parse_config
from vcpo.errors import UserError
from vcpo.pipeline.pacing import GroupPool, make_policy

BASE: dict[str, Any] = {"model": {"init": {}}, "task": "sort"}

policies = st.one_of(
    st.just("bounded"),
    st.builds(lambda ahead: {"name": "drop_stale", "max_ahead": ahead}, st.none() | st.integers(0, 8)),
    st.builds(
        lambda ahead, target, smoothing: {
            "name": "pace",
            "max_ahead": ahead,
            "target_occupancy": target,
            "smoothing": smoothing,
        },
        st.none() | st.integers(0, 8),
        st.floats(1, 3),
        st.floats(0.1, 1),
    ),
)
speeds = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 5),
        "groups_per_step": st.integers(1, 4),
        "last_step": st.integers(1, 12),
        "token_counts": st.lists(st.integers(1, 30), min_size=1, max_size=7),
        "step_ticks": st.lists(st.integers(0, 20), min_size=1, max_size=5),
        "slots": st.integers(1, 12),
    }
)


def flat(lists: list[list[int]]) -> list[int]:
    return [number for inner in lists for number in inner]


@given(policies, speeds)
@settings(deadline=None)
def test_no_policy_trains_beyond_the_bound_and_every_group_ends_once(pacing: Any, speed: dict[str, Any]) -> None:
    run = VirtualRun(pacing_of(pacing), **speed).run()
    planned = speed["last_step"] * speed["groups_per_step"]
    assert max(flat(run.lags)) <= speed["max_staleness"]
    trained = flat(run.trained)
    assert len(trained) == planned
    # trained and dropped together are everything that was started, each once
    assert run.started == list(range(planned + len(run.dropped)))
    assert sorted(trained + run.dropped) == run.started
    metrics = run.pool.metrics()
    assert metrics["dropped_groups"] == len(run.dropped)
    assert sum(count for name, count in metrics.items() if name.startswith("dropped_groups/")) == len(run.dropped)
    progress = run.starter.progress
    assert (progress.next_group, progress.position, progress.done) == (len(run.started), len(run.started), [])


@given(policies, speeds)
@settings(deadline=None)
def test_no_more_groups_are_open_than_may_be_ahead(pacing: Any, speed: dict[str, Any]) -> None:
    section = pacing_of(pacing)
    run = VirtualRun(section, **speed).run()
    ahead = getattr(section, "max_ahead", None)
    ahead = speed["max_staleness"] if ahead is None else ahead
    assert run.most_open <= (ahead + 1) * speed["groups_per_step"]


@given(speeds)
@settings(deadline=None)
def test_bounded_pacing_never_drops_and_trains_in_the_order_of_starting(speed: dict[str, Any]) -> None:
    run = VirtualRun(pacing_of("bounded"), **speed).run()
    assert run.dropped == []
    assert flat(run.trained) == list(range(speed["last_step"] * speed["groups_per_step"]))
    assert run.pool.metrics()["dropped_groups"] == 0


@given(policies, speeds, st.data())
@settings(deadline=None)
def test_a_resumed_run_trains_nothing_twice_and_loses_nothing(pacing: Any, speed: dict[str, Any], data: Any) -> None:
    """What was in flight or waiting is started again; what was trained or dropped is not."""
    first_steps = data.draw(st.integers(1, speed["last_step"]))
    common = {"pacing": pacing_of(pacing), **speed}
    first = VirtualRun(**common, stop_after=first_steps).run()
    assert first.saved is not None
    # drops that came after the checkpoint are decided again
    ended = set(flat(first.trained) + first.dropped)
    if first_steps == speed["last_step"]:
        assert len(ended) == first_steps * speed["groups_per_step"] + len(first.dropped)
        return
    second = VirtualRun(**common, begin=first.saved).run()
    assert not ended & set(second.started)
    everything = flat(first.trained) + first.dropped + flat(second.trained) + second.dropped
    dropped = len(first.dropped) + len(second.dropped)
    assert sorted(everything) == list(range(speed["last_step"] * speed["groups_per_step"] + dropped))
    assert second.pool.metrics()["dropped_groups"] == dropped
    assert max(flat(second.lags)) <= speed["max_staleness"]


def test_dropped_groups_beyond_the_frontier_are_remembered_by_number() -> None:
    """One slow group holds the frontier while later ones are trained and dropped."""
    run = VirtualRun(
        pacing_of({"name": "drop_stale", "max_ahead": 3}),
        max_staleness=1,
        groups_per_step=1,
        last_step=20,
        token_counts=[200, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        step_ticks=[4],
        slots=3,
        stop_after=10,
    ).run()
    progress = run.starter.progress
    assert run.dropped
    assert (progress.next_group, progress.position) == (0, 0)
    assert progress.done == sorted(flat(run.trained) + run.dropped)


def test_quick_samplers_with_much_ahead_produce_what_is_dropped() -> None:
    """Four minibatches of one group start at version 0; the bound of 1 leaves two of them, and the others go."""
    run = VirtualRun(
        pacing_of({"name": "drop_stale", "max_ahead": 3}),
        max_staleness=1,
        groups_per_step=1,
        last_step=10,
        token_counts=[1],
        step_ticks=[10],
        slots=10,
        stop_after=3,
    ).run()
    # step 0 trains group 0, step 1 group 1 at lag 1; groups 2 and 3 have lag 2 when step 2 comes
    assert run.trained == [[0], [1], [4]]
    assert run.dropped == [2, 3]
    assert run.lags == [[0], [1], [1]]


def test_a_slow_prompt_is_dropped_where_others_do_not_wait_for_it_and_trained_where_they_do() -> None:
    common: dict[str, Any] = {
        "max_staleness": 2,
        "groups_per_step": 1,
        "last_step": 8,
        "token_counts": [40, *([1] * 60)],
        "step_ticks": [5],
        "slots": 10,
    }
    dropping = VirtualRun(pacing_of("drop_stale"), **common).run()
    assert dropping.dropped == [0]
    waiting = VirtualRun(pacing_of("bounded"), **common).run()
    assert waiting.trained[0] == [0]


def test_a_group_is_as_old_as_its_oldest_response() -> None:
    pool = GroupPool(make_policy(pacing_of("drop_stale"), 1, lambda groups: []), 1, 10)
    mixed, fresh = finished_group(0, [4, 5], [2, 5]), finished_group(1, [3], [4])
    assert pool.drops(5, 2, [mixed, fresh]) == {0: "stale"}
    assert pool.drops(5, 1, [fresh]) == {1: "stale"}
    assert pool.metrics()["dropped_groups/stale"] == 2


def test_a_lowered_limit_stops_starts_but_drops_nothing_where_pacing_is_bounded() -> None:
    pool = GroupPool(make_policy(pacing_of("bounded"), 2, lambda groups: []), 2, 10)
    assert pool.started_limit(version=3, limit=4) == 16
    assert pool.started_limit(version=4, limit=1) == 12  # fewer than have started: none starts
    assert pool.drops(4, 0, [finished_group(8, [0]), finished_group(9, [0])]) == {}
    assert pool.choose([finished_group(9, [0]), finished_group(8, [0])], [10, 11]) == [8, 9]


def test_bounded_pacing_waits_for_the_lowest_numbers_and_passes_over_what_was_given_up() -> None:
    pool = GroupPool(make_policy(pacing_of("bounded"), 2, lambda groups: []), 2, 10)
    eight, nine, ten = (finished_group(number, [0]) for number in (8, 9, 10))
    assert pool.choose([nine, ten], [8, 11]) is None
    assert pool.choose([nine], []) is None
    assert pool.choose([ten, nine, eight], [11]) == [8, 9]
    before = pool.started_limit(version=4, limit=1)
    pool.lost(1)  # group 8
    assert pool.choose([ten, nine], [11]) == [9, 10]
    assert pool.started_limit(version=4, limit=1) == before + 1
    assert pool.metrics()["failed_groups"] == 1
    continued = GroupPool(make_policy(pacing_of("bounded"), 2, lambda groups: []), 2, 10)
    continued.load_state(json.loads(json.dumps(pool.state())))
    assert continued.started_limit(version=4, limit=1) == before + 1


def test_the_first_look_of_every_step_counts_what_is_waiting() -> None:
    pool = GroupPool(make_policy(pacing_of("bounded"), 1, lambda groups: []), 1, 10)
    pool.drops(0, 0, [])
    pool.drops(0, 0, [finished_group(0, [0])])
    assert pool.metrics()["waiting_groups"] == 0
    pool.drops(1, 0, [finished_group(1, [0]), finished_group(2, [0])])
    assert pool.metrics()["waiting_groups"] == 2


def test_a_checkpoint_of_the_pool_is_plain_data() -> None:
    run = VirtualRun(pacing_of("pace"), 2, 1, 3, token_counts=[1], step_ticks=[3], slots=4, stop_after=2).run()
    assert isinstance(run.saved, Saved)
    assert '"rate"' in run.saved.text


def test_a_policy_is_named_alone_or_with_its_options() -> None:
    local = {"name": "local", "max_staleness": 3}
    alone = parse_config({**BASE, "runtime": {**local, "pacing": "pace"}})
    spelled = parse_config({**BASE, "runtime": {**local, "pacing": {"name": "pace", "target_occupancy": 2.0}}})
    assert alone == spelled
    assert parse_config(alone.to_plain()) == alone
    assert parse_config(BASE).runtime.pacing.name == "bounded"


@pytest.mark.parametrize(
    ("runtime", "sentence"),
    [
        ({"name": "lockstep", "pacing": "pace"}, "runtime.pacing=pace needs runtime=local: lockstep samples each"),
        ({"name": "lockstep", "pacing": "drop_stale"}, "runtime.pacing=drop_stale needs runtime=local"),
        (
            {"name": "local", "pacing": "pacer"},
            "unknown runtime.pacing 'pacer'; allowed: 'bounded', 'drop_stale', 'pace'",
        ),
        ({"name": "local", "pacing": {"max_ahead": 2}}, "runtime.pacing.name is required; allowed: bounded,"),
        (
            {"name": "local", "pacing": {"name": "pace", "target_occupancy": 0.5}},
            "runtime.pacing.target_occupancy = 0.5",
        ),
        ({"name": "local", "pacing": {"name": "pace", "smothing": 0.5}}, "did you mean 'runtime.pacing.smoothing'?"),
        ({"name": "local", "target_ess": 1.5}, "runtime.target_ess = 1.5 must be less than or equal to 1"),
    ],
)
def test_mistakes_about_pacing_are_named_in_one_sentence(runtime: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config({**BASE, "runtime": runtime})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
