"""Loading a causal language model and its tokenizer, with every mistake that can be seen early reported early.

Order of the checks: the path, the configuration, the tokenizer, their agreement, and only then the weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from vcpo.config import ModelSection
from vcpo.errors import UserError
from vcpo.models.attention import ATTENTION
from vcpo.models.lora import add_adapter, base_of, check_installed, load_adapter
from vcpo.models.small import make_small_model

# a run has its own progress display; bars of single files would break it
disable_progress_bar()

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PLAN_LAYERS = {"full_attention", "sliding_attention"}


def load_model(
    section: ModelSection, seed: int, attn: str = ATTENTION
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a configuration, in eval mode on its device in its dtype, and its tokenizer.

    With ``model.lora``, and where ``model.path`` is the directory of an adapter, only adapters are to be trained:
    everything else is frozen (``vcpo.models.lora``).

    seed: initialises the weights of ``model.init`` and new adapters; a loaded model does not depend on it.
    attn: the attention implementation. The default needs a model class that takes attention from transformers'
        attention interface, with full or sliding-window attention in every layer: Llama, Mistral, Qwen2, Qwen3 and
        their mixtures of experts, Gemma 1 and 3, Phi-3, OLMo 2, SmolLM and most others. State-space and
        convolutional layers, logit soft-capping (Gemma 2) and chunked attention (Llama 4) are refused.

    Raises UserError for a missing or incomplete directory, a model that cannot be reached, read or supported, and a
    tokenizer with ids that the model's embedding does not have. (An embedding with more rows than the tokenizer has
    tokens is common padding and accepted.)
    """
    device = _device(section.device)
    dtype = getattr(torch, section.dtype)
    if section.init is not None:
        small, small_tokenizer = make_small_model(section.init, seed, attn, dtype)
        return _placed(small, device), small_tokenizer
    assert section.path is not None
    base = base_of(section.path)
    if section.lora is not None or base is not None:
        check_installed()
    if base is not None:
        return _load_with_adapter(section, base, seed, attn)
    source = _source(section.path)
    config = _load_config(source)
    if attn == ATTENTION:
        _check_supported(source, config)
    tokenizer = _load_tokenizer(source)
    _check_vocabulary(source, tokenizer, config.get_text_config().vocab_size)
    model = _load_weights(source, config, dtype, attn)
    _check_vocabulary(source, tokenizer, _rows(model))
    _freeze_what_text_does_not_reach(model)
    if section.lora is not None:
        add_adapter(model, section.lora, seed)
    return _placed(model, device), tokenizer


def saved_model(section: ModelSection, directory: Path) -> ModelSection:
    """The configuration that loads what a run has saved of its model: the model, or the adapter alone."""
    return section.model_copy(update={"path": str(directory), "init": None, "lora": None})


