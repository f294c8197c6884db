"""What the run loop asks of a runtime, and what both runtimes share: starting groups and grading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.records import GenerationRequest, Group, Problem, Trajectory
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.protocol import Task
from vcpo.tasks.registry import make_task
from vcpo.tasks.rewards import RewardFunctions


class Stopped(Exception):
    """A stop was asked for while a minibatch was awaited; the learner is between two steps."""


class Rollouts(Protocol):
    """A source of graded minibatches that is told about every new policy version."""

    def minibatch(self, step: int) -> list[Group]:
        """The groups that optimizer step ``step`` trains on, graded; waits for them.

        Raises what went wrong in a sampler or a grader, as soon as it is known, and Stopped when the run is to end.
        """
        ...

    def publish(self, version: int) -> None:
        """Make the learner's current weights available to the samplers as ``version``."""
        ...

    def close(self) -> None:
        """Stop all processes and threads; safe to call twice."""
        ...


@dataclass(frozen=True)
class StartedGroup:
    """A prompt whose responses have been asked for."""

    id: int
    problem: Problem
    prompt_ids: NDArray[np.int64]
    next_position: int

    def requests(self, num_generations: int, seed: int) -> list[GenerationRequest]:
        """One request per response, each with its own seed derived from the run's seed, the group and the member."""
        return [
            GenerationRequest(self.id, index, self.prompt_ids, response_seed(seed, self.id, index))
            for index in range(num_generations)
        ]


def response_seed(seed: int, group_id: int, index: int) -> int:
    """The sampling seed of one response: 63 bits mixed from the run's seed, the group and the member.

    Sampling has no other random state, so a resumed run draws what the uninterrupted one would have drawn.
    """
    return int(np.random.SeedSequence([seed, group_id, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class GroupStarter:
    """Takes prompts from the data in order and numbers the groups."""

    def __init__(self, prompts: PromptSource, first_group: int) -> None:
        self._prompts = prompts
        self._next_id = first_group
        self._counts: dict[int, dict[str, float]] = {}

    def start(self, limit: int) -> list[StartedGroup]:
        """All groups with numbers below ``limit`` that have not been started yet."""
        started = []
        while self._next_id < limit:
            problem, prompt_ids, next_position = self._prompts.next()
            started.append(StartedGroup(self._next_id, problem, prompt_ids, next_position))
            self._counts[self._next_id] = {
                "prompts_skipped": float(self._prompts.skipped),
                "prompts_truncated": float(self._prompts.truncated),
            }
            self._next_id += 1
        return started

    def counts(self, group_id: int) -> dict[str, float]:
        """Prompts skipped and truncated up to a group, for the metrics; earlier groups may not be asked for again.

        Counted up to what is trained, not up to what has been started, so that a resumed run counts each prompt once.
        """
        for earlier in [id for id in self._counts if id < group_id]:
            del self._counts[earlier]
        return self._counts[group_id]


class Grader:
    """The task's grades, and the user's reward functions on top of them."""

    def __init__(self, task: Task, rewards: RewardFunctions | None) -> None:
        self._task = task
        self._rewards = rewards

    def grade(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Group:
        """The finished group with a grade on every trajectory, members in order."""
        members = sorted(trajectories, key=lambda t: t.index)
        problems = [started.problem] * len(members)
        completions = [t.text for t in members]
        grades = self._task.grade(problems, completions)
        if self._rewards is not None:
            grades = self._rewards.apply(problems, completions, grades)
        for trajectory, grade in zip(members, grades, strict=True):
            trajectory.grade = grade
        return Group(started.id, started.problem, started.next_position, members)


def make_task_and_grader(config: RunConfig) -> tuple[Task, Grader]:
    """The task with its data read, and its grader with the reward functions loaded.

    Raises UserError for whatever is wrong with the data or the functions, also when nothing would give a reward.
    """
    task = make_task(config.task.name, config.task.params)
    reward = config.reward
    if reward.reward_funcs:
        return task, Grader(task, RewardFunctions(reward.reward_funcs, reward.reward_weights))
    if config.task.name == "dataset":
        first = task.train_problem(0, config.seed)
        if task.grade([first], [""])[0].reward is None:
            raise UserError(
                f"task 'dataset' has no answers to grade with (row {first.id}): name the column in task.answer_column,"
                " or give reward functions in reward.reward_funcs"
            )
    return task, Grader(task, None)
