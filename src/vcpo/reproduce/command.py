"""``vcpo reproduce``: make the runs that are missing, judge, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.errors import UserError, suggest
from vcpo.observe.formatting import seconds as duration
from vcpo.pipeline.compare import execute
from vcpo.report.runs import RunData, load_runs
from vcpo.reproduce.catalogue import FIGURES
from vcpo.reproduce.claims import Verdict
from vcpo.reproduce.evidence import RunEvidence, measure
from vcpo.reproduce.figure import Figure
from vcpo.reproduce.regimes import REGIMES
from vcpo.reproduce.runs import Cell, RunStore, distinct, plan_figures, typical_seconds
from vcpo.reproduce.tables import TABLES
from vcpo.reproduce.write import write_figure, write_overview

ALL: tuple[Figure, ...] = (*FIGURES, *TABLES, *REGIMES)
_FIRST_GUESS = 40.0  # seconds of a run on one core, until one has been made

_STYLES = {Verdict.REPRODUCED: "green", Verdict.NOT_REPRODUCED: "red", Verdict.NOT_TESTABLE: "yellow"}


@dataclass(frozen=True)
class Places:
    """Directories. recipes: the small recipes. runs: of all figures. out: for tables, plots and verdicts."""

    recipes: Path = Path("recipes/reproduce")
    runs: Path = Path("runs/reproduce/runs")
    out: Path = Path("results/reproduction")


def choose(names: Sequence[str]) -> list[Figure]:
    """The figures of these names, all of them for ``all``. Raises UserError for an unknown one."""
    by_name = {figure.name: figure for figure in ALL}
    for name in names:
        if name != "all" and name not in by_name:
            raise UserError(f"unknown figure or table {name!r}{suggest(name, by_name)}")
    return list(ALL) if "all" in names else [by_name[name] for name in dict.fromkeys(names)]


def list_figures(places: Places, console: Console) -> None:
    """Print what there is, how many runs each needs and has, and how long the rest would take on one core."""
    cells = plan_figures(ALL, None, places.recipes, RunStore(places.runs))
    each = typical_seconds(cells) or _FIRST_GUESS
    table = Table(box=box.ROUNDED, caption=f"at {duration(each)} per run, one at a time", caption_justify="left")
    for heading, justify in (
        ("name", "left"),
        ("title", "left"),
        ("runs", "right"),
        ("made", "right"),
        ("to go", "right"),
    ):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for figure in ALL:
        own = [cell for cell in cells if cell.figure == figure.name]
        done, all_runs = distinct([c for c in own if c.is_finished]), distinct(own)
        to_go = duration(each * (len(all_runs) - len(done))) if all_runs else "-"
        table.add_row(figure.name, figure.title, str(len(all_runs)), str(len(done)), to_go)
    console.print(table)
    console.print("vcpo reproduce NAME ... or vcpo reproduce all; runs that figures share are made once", markup=False)


def reproduce_figures(
    figures: Sequence[Figure],
    seeds: Sequence[int] | None,
    jobs: int,
    places: Places,
    console: Console,
    only_report: bool = False,
    command: str = "",
) -> None:
    """Make the missing runs (unless ``only_report``), then write every figure's files from the runs that there are.

    Raises UserError when runs failed, after everything else has been written.
    """
    cells = plan_figures(figures, seeds, places.recipes, RunStore(places.runs))
    failed = []
    if not only_report and cells:
        failed = execute(distinct(cells), jobs, lambda text: console.print(text, markup=False))
    for figure in figures:
        data, evidence = _gather(figure, [cell for cell in cells if cell.figure == figure.name])
        for path in write_figure(figure, data, evidence, places.out, command):
            console.print(Text(str(path)), soft_wrap=True)
        for claim in figure.claims:
            outcome = claim.judge(evidence)
            console.print(Text(f"  {outcome.verdict}: ", style=_STYLES[outcome.verdict]), Text(claim.text), sep="")
    write_overview(ALL, places.out)
    if failed:
        raise UserError(f"{len(failed)} runs failed; run the same command again to retry them")


def _gather(figure: Figure, cells: Sequence[Cell]) -> tuple[dict[str, list[RunData]], dict[str, list[RunEvidence]]]:
    finished = [cell for cell in cells if cell.is_finished]
    # loaded one by one, because figures may ask for one run under two names
    data: dict[str, list[RunData]] = {}
    evidence: dict[str, list[RunEvidence]] = {}
    for cell in finished:
        (run,) = load_runs([cell.run.directory])
        data.setdefault(cell.variant, []).append(run)
        evidence.setdefault(cell.variant, []).append(measure(cell.variant, cell.seed, run))
    return data, evidence
