"""Calls of tools in what a model writes. The text is hostile: it is read as JSON and nothing else, in bounded work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_CALLS = 32  # of one turn
MAX_CHARACTERS = 100_000  # of one call
MAX_DEPTH = 32  # of objects and lists inside each other
_SHOWN = 100  # characters of the model's own text in a message


@dataclass(frozen=True)
class ToolCall:
    """One call.

    name: of the tool; empty where it cannot be read.
    arguments: JSON values by name; finite numbers, no half characters, no name twice.
    error: a sentence for the model when this is no proper call; then there are no arguments.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


Parser = Callable[[str], tuple[ToolCall, ...]]


def hermes_calls(text: str) -> tuple[ToolCall, ...]:
    """Every ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` outside of thoughts (Hermes, Qwen 2.5 and 3).

    What is marked as a call and is none becomes a call with an error.
    """
    begin, end = "<tool_call>", "</tool_call>"
    text = _spoken(text)
    calls: list[ToolCall] = []
    place = text.find(begin)
    while place >= 0:
        if len(calls) == MAX_CALLS:
            calls.append(ToolCall("", error=f"only the first {MAX_CALLS} calls of a turn are made"))
            break
        place += len(begin)
        try:
            value, place = _json(text, place)
            rest = _after_space(text, place)
            if not text.startswith(end, rest):
                raise ValueError(f"the call does not end with {end}")
            place = rest + len(end)
            calls.append(_call(value, "arguments"))
        except ValueError as error:
            calls.append(ToolCall("", error=f"this is not a valid tool call: {error}"))
        place = text.find(begin, place)
    return tuple(calls)


def llama_calls(text: str) -> tuple[ToolCall, ...]:
    """The call of a turn that is ``{"name": ..., "parameters": {...}}`` and nothing else (Llama 3.1 and 3.2).

    Everything else is an answer, other JSON included.
    """
    text = _spoken(text).strip()
    if not text.startswith("{"):
        return ()
    try:
        value, end = _json(text, 0)
        if end < len(text) or "name" not in value or "parameters" not in value:
            return ()
        return (_call(value, "parameters"),)
    except ValueError as error:
        written_as_a_call = '"name"' in text[:_SHOWN] and '"parameters"' in text
        return (ToolCall("", error=f"this is not a valid tool call: {error}"),) if written_as_a_call else ()


PARSERS: dict[str, Parser] = {
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen 2.5, Qwen 3)': hermes_calls,
    '{"name": ..., "parameters": {...}} (Llama 3.1, 3.2)': llama_calls,
}


def _spoken(text: str) -> str:
    """What follows the model's thoughts; of thoughts that have no end, what is before them.

    The begin of thoughts may be in the prompt, so that only their end is in the text.
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _json(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The JSON object from ``start`` on, and where it ends. Raises ValueError with a sentence."""
    start = _after_space(text, start)
    part = text[start : start + MAX_CHARACTERS]
    if not part.startswith("{"):
        raise ValueError("a JSON object is expected")
    try:
        value, length = _DECODER.raw_decode(part)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    _check(value)
    return value, start + length


def _call(value: dict[str, Any], arguments: str) -> ToolCall:
    name, given = value.get("name"), value.get(arguments, {})
    if not isinstance(name, str) or not name:
        raise ValueError('it needs a "name", the name of a tool')
    if not isinstance(given, dict):
        raise ValueError(f'"{arguments}" must be a JSON object')
    return ToolCall(name, given)


def _check(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [child for item in level for child in _children(item)]
        for text in children:
            if isinstance(text, str) and not text.isascii():
                _encodable(text)
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else value


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a character (a lone surrogate)") from None


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has the same name twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > _SHOWN:
        raise ValueError(f"the number {text[:_SHOWN]}... is too large")
    return int(text)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant
)
