"""What the training loop may rely on in every task. A new built-in task is checked as soon as it is registered."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from vcpo.plugins import load_object
from vcpo.records import Grade, Problem
from vcpo.tasks.protocol import DemonstratedTask, Task
from vcpo.tasks.registry import BUILT_IN, make_task, task_params

# what a task that reads data may find in a row
ROW = {"question": "{i}+1?", "prompt": "{i}+1?", "answer": "#### {i}", "nums": [1, 2], "target": 3}

HOSTILE = {
    "empty": "",
    "blank": " \n\t",
    "NUL and surrogate": "\x00\ud800",
    "long digits": "9" * 100_000,
    "power tower": "9**9**9**9",
    "nested parentheses": "(" * 50_000,
    "nested boxes": "\\boxed{" * 20_000,
    "nested tags": "<answer>" * 20_000,
    "division by zero": "<answer>1/0</answer>",
    "code": "__import__('os').abort()",
    "wide digits": "\uff11\u0662\u00b3",
    "right-to-left": "\u202e321",
}


def options(name: str, directory: Path) -> dict[str, Any]:
    """Options with which a task can be made: none, or files of rows for a task that needs data."""
    fields = load_object(BUILT_IN[name]).Options.model_fields
    # one that needs nothing of the machine
    tool = {"sandbox": {"executor": "subprocess", "allow_unsafe": True, "warm": 0}} if "sandbox" in fields else {}
    if name == "verifiers":
        pytest.importorskip("verifiers", reason="make test-verifiers installs it")
        return {"environment": f"{Path(__file__).parents[1] / 'examples' / 'guess.py'}:Guess"}
    if "path" not in fields or name == "countdown":
        return tool
    for part, first in (("train", 0), ("eval", 100)):
        rows = (json.dumps(ROW).replace("{i}", str(i)) for i in range(first, first + 40))
        (directory / f"{part}.jsonl").write_text("\n".join(rows))
    return {"path": str(directory / "train.jsonl"), "eval_path": str(directory / "eval.jsonl"), **tool}


@pytest.fixture(params=BUILT_IN)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Task, Task]:
    """The same task made twice."""
    given = options(request.param, tmp_path)
    return make_task(request.param, given), make_task(request.param, given)


@pytest.fixture
def task(made: tuple[Task, Task]) -> Task:
    return made[0]


def test_it_is_a_task(task: Task) -> None:
    assert isinstance(task, Task)


def test_a_training_problem_is_a_function_of_position_and_seed(made: tuple[Task, Task]) -> None:
    positions = [7, 0, 120, 3, 7]
    forwards = [made[0].train_problem(p, 1) for p in positions]
    backwards = [made[1].train_problem(p, 1) for p in reversed(positions)]
    assert forwards == backwards[::-1]


def test_seeds_give_different_streams(task: Task) -> None:
    assert [task.train_problem(i, 0).prompt for i in range(20)] != [task.train_problem(i, 1).prompt for i in range(20)]


def test_problems_have_an_id_and_a_prompt(task: Task) -> None:
    for problem in [*(task.train_problem(i, 0) for i in range(5)), *task.eval_problems(5)]:
        assert isinstance(problem, Problem)
        assert problem.id
        assert problem.prompt


def test_evaluation_problems_are_always_the_same_and_grow_at_the_end(made: tuple[Task, Task]) -> None:
    five = made[0].eval_problems(5)
    assert len(five) == 5
    assert made[1].eval_problems(5) == five
    assert made[1].eval_problems(3) == five[:3]
    assert len({problem.id for problem in five}) == 5


def test_training_meets_no_evaluation_problem(task: Task) -> None:
    held_out = [problem.prompt for problem in task.eval_problems(20)]
    assert all(task.train_problem(i, 0).prompt not in held_out for i in range(100))


def test_grades_are_finite_and_come_one_per_completion(task: Task) -> None:
    problems = [task.train_problem(i, 0) for i in range(3)]
    grades = task.grade(problems, ["1", "", "1+2"])
    assert len(grades) == 3
    for grade in grades:
        assert isinstance(grade, Grade)
        assert grade.reward is None or math.isfinite(grade.reward)
    assert task.grade([], []) == []


def test_a_grade_does_not_depend_on_the_other_completions(task: Task) -> None:
    problems = [task.train_problem(i, 0) for i in range(4)]
    texts = ["1", "1+2", "", "\\boxed{2}"]
    together = task.grade(problems, texts)
    assert together == [task.grade([p], [t])[0] for p, t in zip(problems, texts, strict=True)]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_completions_are_wrong_and_quickly_so(task: Task, text: str) -> None:
    start = time.process_time()
    grade = task.grade([task.train_problem(0, 0)], [text])[0]
    assert time.process_time() - start < 2
    assert not grade.correct
    assert not grade.reward


def test_demonstrations_are_right(task: Task) -> None:
    if not isinstance(task, DemonstratedTask):
        pytest.skip("this task demonstrates nothing")
    problems = [task.train_problem(i, 0) for i in range(30)]
    texts = [task.demonstration(problem, random.Random(i)) for i, problem in enumerate(problems)]
    assert all(grade.correct and grade.reward == 1 for grade in task.grade(problems, texts))


@pytest.mark.parametrize("name", BUILT_IN)
def test_options_are_described_and_a_misspelt_one_is_corrected(name: str) -> None:
    fields = load_object(BUILT_IN[name]).Options.model_fields
    assert [key for key, info in fields.items() if not info.description] == []
    for key in fields:
        with pytest.raises(ValueError, match=f"unknown key task.{key}z; did you mean "):
            task_params(name, {f"{key}z": 1})
