"""Prompt token ids: special tokens, chat templates, and prompts that are too long, empty or foreign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from vcpo.errors import UserError
from vcpo.models.small import character_tokenizer
from vcpo.records import Grade, Message, Problem
from vcpo.tasks.prompts import PromptSource, encode_prompt

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content }}{% if not (loop.last and m.role == 'assistant') %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;0123456789=", 64)


class Prompts:
    """A task with the given prompts, over and over."""

    def __init__(self, *prompts: str | list[Message]) -> None:
        self.prompts = prompts

    def train_problem(self, position: int, seed: int) -> Problem:
        return Problem(f"row-{position}", self.prompts[position % len(self.prompts)])

    def eval_problems(self, count: int) -> list[Problem]:
        return []

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        return [Grade(0.0) for _ in problems]


def source(*prompts: str | list[Message], **options: Any) -> PromptSource:
    given = {"seed": 0, "max_prompt_length": 4, "long_prompts": "skip", **options}
    return PromptSource(Prompts(*prompts), LETTERS, **given)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;", 64)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3, "<unk>": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text_of(ids: Any, tokenizer: Any = LETTERS) -> str:
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("template", "ids"),
    [("$A", [2, 3]), ("<s> $A", [0, 2, 3]), ("<s> $A </s>", [0, 2, 3]), ("$A </s>", [2, 3])],
)
def test_text_gets_the_tokenizers_bos_but_never_an_eos(template: str, ids: list[int]) -> None:
    encoded = encode_prompt(word_tokenizer(template), Problem("p", "one two"))
    assert encoded.tolist() == ids
    assert encoded.dtype == "int64"


def test_messages_go_through_the_chat_template_up_to_the_answer() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_prompt(tokenizer, Problem("p", [{"role": "user", "content": "hi"}]))
    assert text_of(ids, tokenizer) == "u:hi;a:"


def test_a_last_assistant_message_is_left_open() -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    assert text_of(encode_prompt(tokenizer, Problem("p", messages)), tokenizer) == "u:hi;a:well"


def test_messages_without_a_chat_template_are_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"'p' has chat messages.*no chat template; set task\.chat=false"):
        encode_prompt(LETTERS, Problem("p", [{"role": "user", "content": "hi"}]))


def test_messages_that_the_template_refuses_name_the_problem_and_its_reason() -> None:
    with pytest.raises(UserError, match="'p' does not fit the tokenizer's chat template: no system role here"):
        encode_prompt(chat_tokenizer(), Problem("p", [{"role": "system", "content": "be brief"}]))


def test_an_empty_prompt_is_named() -> None:
    prompts = source("ab", "")
    prompts.next()
    with pytest.raises(UserError, match="'row-1' has an empty prompt"):
        prompts.next()


def test_characters_that_a_small_alphabet_lacks_are_named() -> None:
    with pytest.raises(UserError, match=r"'p': the tokenizer has no token for '>', '\?'.*model\.init\.characters"):
        encode_prompt(LETTERS, Problem("p", "ab>cd?"))


def test_prompts_come_in_data_order_with_the_position_after_each() -> None:
    prompts = source("ab", "cd", "ef")
    found = [(problem.id, text_of(ids), position) for problem, ids, position in (prompts.next() for _ in range(4))]
    assert found == [("row-0", "ab", 1), ("row-1", "cd", 2), ("row-2", "ef", 3), ("row-3", "ab", 4)]


def test_a_resumed_source_continues_where_the_first_stopped() -> None:
    prompts = source("ab", "toolong", "cd", "ef")
    prompts.next()
    _, _, position = prompts.next()
    resumed = source("ab", "toolong", "cd", "ef", position=position)
    assert resumed.next()[0] == prompts.next()[0]


def test_long_prompts_are_skipped_and_counted() -> None:
    prompts = source("abcd", "abcde", "abcdef", "x")
    assert [text_of(prompts.next()[1]) for _ in range(3)] == ["abcd", "x", "abcd"]
    assert (prompts.skipped, prompts.truncated) == (2, 0)


def test_long_prompts_are_truncated_to_their_end_and_counted() -> None:
    prompts = source("abcdef=", "x", long_prompts="truncate")
    assert [text_of(prompts.next()[1]) for _ in range(3)] == ["def=", "x", "def="]
    assert (prompts.skipped, prompts.truncated) == (0, 2)


def test_a_long_prompt_can_be_an_error_that_names_problem_and_lengths() -> None:
    prompts = source("ab", "abcdef", long_prompts="error")
    prompts.next()
    with pytest.raises(UserError, match=r"'row-1' has a prompt of 6 tokens, over sampling\.max_prompt_length = 4"):
        prompts.next()


def test_data_with_only_long_prompts_is_an_error_rather_than_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcpo.tasks.prompts.MAX_CONSECUTIVE_SKIPS", 50)
    with pytest.raises(UserError, match="50 prompts in a row are longer"):
        source("abcdef").next()
