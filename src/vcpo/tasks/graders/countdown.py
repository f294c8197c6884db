"""Countdown: the response's expression uses every number exactly once and reaches the target."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vcpo.records import Grade
from vcpo.tasks.arithmetic import MAX_DIGITS, ExpressionError, evaluate
from vcpo.tasks.graders.protocol import GraderOptions, short
from vcpo.tasks.options import options_or_user_error


class CountdownGraderOptions(GraderOptions):
    """Options of the grader ``countdown``."""

    bare: bool = Field(False, description="the whole response is the expression; false: what the last <answer> tag has")
    format_reward: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="reward of a well-formed expression that is wrong"
    )


class CountdownGrader:
    """Reward 1 for a correct expression, ``format_reward`` for a well-formed wrong one, else 0.

    A right answer is ``{"numbers" or "nums": [...], "target": ...}``, as in verl's rows.
    """

    Options = CountdownGraderOptions
    needs_time_limit = False

    def __init__(self, **options: Any) -> None:
        self._options = options_or_user_error(CountdownGraderOptions, options)

    def gold(self, answer: Any) -> dict[str, Any]:
        """Numbers and target, checked."""
        if not isinstance(answer, dict):
            raise ValueError(f"must hold the target and the numbers, not {short(answer)}")
        name = "nums" if "nums" in answer else "numbers"
        numbers, target = answer.get(name), answer.get("target")
        if not isinstance(numbers, list) or not numbers or not all(_is_number(number) for number in numbers):
            raise ValueError(f"has {name} that must be a list of whole numbers, not {short(numbers)}")
        if not _is_number(target):
            raise ValueError(f"has a target that must be a whole number, not {short(target)}")
        return {"numbers": numbers, "target": target}

    def answer(self, response: str) -> str | None:
        """The expression without white space, if it is well formed."""
        expression = self._expression(response)
        try:
            evaluate(expression)
        except ExpressionError:
            return None
        return "".join(expression.split())

    def grade(self, gold: dict[str, Any], response: str) -> Grade:
        """Evaluate the expression, bounded and exactly; its form is a part of the grade."""
        try:
            evaluation = evaluate(self._expression(response))
        except ExpressionError:
            return Grade(reward=0.0, correct=False, parts={"format": 0.0})
        same_numbers = sorted(evaluation.numbers) == sorted(gold["numbers"])
        correct = same_numbers and evaluation.value == gold["target"]
        return Grade(reward=1.0 if correct else self._options.format_reward, correct=correct, parts={"format": 1.0})

    def _expression(self, response: str) -> str:
        return response if self._options.bare else _last_answer_tag(response)


def _last_answer_tag(completion: str) -> str:
    """The contents of the last ``<answer>...</answer>``, or nothing."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end] if start >= 0 else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**MAX_DIGITS
