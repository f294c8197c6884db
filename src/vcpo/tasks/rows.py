"""Reading data rows from JSONL, parquet or CSV files, or from a dataset id, with errors that name the row."""

from __future__ import annotations

import csv
import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.errors import UserError, suggest
from vcpo.records import Message

Row = Mapping[str, Any]

_LARGEST_FIELD = 1 << 26  # characters of a CSV field; Python's own limit is 131,072
_ABSENT = object()


def field(row: Row, column: str, default: Any = None) -> Any:
    """A value of a row; ``a.b`` is ``b`` inside the column ``a``, unless there is a column of that very name."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


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
        """Whether the first row has the column (dotted names as in ``field``)."""
        return field(self.rows[0], column, _ABSENT) is not _ABSENT

    def value(self, index: int, column: str) -> Any:
        """A value that must be there (dotted names as in ``field``).

        Raises UserError naming file, row and column when it is missing, null or NaN.
        """
        row = self.rows[index]
        value = field(row, column, _ABSENT)
        if value is _ABSENT:
            raise self._missing(index, column)
        if value is None:
            raise self.error(index, column, "is null")
        if isinstance(value, float) and math.isnan(value):
            raise self.error(index, column, "is NaN (an empty cell?)")
        return value

    def text(self, index: int, column: str) -> str:
        """A value that must be a non-empty string."""
        value = self.value(index, column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(index, column, f"must be a non-empty string, not {_short(value)}")
        self._encodable(index, column, value)
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
            self._encodable(index, column, content)
            messages.append({"role": role, "content": content})
        return messages

    def error(self, index: int, column: str, problem: str) -> UserError:
        """The error to raise about one value."""
        return self.row_error(index, f"column {column!r} {problem}")

    def row_error(self, index: int, problem: str) -> UserError:
        """The error to raise about a row."""
        return UserError(f"{self.source}, row {self.numbers[index]}: {problem}")

    def _missing(self, index: int, column: str) -> UserError:
        row: Any = self.rows[index]
        if not row:
            return self.error(index, column, "is missing: the row is empty")
        # of a dotted name, say what there is where it ends
        *path, last = column.split(".")
        inner = field(row, ".".join(path)) if path else row
        if path and path[0] in row and not isinstance(inner, Mapping):
            return self.error(index, ".".join(path), f"has no {last!r} in it: it is {_short(inner)}")
        return self.error(index, column, f"is missing{suggest(last, inner) if inner else suggest(column, row)}")

    def _encodable(self, index: int, column: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start]
            problem = f"has half of a character ({bad!r} at position {error.start}), which is no text; correct the row"
            raise self.error(index, column, problem) from None

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
    except UnicodeDecodeError:
        raise UserError(f"data file {path!r} is not UTF-8 text: {_undecodable(file)}; save it as UTF-8") from None
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
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, row {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{file}, row {number}: must be a JSON object with columns, not {_short(row)}")
            yield number, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"an object names {_repeated(key for key, _ in pairs)!r} twice")
    return made


def _read_csv(file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_LARGEST_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        number = 0
        try:
            header = next(reader, [])
            _check_header(file, header)
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
        with pyarrow.parquet.ParquetFile(file) as parquet:
            _check_header(file, parquet.schema_arrow.names)
            rows = parquet.read().to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"data file {str(file)!r} is not a readable parquet file: {error}") from None
    yield from enumerate(rows, start=1)


def _check_header(file: Path, header: list[str]) -> None:
    if len(set(header)) != len(header):
        raise UserError(f"{file}: the header names the column {_repeated(header)!r} twice; rename one of them")
    if header and not all(name.strip() for name in header):
        raise UserError(f"{file}: a column has no name in the header: {', '.join(map(repr, header))}")


def _repeated(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def _undecodable(file: Path) -> str:
    """Where a file ceases to be UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                return "it looks like UTF-16"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number} has the byte 0x{line[error.start]:02x} at position {error.start}"
    return "its end is cut off"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no directory {str(path.parent)!r})"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
