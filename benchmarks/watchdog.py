"""How early the watchdog notices a collapse, and how often it cries wolf: its rules over the metrics of finished runs.

    python benchmarks/watchdog.py detect RUN ... --out results/watchdog
    python benchmarks/watchdog.py rescue RUN ... --out results/watchdog

``detect`` replays the default rules, which have seen nothing but the seed they were calibrated on. ``rescue`` lines up
runs that went on with a rollback with runs of the same seed that did not.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from vcpo.config import RunConfig, parse_config
from vcpo.observe.alarms import read_alarms
from vcpo.observe.metrics import read_metrics
from vcpo.observe.watchdog import Rule, Watchdog
from vcpo.report.collapse import LEAST_BEST_ACCURACY, is_collapsed
from vcpo.watchdog_config import WatchdogSection

CALIBRATION_SEED = 1
SCHEMES = ((2, 3), (3, 5), (4, 8))
WIDER = (1.25, 1.5, 2.0, 3.0)
# a quarter beyond what the healthy runs showed; for what healthy training itself moves, twice
MARGIN = {"value": 1.25, "median": 2.0, "deviation": 2.0}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option(help="directory of the results")]


@dataclass(frozen=True)
class Run:
    """A finished run. variant: ``sync`` at a lag of 0, otherwise the method's name."""

    variant: str
    seed: int
    name: str
    config: RunConfig
    train: list[dict[str, Any]]
    accuracies: list[tuple[int, float]]

    @property
    def lowest(self) -> float:
        """The smallest ratio of an accuracy to the best one up to it."""
        ratios, best = [], 0.0
        for _, accuracy in self.accuracies:
            best = max(best, accuracy)
            ratios.append(accuracy / best if best else 1.0)
        return min(ratios)

    @property
    def falls_at(self) -> int | None:
        """The first evaluation with less than half of the best accuracy so far; ``None`` if there is none."""
        best = 0.0
        for step, accuracy in self.accuracies:
            if best >= LEAST_BEST_ACCURACY and accuracy < 0.5 * best:
                return step
            best = max(best, accuracy)
        return None


@dataclass(frozen=True)
class Detection:
    """What the rules say about one run.

    warning: steps from the first alarm to the fall. lowest: the smallest share of its best accuracy so far that the run
    had. first: step of the first alarm by metric.
    """

    variant: str
    seed: int
    run: str
    falls_at: int | None
    first_alarm: int | None
    rules: list[str]
    warning: int | None
    lowest: float
    alarms: int
    steps: int
    first: dict[str, int] = field(default_factory=dict)


