"""Finding tasks by name, and checking their options."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.tasks import registry
from vcpo.tasks.registry import BUILT_IN, make_task, task_params
from vcpo.tasks.sort import SortTask

OWN_TASK = """
from vcpo.records import Grade, Problem

class Echo:
    def __init__(self, word="hi", times=1):
        self.word, self.times = word, times
    def train_problem(self, position, seed):
        return Problem(str(position), self.word * self.times)
    def eval_problems(self, count):
        return [Problem(f"eval-{i}", self.word) for i in range(count)]
    def grade(self, problems, completions):
        return [Grade(float(p.prompt == c)) for p, c in zip(problems, completions, strict=True)]

class Half:
    def grade(self, problems, completions):
        return []

VALUE = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    return str(tmp_path / "own_task.py")


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("srot", {}, "unknown task 'srot'; did you mean 'sort'?"),
        ("zzz", {}, "unknown task 'zzz'; allowed: countdown, dataset, gsm8k, math, sort"),
        ("sort", {"digitz": 3}, "unknown key task.digitz; did you mean 'digits'?"),
        ("sort", {"digits": "many"}, "task.digits = 'many' must be a valid integer"),
        ("sort", {"digits": 0}, "task.digits = 0 must be greater than 0"),
        ("countdown", {"style": "long"}, "task.style = 'long' must be 'short', 'text', 'chat' or 'given'"),
        ("countdown", {"style": "given"}, "task.style=given uses the prompts of data"),
        ("gsm8k", {"chat": "no"}, "task.chat = 'no' must be a valid boolean"),
        ("absent_file.py:Task", {}, "there is no file"),
        ("not a module:Task", {}, "neither a module name nor a path"),
    ],
)
def test_wrong_names_and_options_are_refused_in_one_sentence(name: str, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"task|file|module") as error:
        task_params(name, params)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError) as same:
        make_task(name, params)
    assert str(same.value) == str(error.value)


def test_checking_options_reads_no_data() -> None:
    task_params("gsm8k", {"path": "absent.jsonl"})
    with pytest.raises(UserError, match=r"absent\.jsonl' does not exist"):
        make_task("gsm8k", {"path": "absent.jsonl"})


def test_checking_a_users_task_runs_none_of_his_code(tmp_path: Path) -> None:
    (tmp_path / "bomb.py").write_text("raise RuntimeError\n")
    task_params(f"{tmp_path / 'bomb.py'}:Task", {"anything": 1})


def test_a_users_task_takes_its_constructors_parameters(own: str) -> None:
    assert make_task(f"{own}:Echo", {"word": "ab", "times": 2}).train_problem(0, 0).prompt == "abab"
    with pytest.raises(UserError, match="unexpected keyword argument 'wrod'; its options: word, times"):
        make_task(f"{own}:Echo", {"wrod": "ab"})


def test_what_is_no_task_is_refused(own: str) -> None:
    with pytest.raises(UserError, match="of type Half without train_problem, eval_problems"):
        make_task(f"{own}:Half", {})
    with pytest.raises(UserError, match="of type int, not a class or function"):
        make_task(f"{own}:VALUE", {})


def test_a_users_class_may_carry_typed_options() -> None:
    with pytest.raises(UserError, match=r"unknown key task\.digitz"):
        make_task("vcpo.tasks.sort:SortTask", {"digitz": 3})


def test_another_package_registers_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("sort_again", "vcpo.tasks.sort:SortTask", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "vcpo.tasks" else [])
    task_params("sort_again", {})
    assert isinstance(make_task("sort_again", {"digits": 3}), SortTask)


def test_tasks_import_without_torch_and_data_packages() -> None:
    modules = [spec.partition(":")[0] for spec in BUILT_IN.values()]
    modules += ["vcpo.tasks.prompts", "vcpo.tasks.rewards", "vcpo.tasks.registry"]
    heavy = ("torch", "transformers", "datasets", "pyarrow")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
