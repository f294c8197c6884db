"""What every single-file result records beside its numbers. Imports without torch."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vcpo.observe.environment import environment


def write_result(out: Path, name: str, result: Mapping[str, Any], load: float) -> Path:
    """Write ``OUT/NAME.json``: the result with the command, versions, machine and the load before the first timing."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    command = shlex.join(["python", *sys.argv])
    whole = {"command": command, "load_average": load, "environment": environment(), **result}
    # written beside and renamed: a result file is either absent or complete
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def read_result(out: Path, name: str) -> dict[str, Any]:
    """What ``write_result`` has written."""
    result: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return result


def load_average() -> float:
    """Processes that wanted a core in the last minute: other work that disturbs a timing."""
    return os.getloadavg()[0]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned and the others right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
