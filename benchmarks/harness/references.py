"""Whether graders agree with published solutions: each against its own answer, and against other problems' answers.

The files are the public ones: ``gsm8k_test.jsonl`` (question, answer with a worked solution), ``math500_test.jsonl``
and ``aime24_test.jsonl`` (problem, solution, answer). They are read as a run reads them, by the tasks themselves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.records import Problem
from vcpo.tasks.dataset import GOLD, DatasetTask
from vcpo.tasks.registry import make_task


@dataclass(frozen=True)
class Reference:
    """A file of solutions: the task that reads it, and the column with the solution.

    known: solutions that do not grade 1 against their own answer, by the number of their row, and why.
    """

    file: str
    task: str
    solution: str
    known: dict[int, str]


REFERENCES = (
    Reference("gsm8k_test.jsonl", "gsm8k", "answer", {}),
    Reference("math500_test.jsonl", "math", "solution", {}),
    Reference(
        "aime24_test.jsonl",
        "math",
        "solution",
        {1: "the solution gives its answer only in running text ('= 204'), without a box: no answer is found"},
    ),
)


def check(reference: Reference, data: Path, shuffles: int) -> dict[str, Any]:
    """The counts and every exception. ``unexpected`` counts the exceptions that have no known reason."""
    path = str(data / reference.file)
    task = make_task(reference.task, {"path": path, "eval_path": path})
    assert isinstance(task, DatasetTask)
    problems = task.eval_problems(10**9)
    solutions = [str(problem.columns[reference.solution]) for problem in problems]
    own = _own(reference, task, problems, solutions)
    others = _others(task, problems, solutions, shuffles)
    unexpected = sum(case["reason"] is None for case in own) + len(others["not_0_although_another_answer"])
    return {
        "file": reference.file,
        "task": reference.task,
        "grader": task.options.grader,
        "solutions": len(problems),
        "grade_1_against_their_own_answer": len(problems) - len(own),
        "exceptions": own,
        "shuffled": others,
        "unexpected": unexpected,
    }


def _own(
    reference: Reference, task: DatasetTask, problems: list[Problem], solutions: list[str]
) -> list[dict[str, Any]]:
    return [
        {
            "row": row,
            "right": problem.columns[GOLD],
            "read": task.answer_of(problem, solution),
            "reward": grade.reward,
            "reason": reference.known.get(row),
        }
        for row, (problem, solution, grade) in enumerate(
            zip(problems, solutions, task.grade(problems, solutions), strict=True), start=1
        )
        if grade.reward != 1
    ]


def _others(task: DatasetTask, problems: list[Problem], solutions: list[str], shuffles: int) -> dict[str, Any]:
    """Solutions against the answers of other problems, in several random orders.

    Pairs with the same answer by chance are left out: the same text or number, or two texts of which the grader says so
    in both directions (all of which are listed, for a reader to judge).
    """
    answers = [str(problem.columns[GOLD]) for problem in problems]
    same = 0
    equal: set[tuple[str, str]] = set()
    wrong: list[dict[str, Any]] = []
    pairs = 0
    for seed in range(shuffles):
        order = list(range(len(problems)))
        random.Random(f"shuffle/{seed}").shuffle(order)
        drawn = [(i, j) for i, j in enumerate(order) if i != j]
        pairs += len(drawn)
        grades = task.grade([problems[j] for _, j in drawn], [solutions[i] for i, _ in drawn])
        for (i, j), grade in zip(drawn, grades, strict=True):
            if grade.reward == 0:
                continue
            if answers[i] == answers[j]:
                same += 1
            elif grade.reward == 1 and _says_equal(task, problems[i], problems[j]):
                equal.add((min(answers[i], answers[j]), max(answers[i], answers[j])))
            else:
                wrong.append(
                    {"solution": i + 1, "answers": [answers[i], answers[j]], "row": j + 1, "reward": grade.reward}
                )
    return {
        "orders": shuffles,
        "pairs": pairs,
        "same_answer_by_chance": same,
        "equal_answers_in_other_words": sorted(equal),
        "not_0_although_another_answer": wrong,
    }


def _says_equal(task: DatasetTask, one: Problem, other: Problem) -> bool:
    boxes = [f"\\boxed{{{problem.columns[GOLD]}}}" for problem in (other, one)]
    return all(grade.reward == 1 for grade in task.grade([one, other], boxes))
