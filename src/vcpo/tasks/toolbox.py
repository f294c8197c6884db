"""Tools as functions and environments as classes, in the form that TRL's ``GRPOTrainer`` takes them.

The tools are functions with type hints and a docstring in Google's style. The methods of an environment are tools, too:
all public ones but ``reset(**row)``, which begins a response and may add to its prompt, ``get_reward()``, which ends
it, and ``close()``.
"""

from __future__ import annotations

import copy
import inspect
import threading
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import Field, PositiveInt, field_validator

from vcpo.errors import UserError
from vcpo.plugins import load_object, split_spec
from vcpo.records import Problem
from vcpo.tasks.environment import EnvironmentFailed, TurnRules
from vcpo.tasks.options import TaskOptions
from vcpo.tasks.tool_environment import Tool, ToolEnvironment

_NO_TOOLS = ("reset", "get_reward", "close")


class ToolOptions(TaskOptions):
    """Options of tasks that take tools."""

    tools: list[str] = Field([], description="functions that the model may call, as file.py:name or module:name")
    environment_factory: str | None = Field(
        None, description="a class like TRL's, as file.py:Name: one object per response, whose methods are tools"
    )
    max_tool_calling_iterations: PositiveInt = Field(
        15, description="turns of one response whose calls are answered; the turn after them is the last one"
    )
    tool_timeout: float = Field(60.0, gt=0, description="seconds in which all calls of a turn must be answered")
    max_concurrent_tools: PositiveInt = Field(
        128, description="responses whose calls may be at work at a time in one sampler"
    )

    @property
    def has_tools(self) -> bool:
        """Whether responses are conversations with tools."""
        return bool(self.tools) or self.environment_factory is not None

    @field_validator("tools", "environment_factory")
    @classmethod
    def _are_names(cls, value: list[str] | str | None) -> list[str] | str | None:
        for spec in [value] if isinstance(value, str) else value or []:
            split_spec(spec)
        return value


class Toolbox:
    """The tools and the environment class of a configuration.

    rewards: whether the environment has ``get_reward``.
    Raises UserError when something cannot be loaded, is no function or class, or has a name that is taken.
    """

    def __init__(self, options: ToolOptions) -> None:
        self._max_iterations = options.max_tool_calling_iterations
        self._functions = [_function(spec) for spec in options.tools]
        self._factory = None if options.environment_factory is None else load_object(options.environment_factory)
        self._first: Any = None  # the environment that prompts are opened by
        self._lock = threading.Lock()
        kind: Any = None
        if self._factory is not None:
            kind = self._kind(str(options.environment_factory))
        self._methods = _tool_methods(kind)
        self.rewards = callable(getattr(kind, "get_reward", None))
        names = [tool.__name__ for tool in (*self._functions, *self._methods)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"there are two tools called {twice!r}; rename one of them")
        if not names:
            raise UserError("task.environment_factory has no method that is a tool, and task.tools is empty")
        self.rules = TurnRules(
            max_turns=options.max_tool_calling_iterations + 1,
            step_timeout=options.tool_timeout,
            max_concurrent=options.max_concurrent_tools,
            ask_at_limits=self.rewards,
        )

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas: functions as listed, then methods by name.

        Imports torch where it is installed, because transformers does. Raises UserError naming the tool whose hints or
        docstring make no schema.
        """
        return [_schema(tool) for tool in (*self._functions, *self._methods)]

    def opened(self, problem: Problem) -> Problem:
        """The problem with what ``reset`` returns at the end of its prompt.

        One object resets for all prompts of this process. Each response has its own later, reset with the same row.
        """
        if self._factory is None:
            return problem
        with self._lock:
            if self._first is None:
                self._first = self._factory()
            text = _reset(self._first, problem)
        if not text:
            return problem
        assert not isinstance(problem.prompt, str)
        last = problem.prompt[-1]
        opened = [*problem.prompt[:-1], {**last, "content": last["content"] + text}]
        return replace(problem, prompt=opened, opening=text)

    def environment(self, problem: Problem) -> ToolEnvironment:
        """The other side of one response. Raises what the environment's constructor or ``reset`` raises."""
        own = None
        if self._factory is not None:
            own = self._factory()
            opening = _reset(own, problem)
            if (opening or "") != problem.opening:
                raise EnvironmentFailed(
                    "reset() returned another text than for the prompt: it must be a function of the row alone"
                )
        bound = {tool.__name__: tool for tool in self._functions}
        bound |= {tool.__name__: getattr(own, tool.__name__) for tool in self._methods}
        schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}
        return ToolEnvironment(own, bound, schemas, self._max_iterations)

    def _kind(self, spec: str) -> Any:
        if not callable(self._factory):
            raise UserError(f"task.environment_factory={spec!r} is of type {type(self._factory).__name__}, not a class")
        kind = self._factory
        if not isinstance(kind, type):
            self._first = self._factory()
            kind = type(self._first)
        if not callable(getattr(kind, "reset", None)):
            raise UserError(f"task.environment_factory={spec!r}: an environment needs a method reset(self, **row)")
        return kind


def _function(spec: str) -> Tool:
    tool = load_object(spec)
    if not inspect.isroutine(tool):
        raise UserError(f"task.tools: {spec!r} is of type {type(tool).__name__}, not a function")
    return tool


def _tool_methods(kind: Any) -> list[Tool]:
    members = [] if kind is None else inspect.getmembers(kind, lambda m: inspect.isfunction(m) or inspect.ismethod(m))
    return [method for name, method in members if not name.startswith("_") and name not in _NO_TOOLS]


def _schema(tool: Tool) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    kinds = {parameter.kind for parameter in inspect.signature(tool).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise UserError(f"tool {tool.__name__!r} has parameters that cannot be given by name (*, ** or /)")
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # of its own classes, and whatever a hint raises when it is looked up
        raise UserError(
            f"tool {tool.__name__!r}: {' '.join(str(error).split())} (a tool needs type hints, and a docstring with a"
            " line for each argument under Args:)"
        ) from None
    return schema


def _reset(environment: Any, problem: Problem) -> str | None:
    """What ``reset`` returns for the problem's row. Raises UserError for wrong parameters or another kind of value."""
    prompt = copy.deepcopy(problem.prompt)
    if problem.opening:
        assert isinstance(prompt, list)
        prompt[-1]["content"] = prompt[-1]["content"].removesuffix(problem.opening)
    row = {**copy.deepcopy(problem.columns), "prompt": prompt}
    parameters = inspect.signature(environment.reset).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        row = {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}
        absent = next((p.name for p in parameters if p.name not in row and p.default is p.empty), None)
        if absent is not None:
            raise UserError(
                f"reset() of {type(environment).__name__} has a parameter {absent!r}, which is no column of row"
                f" {problem.id}; available: {', '.join(sorted([*problem.columns, 'prompt']))}"
            )
    text = environment.reset(**row)
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"reset() of {type(environment).__name__} returned a value of type {type(text).__name__}; it must be text"
            " for the end of the prompt, or None"
        )
    return text
