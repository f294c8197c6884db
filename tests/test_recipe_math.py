"""The task of the recipes for MATH and AIME, which lies outside of the package."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.plugins import load_object

TASK = "recipes/math/task.py"
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


def judge(gold: str, response: str) -> float | None:
    result: float | None = load_object(f"{TASK}:judge")(gold, response)
    return result


def make_task(path: Path, *rows: dict[str, Any]) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_object(f"{TASK}:MathTask")(path=str(path))


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so \\boxed{1} or rather \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{ 7 } and \\boxed{unfinished", "7"),
        ("\\boxed{}", ""),
        ("the answer is 7", None),
        ("\\boxed{", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: str, inside: str | None) -> None:
    assert load_object(f"{TASK}:last_box")(text) == inside


def test_equal_texts_need_no_parser() -> None:
    assert judge("\\frac{1}{2}", "It is \\boxed{\\frac{1} {2}}.") == 1


@pytest.mark.parametrize(
    "response",
    [
        "no box, 42",
        "\\boxed{" + "9" * 301 + "}",
        "\\boxed{9^{9^{9^9}}}",
        "\\boxed{2^{99999999}}",
        "\\boxed{99999!}",
        "\\boxed{((9^9)^9)^9}",
        "\\boxed{(1+x+y+z)^{99}}",
        "\\boxed{\\binom{99999}{999}}",
        "\\boxed{" + "7" * 200 + "}",
    ],
)
def test_answers_that_are_missing_long_or_costly_are_wrong_unseen(response: str) -> None:
    assert judge("42", response) == 0


@needs_math_verify
@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("\\frac{1}{2}", "0.5", 1.0),
        ("204", "204.0", 1.0),
        ("204", "205", 0.0),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("10080", "10,\\!080", 1.0),
        ("42", "}{ \\left( nonsense", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics_in_any_thread(gold: str, answer: str, reward: float) -> None:
    rewards: list[float | None] = []
    thread = threading.Thread(target=lambda: rewards.append(judge(gold, f"\\boxed{{{answer}}}")))
    thread.start()
    thread.join()
    assert rewards == [reward]


@needs_math_verify
def test_rows_without_an_answer_take_it_from_their_solution(tmp_path: Path) -> None:
    rows = [{"problem": "1 + 1?", "solution": "It is $\\boxed{2}$."}, {"problem": "2 + 2?", "answer": 4}]
    task = make_task(tmp_path / "rows.jsonl", *rows)
    problems = {p.columns["gold"]: p for p in (task.train_problem(0, 0), task.train_problem(1, 0))}
    assert set(problems) == {"2", "4"}
    assert problems["2"].prompt[0]["content"].startswith("1 + 1?\n")
    grades = task.grade([problems["4"], problems["4"]], ["\\boxed{4}", "\\boxed{5}"])
    assert [(g.reward, g.correct) for g in grades] == [(1.0, True), (0.0, False)]


@needs_math_verify
def test_a_row_without_any_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1: column 'solution' has no"):
        make_task(tmp_path / "rows.jsonl", {"problem": "1 + 1?", "solution": "two"})


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match="pip install math-verify"):
        make_task(tmp_path / "rows.jsonl", {"problem": "1 + 1?", "answer": 2})
