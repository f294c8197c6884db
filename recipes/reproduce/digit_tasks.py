"""One more task on digits. Recipes name it by this file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from vcpo.records import Grade, Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw


class DistinctOptions(TaskOptions):
    """Options of the task."""

    digits: PositiveInt = Field(16, description="how many digits a prompt has")


class DistinctTask:
    """``31421=`` is answered by ``1234``: the digits that occur, in ascending order. Reward 1 for exactly that."""

    Options = DistinctOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(DistinctOptions, options)

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position)."""
        return self._problem(f"train-{seed}-{position}", train_draw(seed, position, self._draw))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out problems, which no training seed and position reaches."""
        return [self._problem(f"eval-{i}", eval_draw(i, self._draw)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison with the answer."""
        right = [text == problem.columns["answer"] for problem, text in zip(problems, completions, strict=True)]
        return [Grade(reward=float(correct), correct=correct) for correct in right]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The answer."""
        return str(problem.columns["answer"])

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        digits = "".join(rng.choices("0123456789", k=self.options.digits))
        return digits, digits

    def _problem(self, name: str, digits: str) -> Problem:
        return Problem(name, f"{digits}=", {"answer": "".join(sorted(set(digits)))})
