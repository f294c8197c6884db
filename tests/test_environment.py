"""Environments in runs: the rules of turns, the task with hints, and what becomes of rewards and failures."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_cases import assert_equal_weights, final_weights, timeless_metrics, tiny_config
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import end_token_ids, load_model
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.grading import Grader, InProcessGrading
from vcpo.pipeline.local import LocalRollouts
from vcpo.pipeline.rollouts import GroupStarter
from vcpo.pipeline.run import train
from vcpo.records import Problem, SamplingParams, StopReason, Trajectory
from vcpo.tasks.environment import EnvironmentTask, Observation, Turn, TurnRules, turn_rules
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.registry import environment_task, make_task
from vcpo.tasks.sort_hints import HintEnvironment, SortHintsTask

PROBLEM = Problem("p", "3142=", {"answer": "1234"})


def turn(number: int, text: str, reason: StopReason = StopReason.STOP_STRING) -> Turn:
    return Turn(number, text, np.zeros(0, dtype=np.int64), reason)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"step_timeout": 0.0}, "step_timeout is 0.0"),
        ({"step_timeout": float("nan")}, "step_timeout is nan"),
        ({"max_concurrent": -1}, "max_concurrent is -1"),
        ({"stop_strings": ("?", "")}, "non-empty strings"),
        ({"stop_strings": "ab"}, "non-empty strings"),
    ],
)
def test_impossible_rules_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        TurnRules(**values)


def test_a_task_has_the_default_rules_unless_it_has_its_own() -> None:
    class Plain(SortHintsTask):
        def __init__(self) -> None:
            super().__init__()
            del self.turn_rules

    assert turn_rules(Plain()) == TurnRules()
    assert turn_rules(SortHintsTask(max_turns=3)) == TurnRules(("?",), 3, 60.0)
    wrong = Plain()
    wrong.turn_rules = {"max_turns": 3}  # type: ignore[assignment]
    with pytest.raises(UserError, match="turn_rules of Plain is of type dict"):
        turn_rules(wrong)


def test_tasks_with_environments_are_told_apart_before_their_data_are_read(tmp_path: Path) -> None:
    assert environment_task("sort", {"digits": 4}) is None
    assert environment_task("gsm8k", {"path": str(tmp_path / "missing.jsonl")}) is None
    task = environment_task("sort_hints", {"digits": 5})
    assert isinstance(task, EnvironmentTask)
    assert len(task.train_problem(0, 0).prompt) == 6


@pytest.mark.parametrize(
    ("turns", "hints"),
    [
        (["1324?"], [">1"]),
        (["?"], [">"]),
        (["1234?"], [">1234"]),
        (["12345?"], [">1234"]),
        (["2?", "1?", "23?", "4?"], [">", ">1", ">123", ">1234"]),
        (["99>12?", "3?"], [">12", ">123"]),  # a mark of the model's own begins a new attempt, too
        (["=>?"], [">"]),
    ],
)
def test_a_hint_is_as_much_of_the_attempt_as_is_right(turns: list[str], hints: list[str]) -> None:
    environment = HintEnvironment(PROBLEM, 0, 0.0, 0.0)
    answers = [environment.step(turn(i, text)) for i, text in enumerate(turns)]
    assert [answer.text for answer in answers] == hints
    assert not any(answer.done for answer in answers)
    assert [answer.measurements["hint_length"] for answer in answers] == [len(hint) - 1 for hint in hints]
    assert environment.step(turn(len(turns), "4", StopReason.EOS)) == Observation(done=True)


def test_what_follows_the_last_hint_is_graded() -> None:
    task = SortHintsTask(digits=4)
    texts = ["1234", "1324?>1234", "1324?>1>1234", "1324?>1", "1234?>1234>", "1234?", "", "?>", "21>1234"]
    assert [g.correct for g in task.grade([PROBLEM] * len(texts), texts)] == [
        True, True, True, False, False, False, False, False, True,
    ]  # fmt: skip
    assert task.grade([PROBLEM], ["1324?>1234"])[0].parts == {"asked": 1.0}


def test_waits_are_a_function_of_problem_seed_and_turn_and_end_when_closed() -> None:
    def waits(seed: int) -> list[float]:
        environment = HintEnvironment(PROBLEM, seed, 500.0, 900.0)
        environment.close()  # so that nothing is waited for
        return [environment.step(turn(i, "1?")).measurements["wait"] for i in range(3)]

    assert waits(1) == waits(1)
    assert len({*waits(1), *waits(2)}) == 6
    assert all(500 <= wait <= 900 for wait in waits(3))
    with pytest.raises(UserError, match=r"task.min_wait = 2.0 is above task.max_wait = 1.0"):
        SortHintsTask(min_wait=2.0, max_wait=1.0)


def test_waiting_takes_no_processor_time() -> None:
    environment = HintEnvironment(PROBLEM, 0, 0.2, 0.2)
    begin, used = time.monotonic(), time.thread_time()
    environment.step(turn(0, "1?"))
    assert time.monotonic() - begin >= 0.2
    assert time.thread_time() - used < 0.1


def test_demonstrated_hints_are_those_that_the_environment_would_give() -> None:
    task = SortHintsTask(digits=6, min_wait=0.0, max_wait=0.0)
    rng = random.Random(0)
    for i in range(20):
        problem = task.train_problem(i, 0)
        text = task.demonstration(problem, rng)
        attempt, _, rest = text.partition("?")
        hint = task.environment(problem, 0).step(turn(0, attempt + "?")).text
        # the demonstration writes the rest of the answer behind the hint
        assert rest.startswith(hint)
        assert rest == ">" + problem.columns["answer"]
    single = SortHintsTask(digits=6, max_turns=1)
    assert single.demonstration(problem, rng) == problem.columns["answer"]


HINTS = (
    'task={"name": "sort_hints", "digits": 4, "min_wait": 0.0, "max_wait": 0.004}',
    'model.init.characters="0123456789=?>"',
    'reward.reward_funcs=[]',
    "sampling.max_completion_length=16",
    "logging.trajectory_steps=1",
)  # fmt: skip


def trained(run: Path) -> list[Trajectory]:
    """Every trajectory that a run has trained on."""
    groups = [group for path in saved_steps(run).values() for group in load_minibatch(path).groups]
    return [trajectory for group in groups for trajectory in group.trajectories]


@pytest.mark.parametrize("lag", ["fixed", "mixed", "in_flight"])
def test_lockstep_gives_the_same_bits_however_long_environments_take(tmp_path: Path, lag: str) -> None:
    changes = (*HINTS, f"runtime.lag={lag}", "runtime.max_staleness=2", "training.max_steps=4")
    slow = train(tiny_config(tmp_path / "a", *changes), make_report=False)
    quick = train(tiny_config(tmp_path / "b", *changes, "task.max_wait=0.0"), make_report=False)
    assert_equal_weights(final_weights(slow), final_weights(quick))
    ours, theirs = timeless_metrics(slow), timeless_metrics(quick)
    assert [line["reward"] for line in ours] == [line["reward"] for line in theirs]
    trajectories = trained(slow)
    assert any(len(t.turns) == 2 and not t.mask_T.all() for t in trajectories)
    for t, other in zip(trajectories, trained(quick), strict=True):
        assert t.response_ids_T.tolist() == other.response_ids_T.tolist()
        assert t.versions_T.tolist() == other.versions_T.tolist()
        assert (np.diff(t.versions_T) >= 0).all()


class Broken:
    """Fails for every other response, and rewards the others for their first turn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def step(self, turn: Turn) -> Observation:
        if self.seed % 2:
            raise ConnectionError("the sandbox is gone")
        return Observation(done=True, reward=0.25, measurements={"calls": 2.0})

    def close(self) -> None:
        pass


