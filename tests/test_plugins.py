"""Users' own objects by name: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vcpo.errors import UserError
from vcpo.plugins import load_object, split_spec


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def refusal(spec: str) -> str:
    with pytest.raises(UserError) as error:
        load_object(spec)
    return str(error.value)


def test_finds_a_name_in_an_installed_module() -> None:
    assert load_object("vcpo.errors:UserError") is UserError


def test_finds_an_attribute_of_a_name() -> None:
    assert load_object("vcpo.records:StopReason.EOS").value == "eos"


def test_finds_a_module_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "plugin_in_cwd.py").write_text("value = 7\n")
    assert load_object("plugin_in_cwd:value") == 7


def test_finds_a_name_in_a_file_that_imports_its_neighbour_and_defines_a_dataclass(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "neighbour_of_rewards.py").write_text("factor = 3\n")
    (tmp_path / "own" / "rewards.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_rewards import factor\n"
        "@dataclass\n"
        "class Scale:\n"
        "    by: int = factor\n"
    )
    assert load_object("own/rewards.py:Scale")().by == 3


def test_executes_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text("first = object()\n")
    assert load_object("once.py:first") is load_object("./once.py:first")


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    for directory, value in (("a", 1), ("b", 2)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "rewards.py").write_text(f"value = {value}\n")
    assert [load_object("a/rewards.py:value"), load_object("b/rewards.py:value")] == [1, 2]


@pytest.mark.parametrize("spec", ["rewards", "rewards:", ":f", "my-module:f", "rewards.py:f()", "a b:c"])
def test_a_wrong_form_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:name|neither a module name nor a path"):
        split_spec(spec)


def test_a_missing_file_is_named() -> None:
    assert "there is no file" in refusal("absent.py:f")


def test_a_missing_module_is_named() -> None:
    assert "there is no module 'absent_module'" in refusal("absent_module.sub:f")


def test_a_missing_name_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text("def length_reward(): ...\n")
    assert refusal("names.py:lenght_reward").endswith("did you mean 'length_reward'?")


def test_an_exception_in_the_file_keeps_its_message_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('no licence key')\n")
    sentence = refusal("broken.py:f")
    assert "RuntimeError: no licence key" in sentence
    assert "broken.py, line 2" in sentence


def test_a_syntax_error_says_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("def f(:\n")
    assert "typo.py, line 1" in refusal("typo.py:f")


def test_a_failed_import_inside_the_module_is_not_mistaken_for_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "needs_absent.py").write_text("import absent_dependency\n")
    sentence = refusal("needs_absent:f")
    assert "No module named 'absent_dependency'" in sentence
    assert "needs_absent.py, line 1" in sentence


def test_a_file_that_failed_is_executed_again_after_its_repair(tmp_path: Path) -> None:
    (tmp_path / "repaired.py").write_text("raise ValueError\n")
    refusal("repaired.py:value")
    (tmp_path / "repaired.py").write_text("value = 'now it is well'\n")
    assert load_object("repaired.py:value") == "now it is well"
