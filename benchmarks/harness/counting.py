"""Count down: ``03b=`` is answered by ``03b02b01b``. A generated task whose answers differ thirtyfold in length.

How far to count has the tail of a power law: at least n numbers with probability ``shortest`` / n, at most
``longest``. The length of an answer is a property of its problem, known to nobody before it has been written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from vcpo.records import Grade, Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw

MARKS = "abcdefghij"


class CountingOptions(TaskOptions):
    """Options of the task."""

    shortest: Annotated[int, Field(ge=1, le=99)] = 2
    longest: Annotated[int, Field(ge=1, le=99)] = 60


class CountingTask:
    """Reward 1 when the response is exactly the two-digit numbers from the given one to 1, each marked, else 0."""

    Options = CountingOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(CountingOptions, options)

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position)."""
        return _problem(f"train-{seed}-{position}", *train_draw(seed, position, self._draw))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out problems, which no training seed and position reaches."""
        return [_problem(f"eval-{i}", *eval_draw(i, self._draw)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison; surrounding text of any kind is wrong."""
        right = [completion == p.columns["answer"] for p, completion in zip(problems, completions, strict=True)]
        return [Grade(reward=float(correct), correct=correct) for correct in right]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The numbers."""
        return str(problem.columns["answer"])

    def _draw(self, rng: random.Random) -> tuple[tuple[int, str], tuple[int, str]]:
        count = int(self.options.shortest / (1 - rng.random()))
        drawn = min(count, self.options.longest), rng.choice(MARKS)
        return drawn, drawn


def _problem(name: str, count: int, mark: str) -> Problem:
    numbers = [f"{number:02}{mark}" for number in range(count, 0, -1)]
    return Problem(name, f"{numbers[0]}=", {"answer": "".join(numbers)})
