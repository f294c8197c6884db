"""Methods x seeds: one table, its data as CSV and JSON, and one figure."""

from __future__ import annotations

import csv
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.observe.environment import environment
from vcpo.observe.formatting import fixed, percent, seconds
from vcpo.observe.summary import finite_values
from vcpo.report.collapse import is_collapsed
from vcpo.report.comparison_figure import draw_comparison
from vcpo.report.figures import save_png
from vcpo.report.runs import RunData, load_runs

_LAST_STEPS = 10
_COLUMNS = ("seeds", "final acc.", "best acc.", "collapsed", "final ESS", "time")


@dataclass(frozen=True)
class RunResult:
    """One run of the comparison; ``None`` where it was not measured.

    final_accuracy, best_accuracy: over its evaluations. collapsed: see ``is_collapsed``. final_ess: mean over the last
    10 steps. skipped_steps: steps without an update because of non-finite numbers. seconds: wall time.
    """

    variant: str
    seed: int
    run_dir: str
    first_accuracy: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    collapsed: bool | None
    final_ess: float | None
    skipped_steps: int
    seconds: float | None


@dataclass(frozen=True)
class VariantResult:
    """Means over the seeds of one variant. ``final_accuracy_sd``: sample standard deviation, from two seeds on."""

    variant: str
    seeds: list[int]
    final_accuracy_mean: float | None
    final_accuracy_sd: float | None
    best_accuracy_mean: float | None
    collapsed: int
    final_ess_mean: float | None
    seconds_mean: float | None


class ComparisonTable:
    """The results of runs, each given as variant, seed and run directory; variants keep the order given."""

    def __init__(self, entries: Sequence[tuple[str, int, Path]]) -> None:
        """Raises UserError for a run directory without readable metrics, ValueError without any entry."""
        if not entries:
            raise ValueError("there is nothing to compare")
        runs = load_runs([run_dir for _, _, run_dir in entries])
        self.runs = [_run_result(*entry, run) for entry, run in zip(entries, runs, strict=True)]
        self._data: dict[str, list[RunData]] = {}
        for (variant, _, _), run in zip(entries, runs, strict=True):
            self._data.setdefault(variant, []).append(run)
        self.variants = [_variant_result(name, [r for r in self.runs if r.variant == name]) for name in self._data]

    def write(self, out: Path, command: str = "") -> list[Path]:
        """Write ``results.csv`` (one row per run), ``results.json``, ``results.md`` and ``comparison.png``.

        Run directories are written relative to ``out``, so that they can be moved together.

        command: what produced the runs, recorded in the JSON next to the versions and the machine.
        """
        out.mkdir(parents=True, exist_ok=True)
        rows = [asdict(run) | {"run_dir": Path(os.path.relpath(run.run_dir, out)).as_posix()} for run in self.runs]
        table, data = out / "results.csv", out / "results.json"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        content = {
            "command": command,
            "environment": environment(),
            "variants": [asdict(variant) for variant in self.variants],
            "runs": rows,
        }
        data.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        markdown = out / "results.md"
        markdown.write_text(self.markdown(), encoding="utf-8")
        return [table, data, markdown, save_png(draw_comparison(self._data), out / "comparison.png")]

    def print(self, console: Console) -> None:
        """Print one row per variant."""
        table = Table(box=box.ROUNDED, title="Means over seeds (time per run)", title_justify="left")
        table.add_column("variant", style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.variants:
            cells = [Text(cell) for cell in _cells(row)]
            if row.collapsed:
                cells[_COLUMNS.index("collapsed")].stylize("bold red")
            table.add_row(Text(row.variant), *cells)
        console.print(table)

    def markdown(self) -> str:
        """The printed table as Markdown, without the times, which depend on what else the machine was doing."""
        columns = _COLUMNS[:-1]
        rows = [("variant", *columns), ("---", *("---:" for _ in columns))]
        rows += [(f"`{row.variant}`", *_cells(row)[:-1]) for row in self.variants]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_comparison(entries: Sequence[tuple[str, int, Path]], out: Path, console: Console, command: str = "") -> None:
    """Tabulate runs (variant, seed, run directory), print the table, write its files and name them."""
    table = ComparisonTable(entries)
    files = table.write(out, command)
    table.print(console)
    for path in files:
        console.print(Text(str(path)), soft_wrap=True)


def _cells(row: VariantResult) -> tuple[str, ...]:
    spread = "" if row.final_accuracy_sd is None else f" ± {100 * row.final_accuracy_sd:.1f}"
    return (
        str(len(row.seeds)),
        percent(row.final_accuracy_mean) + spread,
        percent(row.best_accuracy_mean),
        f"{row.collapsed}/{len(row.seeds)}",
        fixed(row.final_ess_mean),
        seconds(row.seconds_mean),
    )


def _run_result(variant: str, seed: int, run_dir: Path, run: RunData) -> RunResult:
    summary = run.summary
    ess = finite_values(run.train[-_LAST_STEPS:], "ess")
    accuracies = summary.eval_accuracies
    return RunResult(
        variant=variant,
        seed=seed,
        run_dir=str(run_dir),
        first_accuracy=summary.first_accuracy,
        final_accuracy=summary.final_accuracy,
        best_accuracy=summary.best_accuracy,
        collapsed=is_collapsed(accuracies) if accuracies else None,
        final_ess=statistics.fmean(ess) if ess else None,
        skipped_steps=summary.skipped,
        seconds=summary.seconds,
    )


def _variant_result(name: str, runs: Sequence[RunResult]) -> VariantResult:
    finals = [run.final_accuracy for run in runs if run.final_accuracy is not None]
    return VariantResult(
        variant=name,
        seeds=[run.seed for run in runs],
        final_accuracy_mean=statistics.fmean(finals) if finals else None,
        final_accuracy_sd=statistics.stdev(finals) if len(finals) > 1 else None,
        best_accuracy_mean=_mean([run.best_accuracy for run in runs]),
        collapsed=sum(run.collapsed is True for run in runs),
        final_ess_mean=_mean([run.final_ess for run in runs]),
        seconds_mean=_mean([run.seconds for run in runs]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
