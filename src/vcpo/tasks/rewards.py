"""A user's reward functions, with the signature that TRL made common.

A function is ``f(prompts, completions, **columns) -> list[float | None]``, sync or async. It gets parallel lists with
one entry per response; ``None`` as a value means that it has no opinion on that response.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vcpo.errors import UserError
from vcpo.plugins import load_object
from vcpo.records import Grade, Message, Problem

RewardFunction = Callable[..., Any]


class RewardFunctions:
    """The weighted sum of reward functions, in place of the task's own reward.

    specs: ``module:name`` or ``file.py:name`` of each function.
    weights: one factor per function; all 1 when None.
    Raises UserError when a function cannot be loaded or is not callable.
    """

    def __init__(self, specs: list[str], weights: list[float] | None = None) -> None:
        self._weights = [1.0] * len(specs) if weights is None else list(weights)
        if len(self._weights) != len(specs):
            raise UserError(f"reward_weights has {len(self._weights)} entries for {len(specs)} reward_funcs")
        self._functions: dict[str, RewardFunction] = {}
        short_names = [spec.rpartition(":")[2] for spec in specs]
        for spec, short in zip(specs, short_names, strict=True):
            function = load_object(spec)
            if not callable(function):
                raise UserError(f"reward function {spec!r} is of type {type(function).__name__}, not a function")
            name = short if short_names.count(short) == 1 else spec
            if name in self._functions:
                raise UserError(f"reward function {spec!r} is listed twice; give it one entry and a larger weight")
            self._functions[name] = function

    def apply(self, problems: Sequence[Problem], completions: Sequence[str], grades: Sequence[Grade]) -> list[Grade]:
        """The grades with the functions' rewards; ``correct`` stays the task's, ``parts`` gains each function's value.

        A function's ``None`` is left out of its response's sum; where every function says ``None`` the reward is None.
        With no functions the grades come back as they are. An exception of a function is raised on, with a note that
        names the function; values of the wrong number or kind raise UserError.
        """
        if not self._functions:
            return list(grades)
        columns = _columns(problems, completions)
        results = {name: _call(name, function, columns) for name, function in self._functions.items()}
        if any(inspect.isawaitable(result) for result in results.values()):
            results = asyncio.run(_gather(results))
        values = {name: _checked(name, result, len(completions)) for name, result in results.items()}
        return [
            self._combine(grade, {name: column[i] for name, column in values.items()}) for i, grade in enumerate(grades)
        ]

    def _combine(self, grade: Grade, values: dict[str, float | None]) -> Grade:
        weighted = [
            weight * value for weight, value in zip(self._weights, values.values(), strict=True) if value is not None
        ]
        parts = {**grade.parts, **{name: value for name, value in values.items() if value is not None}}
        return Grade(reward=sum(weighted) if weighted else None, correct=grade.correct, parts=parts)


def _columns(problems: Sequence[Problem], completions: Sequence[str]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    columns: dict[str, list[Any]] = {name: [problem.columns.get(name) for problem in problems] for name in names}
    columns["prompts"] = [problem.prompt for problem in problems]
    columns["completions"] = [
        _like_prompt(problem, completion) for problem, completion in zip(problems, completions, strict=True)
    ]
    return columns


def _like_prompt(problem: Problem, completion: str) -> str | list[Message]:
    # the TRL convention: a chat prompt has a chat completion
    if isinstance(problem.prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _call(name: str, function: RewardFunction, columns: dict[str, list[Any]]) -> Any:
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = columns
    else:
        given = {p.name: columns[p.name] for p in named if p.name in columns}
    absent = [p.name for p in named if p.default is p.empty and p.name not in columns]
    if absent:
        raise UserError(
            f"reward function {name!r} has a parameter {absent[0]!r}, which is no column of this task's problems;"
            f" available: {', '.join(sorted(columns))}"
        )
    try:
        return function(**given)
    except BaseException as error:
        error.add_note(f"raised by reward function {name!r}")
        raise


async def _gather(results: dict[str, Any]) -> dict[str, Any]:
    async def finish(name: str, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except BaseException as error:
            error.add_note(f"raised by reward function {name!r}")
            raise

    pending = {name: finish(name, result) for name, result in results.items() if inspect.isawaitable(result)}
    finished = await asyncio.gather(*pending.values())
    return {**results, **dict(zip(pending, finished, strict=True))}


def _checked(name: str, result: Any, count: int) -> list[float | None]:
    if hasattr(result, "tolist"):  # an array or tensor
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise UserError(
            f"reward function {name!r} returned a value of type {type(result).__name__}; it must return a list with"
            f" one value per completion ({count})"
        )
    if len(result) != count:
        raise UserError(f"reward function {name!r} returned {len(result)} values for {count} completions")
    return [_number(name, index, value) for index, value in enumerate(result)]


def _number(name: str, index: int, value: Any) -> float | None:
    if value is None:
        return None
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise UserError(
            f"reward function {name!r} returned {value!r} for completion {index}; a value must be a finite number,"
            " or None for a response that it cannot score"
        )
    return float(plain)
