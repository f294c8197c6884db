"""The examples of docs/tasks.md are those that work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from vcpo.config import parse_config
from vcpo.records import Answer, Grade, Problem, StopReason
from vcpo.tasks.graders.registry import BUILT_IN, make_grader
from vcpo.tasks.registry import make_task
from vcpo.tasks.rewards import RewardFunctions

PAGE = Path("docs/tasks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_configurations_are_valid(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "Capital of France?", "choices": ["Rome", "Paris"], "answer": 1})
    )
    choice, rewards = (yaml.safe_load(block) for block in blocks("yaml"))
    given: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl"), "eval_path": None}
    parse_config({"model": {"init": {}}, **choice})
    parse_config({"model": {"init": {}}, "task": "sort", **rewards})
    task = make_task("dataset", {key: value for key, value in (choice["task"] | given).items() if key != "name"})
    assert task.train_problem(0, 0).prompt == [
        {
            "role": "user",
            "content": 'Capital of France?\nA. Rome\nB. Paris\nThink step by step, then write "The answer is (X)".',
        }
    ]
    for mapping in re.findall(r"'task=(\{.*\})'", PAGE):
        if "my_task" not in mapping:
            parse_config({"model": {"init": {}}, "task": yaml.safe_load(mapping)})


def test_code_works(tmp_path: Path) -> None:
    grader, function, task = blocks("python")
    (tmp_path / "mine.py").write_text(grader)
    mine = make_grader(f"{tmp_path}/mine.py:Mine")
    assert mine.grade(mine.gold("Paris"), " PARIS\n") == Grade(1.0, correct=True)
    (tmp_path / "rewards.py").write_text(function)
    answers = [Answer("a", [1] * 1024, StopReason.EOS), Answer("b", [1], StopReason.LENGTH)]
    rewards = RewardFunctions([f"{tmp_path}/rewards.py:concise"])
    grades = rewards.apply([Problem("p", "?")] * 2, answers, [Grade(None), Grade(None)])
    assert [grade.reward for grade in grades] == [-0.25, 0.0]
    (tmp_path / "my_task.py").write_text(task)
    add = make_task(f"{tmp_path}/my_task.py:Add", {"largest": 20})
    problem = add.train_problem(3, 0)
    assert add.grade([problem], [str(problem.columns["answer"])])[0].correct


def test_every_grader_is_listed() -> None:
    for name in BUILT_IN:
        assert f"| `{name}` | " in PAGE
