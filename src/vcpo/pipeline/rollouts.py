"""What the run loop asks of a runtime, and what both runtimes share: starting groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vcpo.pipeline.fates import Fates
from vcpo.records import GenerationRequest, Group, Problem
from vcpo.tasks.prompts import PromptSource


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

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of the optimizer step just done, before its weights are published."""
        ...

    def drain(self, steps: int) -> None:
        """Train ``steps`` steps on responses of the policy that they update, once those in flight have been trained."""
        ...

    def restart(self) -> None:
        """Give up every response that has been started and not trained, but none of their prompts.

        Nothing that older weights than those published next have sampled is handed out from now on.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What the metrics of this step should say about pacing and staleness."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain data that, beside the ``DataProgress``, continue the pacing in a resumed run."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``, before the first weights are published."""
        ...

    def close(self) -> None:
        """Stop all processes and threads; safe to call twice."""
        ...


@dataclass(frozen=True)
class StartedGroup:
    """A prompt whose responses have been asked for.

    in_environments: whether the responses are written in environments, which are made of the problem.
    """

    id: int
    problem: Problem
    prompt_ids: NDArray[np.int64]
    next_position: int
    in_environments: bool = False

    def requests(self, num_generations: int, seed: int) -> list[GenerationRequest]:
        """One request per response, each with its own seed derived from the run's seed, the group and the member."""
        # requests go to other processes: a problem, which may be large, only where it is needed
        problem = self.problem if self.in_environments else None
        return [
            GenerationRequest(self.id, index, self.prompt_ids, response_seed(seed, self.id, index), problem)
            for index in range(num_generations)
        ]


def response_seed(seed: int, group_id: int, index: int) -> int:
    """The sampling seed of one response: 63 bits mixed from the run's seed, the group and the member.

    Sampling has no other random state, so a resumed run draws what the uninterrupted one would have drawn.
    """
    return int(np.random.SeedSequence([seed, group_id, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class DataProgress:
    """How far the data have been used: which groups are done with, that is trained or dropped.

    next_group: the lowest number that is not done with; a resumed run starts from it, as nothing in flight is kept.
    position: the data position of its prompt.
    done: the groups above it that are done with; always empty where groups are trained in order and none is dropped.
    counts: prompts skipped and truncated before ``position``, for the metrics. Counted up to there, not up to what has
        been started, so that a resumed run counts each prompt once.
    """

    next_group: int = 0
    position: int = 0
    done: list[int] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: {"prompts_skipped": 0.0, "prompts_truncated": 0.0})


class GroupStarter:
    """Takes prompts from the data in order, numbers the groups, and keeps account of those that are done with.

    A group's number fixes its prompt and its seeds, so a group that is done with before an earlier one is remembered by
    its number, and a resumed run passes over its prompt.
    """

    def __init__(self, prompts: PromptSource, begin: DataProgress | None = None, fates: Fates | None = None) -> None:
        """prompts: continues at the position of ``begin``. fates: told what is started; runtimes tell it the rest."""
        begin = begin or DataProgress()
        self.fates = fates or Fates()
        self._prompts = prompts
        self._next_id = begin.next_group
        self._progress = begin
        self._done = set(begin.done)
        self._after: dict[int, tuple[int, dict[str, float]]] = {}

    def start(self, limit: int) -> list[StartedGroup]:
        """All groups with numbers below ``limit`` that have neither been started yet nor are done with."""
        started = []
        while self._next_id < limit:
            problem, prompt_ids, next_position = self._prompts.next()
            if self._next_id not in self._done:
                self.fates.started(self._next_id, problem.id)
                in_environments = self._prompts.have_environments
                started.append(StartedGroup(self._next_id, problem, prompt_ids, next_position, in_environments))
            counts = {
                "prompts_skipped": float(self._prompts.skipped),
                "prompts_truncated": float(self._prompts.truncated),
            }
            self._after[self._next_id] = next_position, counts
            self._next_id += 1
        return started

    def finish(self, numbers: Iterable[int]) -> None:
        """These groups have been trained or dropped."""
        self._done.update(numbers)
        next_group, position, counts = self._progress.next_group, self._progress.position, self._progress.counts
        while next_group in self._done and next_group in self._after:
            self._done.remove(next_group)
            position, counts = self._after.pop(next_group)
            next_group += 1
        self._progress = DataProgress(next_group, position, sorted(self._done), counts)

    @property
    def next_number(self) -> int:
        """Groups with numbers below this have been started, or are done with."""
        return self._next_id

    @property
    def progress(self) -> DataProgress:
        """What is done with by now."""
        return self._progress
