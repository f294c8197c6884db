"""Whether arguments are what a tool's JSON schema asks for, in the part of JSON schema that Python signatures make."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def argument_error(arguments: dict[str, Any], schema: dict[str, Any]) -> str | None:
    """What is wrong with the arguments, in a sentence for the model; ``None`` when nothing is.

    schema: of the tool's parameters. Values are not converted, so ``"7"`` is no integer.
    """
    known = schema["properties"]
    for name in arguments:
        if name not in known:
            return f"there is no argument {name[:100]!r}; the arguments are {', '.join(known) or 'none'}"
    missing = [name for name in schema.get("required", []) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    errors = (_error(value, known[name], f"the argument {name!r}") for name, value in arguments.items())
    return next((error for error in errors if error is not None), None)


def _error(value: Any, schema: dict[str, Any], what: str) -> str | None:
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        errors = [_error(value, choice, what) for choice in schema["anyOf"]]
        return None if None in errors else f"{what} has a wrong type"
    kinds = schema.get("type")
    if kinds is not None and not _is_one_of(value, [kinds] if isinstance(kinds, str) else kinds):
        return f"{what} must be of type {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return f"{what} must be one of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, list):
        return _items_error(value, schema, what)
    if isinstance(value, dict) and "additionalProperties" in schema:
        errors = [_error(item, schema["additionalProperties"], f"every value of {what}") for item in value.values()]
        return next((error for error in errors if error is not None), None)
    return None


def _items_error(value: list[Any], schema: dict[str, Any], what: str) -> str | None:
    places = schema.get("prefixItems")
    if places is not None and len(places) != len(value):
        return f"{what} must have {len(places)} items"
    schemas = places if places is not None else [schema.get("items", {})] * len(value)
    errors = (_error(item, each, f"every item of {what}") for item, each in zip(value, schemas, strict=True))
    return next((error for error in errors if error is not None), None)


def _is_one_of(value: Any, kinds: list[str]) -> bool:
    # True is an int in Python, and no number in JSON
    return any(
        isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
        if kind in _TYPES
    )
