"""Count down: ``37>34=`` is answered by ``37363534``. A generated task whose answers differ in length a hundredfold.

How far to count has the tail of a power law: more than n numbers with probability 1/n, to at most ``longest``. The
length of an answer is thus a property of its problem, known to nobody before it has been written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pydantic import PositiveInt

from vcpo.records import Grade, Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw


class CountingOptions(TaskOptions):
    """Options of the task."""

    longest: PositiveInt = 99
    shortest: PositiveInt = 2


class CountingTask:
    """Reward 1 when the response is exactly the two-digit numbers from the first to the second, modulo 100, else 0."""

    Options = CountingOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(CountingOptions, options)

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position)."""
        return _problem(f"train-{seed}-{position}", *train_draw(seed, position, self._numbers))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out problems, which no training seed and position reaches."""
        return [_problem(f"eval-{i}", *eval_draw(i, self._numbers)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison; surrounding text of any kind is wrong."""
        right = [completion == p.columns["answer"] for p, completion in zip(problems, completions, strict=True)]
        return [Grade(reward=float(correct), correct=correct) for correct in right]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The numbers."""
        return str(problem.columns["answer"])

    def _numbers(self, rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
        count = int(self.options.shortest / (1 - rng.random()))
        drawn = rng.randrange(100), min(count, self.options.longest)
        return drawn, drawn


def _problem(name: str, first: int, count: int) -> Problem:
    numbers = [f"{(first - i) % 100:02}" for i in range(count)]
    return Problem(name, f"{numbers[0]}>{numbers[-1]}=", {"answer": "".join(numbers)})
