"""Tasks in which an environment answers the model, turn by turn. Imports without torch.

A task that has a method ``environment`` is such a task; nothing else about it is special. The model writes a turn, the
environment answers with text, the model goes on from there, until the environment says that it is over or a limit is
reached. What the environment gives is never trained on. A response of a task without environments is one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vcpo.errors import UserError
from vcpo.records import Message, Problem, StopReason
from vcpo.tasks.protocol import Task
from vcpo.tasks.tool_calls import ToolCall


@dataclass(frozen=True)
class TurnRules:
    """What ends a turn, and the limits.

    stop_strings: end a turn with the token that completes one of them, as an end token does, and as those of
        ``sampling.stop_strings`` do. They are part of the turn.
    max_turns: turns of the model in one response. The environment still sees the last one, for its reward.
    step_timeout: seconds that one step of an environment may take; making the environment counts for the first.
    max_concurrent: steps of environments that may run at the same time in one sampler; others wait for their turn.
    ask_at_limits: an environment whose response is ended by the turn or the length limit has a last word
        (``LimitedEnvironment``).
    """

    stop_strings: tuple[str, ...] = ()
    max_turns: int = 16
    step_timeout: float = 60.0
    max_concurrent: int = 128
    ask_at_limits: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for limits that nothing could be done within."""
        for name in ("max_turns", "step_timeout", "max_concurrent"):
            if not getattr(self, name) > 0:
                raise UserError(f"turn_rules: {name} is {getattr(self, name)}; it must be above 0")
        if isinstance(self.stop_strings, str) or "" in self.stop_strings:
            raise UserError(f"turn_rules: stop_strings is {self.stop_strings!r}; it must be non-empty strings")


@dataclass(frozen=True)
class Turn:
    """What the model wrote since the environment last answered.

    number: 0 for the response's first turn.
    text: decoded, without special tokens; a stop string that ended the turn is part of it.
    token_ids: as they were sampled, with the end token if there is one.
    stop_reason: EOS or STOP_STRING; LENGTH of an unfinished turn.
    tool_calls: what the model calls, in the format of its chat template; only of a task with ``tool_schemas``.
    """

    number: int
    text: str
    token_ids: NDArray[np.int64]
    stop_reason: StopReason
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Observation:
    """How the environment answers.

    text: appended to the response word for word, with names of special tokens read as those tokens; an environment
        for a chat model writes its template's marks itself. Not appended when nothing follows it: at the end of the
        response, or when it leaves no room for another token (the response then ends at its length limit).
    done: the response is over.
    reward: for this turn; the sum over turns is added to the reward that the response is graded with.
    correct: whether the response solves its problem, where that is for the environment to say. Its last word on it
        counts, and not the grader's.
    measurements: numbers for the metrics, by name.
    messages: instead of a text, chat messages: appended as the model's chat template writes them after an answer of the
        model, up to where the model speaks again. Names of special tokens in them are broken up.
    """

    text: str = ""
    done: bool = False
    reward: float | None = None
    measurements: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    correct: bool | None = None


class EnvironmentFailed(Exception):
    """Says, from inside a tool or an environment, that it is itself at fault: the response ends without a reward."""


class Environment(Protocol):
    """The other side of one response. Its methods are called in threads, never two steps at a time."""

    def step(self, turn: Turn) -> Observation:
        """Take in a turn and answer it. May wait as long as it needs; other responses are decoded meanwhile.

        Whatever it raises ends the response without a reward.
        """
        ...

    def close(self) -> None:
        """Release what the environment holds; called once, when its response has ended for whatever reason.

        After a time-out it is called while the step still hangs, and should make it end. When a run is stopped or a
        sampler killed, it is not called: nothing may be held that outlives the process.
        """
        ...


class LimitedEnvironment(Environment, Protocol):
    """An environment that is asked when a limit has ended its response; made by tasks whose rules say so."""

    def limit_reached(self, reason: StopReason, unfinished: Turn | None) -> Observation:
        """What it has to add. Of the observation only reward, verdict and measurements count, for the last turn.

        reason: LENGTH or TURN_LIMIT. unfinished: a turn that was cut off, which ``step`` has not seen.
        """
        ...


@runtime_checkable
class EnvironmentTask(Task, Protocol):
    """A task with environments. An attribute ``turn_rules`` (``TurnRules``) replaces the default rules.

    An attribute ``tool_schemas`` (JSON schemas of functions) is shown to the model by its chat template; the model's
    calls are then in ``Turn.tool_calls``.
    """

    def environment(self, problem: Problem, seed: int) -> Environment:
        """A new environment for one response; called in a thread when the first turn has ended.

        seed: the response's own. Environments should be functions of problem, seed and turns, for runs to repeat.
        """
        ...


def turn_rules(task: EnvironmentTask) -> TurnRules:
    """The task's rules. Raises UserError when they are something else."""
    rules = getattr(task, "turn_rules", TurnRules())
    if not isinstance(rules, TurnRules):
        raise UserError(f"turn_rules of {type(task).__name__} is of type {type(rules).__name__}, not TurnRules")
    return rules


def tool_schemas(task: object) -> list[dict[str, Any]] | None:
    """The tools that the task's prompts show, if any."""
    return getattr(task, "tool_schemas", None) or None
