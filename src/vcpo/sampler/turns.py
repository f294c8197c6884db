"""Responses of several turns: an engine around an engine, in which environments answer between turns.

A response whose environment is at work holds no slot: the inner engine decodes others, and when the answer is there
continues the response from all of its tokens, under whatever weights are then in force. Sampled ids are kept as they
are; only the environment's own text is ever tokenized.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vcpo.models.encoding import unknown_characters
from vcpo.records import GenerationRequest, ResponsePrefix, StopReason, Trajectory, TurnRecord
from vcpo.sampler.environment_steps import Answer, EnvironmentSteps, Episode
from vcpo.sampler.protocol import Engine
from vcpo.tasks.chat_turns import ChatTurns
from vcpo.tasks.environment import EnvironmentTask, Observation, Turn, tool_schemas, turn_rules

LONGEST_WAIT = 0.02  # seconds for which a step waits when all responses do; new requests and weights come between steps
MAX_CHARACTERS = 200_000  # of an observation: tokenizing it holds up decoding


@dataclass
class _Response:
    """A response that has been submitted.

    trajectory: what it is so far; ``None`` before its first turn has ended.
    limit: what has ended it, while its environment is asked for a last word.
    """

    number: int
    request: GenerationRequest
    episode: Episode
    trajectory: Trajectory | None = None
    turn_start: int = 0
    turns: list[TurnRecord] = field(default_factory=list)
    limit: StopReason | None = None


class TurnEngine:
    """An ``Engine`` for a task with environments.

    inner: decodes single turns. Its stop strings include those of the task's ``TurnRules``. A turn ends with any stop
        string or end token, and is then handed to the environment; only the environment, the turn limit and the length
        limit end a response.
    max_tokens: limit of a response in tokens, what environments give included; the inner engine has the same.
    in_rounds: hand over answers only when no response can be decoded without one, all at once, in the order of
        submission. What is decoded side by side, and with it the last bits of sums, then does not depend on how long
        environments take; but a step waits for the slowest one.
    clock: for the time-out of environments.
    template_kwargs: variables for the chat template that writes messages of environments.
    """

    def __init__(
        self,
        inner: Engine,
        task: EnvironmentTask,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        in_rounds: bool = False,
        clock: Callable[[], float] = time.monotonic,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._inner = inner
        self._task = task
        self._rules = turn_rules(task)
        self._tokenizer = tokenizer
        self._chat = ChatTurns(tokenizer, tool_schemas(task), template_kwargs)
        self._max_tokens = max_tokens
        self._in_rounds = in_rounds
        self._steps = EnvironmentSteps(self._rules.max_concurrent, self._rules.step_timeout, clock)
        self._responses: dict[tuple[int, int], _Response] = {}
        self._submitted = 0
        self._waited = 0.0

    @property
    def version(self) -> int:
        """See ``Engine``."""
        return self._inner.version

    @property
    def num_active(self) -> int:
        """See ``Engine``. Includes the responses whose environments are at work."""
        return len(self._responses)

    @property
    def spent(self) -> Mapping[str, float]:
        """See ``Engine``."""
        return {**self._inner.spent, "waiting for environments": self._waited}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """See ``Engine``."""
        return self._inner.weights

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``Engine``. Raises ValueError for a request without its problem, or one that is being decoded."""
        new: dict[tuple[int, int], _Response] = {}
        for request in requests:
            key = (request.group_id, request.index)
            if request.problem is None:
                raise ValueError(f"{request.name}: the request lacks the problem that its environment is made of")
            if key in self._responses or key in new:
                raise ValueError(f"{request.name} has been submitted twice")
            start = 0 if request.prefix is None else len(request.prefix.ids_T)
            new[key] = _Response(self._submitted + len(new), request, self._episode(request), turn_start=start)
        self._inner.submit(requests)
        self._responses.update(new)
        self._submitted += len(new)

    def step(self) -> list[Trajectory]:
        """See ``Engine``. When all responses wait for environments, it waits a moment for the first answer."""
        finished = []
        continued = []
        begin = time.perf_counter()
        answers = self._answers()
        self._waited += time.perf_counter() - begin
        for answer in answers:
            result = self._answered(self._responses[answer.key], answer)
            if isinstance(result, Trajectory):
                finished.append(result)
            elif result is not None:
                continued.append(result)
        self._inner.submit(continued)
        if self._inner.num_active:
            for trajectory in self._inner.step():
                ended = self._turn_ended(trajectory)
                if ended is not None:
                    finished.append(ended)
        return finished

    def load_weights(
        self, tensors: Mapping[str, Tensor] | None, version: int, recompute_kv_cache: bool = False
    ) -> None:
        """See ``Engine``. A response that waits is continued with keys and values of the weights then in force."""
        self._inner.load_weights(tensors, version, recompute_kv_cache)

    def _episode(self, request: GenerationRequest) -> Episode:
        problem, seed = request.problem, request.seed
        assert problem is not None
        return Episode(lambda: self._task.environment(problem, seed))

    def _answers(self) -> list[Answer]:
        if not self._in_rounds:
            return self._steps.answers(wait=0.0 if self._inner.num_active else LONGEST_WAIT)
        answers: list[Answer] = []
        while self._steps.unfinished and not self._inner.num_active:
            answers += self._steps.answers(wait=LONGEST_WAIT)
        return sorted(answers, key=lambda answer: self._responses[answer.key].number)

    def _turn_ended(self, trajectory: Trajectory) -> Trajectory | None:
        """Ask the environment; the finished trajectory when there is nothing to ask."""
        key = (trajectory.group_id, trajectory.index)
        response = self._responses[key]
        response.trajectory = trajectory
        ids = trajectory.response_ids_T[response.turn_start :].copy()
        text = str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        turn = Turn(len(response.turns), text, ids, trajectory.stop_reason)
        if trajectory.stop_reason is StopReason.LENGTH:  # in the middle of a turn
            response.turns.append(TurnRecord(response.turn_start, len(trajectory.response_ids_T)))
            return self._limited(response, StopReason.LENGTH, turn)
        tool_calls = self._chat.tool_calls  # reading what may be long and hostile is not for the thread that decodes
        self._steps.start(key, lambda: response.episode.answer(replace(turn, tool_calls=tool_calls(text))))
        return None

    def _answered(self, response: _Response, answer: Answer) -> Trajectory | GenerationRequest | None:
        """The finished trajectory, or the request that continues it; ``None`` when its environment is asked again."""
        trajectory = response.trajectory
        assert trajectory is not None
        length = len(trajectory.response_ids_T)
        if response.limit is None:
            response.turns.append(TurnRecord(response.turn_start, length))
        record = replace(response.turns[-1], seconds=response.turns[-1].seconds + answer.seconds)
        response.turns[-1] = record
        observation = answer.returned
        failure = answer.failure or _fault(observation)
        if failure is not None:
            return self._finish(response, StopReason.ENVIRONMENT_ERROR, failure)
        assert isinstance(observation, Observation)
        response.turns[-1] = _with(record, observation)
        if response.limit is not None:
            return self._finish(response, response.limit)
        if observation.done:
            return self._finish(response, StopReason.ENVIRONMENT)
        if len(response.turns) >= self._rules.max_turns:
            return self._limited(response, StopReason.TURN_LIMIT)
        try:
            text = observation.text
            if observation.messages:
                text = self._chat.following(observation.messages, trajectory.stop_reason is StopReason.EOS)
            given_ids = self._encode(text)
        except Exception as error:  # ours, or of the template or tokenizer, which cannot take everything
            return self._finish(response, StopReason.ENVIRONMENT_ERROR, f"the observation is not usable: {error}")
        if length + len(given_ids) >= self._max_tokens:
            return self._limited(response, StopReason.LENGTH)
        response.turn_start = length + len(given_ids)
        return replace(response.request, prefix=self._prefix(trajectory, given_ids))

    def _encode(self, text: str) -> NDArray[np.int64]:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
        unknown = unknown_characters(self._tokenizer, text)
        if unknown:
            raise ValueError(f"the tokenizer has no token for {', '.join(map(repr, unknown[:10]))}")
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _prefix(self, trajectory: Trajectory, given_ids: NDArray[np.int64]) -> ResponsePrefix:
        given = len(given_ids)
        return ResponsePrefix(
            ids_T=np.concatenate([trajectory.response_ids_T, given_ids]),
            mask_T=np.concatenate([trajectory.mask_T, np.zeros(given, dtype=np.bool_)]),
            logprobs_T=np.concatenate([trajectory.logprobs_T, np.zeros(given, dtype=np.float32)]),
            versions_T=np.concatenate([trajectory.versions_T, np.full(given, self.version, dtype=np.int64)]),
            start_version=trajectory.start_version,
        )

    def _limited(self, response: _Response, reason: StopReason, unfinished: Turn | None = None) -> Trajectory | None:
        """The trajectory that a limit has ended, unless its environment is to be asked first."""
        if not self._rules.ask_at_limits:
            return self._finish(response, reason)
        response.limit = reason
        key = (response.request.group_id, response.request.index)
        self._steps.start(key, lambda: response.episode.limit_reached(reason, unfinished))
        return None

    def _finish(self, response: _Response, reason: StopReason, failure: str | None = None) -> Trajectory:
        assert response.trajectory is not None
        del self._responses[response.request.group_id, response.request.index]
        response.episode.close()
        return replace(response.trajectory, stop_reason=reason, turns=tuple(response.turns), failure=failure)


