"""Episodes of a verifiers environment, in which the sampler is the model.

verifiers runs the conversation and asks a server for every answer of the model. The server here hands each request to
the response it belongs to: what the request adds to the conversation is the environment's observation, and the turn
that the model then writes is the answer. Messages that the model has written are only ever compared with what the
request repeats; they are never tokenized again.
"""

from __future__ import annotations

import asyncio
import math
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vcpo.records import Message, StopReason
from vcpo.tasks.environment import Observation, Turn
from vcpo.tasks.verifiers_loading import verifiers_api

_SESSION_HEADER = "X-Session-ID"  # verifiers sends the id of a rollout's trace
_START_SECONDS = 60.0


class Episodes:
    """Runs the episodes of one env side by side, on an event loop in a thread of its own.

    make_env: makes the env, given the address of the policy's model. seat: the policy's.
    Raises what the env raises when it is made or starts to serve.
    """

    def __init__(self, make_env: Callable[[str], Any], seat: str) -> None:
        self._make_env = make_env
        self._seat = seat
        self._secret = secrets.token_urlsafe(16)  # other users of the machine can reach the port
        self._conversations: dict[str, Conversation] = {}  # by the id of their trace
        self._open: set[Conversation] = set()
        self._end: str | None = None
        self._loop = asyncio.new_event_loop()
        self._context = verifiers_api().ModelContext(model="unset", client=verifiers_api().EvalClientConfig())
        started: Future[Any] = Future()
        threading.Thread(target=self._run, args=(started,), name="verifiers", daemon=True).start()
        self._env = started.result(timeout=_START_SECONDS)

    def start(self, task: Any, conversation: Conversation) -> Callable[[], object]:
        """Begin an episode; what is returned ends it from any thread. Raises RuntimeError when no more can begin."""
        if self._end is not None:
            raise RuntimeError(self._end)
        return asyncio.run_coroutine_threadsafe(self._episode(task, conversation), self._loop).cancel

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self, started: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        except BaseException as error:  # also SystemExit, by which verifiers says what it lacks
            self._end = f"verifiers has ended: {type(error).__name__}: {error}"
            if not started.done():
                started.set_exception(RuntimeError(self._end))
            for conversation in self._open:
                conversation.fail(self._end)

    async def _serve(self, started: Future[Any]) -> None:
        from aiohttp import web

        application = web.Application(client_max_size=2**30)
        application.router.add_post(f"/{self._secret}/v1/chat/completions", self._completion)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        env = self._make_env(f"http://127.0.0.1:{port}/{self._secret}/v1")
        async with env.serving():
            started.set_result(env)
            await asyncio.Event().wait()

    async def _episode(self, task: Any, conversation: Conversation) -> None:
        traces: list[str] = []
        self._open.add(conversation)

        def begun(trace: Any) -> None:
            if trace.agent.name != self._seat:
                return
            if traces:
                conversation.fail(f"the environment runs agent {self._seat!r} twice; a response is one conversation")
                return
            traces.append(trace.id)
            conversation.trace = trace
            self._conversations[trace.id] = conversation

        try:
            episode = await self._env.run_episode(task, self._context, on_trace=begun)
            conversation.ended(_outcome(episode, self._seat))
        except BaseException as error:
            conversation.fail(f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
        finally:
            self._open.discard(conversation)
            for name in traces:
                del self._conversations[name]

    async def _completion(self, request: Any) -> Any:
        from aiohttp import web

        conversation = self._conversations.get(request.headers.get(_SESSION_HEADER, ""))
        if conversation is None:
            return web.json_response({"error": {"message": "no such conversation"}}, status=404)
        try:
            answer = await conversation.asked(await request.json())
        except _Refused as refused:
            return web.json_response({"error": {"message": str(refused)}}, status=400)
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return web.json_response(
            {"id": "vcpo", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )


@dataclass(frozen=True)
class Outcome:
    """How an episode has ended. measurements: every reward, unweighted, and every metric, by name."""

    reward: float
    measurements: dict[str, float]


@dataclass(frozen=True)
class _Answer:
    text: str
    finish_reason: str


class _Refused(Exception):
    """The model says nothing more in this conversation."""


@dataclass(eq=False)
class Conversation:
    """What the environment and the model have said, and what is waited for. Its methods run on the event loop.

    opening: the messages of the prompt, which the first request must have.
    events: what has become of a request: new messages, an outcome, or a sentence that says what went wrong.
    """

    opening: list[Message]
    events: queue.SimpleQueue[list[Message] | Outcome | str] = field(default_factory=queue.SimpleQueue)
    trace: Any = None
    _said: list[Message] = field(default_factory=list)
    _waiting: asyncio.Future[_Answer | None] | None = None
    _over: bool = False

    async def asked(self, body: dict[str, Any]) -> _Answer:
        """Hand a request of the environment out, and wait for the turn that answers it. Raises _Refused."""
        if self._over:
            raise self._limit()
        messages = self._new_messages(body)
        self._waiting = asyncio.get_running_loop().create_future()
        self.events.put(messages)
        answer = await self._waiting
        self._waiting = None
        if answer is None:
            raise self._limit()
        self._over = answer.finish_reason == "length"
        self._said += [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def answer(self, text: str | None, finish_reason: str = "stop") -> None:
        """Give the turn that was waited for; ``None`` when there is no room for one."""
        self._over |= text is None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None if text is None else _Answer(text, finish_reason))

    def ended(self, outcome: Outcome | str) -> None:
        """The episode is over."""
        self.events.put(outcome)

    def fail(self, sentence: str) -> None:
        """The response cannot go on."""
        self.events.put(sentence)

    def _limit(self) -> _Refused:
        # a rollout that is stopped is scored; one whose model fails is not
        self.trace.stop("max_total_tokens")
        return _Refused("the response is at its length limit")

    def _new_messages(self, body: dict[str, Any]) -> list[Message]:
        if body.get("tools"):
            raise self._refusal("the environment offers tools, which are not supported")
        messages = [_plain(message) for message in body["messages"]]
        if None in messages:
            raise self._refusal("the environment says more than text")
        texts = [message for message in messages if message is not None]
        if not self._said:
            if texts != self.opening:
                raise self._refusal("the environment opens the conversation with other messages than the task's prompt")
            return texts
        new = texts[len(self._said) :]
        if texts[: len(self._said)] != self._said or any(message["role"] == "assistant" for message in new):
            raise self._refusal(
                "the environment has rewritten the conversation: what was sampled is not in it any more"
            )
        if not new:
            raise self._refusal("the environment asks for another turn without having said anything")
        return new

    def _refusal(self, sentence: str) -> _Refused:
        self.fail(sentence)
        return _Refused(sentence)


class VerifiersEnvironment:
    """The other side of one response.

    chat: what the environment says is written by the chat template; otherwise it is appended word for word.
    correct_at: the reward from which on the response counts as correct.
    """

    def __init__(
        self, episodes: Episodes, task: Any, opening: list[Message], chat: bool, correct_at: float = 1.0
    ) -> None:
        self._episodes = episodes
        self._conversation = Conversation(opening)
        self._chat = chat
        self._correct_at = correct_at
        self._end = episodes.start(task, self._conversation)
        self._asked = False

    def step(self, turn: Turn) -> Observation:
        """Give the turn to the environment; what it says next, or the episode's reward when it is over."""
        return self._answered(turn.text, "stop")

    def limit_reached(self, reason: StopReason, unfinished: Turn | None) -> Observation:
        """The reward of what there is. The environment is given the unfinished turn, marked as cut off."""
        observation = self._answered(None if unfinished is None else unfinished.text, "length")
        if not observation.done:
            raise RuntimeError("the environment asks for another turn of a response that is at its limit")
        return observation

    def close(self) -> None:
        """End the episode, and a step that waits for it."""
        self._conversation.events.put("the response has ended")
        self._end()

    def _answered(self, text: str | None, finish_reason: str) -> Observation:
        if not self._asked:
            self._next()  # the request for the first turn
            self._asked = True
        self._episodes.call(self._conversation.answer, text, finish_reason)
        result = self._next()
        if isinstance(result, Outcome):
            correct = result.reward >= self._correct_at
            return Observation(done=True, reward=result.reward, measurements=result.measurements, correct=correct)
        if self._chat:
            return Observation(messages=result)
        return Observation("".join(message["content"] for message in result))

    def _next(self) -> Sequence[Message] | Outcome:
        event = self._conversation.events.get()
        if isinstance(event, str):
            raise RuntimeError(event)
        return event


def _plain(message: dict[str, Any]) -> Message | None:
    """Role and text of a message; ``None`` for one that has more."""
    content = message.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str) or message.get("tool_calls"):
        return None
    return {"role": message["role"], "content": content}


def _outcome(episode: Any, seat: str) -> Outcome | str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
    if not episode.ok:
        return f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
    trace = next(trace for trace in episode.traces if trace.agent.name == seat)
    rewards = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
    values = {
        **{f"reward/{name}": score for name, score in rewards.items()},
        **{f"metric/{name}": value for name, value in trace.metrics.items()},
    }
    unscored = [name for name, value in values.items() if value is None or not math.isfinite(value)]
    if unscored:
        return f"{', '.join(unscored)} came to no finite number" + (" in time" if trace.is_timeout else "")
    return Outcome(float(trace.reward), {name: float(value) for name, value in values.items()})
