"""The generic dataset task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.tasks.dataset import DatasetTask


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_exact_match_ignores_outer_whitespace_only(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path / "a.jsonl", {"prompt": "capital of France?", "answer": "Paris"}))
    problem = task.train_problem(0, 0)
    grades = task.grade([problem] * 3, [" Paris\n", "paris", "Paris."])
    assert [g.reward for g in grades] == [1.0, 0.0, 0.0]


def test_an_answer_that_is_a_number_is_compared_as_text(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": 2}))
    assert task.grade([task.train_problem(0, 0)], ["2"])[0].correct


def test_other_columns_are_kept_for_reward_functions(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": [{"role": "user", "content": "hi"}], "prompt": "kept", "level": 3})
    problem = DatasetTask(path=path, prompt_column="q").train_problem(0, 0)
    assert problem.prompt == [{"role": "user", "content": "hi"}]
    assert problem.columns == {"q": [{"role": "user", "content": "hi"}], "prompt": "kept", "level": 3}
    (tmp_path / "b.jsonl").write_text('{"prompt": "2+2=", "answer": "4", "level": 1}')
    # a column called prompt comes to reward functions as `prompts`
    assert DatasetTask(path=str(tmp_path / "b.jsonl")).train_problem(0, 0).columns == {
        "answer": "4",
        "level": 1,
        "gold": "4",
    }


def test_without_answers_there_is_no_reward_rather_than_zero(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path / "a.jsonl", {"prompt": "write a poem"}))
    grade = task.grade([task.train_problem(0, 0)], ["roses"])[0]
    assert (grade.reward, grade.correct) == (None, False)


def test_an_answer_missing_in_one_row_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="})
    with pytest.raises(UserError, match=r"a\.jsonl, row 2: column 'answer' is missing"):
        DatasetTask(path=path)


def test_a_named_answer_column_must_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "solution": "2"})
    with pytest.raises(UserError, match=r"row 1: column 'soluton' is missing; did you mean 'solution'\?"):
        DatasetTask(path=path, answer_column="soluton")


def test_a_missing_prompt_column_names_row_and_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1="}, {"question": "1+2="})
    with pytest.raises(UserError, match=r"a\.jsonl, row 2: column 'prompt' is missing; allowed: question"):
        DatasetTask(path=path)


def test_bad_evaluation_rows_are_found_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1="})
    with pytest.raises(UserError, match=r"eval\.jsonl has no rows"):
        DatasetTask(path=path, eval_path=write(tmp_path / "eval.jsonl"))


def test_every_row_comes_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path / "a.jsonl", *({"prompt": f"{i}="} for i in range(20))))
    epochs = [[task.train_problem(20 * epoch + i, 7).id for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 20
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [task.train_problem(i, 8).id for i in range(20)] != epochs[0]


def test_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one of task\.path .* and task\.dataset_name"):
        DatasetTask(path=write(tmp_path / "a.jsonl", {"prompt": "x"}), dataset_name="openai/gsm8k")