def _load_with_adapter(
    section: ModelSection, base: str, seed: int, attn: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    assert section.path is not None
    if section.lora is not None:
        raise UserError(
            f"model.path {section.path!r} is an adapter, which is trained on as it is: leave out model.lora, or merge"
            " it into its base model first"
        )
    directory = Path(section.path).expanduser()
    try:
        model, tokenizer = load_model(section.model_copy(update={"path": base}), seed, attn)
    except UserError as error:
        raise UserError(f"the adapter {section.path!r} needs its base model: {error}") from error
    load_adapter(model, directory)
    if (directory / "tokenizer_config.json").is_file():
        tokenizer = _load_tokenizer(str(directory))
        _check_vocabulary(section.path, tokenizer, _rows(model))
    return _placed(model, _device(section.device)), tokenizer


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token id that ends a response, in increasing order.

    The union of the generation configuration, the model configuration and the tokenizer: chat models often end their
    turns with another token than the tokenizer's end-of-sequence token. Empty for a model that declares none.
    """
    found: set[int] = set()
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest sequence, in tokens, that the model takes; ``None`` if it does not say.

    With the rotary scheme ``longrope`` transformers uses other frequencies for a whole pass once a sequence of it is
    longer than the original training length. How a sequence is batched must not matter, so that length is the limit.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        return int(rotary["original_max_position_embeddings"])
    return limit


def _placed(model: torch.nn.Module, device: torch.device) -> Any:
    # moved only: a cast here would also round the rotary frequencies, which stay float32 in every dtype
    return model.to(device).eval()


def _rows(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device is 'cuda' but torch finds no CUDA device; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _source(path: str) -> str:
    """The directory, or the hub id when there is no such directory and the name can be one."""
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "config.json").is_file():
            return str(local)
        raise UserError(f"model.path {path!r} has no config.json; give a directory made by save_pretrained")
    if local.exists():
        raise UserError(f"model.path {path!r} is a file; give the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "-")):
        raise UserError(f"model.path {path!r} does not exist; give a directory or a hub id such as 'Qwen/Qwen2-1.5B'")
    return path


def _load_config(source: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    except Exception as error:
        raise _explain(source, "configuration", error) from error
    return config


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise _explain(source, "tokenizer", error) from error
    # without its files transformers makes up a tokenizer of special tokens alone
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UserError(f"model {source!r} has no tokenizer; save it beside the weights with tokenizer.save_pretrained")
    return tokenizer


def _load_weights(source: str, config: PreTrainedConfig, dtype: torch.dtype, attn: str) -> PreTrainedModel:
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        # transformers initialises what it cannot load at random; the report says what that was
        model, report = load(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=attn,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise _explain(source, "weights", error) from error
    _check_complete(source, sorted(report["missing_keys"]), "lack")
    _check_complete(source, sorted(str(key[0]) for key in report["mismatched_keys"]), "have other shapes for")
    loaded: PreTrainedModel = model
    return loaded


def _freeze_what_text_does_not_reach(model: Any) -> None:
    """Towers for images or sound have no gradient here, and weight decay alone would wear them down."""
    if model.config.get_text_config() is model.config:
        return
    reached = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in reached)


def _check_complete(source: str, names: list[str], what: str) -> None:
    if names:
        others = f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
        raise UserError(
            f"model {source!r}: the weight files {what} {names[0]}{others};"
            " they are incomplete or belong to another config.json"
        )


def _check_supported(source: str, config: PreTrainedConfig) -> None:
    """Refuse what the attention plan would silently get wrong: anything but full and sliding-window attention."""
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UserError(f"model {source!r} ({config.model_type}) is not a causal language model") from None
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - _PLAN_LAYERS
    name = f"model {source!r} ({model_class.__name__})"
    if layers or getattr(model_class, "_is_stateful", False):
        raise UserError(
            f"{name} has layers of other kinds than full and sliding-window attention"
            f"{': ' + ', '.join(sorted(layers)) if layers else ''}, which are not supported"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UserError(f"{name} does not use transformers' attention interface, which the sampler and learner need")
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{name} is quantised; training needs a model with ordinary weights (its unquantised original)")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise UserError(f"{name} soft-caps its attention logits, which is not supported")


def _check_vocabulary(source: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    token, id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if id >= rows:
        raise UserError(
            f"model {source!r}: the tokenizer's token {token!r} has id {id} but the model's embedding has only {rows}"
            " rows; they do not belong together (or resize the embedding: model.resize_token_embeddings)"
        )


def _explain(source: str, part: str, error: BaseException) -> UserError:
    """The sentence for an exception of transformers, which raises OSError for nearly everything."""
    from huggingface_hub import errors

    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    # subclasses come before their bases: a gated repository is also a "not found" one
    if _any(chain, errors.GatedRepoError):
        return UserError(
            f"model {source!r} is gated: accept its terms on its hub page and log in with `hf auth login`,"
            " or give the path of a local copy"
        )
    if _any(chain, errors.RepositoryNotFoundError):
        return UserError(f"model.path {source!r} is neither a local directory nor a model on the hub that you may read")
    if _any(chain, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        return UserError(
            f"model.path {source!r} is not a local directory and the hub cannot be reached;"
            " check the network, or give the path of a local copy"
        )
    detail = " ".join(str(error).split())[:200]
    if _any(chain, SafetensorError):
        return UserError(f"model {source!r}: the {part} are damaged or truncated ({detail}); copy the model again")
    return UserError(f"model {source!r}: its {part} cannot be loaded: {detail}")


def _any(chain: list[BaseException], *kinds: type[BaseException]) -> bool:
    return any(isinstance(error, kinds) for error in chain)