class BrokenTask(SortHintsTask):
    """Turns end with any digit."""

    def __init__(self) -> None:
        super().__init__(digits=4)
        self.turn_rules = TurnRules(tuple("0123456789"))

    def environment(self, problem: Problem, seed: int) -> Broken:  # type: ignore[override]
        return Broken(seed)


def broken_config(directory: Path, *changes: str) -> RunConfig:
    return tiny_config(
        directory,
        *HINTS,
        f'task={{"name": "{__file__}:BrokenTask"}}',
        "training.max_steps=3",
        "logging.transcript_steps=1",
        *changes,
    )


def test_a_failed_environment_means_no_reward_and_is_counted(tmp_path: Path) -> None:
    run = train(broken_config(tmp_path / "run"), make_report=False)
    trajectories = trained(run)
    failed = [t for t in trajectories if t.failure is not None]
    assert 0 < len(failed) < len(trajectories)
    for t in trajectories:
        assert t.grade is not None
        if t.failure is not None:
            assert "ConnectionError: the sandbox is gone" in t.failure
            assert t.stop_reason is StopReason.ENVIRONMENT_ERROR
            assert t.grade.reward is None
        elif t.stop_reason is StopReason.ENVIRONMENT:
            assert t.grade.reward == 0.25  # the task's own reward of a wrong answer is 0
    transcript = "".join(path.read_text() for path in sorted((run / "transcripts").iterdir()))
    assert "- turn 1: " in transcript
    assert ", calls 2\n" in transcript
    assert "- failed: the environment raised ConnectionError: the sandbox is gone" in transcript
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert sum(line["unscored"] for line in lines) == len(failed)
    assert sum(line["environment_failures"] for line in lines) == len(failed)
    assert {line["environment/calls"] for line in lines} == {2.0}
    assert {line["turns"] for line in lines} == {1.0}


