"""Conversations after the prompt, in the words of a model's own chat template. Imports without torch.

What a model has sampled is never written anew: only what follows it is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vcpo.errors import UserError
from vcpo.records import Message
from vcpo.tasks.tool_calls import PARSERS, Parser, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "an answer of 7f3a9c"  # stands for the model's turn; the first occurrence is ours
_QUESTION: Message = {"role": "user", "content": "question"}


class ChatTurns:
    """Reads the model's calls of tools, and writes the messages that follow its turns.

    tool_schemas: the tools that the prompts show; without any, there are no calls.
    template_kwargs: variables for the chat template, as the prompts have them.
    Raises UserError when there are tools and the tokenizer's chat template is not one for tools, or writes calls in a
    format that is not known here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_schemas: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        self._tools = list(tool_schemas) if tool_schemas else None
        self._parser = self._find_parser() if self._tools else None

    def tool_calls(self, text: str) -> tuple[ToolCall, ...]:
        """What the model calls in a turn, given without special tokens."""
        return self._parser(text) if self._parser else ()

    def following(self, messages: Sequence[Message], ended: bool) -> str:
        """The text between a turn of the model and its next one, with these messages in it.

        ended: whether the turn ended with an end token, which the text then does not begin with.
        """
        safe = [{key: self._broken_up(value) for key, value in message.items()} for message in messages]
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._render([_QUESTION, answer, *safe], add_generation_prompt=True).partition(_ANSWER)[2]
        if not text:
            raise ValueError("the chat template leaves out the model's answer")
        if ended:
            rest = text.lstrip()
            end = max((name for name in self._special if rest.startswith(name)), key=len, default="")
            text = rest.removeprefix(end) if end else text
        return text

    def _find_parser(self) -> Parser:
        if self._tokenizer.chat_template is None:
            raise UserError("tools need a model with a chat template that shows tools; the tokenizer has no template")
        result, name, value = "result 7f3a9c", "probe_7f3a9c", 'a "quoted" 7f3a9c'
        call = {"type": "function", "function": {"name": name, "arguments": {"argument": value}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = {"role": "assistant", "content": _ANSWER}
        shown, said, called, answered = self._rendered(
            [_QUESTION],
            [_QUESTION, answer],
            [_QUESTION, calling],
            [_QUESTION, answer, {"role": "tool", "name": name, "content": result}],
        )
        missing = [tool["function"]["name"] for tool in self._tools or () if tool["function"]["name"] not in shown]
        if missing:
            raise _unsupported(f"does not show the tool {missing[0]!r}")
        if result not in answered.partition(_ANSWER)[2]:
            raise _unsupported("leaves out the results of tools (messages of the role tool)")
        ids: Any = self._tokenizer(called.removeprefix(said.partition(_ANSWER)[0]), add_special_tokens=False)[
            "input_ids"
        ]
        turn = str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for parser in PARSERS.values():
            if parser(turn) == (ToolCall(name, {"argument": value}),):
                return parser
        raise _unsupported(f"writes no calls of tools in a known format ({' or '.join(PARSERS)})")

    def _rendered(self, *conversations: list[Any]) -> list[str]:
        from jinja2 import TemplateError

        try:
            return [self._render(c, add_generation_prompt=len(c) == 1) for c in conversations]
        except (TemplateError, TypeError) as error:
            raise _unsupported(f"fails on a conversation with tools ({error})") from None

    def _render(self, messages: list[Any], add_generation_prompt: bool) -> str:
        given: Any = {"tools": self._tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(self._tokenizer.apply_chat_template(messages, **{**self._template_kwargs, **given}))

    def _broken_up(self, text: str) -> str:
        """The text with names of control tokens written as ``< |im_end|>``, so that it holds no such token."""
        while self._control is not None and self._control.search(text):
            text = self._control.sub(lambda name: f"{name[0][0]} {name[0][1:]}", text)
        return text

    @cached_property
    def _special(self) -> list[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return [*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)]

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        """Names of special tokens, and of others that the template writes, such as ``<tool_call>``."""
        template = str(self._tokenizer.chat_template)
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        names = {name.strip() for name in (*self._special, *(name for name in added if name in template))}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _unsupported(what: str) -> UserError:
    return UserError(f"tools need a model whose chat template is made for them; this one's {what}")
