"""Log-probabilities and entropy of the trained tokens of a packed batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.learner.packing import PackedBatch

_ENTROPY_ROWS = 1024  # logit rows whose probabilities exist at one time


def trained_token_logits(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(K, V) logits, in the model's dtype, at the positions that predict trained tokens.

    A model whose forward takes ``logits_to_keep`` computes no others.
    """
    call: dict[str, Any] = {
        "input_ids": batch.input_ids_1N,
        "position_ids": batch.position_ids_1N,
        "attention_plan": batch.plan,
        "use_cache": False,
    }
    if keeps_logits(model):
        logits_KV: Tensor = model(**call, logits_to_keep=batch.predictors_K).logits[0]
        return logits_KV
    return model(**call).logits[0].index_select(0, batch.predictors_K)  # type: ignore[no-any-return]


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can be asked for the logits of chosen positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def token_logprobs(logits_KV: Tensor, targets_K: Tensor, temperature: float) -> Tensor:
    """(K,) log-probabilities of the targets at the sampling temperature, in float32 or better."""
    logits_KV = _sampled_from(logits_KV, temperature)
    return torch.log_softmax(logits_KV, dim=-1).gather(1, targets_K[:, None])[:, 0]


@torch.no_grad()
def token_entropies(logits_KV: Tensor, temperature: float) -> Tensor:
    """(K,) entropies in nats of the distributions that the targets were drawn from; carries no gradient."""
    entropies = []
    for begin in range(0, len(logits_KV), _ENTROPY_ROWS):
        rows = _sampled_from(logits_KV[begin : begin + _ENTROPY_ROWS], temperature)
        entropies.append(torch.special.entr(torch.softmax(rows, dim=-1)).sum(dim=-1))
    return torch.cat(entropies) if entropies else logits_KV.new_zeros(0)


def _sampled_from(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1 else logits / temperature
