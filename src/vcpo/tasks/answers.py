"""The number that a response gives as its answer.

Responses are hostile text: every pattern here is anchored or bounded so that the work is linear in the length, and
numbers longer than ``MAX_NUMBER_LENGTH`` are no answers.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_LENGTH = 60

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])-)?[$€£¥₹]?"
    r"(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?: (?P<part>[0-9]{1,4}/[0-9]{1,4})(?![0-9/]))?"
    r"(?: ?/ ?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
)
_BRACE = re.compile(r"\\[{}]|(?P<box>\\f?box(?:ed)?\s{0,8}\{)|(?P<open>\{)|(?P<close>\})")
_FRACTION = re.compile(r"\\[dtc]?frac ?(?:\{([^{}]{1,40})\} ?\{([^{}]{1,40})\}|([0-9]) ?([0-9]))")
_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-z}])\^(?:[0-9]|\{[0-9]\})")
_COMMAND = re.compile(r"\\[A-Za-z]{1,40}")


def final_number(response: str) -> Fraction | None:
    """The answer of a response: the number in its last ``\\boxed{...}``, or without a box the last number in it.

    A box must hold one number (with units, currency and LaTeX around it, or after its last ``=``); otherwise the
    answer is None, as it is for a response without numbers.
    """
    text = _plain(response)
    boxed = last_box(text)
    if boxed is None:
        return _last_number(text)
    inside = _COMMAND.sub(" ", boxed.rpartition("=")[2])
    return parse_number(inside.replace("{", " ").replace("}", " "))


def parse_number(text: str) -> Fraction | None:
    """The value of a text that holds exactly one number, else None.

    Understood: ``1,234.50``, ``-3``, ``−3``, ``$18``, ``-$18``, ``18%`` (the percent sign is a unit), ``3/4``,
    ``1 3/4``, ``\\frac{3}{4}``, units and words around the number, a trailing period.
    """
    matches = list(_NUMBER.finditer(_plain(text)))
    return _value(matches[0]) if len(matches) == 1 else None


def last_box(text: str) -> str | None:
    """The contents of the ``\\boxed{...}`` that closes last, in one pass over the braces; ``None`` without one."""
    contents = None
    opened: list[int | None] = []  # where the contents of each open brace start, for a box
    for match in _BRACE.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            start = opened.pop()
            if start is not None:
                contents = text[start : match.start()]
    return contents


def _last_number(text: str) -> Fraction | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > MAX_NUMBER_LENGTH:
        return None
    value = Fraction(match["value"].replace(",", ""))
    if match["part"]:
        numerator, denominator = map(int, match["part"].split("/"))
        if denominator == 0:
            return None
        value += Fraction(numerator, denominator)
    if match["divisor"]:
        divisor = Fraction(match["divisor"])
        if divisor == 0:
            return None
        value /= divisor
    return -value if match["sign"] else value


def _plain(text: str) -> str:
    """Text with typographic and LaTeX spellings of numbers made plain."""
    for spelling, plain in (
        ("\u2212", "-"),  # minus sign
        ("\u2013", "-"),  # en dash
        ("\uff0d", "-"),  # full-width hyphen
        ("\\$", "$"),
        ("\\%", "%"),
        ("{,}", ","),
        ("\\!", ""),
    ):
        text = text.replace(spelling, plain)
    text = re.sub(r"(?<=[0-9])(?:\\,|\u202f|\u2009|\u00a0)(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<=[0-9]) ?(?=\\[dtc]?frac)", " ", text)
    text = _UNIT_EXPONENT.sub("", text)
    return _FRACTION.sub(lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)
