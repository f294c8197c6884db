"""The task ``verifiers`` without the package: what is missing is said, and the rules of a conversation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vcpo.errors import UserError
from vcpo.tasks.registry import make_task
from vcpo.tasks.verifiers_episodes import Conversation, Outcome, _Refused

OPENING = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3?"}]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


class Trace(SimpleNamespace):
    """As much of verifiers' trace as a conversation needs."""

    stopped: str | None = None

    def stop(self, condition: str) -> None:
        self.stopped = condition


def conversation(*answers: tuple[str | None, str]) -> tuple[Conversation, Callable[[list[Any]], Awaitable[Any]]]:
    """A conversation whose requests are answered by these, one after the other, and how to make a request."""
    made = Conversation(OPENING)
    made.trace = Trace()
    left = list(answers)

    async def ask(messages: list[Any]) -> Any:
        asked = asyncio.ensure_future(made.asked({"messages": messages}))
        await asyncio.sleep(0)
        if not asked.done():
            made.answer(*left.pop(0))
        return await asked

    return made, ask


def events(made: Conversation) -> list[Any]:
    found = []
    while not made.events.empty():
        found.append(made.events.get())
    return found


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"pip install 'vcpo\[verifiers\]'"):
        make_task("verifiers", {"environment": "gsm8k"})


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text('__version__ = "0.1.14"')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"release 0\.4 .* but 0\.1\.14 is installed"):
        make_task("verifiers", {"environment": "gsm8k"})
    del sys.modules["verifiers"]


def test_what_a_request_adds_is_handed_out_and_what_it_repeats_is_not() -> None:
    made, ask = conversation(("4", "stop"), ("3", "stop"))

    async def both() -> None:
        assert (await ask(OPENING)).text == "4"
        again = [*OPENING, message("assistant", "4"), message("user", "no"), message("user", "try 3")]
        assert (await ask(again)).text == "3"

    asyncio.run(both())
    assert events(made) == [OPENING, [message("user", "no"), message("user", "try 3")]]


def test_an_answer_without_text_is_the_same_with_and_without_content() -> None:
    made, ask = conversation(("", "stop"), ("3", "stop"))

    async def both() -> None:
        await ask(OPENING)
        await ask([*OPENING, {"role": "assistant"}, message("user", "well?")])

    asyncio.run(both())
    assert events(made)[-1] == [message("user", "well?")]


@pytest.mark.parametrize(
    ("later", "sentence"),
    [
        ([*OPENING, message("assistant", "FOUR"), message("user", "no")], "rewritten the conversation"),
        ([OPENING[1], message("assistant", "4"), message("user", "no")], "rewritten the conversation"),
        ([*OPENING, message("user", "no")], "rewritten the conversation"),
        ([*OPENING, message("assistant", "4"), message("assistant", "5")], "rewritten the conversation"),
        (OPENING, "rewritten the conversation"),
        ([*OPENING, message("assistant", "4")], "without having said anything"),
        ([*OPENING, message("assistant", "4"), message("user", [{"type": "image_url"}])], "more than text"),
        ([*OPENING, message("assistant", "4", tool_calls=[{}]), message("user", "no")], "more than text"),
    ],
)
def test_a_conversation_that_does_not_go_on_from_what_was_sampled_fails(later: list[Any], sentence: str) -> None:
    made, ask = conversation(("4", "stop"))

    async def both() -> None:
        await ask(OPENING)
        with pytest.raises(_Refused, match=sentence):
            await ask(later)

    asyncio.run(both())
    assert sentence in events(made)[-1]
    assert made.trace.stopped is None


def test_another_opening_than_the_prompt_fails() -> None:
    made, ask = conversation()
    with pytest.raises(_Refused, match="other messages than the task's prompt"):
        asyncio.run(_wait(ask([message("user", "4?")])))
    assert "other messages than the task's prompt" in events(made)[0]


def test_tools_are_refused() -> None:
    made = Conversation(OPENING)
    with pytest.raises(_Refused, match="tools"):
        asyncio.run(_wait(made.asked({"messages": OPENING, "tools": [{}]})))


@pytest.mark.parametrize("text", ["cut of", None])
def test_at_the_length_limit_the_rollout_is_stopped_not_failed(text: str | None) -> None:
    """A turn that was cut off is an answer; the next request, and one there is no room for, end the rollout."""
    made, ask = conversation((text, "length"))

    async def both() -> None:
        if text is not None:
            assert (await ask(OPENING)).finish_reason == "length"
        with pytest.raises(_Refused, match="length limit"):
            await ask([*OPENING, message("assistant", text), message("user", "go on")] if text else OPENING)

    asyncio.run(both())
    assert made.trace.stopped == "max_total_tokens"
    assert events(made) == [OPENING]


def test_the_end_is_an_event() -> None:
    made, _ = conversation()
    made.ended(Outcome(1.0, {"reward/found": 1.0}))
    made.fail("out of cards")
    assert events(made) == [Outcome(1.0, {"reward/found": 1.0}), "out of cards"]


async def _wait(work: Awaitable[Any]) -> Any:
    return await work
