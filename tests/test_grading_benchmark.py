"""The benchmark of the graders runs, and says what does not grade as it should; on rows of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("math_verify")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GSM8K = [
    {"question": "Ann has 2 pens and buys 3. How many?", "answer": "She has 2+3=<<2+3=5>>5 pens.\n#### 5"},
    {"question": "A bike costs $1,200 and a lock $30. In all?", "answer": "1200+30=$<<1200+30=1230>>1,230\n#### 1,230"},
    {"question": "It is 2 degrees and falls by 4. Now?", "answer": "2-4=<<2-4=-2>>-2\n#### -2"},
]
MATH = [
    {"problem": "Half of a half?", "solution": "It is $\\boxed{\\frac14}$.", "answer": "\\frac{1}{4}"},
    {"problem": "Solve $x-5=0$.", "solution": "So $\\boxed{x=5}$.", "answer": "x=5"},
    {"problem": "$2+3$?", "solution": "It is $\\boxed{5}$.", "answer": "5"},
    {"problem": "Where?", "solution": "At $\\boxed{(3, \\pi)}$.", "answer": "\\left( 3, \\pi \\right)"},
]


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*words: str) -> Any:
    import grading

    return CliRunner().invoke(grading.app, words)


def test_solutions_grade_1_against_their_own_answer_and_0_against_others(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_test.jsonl", GSM8K)
    write(tmp_path / "math500_test.jsonl", MATH)
    done = run("check", "--data", str(tmp_path), "--shuffles", "20", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "left out: aime24_test.jsonl" in done.output
    result = json.loads((tmp_path / "out" / "reference.json").read_text())
    assert result["absent"] == ["aime24_test.jsonl"]
    gsm8k, mathematics = result["files"]
    assert (gsm8k["solutions"], gsm8k["grade_1_against_their_own_answer"], gsm8k["exceptions"]) == (3, 3, [])
    assert (mathematics["solutions"], mathematics["grade_1_against_their_own_answer"]) == (4, 4)
    # the one pair of answers that are equal in other words is told, and everything else grades 0
    assert mathematics["shuffled"]["equal_answers_in_other_words"] == [["5", "x=5"]]
    assert mathematics["shuffled"]["not_0_although_another_answer"] == []


def test_what_does_not_grade_1_is_told_with_its_row(tmp_path: Path) -> None:
    write(tmp_path / "math500_test.jsonl", [*MATH, {"problem": "1+1?", "solution": "It is two.", "answer": "2"}])
    done = run("check", "--data", str(tmp_path), "--shuffles", "1", "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    (file,) = json.loads((tmp_path / "out" / "reference.json").read_text())["files"]
    assert file["exceptions"] == [{"row": 5, "right": "2", "read": None, "reward": 0.0, "reason": None}]


def test_without_data_nothing_is_checked(tmp_path: Path) -> None:
    assert run("check", "--data", str(tmp_path), "--out", str(tmp_path / "out")).exit_code == 2


def test_throughput_counts_what_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grading
    from harness.grading_speed import CASES

    monkeypatch.setattr(grading, "CASES", [case for case in CASES if case.name in ("number", "exact, some never end")])
    words = ("--answers", "8", "--repeats", "1", "--processes", "1", "--timeout", "0.5", "--endless-share", "0.3")
    done = run("throughput", *words, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    number, endless = json.loads((tmp_path / "throughput.json").read_text())["cases"]
    assert number["in_process_per_second"] > 0
    assert number["pools"][0]["failures_of_the_last_repeat"] == 0
    assert endless["in_process_per_second"] is None
    assert endless["pools"][0]["failures_of_the_last_repeat"] > 0
    # one more than answers that never end: the group as a whole is tried first
    (pool,) = endless["pools"]
    assert pool["restarts_of_the_last_repeat"] == pool["failures_of_the_last_repeat"] + 1
    assert (tmp_path / "throughput.md").read_text().count("\n") == 4
