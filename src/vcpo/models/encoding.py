"""Which characters of a text a tokenizer cannot represent. Imports without torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTES = 256


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The characters of ``text`` that a tokenizer of a small alphabet would drop without a word, in order.

    Byte-level tokenizers represent every text and skip bytes that their vocabulary lacks; only a vocabulary of fewer
    tokens than there are bytes, such as that of ``model.init``, can lack one. Empty for every other tokenizer.
    """
    if len(tokenizer) >= _BYTES:
        return []
    alone = [character for character in dict.fromkeys(text) if not _has_token(tokenizer, character)]
    # a character without a token of its own, such as the space between words, need not be lost
    if not alone or tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text:
        return []
    return alone


@lru_cache(maxsize=4096)
def _has_token(tokenizer: PreTrainedTokenizerBase, character: str) -> bool:
    return bool(tokenizer.encode(character, add_special_tokens=False))
