"""Dependencies point one way (docs/architecture.md), and what has to be quick or torch-free stays so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vcpo"

# part -> what it may import besides itself; a dotted name allows that module only
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "records": set(),
    "methods": set(),
    "cache": set(),
    "plugins": {"errors"},
    "sandbox": {"errors"},
    "tasks": {"errors", "records", "plugins", "sandbox", "models.encoding"},
    "method_config": {
        "errors", "plugins", "methods.spec", "methods.weights", "methods.masks", "methods.penalties",
        "methods.gradient_control",
    },
    "watchdog_config": {"method_config"},
    "vllm_environment": {"errors"},
    "config": {
        "errors", "method_config", "methods.spec", "tasks.registry", "tasks.rewards", "watchdog_config",
        "vllm_environment",
    },
    "gradnorm": {"errors", "cache"},
    "models": {"errors", "records", "config"},
    "sampler": {"errors", "records", "models", "tasks.environment", "tasks.chat_turns"},
    "learner": {"errors", "records", "config", "methods", "gradnorm", "models"},
    "observe": {"errors", "records", "plugins"},
    "report": {"errors", "observe"},
    "doctor": {"cache", "errors", "observe", "vllm_environment"},
    "pipeline": {
        "errors", "cache", "records", "plugins", "method_config", "config", "methods", "tasks",
        "models", "sampler", "learner", "observe", "report", "vllm_environment",
    },
    "reproduce": {"errors", "config", "pipeline", "observe", "report"},
    "cli": {
        "errors", "config", "methods", "tasks", "models", "pipeline", "observe", "report", "reproduce", "doctor",
    },
    "__main__": {"cli"},
}  # fmt: skip

MODULES = sorted(SOURCE.rglob("*.py"))
TORCH_FREE = (
    "config",
    "method_config",
    "watchdog_config",
    "vllm_environment",
    "cli",
    "doctor",
    "sandbox",
    "tasks",
    "observe",
    "report",
    "records",
    "errors",
    "plugins",
)


def name_of(path: Path) -> str:
    """``tasks.sort`` for src/vcpo/tasks/sort.py; empty for the package's own ``__init__``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; write it out"
            module = node.module or ""
            # "from vcpo.tasks import sort" names the module in its last word
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def is_allowed(part: str, imported: str) -> bool:
    allowed = {part, *MAY_IMPORT[part]}
    return any(imported == name or imported.startswith(name + ".") for name in allowed)


def imported_after(statement: str) -> set[str]:
    """Top-level packages that are loaded once a fresh interpreter has run a statement."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_part_of_the_package_has_a_rule() -> None:
    parts = {name_of(path).partition(".")[0] for path in MODULES} - {""}
    assert parts <= MAY_IMPORT.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "vcpo")
def test_dependencies_point_one_way(path: Path) -> None:
    part = name_of(path).partition(".")[0]
    for line, imported in imports_of(path):
        package, _, inner = imported.partition(".")
        if package == "vcpo" and inner and inner[:2] != "__":
            assert part, f"{path.name}:{line}: the package's __init__ imports {imported}"
            assert is_allowed(part, inner), f"{path.relative_to(SOURCE)}:{line}: {part} must not import {imported}"


def test_the_rules_themselves_have_no_cycle() -> None:
    order: list[str] = []
    # single modules aside: tasks use models.encoding, while models use config, which uses tasks.registry
    whole = {part: {name for name in allowed if "." not in name} for part, allowed in MAY_IMPORT.items()}
    while len(order) < len(whole):
        ready = [part for part, needs in whole.items() if part not in order and needs <= set(order)]
        assert ready, f"cycle among {whole.keys() - set(order)}"
        order += ready


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "vcpo")
def test_no_code_is_made_from_text_or_pickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec"}
    assert not {name.partition(".")[0] for _, name in imports_of(path)} & {"pickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("part", TORCH_FREE)
def test_what_must_be_light_imports_no_torch(part: str) -> None:
    modules = [name_of(path) for path in MODULES if name_of(path).partition(".")[0] == part]
    loaded = imported_after("\n".join(f"import vcpo.{name}" for name in modules))
    assert not loaded & {"torch", "transformers"}


def test_a_configuration_is_checked_in_under_a_second_without_torch() -> None:
    recipe = SOURCE.parents[1] / "recipes" / "quickstart.yaml"
    # processor time, and the best of three, so that other work on the machine does not count
    code = f"""
import sys, time
from pathlib import Path
from vcpo.config import load_config
load_config(Path({str(recipe)!r}), ["training.max_steps=7"])
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(time.process_time())
"""
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 1.0
