"""The typed options of a task, and the sentences said about wrong ones."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vcpo.errors import UserError, suggest


class TaskOptions(BaseModel):
    """Base of every task's options: unknown keys are errors, and values are not converted between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


Options = TypeVar("Options", bound=BaseModel)


def check_options(model: type[Options], params: dict[str, Any], where: str = "task") -> Options:
    """The options as a typed record. Raises ValueError with one sentence that names every wrong key.

    where: what the keys are options of, as written in a configuration.
    """
    try:
        return model.model_validate(params)
    except ValidationError as error:
        raise ValueError("; ".join(dict.fromkeys(_sentence(model, dict(e), where) for e in error.errors()))) from None


def options_or_user_error(model: type[Options], params: dict[str, Any]) -> Options:
    """As ``check_options``, for constructors: raises UserError."""
    try:
        return check_options(model, params)
    except ValueError as error:
        raise UserError(str(error)) from None


def _sentence(model: type[BaseModel], error: dict[str, Any], where: str) -> str:
    key = ".".join([where, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}{suggest(str(error['loc'][-1]), model.model_fields)}"
    if error["type"] == "missing":
        return f"{key} is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key} = {error['input']!r} {error['msg'].replace('Input should be', 'must be')}"
