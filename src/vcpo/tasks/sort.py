"""Sort digits: ``3142=`` is answered by ``1234``. A generated task for small models with a character tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from vcpo.records import Grade, Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw


class SortOptions(TaskOptions):
    """Options of the task ``sort``."""

    digits: PositiveInt = Field(24, description="how many digits a prompt has")
    separator: str = Field("=", min_length=1, description="what ends the prompt")


class SortTask:
    """Reward 1 when the response is exactly the prompt's digits in ascending order, else 0."""

    Options = SortOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(SortOptions, options)

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position)."""
        return self._problem(f"train-{seed}-{position}", train_draw(seed, position, self._digits))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out problems, which no training seed and position reaches."""
        return [self._problem(f"eval-{i}", eval_draw(i, self._digits)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison with the sorted digits; surrounding text of any kind is wrong."""
        grades = []
        for problem, completion in zip(problems, completions, strict=True):
            correct = completion == problem.columns["answer"]
            grades.append(Grade(reward=float(correct), correct=correct))
        return grades

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The whole response, if it is not empty."""
        return completion or None

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The sorted digits."""
        return str(problem.columns["answer"])

    def _digits(self, rng: random.Random) -> tuple[str, str]:
        digits = "".join(rng.choices("0123456789", k=self.options.digits))
        return digits, digits

    def _problem(self, name: str, digits: str) -> Problem:
        return Problem(name, digits + self.options.separator, {"answer": "".join(sorted(digits))})
