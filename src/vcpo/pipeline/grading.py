"""Grading finished groups: the task's grades, and a user's reward functions on top of them.

Where it happens is behind ``Grading``: here in the learner's process, or in processes of its own
(``vcpo.pipeline.grading_pool``).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Answer, Grade, Group, Problem, Trajectory
from vcpo.tasks.protocol import Task
from vcpo.tasks.registry import make_task
from vcpo.tasks.rewards import RewardFunctions

Work = tuple[StartedGroup, Sequence[Trajectory]]

_MOST_PARTS = 100  # of one grade; each is a metric


class Grading(Protocol):
    """Where answers are graded, in training and in evaluation. Safe to use from several threads."""

    def submit(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Future[Group]:
        """The finished group, members in order and each with a grade, once it is graded.

        The future raises what is to end the run. Its callbacks may run in another thread, and before this returns.
        """
        ...

    def grade_all(self, work: Sequence[Work]) -> list[Group]:
        """The same for many groups, in the order given; waits for all of them. Raises what the first of them raises."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the metrics of a step should say about grading."""
        ...

    def close(self) -> None:
        """Give up what is not graded yet: its futures are cancelled. Safe to call twice."""
        ...


class Grader:
    """The task's grades, and the user's reward functions on top of them."""

    def __init__(self, task: Task, rewards: RewardFunctions | None) -> None:
        self._task = task
        self._rewards = rewards

    def grade(self, problem: Problem, answers: Sequence[Answer]) -> list[Grade]:
        """One grade per answer to this problem, made of plain numbers.

        An exception of the task or of a function is raised on, with a note that names it; values of the wrong number
        or kind raise UserError.
        """
        problems = [problem] * len(answers)
        whose = f"the grader of task {type(self._task).__name__}"
        texts = [answer.text for answer in answers]
        grades = checked_grades(self._grades_of_task(problems, texts), len(answers), whose)
        return grades if self._rewards is None else self._rewards.apply(problems, answers, grades)

    def _grades_of_task(self, problems: Sequence[Problem], texts: Sequence[str]) -> Any:
        try:
            return self._task.grade(problems, texts)
        except BaseException as error:
            error.add_note(f"raised by the grader of task {type(self._task).__name__}")
            raise


def checked_grades(grades: Any, count: int, whose: str) -> list[Grade]:
    """The grades with plain numbers. Raises UserError that names ``whose`` they are when they are something else."""
    if not isinstance(grades, list | tuple) or len(grades) != count:
        raise UserError(f"{whose} returned {_short(grades)}; it must return a list with one Grade per answer ({count})")
    return [_plain(grade, f"{whose} returned {_short(grade)} for answer {i}") for i, grade in enumerate(grades)]


def _plain(grade: Any, what: str) -> Grade:
    if not isinstance(grade, Grade):
        raise UserError(f"{what}, which is no Grade")
    if grade.reward is not None and not (isinstance(grade.reward, numbers.Real) and math.isfinite(grade.reward)):
        raise UserError(f"{what}; a reward must be a finite number, or None for an answer that cannot be scored")
    if len(grade.parts) > _MOST_PARTS or not all(isinstance(value, numbers.Real) for value in grade.parts.values()):
        raise UserError(f"{what}; parts must be at most {_MOST_PARTS} numbers by name")
    return Grade(
        reward=None if grade.reward is None else float(grade.reward),
        correct=bool(grade.correct),
        parts={str(name): float(value) for name, value in grade.parts.items()},
        failure=grade.failure,
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


class InProcessGrading:
    """Grades in the caller's thread, one group at a time and without a time-out; what a grader raises ends the run."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._lock = threading.Lock()
        self._seconds = 0.0

    def submit(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Future[Group]:
        """Graded before it returns."""
        future: Future[Group] = Future()
        members = in_order(trajectories)
        try:
            with self._lock:
                begin = time.perf_counter()
                grades = self._grader.grade(started.problem, [Answer.of(t) for t in members])
                self._seconds += time.perf_counter() - begin
            group = graded(started, members, grades)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(group)
        return future

    def grade_all(self, work: Sequence[Work]) -> list[Group]:
        """Stops at the first exception."""
        return [self.submit(started, trajectories).result() for started, trajectories in work]

    def metrics(self) -> dict[str, float]:
        """time_grading: seconds since the last call. Nothing is left ungraded in a run that goes on."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return {"time_grading": seconds}

    def close(self) -> None:
        """Nothing is open."""


def in_order(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The members of a group by their index."""
    return sorted(trajectories, key=lambda t: t.index)


def graded(started: StartedGroup, members: list[Trajectory], grades: Sequence[Grade]) -> Group:
    """The finished group: these members with these grades, and with what their environments have to add."""
    for trajectory, grade in zip(members, grades, strict=True):
        trajectory.grade = _with_environment(trajectory, grade)
    return Group(started.id, started.problem, started.next_position, members)


def _with_environment(trajectory: Trajectory, grade: Grade) -> Grade:
    """With the environment's verdict, and the sum of what it gave for the turns; where it failed there is no reward."""
    if trajectory.failure is not None:
        return dataclasses.replace(grade, reward=None, failure=grade.failure or trajectory.failure)
    verdicts = [turn.correct for turn in trajectory.turns if turn.correct is not None]
    grade = dataclasses.replace(grade, correct=verdicts[-1] if verdicts else grade.correct)
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    if not rewards or grade.failure is not None:
        return grade
    parts = {**grade.parts, "environment": sum(rewards)}
    return dataclasses.replace(grade, reward=(grade.reward or 0.0) + sum(rewards), parts=parts)


def make_task_and_grader(config: RunConfig) -> tuple[Task, Grader]:
    """The task with its data read, and its grader with the reward functions loaded.

    Raises UserError for whatever is wrong with the data or the functions, also when nothing would give a reward.
    """
    task = make_gradable_task(config)
    return task, Grader(task, make_rewards(config) if config.reward.reward_funcs else None)


def make_rewards(config: RunConfig) -> RewardFunctions:
    """The rewards of the configuration, loaded. Raises UserError as ``RewardFunctions`` does."""
    longest = config.sampling.max_completion_length
    return RewardFunctions(config.reward.reward_funcs, config.reward.reward_weights, longest)


def make_gradable_task(config: RunConfig) -> Task:
    """The task with its data read. Raises UserError for what is wrong with them, also when nothing gives a reward."""
    task = make_task(config.task.name, config.task.params)
    if not config.reward.processes and (_needs_time_limit(task) or make_rewards(config).needs_time_limit):
        raise UserError(
            "reward.processes=0 is not for a grader that an answer may keep busy for ever, as it may 'math': only a"
            " grading process can be ended; set reward.processes to 1 or more"
        )
    by_environment = getattr(task, "rewarded_by_environment", False)
    if config.task.name == "dataset" and not config.reward.own_functions and not by_environment:
        first = task.train_problem(0, config.seed)
        if task.grade([first], [""])[0].reward is None:
            raise UserError(
                f"task 'dataset' has no answers to grade with (row {first.id}): name the column in task.answer_column,"
                " give reward functions in reward.reward_funcs, or an environment with get_reward"
            )
    return task


def _needs_time_limit(task: Task) -> bool:
    return bool(getattr(task, "needs_time_limit", False))
