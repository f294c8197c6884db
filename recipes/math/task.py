"""Competition mathematics with LaTeX answers: MATH, MATH-500, DAPO, AIME. A task of its own, outside of the package.

Rows are ``{"problem": ..., "answer": ...}`` in a .jsonl, .parquet or .csv file; MATH's own rows have no answer column,
and their answer is the last ``\\boxed{...}`` of ``solution``. Named in a recipe as ``recipes/math/task.py:MathTask``.

Answers are compared by math-verify (``pip install math-verify``). Its time-outs use signal.alarm, which only works in
the main thread, and grading runs in another one; they are switched off. Instead the work is bounded: only the last box
of a response counts, it must be short, and expressions that are costly by their looks are wrong answers unseen. That is
no hard limit: another expression that makes sympy work for ever would hold up the run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field

from vcpo.errors import UserError
from vcpo.records import Grade, Message, Problem
from vcpo.tasks.data import DataOptions, DataTask
from vcpo.tasks.rows import Table

MAX_ANSWER = 300  # characters; the longest right answer of MATH-500 has 53
_TAIL = 4000  # characters at the end of a response in which its last box is looked for
# what sympy could work on for ever: exponents of three digits, powers of powers, brackets to a power of two digits,
# factorials (\! is a space), large binomials, and numbers that no answer has
_COSTLY = re.compile(
    r"\^\s*\{?\s*[-+]?\d{3}|\^\s*\{[^{}]*\^|\^\s*\S\s*\^|[)}\]]\s*\^\s*\{?\s*[-+]?\d\d"
    r"|[)}\]]\s*\^\s*\{?\s*\d\s*\}?\s*(?:\\right)?\s*[)}\]]\s*\^|(?<!\\)!|factorial|binom.*\d{4}|\d{40}"
)


class MathOptions(DataOptions):
    """Options of the task."""

    problem_column: str = Field("problem", description="the column with the question")
    answer_column: str = Field("answer", description="the column with the right answer, text or a number")
    solution_column: str = Field("solution", description="whose last box is the answer in rows without an answer")
    chat: bool = Field(True, description="chat messages for models with a chat template; false for plain text")
    instruction: str = Field(
        "Let's think step by step and output the final answer within \\boxed{}.",
        description="what follows the question",
    )


class MathTask(DataTask):
    """Reward 1 when the response's last box is the right answer, else 0.

    ``None`` (could not be scored) when the right answer itself cannot be parsed and the two texts differ.
    """

    Options = MathOptions
    options: MathOptions

    def __init__(self, **options: Any) -> None:
        """Raises UserError when math-verify is not installed, and for wrong options or data."""
        _math_verify()
        super().__init__(**options)

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Compare each response's last box with the right answer."""
        rewards = [judge(p.columns["gold"], text) for p, text in zip(problems, completions, strict=True)]
        return [Grade(reward=reward, correct=reward == 1) for reward in rewards]

    def _problem(self, table: Table, index: int) -> Problem:
        options, row = self.options, table.rows[index]
        question = table.text(index, options.problem_column)
        if row.get(options.answer_column) is None and options.solution_column in row:
            gold = last_box(table.text(index, options.solution_column))
            if gold is None:
                raise table.error(index, options.solution_column, "has no \\boxed{...} that could be the answer")
        else:
            gold = str(table.value(index, options.answer_column)).strip()
        prompt: str | list[Message] = f"{question}\n{options.instruction}" if options.instruction else question
        if options.chat:
            prompt = [{"role": "user", "content": str(prompt)}]
        return Problem(table.name(index), prompt, {**row, "gold": gold})


def judge(gold: str, response: str) -> float | None:
    """1 if the response's last box equals the right answer, else 0; ``None`` if that cannot be said."""
    answer = last_box(response[-_TAIL:])
    if answer is None or len(answer) > MAX_ANSWER:
        return 0.0
    if "".join(answer.split()) == "".join(gold.split()):
        return 1.0
    if _COSTLY.search(answer):
        return 0.0
    right = _parsed(gold)
    if not right:
        return None
    _, verify = _math_verify()
    try:
        return float(verify(list(right), list(_parse(answer)), timeout_seconds=None))
    except Exception:  # of sympy, on text that is no mathematics
        return 0.0


def last_box(text: str) -> str | None:
    """What is inside the last ``\\boxed{...}`` whose braces close; ``None`` without one."""
    begin = len(text)
    while (begin := text.rfind("\\boxed{", 0, begin)) >= 0:
        depth, first = 0, begin + len("\\boxed{")
        for position in range(first, len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth < 0:
                return text[first:position].strip()
    return None


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> tuple[Any, ...]:
    """The right answer, which every response of a group is compared with."""
    return _parse(gold)


def _parse(answer: str) -> tuple[Any, ...]:
    parse, _ = _math_verify()
    try:
        return tuple(parse(f"\\boxed{{{answer}}}", parsing_timeout=None))
    except Exception:  # of sympy, on text that is no mathematics
        return ()


def _math_verify() -> tuple[Any, Any]:
    """``parse`` and ``verify``. Raises UserError when the package is missing."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError("this task compares answers with the package math-verify: pip install math-verify") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that it has no time-out
    return parse, verify
