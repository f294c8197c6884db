"""``vcpo eval``: one evaluation of one model, printed and written down."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import end_token_ids, load_model
from vcpo.observe.environment import environment
from vcpo.observe.progress import Progress
from vcpo.pipeline.checkpoint import check_base
from vcpo.pipeline.eval_metrics import INTERVALS, Estimate, estimates
from vcpo.pipeline.eval_subject import Subject
from vcpo.pipeline.evaluate import EvalResult, Evaluator
from vcpo.pipeline.grading_pool import make_task_and_grading
from vcpo.pipeline.rollouts import response_seed
from vcpo.pipeline.shared_weights import base_checksum
from vcpo.records import Group

RESULT_FILE = "eval.json"
PROBLEMS_FILE = "problems.jsonl"


def evaluate_model(subject: Subject, out: Path | None) -> EvalResult:
    """Evaluate a model on its task's held-out problems, and print what that gives.

    out: a directory for ``eval.json`` (estimates, command, seed, versions, configuration) and ``problems.jsonl`` (one
    line for each problem, with all responses to it). Whatever is wrong with it, the task or its data is a UserError
    before the model is loaded.
    """
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name in (RESULT_FILE, PROBLEMS_FILE):  # a result of before must not be taken for this one's
                (out / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--out {str(out)!r} cannot be written: {error}") from None
    config = subject.config
    progress = Progress(0)
    task, grading = make_task_and_grading(config, progress.note)
    with contextlib.closing(grading):
        task.eval_problems(1)  # its UserError about missing evaluation data
        model, tokenizer = load_model(config.model, config.seed)
        if subject.checkpoint is not None:
            check_base(subject.checkpoint, base_checksum(model))
        model.requires_grad_(False)
        ends = end_token_ids(model, tokenizer)
        evaluator = Evaluator(task, grading, tokenizer, config.eval, config.sampling, ends, config.seed)
        with progress, progress.phase("evaluation") as phase:
            result = evaluator.run(model, phase)
    per_problem = result.per_problem()
    found = dict(zip(per_problem, estimates(list(per_problem.values())), strict=True))
    _print(subject, result, found)
    if out is not None:
        try:
            _write(subject, result, found, out)
        except OSError as error:
            raise UserError(f"the result could not be written to --out {str(out)!r}: {error}") from None
    return result


def _print(subject: Subject, result: EvalResult, found: Mapping[str, Estimate]) -> None:
    config, section = subject.config, subject.config.eval
    truncated = f", top-k {section.top_k}" if section.top_k else ""
    table = Table(
        title=Text(f"{subject.given} on {config.task.name}"),
        caption=Text(
            f"{section.num_generations} responses to each problem at temperature {section.temperature:g},"
            f" top-p {section.top_p:g}{truncated}; in brackets: {INTERVALS}"
        ),
        show_header=False,
    )
    for name, estimate in found.items():
        if name != "pass_at_1":  # the same as the mean
            table.add_row(_title(name, section.num_generations), _shown(estimate))
    for name, value in result.metrics.items():
        if name not in found and name != "accuracy_stderr":
            table.add_row(name, f"{value:.4g}")
    Console().print(table)


def _title(name: str, n: int) -> str:
    return f"mean@{n} (accuracy)" if name == "accuracy" else name.replace("_at_", "@")


def _shown(estimate: Estimate) -> str:
    if estimate.interval is None:
        return f"{estimate.value:.4g}"
    return f"{estimate.value:.4g} [{estimate.interval.low:.4g}, {estimate.interval.high:.4g}]"


def _write(subject: Subject, result: EvalResult, found: Mapping[str, Estimate], out: Path) -> None:
    config = subject.config
    with (out / PROBLEMS_FILE).open("w", encoding="utf-8") as file:
        for number, group in enumerate(result.groups):
            answers = None if result.answers is None else result.answers[number]
            file.write(json.dumps(_problem_line(config, group, answers), default=str) + "\n")
    record = {
        # JSON has no NaN, which is the reward where no response could be scored
        "metrics": {name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        "estimates": {name: _plain(estimate) for name, estimate in found.items()},
        "intervals": INTERVALS,
        "model": subject.to_plain(),
        "seed": config.seed,
        "command": sys.argv,
        "environment": environment(),
        "config": config.to_plain(),
    }
    (out / RESULT_FILE).write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def _plain(estimate: Estimate) -> dict[str, float | None]:
    interval = estimate.interval
    return {
        "value": estimate.value,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }


def _problem_line(config: RunConfig, group: Group, answers: list[str | None] | None) -> dict[str, Any]:
    responses = []
    for number, trajectory in enumerate(group.trajectories):
        grade = trajectory.grade
        response: dict[str, Any] = {
            "text": trajectory.text,
            "correct": grade is not None and grade.correct,
            "reward": None if grade is None else grade.reward,
            "parts": {} if grade is None else grade.parts,
            "failure": None if grade is None else grade.failure,
            "tokens": len(trajectory.response_ids_T),
            "stop_reason": trajectory.stop_reason.value,
            "seed": response_seed(config.seed, group.id, trajectory.index),
        }
        if answers is not None:
            response["answer"] = answers[number]
        responses.append(response)
    right = sum(response["correct"] for response in responses)
    return {
        "problem": group.problem.id,
        "prompt": group.problem.prompt,
        "columns": group.problem.columns,
        "accuracy": right / len(responses),
        "responses": responses,
    }
