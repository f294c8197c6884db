"""Reading data rows from JSONL, parquet or CSV files, or from a dataset id, with errors that name the row."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.errors import UserError, suggest
from vcpo.records import Message

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows and where they came from.

    source: the file or dataset they were read from, as the user wrote it.
    numbers: each row's number for messages, from 1 (in a JSONL file its line).
    """

    source: str
    rows: list[Row]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def has(self, column: str) -> bool:
        """Whether the first row has the column."""
        return column in self.rows[0]

    def value(self, index: int, column: str) -> Any:
        """A value that must be there. Raises UserError naming file, row and column when it is missing or null."""
        row = self.rows[index]
        if column not in row:
            raise self.error(
                index, column, f"is missing{suggest(column, row)}" if row else "is missing: the row is empty"
            )
        if row[column] is None:
            raise self.error(index, column, "is null")
        return row[column]

    def text(self, index: int, column: str) -> str:
        """A value that must be a non-empty string."""
        value = self.value(index, column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(index, column, f"must be a non-empty string, not {_short(value)}")
        return value

    def prompt(self, index: int, column: str) -> str | list[Message]:
        """A value that must be a non-empty string or a non-empty list of chat messages."""
        value = self.value(index, column)
        if isinstance(value, str):
            return self.text(index, column)
        if not isinstance(value, list) or not value:
            raise self.error(index, column, f"must be text or a list of chat messages, not {_short(value)}")
        messages = []
        for message in value:
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise self.error(index, column, f"has a message without a text role and content: {_short(message)}")
            messages.append({"role": role, "content": content})
        return messages

    def error(self, index: int, column: str, problem: str) -> UserError:
        """The error to raise about one value."""
        return UserError(f"{self.source}, row {self.numbers[index]}: column {column!r} {problem}")

    def name(self, index: int) -> str:
        """An id for the problem made from a row."""
        return f"{Path(self.source).name}:{self.numbers[index]}"


def read_file(path: str) -> Table:
    """The rows of a ``.jsonl``, ``.parquet`` or ``.csv`` file.

    Raises UserError when the file is missing, unreadable, malformed (naming the row) or has no rows.
    """
    file = Path(path)
    reader = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}.get(file.suffix.lower())
    if reader is None:
        raise UserError(
            f"data file {path!r} must be .jsonl, .parquet or .csv (a dataset id goes into task.dataset_name)"
        )
    if not file.is_file():
        raise UserError(f"data file {path!r} does not exist{_nearest_file(file)}")
    try:
        numbered = list(reader(file))
    except OSError as error:
        raise UserError(f"data file {path!r} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data file {path!r} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return _table(path, numbered)


def read_dataset(name: str, config: str | None, split: str) -> Table:
    """The rows of one split of a dataset id, through the ``datasets`` package.

    Raises UserError when the package is not installed, or the dataset cannot be loaded or is empty.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"task.dataset_name={name!r} needs the package 'datasets': pip install 'vcpo[data]' (or give a file in"
            " task.path)"
        ) from None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises many unrelated types for what is one condition here
        message = str(error).strip() or type(error).__name__
        raise UserError(f"dataset {name!r} (split {split!r}) cannot be loaded: {message.splitlines()[0]}") from error
    return _table(f"{name}[{split}]", list(enumerate(loaded, start=1)))


def _table(source: str, numbered: list[tuple[int, Row]]) -> Table:
    if not numbered:
        raise UserError(f"{source} has no rows")
    return Table(source, [row for _, row in numbered], [number for number, _ in numbered])


def _read_jsonl(file: Path) -> Iterator[tuple[int, Row]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, row {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{file}, row {number}: must be a JSON object with columns, not {_short(row)}")
            yield number, row


def _read_csv(file: Path) -> Iterator[tuple[int, Row]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        number = 0
        try:
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise UserError(f"{file}: the header names a column twice: {', '.join(header)}")
            for number, fields in enumerate(reader, start=1):
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise UserError(f"{file}, row {number}: has {len(fields)} fields for {len(header)} columns")
                yield number, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise UserError(f"{file}, row {number + 1}: not valid CSV ({error})") from None


def _read_parquet(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"data file {str(file)!r} needs the package 'pyarrow': pip install 'vcpo[data]'") from None
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"data file {str(file)!r} is not a readable parquet file: {error}") from None
    yield from enumerate(rows, start=1)


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no directory {str(path.parent)!r})"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
