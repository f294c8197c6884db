"""One attention implementation for sampler and learner, registered with transformers.

A model loaded with ``attn_implementation=ATTENTION`` asks the *attention plan* of the current forward pass how its
queries meet its keys. The learner passes a plan that packs many trajectories into one row; the sampler passes one
that holds its slots' key/value cache. Because transformers builds no mask and no cache of its own for an
implementation that registers none, everything about the layout of a batch lives in the plan.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from vcpo.errors import UserError

ATTENTION = "vcpo"


class AttentionPlan(Protocol):
    """How the tokens of one forward pass attend to each other."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention of one layer.

        query: (rows, heads, tokens, head_dim); key, value: the same with the key/value heads (grouped-query).
        sliding_window: each token sees at most this many tokens, itself included; ``None`` means all.
        Returns (rows, tokens, heads, head_dim).
        """
        ...


def _plan_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_plan is None:
        raise RuntimeError(f"attn_implementation={ATTENTION!r} needs attention_plan=... in every forward call")
    if softcap is not None or s_aux is not None:
        raise UserError("this model's attention uses logit soft-capping or attention sinks, which are not supported")
    if dropout:
        raise UserError("attention dropout makes sampler and learner disagree: set the model's attention_dropout to 0")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention_plan.attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(ATTENTION, _plan_attention)
