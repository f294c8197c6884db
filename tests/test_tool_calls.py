"""Calls of tools in hostile text: what is a call, what is told to the model, and that the work is bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tool_cases import call
from vcpo.tasks.tool_arguments import argument_error
from vcpo.tasks.tool_calls import MAX_CALLS, MAX_DEPTH, ToolCall, hermes_calls, llama_calls


def given(value: str) -> str:
    """Arguments with one value, as it is written."""
    return '{"a": ' + value + "}"


def only(text: str) -> ToolCall:
    [found] = hermes_calls(text)
    return found


def test_calls_are_read_in_order_with_their_arguments() -> None:
    add, look = call("add", '{"a": 1, "b": [2.5, null, true, {"c": "é"}]}'), call("look", "{}")
    text = f"I see.\n{add}\n{look} so."
    assert hermes_calls(text) == (
        ToolCall("add", {"a": 1, "b": [2.5, None, True, {"c": "é"}]}),
        ToolCall("look", {}),
    )


@pytest.mark.parametrize(
    "text", ["", "no call", "<tool_calls>", '{"name": "add", "arguments": {}}', "</tool_call>", "<tool_response>"]
)
def test_other_text_is_no_call(text: str) -> None:
    assert hermes_calls(text) == ()


def test_missing_arguments_are_none() -> None:
    assert only('<tool_call>{"name": "look"}</tool_call>') == ToolCall("look", {})


def test_the_end_mark_inside_a_string_is_part_of_it() -> None:
    inside = json.dumps({"text": '</tool_call> <tool_call>{"name": "x"}</tool_call>'})
    assert only(call("say", inside)) == ToolCall("say", json.loads(inside))


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("<think>{call}</think>", 0),
        ("<think>{call}</think>{call}", 1),
        ("{call}</think>{call}", 1),  # the thoughts began in the prompt
        ("{call}<think>{call}", 1),  # and have no end
        ("<think>a</think>{call}<think>{call}</think>", 0),  # what follows the last thoughts counts
        ("<think>{call}", 0),
    ],
)
def test_calls_in_thoughts_are_not_made(text: str, spoken: int) -> None:
    assert len(hermes_calls(text.replace("{call}", call("look", "{}")))) == spoken


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("<tool_call>{}</tool_call>", 'it needs a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'it needs a "name"'),
        ('<tool_call>{"name": ""}</tool_call>', 'it needs a "name"'),
        (call("add", "[1]"), '"arguments" must be a JSON object'),
        (call("add", '"{}"'), '"arguments" must be a JSON object'),
        (call("add", "null"), '"arguments" must be a JSON object'),
        ("<tool_call>[]</tool_call>", "a JSON object is expected"),
        ("<tool_call>add(1, 2)</tool_call>", "a JSON object is expected"),
        ("<tool_call>", "a JSON object is expected"),
        ('<tool_call>{"name": "add", }</tool_call>', "it is not JSON"),
        ("<tool_call>{'name': 'add'}</tool_call>", "it is not JSON"),
        ('<tool_call>{"name": "look"}', "the call does not end with </tool_call>"),
        ('<tool_call>{"name": "look"}}</tool_call>', "the call does not end with </tool_call>"),
        ('<tool_call>{"name": "look"} {"name": "look"}</tool_call>', "the call does not end with </tool_call>"),
        (call("add", '{"a": 1, "a": 2}'), "the same name twice"),
        ('<tool_call>{"name": "add", "name": "look"}</tool_call>', "the same name twice"),
        (call("add", '{"a": NaN}'), "NaN is not JSON"),
        (call("add", '{"a": -Infinity}'), "-Infinity is not JSON"),
        (call("add", '{"a": 1e999}'), "the number 1e999 is too large"),
        (call("add", f'{{"a": {"9" * 5000}}}'), "is too large"),
        (call("add", '{"a": "\\ud800"}'), "half of a character"),
        (call("add", '{"\\udc00": 1}'), "half of a character"),
        (call("add", given("[" * 40 + "]" * 40)), f"deeper than {MAX_DEPTH} levels"),
        (call("add", given("[" * 50_000)), f"deeper than {MAX_DEPTH} levels"),
        (call("add", given('{"a":' * 50_000 + "1")), f"deeper than {MAX_DEPTH} levels"),
        (call("add", given('"' + "x" * 200_000 + '"')), "it is not JSON"),
    ],
)
def test_what_is_no_proper_call_becomes_an_error(written: str, error: str) -> None:
    found = only(written)
    assert found.error is not None
    assert found.error.startswith("this is not a valid tool call: ")
    assert error in found.error
    assert len(found.error) < 300
    assert found.arguments == {}


def test_nesting_up_to_the_limit_is_read() -> None:
    # the call and its arguments are two of the levels
    assert only(call("add", given("[" * 30 + "]" * 30))).error is None
    assert only(call("add", given("[" * 31 + "]" * 31))).error is not None


def test_a_wrong_call_does_not_hide_the_next_one() -> None:
    wrong, right = hermes_calls("<tool_call>{</tool_call>" + call("look", "{}"))
    assert wrong.error is not None
    assert right == ToolCall("look", {})


def test_so_many_calls_of_a_turn_are_made_and_no_more() -> None:
    calls = hermes_calls(call("look", "{}") * 500)
    assert calls[:MAX_CALLS] == (ToolCall("look", {}),) * MAX_CALLS
    [rest] = calls[MAX_CALLS:]
    assert rest.error == f"only the first {MAX_CALLS} calls of a turn are made"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 100_000,
        '<tool_call>{"a": "' * 50_000,
        "<tool_call>" + " " * 1_000_000,
        "<think>" * 200_000,
        "</think><tool_call>{" * 50_000,
        call("add", given(json.dumps(["x"] * 20_000))) * 30,
    ],
    ids=range(6),
)
def test_hostile_text_is_read_in_bounded_work(text: str) -> None:
    begin = time.process_time()
    hermes_calls(text)
    llama_calls(text)
    assert time.process_time() - begin < 5  # a hundredth of it is usual; quadratic work would take minutes


def test_llama_calls_are_whole_turns() -> None:
    assert llama_calls(' {"name": "add", "parameters": {"a": 1}}\n') == (ToolCall("add", {"a": 1}),)
    for answer in ("", "4", '{"a": 1}', '{"name": "add"}', 'Sure: {"name": "add", "parameters": {}}', "{x}"):
        assert llama_calls(answer) == ()
    assert llama_calls('{"name": "add", "parameters": {}} done') == ()
    [wrong] = llama_calls('{"name": "add", "parameters": {"a": NaN}}')
    assert wrong.error == "this is not a valid tool call: NaN is not JSON"
    [wrong] = llama_calls('{"name": "add", "parameters": [1]}')
    assert wrong.error == 'this is not a valid tool call: "parameters" must be a JSON object'


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "factor": {"type": "number"},
        "sure": {"type": "boolean", "nullable": True},
        "names": {"type": "array", "items": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "level": {"type": "integer", "enum": [1, 2]},
        "table": {"type": "object", "additionalProperties": {"type": "number"}},
        "either": {"type": ["integer", "string"]},
        "nested": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "boolean"}]},
        "any": {},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, None),
        ({"count": 3, "factor": 2, "sure": None, "names": [], "pair": [1, "a"], "unit": "kelvin"}, None),
        ({"factor": 2.5, "sure": False, "table": {"a": 1, "b": 0.5}, "either": "x", "nested": [1], "any": [{}]}, None),
        ({"nested": True, "level": 2, "any": None}, None),
        ({"cout": 3}, "there is no argument 'cout'; the arguments are text, count, factor"),
        ({"x" * 500: 3}, "there is no argument '" + "x" * 100 + "'"),
        ({"count": "3"}, "the argument 'count' must be of type integer"),
        ({"count": 3.0}, "the argument 'count' must be of type integer"),
        ({"count": True}, "the argument 'count' must be of type integer"),
        ({"factor": False}, "the argument 'factor' must be of type number"),
        ({"sure": 1}, "the argument 'sure' must be of type boolean"),
        ({"count": None}, "the argument 'count' must be of type integer"),
        ({"names": ["a", 1]}, "every item of the argument 'names' must be of type string"),
        ({"names": "a"}, "the argument 'names' must be of type array"),
        ({"pair": [1]}, "the argument 'pair' must have 2 items"),
        ({"pair": ["a", 1]}, "every item of the argument 'pair' must be of type integer"),
        ({"unit": "fahrenheit"}, "the argument 'unit' must be one of 'celsius', 'kelvin'"),
        ({"level": True}, "the argument 'level' must be of type integer"),
        ({"table": {"a": "b"}}, "every value of the argument 'table' must be of type number"),
        ({"either": 1.5}, "the argument 'either' must be of type integer or string"),
        ({"nested": ["a"]}, "the argument 'nested' has a wrong type"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, Any], error: str | None) -> None:
    found = argument_error({"text": "a", **arguments}, SCHEMA)
    assert found == error if error is None else str(found).startswith(error)


def test_a_missing_argument_is_named() -> None:
    assert argument_error({"count": 3}, SCHEMA) == "the argument 'text' is missing"
    assert argument_error({"a": 1}, {"type": "object", "properties": {}}) == (
        "there is no argument 'a'; the arguments are none"
    )
