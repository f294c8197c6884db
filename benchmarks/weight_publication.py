"""What share of a step's time it takes to bring new weights to a sampler, for a model of 30 million parameters.

    python benchmarks/weight_publication.py --out results/weight-publication
    python benchmarks/weight_publication.py table results/weight-publication

Trains the quickstart's job in the local runtime (one sampler process, one thread in each process) with a larger model
and reads the run's timeline: the learner's time for publishing (copying all parameters to shared memory, their
checksum, asking for the groups that may now start), the sampler's for loading (copying them, swapping them in between
two tokens, proving by the checksum that it serves them), and the time of whole optimizer steps, from the end of one to
the end of the next. The first step, which waits for the sampler to start, is left out.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from harness.record import load_average, markdown_table, read_result, write_result

from vcpo.config import RunConfig, load_config
from vcpo.observe.trace import Trace, read_trace

BAR = 0.05
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
_PLAIN = {
    "warm_start.steps": 0,
    "eval.eval_steps": 0,
    "checkpoint.save_steps": 0,
    "logging.tensorboard": False,
    "logging.transcript_steps": 0,
    "reward.processes": 0,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def shares(trace: Trace) -> dict[str, Any]:
    """Seconds of each recorded step but the first, and in them of publishing and of loading.

    share_published, share_loaded: of the step's time, medians. A version that the sampler never loaded, because the
    next one came first, costs nothing: loading is what the sampler did from the end of one step to that of the next.
    """
    ends = [end for _, end in sorted(trace.steps().items())]
    windows = list(itertools.pairwise(ends))
    steps = [end - begin for begin, end in windows]
    published = [_seconds(trace, "learner", "publishing weights", *window) for window in windows]
    loaded = [_seconds(trace, "sampler-0", "loading weights", *window) for window in windows]
    both = [(a + b) / step for a, b, step in zip(published, loaded, steps, strict=True)]
    return {
        "step_seconds": steps,
        "published_seconds": published,
        "loaded_seconds": loaded,
        "share_published": statistics.median(a / step for a, step in zip(published, steps, strict=True)),
        "share_loaded": statistics.median(b / step for b, step in zip(loaded, steps, strict=True)),
        "share": statistics.median(both),
        "largest_share": max(both),
    }


def _seconds(trace: Trace, process: str, kind: str, begin: float, end: float) -> float:
    found = trace.shares(begin, end)
    return sum(share.seconds for share in found if (share.process, share.kind) == (process, kind))


def configure(steps: int, overrides: list[str], directory: Path) -> RunConfig:
    """The run to be timed. overrides: ``key.sub=value``, on top of everything else."""
    model = {f"model.init.{name}": size for name, size in MODEL.items()}
    whole = {"output_dir": str(directory), "training.max_steps": steps, "logging.timeline_steps": steps}
    words = [f"{key}={json.dumps(value)}" for key, value in {**_PLAIN, **model, **whole}.items()]
    return load_config(RECIPE, [*words, *overrides])


def measure(steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train for some steps and read the timeline."""
    from safetensors.torch import load_file

    from vcpo.pipeline.run import train

    with tempfile.TemporaryDirectory() as parent:
        config = configure(steps, overrides, Path(parent) / "run")
        run = train(config, make_report=False)
        parameters = sum(tensor.numel() for tensor in load_file(run / "model" / "model.safetensors").values())
        responses = config.training.prompts_per_step * config.sampling.num_generations
        return {
            "parameters": parameters,
            "responses_per_step": responses,
            "seed": config.seed,
            "overrides": overrides,
            **shares(read_trace(run)),
        }


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps; the first is not measured")] = 5,
    override: Annotated[list[str] | None, typer.Option(help="key.sub=value for the run; repeatable")] = None,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/weight-publication"),
) -> None:
    """Measure, write OUT/publication.json, and exit with 1 if the share is above the bar."""
    if context.invoked_subcommand is not None:
        return
    load = load_average()
    result = {"bar": BAR, **measure(steps, override or [])}
    write_result(out, "publication", result, load)
    typer.echo(_table(result), nl=False)
    if result["share"] > BAR:
        raise typer.Exit(1)


@app.command()
def table(out: Annotated[Path, typer.Argument(help="directory of the result")]) -> None:
    """Print the result as a Markdown table."""
    typer.echo(_table(read_result(out, "publication")), nl=False)


def _table(result: dict[str, Any]) -> str:
    head = ("parameters", "step (s)", "publishing (ms)", "loading (ms)", "share of the step, both", "largest")
    row = (
        f"{result['parameters'] / 1e6:.1f} million",
        f"{statistics.median(result['step_seconds']):.2f}",
        f"{1000 * statistics.median(result['published_seconds']):.0f}",
        f"{1000 * statistics.median(result['loaded_seconds']):.0f}",
        f"{result['share']:.2%}",
        f"{result['largest_share']:.2%}",
    )
    return markdown_table(head, [row])


if __name__ == "__main__":
    app()
