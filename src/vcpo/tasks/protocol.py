"""What a task is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from vcpo.records import Grade, Problem


@runtime_checkable
class Task(Protocol):
    """A source of problems and a judge of answers. Imports without torch.

    The constructor takes the task's options as keyword arguments and checks them, including that data files exist
    and that their rows have the needed columns (``UserError`` naming file, row and column).
    """

    def train_problem(self, position: int, seed: int) -> Problem:
        """The problem at data position 0, 1, 2, ... for ever; a function of its arguments alone.

        A generated task makes a new problem for every position; a dataset task shuffles its rows anew in each epoch.
        """
        ...

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to ``count`` held-out problems, always the same ones, never among the generated training problems."""
        ...

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """One grade per completion. Completions are hostile text: never evaluated as code, always bounded work."""
        ...


@runtime_checkable
class AnsweringTask(Task, Protocol):
    """A task that can tell which answer a response gives, so that the responses of an evaluation can vote (maj@n)."""

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The answer, written so that equal answers are equal texts; ``None`` where the response gives none.

        Completions are hostile text, and this runs in the evaluation's own process: bounded work, nothing evaluated.
        """
        ...


@runtime_checkable
class DemonstratedTask(Task, Protocol):
    """A task that can show right answers, for a supervised warm start."""

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A right answer's text, without the end-of-sequence token."""
        ...
