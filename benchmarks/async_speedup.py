"""How much time asynchrony saves: the same job synchronous and asynchronous, one sampler and one learner process.

    python benchmarks/async_speedup.py --out results/async-speedup
    python benchmarks/async_speedup.py table results/async-speedup

The jobs (``speed/*.yaml``): responses of one length, responses with a long tail of lengths, responses that wait for an
environment, and responses that call Python in a sandbox, with programs that end at once and with ones that take their
time. Both modes run in the local runtime with one thread in each process and differ in
``runtime.max_staleness`` alone: 0 trains every minibatch on the policy that it updates, so the two processes take
turns; the recipe's own limit lets them overlap, with new weights loaded between two tokens. Times come from the
timelines of the runs: from the first token drawn to the end of the last step, checkpoints included. Nothing is
evaluated in that time: the models of the checkpoints are, afterwards, on held-out problems. Modes take turns within a
seed, so that a slow spell of the machine meets both. Results of finished runs are kept: the same command goes on where
it was interrupted. Run it in the project's directory, from which a recipe names its task.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from harness.capacity import capacity_of_two
from harness.overlap import summarize, times_of
from harness.processors import ProcessorTime
from harness.record import load_average, markdown_table, read_result, write_result

from vcpo.config import load_config
from vcpo.observe.environment import usable_cores

# with the speedup that is asked for; where sandboxes take all processors there is nothing to ask for
CASES = {"uniform": 1.7, "long_tailed": 2.0, "waiting": 2.5, "tool": 1.0, "slow_tool": 2.5}
BOUND_SHARE = 0.9
MODES = ("sync", "async")
RECIPES = Path(__file__).parent / "speed"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(case: str, mode: str, seed: int, overrides: list[str], directory: Path) -> ProcessorTime:
    """One run in a process of its own, as a user would start it; what it prints goes to a file beside it.

    Returns the machine's processor time meanwhile.
    """
    config = load_config(RECIPES / f"{case}.yaml", overrides)
    words = [*overrides, f"seed={seed}", f"output_dir={json.dumps(str(directory))}"]
    words.append(f"logging.timeline_steps={config.training.max_steps}")
    if mode == "sync":
        words.append("runtime.max_staleness=0")
    directory.parent.mkdir(parents=True, exist_ok=True)
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "vcpo", "train", str(RECIPES / f"{case}.yaml"), *words, "--no-report"]
    log = directory.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        processors = ProcessorTime()
        done = subprocess.run(command, env=os.environ | limits, stdout=output, stderr=output, check=False)
        processors.close()
    if done.returncode:
        raise RuntimeError(f"the run {directory.name} failed; see {log}")
    return processors


def accuracies(run: Path) -> dict[int, float]:
    """Accuracy by step on held-out problems, of every checkpoint; the last one is of the final model."""
    import torch

    from vcpo.config import ModelSection
    from vcpo.models.loading import end_token_ids, load_model
    from vcpo.pipeline.evaluate import Evaluator
    from vcpo.pipeline.grading_pool import make_task_and_grading
    from vcpo.pipeline.run_directory import RunDirectory

    torch.set_num_threads(1)
    directory, config = RunDirectory.of_finished_or_running(run)
    task, grading = make_task_and_grading(config)
    found: dict[int, float] = {}
    with contextlib.closing(grading):
        for path in sorted(directory.checkpoints.glob("step-*")):
            section = config.model.model_dump() | {"path": str(path / "model"), "init": None}
            model, tokenizer = load_model(ModelSection.model_validate(section), config.seed)
            model.requires_grad_(False)
            ends = end_token_ids(model, tokenizer)
            evaluator = Evaluator(task, grading, tokenizer, config.eval, config.sampling, ends, 0)
            found[int(path.name.removeprefix("step-"))] = evaluator.run(model).metrics["accuracy"]
    return dict(sorted(found.items()))


def measure(case: str, mode: str, seed: int, overrides: list[str], runs: Path, keep: bool) -> dict[str, Any]:
    """Train, unless a result is there; then evaluate the checkpoints."""
    directory = runs / f"{case}-{mode}-seed{seed}"
    result = directory.with_suffix(".json")
    if not result.exists():
        shutil.rmtree(directory, ignore_errors=True)
        load = load_average()
        processors = train(case, mode, seed, overrides, directory)
        facts = {"case": case, "mode": mode, "seed": seed, "overrides": overrides, "load_average": load}
        measured = {**facts, **times_of(directory), "cores": usable_cores(), "accuracies": accuracies(directory)}
        begin = measured.pop("begin")
        measured["processor_seconds"] = processors.between(begin, begin + measured["seconds"])
        result.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        if not keep:
            shutil.rmtree(directory)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if found["overrides"] != overrides:
        raise typer.BadParameter(f"{result} was measured with other overrides: choose another --out")
    return found


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    cases: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(CASES)}")] = ",".join(CASES),
    seeds: Annotated[str, typer.Option(help="comma-separated")] = "1,2,3",
    override: Annotated[list[str] | None, typer.Option(help="key.sub=value for every run; repeatable")] = None,
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="keep the run directories with their timelines")
    ] = False,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/async-speedup"),
) -> None:
    """Measure what has no result yet, write OUT/speedup.json, and exit with 1 if a bar is missed."""
    if context.invoked_subcommand is not None:
        return
    names, load = cases.split(","), load_average()
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"--cases: unknown case {name!r}; allowed: {', '.join(CASES)}")
    capacity, found = capacity_of_two(), []
    typer.echo(f"two processes at a time do {capacity:.2f} times the work of one")
    for name in names:
        for seed in map(int, seeds.split(",")):
            for mode in MODES:
                found.append(measure(name, mode, seed, override or [], out / "runs", keep_runs))
                last = found[-1]
                typer.echo(
                    f"{name}, seed {seed}, {mode}: {last['seconds']:.1f} s for {last['steps']} steps"
                    f" (sampling {last['t_sample']:.1f} s, training {last['t_train']:.1f} s)"
                )
    summaries = {name: judged(name, [each for each in found if each["case"] == name]) for name in names}
    facts = {"bound_share_bar": BOUND_SHARE, "capacity_of_two": capacity, "cases": summaries, "runs": found}
    write_result(out, "speedup", facts, load)
    typer.echo(_table(summaries), nl=False)
    if not all(summary["bars_met"] for summary in summaries.values()):
        raise typer.Exit(1)


def judged(case: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a case and whether it keeps what is asked for.

    Final accuracies count as equal when the asynchronous runs' mean is not lower by more than two standard errors.
    """
    summary = summarize(runs)
    slack = 2 * (summary["accuracy_difference_stderr"] or 0.0)
    equal = summary["accuracy_difference"] >= -slack
    quick = summary["speedup"] >= CASES[case] and summary["bound_share"] >= BOUND_SHARE
    return {"bar": CASES[case], **summary, "accuracies_equal": equal, "bars_met": equal and quick}


