"""What a user's pattern finds in a response is the right answer."""

from __future__ import annotations

from typing import Annotated, Any

import regex
from pydantic import Field, field_validator

from vcpo.records import Grade
from vcpo.tasks.graders.exact import same_text
from vcpo.tasks.graders.protocol import GraderOptions, TextGrader, verdict
from vcpo.tasks.options import options_or_user_error


class RegexOptions(GraderOptions):
    """Options of the grader ``regex``."""

    pattern: str = Field(
        description="a regular expression; the answer is the first group of its last match, or that whole match"
    )
    ignore_case: bool = Field(False, description="upper and lower case are the same, in the pattern and the answer")
    timeout: Annotated[float, Field(gt=0)] = Field(
        1.0, description="seconds for one response, against patterns that backtrack for ever; then it has no reward"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"task.grader.pattern {pattern!r} is no regular expression: {error}") from None
        return pattern


class RegexGrader(TextGrader):
    """Reward 1 when what the pattern finds equals the right answer (outer whitespace aside), else 0."""

    Options = RegexOptions

    def __init__(self, **options: Any) -> None:
        self._options = options_or_user_error(RegexOptions, options)
        self._pattern = regex.compile(self._options.pattern, regex.IGNORECASE if self._options.ignore_case else 0)

    def answer(self, response: str) -> str | None:
        """What the pattern finds; none when that takes too long."""
        try:
            found = (self._found(response) or "").strip()
        except TimeoutError:
            return None
        return (found.casefold() if self._options.ignore_case else found) or None

    def grade(self, gold: str, response: str) -> Grade:
        """Search, for a limited time."""
        try:
            found = self._found(response)
        except TimeoutError:
            reason = f"task.grader.pattern took longer than {self._options.timeout:g} s on the response"
            return Grade(None, failure=reason)
        return verdict(found is not None and same_text(gold, found, self._options.ignore_case))

    def _found(self, response: str) -> str | None:
        found = None
        for match in self._pattern.finditer(response, timeout=self._options.timeout):
            found = match[1 if self._pattern.groups else 0]
        return found
