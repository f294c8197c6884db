"""Users' reward functions: how they are called, combined, and refused."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vcpo.errors import UserError
from vcpo.records import Answer, Grade, Problem, StopReason
from vcpo.tasks.length_penalty import SoftOverlongPunishment
from vcpo.tasks.rewards import RewardFunctions, split_reward

THIS = __name__
PROBLEMS = [Problem("p0", "2+2=", {"answer": "4", "level": 1}), Problem("p1", "3+3=", {"answer": "6"})]
COMPLETIONS = ["4", "five"]
ANSWERS = [Answer("4", [4, 0], StopReason.EOS), Answer("five", [5, 6, 7, 8], StopReason.LENGTH)]
GRADES = [Grade(1.0, correct=True, parts={"format": 1.0}), Grade(0.0)]
calls: list[dict[str, Any]] = []
arrived: list[str] = []
both_arrived: list[asyncio.Event] = []


def record(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    calls.append({"prompts": prompts, "completions": completions, **columns})
    return [0.0] * len(completions)


def matches(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def short(completions: list[str], limit: int = 2) -> list[float]:
    return [float(len(c) <= limit) for c in completions]


def first_only(completions: list[str]) -> list[float | None]:
    return [0.5] + [None] * (len(completions) - 1)


def no_opinion(completions: list[str]) -> list[float | None]:
    return [None] * len(completions)


def array(completions: list[str]) -> Any:
    return np.arange(len(completions), dtype=np.float32)


def numpy_scalars(completions: list[str]) -> list[Any]:
    return [np.float32(0.25), True]


async def meets_other(completions: list[str], name: str = "one") -> list[float]:
    arrived.append(name)
    if not both_arrived:
        both_arrived.append(asyncio.Event())
        await asyncio.wait_for(both_arrived[0].wait(), timeout=10)
    else:
        both_arrived[0].set()
    return [float(len(arrived))] * len(completions)


async def meets_one(completions: list[str]) -> list[float]:
    return await meets_other(completions, "two")


def raises(completions: list[str]) -> list[float]:
    raise KeyError("the scoring service is down")


async def raises_later(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    raise KeyError("the scoring service is down")


def one_too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def not_a_number(completions: list[str]) -> list[float]:
    return [1.0, float("nan")]


def infinite(completions: list[str]) -> list[float]:
    return [float("-inf"), 1.0]


def words(completions: list[str]) -> list[str]:
    return ["1", "good"]


def single(completions: list[str]) -> float:
    return 1.0


def wants_missing(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0] * len(completions)


NOT_CALLABLE = 3


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    for memory in (calls, arrived, both_arrived):
        memory.clear()


def apply(*names: str, weights: list[float] | None = None, problems: list[Problem] = PROBLEMS) -> list[Grade]:
    functions = RewardFunctions([f"{THIS}:{name}" for name in names], weights)
    return functions.apply(problems, ANSWERS, GRADES)


def test_this_module_is_importable_by_its_name() -> None:
    assert sys.modules[THIS].record is record


def test_columns_are_lists_over_the_union_of_keys_with_none_where_missing() -> None:
    apply("record")
    assert calls == [
        {
            "prompts": ["2+2=", "3+3="],
            "completions": COMPLETIONS,
            "completion_ids": [[4, 0], [5, 6, 7, 8]],
            "stop_reason": ["eos", "length"],
            "answer": ["4", "6"],
            "level": [1, None],
        }
    ]


def test_a_function_without_kwargs_gets_only_the_columns_it_names() -> None:
    assert [g.reward for g in apply("matches")] == [1.0, 0.0]


def test_a_parameter_with_a_default_that_is_no_column_keeps_its_default() -> None:
    assert [g.reward for g in apply("short")] == [1.0, 0.0]


def test_chat_prompts_get_chat_completions() -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    apply("record", problems=[Problem("p0", prompt), Problem("p1", prompt)])
    assert calls[0]["prompts"] == [prompt, prompt]
    assert calls[0]["completions"] == [[{"role": "assistant", "content": text}] for text in COMPLETIONS]


def test_rewards_are_the_weighted_sum_and_replace_the_tasks_own() -> None:
    grades = apply("matches", "short", weights=[2.0, 0.5])
    assert [g.reward for g in grades] == [2.5, 0.0]


def test_correct_stays_the_tasks_and_parts_hold_each_value_unweighted() -> None:
    grades = apply("matches", "short", weights=[2.0, 0.5])
    assert [g.correct for g in grades] == [True, False]
    assert grades[0].parts == {"format": 1.0, "matches": 1.0, "short": 1.0}


def test_none_of_one_function_is_left_out_of_the_sum() -> None:
    grades = apply("first_only", "short")
    assert [g.reward for g in grades] == [1.5, 0.0]
    assert "first_only" not in grades[1].parts


def test_none_of_every_function_means_no_reward_rather_than_zero() -> None:
    assert [g.reward for g in apply("first_only", "no_opinion")] == [0.5, None]


def test_without_functions_grades_come_back_as_they_are() -> None:
    assert apply() == GRADES


def test_arrays_and_numpy_scalars_are_numbers() -> None:
    assert [g.reward for g in apply("array", "numpy_scalars")] == [0.25, 2.0]


def test_async_functions_of_one_batch_run_at_the_same_time() -> None:
    # the first to arrive waits for the second: run one after the other they would time out
    grades = apply("meets_other", "meets_one", "matches")
    assert sorted(arrived) == ["one", "two"]
    assert [g.reward for g in grades] == [5.0, 4.0]


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_an_exception_keeps_its_type_and_message_and_names_the_function(name: str) -> None:
    with pytest.raises(KeyError, match="the scoring service is down") as error:
        apply(name)
    assert error.value.__notes__ == [f"raised by reward function {name!r}"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("one_too_few", "'one_too_few' returned 1 values for 2 completions"),
        ("not_a_number", "'not_a_number' returned nan for completion 1"),
        ("infinite", "'infinite' returned -inf for completion 0"),
        ("words", "'words' returned '1' for completion 0"),
        ("single", "'single' returned a value of type float; it must return a list"),
        ("wants_missing", "'wants_missing' has a parameter 'solution'"),
    ],
)
def test_bad_values_name_function_index_and_value(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        apply(name)


def test_functions_of_the_same_name_keep_separate_parts(tmp_path: Path) -> None:
    specs = []
    for index in (1, 2):
        file = tmp_path / f"rewards_{index}.py"
        file.write_text(f"def score(completions):\n    return [{index}.0] * len(completions)\n")
        specs.append(f"{file}:score")
    grades = RewardFunctions(specs).apply(PROBLEMS, ANSWERS, [Grade(0.0), Grade(0.0)])
    assert grades[0] == Grade(3.0, parts={specs[0]: 1.0, specs[1]: 2.0})


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UserError, match="is of type int, not a function"):
        apply("NOT_CALLABLE")


def test_a_function_listed_twice_is_refused() -> None:
    with pytest.raises(UserError, match="listed twice"):
        apply("short", "short")


def test_weights_must_be_as_many_as_functions() -> None:
    with pytest.raises(UserError, match="2 entries for 1 reward_funcs"):
        apply("short", weights=[1.0, 2.0])


# built-in parts


def composed(*rewards: Any, weights: list[float] | None = None, grades: list[Grade] = GRADES) -> list[Grade]:
    problems = [Problem("p0", "2+2=", {"gold": "4"}), Problem("p1", "3+3=", {"gold": "6"})]
    return RewardFunctions(list(rewards), weights, max_completion_length=10).apply(problems, ANSWERS, grades)


def test_the_tasks_own_reward_is_one_part_among_others() -> None:
    grades = composed("task", f"{THIS}:short", weights=[2.0, 0.5])
    assert grades == [
        Grade(2.5, correct=True, parts={"format": 1.0, "task": 1.0, "short": 1.0}),
        Grade(0.0, parts={"task": 0.0, "short": 0.0}),
    ]


def test_a_grader_is_a_part_by_its_name() -> None:
    assert [g.reward for g in composed("number", {"name": "exact", "ignore_case": True})] == [2.0, 0.0]
    assert composed("exact")[0].parts == {"format": 1.0, "exact": 1.0}
    with pytest.raises(UserError, match="reward 'choice': the right answer '4' must be one of the letters"):
        composed("choice")
    with pytest.raises(UserError, match="'exact' has a parameter 'gold', which is no column"):
        apply_built_in("exact")


def apply_built_in(*names: str) -> list[Grade]:
    return RewardFunctions(list(names)).apply(PROBLEMS, ANSWERS, GRADES)


def test_what_the_task_could_not_judge_has_no_reward_whatever_the_other_parts_say() -> None:
    unjudged = [Grade(None, failure="no paper"), Grade(0.0)]
    grades = composed("task", {"name": "overlong", "cache": 9}, grades=unjudged)
    assert (grades[0].reward, grades[0].failure) == (None, "no paper")
    assert grades[1].reward == pytest.approx(-3 / 9)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (11, -1.0)]
)
def test_the_soft_overlong_punishment_is_that_of_its_formula(tokens: int, penalty: float) -> None:
    # L = 10, c = 4: (6 - n) / 4 between 6 and 10
    assert SoftOverlongPunishment(max_length=10, cache=4)([[0] * tokens]) == [penalty]


def test_the_overlong_penalty_takes_its_length_from_the_run_and_a_fifth_as_its_cache() -> None:
    function = SoftOverlongPunishment(max_length=10)
    assert [function([[0] * n])[0] for n in (8, 9, 10)] == [0.0, -0.5, -1.0]
    assert [g.parts.get("overlong") for g in composed("task", "overlong")] == [0.0, 0.0]
    assert [g.parts.get("overlong") for g in composed("task", {"name": "overlong", "max_length": 3})] == [0.0, -1.0]
    assert SoftOverlongPunishment(max_length=10, cache=0)([[0] * 10, [0] * 11]) == [0.0, -1.0]
    with pytest.raises(UserError, match="cache=11, more than max_length=10"):
        composed({"name": "overlong", "cache": 11})


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("tsak", "did you mean 'task'"),
        ("mine.py", "'mine.py' must be written module:name or file.py:name"),
        ({"cache": 3}, "needs a name"),
        ({"name": "task", "weight": 2}, "reward 'task' takes no options, but has weight"),
        ({"name": f"{THIS}:short", "limit": 2}, "takes no options, but has limit"),
        ({"name": "overlong", "cash": 3}, "unknown key reward.reward_funcs.overlong.cash; did you mean 'cache'"),
        ({"name": "number", "tolerance": 2}, "reward.reward_funcs.number.tolerance = 2 must be less than 1"),
    ],
)
def test_a_wrong_part_is_refused_in_one_sentence(reward: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        split_reward(reward)
    with pytest.raises(UserError, match=re.escape(sentence)):
        composed(reward)
