"""The number that a response ends in (or that is in its last box) is the right one. GSM8K's grader."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vcpo.records import Grade
from vcpo.tasks.answers import final_number, parse_number
from vcpo.tasks.graders.protocol import GraderOptions, TextGrader, answer_text, short, verdict
from vcpo.tasks.options import options_or_user_error

GOLD_MARK = "####"


class NumberOptions(GraderOptions):
    """Options of the grader ``number``."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="how far off a number may be, as a share of the right one; 0 compares exact fractions"
    )


class NumberGrader(TextGrader):
    """Reward 1 when the response's number equals the right answer's, else 0 (see ``answers.final_number``).

    Numbers are compared as fractions: ``18``, ``$18.00`` and ``36/2`` are the same answer.
    """

    Options = NumberOptions

    def __init__(self, **options: Any) -> None:
        self._tolerance = options_or_user_error(NumberOptions, options).tolerance

    def gold(self, answer: Any) -> str:
        """What follows the last ``####``, or the whole; it must hold exactly one number."""
        gold = answer_text(answer).rpartition(GOLD_MARK)[2].strip()
        if parse_number(gold) is None:
            raise ValueError(f"has no single number as its answer, but {short(gold)}")
        return gold

    def answer(self, response: str) -> str | None:
        """The number, as a fraction in lowest terms."""
        number = final_number(response)
        return None if number is None else str(number)

    def grade(self, gold: str, response: str) -> Grade:
        """Compare the last number."""
        right, answer = parse_number(gold), final_number(response)
        if right is None or answer is None:
            return verdict(False)
        return verdict(abs(answer - right) <= abs(right) * self._tolerance if self._tolerance else answer == right)
