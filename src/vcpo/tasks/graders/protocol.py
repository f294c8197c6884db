"""What a grader is, and the base of its options."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any, ClassVar, Protocol, runtime_checkable

from vcpo.records import Grade
from vcpo.tasks.options import TaskOptions


class GraderOptions(TaskOptions):
    """Base of every grader's options."""


@runtime_checkable
class AnswerGrader(Protocol):
    """Compares responses with right answers. Imports without torch; its constructor takes its options as keywords.

    A grader may say ``needs_time_limit = True``: its work on hostile text is not bounded by itself, so that it only
    runs in grading processes, which are ended when their time is over.
    """

    def gold(self, answer: Any) -> Any:
        """The right answer of a row as ``grade`` takes it: plain data, kept in the problem's column ``gold``.

        Called for every row before training. Raises ValueError for what is no right answer; the message continues
        the name of a column ("has no single number as its answer, but 'seven'").
        """
        ...

    def answer(self, response: str) -> str | None:
        """The answer that a response gives, for votes: equal answers are equal texts. Bounded work."""
        ...

    def grade(self, gold: Any, response: str) -> Grade:
        """The verdict on one response, which is hostile text.

        A grade without a reward says in ``failure`` why it has none.
        """
        ...


class TextGrader:
    """Base of graders whose right answers are texts or numbers."""

    needs_time_limit: ClassVar[bool] = False

    def gold(self, answer: Any) -> Any:
        """The answer as text, without outer whitespace."""
        return answer_text(answer)


def answer_text(answer: Any) -> str:
    """A right answer as text. Raises ValueError when it is neither text nor a number, or is empty."""
    if isinstance(answer, str):
        text = answer.strip()
        if not text:
            raise ValueError("is empty: every row needs its right answer")
        return text
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise ValueError(f"is {answer}, not an answer (an empty cell?)")
    if not isinstance(answer, numbers.Real | Decimal):
        raise ValueError(f"must be text or a number, not {short(answer)}")
    return str(answer)


def verdict(correct: bool) -> Grade:
    """Reward 1 for a right answer, else 0."""
    return Grade(reward=float(correct), correct=correct)


def short(value: object) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
