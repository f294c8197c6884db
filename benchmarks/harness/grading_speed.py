"""How many answers a second are graded, in grading processes and in the run's own."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcpo.config import RunConfig, parse_config
from vcpo.pipeline.grading import Grader, Work
from vcpo.pipeline.grading_pool import GradingPool
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Answer, StopReason, Trajectory
from vcpo.tasks.registry import make_task

GROUP = 8  # answers to one prompt
HANG = "and now for ever"

_WORDS = "so we add the two numbers and get the next one which is then divided by what was left over in the step before"
# text that breaks graders which are not made for it
HOSTILE: tuple[str, ...] = (
    "",
    " \n\t",
    "\x00\ud800",
    "9" * 20_000,
    "(" * 20_000,
    "\\boxed{" * 3_000,
    "<answer>" * 3_000,
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{" + "(" * 16 + "2" + ")" * 16 + "}",
    "\\boxed{" + "\\frac{1}{" * 16 + "2" + "}" * 16 + "}",
    "\\boxed{\\sum_{n=1}^{99999}\\frac{1}{n^n}}",
    "<answer>9**9**9</answer>",
    "__import__('os').abort()",
)


@dataclass(frozen=True)
class Case:
    """A grader with rows: a right answer, how a response says it, a wrong one; ``extra`` is put among the hostile."""

    name: str
    grader: str | dict[str, Any]
    right: Any
    says: Callable[[Any], str]
    wrong: Any
    extra: tuple[str, ...] = ()


def _boxed(answer: Any) -> str:
    return f"\\boxed{{{answer}}}"


CASES: tuple[Case, ...] = (
    Case("exact", "exact", "Paris", str, "Rome"),
    Case("number", "number", "1,500", lambda answer: f"#### {answer}", "1501"),
    Case("math, equal as text", "math", "\\frac{1}{2}", _boxed, "\\frac{1}{2}"),
    Case("math, parsed", "math", "x^2+2x+1", _boxed, "x^2+2x+2"),
    Case("choice", "choice", "B", lambda answer: f"The answer is ({answer}).", "C"),
    Case("regex", {"name": "regex", "pattern": r"Answer: (\w+)"}, "Paris", lambda answer: f"Answer: {answer}", "Rome"),
    Case(
        "countdown",
        "countdown",
        {"numbers": [3, 5, 7], "target": 22},
        lambda answer: f"<answer>{answer if isinstance(answer, str) else '3*5+7'}</answer>",
        "3*5-7",
    ),
    Case(
        "exact, some never end",
        f"{Path(__file__).with_name('hanging_grader.py')}:HangingGrader",
        "Paris",
        str,
        "Rome",
        (HANG,),
    ),
)


def texts(case: Case, count: int, hostile_share: float, seed: int) -> list[str]:
    """Answers of about 150 words, half of them right; the given share is hostile text instead."""
    rng = random.Random(f"{case.name}/{seed}")
    hostile = case.extra or HOSTILE
    words = _WORDS.split()
    made = []
    for _ in range(count):
        if rng.random() < hostile_share:
            made.append(rng.choice(hostile))
            continue
        said = case.says(case.right if rng.random() < 0.5 else case.wrong)
        thoughts = "" if case.says is str else " ".join(rng.choices(words, k=150)) + "\n"
        made.append(thoughts + said)
    return made


def measure(
    case: Case,
    answers: int,
    hostile_share: float,
    processes: Sequence[int],
    repeats: int,
    timeout: float,
    scratch: Path,
) -> dict[str, Any]:
    """Answers a second (median over the repeats) in the run's own process and in pools. Other counts are of one repeat.

    Where answers never end, there is no figure for the run's own process.
    """
    rows = scratch / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "?", "answer": case.right}) + "\n", encoding="utf-8")
    task = {"name": "dataset", "path": str(rows), "grader": case.grader}
    rounds = [texts(case, answers, hostile_share, seed) for seed in range(repeats + 1)]  # the first to warm up
    result: dict[str, Any] = {
        "case": case.name,
        "answers": answers,
        "hostile_share": hostile_share,
        "in_process_per_second": None,
    }
    if not case.extra:
        result["in_process_per_second"] = _in_process(_config(task, 1, timeout), rounds)
    result["pools"] = [_in_pool(_config(task, count, timeout), rounds) for count in processes]
    for pool in result["pools"]:
        own = result["in_process_per_second"]
        pool["of_in_process"] = None if own is None else pool["per_second"] / own
    return result


def _config(task: dict[str, Any], processes: int, timeout: float) -> RunConfig:
    reward = {"processes": processes, "timeout": timeout, "max_failures": 10**6}
    return parse_config({"model": {"init": {}}, "task": task, "reward": reward})


def _in_process(config: RunConfig, rounds: list[list[str]]) -> float:
    grader = Grader(make_task(config.task.name, config.task.params), None)
    speeds = []
    for made in rounds:
        work = _groups(config, made)
        begin = time.perf_counter()
        for started, trajectories in work:
            grader.grade(started.problem, [Answer.of(t) for t in trajectories])
        speeds.append(len(made) / (time.perf_counter() - begin))
    return statistics.median(speeds[1:])


def _in_pool(config: RunConfig, rounds: list[list[str]]) -> dict[str, Any]:
    pool = GradingPool(config, note=lambda _: None)
    try:
        pool.wait_until_loaded()
        speeds, before = [], pool.metrics()
        for made in rounds:
            work = _groups(config, made)
            before = pool.metrics()
            begin = time.perf_counter()
            pool.grade_all(work)
            speeds.append(len(made) / (time.perf_counter() - begin))
        after = pool.metrics()
    finally:
        pool.close()
    return {
        "processes": config.reward.processes,
        "per_second": statistics.median(speeds[1:]),
        "failures_of_the_last_repeat": after["grading_failures"] - before["grading_failures"],
        "restarts_of_the_last_repeat": after["grading_restarts"] - before["grading_restarts"],
    }


def _groups(config: RunConfig, made: list[str]) -> list[Work]:
    """Groups with as many tokens as such texts have (four characters each), so that sending them costs what it does."""
    problem = make_task(config.task.name, config.task.params).train_problem(0, 0)
    none = np.zeros(1, np.int64)
    work: list[Work] = []
    for number, begin in enumerate(range(0, len(made), GROUP)):
        trajectories = []
        for index, text in enumerate(made[begin : begin + GROUP]):
            ids = np.zeros(len(text) // 4 + 1, np.int64)
            logprobs = ids.astype(np.float32)
            trajectories.append(Trajectory(number, index, none, ids, ids == 0, logprobs, ids, StopReason.EOS, 0, text))
        work.append((StartedGroup(number, problem, none, number + 1), trajectories))
    return work
