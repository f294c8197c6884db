"""From problems to prompt token ids, in data order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vcpo.errors import UserError
from vcpo.models.encoding import unknown_characters
from vcpo.records import Message, Problem
from vcpo.tasks.chat_turns import ChatTurns
from vcpo.tasks.environment import EnvironmentTask, tool_schemas
from vcpo.tasks.protocol import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONSECUTIVE_SKIPS = 10_000


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> NDArray[np.int64]:
    """The problem's prompt as token ids, ready for the response to follow.

    Text is tokenized as the tokenizer does by itself (with a BOS where it normally adds one, and not a second one to
    text that begins with it), but never closed with an EOS. Messages go through the chat template, which gets
    ``template_kwargs`` and ``tools`` (JSON schemas), up to where the assistant speaks; a last message of the assistant
    is left open, to be continued. Raises UserError naming the problem when its prompt has no tokens, has characters
    that the tokenizer has no token for, or does not fit the chat template.
    """
    if isinstance(problem.prompt, str):
        ids = _encode_text(tokenizer, problem, problem.prompt)
    else:
        ids = _encode_messages(tokenizer, problem, problem.prompt, {**(template_kwargs or {}), "tools": tools or None})
    if not ids:
        raise UserError(f"problem {problem.id!r} has an empty prompt (0 tokens); remove it from the data")
    return np.asarray(ids, dtype=np.int64)


class PromptSource:
    """Prompts of a task in data order, with the limit on their length applied.

    position: the data position to start from (0, or the one saved in a checkpoint).
    template_kwargs: variables for the chat template, beside the tools of the task.
    skipped, truncated: how many prompts over ``max_prompt_length`` were left out, or shortened, so far.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        max_prompt_length: int,
        long_prompts: Literal["skip", "truncate", "error"],
        position: int = 0,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_prompt_length = max_prompt_length
        self._long_prompts = long_prompts
        self._position = position
        self._template_kwargs = template_kwargs
        self._tools = tool_schemas(task)
        ChatTurns(tokenizer, self._tools, template_kwargs)  # raises UserError where the model cannot have these tools
        self.skipped = 0
        self.truncated = 0

    @property
    def have_environments(self) -> bool:
        """Whether responses to the prompts are written in environments."""
        return isinstance(self._task, EnvironmentTask)

    def next(self) -> tuple[Problem, NDArray[np.int64], int]:
        """The next problem, its prompt ids, and the data position after it.

        A prompt over the limit is skipped, truncated to its end (where the question and the template's opening of the
        answer are), or raises UserError naming the problem, as configured.
        """
        for _ in range(MAX_CONSECUTIVE_SKIPS):
            problem = self._task.train_problem(self._position, self._seed)
            ids = encode_prompt(self._tokenizer, problem, self._template_kwargs, self._tools)
            if len(ids) > self._max_prompt_length and self._long_prompts == "error":
                raise UserError(
                    f"problem {problem.id!r} has a prompt of {len(ids)} tokens, over sampling.max_prompt_length ="
                    f" {self._max_prompt_length}; raise the limit, or set sampling.long_prompts to skip or truncate"
                )
            self._position += 1
            if len(ids) > self._max_prompt_length:
                if self._long_prompts == "skip":
                    self.skipped += 1
                    continue
                self.truncated += 1
                ids = ids[-self._max_prompt_length :]
            return problem, ids, self._position
        raise UserError(
            f"{MAX_CONSECUTIVE_SKIPS} prompts in a row are longer than sampling.max_prompt_length ="
            f" {self._max_prompt_length} tokens; raise the limit, or set sampling.long_prompts=truncate"
        )


def _encode_text(tokenizer: PreTrainedTokenizerBase, problem: Problem, text: str) -> list[int]:
    unknown = unknown_characters(tokenizer, text)
    if unknown:
        raise UserError(
            f"problem {problem.id!r}: the tokenizer has no token for {', '.join(map(repr, unknown))} in the prompt"
            f" {_short(text)}; add what is missing to model.init.characters"
        )
    ids = _ids(tokenizer(text, add_special_tokens=True))
    plain = _ids(tokenizer(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos] and plain[:2] != [bos, bos]:
        ids = ids[1:]
    closed = len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id and ids[-1:] != plain[-1:]
    return ids[:-1] if closed else ids


def _encode_messages(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, messages: list[Message], template_kwargs: Mapping[str, Any]
) -> list[int]:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            f"problem {problem.id!r} has chat messages as its prompt, but the tokenizer has no chat template;"
            " set task.chat=false (gsm8k) or task.style=text (countdown), or use a model with a chat template"
        )
    continued = bool(messages) and messages[-1].get("role") == "assistant"
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            **{
                **template_kwargs,
                "tokenize": True,
                "return_dict": True,
                "add_generation_prompt": not continued,
                "continue_final_message": continued,
            },
        )
    except TemplateError as error:
        raise UserError(f"problem {problem.id!r} does not fit the tokenizer's chat template: {error}") from None
    return _ids(encoded)


def _ids(encoded: Any) -> list[int]:
    return list(encoded["input_ids"])


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
