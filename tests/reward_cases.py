"""Reward functions as users write them, good and bad, named in configurations by this file's path."""

from __future__ import annotations

import math
from typing import Any

_calls = 0


def digit_mean(completions: list[str], **columns: Any) -> list[float]:
    """A reward that nearly every response has another value of, so that an untrained model has a gradient."""
    values = [[int(character) for character in text if character.isdecimal()] for text in completions]
    return [sum(digits) / (9 * len(digits)) if digits else 0.0 for digits in values]


def raises_later(completions: list[str], **columns: Any) -> list[float]:
    """Works for some groups, then fails with a message of its own."""
    global _calls
    _calls += 1
    if _calls > 20:  # more than the groups that may start before the first step
        raise ZeroDivisionError("the judge has no more paper")
    return digit_mean(completions)


def one_too_few(completions: list[str], **columns: Any) -> list[float]:
    return digit_mean(completions)[1:]


def not_a_number(completions: list[str], **columns: Any) -> list[float]:
    return [math.nan for _ in completions]


def first_unscored(completions: list[str], **columns: Any) -> list[float | None]:
    return [None, *digit_mean(completions)[1:]]


def all_unscored(completions: list[str], **columns: Any) -> list[float | None]:
    return [None for _ in completions]
