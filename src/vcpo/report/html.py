"""One self-contained HTML file about one or several runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vcpo.observe.alarms import read_alarms
from vcpo.observe.formatting import count, fixed, percent
from vcpo.observe.summary import finite_values, summary_rows
from vcpo.observe.transcripts import DIRECTORY, HEADING
from vcpo.report.collapse import is_collapsed
from vcpo.report.curves import draw_runs
from vcpo.report.figures import inline_svg, line_style
from vcpo.report.runs import RunData, load_runs

_TRANSCRIPT_FILES = 2  # per run: the first and the last that it wrote
_TRANSCRIPTS = 4  # of each file


@dataclass(frozen=True)
class _Transcript:
    title: str
    text: str


@dataclass(frozen=True)
class _TranscriptFile:
    title: str
    entries: list[_Transcript]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the report of finished or running runs: summary, curves, alarms, sample transcripts, configuration.

    The file needs no network and no other file; transcripts and names are escaped. Returns ``out``.
    Raises UserError for a run directory without readable metrics, ValueError without any.
    """
    if not run_dirs:
        raise ValueError("a report needs at least one run")
    runs = load_runs(run_dirs)
    environment = Environment(
        loader=PackageLoader("vcpo.report", "."),
        autoescape=True,  # transcripts are whatever a model wrote
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("template.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=_headline(runs[0]) if len(runs) == 1 else [],
        runs=[
            {
                "name": run.name,
                "colour": line_style(index)["color"],
                "alarms": _alarms(run.path),
                "transcripts": _transcripts(run.path / DIRECTORY),
                "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
            }
            for index, run in enumerate(runs)
        ],
        summary=_table([_summary(run) for run in runs]),
        setup=_table([_setup(run) for run in runs]),
        figure=Markup(inline_svg(draw_runs(runs), "curves")),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    beside.write_text(page, encoding="utf-8")
    beside.replace(out)
    return out


def _headline(run: RunData) -> list[tuple[str, str, str]]:
    """Label, number and remark of the large figures at the top."""
    summary = run.summary
    tiles = []
    if summary.final_accuracy is not None:
        tiles.append(("Eval accuracy", percent(summary.final_accuracy), f"from {percent(summary.first_accuracy)}"))
    tiles += [
        ("Training reward", fixed(summary.reward), "mean of the last steps"),
        ("Effective sample size", fixed(summary.ess), "median share of the minibatch"),
        ("Policy lag", count(summary.lag_mean), f"mean steps, {count(summary.lag_max)} at most"),
        ("Tokens per second", count(summary.tokens_per_second), f"median, {summary.steps} steps"),
    ]
    return tiles


def _summary(run: RunData) -> dict[str, str]:
    rows = dict(summary_rows(run.summary))
    verdict = is_collapsed(run.summary.eval_accuracies)
    if verdict is not None:
        rows["collapsed"] = "yes" if verdict else "no"
    for name, key in (("median KL", "kl_k3"), ("median gradient norm", "grad_norm")):
        values = finite_values(run.train, key)
        if values:
            rows[name] = f"{statistics.median(values):.3g}"
    return rows


def _setup(run: RunData) -> dict[str, str]:
    config = run.config
    rows = {
        "method": _get(config, "method", "name"),
        "task": _get(config, "task", "name"),
        "model": _get(config, "model", "path") or "made from sizes (model.init)",
        "runtime": _get(config, "runtime", "name"),
        "max_staleness": _get(config, "runtime", "max_staleness"),
        "learning_rate": _get(config, "training", "learning_rate"),
        "seed": _get(config, "seed"),
    }
    session = run.sessions[-1] if run.sessions else {}
    packages = session.get("packages")
    command = session.get("command")
    rows |= {
        "outcome": str(session.get("outcome") or ""),
        "starts": str(len(run.sessions) or ""),
        "command": " ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        "python": str(session.get("python") or ""),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items()) if isinstance(packages, dict) else "",
        "source revision": str(session.get("git_commit") or ""),
        "machine": _machine(session),
    }
    return {name: value for name, value in rows.items() if value}


def _machine(session: dict[str, Any]) -> str:
    gpus = session.get("gpus") or []
    parts = [
        str(session.get("cpu") or ""),
        f"{session['cores']} cores" if session.get("cores") else "",
        f"{session['memory_gb']} GB" if session.get("memory_gb") else "",
        ", ".join(map(str, gpus)) if isinstance(gpus, list) else "",
    ]
    return ", ".join(part for part in parts if part)


def _get(config: dict[str, Any], *keys: str) -> str:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _table(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows of a table with one column per run, in the order in which the names first occur."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _alarms(run_dir: Path) -> list[tuple[int, str]]:
    """The step and the story of each of the watchdog's alarms: what it saw, who was behind it, what was done."""
    stories = []
    for alarm in read_alarms(run_dir):
        found = alarm["trajectories"]
        names = ", ".join(f"{culprit['trajectory']} ({fixed(culprit['value'])})" for culprit in found)
        behind = f"; {found[0]['quantity']}: {names}" if found else ""
        done = alarm["action"] if alarm["back_to_step"] is None else f"back to step {alarm['back_to_step']}"
        stories.append((int(alarm["step"]), f"{alarm['sentence']}{behind}; {done}"))
    return stories


def _transcripts(directory: Path) -> list[_TranscriptFile]:
    paths = sorted(directory.glob("step-*.md"))
    chosen = dict.fromkeys([*paths[:1], *paths[-(_TRANSCRIPT_FILES - 1) :]])
    files = []
    for path in chosen:
        head, *entries = path.read_text(encoding="utf-8", errors="replace").split(f"\n{HEADING}")
        shown = []
        for entry in entries[:_TRANSCRIPTS]:
            title, _, text = entry.partition("\n")
            shown.append(_Transcript(title, text.strip("\n")))
        files.append(_TranscriptFile(head.splitlines()[0].lstrip("# ") if head.strip() else path.stem, shown))
    return files
