"""A bounded evaluator of arithmetic: whole numbers, ``+ - * /`` and parentheses, in exact fractions.

Made for text that a model wrote, which may be anything. The text is parsed here, never handed to Python; its length,
nesting and numbers are bounded, and there is no operation whose result can be much longer than its operands, so any
text is settled in well under 10 ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 256  # characters
MAX_DEPTH = 32  # nested parentheses
MAX_DIGITS = 9  # in one number

_TOKEN = re.compile(r"[ \t\r\n]*([0-9]+|[-+*/()])")


class ExpressionError(ValueError):
    """Why a text has no value as an arithmetic expression."""


@dataclass(frozen=True)
class Evaluation:
    """The value of an expression, and the numbers written in it from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Evaluation:
    """The value of an arithmetic expression, with the usual precedence.

    Signs are no part of numbers (``-3`` is refused), nor are decimal points, powers or leading zeros. Raises
    ExpressionError for anything that is not an expression, is over a bound, or divides by zero.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    return _Parser(_tokens(text)).run()


def _tokens(text: str) -> list[str]:
    tokens = []
    text = text.strip(" \t\r\n")
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position : position + 10]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum = product (+|- product)*, product = atom (*|/ atom)*, atom = number or (sum)."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0
        self._numbers: list[int] = []

    def run(self) -> Evaluation:
        value = self._sum()
        if self._peek():
            raise ExpressionError(f"unexpected {self._peek()!r}")
        return Evaluation(value, tuple(self._numbers))

    def _sum(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            if self._take() == "+":
                value += self._product()
            else:
                value -= self._product()
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while self._peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._atom()
                continue
            divisor = self._atom()
            if divisor == 0:
                raise ExpressionError("division by zero")
            value /= divisor
        return value

    def _atom(self) -> Fraction:
        token = self._take()
        if token == "(":
            return self._parenthesized()
        if not token.isdecimal():
            raise ExpressionError(f"expected a number, not {token!r}" if token else "ends too early")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number with more than {MAX_DIGITS} digits")
        if token != "0" and token.startswith("0"):
            raise ExpressionError("a number with a leading zero")
        self._numbers.append(int(token))
        return Fraction(token)

    def _parenthesized(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} nested parentheses")
        value = self._sum()
        if self._take() != ")":
            raise ExpressionError("a parenthesis is not closed")
        self._depth -= 1
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token
