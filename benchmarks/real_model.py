"""The curves of runs of a real model (docs/real-model.md), from what the runs have logged.

    python benchmarks/real_model.py "all weights=runs/gsm8k-smollm2" "adapters=runs/gsm8k-smollm2-lora" \
        --out results/gsm8k-smollm2 --image docs/images/gsm8k-smollm2.png

Keeps each run's metrics, configuration, versions and command, and draws the runs into one figure.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from vcpo.report.comparison_figure import Panel, draw_comparison
from vcpo.report.figures import save_png
from vcpo.report.runs import load_runs

ENVIRONMENT = "environment.json"
KEPT = ("metrics.jsonl", "config.yaml", ENVIRONMENT)
PANELS = (
    Panel("Reward of trained responses", ("reward",)),
    Panel("Trained responses with a boxed answer (share)", ("reward_parts/boxed",), share=True),
    Panel("Reward on held-out problems", ("reward",), kind="eval"),
    Panel("Effective sample size (share of the minibatch)", ("ess",), share=True),
    Panel("KL(sampler ‖ learner) per token", ("kl_k3",), log=True),
    Panel("Gradient norm before clipping", ("grad_norm",), log=True),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(
    runs: Annotated[list[str], typer.Argument(help="name=run directory")],
    out: Annotated[Path, typer.Option(help="directory for what is kept of the runs")],
    image: Annotated[Path, typer.Option(help="the figure")],
) -> None:
    """Keep what the runs have logged, and draw the figure."""
    variants = {}
    for run in runs:
        name, _, directory = run.partition("=")
        kept = out / name.replace(" ", "-")
        kept.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(Path(directory) / file, kept / file)
        sessions = json.loads((kept / ENVIRONMENT).read_text(encoding="utf-8"))
        for session in sessions:
            session["command"][0] = "vcpo"  # wherever it is installed
        (kept / ENVIRONMENT).write_text(json.dumps(sessions, indent=2) + "\n", encoding="utf-8")
        variants[name] = load_runs([kept])
    typer.echo(save_png(draw_comparison(variants, PANELS), image))


if __name__ == "__main__":
    app()
