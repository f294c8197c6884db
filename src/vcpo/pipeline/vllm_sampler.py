"""The vLLM engine of a configuration; imported in a sampler process that runs in vLLM's environment."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch

from vcpo.config import RunConfig
from vcpo.models.lora import base_of
from vcpo.records import SamplingParams
from vcpo.sampler.engines import with_turns
from vcpo.sampler.protocol import Engine
from vcpo.sampler.vllm_engine import VllmEngine
from vcpo.tasks.registry import environment_task

_GB = 10**9


def open_vllm_engine(config: RunConfig, params: SamplingParams) -> Engine:
    """An engine without weights. The learner's process has already checked that the model can be loaded."""
    engine = config.sampling.engine
    assert engine.name == "vllm"
    on_gpu = torch.cuda.is_available() and config.model.device != "cpu"
    kv_cache_gb = engine.kv_cache_gb or (None if on_gpu else 1.0)
    options: dict[str, Any] = {
        "dtype": config.model.dtype,
        "enforce_eager": not on_gpu if engine.enforce_eager is None else engine.enforce_eager,
        "enable_prefix_caching": engine.prefix_caching,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        # each process of a run its own: the same numbers in two samplers would make their responses alike
        "seed": secrets.randbits(31),
    }
    if kv_cache_gb is not None:
        options["kv_cache_memory_bytes"] = int(kv_cache_gb * _GB)
    with tempfile.TemporaryDirectory(prefix="vcpo-") as directory:
        path, tokenizer = _model_and_tokenizer(config, directory)

        def decoder(params: SamplingParams) -> Engine:
            sampling = config.sampling
            length = sampling.max_prompt_length + sampling.max_completion_length
            return VllmEngine(path, params, sampling.slots, length, tokenizer, **options)

        return with_turns(environment_task(config.task.name, config.task.params), decoder, params, tokenizer)


def _model_and_tokenizer(config: RunConfig, directory: str) -> tuple[str, Any]:
    """Where the model's configuration lies, and its tokenizer. directory: for one that has no file yet."""
    from transformers import AutoTokenizer

    section = config.model
    if section.init is None:
        assert section.path is not None
        # an adapter is merged into the weights that are published
        path = _local(base_of(section.path) or section.path)
        own = _local(section.path)
        return path, AutoTokenizer.from_pretrained(own if (Path(own) / "tokenizer_config.json").is_file() else path)
    from vcpo.models.small import make_small_model

    model, tokenizer = make_small_model(section.init, config.seed)
    model.config.save_pretrained(directory)
    return directory, tokenizer


def _local(path: str) -> str:
    """A directory as it is found, or a hub id."""
    directory = Path(path).expanduser()
    return str(directory) if directory.is_dir() else path
