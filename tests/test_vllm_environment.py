"""What is wrong with vLLM's environment is said before a run starts, with what to do. Interpreters are scripts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from run_cases import tiny_config
from vcpo import doctor, vllm_environment
from vcpo.config import parse_config
from vcpo.errors import UserError
from vcpo.pipeline.run import train
from vcpo.vllm_environment import examine

PACKAGE = Path(vllm_environment.__file__).parent


def interpreter(path: Path, *lines: str) -> str:
    """An executable that stands in for a Python interpreter."""
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def answering(path: Path, **found: Any) -> str:
    """An interpreter with everything that is needed, but for ``found``."""
    answer = {"python": "3.11.7", "vllm": "0.32.0", "vcpo": str(PACKAGE), "missing": [], **found}
    return interpreter(path, f"echo '{json.dumps(answer)}'")


def test_a_usable_one_says_what_is_installed(tmp_path: Path) -> None:
    environment = examine(answering(tmp_path / "python"))
    assert (environment.vllm, environment.python) == ("0.32.0", "3.11.7")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"vllm": None}, "has no vLLM. Make an environment for vLLM: python3 -m venv"),
        ({"vcpo": None}, "has vLLM 0.32.0, but not vcpo. Make an environment"),
        ({"missing": ["transformers"]}, "lacks transformers"),
    ],
)
def test_what_it_lacks_is_named(tmp_path: Path, found: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        examine(answering(tmp_path / "python", **found))


def test_a_copy_of_this_package_will_do_until_a_line_differs(tmp_path: Path) -> None:
    copy = tmp_path / "vcpo"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    python = answering(tmp_path / "python", vcpo=str(copy))
    examine(python)
    with (copy / "records.py").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"has another version of vcpo than this one .*install this one there"):
        examine(python)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["echo 'no such library' >&2", "exit 3"], "does not run as a Python interpreter: no such library"),
        (["exit 3"], "does not run as a Python interpreter: exit code 3"),
        (["echo hello"], "does not run as a Python interpreter"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, lines: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        examine(interpreter(tmp_path / "python", *lines))


def test_an_interpreter_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/no/such/program\n")
    path.chmod(0o755)
    with pytest.raises(UserError, match="does not run as a Python interpreter"):
        examine(str(path))


def test_this_interpreter_has_no_vllm() -> None:
    """The question is asked of a real interpreter, this one, which must stay free of vLLM."""
    with pytest.raises(UserError, match=r"has no vLLM\. .* -m pip install vllm==.*; .* -m pip install --no-deps"):
        examine(sys.executable)


def test_a_run_that_lacks_it_ends_before_anything_is_made(tmp_path: Path) -> None:
    python = tmp_path / "none" / "bin" / "python"
    config = tiny_config(tmp_path / "run", "runtime=local", f"sampling.engine={{name: vllm, python: {python}}}")
    with pytest.raises(UserError, match=f"there is no interpreter '{python}' to run vLLM with"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_vllm_is_refused_where_runs_are_repeatable() -> None:
    data = {"model": {"init": {}}, "task": "sort", "sampling": {"engine": "vllm"}, "runtime": "lockstep"}
    with pytest.raises(UserError, match=r"sampling\.engine=vllm needs runtime=local"):
        parse_config(data)


def test_doctor_says_whether_it_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = Path(vllm_environment.DEFAULT_PYTHON)
    assert doctor._vllm().status == "optional"
    python.parent.mkdir(parents=True)
    answering(python, vcpo=None)
    assert (doctor._vllm().status, doctor._vllm().advice) == ("warning", "see docs/vllm.md")
    assert "has vLLM 0.32.0, but not vcpo" in doctor._vllm().found
    answering(python)
    assert (doctor._vllm().status, doctor._vllm().found) == ("ok", f"0.32.0 in {python} (Python 3.11.7)")


def test_a_sampler_with_vllm_takes_its_threads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    variables = vllm_environment.variables(threads=3)
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    assert variables["VLLM_LOGGING_LEVEL"] == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert "VLLM_LOGGING_LEVEL" not in vllm_environment.variables(threads=1)
