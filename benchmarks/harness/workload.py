"""The model and the group of trajectories of a cell: the same numbers for every variant, thread count and run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from harness.cells import SEED, SIZES, Cell, Size
from vcpo.models.attention import ATTENTION
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory

# standard deviation of a sequence log-ratio: what a policy lag of a few steps makes, so that no weight dominates
_LOG_RATIO_STD = 0.3


def make_model(cell: Cell) -> PreTrainedModel:
    """The cell's model in float32, its biases and norm weights moved off the initial values that hide wrong rules."""
    size = SIZES[cell.size]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model_class: Any = Qwen2ForCausalLM if size.family == "qwen2" else GPTNeoXForCausalLM
        model: PreTrainedModel = model_class._from_config(
            _config(size, 2 * cell.tokens), attn_implementation=ATTENTION, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.02 * torch.randn_like(parameter))
    layers: nn.Module = model
    layers.to(cell.device).eval()
    return model


def _config(size: Size, positions: int) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": positions,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if size.family == "qwen2":
        return Qwen2Config(**shape, num_key_value_heads=size.key_value_heads, tie_word_embeddings=True)
    return GPTNeoXConfig(**shape, tie_word_embeddings=False)


def sharing_weights(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """The same parameters in modules of their own, so that what one variant hooks into them slows no other one."""
    twin: PreTrainedModel = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    twin.set_attn_implementation(attention)
    return twin


def make_group(model: PreTrainedModel, cell: Cell) -> Group:
    """A prompt of a quarter of the tokens with responses of random tokens, total lengths uniform in [T/2, T].

    The sampler's log-probabilities are the model's own plus noise. Half of the rewards are 1, the others 0.
    """
    rng = np.random.default_rng([SEED, cell.tokens, cell.group])
    vocabulary = SIZES[cell.size].vocabulary
    prompt_ids = rng.integers(2, vocabulary, cell.tokens // 4)
    totals = rng.integers(cell.tokens // 2, cell.tokens + 1, cell.group)
    rewards = rng.permutation(np.arange(cell.group) % 2)
    evaluated = sharing_weights(model, "sdpa")
    trajectories = []
    for index, (total, reward) in enumerate(zip(totals.tolist(), rewards.tolist(), strict=True)):
        length = total - len(prompt_ids)
        response_ids = rng.integers(2, vocabulary, length)
        noise = rng.normal(0, _LOG_RATIO_STD / length**0.5, length)
        logprobs = _logprobs(evaluated, prompt_ids, response_ids) - noise
        trajectories.append(
            Trajectory(
                group_id=0,
                index=index,
                prompt_ids=prompt_ids,
                response_ids_T=response_ids,
                mask_T=np.ones(length, dtype=bool),
                logprobs_T=logprobs.astype(np.float32),
                versions_T=np.zeros(length, dtype=np.int64),
                stop_reason=StopReason.EOS,
                start_version=0,
                grade=Grade(float(reward), bool(reward)),
            )
        )
    return Group(0, Problem("0", ""), 1, trajectories)


@torch.no_grad()
def _logprobs(
    model: PreTrainedModel, prompt_ids: NDArray[np.int64], response_ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids])).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(response_ids) + 1).logits[0, :-1]
    logprobs: NDArray[np.float64]
    logprobs = logits.log_softmax(-1).gather(1, ids[len(prompt_ids) :, None])[:, 0].double().cpu().numpy()
    return logprobs
