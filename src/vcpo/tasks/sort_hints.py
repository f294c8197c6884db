"""Sort digits with hints from an environment that takes its time. A generated multi-turn task for small models.

``3142=`` may be answered by ``1324?``: the environment waits, as a tool would, and answers with ``>`` and as much of
the attempt as is right, here ``>1``; the model goes on from there, ``234``, and may ask again or end. What counts is
the text after the last ``>``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from vcpo.errors import UserError
from vcpo.records import Grade, Problem
from vcpo.tasks.environment import Observation, Turn, TurnRules
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.streams import eval_draw, train_draw

ASK = "?"
HINT = ">"
SEPARATOR = "="


class SortHintsOptions(TaskOptions):
    """Options of the task ``sort_hints``."""

    digits: PositiveInt = Field(8, description="how many digits a prompt has")
    max_turns: PositiveInt = Field(2, description="turns of the model; one fewer than this can be answered by a hint")
    min_wait: NonNegativeFloat = Field(0.05, description="seconds that the environment waits at least before a hint")
    max_wait: NonNegativeFloat = Field(0.5, description="seconds that it waits at most")
    step_timeout: float = Field(60.0, gt=0, description="seconds after which a hint is given up")


class SortHintsTask:
    """Reward 1 when what follows the last hint, or all if there is none, is the prompt's digits in ascending order."""

    Options = SortHintsOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(SortHintsOptions, options)
        if self.options.min_wait > self.options.max_wait:
            raise UserError(f"task.min_wait = {self.options.min_wait} is above task.max_wait = {self.options.max_wait}")
        self.turn_rules = TurnRules((ASK,), self.options.max_turns, self.options.step_timeout)

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position)."""
        return self._problem(f"train-{seed}-{position}", train_draw(seed, position, self._digits))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out problems, which no training seed and position reaches."""
        return [self._problem(f"eval-{i}", eval_draw(i, self._digits)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison of the last attempt with the sorted digits. parts: whether a hint was asked for."""
        grades = []
        for problem, completion in zip(problems, completions, strict=True):
            correct = _attempt(completion) == problem.columns["answer"]
            grades.append(Grade(float(correct), correct, {"asked": float(ASK in completion)}))
        return grades

    def environment(self, problem: Problem, seed: int) -> HintEnvironment:
        """Gives hints; how long it waits before each is a function of problem, seed and turn."""
        return HintEnvironment(problem, seed, self.options.min_wait, self.options.max_wait)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A right beginning of the answer, of any length, the hint that it earns, and the rest."""
        answer = str(problem.columns["answer"])
        if self.options.max_turns == 1:
            return answer
        beginning = answer[: rng.randint(0, len(answer))]
        return f"{beginning}{ASK}{HINT}{answer}"

    def _digits(self, rng: random.Random) -> tuple[str, str]:
        digits = "".join(rng.choices("0123456789", k=self.options.digits))
        return digits, digits

    def _problem(self, name: str, digits: str) -> Problem:
        return Problem(name, digits + SEPARATOR, {"answer": "".join(sorted(digits))})


class HintEnvironment:
    """Says how much of an attempt is right."""

    def __init__(self, problem: Problem, seed: int, min_wait: float, max_wait: float) -> None:
        self._problem = problem
        self._seed = seed
        self._waits = min_wait, max_wait
        self._text = ""
        self._closed = threading.Event()

    def step(self, turn: Turn) -> Observation:
        """A hint after a while when the turn asks for one; otherwise the response is over at once."""
        self._text += turn.text
        if not turn.text.endswith(ASK):
            return Observation(done=True)
        seconds = random.Random(f"{self._problem.id}/{self._seed}/{turn.number}").uniform(*self._waits)
        self._closed.wait(seconds)
        answer = str(self._problem.columns["answer"])
        attempt = _attempt(self._text.removesuffix(ASK))
        right = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(attempt, answer, strict=False)))
        hint = HINT + right
        self._text += hint
        return Observation(hint, measurements={"wait": seconds, "hint_length": float(len(right))})

    def close(self) -> None:
        """End a wait."""
        self._closed.set()


def _attempt(text: str) -> str:
    return text.rpartition(HINT)[2]
