"""The documentation shows the results that are kept, not numbers that somebody typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TABLE = re.compile(r"<!-- table: (?P<path>\S+) -->\n(?P<table>(?:\|.*\n)+)")
LINK = re.compile(r"\]\((?!https?://|#)(?P<path>[^)#]+)")
DOCUMENTS = sorted([*Path("docs").glob("*.md"), Path("README.md"), Path("CONTRIBUTING.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_tables_are_those_of_the_results(document: Path) -> None:
    for match in TABLE.finditer(document.read_text(encoding="utf-8")):
        assert match["table"] == Path(match["path"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        assert (document.parent / match["path"]).exists(), match["path"]


def test_the_whole_method_fits_in_one_readable_file() -> None:
    assert len(Path("examples/single_file.py").read_text(encoding="utf-8").splitlines()) < 250
