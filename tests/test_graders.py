"""The graders of rows, one by one, and how one is chosen."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.records import Grade
from vcpo.tasks.graders.choice import chosen_letter
from vcpo.tasks.graders.protocol import AnswerGrader
from vcpo.tasks.graders.registry import BUILT_IN, make_grader, source_grader, split_grader

GIVEN: dict[str, tuple[dict[str, Any], Any]] = {  # options and a right answer of each
    "exact": ({}, "Paris"),
    "number": ({}, "18"),
    "math": ({}, "\\frac{1}{2}"),
    "choice": ({}, "B"),
    "regex": ({"pattern": "is (.*)"}, "Paris"),
    "countdown": ({}, {"numbers": [1, 2], "target": 3}),
}


def judged(name: str, answer: Any, *responses: str, **options: Any) -> list[float | None]:
    grader = make_grader({"name": name, **options})
    return [grader.grade(grader.gold(answer), response).reward for response in responses]


def test_exact_wants_the_whole_response() -> None:
    assert judged("exact", "Paris", " Paris\n", "paris", "Paris.") == [1, 0, 0]
    assert judged("exact", "Paris", "PARIS", ignore_case=True) == [1]
    assert judged("exact", 4, "4", "4.0") == [1, 0]


def test_number_compares_values_exactly_or_with_a_tolerance() -> None:
    assert judged("number", "so\n#### 1,500", "it is $1500.00", "\\boxed{3000/2}", "1501", "none") == [1, 1, 0, 0]
    assert judged("number", 3.14159, "3.14", "3.2", "-3.14", tolerance=0.01) == [1, 0, 0]
    assert judged("number", 0, "0", "0.001", tolerance=0.5) == [1, 0]


@pytest.mark.parametrize("answer", ["two", "1 or 2", "", None, True, float("nan"), [1], "9" * 61])
def test_number_refuses_what_is_no_single_number(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"^(has|is|must) "):
        make_grader("number").gold(answer)


def test_regex_takes_the_first_group_of_the_last_match() -> None:
    assert judged("regex", "B", "Answer: A. No, Answer: B", "B", pattern=r"Answer: (\w)") == [1, 0]
    assert judged("regex", "42", "7 and 42", "42 and 7", pattern=r"\d+") == [1, 0]
    assert judged("regex", "yes", "ANSWER: YES", pattern=r"answer: (\w+)", ignore_case=True) == [1]
    assert judged("regex", "x", "a", pattern="a|(b)") == [0]  # a group that takes no part


def test_a_pattern_that_backtracks_for_ever_gives_no_reward_in_time() -> None:
    start = time.monotonic()
    grader = make_grader({"name": "regex", "pattern": r"(a|aa)+$", "timeout": 0.2})
    grade = grader.grade("x", "a" * 60 + "b")
    assert grade == Grade(None, failure="task.grader.pattern took longer than 0.2 s on the response")
    assert grader.answer("a" * 60 + "b") is None
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (b) ", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris is the capital.", "B"),
        ("Thinking...\nB", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), since A is in Germany.", "B"),
        ("The correct answer is: **B**", "B"),
        ("The best option is C", "C"),
        ("Answer: B", "B"),
        ("answer: (c) Rome", "C"),
        ("So the answer is $\\boxed{B}$.", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{\\textbf{(B) } 42}", "B"),
        ("\\boxed{(C)}", "C"),
        ("Option A fails. The answer is D", "D"),
        ("The answer is A.", "A"),
        ("The answer is A", "A"),
        ("The answer is A because it is north.", "A"),
        ("Answer: A\nAnswer: B", "B"),
        ("The answer is \\textbf{B}", "B"),
        # words, not letters
        ("The answer is a city.", None),
        ("The answer is A city in France", None),
        ("The answer is I think Paris", None),
        ("The answer is Paris", None),
        ("The answer is B's neighbour", None),
        ("I do not know", None),
        ("A good question", None),
        ("", None),
        ("\\boxed{Paris}", None),
        ("Answer: Z", None),  # no choice
    ],
)
def test_the_chosen_letter(response: str, letter: str | None) -> None:
    assert chosen_letter(response, "ABCDEFGHIJ") == letter


def test_choices_are_letters_or_counted_from_0() -> None:
    assert judged("choice", "(b)", "B", "A") == [1, 0]
    assert judged("choice", 1, "The answer is B.") == [1]
    for answer in ("Paris", "E", 4, -1, True, "", None):
        with pytest.raises(ValueError, match=r"^(is|must) "):
            make_grader({"name": "choice", "letters": "ABCD"}).gold(answer)


@pytest.mark.parametrize("unit", ["answer is ", "answer: *", "(a", "**", " ", "A\n", "answer", "\\boxed{", "option [ "])
def test_hostile_repetition_stays_linear(unit: str) -> None:
    start = time.process_time()
    chosen_letter(unit * (200_000 // len(unit)), "ABCD")
    assert time.process_time() - start < 3


def test_countdown_takes_verls_right_answers() -> None:
    answer = {"target": 15, "numbers": [3, 5]}
    assert judged("countdown", answer, "<answer>5*3</answer>", "5*3", "<answer>15</answer>") == [1, 0, 0]
    assert judged("countdown", answer, "5*3", "5+3", bare=True, format_reward=0.1) == [1, 0.1]
    for wrong in ("15", {"target": 15}, {"numbers": [3, "5"], "target": 15}, {"numbers": [3, 5]}):
        with pytest.raises(ValueError, match=r"^(must|has) "):
            make_grader("countdown").gold(wrong)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_grader_keeps_the_contract(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    options, answer = GIVEN[name]
    grader = make_grader({"name": name, **options})
    assert isinstance(grader, AnswerGrader)
    gold = grader.gold(answer)
    for text in ("", " \n", "\x00\ud800", "9" * 100_000, "(" * 50_000, "\\boxed{" * 20_000, "<answer>" * 20_000):
        start = time.process_time()
        grade, read = grader.grade(gold, text), grader.answer(text)
        assert time.process_time() - start < 3
        assert not grade.correct
        assert not grade.reward
        assert read is None or isinstance(read, str)


@pytest.mark.parametrize(
    ("grader", "sentence"),
    [
        ("exatc", "unknown grader task.grader='exatc'; did you mean 'exact'?"),
        ({"pattern": "x"}, "task.grader needs a name"),
        ({"name": "regex"}, "task.grader.pattern is required"),
        ({"name": "regex", "pattern": "("}, "task.grader.pattern '(' is no regular expression"),
        ({"name": "choice", "leters": "AB"}, "unknown key task.grader.leters; did you mean 'letters'?"),
        ({"name": "choice", "letters": "abc"}, "task.grader.letters must be different capital letters"),
        ({"name": "number", "tolerance": -1}, "task.grader.tolerance = -1 "),
        ("nowhere.py:Grader", "there is no file"),
    ],
)
def test_a_wrong_grader_is_refused_in_one_sentence(grader: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        split_grader(grader)
    with pytest.raises(UserError, match=re.escape(sentence)):
        make_grader(grader)


def test_a_grader_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from vcpo.records import Grade\n"
        "class Longest:\n"
        "    def __init__(self, limit=3):\n"
        "        self.limit = limit\n"
        "    def gold(self, answer):\n"
        "        return answer\n"
        "    def answer(self, response):\n"
        "        return response\n"
        "    def grade(self, gold, response):\n"
        "        return Grade(min(len(response), self.limit) / self.limit, response == gold)\n"
        "class Half:\n"
        "    gold = None\n"
    )
    grader = make_grader({"name": f"{file}:Longest", "limit": 4})
    assert grader.grade("abcd", "abcd") == Grade(1.0, correct=True)
    with pytest.raises(UserError, match=r"unexpected keyword argument 'limits'"):
        make_grader({"name": f"{file}:Longest", "limits": 4})
    with pytest.raises(UserError, match="of type Half without answer, grade"):
        make_grader(f"{file}:Half")


def test_sources_of_verls_rows_have_graders() -> None:
    assert source_grader("openai/gsm8k") == "number"
    assert source_grader("lighteval/MATH") == "math"
    assert source_grader("aime2025") == "math"
    assert source_grader("some/else") is None
    assert source_grader(None) is None