def _with(record: TurnRecord, observation: Observation) -> TurnRecord:
    """The turn with what the environment adds to it."""
    reward = record.reward
    if observation.reward is not None:
        reward = (reward or 0.0) + float(observation.reward)
    measurements = {name: float(value) for name, value in observation.measurements.items()}
    correct = record.correct if observation.correct is None else observation.correct
    return replace(record, reward=reward, measurements={**record.measurements, **measurements}, correct=correct)


def _fault(observation: object) -> str | None:
    """What is wrong with what an environment returned, if anything."""
    if not isinstance(observation, Observation):
        return f"the environment returned a value of type {type(observation).__name__}, not an Observation"
    if not isinstance(observation.text, str):
        return f"the environment's observation has a text of type {type(observation.text).__name__}, not str"
    if observation.correct is not None and not isinstance(observation.correct, bool):
        return f"the environment's observation has correct = {observation.correct!r}, which is not a bool"
    if observation.messages and observation.text:
        return "the environment's observation has both a text and messages"
    if any(not isinstance(message.get(key), str) for message in observation.messages for key in ("role", "content")):
        return "the environment's observation has a message without a text role and content"
    numbers = observation.measurements
    if not isinstance(numbers, Mapping):
        return f"the environment's observation has measurements of type {type(numbers).__name__}, not a mapping"
    if observation.reward is not None:
        numbers = {**numbers, "reward": observation.reward}
    for name, value in numbers.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            return f"the environment's observation has {name} = {value!r}, which is not a finite number"
    return None
