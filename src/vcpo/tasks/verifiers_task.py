"""Environments written for Prime Intellect's package `verifiers`, as a task (docs/verifiers.md).

The environment lives in the sampler, where its rollout and whatever that has made of the world are, so it scores there,
too: the weighted sum of its rewards comes as the reward of the last turn, and every reward and metric by itself as a
measurement. ``grade`` has nothing to add.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from vcpo.errors import UserError
from vcpo.records import Grade, Message, Problem
from vcpo.tasks.data import epoch_order
from vcpo.tasks.environment import TurnRules
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.verifiers_episodes import Episodes, VerifiersEnvironment
from vcpo.tasks.verifiers_loading import Loaded, opening_messages

_PLACE = "verifiers_task"  # column: which of the two tasksets, the task's place in it, and its hash


class VerifiersOptions(TaskOptions):
    """Options of the task ``verifiers``."""

    environment: str = Field(
        description="id of an installed package as verifiers takes it, or module:Taskset, or file.py:Taskset"
    )
    args: dict[str, Any] = Field({}, description="fields of the taskset's config")
    eval_args: dict[str, Any] | None = Field(
        None, description="fields that differ in the evaluation's taskset, such as its split; null: tasks are held out"
    )
    held_out: PositiveInt = Field(
        64, description="the first tasks, which are only evaluated on; without effect if eval_args are given"
    )
    limit: PositiveInt = Field(10_000, description="tasks that are read of a taskset at most; it may be infinite")
    config: dict[str, Any] = Field({}, description="fields of the env's config: its agents, timeouts, its own options")
    agent: str | None = Field(
        None, description="the agent that is trained; null: the only one without a model of its own"
    )
    chat: bool = Field(
        True, description="true: messages by the model's chat template; false: their plain text, one after the other"
    )
    stop_strings: list[str] = Field([], description="strings that end a turn, as an end token does")
    max_turns: PositiveInt = Field(16, description="turns of the model")
    correct_at: float = Field(1.0, description="the reward from which on a response counts as correct")
    step_timeout: float = Field(60.0, gt=0, description="seconds that the environment may take to answer, or to score")
    max_concurrent: PositiveInt = Field(128, description="environments that may be at work at a time in one sampler")


class VerifiersTask:
    """Tasks of a verifiers environment, in an order shuffled anew in each epoch."""

    Options = VerifiersOptions

    def __init__(self, **options: Any) -> None:
        """Raises UserError for a missing package, and for an environment that cannot be loaded or played here."""
        self.options = chosen = options_or_user_error(VerifiersOptions, options)
        self.turn_rules = TurnRules(
            tuple(chosen.stop_strings), chosen.max_turns, chosen.step_timeout, chosen.max_concurrent, ask_at_limits=True
        )
        self._loaded = self._load(chosen.args)
        tasks = self._loaded.tasks(chosen.limit)
        if chosen.eval_args is not None:
            held_out = self._load({**chosen.args, **chosen.eval_args}).tasks(chosen.limit)
        elif len(tasks) > chosen.held_out:
            held_out, tasks = tasks[: chosen.held_out], tasks[chosen.held_out :]
        else:
            raise UserError(
                f"verifiers environment {chosen.environment!r}: has {len(tasks)} tasks, and the first task.held_out ="
                f" {chosen.held_out} are for evaluation: set it lower, or name the evaluation's tasks in task.eval_args"
            )
        self._tasks = {"train": tasks, "eval": held_out}
        self._episodes: Episodes | None = None
        self._lock = threading.Lock()

    def train_problem(self, position: int, seed: int) -> Problem:
        """Every task once per epoch."""
        tasks = self._tasks["train"]
        epoch, place = divmod(position, len(tasks))
        return self._problem("train", epoch_order(len(tasks), seed, epoch)[place])

    def eval_problems(self, count: int) -> list[Problem]:
        """The first tasks of the evaluation's taskset, or of those that are held out."""
        return [self._problem("eval", place) for place in range(min(count, len(self._tasks["eval"])))]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Nothing: what the environment gives is added."""
        return [Grade(0.0) for _ in problems]

    def environment(self, problem: Problem, seed: int) -> VerifiersEnvironment:
        """An episode. Raises RuntimeError where the taskset gives other tasks than where the problem was made."""
        part, place, hashed = problem.columns[_PLACE]
        task = self._tasks[part][place]
        if task.hash != hashed:
            raise RuntimeError(
                "the taskset gives other tasks in the sampler than in the learner; its load() must always give the same"
            )
        with self._lock:
            if self._episodes is None:
                loaded = self._loaded
                self._episodes = Episodes(lambda url: loaded.env(url, self.options.max_turns), loaded.seat)
        return VerifiersEnvironment(
            self._episodes, task, opening_messages(task.data), self.options.chat, self.options.correct_at
        )

    def _load(self, args: dict[str, Any]) -> Loaded:
        return Loaded(self.options.environment, args, self.options.config, self.options.agent)

    def _problem(self, part: str, place: int) -> Problem:
        task = self._tasks[part][place]
        columns = task.data.model_dump(mode="json", exclude_defaults=True, exclude={"prompt", "system_prompt"})
        messages = opening_messages(task.data)
        prompt: str | list[Message] = messages
        if not self.options.chat:
            prompt = "\n".join(message["content"] for message in messages)
        return Problem(f"{part}-{place}", prompt, {**columns, _PLACE: [part, place, task.hash]})
