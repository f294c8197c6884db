"""Graders and rewards made of parts, in grading processes and in runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grading_cases import HERE, answered
from run_cases import tiny_config
from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.grading_pool import GradingPool, make_task_and_grading
from vcpo.pipeline.run import train
from vcpo.records import Grade

SECONDS = 60.0


def config(task: Any, **reward: Any) -> RunConfig:
    sampling = {"max_completion_length": 8}
    return parse_config({"model": {"init": {}}, "task": task, "reward": reward, "sampling": sampling})


def graded(pool: GradingPool, *answers: str, **columns: Any) -> list[Grade]:
    group = pool.submit(*answered(1, *answers, **columns)).result(SECONDS)
    return [t.grade for t in group.trajectories if t.grade is not None]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how much memory a process takes")
def test_an_answer_that_takes_too_much_memory_ends_the_process_and_costs_no_other_its_grade() -> None:
    pool = GradingPool(config(f"{HERE}:ObedientTask", max_memory=0.1), note=lambda _: None)
    try:
        one, hostile, two = graded(pool, "1", "grow", "2")
        assert (one.reward, two.reward) == (1.0, 2.0)
        assert hostile.reward is None
        assert hostile.failure is not None
        assert hostile.failure.startswith("grading took more than 0.1 GiB of memory (reward.max_memory)")
        assert pool.metrics()["grading_restarts"] == 2.0
    finally:
        pool.close()


def test_without_functions_of_the_users_own_answers_are_tried_again_one_by_one() -> None:
    pool = GradingPool(config(f"{HERE}:ObedientTask", reward_funcs=["task"], reward_weights=[2.0]), lambda _: None)
    try:
        first, hostile, third = graded(pool, "1", "raise", "3")
        assert (first.reward, hostile.reward, third.reward) == (2.0, None, 6.0)
    finally:
        pool.close()


def test_parts_know_the_tokens_of_a_response_in_a_process_too() -> None:
    # every test answer has one token
    rewards = ["task", {"name": "overlong", "max_length": 1, "cache": 1}]
    pool = GradingPool(config(f"{HERE}:ObedientTask", reward_funcs=rewards), note=print)
    try:
        assert graded(pool, "1") == [Grade(0.0, correct=True, parts={"task": 1.0, "overlong": -1.0})]
    finally:
        pool.close()


@pytest.mark.parametrize("reward", [{}, {"reward_funcs": ["math"]}])
def test_what_needs_a_time_limit_needs_a_process(tmp_path: Path, reward: dict[str, Any]) -> None:
    pytest.importorskip("math_verify")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "3+4?", "answer": "7"}))
    task = {"name": "dataset" if reward else "math", "path": str(tmp_path / "a.jsonl")}
    with pytest.raises(UserError, match=r"reward\.processes=0 is not for a grader that an answer may keep busy"):
        make_task_and_grading(config(task, processes=0, **reward))
    _, grading = make_task_and_grading(config(task, processes=1, **reward))
    grading.close()


def test_a_run_tells_the_parts_of_its_reward(tmp_path: Path) -> None:
    rewards = "reward.reward_funcs=[task, {name: overlong, cache: 4}]"
    changes = (rewards, "reward.reward_weights=[1.0, 0.5]", "training.max_steps=3")
    run = train(tiny_config(tmp_path / "run", *changes), make_report=False)
    for line in read_metrics(run / "metrics.jsonl"):
        if line["kind"] == "train":
            parts = line["reward_parts/task"] + 0.5 * line["reward_parts/overlong"]
            assert line["reward"] == pytest.approx(parts)
            assert -1 <= line["reward_parts/overlong"] <= 0
