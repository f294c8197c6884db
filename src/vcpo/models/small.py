"""A small Qwen2-architecture model and its character tokenizer, made from sizes instead of loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vcpo.config import ModelInit
from vcpo.errors import UserError
from vcpo.models.attention import ATTENTION

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"


def make_small_model(
    init: ModelInit, seed: int, attn: str = ATTENTION, dtype: torch.dtype = torch.float32
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """A ``Qwen2ForCausalLM`` with tied embeddings, in eval mode on the CPU, and its character tokenizer.

    The weights are a function of ``init``, ``seed`` and ``dtype`` alone; the global random state is neither read nor
    changed. Both save with ``save_pretrained`` and load with ``AutoModelForCausalLM`` / ``AutoTokenizer``.
    """
    tokenizer = character_tokenizer(init.characters, init.max_position_embeddings)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_hidden_layers=init.num_hidden_layers,
        num_attention_heads=init.num_attention_heads,
        num_key_value_heads=init.num_key_value_heads,
        max_position_embeddings=init.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # a padding index would freeze one row of the embedding, which is also a row of the tied output layer
        pad_token_id=None,
    )
    make: Any = Qwen2ForCausalLM._from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, attn_implementation=attn, dtype=dtype)
    return model.eval(), tokenizer


def character_tokenizer(characters: str, max_length: int) -> Qwen2Tokenizer:
    """One token per character, after the padding (id 0) and end-of-sequence (id 1) tokens; no unknown token.

    It is Qwen2's byte-level tokenizer with a vocabulary of single characters and no merges, because ``AutoTokenizer``
    gives every Qwen2 model directory that class, whatever class it was saved with. One byte is one character only in
    ASCII: other characters raise UserError. The class drops characters outside the alphabet silently;
    ``vcpo.models.encoding.unknown_characters`` finds them.
    """
    if not characters.isascii():
        foreign = next(c for c in characters if not c.isascii())
        raise UserError(f"model.init.characters holds {foreign!r}: only ASCII characters can be single tokens")
    byte_symbols: dict[int, str] = bytes_to_unicode()
    tokens = [PAD_TOKEN, EOS_TOKEN, *(byte_symbols[ord(c)] for c in characters)]
    return Qwen2Tokenizer(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
