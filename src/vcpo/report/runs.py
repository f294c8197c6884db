"""A run directory as the report reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vcpo.errors import UserError
from vcpo.observe.metrics import FILE_NAME, read_metrics
from vcpo.observe.summary import RunSummary, read_sessions, summarize_lines


@dataclass(frozen=True)
class RunData:
    """One run's files in memory.

    name: short and unique among the runs loaded together. config: the effective configuration as plain data.
    sessions: one record for every time the run was started. train, eval: its metrics lines by kind, in order.
    """

    path: Path
    name: str
    config: dict[str, Any]
    sessions: list[dict[str, Any]]
    train: list[dict[str, Any]]
    eval: list[dict[str, Any]]
    summary: RunSummary


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Load run directories. Raises UserError for one that has no readable metrics."""
    return [_load(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def series(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, ascending; NaN and infinities become NaN, which draws as a gap.

    When a step occurs twice (an evaluation repeated after a resume) the later line counts.
    """
    values = {line["step"]: line[key] for line in lines if key in line}
    steps = sorted(values)
    return steps, [values[step] if math.isfinite(values[step]) else math.nan for step in steps]


def _load(path: Path, name: str) -> RunData:
    lines = read_metrics(path / FILE_NAME)
    sessions = read_sessions(path)
    return RunData(
        path=path,
        name=name,
        config=_read_config(path / "config.yaml"),
        sessions=sessions,
        train=[line for line in lines if line["kind"] == "train"],
        eval=[line for line in lines if line["kind"] == "eval"],
        summary=summarize_lines(lines, sessions),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    resolved = [path.resolve().parts for path in paths]
    depth = 1
    while depth < max(map(len, resolved)) and len({parts[-depth:] for parts in resolved}) < len(set(resolved)):
        depth += 1
    return ["/".join(parts[-depth:]) for parts in resolved]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    return data if isinstance(data, dict) else {}
