"""The metrics of one optimizer step. Means over trajectories are over the scored ones unless said otherwise."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from vcpo.learner.minibatch import Minibatch
from vcpo.methods.diagnostics import truncated_share
from vcpo.methods.ess import effective_sample_size, largest_weight_share
from vcpo.methods.ratios import trajectory_log_ratios
from vcpo.methods.spec import MethodSpec
from vcpo.records import StopReason


def reward_metrics(minibatch: Minibatch) -> dict[str, float]:
    """What the sampler and the graders delivered; over all trajectories that have the quantity.

    reward_std: mean over groups of the population standard deviation; zero_std_groups: share of groups whose scored
    rewards are all equal, out of the groups that have one; unscored: trajectories without a reward; untrained: with
    a reward but without a trained token.
    """
    trajectories = minibatch.trajectories
    graded = [t.grade for t in trajectories if t.grade is not None]
    parts: dict[str, list[float]] = defaultdict(list)
    for grade in graded:
        for name, value in grade.parts.items():
            parts[name].append(value)
    groups = _first_of_each(minibatch.group_B[minibatch.scored_B])
    has_reward = minibatch.has_reward_B
    lengths = [len(t.response_ids_T) for t in trajectories]
    return {
        "reward": _mean(minibatch.rewards_B[has_reward]),
        "reward_std": _mean(minibatch.std_B[minibatch.scored_B][groups]),
        "zero_std_groups": _mean(minibatch.equal_B[minibatch.scored_B][groups]),
        "accuracy": _mean(torch.tensor([grade.correct for grade in graded])),
        "unscored": float((~has_reward).sum()),
        "untrained": float((has_reward & ~minibatch.scored_B).sum()),
        "response_length": _mean(torch.tensor(lengths)),
        "length_limited_share": _mean(torch.tensor([t.stop_reason is StopReason.LENGTH for t in trajectories])),
        **{f"reward_parts/{name}": float(np.mean(values)) for name, values in sorted(parts.items())},
    }


def staleness_metrics(minibatch: Minibatch, version: int) -> dict[str, float]:
    """Ages in optimizer steps: staleness per trained token, lag per trajectory from the version that started it."""
    trajectories = minibatch.trajectories
    if not trajectories:
        return {}
    ages = np.concatenate([version - t.versions_T[t.mask_T] for t in trajectories])
    lags = np.array([version - t.start_version for t in trajectories])
    return {
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max()) if len(ages) else 0.0,
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
    }


def ratio_metrics(
    minibatch: Minibatch,
    spec: MethodSpec,
    log_ratios_B: Tensor,
    k3_B: Tensor,
    truncated_B: Tensor,
    entropies_B: Tensor,
) -> dict[str, float]:
    """Distance between learner and sampler; arguments as in ``GradientAssembly``.

    kl, kl_k3: KL(mu || pi) per token, as the mean of -log r and of r - 1 - log r; truncated_share: of the ratios (of
    tokens or of trajectories) that the method truncates.
    """
    scored = minibatch.scored_B
    log_ratios_S, lengths_S = log_ratios_B[scored], minibatch.trained_B[scored]
    if not len(log_ratios_S):
        return {}
    tokens = float(lengths_S.sum())
    if spec.ratio_level == "token":
        truncated = truncated_B[scored].sum() / tokens
    else:
        truncated = truncated_share(trajectory_log_ratios(spec.ratio_level, log_ratios_S, lengths_S), spec.ratio_cap)
    return {
        "ess": float(effective_sample_size(log_ratios_S)),
        "max_weight_share": float(largest_weight_share(log_ratios_S)),
        "log_ratio_mean": _mean(log_ratios_S),
        "log_ratio_median": float(log_ratios_S.median()),
        "log_ratio_min": float(log_ratios_S.min()),
        "log_ratio_max": float(log_ratios_S.max()),
        "kl": -float(log_ratios_S.sum()) / tokens,
        "kl_k3": float(k3_B[scored].sum()) / tokens,
        "truncated_share": float(truncated),
        "entropy": float(entropies_B[scored].sum()) / tokens,
    }


def baseline_metrics(minibatch: Minibatch, squared_norms_B: Tensor | None) -> dict[str, float]:
    """Baselines and, where the method needs them, gradient norms of the trajectories that contribute."""
    active = minibatch.active_B
    if not active.any():
        return {}
    metrics = {"baseline_mean": _mean(minibatch.baselines_B[active])}
    if squared_norms_B is not None:
        norms = squared_norms_B[active].sqrt()
        metrics |= {"norm_mean": _mean(norms), "norm_max": float(norms.max())}
    return metrics


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _first_of_each(group_S: Tensor) -> Tensor:
    first = torch.ones(len(group_S), dtype=torch.bool)
    first[1:] = group_S[1:] != group_S[:-1]
    return first
