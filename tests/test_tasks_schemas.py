"""Rows as others write them: TRL's and verl's columns, column mapping, and how prompts are made of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from vcpo.errors import UserError
from vcpo.records import Problem
from vcpo.tasks.dataset import DatasetTask
from vcpo.tasks.gsm8k import GSM8KTask

ASK = [{"role": "user", "content": "3+4?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASK,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 0, "split": "train"},
}


def made(path: Path, *rows: dict[str, Any], kind: type[DatasetTask] = DatasetTask, **options: Any) -> DatasetTask:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return kind(path=str(path), eval_path=str(path), **options)


def first(task: DatasetTask) -> Problem:
    return task.eval_problems(1)[0]


def reward(task: DatasetTask, response: str) -> float | None:
    return task.grade([first(task)], [response])[0].reward


@pytest.mark.parametrize("kind", [DatasetTask, GSM8KTask])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_verls_rows_are_taken_as_they_are(tmp_path: Path, name: str, kind: type[DatasetTask]) -> None:
    task = made(tmp_path / name, VERL, kind=kind)
    problem = first(task)
    assert problem.prompt == ASK  # its instruction is in it
    assert problem.columns["gold"] == "7"
    assert problem.columns["extra_info"] == {"index": 0, "split": "train"}
    assert [reward(task, text) for text in ("so 7.0", "\\boxed{8}")] == [1.0, 0.0]
    assert task.answer_of(problem, "so 7.0") == "7"


def test_verls_rows_are_graded_by_their_source(tmp_path: Path) -> None:
    countdown = {
        **VERL,
        "data_source": "countdown",
        "reward_model": {"ground_truth": {"numbers": [3, 4], "target": 7}},
    }
    task = made(tmp_path / "rows.jsonl", VERL, countdown)
    problems = task.eval_problems(2)
    assert [g.reward for g in task.grade(problems, ["7", "<answer>3+4</answer>"])] == [1.0, 1.0]
    assert [g.reward for g in task.grade(problems, ["<answer>3+4</answer>", "7"])] == [0.0, 0.0]


def test_an_unknown_source_needs_a_grader(tmp_path: Path) -> None:
    row = {**VERL, "data_source": "my/own"}
    with pytest.raises(
        UserError, match=r"row 2: column 'data_source' is 'my/own', for which there is no grader: set t"
    ):
        made(tmp_path / "rows.jsonl", VERL, row)
    assert reward(made(tmp_path / "rows.jsonl", row, grader="exact"), "7") == 1.0


def test_trls_rows_with_text_or_messages(tmp_path: Path) -> None:
    text = first(made(tmp_path / "a.jsonl", {"prompt": "3+4=", "answer": "7", "level": 2}))
    assert (text.prompt, text.columns) == ("3+4=", {"answer": "7", "level": 2, "gold": "7"})
    assert first(made(tmp_path / "b.jsonl", {"prompt": ASK, "solution": "7"})).prompt == ASK


def test_columns_can_be_named_also_inside_others(tmp_path: Path) -> None:
    row = {"item": {"text": "3+4?", "key": "7"}, "answer": "something else"}
    task = made(tmp_path / "a.jsonl", row, prompt_column="item.text", answer_column="item.key")
    assert first(task).prompt == "3+4?"
    assert reward(task, "7") == 1.0


def test_without_a_column_that_could_be_the_prompt_the_columns_are_told(tmp_path: Path) -> None:
    sentence = (
        r"rows\.jsonl, row 1: has no column 'prompt' or 'question' or 'problem'; name the one with the prompt in"
        r" task\.prompt_column \(there are: text, label\)"
    )
    with pytest.raises(UserError, match=sentence):
        made(tmp_path / "rows.jsonl", {"text": "3+4?", "label": "7"})


def test_an_answer_missing_in_row_1000_is_found_before_training(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{i}=", "answer": str(i)} for i in range(1200)]
    rows[999] = {"prompt": "999=", "answer": None}
    with pytest.raises(UserError, match=r"rows\.jsonl, row 1000: column 'answer' is null"):
        made(tmp_path / "rows.jsonl", *rows)
    rows[999] = {"prompt": "999=", "answer": " "}
    with pytest.raises(UserError, match=r"row 1000: column 'answer' is empty: every row needs its right answer"):
        made(tmp_path / "rows.jsonl", *rows)


def test_an_empty_cell_of_a_parquet_file_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.parquet, row 2: column 'answer' is NaN"):
        made(tmp_path / "rows.parquet", {"prompt": "1=", "answer": 1.0}, {"prompt": "2=", "answer": float("nan")})
    with pytest.raises(UserError, match=r"rows\.parquet, row 2: column 'answer' is null"):
        made(tmp_path / "rows.parquet", {"prompt": "1=", "answer": 1.0}, {"prompt": "2=", "answer": None})


@pytest.mark.parametrize("answer", [[1], {"a": 1}, float("inf")])
def test_an_answer_of_the_wrong_type_is_named(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(UserError, match=r"row 1: column 'answer' (must be text or a number|is inf)"):
        made(tmp_path / "rows.jsonl", {"prompt": "1=", "answer": answer})


def test_instruction_system_prompt_and_chat(tmp_path: Path) -> None:
    path, row = tmp_path / "a.jsonl", {"prompt": "3+4?", "answer": "7"}
    assert first(made(path, row, instruction="Be brief.")).prompt == "3+4?\nBe brief."
    assert first(made(path, row, chat=False, system_prompt="Hi.")).prompt == "Hi.\n3+4?\n"
    assert first(made(path, row, chat=True, instruction="Be brief.", system_prompt="Hi.")).prompt == [
        {"role": "system", "content": "Hi."},
        {"role": "user", "content": "3+4?\nBe brief."},
    ]


def test_messages_get_what_is_asked_for_and_keep_their_own_system_message(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    shots = [*ASK, {"role": "assistant", "content": "7"}, *ASK]
    assert first(made(path, {"prompt": shots}, instruction="Box it.", system_prompt="Hi.")).prompt == [
        {"role": "system", "content": "Hi."},
        *shots[:2],
        {"role": "user", "content": "3+4?\nBox it."},
    ]
    own = [{"role": "system", "content": "Mine."}, *ASK]
    assert first(made(path, {"prompt": own}, system_prompt="Hi.")).prompt == own
    with pytest.raises(UserError, match=r"row 1: column 'prompt' has chat messages, and task\.chat=false needs text"):
        made(path, {"prompt": ASK}, chat=False)


def test_a_template_is_filled_from_columns(tmp_path: Path) -> None:
    row = {"q": "Capital of France?", "choices": ["Rome", "Paris"], "answer": 1, "meta": {"topic": "maps"}}
    template = "[{meta.topic}] {q}\n{choices}\nWrite \\boxed{} or \\frac{1}{2}."
    task = made(tmp_path / "a.jsonl", row, template=template, grader="choice", chat=True)
    text = "[maps] Capital of France?\nA. Rome\nB. Paris\nWrite \\boxed{} or \\frac{1}{2}."
    assert first(task).prompt == [{"role": "user", "content": text}]
    assert reward(task, "The answer is B.") == 1.0
    with pytest.raises(UserError, match=r"row 1: column 'qq' is missing; did you mean 'q'\?"):
        made(tmp_path / "a.jsonl", row, template="{qq}")


def test_choices_in_ARCs_form(tmp_path: Path) -> None:
    row = {"question": "Up?", "choices": {"text": ["sky", "sea"], "label": ["A", "B"]}, "answerKey": "A"}
    options: dict[str, Any] = {"answer_column": "answerKey", "grader": "choice", "template": "{question}\n{choices}"}
    assert first(made(tmp_path / "a.jsonl", row, **options)).prompt == "Up?\nA. sky\nB. sea"


def test_a_task_says_whether_its_grading_needs_a_time_limit(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    row = {"prompt": "3+4?", "answer": "7"}
    assert not made(tmp_path / "a.jsonl", row).needs_time_limit
    assert made(tmp_path / "a.jsonl", row, grader="math").needs_time_limit
