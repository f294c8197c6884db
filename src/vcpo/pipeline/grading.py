"""Grading finished groups: the task's grades, and a user's reward functions on top of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Grade, Group, Problem, Trajectory
from vcpo.tasks.protocol import Task
from vcpo.tasks.registry import make_task
from vcpo.tasks.rewards import RewardFunctions

Work = tuple[StartedGroup, Sequence[Trajectory]]


class Grading(Protocol):
    """Where answers are graded, in training and in evaluation. Safe to use from several threads."""

    def submit(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Future[Group]:
        """The finished group, members in order and each with a grade, once it is graded.

        The future raises what is to end the run. Its callbacks may run in another thread, and before this returns.
        """
        ...

    def grade_all(self, work: Sequence[Work]) -> list[Group]:
        """The same for many groups, in the order given; waits for all of them."""
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

    def grade(self, problem: Problem, answers: Sequence[str]) -> list[Grade]:
        """One grade per answer to this problem."""
        problems = [problem] * len(answers)
        grades = self._task.grade(problems, answers)
        if self._rewards is not None:
            grades = self._rewards.apply(problems, answers, grades)
        return grades


class InProcessGrading:
    """Grades in the caller's thread, one group at a time and without a time-out."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._lock = threading.Lock()
        self._seconds = 0.0

    def submit(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Future[Group]:
        """Graded before it returns; an exception of the grader is the future's."""
        future: Future[Group] = Future()
        members = in_order(trajectories)
        try:
            with self._lock:
                begin = time.perf_counter()
                grades = self._grader.grade(started.problem, [t.text for t in members])
                self._seconds += time.perf_counter() - begin
            future.set_result(graded(started, members, grades))
        except Exception as error:
            future.set_exception(error)
        return future

    def grade_all(self, work: Sequence[Work]) -> list[Group]:
        """Raises the first exception of the grader."""
        return [self.submit(started, trajectories).result() for started, trajectories in work]

    def metrics(self) -> dict[str, float]:
        """time_grading: seconds since the last call. What cannot be graded ends the run, so nothing else to say."""
        seconds, self._seconds = self._seconds, 0.0
        return {"time_grading": seconds}

    def close(self) -> None:
        """Nothing is open."""


def in_order(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The members of a group by their index."""
    return sorted(trajectories, key=lambda t: t.index)


def graded(started: StartedGroup, members: list[Trajectory], grades: Sequence[Grade]) -> Group:
    """The finished group: these members with these grades."""
    for trajectory, grade in zip(members, grades, strict=True):
        trajectory.grade = grade
    return Group(started.id, started.problem, started.next_position, members)


def make_task_and_grading(config: RunConfig) -> tuple[Task, Grading]:
    """The task with its data read, and its grading with the reward functions loaded; the caller closes it.

    Raises UserError for whatever is wrong with the data or the functions, also when nothing would give a reward.
    """
    task = make_task(config.task.name, config.task.params)
    reward = config.reward
    if reward.reward_funcs:
        return task, InProcessGrading(Grader(task, RewardFunctions(reward.reward_funcs, reward.reward_weights)))
    if config.task.name == "dataset":
        first = task.train_problem(0, config.seed)
        if task.grade([first], [""])[0].reward is None:
            raise UserError(
                f"task 'dataset' has no answers to grade with (row {first.id}): name the column in task.answer_column,"
                " or give reward functions in reward.reward_funcs"
            )
    return task, InProcessGrading(Grader(task, None))
