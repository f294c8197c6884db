"""Whether a small model learns to call its tool: figure and curves of a comparison on ``tool_arithmetic``.

    vcpo compare recipes/tool-arithmetic.yaml --jobs 1 --out runs/tool-arithmetic
    python benchmarks/tool_learning.py runs/tool-arithmetic --out results/tool-arithmetic \
        --image docs/images/tool-arithmetic.png

Keeps the comparison's tables beside ``curves.csv``, which has a row for every optimizer step of every run: the shares
of the trained responses that asked the tool and that were right without it, and the accuracy where there was an
evaluation.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from vcpo.report.comparison_figure import Panel, draw_comparison
from vcpo.report.figures import save_png
from vcpo.report.runs import RunData, load_runs

TABLES = ("results.csv", "ranking.csv", "results.json", "results.md")
COLUMNS = {"asked": "reward_parts/asked", "unaided": "reward_parts/unaided", "ess": "ess", "lag_mean": "lag_mean"}
PANELS = (
    Panel("Accuracy on held-out problems", ("accuracy",), kind="eval", share=True),
    Panel("Trained responses that ask the tool (share)", ("reward_parts/asked",), share=True),
    Panel("Effective sample size (share of the minibatch)", ("ess",), share=True),
    Panel("Policy lag (mean, optimizer steps)", ("lag_mean",)),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(
    comparison: Annotated[Path, typer.Argument(help="directory that vcpo compare has written")],
    out: Annotated[Path, typer.Option(help="directory of the tables")] = Path("results/tool-arithmetic"),
    image: Annotated[Path, typer.Option(help="the figure")] = Path("docs/images/tool-arithmetic.png"),
) -> None:
    """Draw the figure, write the curves, and keep the comparison's tables."""
    runs = json.loads((comparison / "results.json").read_text(encoding="utf-8"))["runs"]
    loaded = load_runs([comparison / run["run_dir"] for run in runs])
    out.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        shutil.copy(comparison / name, out / name)
    with (out / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "seed", "step", "accuracy", *COLUMNS])
        for facts, run in zip(runs, loaded, strict=True):
            writer.writerows([facts["variant"], facts["seed"], *row] for row in curves(run))
    variants: dict[str, list[RunData]] = {}
    for facts, run in zip(runs, loaded, strict=True):
        variants.setdefault(facts["variant"], []).append(run)
    typer.echo(save_png(draw_comparison(variants, PANELS), image))


def curves(run: RunData) -> Iterator[list[Any]]:
    """Step, accuracy where there is one, and the other columns; step 0 has been evaluated only."""
    accuracy = {line["step"]: line["accuracy"] for line in run.eval}
    trained = {line["step"]: line for line in run.train}
    for step in sorted(accuracy.keys() | trained.keys()):
        line = trained.get(step, {})
        values = [accuracy.get(step), *(line.get(key) for key in COLUMNS.values())]
        yield [step, *("" if value is None else round(value, 4) for value in values)]


if __name__ == "__main__":
    app()
