"""Multiple choice: the letter that a response chooses."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from vcpo.records import Grade
from vcpo.tasks.answers import last_box
from vcpo.tasks.graders.protocol import GraderOptions, answer_text, short, verdict
from vcpo.tasks.options import options_or_user_error

_TAIL = 2000  # characters at the end of a response in which an answer is looked for
# The letter, perhaps in brackets or bold; a small letter only in brackets. "A" and "I" are also words: they need a sign
# or the end of the line behind them.
_LETTER = (
    r"(?:[(\[]\s?(?P<bracketed>[A-Za-z])\s?[)\]]"
    r"|(?P<bare>[B-HJ-Z])(?![A-Za-z0-9'\u2019])"
    r"|(?P<word>[AI])(?=\s{0,3}(?:[.,;:)\]*$]|\n|\Z|(?:because|since|as it|which)\b)))"
)
_MARKS = r"[*_$\s\"'`]{0,6}"
_PHRASE = re.compile(
    rf"(?i:answer|choice|option)(?i:\s+is)?(?i:\s+(?:option|choice))?\s?[:=]?{_MARKS}"
    rf"(?:\\(?:text|mathbf|textbf|mathrm)\{{)?{_LETTER}"
)
_BARE = re.compile(rf"{_MARKS}(?:[(\[]?(?P<only>[A-Za-z])[)\].:]?){_MARKS}\Z")
_LINE = re.compile(rf"{_MARKS}(?:[(\[](?P<bracketed>[A-Za-z])[)\]]|(?P<marked>[A-Z])[).:])(?:{_MARKS}\s\S|{_MARKS}\Z)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|boldsymbol)\s?\{([^{}]{0,40})\}")


class ChoiceOptions(GraderOptions):
    """Options of the grader ``choice``."""

    letters: str = Field("ABCDEFGHIJ", min_length=2, description="the letters that there are to choose from")

    @field_validator("letters")
    @classmethod
    def _are_letters(cls, letters: str) -> str:
        if not (letters.isascii() and letters.isalpha() and letters.isupper()) or len(set(letters)) != len(letters):
            raise ValueError("task.grader.letters must be different capital letters, such as ABCD")
        return letters


class ChoiceGrader:
    """Reward 1 when the response chooses the right letter, else 0.

    The choice is, in this order: what the last ``\\boxed{...}`` holds; the letter of the last "answer is (B)",
    "Answer: B" and the like; a last line that is a letter, or begins with one as choices do ("B) Paris"). An "A" or "I"
    that may be a word is none.
    """

    Options = ChoiceOptions
    needs_time_limit = False

    def __init__(self, **options: Any) -> None:
        self._letters = options_or_user_error(ChoiceOptions, options).letters

    def gold(self, answer: Any) -> str:
        """A letter, also in brackets, or a whole number that counts the choices from 0."""
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(self._letters):
            return self._letters[answer]
        text = answer_text(answer).strip("()[]. ").upper()
        if len(text) == 1 and text in self._letters:
            return text
        raise ValueError(
            f"must be one of the letters {self._letters}, or the number of a choice counted from 0, not {short(answer)}"
        )

    def answer(self, response: str) -> str | None:
        """The letter."""
        return chosen_letter(response, self._letters)

    def grade(self, gold: str, response: str) -> Grade:
        """Compare letters."""
        return verdict(chosen_letter(response, self._letters) == gold)


def chosen_letter(response: str, letters: str) -> str | None:
    """The letter that a response chooses (see ``ChoiceGrader``), or ``None``."""
    boxed = last_box(response)
    if boxed is not None:
        inside = _WRAPPED.sub(r"\1", boxed).strip()
        match = _BARE.match(inside) or _LINE.match(inside)
        return _allowed(match, letters)
    tail = response[-_TAIL:]
    for match in reversed(list(_PHRASE.finditer(tail))):
        if (letter := _allowed(match, letters)) is not None:
            return letter
    lines = tail.strip().splitlines()
    last = lines[-1][:200] if lines else ""
    return _allowed(_BARE.match(last) or _LINE.match(last), letters)


def _allowed(match: re.Match[str] | None, letters: str) -> str | None:
    letter = next((value for value in match.groupdict().values() if value), "") if match else ""
    return letter.upper() if letter and letter.upper() in letters else None