def read_run(path: Path) -> Run:
    """A run from its directory."""
    config = parse_config(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")), str(path))
    lines = read_metrics(path / "metrics.jsonl")
    variant = "sync" if config.runtime.max_staleness == 0 else config.method.name
    return Run(
        variant,
        config.seed,
        path.name,
        config,
        [line for line in lines if line["kind"] == "train"],
        [(line["step"], line["accuracy"]) for line in lines if line["kind"] == "eval"],
    )


def default_rules() -> list[Rule]:
    """The rules of a configuration that says nothing but ``enabled``."""
    return [Rule(metric, **rule.model_dump()) for metric, rule in WatchdogSection().rules.items()]


def replay(run: Run, rules: Sequence[Rule]) -> Detection:
    """Every step of the run, in order."""
    dog = Watchdog(rules, WatchdogSection().reference_steps)
    alarms = [alarm for line in run.train for alarm in dog.observe(line["step"], line)]
    first: dict[str, int] = {}
    for alarm in alarms:
        first.setdefault(alarm.metric, alarm.step)
    earliest = min(first.values(), default=None)
    falls = run.falls_at
    return Detection(
        run.variant,
        run.seed,
        run.name,
        falls,
        earliest,
        [metric for metric, step in first.items() if step == earliest],
        None if falls is None or earliest is None else falls - earliest,
        run.lowest,
        len(alarms),
        len(run.train),
        first,
    )


def extreme(runs: Iterable[Run], rule: Rule, upper: bool) -> float | None:
    """The bound, in the rule's unit, that these runs would just not have crossed."""
    found = []
    for run in runs:
        values = [line[rule.metric] for line in run.train if rule.metric in line]
        reference = values[: WatchdogSection().reference_steps]
        middle, spread = 0.0, 1.0
        if rule.scale == "median":
            spread = statistics.median(reference)
        elif rule.scale == "deviation":
            middle = statistics.median(reference)
            spread = 1.4826 * statistics.median(abs(v - middle) for v in reference)
        values = [(v - middle) / spread for v in values]
        windows = [values[i : i + rule.window] for i in range(len(values) - rule.window + 1)]
        if windows:
            ordered = [sorted(window, reverse=upper)[rule.count - 1] for window in windows]
            found.append(max(ordered) if upper else min(ordered))
    return (max if upper else min)(found, default=None)


def calibration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For every bound: the worst of the healthy calibration runs, that with its margin, and the default."""
    rows = []
    for rule in default_rules():
        for side, bound in (("below", rule.below), ("above", rule.above)):
            if bound is None:
                continue
            worst = extreme(runs, rule, side == "above")
            if worst is None:
                continue
            margin = MARGIN[rule.scale]
            grows = (side == "above") == (worst > 0)
            rows.append(
                {
                    "metric": rule.metric,
                    "side": side,
                    "unit": rule.scale,
                    "healthy": worst,
                    "with_margin": worst * margin if grows else worst / margin,
                    "default": bound,
                }
            )
    return rows


def calibrated_rules(healthy: Sequence[Run], count: int, window: int, margin: float) -> list[Rule]:
    """The default rules with other bounds on values: what the healthy runs showed, and a margin beyond it."""
    rules = []
    for rule in default_rules():
        changed = replace(rule, count=count, window=window)
        upper = rule.above is not None
        worst = extreme(healthy, changed, upper) if rule.scale == "value" else None
        if worst is not None:
            changed = replace(changed, above=worst * margin) if upper else replace(changed, below=worst / margin)
        rules.append(changed)
    return rules


def schemes(healthy: Sequence[Run], collapsing: Sequence[Run]) -> list[dict[str, Any]]:
    """Steps of warning on the calibration seed by ``count`` of ``window``, each with bounds calibrated the same way."""
    rows = []
    for count, window in SCHEMES:
        rules = calibrated_rules(healthy, count, window, MARGIN["value"])
        warnings = {run.name: replay(run, rules).warning for run in collapsing}
        rows.append({"count": count, "window": window, "warning": warnings})
    return rows


def margins(healthy: Sequence[Run], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What wider bounds would have done to every run. For the reader; nothing was chosen by it."""
    rows = []
    for margin in WIDER:
        found = [replay(run, calibrated_rules(healthy, 3, 5, margin)) for run in runs]
        rows.append(
            {
                "margin": margin,
                "warning": {f"{d.variant} {d.seed}": d.warning for d in found if d.falls_at is not None},
                "alarms": {f"{d.variant} {d.seed}": d.alarms for d in found if d.falls_at is None},
            }
        )
    return rows


@app.command()
def detect(runs: list[Path], out: Out = Path("results/watchdog")) -> None:
    """Replay the default rules over finished runs and write detection.json and its tables."""
    read = sorted(map(read_run, runs), key=lambda run: (run.variant, run.seed))
    found = [replay(run, default_rules()) for run in read]
    calibrated = [run for run in read if run.seed == CALIBRATION_SEED]
    healthy = [run for run in calibrated if run.variant != "tis"]
    result = {
        "rules": [asdict(rule) for rule in default_rules()],
        "calibration_seed": CALIBRATION_SEED,
        "calibration": calibration(healthy),
        "schemes": schemes(healthy, [run for run in calibrated if run.variant == "tis"]),
        "margins": margins(healthy, read),
        "runs": [asdict(detection) for detection in found],
        "sums": _sums(found),
    }
    tables = {
        "detection": _detection_table(found),
        "rules": _rule_table(found),
        "bounds": _table(
            ("metric", "side", "unit", "healthy", "with margin", "default"),
            [
                (r["metric"], r["side"], r["unit"], f"{r['healthy']:.3g}", f"{r['with_margin']:.3g}", r["default"])
                for r in result["calibration"]
            ],
        ),
        "schemes": _table(
            ("alarm at", "steps of warning on the calibration seed"),
            [
                (f"{row['count']} of {row['window']}", ", ".join(str(v) for v in row["warning"].values()))
                for row in result["schemes"]
            ],
        ),
        "margins": _table(
            ("margin", "steps of warning of runs that fell", "runs that did not fall with alarms", "their alarms"),
            [
                (
                    row["margin"],
                    ", ".join(f"{run}: {warning}" for run, warning in row["warning"].items()),
                    f"{sum(n > 0 for n in row['alarms'].values())} of {len(row['alarms'])}",
                    sum(row["alarms"].values()),
                )
                for row in result["margins"]
            ],
        ),
    }
    _write(out, "detection", result, tables)
    for line in result["sums"]:
        typer.echo(line)


@app.command()
def rescue(
    plain: Annotated[list[Path], typer.Argument(help="runs without a watchdog and, after them, runs with a rollback")],
    out: Out = Path("results/watchdog"),
) -> None:
    """Compare runs that rolled back with runs of the same seed that did not; write rescue.json and rescue.md."""
    read = sorted(map(read_run, plain), key=lambda run: (run.seed, run.config.watchdog.enabled))
    records = []
    for path, run in {path.name: (path, read_run(path)) for path in plain}.values():
        accuracies = [accuracy for _, accuracy in run.accuracies]
        alarms = read_alarms(path) if run.config.watchdog.enabled else []
        backs = sorted({(a["step"], a["back_to_step"]) for a in alarms if a["action"] == "rollback"})
        records.append(
            {
                "seed": run.seed,
                "watchdog": run.config.watchdog.enabled,
                "variant": run.variant,
                "run": run.name,
                "best": max(accuracies),
                "late": statistics.fmean(accuracies[-(len(accuracies) // 3) :]),
                "last": accuracies[-1],
                "collapsed": is_collapsed(accuracies),
                "rollbacks": [list(pair) for pair in backs],
                "alarms": [{k: a[k] for k in ("step", "metric", "sentence", "action", "back_to_step")} for a in alarms],
                "accuracies": run.accuracies,
            }
        )
    order = {run.name: number for number, run in enumerate(read)}
    records.sort(key=lambda record: order[record["run"]])
    table = _table(
        ("seed", "run", "rollbacks (alarm to step)", "best", "last third", "last", "collapsed"),
        [
            (
                r["seed"],
                f"{r['variant']} + rollback" if r["watchdog"] else r["variant"],
                ", ".join(f"{a} to {b}" for a, b in r["rollbacks"]),
                *(f"{100 * r[key]:.1f}%" for key in ("best", "late", "last")),
                "yes" if r["collapsed"] else "no",
            )
            for r in records
        ],
    )
    _write(out, "rescue", {"runs": records}, {"rescue": table})


def _detection_table(found: Sequence[Detection]) -> list[str]:
    return _table(
        ("run", "seed", "falls at", "lowest / best accuracy", "first alarm", "by", "steps of warning", "alarms"),
        [
            (
                d.variant,
                f"{d.seed}{'*' if d.seed == CALIBRATION_SEED else ''}",
                "" if d.falls_at is None else d.falls_at,
                f"{d.lowest:.2f}",
                "" if d.first_alarm is None else d.first_alarm,
                ", ".join(d.rules),
                "" if d.warning is None else d.warning,
                d.alarms,
            )
            for d in found
        ],
    )


def _sums(found: Sequence[Detection]) -> list[str]:
    tested = [d for d in found if d.seed != CALIBRATION_SEED]
    lines = []
    for variant in dict.fromkeys(d.variant for d in tested):
        runs = [d for d in tested if d.variant == variant]
        fallen = [d for d in runs if d.falls_at is not None]
        early = [d for d in fallen if d.warning is not None and d.warning > 0]
        standing = [d for d in runs if d.falls_at is None]
        steps = sum(d.steps for d in standing)
        parts = [f"{variant}: {len(runs)} runs beside the calibration seed"]
        if fallen:
            warnings = [d.warning for d in fallen if d.warning is not None]
            middle = f", median warning {statistics.median(warnings):g} steps" if warnings else ""
            parts.append(f"{len(fallen)} fell, {len(early)} of them with an alarm before{middle}")
        if standing:
            false = [d for d in standing if d.alarms]
            parts.append(
                f"{len(standing)} did not fall, {len(false)} of them with alarms"
                f" ({sum(d.alarms for d in standing)} in {steps} steps)"
            )
        lines.append("; ".join(parts))
    return lines


def _rule_table(found: Sequence[Detection]) -> list[str]:
    metrics = [rule.metric for rule in default_rules()]
    return _table(
        ("run", "seed", *metrics),
        [(d.variant, d.seed, *(d.first.get(metric, "") for metric in metrics)) for d in found],
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def _write(out: Path, name: str, result: dict[str, Any], tables: dict[str, list[str]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for table, lines in tables.items():
        text = "\n".join(lines) + "\n"
        (out / f"{table}.md").write_text(text, encoding="utf-8")
        typer.echo(text)


if __name__ == "__main__":
    app()
