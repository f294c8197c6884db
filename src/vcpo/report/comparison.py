"""Methods x seeds: a ranking, one table, their data as CSV and JSON, and one figure."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.observe.environment import environment
from vcpo.observe.formatting import fixed, percent, seconds
from vcpo.report.bootstrap import CONFIDENCE, RESAMPLES, Interval
from vcpo.report.comparison_figure import draw_comparison
from vcpo.report.figures import save_png
from vcpo.report.ranking import MIN_COMMON_SEEDS, rank
from vcpo.report.runs import RunData, load_runs
from vcpo.report.variant_results import VariantResult, run_result, variant_result

_RANKING_COLUMNS = ("rank", "variant", "late acc.", "to the best", "stable", "collapsed")
_MEAN_COLUMNS = ("seeds", "final acc.", "best acc.", "final ESS")
_WIDE = 100  # columns of a terminal in which a number and its interval fit on one line
_LEGEND = (
    f"late acc.: mean of the last third of evaluations; in brackets {CONFIDENCE:.0%} intervals over seeds; to the best:"
    f" difference within seeds, in points; =: not told apart by these seeds ({MIN_COMMON_SEEDS} needed at least);"
    " stable: share of runs that did not collapse"
)


class ComparisonTable:
    """The results of runs, each given as variant, seed and run directory; ``variants`` are in the order of the ranking.

    failed: variant and seed of runs that ended with an error. A variant of which nothing else is left has its row, too.
    """

    def __init__(self, entries: Sequence[tuple[str, int, Path]], failed: Sequence[tuple[str, int]] = ()) -> None:
        """Raises UserError for a run directory without readable metrics, ValueError without any entry."""
        if not entries:
            raise ValueError("there is nothing to compare")
        runs = load_runs([run_dir for _, _, run_dir in entries])
        self.runs = [run_result(*entry, run) for entry, run in zip(entries, runs, strict=True)]
        self._data: dict[str, list[RunData]] = {}
        scores: dict[str, dict[int, float]] = {}
        for result, run in zip(self.runs, runs, strict=True):
            self._data.setdefault(result.variant, []).append(run)
            of_variant = scores.setdefault(result.variant, {})
            if result.late_accuracy is not None:
                of_variant[result.seed] = result.late_accuracy
        for variant, _ in failed:
            scores.setdefault(variant, {})
        self.variants = [
            variant_result(
                standing,
                [run for run in self.runs if run.variant == standing.variant],
                [seed for variant, seed in failed if variant == standing.variant],
            )
            for standing in rank(scores)
        ]

    def write(self, out: Path, command: str = "") -> list[Path]:
        """Write ``results.csv`` (a row per run), ``ranking.csv`` (a row per variant), ``results.json``, ``results.md``
        and ``comparison.png``.

        Run directories are written relative to ``out``, so that they can be moved together.

        command: what produced the runs, recorded in the JSON next to the versions and the machine.
        """
        out.mkdir(parents=True, exist_ok=True)
        runs = [asdict(run) | {"run_dir": Path(os.path.relpath(run.run_dir, out)).as_posix()} for run in self.runs]
        variants = [_plain(variant) for variant in self.variants]
        tables = [out / "results.csv", out / "ranking.csv"]
        for path, rows in zip(tables, (runs, variants), strict=True):
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(
                    {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in rows
                )
        content = {
            "command": command,
            "environment": environment(),
            "ranking": {
                "score": "late_accuracy",
                "confidence": CONFIDENCE,
                "resamples": RESAMPLES,
                "min_common_seeds": MIN_COMMON_SEEDS,
                "legend": _LEGEND,
            },
            "variants": variants,
            "runs": runs,
        }
        data = out / "results.json"
        data.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        markdown = out / "results.md"
        markdown.write_text(self.markdown(), encoding="utf-8")
        return [*tables, data, markdown, save_png(draw_comparison(self._data), out / "comparison.png")]

    def print(self, console: Console) -> None:
        """Print the ranking and the means over seeds."""
        ranking = Table(box=box.ROUNDED, title="Ranking", title_justify="left", caption=_LEGEND, caption_justify="left")
        for name in _RANKING_COLUMNS:
            ranking.add_column(name, justify="left" if name == "variant" else "right")
        gap = "\n[" if console.width < _WIDE else " ["
        means = Table(box=box.ROUNDED, title="Means over seeds (time per run)", title_justify="left")
        means.add_column("variant", style="bold")
        for name in (*_MEAN_COLUMNS, "time"):
            means.add_column(name, justify="right", no_wrap=True)
        for row in self.variants:
            cells = [Text(cell.replace(" [", gap)) for cell in _ranking_cells(row)]
            cells[_RANKING_COLUMNS.index("variant")].stylize("bold")
            mean_cells = [Text(cell) for cell in (*_mean_cells(row), seconds(row.seconds_mean))]
            if row.collapsed:
                cells[_RANKING_COLUMNS.index("collapsed")].stylize("bold red")
            ranking.add_row(*cells)
            means.add_row(Text(row.variant), *mean_cells)
        console.print(ranking)
        console.print(means)

    def markdown(self) -> str:
        """Both tables in one, as Markdown, without the times, which depend on what else the machine was doing."""
        left = [name == "variant" for name in (*_RANKING_COLUMNS, *_MEAN_COLUMNS)]
        rows = [(*_RANKING_COLUMNS, *_MEAN_COLUMNS), tuple("---" if is_left else "---:" for is_left in left)]
        for row in self.variants:
            place, variant, *rest = _ranking_cells(row)
            rows.append((place, f"`{variant}`", *rest, *_mean_cells(row)))
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_comparison(
    entries: Sequence[tuple[str, int, Path]],
    out: Path,
    console: Console,
    command: str = "",
    failed: Sequence[tuple[str, int]] = (),
) -> None:
    """Tabulate runs (variant, seed, run directory), print the tables, write their files and name them."""
    table = ComparisonTable(entries, failed)
    files = table.write(out, command)
    table.print(console)
    for path in files:
        console.print(Text(str(path)), soft_wrap=True)


def _ranking_cells(row: VariantResult) -> tuple[str, ...]:
    standing = row.standing
    place = "-" if standing.rank is None else f"{standing.rank}{'=' if standing.tied else ''}"
    to_best = "-"
    if standing.to_best is not None:
        to_best = f"{100 * standing.to_best.mean:+.1f}{_bounds(standing.to_best.interval, '+.1f')}"
    return (
        place,
        row.variant,
        percent(standing.mean) + _bounds(standing.interval, ".1f"),
        to_best,
        "-" if row.stable_share is None else f"{100 * row.stable_share:.0f}%{_bounds(row.stable_interval, '.0f')}",
        f"{row.collapsed}/{row.judged}" if row.judged else "-",
    )


def _bounds(interval: Interval | None, form: str) -> str:
    return "" if interval is None else f" [{100 * interval.low:{form}}, {100 * interval.high:{form}}]"


def _mean_cells(row: VariantResult) -> tuple[str, ...]:
    spread = "" if row.final_accuracy_sd is None else f" ± {100 * row.final_accuracy_sd:.1f}"
    failed = f" (+{len(row.failed_seeds)} failed)" if row.failed_seeds else ""
    return (
        f"{len(row.seeds)}{failed}",
        percent(row.final_accuracy_mean) + spread,
        percent(row.best_accuracy_mean),
        fixed(row.final_ess_mean),
    )


def _plain(row: VariantResult) -> dict[str, Any]:
    """A flat row: the same names in JSON and CSV."""
    standing, to_best = row.standing, row.standing.to_best
    return {
        "rank": standing.rank,
        "tied": standing.tied,
        "variant": row.variant,
        "seeds": row.seeds,
        "failed_seeds": row.failed_seeds,
        "late_accuracy_mean": standing.mean,
        **_ends("late_accuracy", standing.interval),
        "to_best_mean": to_best.mean if to_best else None,
        **_ends("to_best", to_best.interval if to_best else None),
        "to_best_seeds": to_best.seeds if to_best else [],
        "judged": row.judged,
        "collapsed": row.collapsed,
        "stable_share": row.stable_share,
        **_ends("stable", row.stable_interval),
        "final_accuracy_mean": row.final_accuracy_mean,
        "final_accuracy_sd": row.final_accuracy_sd,
        "best_accuracy_mean": row.best_accuracy_mean,
        "final_ess_mean": row.final_ess_mean,
        "seconds_mean": row.seconds_mean,
    }


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {f"{name}_low": interval.low if interval else None, f"{name}_high": interval.high if interval else None}
