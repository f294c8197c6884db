"""The other side of a response that calls tools: makes the calls, and says what came of them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

from vcpo.records import StopReason
from vcpo.sandbox.protocol import SandboxFailed
from vcpo.tasks.environment import EnvironmentFailed, Observation, Turn
from vcpo.tasks.python_tool import shortened
from vcpo.tasks.tool_arguments import argument_error
from vcpo.tasks.tool_calls import ToolCall

Tool = Callable[..., Any]

_LONGEST_ANSWER = 100_000  # characters of all results of a turn


class ToolEnvironment:
    """Answers the calls of one response; a turn without calls ends it.

    own: the environment, ``None`` where there are only functions. tools: by name, methods bound. schemas: of their
    parameters. max_iterations: turns whose calls are answered.
    """

    def __init__(self, own: Any, tools: dict[str, Tool], schemas: dict[str, Any], max_iterations: int) -> None:
        self._own = own
        self._tools = tools
        self._schemas = schemas
        self._max_iterations = max_iterations
        self._waiting: list[Future[Any]] = []

    def step(self, turn: Turn) -> Observation:
        """See ``Environment``. Whatever is wrong with a call, and what a tool raises, is told to the model."""
        calls = turn.tool_calls
        if not calls:
            return Observation(done=True, reward=self._reward(), measurements={"tool_calls": 0.0})
        if turn.number >= self._max_iterations:
            return Observation()
        answers = self._answers(calls)
        longest = _LONGEST_ANSWER // len(calls)
        messages = [
            {"role": "tool", "name": call.name[:100], "content": shortened(text, longest)}
            for call, (text, _) in zip(calls, answers, strict=True)
        ]
        failed = sum(not worked for _, worked in answers)
        measurements = {"tool_calls": float(len(calls)), "tool_failure_frequency": failed / len(calls)}
        return Observation(messages=messages, measurements=measurements)

    def limit_reached(self, reason: StopReason, unfinished: Turn | None) -> Observation:
        """See ``LimitedEnvironment``."""
        return Observation(reward=self._reward())

    def close(self) -> None:
        """See ``Environment``."""
        for future in list(self._waiting):
            future.cancel()
        if callable(getattr(self._own, "close", None)):
            self._own.close()

    def _reward(self) -> float | None:
        if not callable(getattr(self._own, "get_reward", None)):
            return None
        reward = self._own.get_reward()
        if inspect.isawaitable(reward):
            [reward] = self._gathered([reward])
            if isinstance(reward, BaseException):
                raise reward
        return None if reward is None else float(reward)

    def _answers(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        """Of each call the text of its result, and whether it worked; asynchronous ones run together, last."""
        results = [self._called(call) for call in calls]
        awaited = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
        for place, result in zip(awaited, self._gathered([results[i] for i in awaited]), strict=True):
            results[place] = result
        return [_told(result) for result in results]

    def _called(self, call: ToolCall) -> Any:
        """What the tool returns, or the exception that stands for what went wrong."""
        error = call.error
        if error is None and call.name not in self._tools:
            error = f"there is no tool {call.name[:100]!r}; the tools are {', '.join(self._tools)}"
        error = error or argument_error(call.arguments, self._schemas[call.name])
        if error is not None:
            return ValueError(error)
        try:
            return self._tools[call.name](**call.arguments)
        except Exception as raised:
            return raised

    def _gathered(self, awaitables: Sequence[Any]) -> list[Any]:
        self._waiting = [asyncio.run_coroutine_threadsafe(_awaited(each), _loop()) for each in awaitables]
        return [future.result() for future in self._waiting]


async def _awaited(awaitable: Any) -> Any:
    try:
        return await awaitable
    except Exception as raised:
        return raised
    except (SystemExit, KeyboardInterrupt) as raised:  # would end the loop
        return EnvironmentFailed(f"a tool raised {type(raised).__name__}")


def _told(result: Any) -> tuple[str, bool]:
    """Raises what says that the environment, and not the model, is at fault."""
    if isinstance(result, EnvironmentFailed | SandboxFailed):
        raise result
    worked = not isinstance(result, Exception)
    try:
        text = str(result if worked else {"error": str(result)})
    except Exception as error:  # of the user's own class
        text, worked = str({"error": f"the result cannot be shown: {type(error).__name__}"}), False
    return text.encode("utf-8", "replace").decode(), worked


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for the process, so that what an asynchronous tool opens in one turn is of use in the next."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="asynchronous tools", daemon=True).start()
    return loop
