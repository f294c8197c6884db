"""The documentation shows the results that are kept, not numbers that somebody typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vcpo.observe.metrics import read_metrics
from vcpo.reproduce.command import ALL

TABLE = re.compile(r"<!-- table: (?P<path>\S+) -->\n(?P<table>(?:\|.*\n)+)")
METRICS = re.compile(r"<!-- metrics: (?P<path>\S+) -->\n(?P<table>(?:\|.*\n)+)")
VERSION = re.compile(r"^\| (?P<package>\S+) \| (?P<version>\S+) \|.*\| `(?P<file>\S+)` \|$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)(?P<path>[^)#]+)")
DOCUMENTS = sorted([*Path("docs").glob("*.md"), Path("README.md"), Path("CONTRIBUTING.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_tables_are_those_of_the_results(document: Path) -> None:
    for match in TABLE.finditer(document.read_text(encoding="utf-8")):
        assert match["table"] == Path(match["path"]).read_text(encoding="utf-8")


def step_table(path: Path) -> str:
    """One row per step of a metrics file, evaluations in their own column."""
    lines = read_metrics(path)
    accuracy = {line["step"]: f"{100 * line['accuracy']:.0f}%" for line in lines if line["kind"] == "eval"}
    rows = [
        ("step", "reward", "groups with a gradient", "ESS", "lag (max)", "KL", "gradient norm", "s", "eval accuracy"),
        ("---:",) * 9,
        ("0", *("",) * 7, accuracy.get(0, "")),
    ]
    rows += [
        (
            str(line["step"]),
            f"{line['reward']:.3f}",
            f"{100 * (1 - line['zero_std_groups']):.0f}%",
            f"{line['ess']:.2f}",
            f"{line['lag_max']:.0f}",
            f"{line['kl']:.4f}",
            f"{line['grad_norm']:.2f}",
            f"{line['time_step']:.0f}",
            accuracy.get(line["step"], ""),
        )
        for line in lines
        if line["kind"] == "train"
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_step_tables_are_those_of_the_metrics(document: Path) -> None:
    for match in METRICS.finditer(document.read_text(encoding="utf-8")):
        assert match["table"] == step_table(Path(match["path"]))


def test_tested_versions_are_those_that_are_installed_for_the_tests() -> None:
    _, _, table = Path("docs/gpus.md").read_text(encoding="utf-8").partition("<!-- versions -->")
    rows = list(VERSION.finditer(table))
    assert len(rows) > 5
    for row in rows:
        pins = Path(row["file"]).read_text(encoding="utf-8").splitlines()
        assert f"{row['package']}=={row['version']}" in pins


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        assert (document.parent / match["path"]).exists(), match["path"]


def test_the_reproduction_page_shows_the_verdicts_of_every_figure() -> None:
    page = Path("docs/reproduction.md").read_text(encoding="utf-8")
    for figure in ALL:
        assert f"<!-- table: results/reproduction/{figure.name}-claims.md -->" in page


def test_the_whole_method_fits_in_one_readable_file() -> None:
    assert len(Path("examples/single_file.py").read_text(encoding="utf-8").splitlines()) < 250


def test_tests_that_the_documents_name_exist() -> None:
    written = {
        name for path in Path("tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    named = {name for path in DOCUMENTS for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))}
    assert named
    assert named <= written
