"""The ``method`` section of a configuration: a named method, and what is changed of its parts.

A part is given by its name (``weight: band``), with options (``weight: {name: band, high: 4}``), or by options alone,
which change those that the named method has (``method.weight.cap=2``). A user's own method or part is named
``module:name`` or ``file.py:name``: a ``MethodSpec``, or a frozen dataclass derived from the part's base class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, InstanceOf, TypeAdapter, ValidationError, model_validator

from vcpo.errors import UserError, suggest
from vcpo.methods.gradient_control import GRADIENT_CONTROLS, GradientControl
from vcpo.methods.masks import MASKS, Mask
from vcpo.methods.penalties import PENALTIES, Penalty
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.methods.weights import WEIGHTS, Weight
from vcpo.plugins import load_object

_PARTS: dict[str, tuple[type, Mapping[str, type]]] = {
    "weight": (Weight, WEIGHTS),
    "mask": (Mask, MASKS),
    "penalty": (Penalty, PENALTIES),
    "gradient_control": (GradientControl, GRADIENT_CONTROLS),
}
_users_own: dict[type, str] = {}


class MethodSection(BaseModel):
    """A named method; other keys override single parts of it (see ``MethodSpec``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "vcpo"
    spec: InstanceOf[MethodSpec]

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "vcpo")
        base = _named_method(name)
        hints = get_type_hints(MethodSpec)
        changes: dict[str, Any] = {}
        for key, value in data.items():
            if key == "name":
                continue
            if key not in hints:
                raise ValueError(f"unknown key method.{key}{suggest(key, hints)}")
            if key in _PARTS:
                changes[key] = _part(key, value, getattr(base, key))
            else:
                changes[key] = _checked(f"method.{key}", hints[key], value)
        spec = dataclasses.replace(base, **changes)
        # a method that is written in full names its level, too, and may have been another when it was written
        if "ratio_level" not in data and spec.ratio_level == "none" and spec.weight != base.weight:
            raise ValueError(f"method.weight has no effect on {name}, which has no ratios: give method.ratio_level")
        return {"name": name, "spec": spec}

    def to_plain(self) -> dict[str, Any]:
        """The name and every part, in the form that is accepted as input."""
        plain: dict[str, Any] = {"name": self.name}
        for field in dataclasses.fields(self.spec):
            value = getattr(self.spec, field.name)
            if field.name in _PARTS and value is not None:
                options = {name: _plain(option) for name, option in dataclasses.asdict(value).items()}
                value = {"name": _part_name(field.name, type(value)), **options}
            plain[field.name] = _plain(value)
        return plain


def _named_method(name: Any) -> MethodSpec:
    if isinstance(name, str) and ":" in name:
        spec = _load(name)
        if not isinstance(spec, MethodSpec):
            raise ValueError(f"method {name!r} is a {type(spec).__name__}, not a MethodSpec")
        return spec
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"unknown method {name!r}{suggest(str(name), METHODS)}")
    return METHODS[name]


def _part(kind: str, value: Any, present: Any) -> Any:
    """The part that a configuration describes. present: the part of the named method, or ``None``."""
    base, known = _PARTS[kind]
    if value is None:
        if kind == "weight":
            raise ValueError("method.weight must be named; for no weight: method.ratio_level=none")
        return None
    if isinstance(value, base):
        return value
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise ValueError(f"method.{kind} must be a name or a mapping with a name, not {value!r}")
    options = dict(options)
    name = options.pop("name", None)
    if name is None and present is None:
        raise ValueError(f"method.{kind}.name is required; allowed: {', '.join(known)}")
    if name is None:
        chosen = type(present)
    elif isinstance(name, str) and ":" in name:
        chosen = _load(name)
        if not (isinstance(chosen, type) and issubclass(chosen, base) and dataclasses.is_dataclass(chosen)):
            raise ValueError(
                f"method.{kind} {name!r} must be a dataclass derived from {base.__module__}.{base.__name__}"
            )
        _users_own[chosen] = name
    elif isinstance(name, str) and name in known:
        chosen = known[name]
    else:
        raise ValueError(f"unknown method.{kind} {name!r}{suggest(str(name), known)}")
    hints = get_type_hints(chosen)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(chosen)}
    for key in options:
        if key not in fields:
            allowed = f"; allowed: {', '.join(fields)}" if fields else "; it has no options"
            raise ValueError(f"unknown key method.{kind}.{key}{suggest(key, fields) if fields else ''}{allowed}")
    checked = {key: _checked(f"method.{kind}.{key}", fields[key], option) for key, option in options.items()}
    kept = dataclasses.asdict(present) if name is None else {}
    try:
        return chosen(**{**kept, **checked})
    except (TypeError, ValueError) as error:  # a user's own may lack an option, or refuse one in either way
        raise ValueError(f"method.{kind}: {error}") from None


def _checked(key: str, hint: Any, value: Any) -> Any:
    # YAML has no tuples
    strict = not isinstance(value, list)
    try:
        return TypeAdapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].replace("Input should be", "must be")
        if first["type"] in ("missing", "too_long"):
            problem = "must be a list of another length"
        raise ValueError(f"{key} = {value!r} {problem}") from None


def _plain(value: Any) -> Any:
    # YAML has no tuples
    return list(value) if isinstance(value, tuple) else value


def _part_name(kind: str, part: type) -> str:
    names = {known: name for name, known in _PARTS[kind][1].items()}
    return names.get(part) or _users_own.get(part) or f"{part.__module__}:{part.__qualname__}"


def _load(name: str) -> Any:
    try:
        return load_object(name)
    except UserError as error:
        raise ValueError(str(error)) from None
