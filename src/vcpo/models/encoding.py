"""From text or chat messages to the token ids that a model sees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from vcpo.errors import UserError
from vcpo.records import Message


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message]) -> NDArray[np.int64]:
    """Token ids of a prompt: chat messages through the chat template, up to the start of the model's own turn.

    Plain text gets the special tokens that the tokenizer adds by itself (a beginning-of-sequence token, for some).
    Raises UserError for messages without a chat template, or for characters that the tokenizer cannot represent.
    """
    if isinstance(prompt, str):
        return np.asarray(encode_text(tokenizer, prompt, add_special_tokens=True), dtype=np.int64)
    if tokenizer.chat_template is None:
        raise UserError(
            "the task's prompts are chat messages but this model's tokenizer has no chat template;"
            " use a chat model, or a task whose prompts are plain text"
        )
    text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    # the template has written every special token already
    return np.asarray(encode_text(tokenizer, text), dtype=np.int64)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a piece of text. Raises UserError naming the characters that the tokenizer cannot represent."""
    ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    # fewer tokens than bytes: an alphabet of characters, and the tokenizers library drops the others silently
    if len(tokenizer) < 256 and text not in tokenizer.decode(ids):
        unknown = [character for character in dict.fromkeys(text) if not tokenizer.encode(character)]
        raise UserError(
            f"the tokenizer has no token for {', '.join(map(repr, unknown))} in {text[:60]!r};"
            " add it to model.init.characters, or use a task and a model that agree"
        )
    return ids
