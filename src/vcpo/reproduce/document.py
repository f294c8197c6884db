"""Keeps a document's tables equal to the result files that its markers name."""

from __future__ import annotations

import re
from pathlib import Path

from vcpo.errors import UserError

_TABLE = re.compile(r"(?P<marker><!-- table: (?P<path>\S+) -->\n)(?P<table>(?:\|.*\n)*)")


def refresh(document: Path, root: Path) -> None:
    """Replace what follows each ``<!-- table: PATH -->`` by the contents of that file below ``root``.

    Raises UserError when the document or a file cannot be read.
    """
    try:
        text = document.read_text(encoding="utf-8")
        fresh = _TABLE.sub(lambda m: m["marker"] + (root / m["path"]).read_text(encoding="utf-8"), text)
        document.write_text(fresh, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the tables of {str(document)!r} cannot be brought up to date: {error}") from None
