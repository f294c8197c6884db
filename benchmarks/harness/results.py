"""From the cells' result files to a table, a summary against the bars, and Markdown. Imports without torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.cells import SIZES, Cell

VARIANTS = ("plain", "ours", "one_at_a_time", "padded", "torch_func", "opacus")
MIB = 2**20

COLUMNS = (
    "size", "tokens", "group", "threads", "device", "variant", "rounds", "seconds", "to_plain", "to_one_at_a_time",
    "step_to_plain", "peak_mib", "gradient_mib", "flop_share", "gradient_deviation", "norm_deviation", "skipped",
)  # fmt: skip


def read_cells(out: Path) -> list[dict[str, Any]]:
    """Every finished cell, in the order of the grid."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in (out / "cells").glob("*.json")]
    sizes = list(SIZES)

    def place(result: dict[str, Any]) -> tuple[Any, ...]:
        cell = Cell(**result["cell"])
        return (cell.device, sizes.index(cell.size), cell.tokens, cell.group, cell.threads)

    return sorted(results, key=place)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of the table per variant of a cell.

    seconds: median time to the finished gradient. to_plain, to_one_at_a_time: median over rounds of the ratio to that
    variant in the same round. step_to_plain: the same for whole steps, with the optimizer's median time in both.
    peak_mib: most memory held at one time above parameters and optimizer state, the gradient included. flop_share:
    operations of the plain step at the machine's measured speed, as a share of the time.
    """
    timed = {name: v["seconds"] for name, v in result["variants"].items() if "seconds" in v}
    optimizer = median(result["optimizer_seconds"])
    bound = result["plain_step_flops"] / result["peak_flops_per_second"]
    table = []
    for name in (name for name in VARIANTS if name in result["variants"]):
        variant = result["variants"][name]
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | result["cell"] | {"variant": name}
        if "skipped" in variant:
            table.append(row | {"skipped": variant["skipped"]})
            continue
        seconds = timed[name]
        with_optimizer = [s + optimizer for s in seconds]
        row |= {
            "rounds": len(seconds),
            "seconds": median(seconds),
            "to_plain": median_ratio(seconds, timed["plain"]),
            "to_one_at_a_time": median_ratio(seconds, timed["one_at_a_time"]),
            "step_to_plain": median_ratio(with_optimizer, [s + optimizer for s in timed["plain"]]),
            "peak_mib": variant["peak_bytes"] / MIB,
            "gradient_mib": result["gradient_bytes"] / MIB,
            "flop_share": bound / median(seconds),
            "gradient_deviation": variant["gradient_deviation"],
            "norm_deviation": "" if variant["norm_deviation"] is None else variant["norm_deviation"],
        }
        table.append(row)
    return table


def median_ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round, which a slow spell of the machine leaves alone."""
    return median(a / b for a, b in zip(seconds, other, strict=True))


def bars(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The worst cell of each quantity that has a bar, which it should not exceed.

    memory: peak of ours less one gradient buffer, as a multiple of the plain step's peak.
    """
    worst: dict[str, Any] = {}
    for result in results:
        cell = Cell(**result["cell"])
        table = {row["variant"]: row for row in rows(result)}
        plain, ours = table["plain"], table["ours"]
        quantities = [
            ("ours_to_plain", ours["to_plain"], 1.15),
            ("ours_to_one_at_a_time", ours["to_one_at_a_time"], 1.02),
            ("memory", (ours["peak_mib"] - ours["gradient_mib"]) / plain["peak_mib"], 1.1),
        ]
        if cell.tokens == 64:
            quantities.append(("ours_to_one_at_a_time_at_64_tokens", ours["to_one_at_a_time"], 1 / 1.5))
        for name, value, bar in quantities:
            if name not in worst or value > worst[name]["value"]:
                worst[name] = {"value": value, "bar": bar, "cell": cell.name}
    return worst


def write_table(out: Path) -> None:
    """``table.csv``: all rows of all finished cells; ``table.md``: the Markdown table."""
    (out / "table.md").write_text(markdown(out), encoding="utf-8")
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for result in read_cells(out):
            writer.writerows({k: _rounded(v) for k, v in row.items()} for row in rows(result))


def write_summary(out: Path, command: str) -> None:
    """``summary.json``: how the cells were measured, and the worst of each quantity that has a bar.

    command: the one just finished; those before it that measured into the same directory are kept.
    """
    results = read_cells(out)
    path = out / "summary.json"
    commands = json.loads(path.read_text(encoding="utf-8"))["commands"] if path.exists() else []
    environments: list[dict[str, Any]] = []
    for result in results:
        if result["environment"] not in environments:
            environments.append(result["environment"])
    summary = {
        "commands": list(dict.fromkeys([*commands, command])),
        "environments": environments,
        "seeds": sorted({result["seed"] for result in results}),
        "threads": sorted({result["cell"]["threads"] for result in results}),
        "cells": len(results),
        "hours": round(sum(result["elapsed_seconds"] for result in results) / 3600, 2),
        "largest_gradient_deviation": max(_all(results, "gradient_deviation"), default=None),
        "largest_norm_deviation": max(_all(results, "norm_deviation"), default=None),
        "worst": bars(results),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def markdown(out: Path) -> str:
    """One line per cell: times as ratios to the plain step, peak memory, share of the FLOP bound."""
    head = (
        "size", "tokens", "group", "threads", "plain (s)", "ours", "one at a time", "padded", "torch.func", "Opacus",
        "ours / one at a time", "peak plain (MiB)", "peak ours (MiB)", "gradient (MiB)", "FLOP share plain, ours",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in read_cells(out):
        table = {row["variant"]: row for row in rows(result)}
        plain, ours = table["plain"], table["ours"]
        ratios = [_ratio(table.get(name)) for name in VARIANTS if name != "plain"]
        cells = [
            *(str(plain[key]) for key in ("size", "tokens", "group", "threads")),
            f"{plain['seconds']:.3g}",
            *ratios,
            f"{ours['to_one_at_a_time']:.2f}",
            *(f"{value:.0f}" for value in (plain["peak_mib"], ours["peak_mib"], plain["gradient_mib"])),
            f"{plain['flop_share']:.0%}, {ours['flop_share']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: dict[str, Any] | None) -> str:
    return "" if row is None or row["skipped"] else f"{row['to_plain']:.2f}"


def _all(results: list[dict[str, Any]], key: str) -> list[float]:
    values = (variant.get(key) for result in results for variant in result["variants"].values())
    return [value for value in values if value is not None]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