@app.command()
def table(out: Annotated[Path, typer.Argument(help="directory of the result")]) -> None:
    """Print the result as a Markdown table."""
    typer.echo(_table(read_result(out, "speedup")["cases"]), nl=False)


def _table(summaries: dict[str, dict[str, Any]]) -> str:
    measured = any("busy_async" in s for s in summaries.values())
    head = (
        "job", "sync (ms/step)", "of it sampling, training", "async (ms/step)", "its T_sample, T_train", "speedup",
        "perfect overlap", "share of it", *["processors busy"] * measured,
        "to the same accuracy", "final accuracy, sync and async", "difference",
    )  # fmt: skip
    rows = []
    for case, s in summaries.items():
        stderr, to_accuracy = s["accuracy_difference_stderr"], s["speedup_to_accuracy"]
        rows.append(
            (
                case.replace("_", "-"),
                f"{1000 * s['seconds_sync']:.0f}",
                f"{1000 * s['t_sample_sync']:.0f}, {1000 * s['t_train_sync']:.0f}",
                f"{1000 * s['seconds_async']:.0f}",
                f"{1000 * s['t_sample_async']:.0f}, {1000 * s['t_train_async']:.0f}",
                f"{s['speedup']:.2f} ({min(s['speedups']):.2f} to {max(s['speedups']):.2f})",
                f"{s['speedup_bound']:.2f}",
                f"{s['bound_share']:.0%}",
                *[f"{s['busy_sync']:.2f}, {s['busy_async']:.2f}" if "busy_async" in s else ""] * measured,
                "never reached" if to_accuracy is None else f"{to_accuracy:.2f}",
                f"{s['final_accuracy_sync']:.1%}, {s['final_accuracy_async']:.1%}",
                f"{100 * s['accuracy_difference']:+.1f} points" + ("" if stderr is None else f" ± {100 * stderr:.1f}"),
            )
        )
    return markdown_table(head, rows)


if __name__ == "__main__":
    app()
