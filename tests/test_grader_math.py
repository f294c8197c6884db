"""Answers compared as mathematics, in any thread, and what is refused before a parser sees it."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.records import Grade
from vcpo.tasks.competition import MathTask
from vcpo.tasks.graders.mathematics import MathGrader, answer_of, is_costly

pytest.importorskip("math_verify")


def judge(gold: str, response: str) -> float | None:
    grader = MathGrader()
    return grader.grade(grader.gold(gold), response).reward


def made_task(path: Path, *rows: dict[str, Any], **options: Any) -> MathTask:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MathTask(path=str(path), **options)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} or rather \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{ 7 } and \\boxed{unfinished", "7"),
        ("\\boxed{\\left\\{1,2\\right\\}}", "\\left\\{1,2\\right\\}"),
        ("\\boxed{}", ""),
        ("the answer is 7", None),
        ("\\boxed{", None),
        # DAPO's form
        ("thoughts\nAnswer: $34$", "34"),
        ("**Answer:** 34.\n", "34"),
        ("Answer: 3\nno,\nAnswer: \\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: 3, or \\boxed{4}", "4"),
    ],
)
def test_the_answer_is_the_last_closed_box_or_what_follows_the_last_answer_mark(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("\\frac{1}{2}", "\\boxed{\\dfrac{1} {2}}"),
        ("\\text{Evelyn}", "\\boxed{Evelyn}"),
        ("113", "\\boxed{\\textbf{(113) }}"),
        ("(3,\\pi)", "\\boxed{\\left( 3, \\pi \\right)}"),
        ("10,080", "\\boxed{10,\\!080}"),
        ("5", "\\boxed{5.}"),
    ],
)
def test_what_only_looks_different_needs_no_parser(gold: str, response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grader = MathGrader()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert grader.grade(gold, response) == Grade(1.0, correct=True)


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 301,
        "9^{9^{9^9}}",
        "9**9**9",
        "2^{99999999}",
        "2**99999999",
        "99999!",
        "((9^9)^9)^9",
        "(9)^{(9)^{(9)}}",
        "(1+x+y+z)^{99}",
        "{(x+y+z+w)^9}(a+b+c+d)^9",
        "\\binom{99999}{999}",
        "7" * 200,
        "1e99999999",
        "\\sum_{n=1}^{99999}\\frac{1}{n^n}",
        "\\int_0^1 x^x dx",
        "(" * 16 + "2" + ")" * 16,  # of which the parser alone would fill the memory
        "\\frac{1}{" * 16 + "2" + "}" * 16,
        "\\{" * 16 + "2" + "\\}" * 16,
        "|" * 16 + "2" + "|" * 16,
    ],
)
def test_answers_that_are_long_or_costly_are_wrong_unseen(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grader = MathGrader()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert grader.grade("42", f"\\boxed{{{answer}}}") == Grade(0.0)


@pytest.mark.parametrize(
    "answer",
    [
        "x^{12}+3x^2",
        "(x+1)^2(x-3)^4",
        "\\frac{1+\\sqrt{5}}{2}",
        "\\left(-\\infty, \\frac{-1-\\sqrt{3}}{2}\\right]\\cup[2,\\infty)",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "10^{99}",
        "|x-3|+|y|",
        "\\$1,234.50",
    ],
)
def test_answers_as_they_are_usual_are_no_costly_ones(answer: str) -> None:
    assert not is_costly(answer)


@pytest.mark.parametrize("unit", ["(", "\\boxed{", "\\text{", "Answer:", "Answer: {", "^{", ")^9", "$", "\\!"])
def test_hostile_repetition_stays_linear(unit: str) -> None:
    start = time.process_time()
    judge("42", unit * (200_000 // len(unit)))
    judge("42", f"\\boxed{{{unit * (299 // len(unit))}}}")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("\\frac{1}{2}", "0.5", 1.0),
        ("204", "204.0", 1.0),
        ("204", "205", 0.0),
        ("025", "25", 1.0),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", 1.0),
        ("(3,4)", "(4,3)", 0.0),
        ("\\{1,2\\}", "\\{2,1\\}", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("10080", "10,\\!080", 1.0),
        ("42", "}{ \\left( nonsense", 0.0),
        ("42", "", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics_in_any_thread(gold: str, answer: str, reward: float) -> None:
    rewards: list[float | None] = []
    thread = threading.Thread(target=lambda: rewards.append(judge(gold, f"\\boxed{{{answer}}}")))
    thread.start()
    thread.join()
    assert rewards == [reward]


def test_a_right_answer_that_cannot_be_parsed_gives_no_reward_unless_the_texts_are_equal() -> None:
    gold = "\\left( \\frac{"
    assert judge(gold, "\\boxed{1}") in (None, 0.0)
    grader = MathGrader()
    grade = grader.grade("", "\\boxed{1}")
    assert grade.reward is None
    assert grade.failure == "math-verify cannot parse the right answer ''"


def test_rows_of_MATH_take_the_answer_from_their_solution(tmp_path: Path) -> None:
    task = made_task(tmp_path / "rows.jsonl", {"problem": "1 + 1?", "solution": "It is $\\boxed{2}$.", "level": 1})
    problem = task.train_problem(0, 0)
    assert problem.columns["gold"] == "2"
    assert problem.columns["level"] == 1
    assert problem.prompt[0]["content"].startswith("1 + 1?\nLet's think step by step")  # type: ignore[index]
    grades = task.grade([problem, problem], ["\\boxed{2}", "\\boxed{3}"])
    assert [(g.reward, g.correct) for g in grades] == [(1.0, True), (0.0, False)]


def test_an_answer_column_goes_before_the_solution_and_may_hold_numbers(tmp_path: Path) -> None:
    row = {"problem": "1 + 1?", "solution": "\\boxed{3}", "answer": 2}
    assert made_task(tmp_path / "rows.jsonl", row).train_problem(0, 0).columns["gold"] == "2"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"problem": "1?", "solution": "long, " * 60}, "row 2: column 'solution' has a right answer of 359 characters"),
        ({"problem": "1?", "solution": "\\boxed{ }"}, r"row 2: column 'solution' has an empty \\boxed"),
        ({"problem": "1?"}, "row 2: column 'solution' is missing"),
        ({"problem": "1?", "solution": " "}, "row 2: column 'solution' is empty"),
    ],
)
def test_a_row_without_any_answer_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        made_task(tmp_path / "rows.jsonl", {"problem": "1 + 1?", "solution": "\\boxed{2}"}, row)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'vcpo\[math\]'"):
        made_task(tmp_path / "rows.jsonl", {"problem": "1 + 1?", "answer": 2})
