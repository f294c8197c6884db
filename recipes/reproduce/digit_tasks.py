"""Two more tasks on digits, for which a policy can collapse: reversal and addition. Named in recipes by this file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from vcpo.records import Grade, Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw


class DigitOptions(TaskOptions):
    """Options of both tasks."""

    digits: PositiveInt = Field(24, description="how many digits a number has")


class _DigitTask:
    """Reward 1 for exactly the answer, else 0."""

    Options = DigitOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(DigitOptions, options)

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

    def _draw(self, rng: random.Random) -> tuple[str, tuple[str, str]]:
        raise NotImplementedError

    def _problem(self, name: str, drawn: tuple[str, str]) -> Problem:
        prompt, answer = drawn
        return Problem(name, prompt, {"answer": answer})

    def _number(self, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=self.options.digits))


class ReversalTask(_DigitTask):
    """``3142=`` is answered by ``2413``."""

    def _draw(self, rng: random.Random) -> tuple[str, tuple[str, str]]:
        digits = self._number(rng)
        return digits, (f"{digits}=", digits[::-1])


class AdditionTask(_DigitTask):
    """``5721=`` is answered by ``240``: 25 + 17 = 042 with last digits first, the operands' digits in turn."""

    def _draw(self, rng: random.Random) -> tuple[str, tuple[str, str]]:
        one, other = self._number(rng), self._number(rng)
        total = str(int(one[::-1]) + int(other[::-1])).zfill(self.options.digits + 1)[::-1]
        # the two operands take turns, so that what belongs together stands together
        pairs = "".join(a + b for a, b in zip(one, other, strict=True))
        return pairs, (f"{pairs}=", total)
