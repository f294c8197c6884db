"""Countdown: combine numbers with ``+ - * /`` to reach a target, using every number exactly once."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vcpo.errors import UserError
from vcpo.records import Grade, Message, Problem
from vcpo.tasks.arithmetic import MAX_DIGITS
from vcpo.tasks.countdown_solutions import random_problem, solve
from vcpo.tasks.data import DataOptions, DataProblems
from vcpo.tasks.graders.countdown import CountdownGrader
from vcpo.tasks.options import options_or_user_error
from vcpo.tasks.rows import Table
from vcpo.tasks.streams import eval_draw, train_draw

_INSTRUCTIONS = (
    "Using the numbers {numbers}, create an expression that equals {target}. You can use the operations +, -, *, / and"
    " parentheses, and must use each number exactly once. Think step by step, then give the expression in"
    " <answer> </answer> tags, for example <answer>(1+2)/3</answer>."
)


class CountdownOptions(DataOptions):
    """Options of the task ``countdown``. Problems are generated unless data is given."""

    numbers: Annotated[int, Field(ge=2, le=6)] = Field(3, description="how many numbers a generated problem has")
    max_number: Annotated[int, Field(ge=1, le=1000)] = Field(20, description="the largest number of generated problems")
    max_target: Annotated[int, Field(ge=1, le=10**MAX_DIGITS)] = Field(99, description="the largest generated target")
    style: Literal["short", "text", "chat", "given"] = Field(
        "short",
        description="`3,7,12>22=` answered by a bare expression (small models; the alphabet is 0-9 , > = + - * / ( )),"
        " instructions as plain text or as a chat message answered in <answer> tags, or the data's own prompt column",
    )
    format_reward: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="reward of a well-formed expression that is wrong"
    )

    @model_validator(mode="after")
    def _style_fits(self) -> CountdownOptions:
        if self.style == "given" and self.path is None and self.dataset_name is None:
            raise ValueError("task.style=given uses the prompts of data: give task.path or task.dataset_name too")
        return self


class CountdownTask:
    """Reward 1 for a correct expression, ``format_reward`` for a well-formed wrong one, else 0.

    Rows of data are ``{"numbers" or "nums": [...], "target": ...}``, alone or as the ground truth of verl's rows
    (``{"reward_model": {"ground_truth": {...}}, ...}``).
    """

    Options = CountdownOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(CountdownOptions, options)
        self._grader = CountdownGrader(bare=self.options.style == "short", format_reward=self.options.format_reward)
        has_data = self.options.path is not None or self.options.dataset_name is not None
        self._data = DataProblems(self.options, self._row_problem) if has_data else None

    def train_problem(self, position: int, seed: int) -> Problem:
        """A new random problem for every (seed, position), or the data's rows shuffled anew in each epoch."""
        if self._data is not None:
            return self._data.train(position, seed)
        return self._generated(f"train-{seed}-{position}", train_draw(seed, position, self._draw))

    def eval_problems(self, count: int) -> list[Problem]:
        """Generated problems that training never meets, or the first rows of the evaluation data."""
        if self._data is not None:
            return self._data.eval(count)
        return [self._generated(f"eval-{i}", eval_draw(i, self._draw)) for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Evaluate each response's expression, bounded and exactly."""
        return [self._grader.grade(p.columns, text) for p, text in zip(problems, completions, strict=True)]

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The expression without white space, if it is well formed."""
        return self._grader.answer(completion)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A right expression in the form that the prompt asks for. Raises UserError when there is none."""
        numbers, target = problem.columns["numbers"], problem.columns["target"]
        expression = problem.columns.get("solution") or solve(numbers, target)
        if expression is None:
            raise UserError(f"problem {problem.id!r} has no solution: {numbers} do not reach {target}")
        return expression if self.options.style == "short" else f"<answer>{expression}</answer>"

    def _draw(self, rng: random.Random) -> tuple[Hashable, tuple[list[int], int, str]]:
        numbers, target, solution = random_problem(
            rng, self.options.numbers, self.options.max_number, self.options.max_target
        )
        # the same numbers in another order are the same problem
        return (tuple(sorted(numbers)), target), (numbers, target, solution)

    def _generated(self, name: str, drawn: tuple[list[int], int, str]) -> Problem:
        numbers, target, solution = drawn
        columns = {"numbers": numbers, "target": target, "solution": solution}
        return Problem(name, self._prompt(numbers, target), columns)

    def _row_problem(self, table: Table, index: int) -> Problem:
        numbers, target = self._ground_truth(table, index)
        given = self.options.style == "given"
        prompt = table.prompt(index, "prompt") if given else self._prompt(numbers, target)
        return Problem(table.name(index), prompt, {**table.rows[index], "numbers": numbers, "target": target})

    def _ground_truth(self, table: Table, index: int) -> tuple[list[int], int]:
        try:
            if "reward_model" not in table.rows[index]:
                gold = self._grader.gold(dict(table.rows[index]))
                return gold["numbers"], gold["target"]
        except ValueError as error:
            raise table.row_error(index, str(error)) from None
        answer = table.value(index, "reward_model.ground_truth")
        try:
            gold = self._grader.gold(answer)
        except ValueError as error:
            raise table.error(index, "reward_model.ground_truth", str(error)) from None
        return gold["numbers"], gold["target"]

    def _prompt(self, numbers: list[int], target: int) -> str | list[Message]:
        if self.options.style == "short":
            return f"{','.join(map(str, numbers))}>{target}="
        text = _INSTRUCTIONS.format(numbers=numbers, target=target)
        return [{"role": "user", "content": text}] if self.options.style == "chat" else text + "\n"
