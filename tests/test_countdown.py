"""The countdown task: solvable problems, exact grading, and rows from files."""

from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.errors import UserError
from vcpo.records import Problem
from vcpo.tasks.arithmetic import evaluate
from vcpo.tasks.countdown import CountdownTask
from vcpo.tasks.countdown_solutions import solve


def problem(numbers: list[int], target: int) -> Problem:
    return Problem("p", "", {"numbers": numbers, "target": target})


def reward(task: CountdownTask, numbers: list[int], target: int, completion: str) -> float | None:
    return task.grade([problem(numbers, target)], [completion])[0].reward


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reachable(numbers: list[int]) -> set[Fraction]:
    """Every value that all numbers can be combined to, by joining partitions: another way than that of ``solve``."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values: set[Fraction] = set()
    indices = range(len(numbers))
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(indices, size):
            left = reachable([numbers[i] for i in chosen])
            right = reachable([numbers[i] for i in indices if i not in chosen])
            for a, b in itertools.product(left, right):
                values |= {a + b, a - b, a * b}
                if b != 0:
                    values.add(a / b)
    return values


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("8/(3-8/3)", 1.0),
        (" 8/(3-8/3)\n", 1.0),
        ("8*3+8-8", 0.1),  # reaches 24 with numbers that were not given
        ("8*3", 0.1),  # leaves numbers out
        ("8+8+3+3", 0.1),
        ("8*3*(8/8)+3-3", 0.1),  # uses one too often
        ("8/(3-8/3)=24", 0.0),
        ("the answer is 8/(3-8/3)", 0.0),
        ("8/(3-3)+8", 0.0),
        ("9**9**9**9", 0.0),
        ("", 0.0),
    ],
)
def test_short_style_takes_the_whole_response_as_the_expression(completion: str, expected: float) -> None:
    assert reward(CountdownTask(format_reward=0.1), [8, 3, 8, 3], 24, completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("I add. <answer>1+2</answer>", 1.0),
        ("<answer>1*2</answer> no: <answer>(1 + 2)</answer> done", 1.0),
        ("<answer>1+2</answer> or <answer>1*2</answer>", 0.0),
        ("<answer>1*2</answer><answer>1+2", 0.0),
        ("1+2", 0.0),
        ("<answer></answer>", 0.0),
        ("</answer>1+2<answer>", 0.0),
        pytest.param("<answer>" * 10_000 + "1+2</answer>", 1.0, id="many openings"),
    ],
)
def test_instruction_styles_take_the_last_answer_tag(completion: str, expected: float) -> None:
    for style in ("text", "chat"):
        assert reward(CountdownTask(style=style), [1, 2], 3, completion) == expected


def test_a_wrong_answer_has_no_reward_by_default() -> None:
    grade = CountdownTask().grade([problem([1, 2], 3)], ["1*2"])[0]
    assert (grade.reward, grade.correct, grade.parts) == (0.0, False, {"format": 1.0})


@pytest.mark.parametrize("numbers", [2, 3, 4, 6])
def test_every_generated_problem_is_solved_by_its_demonstration(numbers: int) -> None:
    task = CountdownTask(numbers=numbers, max_number=25, max_target=60)
    problems = [task.train_problem(i, 3) for i in range(60)] + task.eval_problems(20)
    answers = [task.demonstration(p, random.Random(0)) for p in problems]
    assert all(grade.correct for grade in task.grade(problems, answers))
    assert all(1 <= p.columns["target"] <= 60 and max(p.columns["numbers"]) <= 25 for p in problems)


def test_training_never_meets_a_held_out_problem_even_in_a_small_space() -> None:
    task = CountdownTask(numbers=2, max_number=4, max_target=8)

    def key(p: Problem) -> tuple[tuple[int, ...], int]:
        return tuple(sorted(p.columns["numbers"])), p.columns["target"]

    train = {key(task.train_problem(i, seed)) for i in range(200) for seed in range(3)}
    assert train.isdisjoint(key(p) for p in task.eval_problems(100))


def test_too_few_different_problems_to_hold_some_out_is_said() -> None:
    with pytest.raises(UserError, match="too few different problems"):
        CountdownTask(numbers=2, max_number=1, max_target=1).eval_problems(1)


def test_unreachable_targets_are_said() -> None:
    with pytest.raises(UserError, match=r"raise task\.max_target"):
        CountdownTask(numbers=6, max_number=1000, max_target=1).train_problem(0, 0)


def test_short_prompt() -> None:
    task = CountdownTask(numbers=3)
    p = task.train_problem(0, 0)
    a, b, c = p.columns["numbers"]
    assert p.prompt == f"{a},{b},{c}>{p.columns['target']}="


def test_instruction_prompts_name_numbers_and_target() -> None:
    text = CountdownTask(style="text").train_problem(0, 0)
    chat = CountdownTask(style="chat").train_problem(0, 0)
    assert str(text.columns["numbers"]) in text.prompt
    assert chat.prompt == [{"role": "user", "content": str(text.prompt).rstrip("\n")}]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 40))
@settings(deadline=None)
def test_search_finds_a_solution_exactly_where_there_is_one(numbers: list[int], target: int) -> None:
    found = solve(numbers, target)
    assert (found is not None) == (target in reachable(numbers))
    if found is not None:
        result = evaluate(found)
        assert result.value == target
        assert sorted(result.numbers) == sorted(numbers)


def test_plain_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"nums": [3, 5], "target": 15}, {"numbers": [2, 2], "target": 4})
    task = CountdownTask(path=path, eval_path=path)
    assert [p.prompt for p in task.eval_problems(9)] == ["3,5>15=", "2,2>4="]
    assert sorted(str(task.train_problem(i, 0).prompt) for i in range(2)) == ["2,2>4=", "3,5>15="]
    first = task.eval_problems(1)[0]
    assert task.demonstration(first, random.Random(0)) == "3*5"


def test_verl_rows_with_their_own_prompt(tmp_path: Path) -> None:
    message = {"role": "user", "content": "Make 15 of 3 and 5."}
    row = {
        "data_source": "countdown",
        "prompt": [message],
        "reward_model": {"style": "rule", "ground_truth": {"target": 15, "numbers": [3, 5]}},
        "extra_info": {"index": 0},
    }
    path = write_rows(tmp_path / "rows.jsonl", row)
    task = CountdownTask(path=path, eval_path=path, style="given")
    p = task.train_problem(0, 0)
    assert p.prompt == [message]
    assert p.columns["extra_info"] == {"index": 0}
    assert task.grade([p, p], ["<answer>5*3</answer>", "15"])[0].correct
    assert not task.grade([p], ["15"])[0].correct


def test_a_row_without_solution_cannot_be_demonstrated(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"nums": [1, 1], "target": 50})
    task = CountdownTask(path=path)
    with pytest.raises(UserError, match=r"rows\.jsonl:1.*no solution"):
        task.demonstration(task.train_problem(0, 0), random.Random(0))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"target": 5}, "row 2: has numbers that must be a list"),
        ({"nums": [1, "2"], "target": 5}, "row 2: has nums that must be a list"),
        ({"nums": [1, 2]}, "row 2: has a target that must be a whole number, not None"),
        ({"reward_model": None}, "row 2: column 'reward_model' has no 'ground_truth' in it: it is None"),
        ({"reward_model": {"ground_truth": "15"}}, r"row 2: column 'reward_model\.ground_truth' must hold"),
        ({"reward_model": {"ground_truth": {"numbers": [1]}}}, r"'reward_model\.ground_truth' has a target"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"nums": [3, 5], "target": 15}, row)
    with pytest.raises(UserError, match=sentence):
        CountdownTask(path=path)
