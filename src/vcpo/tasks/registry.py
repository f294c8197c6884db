"""Finding a task by name.

Built-in tasks register with one line here; another package registers its own through the entry-point group
``vcpo.tasks``; a user's own is named ``package.module:Name`` or ``path/to/file.py:Name``. A task class may carry its
options as a pydantic model in an attribute ``Options``; without one, its constructor's parameters are its options.
"""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel

from vcpo.errors import UserError, suggest
from vcpo.plugins import load_object, split_spec
from vcpo.tasks.environment import EnvironmentTask
from vcpo.tasks.options import check_options
from vcpo.tasks.protocol import Task

ENTRY_POINT_GROUP = "vcpo.tasks"

BUILT_IN: dict[str, str] = {
    "sort": "vcpo.tasks.sort:SortTask",
    "sort_hints": "vcpo.tasks.sort_hints:SortHintsTask",
    "countdown": "vcpo.tasks.countdown:CountdownTask",
    "gsm8k": "vcpo.tasks.gsm8k:GSM8KTask",
    "math": "vcpo.tasks.competition:MathTask",
    "tool_math": "vcpo.tasks.tool_math:ToolMathTask",
    "tool_arithmetic": "vcpo.tasks.tool_arithmetic:ToolArithmeticTask",
    "dataset": "vcpo.tasks.dataset:DatasetTask",
    "verifiers": "vcpo.tasks.verifiers_task:VerifiersTask",
}


def task_params(name: str, params: dict[str, Any]) -> None:
    """Check a task's name and options without reading data.

    Of a user's own task only the form of the name is checked, so that no foreign code runs while a configuration is
    read; its options are checked by ``make_task``. Raises ValueError with one sentence.
    """
    if name in BUILT_IN:
        check_options(load_object(BUILT_IN[name]).Options, params)
    elif ":" in name:
        split_spec(name)
    elif name not in _installed():
        raise ValueError(f"unknown task {name!r}{suggest(name, [*BUILT_IN, *_installed()])}")


def make_task(name: str, params: dict[str, Any]) -> Task:
    """The task, with its data read.

    Raises UserError for a wrong name or option, and for data that is missing, unreadable, empty or badly formed.
    """
    try:
        task_params(name, params)
    except ValueError as error:
        raise UserError(str(error)) from None
    factory = _factory(name)
    if not callable(factory):
        raise UserError(f"task {name!r} is of type {type(factory).__name__}, not a class or function that makes a task")
    _check_arguments(name, factory, params)
    task = factory(**params)
    if not isinstance(task, Task):
        missing = [method for method in ("train_problem", "eval_problems", "grade") if not hasattr(task, method)]
        raise UserError(f"task {name!r} made an object of type {type(task).__name__} without {', '.join(missing)}")
    return task


def environment_task(name: str, params: dict[str, Any]) -> EnvironmentTask | None:
    """The task where it has environments, else ``None``, without its data being read if it is a class.

    Raises as ``make_task`` does.
    """
    factory = _factory(name)
    takes_tools = params.get("tools") or params.get("environment_factory")
    if isinstance(factory, type) and not hasattr(factory, "environment") and not takes_tools:
        return None
    task = make_task(name, params)
    return task if isinstance(task, EnvironmentTask) else None


def _factory(name: str) -> Any:
    if name in BUILT_IN:
        return load_object(BUILT_IN[name])
    if ":" in name:
        return load_object(name)
    entry = _installed()[name]
    return load_object(entry.value)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _check_arguments(name: str, factory: Any, params: dict[str, Any]) -> None:
    model = getattr(factory, "Options", None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        try:
            check_options(model, params)
        except ValueError as error:
            raise UserError(str(error)) from None
        return
    try:
        inspect.signature(factory).bind(**params)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise UserError(f"task {name!r} does not take these options: {error}; its options: {known}") from None