def test_only_requests_in_environments_carry_their_problem() -> None:
    for name, expected in (("sort", None), ("sort_hints", "train-0-0")):
        config = tiny_config(Path("unused"), f'task={{"name": "{name}", "digits": 4}}', HINTS[1])
        _, tokenizer = load_model(config.model, 0)
        starter = GroupStarter(PromptSource(make_task(name, {"digits": 4}), tokenizer, 0, 10, "skip"))
        [group] = starter.start(1)
        assert [r.problem and r.problem.id for r in group.requests(2, 0)] == [expected] * 2


@pytest.mark.slow
def test_groups_that_are_started_again_are_still_in_their_environments() -> None:
    config = tiny_config(Path("unused"), *HINTS, 'runtime={"name": "local", "max_staleness": 2}')
    model, tokenizer = load_model(config.model, 0)
    task = make_task("sort_hints", config.task.params)
    params = SamplingParams(max_tokens=16, stop_token_ids=end_token_ids(model, tokenizer))
    starter = GroupStarter(PromptSource(task, tokenizer, 0, config.sampling.max_prompt_length, "skip"))
    rollouts = LocalRollouts(config, model, params, starter, InProcessGrading(Grader(task, None)))
    try:
        rollouts.publish(0)
        first = rollouts.minibatch(0)
        rollouts.publish(1)
        rollouts.restart()  # with groups of step 1 finished, being decoded, or waiting
        rollouts.publish(1)
        groups = [*first, *rollouts.minibatch(1)]
    finally:
        rollouts.close()
    assert [group.id for group in groups] == [0, 1, 2, 3]
    assert all(t.turns for group in groups for t in group.trajectories)


@pytest.mark.slow
def test_a_sampler_process_takes_turns_under_changing_weights(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "run",
        *HINTS,
        'runtime={"name": "local", "max_staleness": 2}',
        "task.max_wait=0.03",
        "training.max_steps=12",
    )
    trajectories = trained(train(config, make_report=False))
    answered = [t for t in trajectories if len(t.turns) == 2]
    assert answered
    for t in answered:
        first, second = t.turns
        assert first.measurements["wait"] <= 0.03
        assert first.seconds >= first.measurements["wait"]
        given = t.response_ids_T[first.end : second.start]
        assert not t.mask_T[first.end : second.start].any()
        assert t.mask_T[: first.end].all()
        assert t.mask_T[second.start :].all()
        assert given[0] == 2 + "0123456789=?>".index(">")
        assert (np.diff(t.versions_T) >= 0).all()
        assert t.versions_T[0] == t.start_version
    # some were written by several versions
    assert any(t.versions_T[0] != t.versions_T[-1] for t in trajectories)
