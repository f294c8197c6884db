"""Which sampler gets which group, and what happens to the groups of one that dies. No process is started here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.pipeline.assignment import Assignment
from vcpo.pipeline.rollouts import StartedGroup, response_seed
from vcpo.records import GenerationRequest, Problem, StopReason, Trajectory

MEMBERS = 2


def group(number: int) -> StartedGroup:
    return StartedGroup(number, Problem(str(number), ""), np.array([1]), number + 1)


def response(number: int, index: int) -> Trajectory:
    nothing = np.zeros(0)
    return Trajectory(
        number, index, nothing.astype(int), nothing.astype(int), nothing.astype(bool), nothing.astype(np.float32),
        nothing.astype(int), StopReason.EOS, 0,
    )  # fmt: skip


def assignment(samplers: int, groups: int) -> Assignment:
    made = Assignment(samplers, MEMBERS, seed=7)
    made.add(group(number) for number in range(groups))
    return made


def sent(made: Assignment) -> list[tuple[int, int]]:
    """(sampler, group) of what is sent now."""
    return [(sampler, requests[0].group_id) for sampler, requests in made.sends()]


def finish(made: Assignment, sampler: int, number: int) -> None:
    for index in range(MEMBERS):
        made.arrived(sampler, response(number, index))


def test_a_group_goes_to_the_sampler_with_the_fewest_responses_to_decode() -> None:
    made = assignment(2, 3)
    assert sent(made) == [(0, 0), (1, 1), (0, 2)]
    assert sent(made) == []
    made.arrived(0, response(0, 0))
    made.arrived(0, response(2, 1))
    made.arrived(0, response(0, 1))
    made.add([group(3)])
    assert sent(made) == [(0, 3)]  # one response left there, two at the other


def test_the_last_response_of_a_group_brings_all_of_them_with_the_seeds_of_the_group() -> None:
    made = assignment(1, 1)
    ((_, requests),) = made.sends()
    assert [request.seed for request in requests] == [response_seed(7, 0, index) for index in range(MEMBERS)]
    assert made.arrived(0, response(0, 1)) is None
    whole = made.arrived(0, response(0, 0))
    assert whole is not None
    assert whole[0].id == 0
    assert [t.index for t in whole[1]] == [1, 0]
    assert made.groups() == []


def test_what_was_not_asked_for_is_refused() -> None:
    made = assignment(2, 1)
    made.sends()
    made.arrived(0, response(0, 0))
    for sampler, number, index in ((0, 0, 0), (1, 0, 1), (0, 9, 0)):
        with pytest.raises(RuntimeError, match="was not asked for"):
            made.arrived(sampler, response(number, index))


def test_only_what_a_dead_sampler_had_not_handed_in_is_tried_again_and_others_take_it() -> None:
    made = assignment(2, 2)
    made.sends()
    made.arrived(0, response(0, 1))
    assert made.died(0) == []
    ((sampler, requests),) = made.sends()
    assert (sampler, [request.index for request in requests]) == (1, [0])
    assert made.arrived(1, response(0, 0)) is not None


def test_without_another_sampler_the_work_waits_until_the_new_one_is_ready() -> None:
    made = assignment(1, 1)
    made.sends()
    made.died(0)
    assert sent(made) == []
    made.ready(0)
    assert sent(made) == [(0, 0)]


def test_on_their_last_try_groups_are_alone_one_after_the_other_and_the_culprit_is_isolated() -> None:
    made = assignment(1, 3)
    for _ in range(2):  # the first try and the second, together
        assert len(sent(made)) == 3
        assert made.died(0) == []
        made.ready(0)
    made.add([group(3)])
    assert sent(made) == [(0, 0)]
    assert sent(made) == []
    finish(made, 0, 0)
    assert sent(made) == [(0, 1)]
    assert made.died(0) == [1]
    made.ready(0)
    assert sent(made) == [(0, 2)]
    finish(made, 0, 2)
    assert sent(made) == [(0, 3)]  # nothing is on its last try any more


def test_one_sampler_is_kept_for_last_tries_while_the_others_go_on() -> None:
    made = assignment(2, 2)
    made.sends()
    made.died(0)
    assert sent(made) == [(1, 0)]
    made.died(1)  # group 0 for the second time, group 1 for the first
    made.ready(0)
    made.ready(1)
    made.add([group(2), group(3)])
    assert sent(made) == [(0, 0), (1, 1), (1, 2), (1, 3)]
    finish(made, 0, 0)
    made.add([group(4)])
    assert sent(made) == [(0, 4)]


@settings(deadline=None)
@given(
    samplers=st.integers(1, 3),
    poisoned=st.sets(st.integers(0, 11), max_size=3),
    draw=st.data(),
)
def test_every_group_ends_once_and_only_the_poisoned_ones_are_isolated(
    samplers: int, poisoned: set[int], draw: st.DataObject
) -> None:
    """A sampler that holds a poisoned group may die of it before it finishes anything, or after some others."""
    made = assignment(samplers, 12)
    held: dict[int, list[GenerationRequest]] = {index: [] for index in range(samplers)}
    finished, isolated = list[int](), list[int]()
    choose: Callable[..., int] = lambda options: draw.draw(st.sampled_from(options))  # noqa: E731
    for _ in range(2000):
        for index, requests in made.sends():
            held[index] += requests
        busy = [index for index, requests in held.items() if requests]
        if not busy:
            break
        sampler = choose(busy)
        request = choose(held[sampler])
        if request.group_id in poisoned:
            isolated += made.died(sampler)
            held[sampler] = []
            made.ready(sampler)
            continue
        held[sampler].remove(request)
        if made.arrived(sampler, response(request.group_id, request.index)) is not None:
            finished.append(request.group_id)
    assert made.groups() == []
    assert sorted(isolated) == sorted(poisoned)
    assert sorted(finished) == sorted(set(range(12)) - poisoned)
