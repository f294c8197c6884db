"""The sizes of a model without its weights: from its configuration, with neither network nor memory for parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from vcpo.config import LoraSection, ModelSection
from vcpo.errors import UserError
from vcpo.models.loading import position_limit
from vcpo.models.lora import add_adapter, base_of, base_parameters, options_of, trained_parameters
from vcpo.models.small import make_small_model

# from the config.json that the publisher has on the hub, for machines that do not reach it
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-1.5B": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


class UnknownModel(Exception):
    """The sizes of a model cannot be found without the network. The message says where was looked."""


@dataclass(frozen=True)
class ModelSizes:
    """What an estimate needs to know of a model.

    source: where the sizes are from. parameters: tied ones count once; without adapters. trained: of the adapters, or
    all. query_width, key_width: numbers per token and layer in all query, and in all key heads (there are as many
    values as keys). positions: the longest sequence that the model takes, ``None`` if it does not say.
    """

    source: str
    parameters: int
    trained: int
    hidden: int
    intermediate: int
    layers: int
    query_width: int
    key_width: int
    vocabulary: int
    positions: int | None

    @classmethod
    def find(cls, section: ModelSection) -> ModelSizes:
        """The sizes of the configured model: made from sizes, in a directory, in the hub's cache, or in our table.

        Raises UnknownModel if it is in none of them, and UserError for adapters that it cannot have.
        """
        if section.init is not None:
            with torch.device("meta"):
                small, _ = make_small_model(section.init, seed=0)
            return cls.of_model(small, "model.init")
        assert section.path is not None
        base = base_of(section.path)
        if base is not None:
            return cls.find(section.model_copy(update={"path": base, "lora": options_of(section.path)}))
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                str(Path(section.path).expanduser()), local_files_only=True
            )
        except Exception as error:  # transformers raises many types for what is one condition here
            if section.path not in KNOWN_MODELS:
                raise UnknownModel(
                    f"Model {section.path!r} has no readable configuration in a directory of that name or in the hub's"
                    f" cache on this machine, and it is none of {', '.join(KNOWN_MODELS)}, whose sizes are built in."
                ) from error
            config = Qwen2Config(**KNOWN_MODELS[section.path])
            return cls.of_config(config, "sizes as published; the model is not on this machine", section.lora)
        return cls.of_config(config, "sizes from its config.json on this machine", section.lora)

    @classmethod
    def of_config(cls, config: PreTrainedConfig, source: str, lora: LoraSection | None = None) -> ModelSizes:
        """From a configuration. Raises UnknownModel if it does not make a causal language model."""
        make: Any = AutoModelForCausalLM.from_config
        try:
            with torch.device("meta"):
                model = make(config)
                if lora is not None:
                    add_adapter(model, lora, seed=0)
            return cls.of_model(model, source)
        except UserError:
            raise
        except Exception as error:  # of configurations that this program has never seen
            detail = " ".join(str(error).split())[:200]
            raise UnknownModel(f"The model's configuration makes no causal language model: {detail}") from error

    @classmethod
    def of_model(cls, model: Any, source: str) -> ModelSizes:
        """From a model on any device."""
        module: nn.Module = model
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            source=source,
            parameters=sum(p.numel() for p in base_parameters(module).values()),
            trained=sum(p.numel() for p in trained_parameters(module).values()),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            query_width=heads * head_width,
            key_width=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
            vocabulary=config.vocab_size,
            positions=position_limit(model.config),
        )
