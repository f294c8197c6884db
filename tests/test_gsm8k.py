"""The GSM8K task on rows in the published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from vcpo.errors import UserError
from vcpo.tasks.gsm8k import GSM8KTask

ROWS = [
    {"question": "Tom has 3 pens and buys 4. How many?", "answer": "Tom has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    {
        "question": "A car costs $1,200 and a bike $300. In all?",
        "answer": "1200+300=$<<1200+300=1500>>1,500\n#### 1,500",
    },
    {"question": "It is 2 degrees and falls by 5. Now?", "answer": "2-5=<<2-5=-3>>-3\n#### -3"},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write(tmp_path / request.param)


def test_every_gold_solution_grades_1_on_its_own_text(path: str) -> None:
    task = GSM8KTask(path=path, eval_path=path)
    problems = task.eval_problems(10)
    assert len(problems) == 3
    grades = task.grade(problems, [row["answer"] for row in ROWS])
    assert [(g.reward, g.correct) for g in grades] == [(1.0, True)] * 3


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("So it is \\boxed{1500} dollars, 300 more.", True),
        ("The total is $1,500.00.", True),
        ("3000/2", True),
        ("1500 or 1501", False),
        ("-1500", False),
        ("", False),
    ],
)
def test_answers_are_compared_as_numbers(tmp_path: Path, response: str, correct: bool) -> None:
    task = GSM8KTask(path=write(tmp_path / "rows.jsonl", ROWS[1:2]))
    grade = task.grade([task.train_problem(0, 0)], [response])[0]
    assert (grade.reward, grade.correct) == (float(correct), correct)


def test_chat_prompt_has_system_question_and_instruction(tmp_path: Path) -> None:
    task = GSM8KTask(path=write(tmp_path / "rows.jsonl", ROWS[:1]), system_prompt="Be brief.", instruction="Box it.")
    assert task.train_problem(0, 0).prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tom has 3 pens and buys 4. How many?\nBox it."},
    ]


def test_plain_prompt_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:1])
    prompt = "Tom has 3 pens and buys 4. How many?\n"
    assert GSM8KTask(path=path, chat=False, instruction="").train_problem(0, 0).prompt == prompt
    with_system = GSM8KTask(path=path, chat=False, instruction="Box it.", system_prompt="Be brief.")
    assert with_system.train_problem(0, 0).prompt == f"Be brief.\n{prompt}Box it.\n"


def test_columns_keep_the_row_and_the_bare_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{**ROWS[1], "level": 2}])
    columns = GSM8KTask(path=path).train_problem(0, 0).columns
    assert columns == {**ROWS[1], "level": 2, "gold": "1,500"}


def test_other_column_names_and_bare_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"problem": "3+4?", "final": "7"}])
    task = GSM8KTask(path=path, prompt_column="problem", answer_column="final")
    assert task.grade([task.train_problem(0, 0)], ["7"])[0].correct


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "#### 7"}, r"rows\.jsonl, row 4: column 'question' is missing"),
        ({"question": "3+4?", "anwser": "#### 7"}, r"row 4: column 'answer' is missing; did you mean 'anwser'\?"),
        (
            {"question": "3+4?", "answer": "seven"},
            "row 4: column 'answer' has no single number as its answer, but 'seven'",
        ),
        ({"question": "3+4?", "answer": [7]}, r"row 4: column 'answer' must be text or a number, not \[7\]"),
        ({"question": " ", "answer": "7"}, "row 4: column 'question' must be a non-empty string"),
        ({"question": None, "answer": "7"}, "row 4: column 'question' is null"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    path = write(tmp_path / "rows.jsonl", [*ROWS, row])
    with pytest.raises(UserError, match=sentence):
        GSM8KTask(path=path)


def test_without_data_the_options_are_named() -> None:
    with pytest.raises(UserError, match=r"task\.path .* or task\.dataset_name"):
        GSM8KTask()


def test_evaluation_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give task\.eval_path"):
        GSM8KTask(path=write(tmp_path / "rows.jsonl")).eval_problems(2)
