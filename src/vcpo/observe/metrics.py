"""``metrics.jsonl``: one JSON object per line and the readers that rely on it.

Every line holds ``step`` (optimizer steps done), ``time`` (Unix seconds), ``kind`` (``train`` or ``eval``) and flat
floats. JSON has no NaN and no infinity, and in a collapse they are the news, so they are written as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: any JSON parser reads the file, ``float()`` understands the strings, and
``read_metrics`` gives the numbers back.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vcpo.errors import UserError
from vcpo.observe.clock import now
from vcpo.observe.logger import Kind

FILE_NAME = "metrics.jsonl"

_RESERVED = ("step", "time", "kind")


class MetricsLog:
    """Appends to a run directory's ``metrics.jsonl``; every line is on its way to the disk when ``log`` returns."""

    def __init__(self, run_dir: Path, resume_step: int | None = None, note: Callable[[str], None] = print) -> None:
        """
        resume_step: ``None`` starts a new file; otherwise the lines of steps after it are removed, because the
            resumed run does those steps again.
        note: told, in one sentence each, what was removed.
        """
        path = run_dir / FILE_NAME
        if resume_step is None:
            self._file = path.open("w", encoding="utf-8")
            return
        if path.exists():
            _cut(path, resume_step, note)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises ValueError for a metric named step, time or kind."""
        for name in _RESERVED:
            if name in metrics:
                raise ValueError(f"a metric must not be named {name!r}: every line has that key already")
        line: dict[str, float | str] = {"step": step, "time": round(now(), 3), "kind": kind}
        line |= {name: json_number(float(value)) for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until every line is on the disk itself, so that a checkpoint is never ahead of the metrics."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # a pipe or a device: there is no disk to wait for
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of a metrics file by step, non-finite numbers restored.

    An evaluation beside the training may be written after later steps; it comes after the line of its own step.
    A torn last line, as a killed process leaves it, is left out. Raises UserError when the file cannot be read or
    another line is not a metrics line.
    """
    return sorted(_read(path)[0], key=lambda line: line["step"])


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines and whether a torn last line was left out."""
    try:
        # a kill can tear a line inside a character, too
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"metrics file {str(path)!r} cannot be read: {error.strerror}") from None
    *whole, rest = text.split("\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        parsed = _parse(line)
        if parsed is None:
            raise UserError(f"line {number} of {str(path)!r} is not a metrics line: {line[:80]!r}; remove or repair it")
        lines.append(parsed)
    # a last line without its newline can be complete by chance; it is kept if it parses
    parsed = _parse(rest) if rest else None
    if parsed is not None:
        lines.append(parsed)
    return lines, bool(rest) and parsed is None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    if not isinstance(data, dict) or type(data.get("step")) is not int or data.get("kind") not in ("train", "eval"):
        return None
    try:
        return {key: value if key in ("step", "kind") else float(value) for key, value in data.items()}
    except (TypeError, ValueError):
        return None


def _cut(path: Path, last_step: int, note: Callable[[str], None]) -> None:
    lines, torn = _read(path)
    kept = [line for line in lines if line["step"] <= last_step]
    if torn:
        note(f"{path.name}: dropped an unfinished last line")
    if len(kept) < len(lines):
        note(f"{path.name}: dropped {len(lines) - len(kept)} lines after step {last_step}, which is done again")
    beside = path.with_suffix(".tmp")
    with beside.open("w", encoding="utf-8") as file:
        for line in kept:
            values = {key: json_number(value) if isinstance(value, float) else value for key, value in line.items()}
            file.write(json.dumps(values, allow_nan=False) + "\n")
    beside.replace(path)


def json_number(value: float) -> float | str:
    """The number, or the string that stands for one that JSON does not have."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
