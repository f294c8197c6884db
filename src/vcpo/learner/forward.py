"""The model's pass over a packed batch, up to what its output layer reads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vcpo.learner.head import bypassed
from vcpo.learner.packing import PackedBatch, pack
from vcpo.records import StopReason, Trajectory


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


class PolicyForward:
    """Runs a model without its output layer.

    head: the output layer that is left to the caller (``vcpo.learner.head``), or ``None`` if the model's own is used
        because it is no plain linear layer or the model changes its logits afterwards (soft-capping). This
        is found out by trying, because models differ in it without a sign.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.head: Any = None
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
            self.head = head
            if not self._head_is_last(device):
                self.head = None

    def rows(self, batch: PackedBatch) -> Tensor:
        """(K, D) what the output layer reads at the positions that predict trained tokens; without ``head``: logits."""
        with ExitStack() as stack:
            if self.head is not None:
                stack.enter_context(bypassed(self.head))
            return trained_token_logits(self.model, batch)

    def layouts(self, batch: PackedBatch) -> list[Sequence[int]]:
        """Rows per trajectory that the model's layers see."""
        if self.head is None and not keeps_logits(self.model):
            return [batch.lengths_B]
        return [batch.lengths_B, batch.trained_B]

    @torch.no_grad()
    def _head_is_last(self, device: torch.device) -> bool:
        nothing = np.zeros(3)
        trajectory = Trajectory(
            group_id=0,
            index=0,
            prompt_ids=np.zeros(1, dtype=np.int64),
            response_ids_T=np.arange(3) % self.head.weight.shape[0],
            mask_T=np.ones(3, dtype=bool),
            logprobs_T=nothing.astype(np.float32),
            versions_T=nothing.astype(np.int64),
            stop_reason=StopReason.LENGTH,
            start_version=0,
        )
        batch = pack([trajectory], device)
        rows = self.rows(batch)
        ours = F.linear(rows, self.head.weight, self.head.bias)
        theirs = trained_token_logits(self.model, batch)
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
