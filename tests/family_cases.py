"""Tiny models of the families that people train, each saved with a tokenizer and a chat template of its family's kind.

There is no hub in the tests. The model classes are transformers' own; widths, weights and vocabularies are ours. What
differs between families, and can break training, is kept: tied and untied output layers, norms of queries and keys,
1 + w norms, scaled embeddings, two kinds of attention layer with a rotary base each, rescaled rotary frequencies,
several end tokens, padding that is an end token or missing, a BOS from tokenizer and template both, templates with a
system prompt of their own or without a system role, embeddings with more rows than there are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    GenerationConfig,
    GPT2Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SLIDING_WINDOW = 7  # of Gemma's sliding layers: shorter than any prompt with its response

_SENTENCES = [
    "The answer is the sum of the numbers in the question.",
    "Then the other numbers are added, and the answer is the same as before.",
    "What is the answer? There are three of them in there.",
]
_ROWS = 64  # embeddings are padded to a multiple of this

_CHATML = (
    "{% if messages[0].role != 'system' and default %}<|im_start|>system\n{{ default }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chatml(default: str = "") -> str:
    return f"{{% set default = '{default}' %}}{_CHATML}"


QWEN3_TEMPLATE = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "{{ system | trim }}<|eot_id|>"
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA2_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + GEMMA3_TEMPLATE
)


def _merges(normalizer: Any, pre_tokenizer: Any, decoder: Any, alphabet: list[str]) -> tuple[list[str], list[Any]]:
    """Tokens and merges of byte-pair encoding on the sentences."""
    words = Tokenizer(BPE())
    words.normalizer, words.pre_tokenizer, words.decoder = normalizer, pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + 24, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(_SENTENCES, trainer)
    model = json.loads(words.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


def _byte_level() -> tuple[list[str], list[Any]]:
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _merges(None, bytes_of_text, decoders.ByteLevel(), sorted(pre_tokenizers.ByteLevel.alphabet()))


def _numbered(*tokens: str) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _pairs(merges: list[Any]) -> list[tuple[str, str]]:
    return [(left, right) for left, right in merges]


def _qwen(eos: str, template: str, *plain: str) -> PreTrainedTokenizerBase:
    """plain: added tokens that are not special, and so stay in decoded text."""
    tokens, merges = _byte_level()
    tokenizer = Qwen2Tokenizer(vocab=_numbered(*tokens), merges=_pairs(merges), eos_token=eos)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(list(plain))
    tokenizer.chat_template = template
    return tokenizer


def _llama3() -> PreTrainedTokenizerBase:
    tokens, merges = _byte_level()
    words = Tokenizer(BPE(vocab=_numbered(*tokens), merges=_pairs(merges), ignore_merges=True))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    words.add_special_tokens([*specials, "<|eot_id|>"])
    words.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", words.token_to_id("<|begin_of_text|>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", clean_up_tokenization_spaces=True
    )
    tokenizer.chat_template = LLAMA3_TEMPLATE
    return tokenizer


def _smollm2() -> PreTrainedTokenizerBase:
    tokens, merges = _byte_level()
    vocabulary = _numbered("<|endoftext|>", "<|im_start|>", "<|im_end|>", *tokens)
    tokenizer = GPT2Tokenizer(
        vocab=vocabulary,
        merges=_pairs(merges),
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    return tokenizer


def _gemma3() -> PreTrainedTokenizerBase:
    letters = sorted({*"".join(_SENTENCES), *"\n▁0123456789"} - {" "})
    split = pre_tokenizers.Split("▁", "merged_with_next")
    tokens, merges = _merges(normalizers.Replace(" ", "▁"), split, None, letters)
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    vocabulary = _numbered(*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *tokens)
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=_pairs(merges), add_bos_token=True)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    tokenizer.chat_template = GEMMA3_TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class Family:
    """How one family's models are made.

    ends: the end tokens of the generation configuration. bos: the token that every prompt begins with, if any.
    default_system: what the template says where no system message is given.
    model_pad: the model's own padding token, which freezes a row of the input embedding.
    is_padded: whether the embedding has more rows than the tokenizer has tokens.
    """

    model_class: Any
    config_class: Any
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    ends: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    bos: str | None = None
    default_system: str = ""
    model_pad: str | None = None
    is_padded: bool = True


_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_QWEN2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

FAMILIES: dict[str, Family] = {
    # a base model: its only end token is its padding token, too
    "qwen2": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        lambda: _qwen("<|endoftext|>", _chatml("You are a helpful assistant")),
        ("<|endoftext|>",),
        {"tie_word_embeddings": True},
        default_system="You are a helpful assistant",
    ),
    "qwen2.5": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        lambda: _qwen("<|im_end|>", _chatml(_QWEN2_5_SYSTEM)),
        ("<|im_end|>", "<|endoftext|>"),
        {"tie_word_embeddings": False},
        default_system=_QWEN2_5_SYSTEM,
    ),
    "qwen3": Family(
        Qwen3ForCausalLM,
        Qwen3Config,
        lambda: _qwen("<|im_end|>", QWEN3_TEMPLATE, "<think>", "</think>"),
        ("<|im_end|>", "<|endoftext|>"),
        {"tie_word_embeddings": True, "head_dim": 8},
    ),
    "llama3.1": Family(
        LlamaForCausalLM,
        LlamaConfig,
        _llama3,
        _LLAMA3_ENDS,
        {"tie_word_embeddings": False, **_LLAMA3_ROPE},
        bos="<|begin_of_text|>",
        default_system="Cutting Knowledge Date: December 2023",
    ),
    "llama3.2": Family(
        LlamaForCausalLM,
        LlamaConfig,
        _llama3,
        _LLAMA3_ENDS,
        {"tie_word_embeddings": True, "head_dim": 8, **_LLAMA3_ROPE},
        bos="<|begin_of_text|>",
        default_system="Cutting Knowledge Date: December 2023",
    ),
    "gemma3": Family(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        _gemma3,
        ("<eos>", "<end_of_turn>"),
        {
            "head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
        },
        bos="<bos>",
        model_pad="<pad>",
    ),
    "smollm2": Family(
        LlamaForCausalLM,
        LlamaConfig,
        _smollm2,
        ("<|im_end|>",),
        {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1},
        default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        model_pad="<|im_end|>",
        is_padded=False,
    ),
}


def save_family(name: str, directory: Path, **options: Any) -> None:
    """Make a family's model and tokenizer and save both, as they would come from the hub.

    options: of the model's configuration, in place of the family's.
    """
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    rows = len(tokenizer)
    if family.is_padded:
        rows = -(-(rows + 1) // _ROWS) * _ROWS
    ends = [int(id) for id in tokenizer.convert_tokens_to_ids(list(family.ends))]
    pad = None if family.model_pad is None else tokenizer.convert_tokens_to_ids(family.model_pad)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0], "pad_token_id": pad}
    config = family.config_class(**_SIZES | {"vocab_size": rows} | special | family.options | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        model = family.model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases have values at which wrong rules look right
                parameter.add_(0.1 * torch.randn_like(parameter))
    # the settings beside the ids are those that many models come with, and that nothing of ours reads
    model.generation_config = GenerationConfig(
        **special | {"eos_token_id": ends if len(ends) > 1 else ends[0]}, do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_gemma3_for_images(directory: Path, text: Gemma3TextConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """The class that Gemma 3 has from 4B on: the language model of a configuration, and a tower for images."""
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def even_characters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """A reward with a gradient for any text: the share of characters with an even code."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in texts]
