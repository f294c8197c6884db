"""The whole response is the right answer."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vcpo.records import Grade
from vcpo.tasks.graders.protocol import GraderOptions, TextGrader, verdict
from vcpo.tasks.options import options_or_user_error


class ExactOptions(GraderOptions):
    """Options of the grader ``exact``."""

    ignore_case: bool = Field(False, description="upper and lower case are the same")


class ExactGrader(TextGrader):
    """Reward 1 when the response equals the right answer, outer whitespace aside."""

    Options = ExactOptions

    def __init__(self, **options: Any) -> None:
        self._options = options_or_user_error(ExactOptions, options)

    def answer(self, response: str) -> str | None:
        """The whole response."""
        text = response.strip()
        return (text.casefold() if self._options.ignore_case else text) or None

    def grade(self, gold: str, response: str) -> Grade:
        """Compare texts."""
        return verdict(same_text(gold, response, self._options.ignore_case))


def same_text(first: str, second: str, ignore_case: bool) -> bool:
    """Whether two texts are equal, outer whitespace aside."""
    first, second = first.strip(), second.strip()
    return first.casefold() == second.casefold() if ignore_case else first == second
