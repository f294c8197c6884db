"""Competition mathematics: the response's answer in LaTeX is equal to the right one. For MATH, MATH-500, DAPO, AIME.

Answers are compared by math-verify (extra ``math``). Its own time-outs use signal.alarm, which only works in a main
thread; they are off, and the grading process that this runs in is ended when its time is over. Before sympy sees a
response, its answer must pass checks of its looks: short, flat, without numbers or powers that no answer has. Sixteen
nested brackets alone make the parser fill the memory of a machine.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from vcpo.errors import UserError
from vcpo.records import Grade
from vcpo.tasks.answers import last_box
from vcpo.tasks.graders.protocol import GraderOptions, TextGrader, answer_text, verdict
from vcpo.tasks.options import options_or_user_error

MAX_ANSWER = 300  # characters; the longest right answer of MATH-500 has 53
MAX_DEPTH = 6  # nested brackets; right answers of MATH-500 have at most 2
MAX_POWERS = 12  # sum of the exponents of brackets, which are multiplied out
# exponents of three digits, powers of powers, brackets to a power of two digits, factorials (\! is a space), large
# binomials, sums and the like (which sympy works out term by term), and numbers that no answer has
_COSTLY = re.compile(
    r"(?:\^|\*\*)\s*\{?\s*[-+]?\d{3}|\^\s*\{[^{}]*\^|\^\s*\S\s*\^|[)}\]]\s*\^\s*\{?\s*[-+]?\d\d"
    r"|[)}\]]\s*\^\s*\{?\s*\d\s*\}?\s*(?:\\right)?\s*[)}\]]\s*\^|(?<!\\)!|factorial|binom.*\d{4}|\d{40}"
    r"|\\(?:sum|prod|i*int|oint|lim|bigcup|bigcap)(?![a-z])|\*\*.*\*\*|[eE]\s*[-+]?\d{4}"
)
_BRACKET_POWER = re.compile(r"[)}\]]\s*\^\s*\{?\s*(\d{1,2})")
_ANSWER_LINE = re.compile(r"(?i)\banswer\s?:[ \t]{0,4}([^\n]{1,400})")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathbf|mathrm|boldsymbol|mbox)\s?\{([^{}]{0,200})\}")
_SPACING = re.compile(r"\\[!,;: ]|\\(?:left|right|displaystyle)(?![A-Za-z])|[\s$]")
_LONG_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")


class MathGraderOptions(GraderOptions):
    """The grader ``math`` has no options."""


class MathGrader(TextGrader):
    """Reward 1 when the answer is equal to the right one as mathematics, else 0.

    The answer is the contents of the last ``\\boxed{...}``; without a box, what follows the last "Answer:". A response
    without either has reward 0, and so has an answer that costs too much by its looks. There is no reward (``None``)
    when the right answer itself cannot be parsed and the two texts differ.
    """

    Options = MathGraderOptions
    needs_time_limit = True

    def __init__(self, **options: Any) -> None:
        """Raises UserError when math-verify is not installed."""
        options_or_user_error(MathGraderOptions, options)
        _math_verify()

    def gold(self, answer: Any) -> str:
        """The last box of a solution, else what follows ``####``, else the whole text."""
        text = answer_text(answer)
        boxed = last_box(text)
        if boxed is not None and not boxed.strip():
            raise ValueError("has an empty \\boxed{} as its answer")
        gold = text.rpartition("####")[2].strip() if boxed is None else boxed.strip()
        if len(gold) > MAX_ANSWER:
            raise ValueError(
                f"has a right answer of {len(gold)} characters, over {MAX_ANSWER}; a solution needs its answer in"
                " \\boxed{...}"
            )
        return gold

    def answer(self, response: str) -> str | None:
        """The answer's text without what only matters to the eye, never parsed."""
        answer = answer_of(response)
        return None if answer is None or len(answer) > MAX_ANSWER else _plain(answer) or None

    def grade(self, gold: str, response: str) -> Grade:
        """Compare texts, then mathematics."""
        answer = answer_of(response)
        if answer is None or len(answer) > MAX_ANSWER:
            return verdict(False)
        if _plain(answer) == _plain(gold):
            return verdict(True)
        if is_costly(answer):
            return verdict(False)
        right = _parsed(gold)
        if not right:
            return Grade(None, failure=f"math-verify cannot parse the right answer {gold!r}")
        return verdict(_equal(right, _parse(answer)))


def answer_of(response: str) -> str | None:
    """The contents of the last box, or without one what follows the last "Answer:"; ``None`` without either."""
    boxed = last_box(response)
    if boxed is not None:
        return boxed.strip()
    lines = _ANSWER_LINE.findall(response[-4 * MAX_ANSWER :])
    return lines[-1].strip().strip("*$. ") if lines else None


def is_costly(answer: str) -> bool:
    """Whether sympy or the parser could work on an answer for very long, by its looks."""
    if _COSTLY.search(answer):
        return True
    if sum(int(power) for power in _BRACKET_POWER.findall(answer)) > MAX_POWERS:
        return True
    depth = deepest = 0
    for character in answer:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or answer.count("|") > 2 * MAX_DEPTH


def _plain(answer: str) -> str:
    """An answer without what only matters to the eye."""
    text = _SPACING.sub("", _LONG_FRACTION.sub(r"\\frac", _WRAPPER.sub(r"\1", answer))).rstrip(".")
    inner = text[1:-1]
    return inner if text == f"({inner})" and inner.isalnum() else text


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> tuple[Any, ...]:
    """The right answer, which every response of a group is compared with."""
    return _parse(gold)


def _parse(answer: str) -> tuple[Any, ...]:
    parse, _ = _math_verify()
    try:
        return tuple(parse(f"\\boxed{{{answer}}}", parsing_timeout=None))
    except MemoryError:
        raise
    except Exception:  # of sympy, on text that is no mathematics
        return ()


def _equal(right: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    _, verify = _math_verify()
    try:
        return bool(verify(list(right), list(answer), timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:  # of sympy, on text that is no mathematics
        return False


def _math_verify() -> tuple[Any, Any]:
    """``parse`` and ``verify``. Raises UserError when the package is missing."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError(
            "the grader 'math' compares answers with the package math-verify: pip install 'vcpo[math]'"
        ) from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that it has no time-out
    return parse, verify
