"""The records that flow from prompts to the optimizer.

Token ids are kept exactly as they were sampled; nothing downstream re-derives them from text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, str]


class StopReason(StrEnum):
    """Why a response ended."""

    EOS = "eos"  # the model produced one of its end-of-sequence tokens
    STOP_STRING = "stop_string"  # the decoded text contained a stop string
    LENGTH = "length"  # max_completion_length was reached, or what the environment gave left no room for a token
    ENVIRONMENT = "environment"  # the environment ended the episode
    TURN_LIMIT = "turn_limit"  # the model has had all its turns and the environment would go on
    ENVIRONMENT_ERROR = "environment_error"  # the environment raised, hung or gave what cannot be used


@dataclass(frozen=True)
class Problem:
    """One question of a task.

    prompt: text, or chat messages (``{"role": ..., "content": ...}``) for models with a chat template.
    columns: what graders and reward functions may look at (the answer and any other field of the data row).
    opening: what an environment has added to the end of the prompt's last message.
    """

    id: str
    prompt: str | list[Message]
    columns: dict[str, Any] = field(default_factory=dict)
    opening: str = ""


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    reward: what is trained on; ``None`` means that the response could not be scored, which is not 0: it then
        leaves its group's statistics and contributes no gradient.
    correct: whether the task counts the answer as right (accuracy), independent of shaping in the reward.
    parts: named components of the reward, for the metrics.
    failure: what went wrong, in one line, if grading failed or the answer came to no proper end; then there is no
        reward.
    """

    reward: float | None
    correct: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``top_p=1`` and ``top_k=0`` switch truncation off; ``temperature=0`` is greedy.

    template_kwargs: variables for the chat template, where messages follow a turn.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponsePrefix:
    """The part of a response that is there already, sampled and given tokens; fields as in ``Trajectory``."""

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int64]
    start_version: int


@dataclass(frozen=True)
class GenerationRequest:
    """One response to be sampled. Its tokens are a function of the weights, the prompt and ``seed`` alone.

    problem: what the response is about; only where the task has environments, which are made of it.
    prefix: continue this response instead of starting one. Its tokens count for the length limit and for the positions
        of random numbers; stop strings are looked for in what follows it.
    """

    group_id: int
    index: int  # which of the group's responses, 0 .. num_generations - 1
    prompt_ids: NDArray[np.int64]
    seed: int
    problem: Problem | None = None
    prefix: ResponsePrefix | None = None

    @property
    def name(self) -> str:
        """A short name for messages: group and member."""
        return f"group {self.group_id} response {self.index}"


@dataclass(frozen=True)
class TurnRecord:
    """One turn of a response: what the model wrote, and how the environment answered.

    start, end: the turn's tokens are ``response_ids_T[start:end]``, their versions ``versions_T[start:end]``. The
        tokens from its end to the next turn's start are the environment's.
    seconds: how long the environment took to answer; 0 where it was not asked.
    reward: what the environment gave for the turn, if anything.
    measurements: whatever else the environment measured, by name.
    correct: whether it said that the response solves its problem, if it said anything about that.
    """

    start: int
    end: int
    seconds: float = 0.0
    reward: float | None = None
    measurements: dict[str, float] = field(default_factory=dict)
    correct: bool | None = None


@dataclass
class Trajectory:
    """One response with everything the learner needs. Arrays ending in ``_T`` have one entry per response token.

    mask_T: True where the token was sampled by the policy; False for given tokens (tool output), never trained.
    logprobs_T: the sampler's log-probability of each token under the distribution it was drawn from; 0 for given ones.
    versions_T: the policy version (optimizer steps done) whose weights produced each token; for given tokens the one
        in force when they were appended, so versions never fall along a response.
    start_version: the version in force when the trajectory was started; the policy lag is measured from it.
    text: the decoded response, given tokens included, without special tokens. A completed stop string stays in it,
        because graders look for tags such as ``</answer>`` (vLLM leaves it out by default).
    turns: the turns of a response in an environment; empty without one.
    failure: what went wrong in the environment, in one sentence. Such a response has no reward (``None``).
    """

    group_id: int
    index: int
    prompt_ids: NDArray[np.int64]
    response_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int64]
    stop_reason: StopReason
    start_version: int
    text: str = ""
    grade: Grade | None = None
    turns: tuple[TurnRecord, ...] = ()
    failure: str | None = None

    @property
    def name(self) -> str:
        """A short name for messages: group and member."""
        return f"group {self.group_id} response {self.index}"


@dataclass(frozen=True)
class Answer:
    """What graders and reward functions are told about a response.

    text, stop_reason: as in ``Trajectory``. token_ids: all of the response's tokens, given ones included.
    """

    text: str
    token_ids: list[int]
    stop_reason: StopReason

    @classmethod
    def of(cls, trajectory: Trajectory) -> Answer:
        """The trajectory's."""
        return cls(trajectory.text, trajectory.response_ids_T.tolist(), trajectory.stop_reason)


@dataclass
class Group:
    """The ``num_generations`` trajectories of one prompt; the unit in which prompts are started and trained.

    next_position: the data position from which prompts continue once this group has been trained.
    """

    id: int
    problem: Problem
    next_position: int
    trajectories: list[Trajectory]
