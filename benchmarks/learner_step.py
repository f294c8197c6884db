"""How much the exact gradient norms cost: one learner step, ours and other ways to it, in time and peak memory.

    python benchmarks/learner_step.py --sizes S,L --out results/learner-step
    python benchmarks/learner_step.py table results/learner-step

Every cell of the grid is measured in a process of its own; finished cells are kept and not measured again.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from harness.cells import SIZES, Cell
from harness.results import markdown, read_cells, rows, write_summary, write_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(SIZES)}")] = "S,L",
    tokens: Annotated[str, typer.Option(help="longest trajectories, prompt included")] = "64,128,256,512,1024",
    groups: Annotated[str, typer.Option(help="trajectories in the minibatch")] = "8,16",
    threads: Annotated[str, typer.Option(help="torch's CPU threads")] = "1,2",
    repeats: Annotated[int, typer.Option(min=2, help="timed rounds of every cell")] = 15,
    budget_seconds: Annotated[
        float,
        typer.Option(help="per cell; lowers its rounds, to no less than 2, and leaves slow alternatives out"),
    ] = 600.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="directory of the results")] = Path("results/learner-step"),
) -> None:
    """Measure every cell of the grid that has no result yet, then write table.csv and summary.json."""
    if context.invoked_subcommand is not None:
        return
    cells = [
        Cell(size, token, group, thread, device)
        for size, token, group, thread in itertools.product(
            _sizes(sizes), _numbers(tokens, "tokens", 8), _numbers(groups, "groups", 2), _numbers(threads, "threads", 1)
        )
    ]
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device!r} must be cpu or cuda")
    failed = []
    for number, cell in enumerate(cells, 1):
        path = _result_path(out, cell)
        if path.exists():
            typer.echo(f"[{number}/{len(cells)}] {cell.name}: kept")
            continue
        if not _measure_in_process(cell, repeats, budget_seconds, out):
            failed.append(cell.name)
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        ratios = [f"{row['variant']} {row['to_plain']:.3f}" for row in rows(result) if not row["skipped"]]
        typer.echo(f"[{number}/{len(cells)}] {cell.name}: {result['elapsed_seconds']:.0f} s; {', '.join(ratios)}")
    if read_cells(out):
        write_table(out)
        write_summary(out, shlex.join(["python", *sys.argv]))
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


@app.command()
def table(out: Annotated[Path, typer.Argument(help="directory of the results")]) -> None:
    """Print the finished cells as a Markdown table."""
    if not read_cells(out):
        raise typer.BadParameter(f"no finished cell in {str(out)!r}")
    typer.echo(markdown(out), nl=False)


@app.command("cell", hidden=True)
def measure_cell(
    size: str, tokens: int, group: int, threads: int, device: str, repeats: int, budget: float, out: Path
) -> None:
    """Measure one cell in this process."""
    from harness.measure import measure

    cell = Cell(size, tokens, group, threads, device)
    result = measure(cell, repeats, budget)
    path = _result_path(out, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    # written beside and renamed: a result file is either absent or complete
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _measure_in_process(cell: Cell, repeats: int, budget_seconds: float, out: Path) -> bool:
    limits = {name: str(cell.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    arguments = [*map(str, cell.to_plain().values()), str(repeats), str(budget_seconds), str(out)]
    done = subprocess.run([sys.executable, __file__, "cell", *arguments], env=os.environ | limits, check=False)
    return done.returncode == 0


def _result_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def _sizes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SIZES:
            raise typer.BadParameter(f"--sizes: unknown size {name!r}; allowed: {', '.join(SIZES)}")
    return names


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--{option} {text!r} must be whole numbers separated by commas") from None
    if min(numbers) < least:
        raise typer.BadParameter(f"--{option}: {min(numbers)} is too small; at least {least}")
    return numbers


if __name__ == "__main__":
    app()
