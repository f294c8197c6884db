"""Drawing one token per row from logits, and the random numbers that it takes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcpo.records import SamplingParams


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, a pure function of the request's seed and the token's position.

    SplitMix64 (Steele, Lea & Flood 2014): element ``position`` of the stream whose start is itself the mixed seed, so
    that streams of neighbouring seeds have nothing in common. 53 random bits.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state_B = _mix(seeds_B) + (positions_B.astype(np.uint64) + np.uint64(1)) * golden
    return (_mix(state_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token ids (int64) and their log-probabilities (float32), one per row.

    The logits are divided by the temperature, then ``top_k`` keeps the k largest (of equal ones, the lower ids), then
    ``top_p`` keeps the smallest set of the largest whose probability reaches p. What is left is renormalised, one
    token is drawn by inverting its cumulative distribution at ``uniforms_B`` (float64), and the log-probability is
    that of the distribution drawn from. ``temperature=0`` takes the largest logit; a certain token has log-prob 0.

    A row with NaN, or with no finite logit, has log-probability NaN.
    """
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        largest_B, ids_B = logits_BV.max(dim=-1)
        return ids_B, largest_B - largest_B  # 0, or NaN where the largest is NaN or infinite
    if params.temperature != 1:
        logits_BV = logits_BV / params.temperature
    order_BV = None
    if params.top_k > 0 or params.top_p < 1:
        logits_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        if params.top_k > 0:
            logits_BV, order_BV = logits_BV[:, : params.top_k], order_BV[:, : params.top_k]
        if params.top_p < 1:
            before_BV = logits_BV.softmax(dim=-1, dtype=torch.float64)
            before_BV = before_BV.cumsum(dim=-1) - before_BV
            outside_BV = before_BV >= params.top_p
            outside_BV[:, 0] = False
            logits_BV = logits_BV.masked_fill(outside_BV, -torch.inf)
    logprobs_BV = logits_BV.log_softmax(dim=-1)
    # float32 would lose the small probabilities of a large vocabulary in the running sum
    cumulative_BV = logprobs_BV.double().exp_().cumsum_(dim=-1)
    targets_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    # the first token whose cumulative probability exceeds the target; in range also for NaN
    chosen_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True).clamp_(max=logprobs_BV.shape[-1] - 1)
    chosen_logprobs_B = logprobs_BV.gather(1, chosen_B1)[:, 0]
    ids_B1 = chosen_B1 if order_BV is None else order_BV.gather(1, chosen_B1)
    return ids_B1[:, 0], chosen_logprobs_B


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
