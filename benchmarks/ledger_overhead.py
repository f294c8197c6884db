"""What share of a run's time its ledger takes, in both runtimes.

    python benchmarks/ledger_overhead.py --out results/ledger

Every run records the seconds that it spends in its ledger (metric ``time_ledger``: processor time of noting events in
any thread, and elapsed time of writing them, in which the disk and other threads have their turn). The share is their
sum, opening the file included, over the time of all steps but the first, which in the local runtime waits for the
samplers to start. Warm start, evaluations and checkpoints are not counted, which makes the share larger than that of a
whole run. Elapsed times are those of the machine as it is: the load at the start is recorded.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from vcpo.config import load_config
from vcpo.observe.environment import environment
from vcpo.observe.ledger import FILE_NAME, read_ledger
from vcpo.observe.metrics import read_metrics

BAR = 0.03
_PLAIN = ("eval.eval_steps=0", "checkpoint.save_steps=0", "logging.tensorboard=false", "logging.transcript_steps=0")


def measure(recipe: Path, runtime: str, steps: int, overrides: list[str], directory: Path) -> dict[str, Any]:
    """Train for some steps and read what the ledger took. Times in seconds."""
    from vcpo.pipeline.run import train

    words = [*_PLAIN, f"training.max_steps={steps}", f"runtime.name={runtime}", *overrides]
    run = train(load_config(recipe, [*words, f"output_dir={json.dumps(str(directory / runtime))}"]), make_report=False)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    ledger = [line["time_ledger"] for line in lines]
    rest = [line["time_step"] for line in lines][1:]
    return {
        "runtime": runtime,
        "overrides": overrides,
        "steps": len(lines),
        "trajectories": read_ledger(run / FILE_NAME).planned,
        "median_step_seconds": statistics.median(rest),
        "median_ledger_seconds_per_step": statistics.median(ledger),
        "largest_ledger_seconds_of_a_step": max(ledger),
        "share": sum(ledger) / (sum(rest) + sum(ledger[1:])),
        "ledger_bytes": (run / FILE_NAME).stat().st_size,
    }


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value for every run")] = None,
    recipe: Annotated[Path, typer.Option(help="what to train")] = Path("recipes/quickstart.yaml"),
    runtimes: Annotated[str, typer.Option(help="comma-separated: local, lockstep")] = "local,lockstep",
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps of each run")] = 30,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/ledger"),
) -> None:
    """Measure, write OUT/overhead.json, and exit with 1 if a share is not below the bar."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        runs = [measure(recipe, name, steps, overrides or [], Path(directory)) for name in runtimes.split(",")]
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "recipe": str(recipe),
        "bar": BAR,
        "runs": runs,
        "load_average": load,
        "environment": environment(),
    }
    (out / "overhead.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for run in runs:
        typer.echo(
            f"{run['runtime']}: {100 * run['share']:.2f}% of the time of {run['steps']} steps with"
            f" {run['trajectories']} trajectories (median {1000 * run['median_ledger_seconds_per_step']:.2f} ms of"
            f" {1000 * run['median_step_seconds']:.0f} ms)"
        )
    if any(run["share"] >= BAR for run in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
