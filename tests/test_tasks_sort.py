"""The sort task."""

from __future__ import annotations

import pytest

from vcpo.errors import UserError
from vcpo.records import Problem
from vcpo.tasks.sort import SortTask

PROBLEM = Problem("p", "3142=", {"answer": "1234"})


def test_prompt_is_digits_and_separator_and_answer_is_the_sorted_digits() -> None:
    problem = SortTask(digits=24).train_problem(5, 1)
    digits, separator = str(problem.prompt)[:24], str(problem.prompt)[24:]
    assert digits.isdecimal()
    assert separator == "="
    assert problem.columns == {"answer": "".join(sorted(digits))}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("1234", 1.0), ("1243", 0.0), ("123", 0.0), ("12344", 0.0), (" 1234", 0.0), ("1234\n", 0.0), ("", 0.0)],
)
def test_only_the_exact_answer_is_rewarded(completion: str, reward: float) -> None:
    grade = SortTask().grade([PROBLEM], [completion])[0]
    assert (grade.reward, grade.correct) == (reward, reward == 1.0)


def test_training_never_meets_a_held_out_problem_even_in_a_small_space() -> None:
    task = SortTask(digits=2)
    train = {task.train_problem(i, seed).prompt for i in range(400) for seed in range(3)}
    assert train.isdisjoint(p.prompt for p in task.eval_problems(50))


def test_digits_are_uniform() -> None:
    text = "".join(str(SortTask().train_problem(i, 0).prompt)[:24] for i in range(500))
    assert all(abs(text.count(digit) - 1200) < 150 for digit in "0123456789")


@pytest.mark.parametrize("options", [{"digits": 0}, {"digits": "4"}, {"digits": 4.0}, {"separator": ""}, {"digitz": 4}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"task\.(digits|separator|digitz)"):
        SortTask(**options)
