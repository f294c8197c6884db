"""Products too long for a small model, and a Python interpreter that it may ask. A generated multi-turn task.

``4821*7306=`` may be answered by ``<4821*7306>``: what stands between the brackets is run as ``print(4821*7306)``
in the sandbox, which answers ``35222226=`` (``!=`` when it fails or prints anything but one number). The model goes
on from there, and what counts is the text after the last ``=``. A model that answers without asking has to guess.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from vcpo.records import Grade, Problem
from vcpo.sandbox.options import SandboxOptions
from vcpo.sandbox.protocol import Status
from vcpo.tasks.environment import Observation, Turn, TurnRules
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.python_tool import PythonTool
from vcpo.tasks.streams import eval_draw, train_draw

OPEN, CLOSE, EQUALS, FAILED = "<", ">", "=", "!"
_NUMBER = re.compile(r"[0-9]{1,40}")


class ToolArithmeticOptions(TaskOptions):
    """Options of the task ``tool_arithmetic``."""

    digits: PositiveInt = Field(4, le=20, description="digits of each of the two factors")
    max_turns: PositiveInt = Field(3, description="turns of the model; one fewer than this can be answered by a run")
    demonstrated_calls: float = Field(
        0.25,
        ge=0,
        le=1,
        description="part of the demonstrations of a warm start that ask the tool; others answer at once",
    )
    sandbox: SandboxOptions = Field(
        default_factory=lambda: SandboxOptions(wall_seconds=2.0, cpu_seconds=1, memory_mb=128, output_kb=4, file_mb=1),
        description="where the code is run (docs/tools.md)",
    )


class ToolArithmeticTask:
    """Reward 1 when what follows the last ``=``, or all if there is none, is the product."""

    Options = ToolArithmeticOptions

    def __init__(self, **options: Any) -> None:
        """Raises UserError for wrong options, and when code cannot be run here."""
        self.options = options_or_user_error(ToolArithmeticOptions, options)
        self.tool = PythonTool(self.options.sandbox)
        self.turn_rules = TurnRules(
            (CLOSE,), self.options.max_turns, self.tool.step_timeout, self.options.sandbox.max_concurrent
        )

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random product for every (seed, position)."""
        return self._problem(f"train-{seed}-{position}", train_draw(seed, position, self._factors))

    def eval_problems(self, count: int) -> list[Problem]:
        """Held-out products, which no training seed and position reaches."""
        return [self._problem(f"eval-{i}", eval_draw(i, self._factors)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact comparison of the last answer with the product. parts: asked the tool; unaided: right without it."""
        grades = []
        for problem, completion in zip(problems, completions, strict=True):
            correct = completion.rpartition(EQUALS)[2] == problem.columns["answer"]
            asked = CLOSE in completion
            parts = {"asked": float(asked), "unaided": float(correct and not asked)}
            grades.append(Grade(float(correct), correct, parts))
        return grades

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """What is graded, if it is a number."""
        answer = completion.rpartition(EQUALS)[2]
        return answer if _NUMBER.fullmatch(answer) else None

    def environment(self, problem: Problem, seed: int) -> Calculations:
        """Runs what the model writes between brackets."""
        return Calculations(self.tool)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The product, sometimes after a call of the tool and its answer."""
        question, answer = str(problem.columns["question"]), str(problem.columns["answer"])
        if rng.random() >= self.options.demonstrated_calls:
            return answer
        return f"{OPEN}{question}{CLOSE}{answer}{EQUALS}{answer}"

    def _factors(self, rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
        low, high = 10 ** (self.options.digits - 1), 10**self.options.digits
        factors = rng.randrange(low, high), rng.randrange(low, high)
        return factors, factors

    def _problem(self, name: str, factors: tuple[int, int]) -> Problem:
        question = f"{factors[0]}*{factors[1]}"
        return Problem(name, question + EQUALS, {"question": question, "answer": str(factors[0] * factors[1])})


class Calculations:
    """Runs each turn's expression, and answers with its value."""

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    def step(self, turn: Turn) -> Observation:
        """The value when the turn asks for one; otherwise the response is over."""
        if not turn.text.endswith(CLOSE):
            return Observation(done=True)
        _, bracket, expression = turn.text.removesuffix(CLOSE).rpartition(OPEN)
        if not bracket:
            return Observation(FAILED + EQUALS)
        result = self._tool.run(self.program(expression))
        value = result.stdout.strip()
        works = result.status is Status.OK and _NUMBER.fullmatch(value) is not None
        measurements = {"tool_seconds": result.seconds, "tool_ok": float(works)}
        return Observation((value if works else FAILED) + EQUALS, measurements=measurements)

    def program(self, expression: str) -> str:
        """What is run for an expression."""
        return f"print({expression})"

    def close(self) -> None:
        """Nothing: a run ends by its own limits."""
