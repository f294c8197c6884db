"""``vcpo eval``: one evaluation of one model, printed and written down."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import end_token_ids, load_model
from vcpo.observe.environment import environment
from vcpo.observe.progress import Progress
from vcpo.pipeline.evaluate import EvalResult, Evaluator
from vcpo.pipeline.grading_pool import make_task_and_grading


def evaluate_model(config: RunConfig, name: str, out: Path | None) -> EvalResult:
    """Evaluate the configuration's model on its task's held-out problems.

    out: a directory for ``eval.json`` (metrics, configuration, versions) and ``responses.jsonl`` (one line each).
    """
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {str(out)!r} cannot be written: {error}") from None
    progress = Progress(0)
    task, grading = make_task_and_grading(config, progress.note)
    with contextlib.closing(grading):
        model, tokenizer = load_model(config.model, config.seed)
        model.requires_grad_(False)
        ends = end_token_ids(model, tokenizer)
        evaluator = Evaluator(task, grading, tokenizer, config.eval, config.sampling, ends, config.seed)
        with progress, progress.phase("evaluation") as phase:
            result = evaluator.run(model, phase)
    table = Table(title=Text(f"{name} on {config.task.name}"), show_header=False)
    for key, value in result.metrics.items():
        table.add_row(key, f"{value:.4g}")
    Console().print(table)
    if out is not None:
        _write(result, config, out)
    return result


def _write(result: EvalResult, config: RunConfig, out: Path) -> None:
    record = {
        # JSON has no NaN, which is the reward where no response could be scored
        "metrics": {name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        "command": sys.argv,
        "environment": environment(),
        "config": config.to_plain(),
    }
    (out / "eval.json").write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    with (out / "responses.jsonl").open("w", encoding="utf-8") as file:
        for group in result.groups:
            for trajectory in group.trajectories:
                grade = trajectory.grade
                line = {
                    "problem": group.problem.id,
                    "prompt": group.problem.prompt,
                    "response": trajectory.text,
                    "reward": None if grade is None else grade.reward,
                    "correct": grade is not None and grade.correct,
                    "stop_reason": trajectory.stop_reason.value,
                }
                file.write(json.dumps(line) + "\n")
