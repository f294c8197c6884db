"""The files of one figure: runs as JSON and CSV, tables of results and verdicts, the plot; and the tables over all."""

from __future__ import annotations

import csv
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from vcpo.observe.formatting import fixed, percent
from vcpo.report.figures import save_png
from vcpo.report.runs import RunData
from vcpo.reproduce.claims import Outcome, Verdict
from vcpo.reproduce.evidence import RunEvidence
from vcpo.reproduce.figure import Figure
from vcpo.reproduce.figures import draw

Results = Mapping[str, Sequence[RunEvidence]]


def write_figure(figure: Figure, runs: Mapping[str, Sequence[RunData]], results: Results, out: Path,
                 command: str) -> list[Path]:  # fmt: skip
    """Judge the claims; write ``NAME.json``, ``NAME-claims.md``, and with runs ``NAME.csv``, ``.md`` and ``.png``.

    command: as typed, recorded in the JSON beside what the runs were made on.
    """
    out.mkdir(parents=True, exist_ok=True)
    outcomes = {claim.name: claim.judge(results) for claim in figure.claims}
    rows = [run.to_plain() for variant in results.values() for run in variant]
    content = {
        "name": figure.name,
        "title": figure.title,
        "paper": figure.paper,
        "recipe": figure.recipe,
        "variants": {name: dict(changes) for name, changes in figure.variants.items()},
        "command": command,
        "machines": machines(runs),
        "claims": [
            {"name": claim.name, "text": claim.text, "ours": claim.ours, "rule": claim.rule.text}
            | asdict(outcomes[claim.name])
            for claim in figure.claims
        ],
        "runs": rows,
    }
    data, claims = out / f"{figure.name}.json", out / f"{figure.name}-claims.md"
    data.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    claims.write_text(claims_table(figure, outcomes), encoding="utf-8")
    written = [data, claims]
    if rows:
        table, markdown = out / f"{figure.name}.csv", out / f"{figure.name}.md"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        markdown.write_text(results_table(results), encoding="utf-8")
        written += [table, markdown]
        if figure.panels or figure.sweep:
            written.append(_with_fewer_colours(save_png(draw(figure, runs, results), out / f"{figure.name}.png")))
    return written


def results_table(results: Results) -> str:
    """One row per variant: seeds, late accuracy with its spread over seeds, collapses, and what goes with them."""
    head = (
        "variant",
        "seeds",
        "late acc.",
        "best acc.",
        "collapsed",
        "ESS (median)",
        "step factor",
        "truncated",
        "masked",
    )
    rows = [head, ("---", *("---:" for _ in head[1:]))]
    for variant, runs in results.items():
        if not runs:
            continue
        late = [run.late_accuracy for run in runs]
        spread = f" ± {100 * statistics.stdev(late):.1f}" if len(late) > 1 else ""
        rows.append((
            f"`{variant}`",
            _seeds([run.seed for run in runs]),
            percent(statistics.fmean(late)) + spread,
            percent(statistics.fmean(run.best_accuracy for run in runs)),
            f"{sum(run.collapsed for run in runs)}/{len(runs)}",
            fixed(_mean([run.ess_median for run in runs])),
            fixed(_mean([run.step_scale for run in runs])),
            percent(_mean([run.truncated for run in runs])),
            percent(_mean([run.masked for run in runs])),
        ))  # fmt: skip
    return _markdown(rows)


def claims_table(figure: Figure, outcomes: Mapping[str, Outcome]) -> str:
    """One row per claim: what is claimed, the rule, what was found, the verdict."""
    rows = [("claim", "rule", "found", "verdict"), ("---",) * 4]
    for claim in figure.claims:
        outcome = outcomes[claim.name]
        text = f"{claim.text} (ours)" if claim.ours else claim.text
        rows.append((text, claim.rule.text, outcome.finding, f"**{outcome.verdict}**"))
    return _markdown(rows)


def write_overview(figures: Sequence[Figure], out: Path) -> list[Path]:
    """Write ``verdicts.md`` (figures x verdicts) and ``machines.md`` from the figures' JSON files in ``out``."""
    rows = [("", "title", *Verdict), ("---", "---", *("---:" for _ in Verdict))]
    totals: Counter[str] = Counter()
    seen: dict[str, Counter[str]] = {}
    for figure in figures:
        path = out / f"{figure.name}.json"
        if not path.is_file():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = Counter(claim["verdict"] for claim in content["claims"])
        totals += counts
        rows.append((figure.name, figure.title, *(str(counts[verdict]) for verdict in Verdict)))
        for key, values in content["machines"].items():
            seen.setdefault(key, Counter()).update(values)
    rows.append(("all", "", *(str(totals[verdict]) for verdict in Verdict)))
    verdicts, table = out / "verdicts.md", out / "machines.md"
    verdicts.write_text(_markdown(rows), encoding="utf-8")
    facts = [("", "runs made on"), ("---", "---")]
    facts += [(key, ", ".join(sorted(values))) for key, values in seen.items()]
    table.write_text(_markdown(facts), encoding="utf-8")
    return [verdicts, table]


def machines(runs: Mapping[str, Sequence[RunData]]) -> dict[str, list[str]]:
    """What the runs recorded about where they were made: every value that occurs."""
    seen: dict[str, set[str]] = {}
    for variant in runs.values():
        for run in variant:
            for session in run.sessions:
                facts: dict[str, Any] = {key: session.get(key) for key in ("cpu", "cores", "python")}
                packages = session.get("packages") or {}
                facts |= {name: packages.get(name) for name in ("torch", "transformers")}
                facts["revision"] = session.get("git_commit")
                for key, value in facts.items():
                    seen.setdefault(key, set()).add(str(value))
    return {key: sorted(values) for key, values in seen.items()}


def _with_fewer_colours(path: Path) -> Path:
    """The image with a palette, a quarter of the size: these are kept in the repository."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)
    return path


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _seeds(seeds: Sequence[int]) -> str:
    ordered = sorted(seeds)
    whole = len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]}-{ordered[-1]}" if whole else ", ".join(map(str, ordered))


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)
