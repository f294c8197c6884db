"""The bounded evaluator: right values, and every hostile text refused quickly."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.tasks.arithmetic import MAX_DEPTH, MAX_LENGTH, ExpressionError, evaluate

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("0", 0, (0,)),
        ("1+2*3", 7, (1, 2, 3)),
        ("(1+2)*3", 9, (1, 2, 3)),
        ("10-4-3", 3, (10, 4, 3)),
        ("100/10/5", 2, (100, 10, 5)),
        ("8/3*6", 16, (8, 3, 6)),
        ("8/(3-8/3)", 24, (8, 3, 8, 3)),
        (" ( 1 +\t2 )\n/ 3 ", 1, (1, 2, 3)),
        ("1/3", Fraction(1, 3), (1, 3)),
        ("((((5))))", 5, (5,)),
        ("999999999*2", 1999999998, (999999999, 2)),
    ],
)
def test_value_and_numbers(text: str, value: Fraction, numbers: tuple[int, ...]) -> None:
    result = evaluate(text)
    assert result.value == value
    assert result.numbers == numbers


HOSTILE = {
    "empty": "",
    "blank": "  \n ",
    "power tower": "9**9**9**9",
    "caret": "9^9",
    "floor division": "9//2",
    "division by zero": "1/0",
    "division by a zero expression": "1/(2-2)",
    "deep nesting": "(" * 120 + "1" + ")" * 120,
    "deeper nesting": "(" * 100_000 + "1" + ")" * 100_000,
    "unclosed": "(" * 30 + "1",
    "only closing": ")))",
    "long sum": "+".join(["1"] * 100_000),
    "huge number": "9" * 100_000,
    "ten digits": "9999999999",
    "unicode digits": "\u0661+\u0662",
    "full-width digits": "\uff11+\uff12",
    "superscript": "2\u00b2",
    "unicode operators": "6\u00f72\u00d73",
    "unicode space": "1\u00a0+2",
    "name": "x+1",
    "call": "__import__('os').system('true')",
    "attribute": "(1).bit_length()",
    "decimal point": "1.5+2",
    "exponent": "1e9",
    "hexadecimal": "0x10",
    "underscore": "1_000",
    "leading zero": "007",
    "sign": "-3+7",
    "plus sign": "+3",
    "double sign": "3--4",
    "missing operator": "3 4",
    "implicit product": "2(3+4)",
    "trailing operator": "3+",
    "comma": "1,2",
    "equation": "1+2=3",
    "two lines": "1+2\n3+4",
    "NUL": "1+\x002",
    "empty parentheses": "()",
    "lambda": "lambda: 0",
    "whitespace only between": "1" + " " * 100_000 + "+2",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_refused_within_10_ms(text: str) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(ExpressionError):
            evaluate(text)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.010


def test_the_largest_accepted_text_is_settled_within_10_ms() -> None:
    # fractions grow fastest through sums of fractions with different large denominators
    text = "+".join(f"1/{999_999_937 - 2 * i}" for i in range(100))[:MAX_LENGTH].rpartition("+")[0]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert evaluate(text).value > 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.010


def test_bounds_themselves_are_accepted() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    assert evaluate("+".join(["1"] * (MAX_LENGTH // 2))).value == MAX_LENGTH // 2


def spelled(tree: object) -> tuple[str, Fraction | None]:
    """A tree fully parenthesized, and its value by Python's own fractions; None when it divides by zero."""
    if isinstance(tree, int):
        return str(tree), Fraction(tree)
    left, sign, right = tree  # type: ignore[misc]
    left_text, left_value = spelled(left)
    right_text, right_value = spelled(right)
    text = f"({left_text}{sign}{right_text})"
    if left_value is None or right_value is None or (sign == "/" and right_value == 0):
        return text, None
    return text, OPERATIONS[sign](left_value, right_value)


trees = st.recursive(st.integers(0, 99), lambda t: st.tuples(t, st.sampled_from("+-*/"), t), max_leaves=12)


@given(trees)
def test_agrees_with_fractions_on_random_expressions(tree: object) -> None:
    text, value = spelled(tree)
    if value is None:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text).value == value


@given(st.one_of(st.text(), st.text("0123456789+-*/() ")))
def test_any_text_is_evaluated_or_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert evaluate(text).numbers
