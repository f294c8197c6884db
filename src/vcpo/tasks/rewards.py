"""Rewards made of parts: a user's functions, with the signature that TRL made common, and built-in ones.

A function is ``f(prompts, completions, **columns) -> list[float | None]``, sync or async. It gets parallel lists with
one entry per response; ``None`` as a value means that it has no opinion on that response. Beside the columns of the
data it may ask for ``completion_ids`` (the response's tokens, as in TRL) and ``stop_reason`` ("eos", "length", ...).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vcpo.errors import UserError, suggest
from vcpo.plugins import load_object
from vcpo.records import Answer, Grade, Message, Problem
from vcpo.tasks.graders import registry as graders
from vcpo.tasks.graders.protocol import AnswerGrader
from vcpo.tasks.length_penalty import SoftOverlongPunishment
from vcpo.tasks.options import check_options

RewardFunction = Callable[..., Any]

TASK = "task"  # the reward that the task itself gives
OVERLONG = "overlong"


def split_reward(reward: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of an entry of ``reward.reward_funcs``. Loads none of the user's code.

    Raises ValueError with one sentence when the name or an option is wrong.
    """
    options = {"name": reward} if isinstance(reward, str) else dict(reward)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError("an entry of reward.reward_funcs needs a name, such as task or {name: overlong, cache: 100}")
    if options and (":" in name or name == TASK):
        raise ValueError(f"reward {name!r} takes no options, but has {', '.join(options)}")
    if name == OVERLONG:
        check_options(SoftOverlongPunishment.Options, options, "reward.reward_funcs.overlong")
    elif name in graders.BUILT_IN:
        graders.split_grader({"name": name, **options}, f"reward.reward_funcs.{name}")
    elif ":" not in name and name != TASK:
        known = suggest(name, [TASK, OVERLONG, *graders.BUILT_IN])
        raise ValueError(f"reward function {name!r} must be written module:name or file.py:name{known}")
    return name, options


class RewardFunctions:
    """A weighted sum of parts, in place of the task's own reward.

    rewards: of each part ``module:name`` or ``file.py:name`` for a user's function, or a built-in one by its name or
        as ``{"name": ..., option: ...}``: ``task`` for the task's own reward, a grader's name for its judgement of the
        row's right answer, ``overlong`` for a length penalty.
    weights: one factor per part; all 1 when None.
    max_completion_length: tokens at which a response is cut off, for length penalties without a length of their own.
    Raises UserError when a part cannot be loaded or is not callable.
    """

    def __init__(
        self,
        rewards: Sequence[str | dict[str, Any]],
        weights: list[float] | None = None,
        max_completion_length: int | None = None,
    ) -> None:
        self._weights = [1.0] * len(rewards) if weights is None else list(weights)
        if len(self._weights) != len(rewards):
            raise UserError(f"reward_weights has {len(self._weights)} entries for {len(rewards)} reward_funcs")
        self._functions: dict[str, RewardFunction] = {}
        self._max_completion_length = max_completion_length
        try:
            parts = [split_reward(reward) for reward in rewards]
        except ValueError as error:
            raise UserError(str(error)) from None
        short_names = [spec.rpartition(":")[2] for spec, _ in parts]
        for (spec, options), short in zip(parts, short_names, strict=True):
            function = self._load(spec, options)
            if not callable(function):
                raise UserError(f"reward function {spec!r} is of type {type(function).__name__}, not a function")
            name = short if short_names.count(short) == 1 else spec
            if name in self._functions:
                raise UserError(f"reward function {spec!r} is listed twice; give it one entry and a larger weight")
            self._functions[name] = function

    @property
    def needs_time_limit(self) -> bool:
        """Whether a built-in part may work for ever on hostile text."""
        return any(getattr(function, "needs_time_limit", False) for function in self._functions.values())

    def apply(self, problems: Sequence[Problem], answers: Sequence[Answer], grades: Sequence[Grade]) -> list[Grade]:
        """The grades with the parts' rewards; ``correct`` stays the task's, ``parts`` gains each one's value.

        A function's ``None`` is left out of its response's sum; where every one says ``None`` the reward is None. What
        a grader (or the task) could not judge has no reward, whatever the others say. With no functions the grades come
        back as they are. An exception of a function is raised on, with a note that names the function; values of the
        wrong number or kind raise UserError.
        """
        if not self._functions:
            return list(grades)
        columns = _columns(problems, answers)
        results = {name: _call(name, function, columns, grades) for name, function in self._functions.items()}
        if any(inspect.isawaitable(result) for result in results.values()):
            results = asyncio.run(_gather(results))
        values = {name: _checked(name, result, len(answers)) for name, result in results.items()}
        return [
            self._combine(grade, {name: column[i] for name, column in values.items()}) for i, grade in enumerate(grades)
        ]

    def _combine(self, grade: Grade, values: dict[str, float | None]) -> Grade:
        weighted = [
            weight * value for weight, value in zip(self._weights, values.values(), strict=True) if value is not None
        ]
        judges = [
            name for name, function in self._functions.items() if isinstance(function, _TaskReward | _GraderReward)
        ]
        unjudged = any(values[name] is None for name in judges)
        reward = sum(weighted) if weighted and not unjudged else None
        parts = {**grade.parts, **{name: value for name, value in values.items() if value is not None}}
        return Grade(reward, grade.correct, parts, grade.failure if reward is None else None)

    def _load(self, name: str, options: dict[str, Any]) -> Any:
        if name == TASK:
            return _TaskReward()
        if name == OVERLONG:
            return SoftOverlongPunishment(**{"max_length": self._max_completion_length, **options})
        if name in graders.BUILT_IN:
            return _GraderReward(name, graders.make_grader({"name": name, **options}))
        return load_object(name)


class _TaskReward:
    """The rewards that the task has given."""

    def __call__(self, grades: Sequence[Grade]) -> list[float | None]:
        return [grade.reward for grade in grades]


class _GraderReward:
    """A grader's judgement of the answers that the task keeps as ``gold``."""

    def __init__(self, name: str, grader: AnswerGrader) -> None:
        self._name = name
        self._grader = grader
        self.needs_time_limit = bool(getattr(grader, "needs_time_limit", False))

    def __call__(self, completions: list[Any], gold: list[Any]) -> list[float | None]:
        return [self._judged(right, _text(completion)) for right, completion in zip(gold, completions, strict=True)]

    def _judged(self, right: Any, response: str) -> float | None:
        if right is None:
            return None
        try:
            return self._grader.grade(self._grader.gold(right), response).reward
        except ValueError as error:
            raise UserError(f"reward {self._name!r}: the right answer {right!r} {error}") from None


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _columns(problems: Sequence[Problem], answers: Sequence[Answer]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    columns: dict[str, list[Any]] = {name: [problem.columns.get(name) for problem in problems] for name in names}
    columns["prompts"] = [problem.prompt for problem in problems]
    columns["completions"] = [
        _like_prompt(problem, answer.text) for problem, answer in zip(problems, answers, strict=True)
    ]
    columns["completion_ids"] = [answer.token_ids for answer in answers]
    columns["stop_reason"] = [answer.stop_reason.value for answer in answers]
    return columns


def _like_prompt(problem: Problem, completion: str) -> str | list[Message]:
    # the TRL convention: a chat prompt has a chat completion
    if isinstance(problem.prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _call(name: str, function: RewardFunction, columns: dict[str, list[Any]], grades: Sequence[Grade]) -> Any:
    if isinstance(function, _TaskReward):
        return function(grades)
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
