"""Reading data files: formats, and what is said about damaged ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from vcpo.errors import UserError
from vcpo.tasks.rows import read_dataset, read_file


def test_formats_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'say "a,b"\ntwice', "answer": "x"}]
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "say \\"a,b\\"\\ntwice", "answer": "x"}'
    )
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n1+1=,2\n"say ""a,b""\ntwice",x\n', encoding="utf-8")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tables = [read_file(str(tmp_path / f"a.{extension}")) for extension in ("jsonl", "csv", "parquet")]
    assert [table.rows for table in tables] == [rows] * 3
    # a JSONL row's number is its line, so that an editor finds it
    assert [table.numbers for table in tables] == [[1, 3], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("name", "contents", "sentence"),
    [
        ("a.jsonl", b"", r"a\.jsonl has no rows"),
        ("a.jsonl", b"\n\n", r"a\.jsonl has no rows"),
        ("a.csv", b"prompt,answer\n", r"a\.csv has no rows"),
        ("a.csv", b"", r"a\.csv has no rows"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, row 2: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl, row 2: must be a JSON object with columns, not \[1\]"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, row 1: not valid JSON"),
        ("a.jsonl", b'{"a": "\xff"}', r"a\.jsonl' is not UTF-8 text"),
        ("a.csv", b"prompt,answer\n1,2\n1,2,3\n", r"a\.csv, row 2: has 3 fields for 2 columns"),
        ("a.csv", b"prompt,prompt\n1,2\n", r"a\.csv: the header names the column 'prompt' twice"),
        ("a.csv", b'prompt,answer\n1,"2', r"a\.csv, row 1: not valid CSV"),
        ("a.parquet", b"PAR1 is only the beginning", r"a\.parquet' is not a readable parquet file"),
        ("a.parquet", b"", r"a\.parquet' is not a readable parquet file"),
        ("a.txt", b"hello", r"must be \.jsonl, \.parquet or \.csv"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, contents: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=sentence):
        read_file(str(tmp_path / name))


def test_empty_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no rows"):
        read_file(str(tmp_path / "a.parquet"))


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"trian\.jsonl' does not exist; did you mean '.*train\.jsonl'"):
        read_file(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="there is no directory"):
        read_file(str(tmp_path / "absent" / "train.jsonl"))


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'vcpo\[data\]'"):
        read_dataset("openai/gsm8k", "main", "train")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'vcpo\[data\]'"):
        read_file(str(tmp_path / "a.parquet"))


def test_a_dataset_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "mine"
    directory.mkdir()
    for split, value in (("train", 1), ("test", 2)):
        pyarrow.parquet.write_table(pa.table({"value": [value]}), directory / f"{split}.parquet")
    table = read_dataset(str(directory), None, "test")
    assert table.rows == [{"value": 2}]
    assert table.name(0) == "mine[test]:1"
    with pytest.raises(UserError, match="cannot be loaded"):
        read_dataset(str(directory), None, "validation")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "must be text or a list of chat messages, not 3"),
        ([], "must be text or a list of chat messages"),
        ("", "must be a non-empty string"),
        (["hi"], "has a message without a text role and content: 'hi'"),
        ([{"role": "user", "content": None}], "has a message without a text role and content"),
        ([{"content": "hi"}], "has a message without a text role and content"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, value: object, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": value}))
    table = read_file(str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match=rf"a\.jsonl, row 1: column 'prompt' {sentence}"):
        table.prompt(0, "prompt")


@pytest.mark.parametrize(
    ("name", "contents", "sentence"),
    [
        ("a.jsonl", b"\xef\xbb\xbf", r"a\.jsonl has no rows"),
        ("a.jsonl", b'{"a": 1, "a": 2}', r"a\.jsonl, row 1: not valid JSON \(an object names 'a' twice\)"),
        ("a.jsonl", b'{"a": {"b": 1, "b": 2}}', r"row 1: not valid JSON \(an object names 'b' twice\)"),
        ("a.jsonl", '{"a": "ü"}'.encode("utf-16"), r"not UTF-8 text: it looks like UTF-16; save it as UTF-8"),
        ("a.csv", "a,b\n1,ü\n".encode("latin-1"), r"not UTF-8 text: line 2 has the byte 0xfc at position 2"),
        # far beyond the first block that is read
        (
            "a.jsonl",
            b'{"a": 1}\n' * 5000 + b'{"a": "\xff"}',
            r"not UTF-8 text: line 5001 has the byte 0xff at position 7",
        ),
        ("a.csv", b"prompt,,answer\n1,2,3\n", r"a\.csv: a column has no name in the header: 'prompt', '', 'answer'"),
        ("a.csv", b"prompt,answer\n1,2\n\n\n1\n", r"a\.csv, row 4: has 1 fields for 2 columns"),
        ("a.tsv", b"prompt\tanswer\n1\t2\n", r"must be \.jsonl, \.parquet or \.csv"),
    ],
)
def test_odd_files(tmp_path: Path, name: str, contents: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=sentence):
        read_file(str(tmp_path / name))


def test_odd_but_readable_files(tmp_path: Path) -> None:
    text = "x" * 1_000_000
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,answer\r\n" + text.encode() + b',"2\r\n3"\r\n')
    assert read_file(str(tmp_path / "a.csv")).rows == [{"prompt": text, "answer": "2\r\n3"}]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n')
    assert read_file(str(tmp_path / "a.jsonl")).rows == [{"prompt": "café"}]


def test_parquet_that_names_a_column_twice(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="names the column 'a' twice"):
        read_file(str(tmp_path / "a.parquet"))


def test_dotted_names_look_inside_columns(tmp_path: Path) -> None:
    row = {"a": {"b": {"c": 1}, "d": None}, "a.d": 2, "list": [1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    table = read_file(str(tmp_path / "a.jsonl"))
    assert (table.value(0, "a.b.c"), table.value(0, "a.d")) == (1, 2)  # a column of that very name goes first
    assert table.has("a.b") and not table.has("a.x") and not table.has("list.x")  # noqa: PT018
    for column, sentence in (
        ("a.b.cc", r"column 'a\.b\.cc' is missing; did you mean 'c'\?"),
        ("list.x", r"column 'list' has no 'x' in it: it is \[1\]"),
        ("lst", r"column 'lst' is missing; did you mean 'list'\?"),
    ):
        with pytest.raises(UserError, match=rf"a\.jsonl, row 1: {sentence}"):
            table.value(0, column)


def test_cells_that_are_no_values(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": NaN, "half": "\\ud800", "chat": [{"role": "user", "content": "\\udfff"}]}')
    table = read_file(str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match=r"row 1: column 'n' is NaN \(an empty cell\?\)"):
        table.value(0, "n")
    with pytest.raises(UserError, match="row 1: column 'half' has half of a character"):
        table.text(0, "half")
    with pytest.raises(UserError, match="row 1: column 'chat' has half of a character"):
        table.prompt(0, "chat")
