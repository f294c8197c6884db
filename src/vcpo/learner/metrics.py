"""The metrics of one optimizer step. Means over trajectories are over the scored ones unless said otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vcpo.learner.measurements import Measurements
from vcpo.learner.minibatch import Minibatch
from vcpo.methods.ess import effective_sample_size, largest_weight_share
from vcpo.methods.variance import second_moments
from vcpo.records import StopReason, Trajectory


def reward_metrics(minibatch: Minibatch) -> dict[str, float]:
    """What the sampler and the graders delivered; over all trajectories that have the quantity.

    reward_std: mean over groups of the population standard deviation; zero_std_groups: share of groups whose scored
    rewards are all equal, out of the groups that have one; unscored: trajectories without a reward; untrained: with
    a reward but without a trained token. response_length counts all tokens of a response, as ``max_completion_length``
    does, those given by an environment included.
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
        **environment_metrics(trajectories),
    }


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What happened in environments, over the trajectories that have one; nothing without any.

    turns, given_tokens, time_environments: mean number of turns, of tokens given by the environment, and seconds spent
    in it, per trajectory; environment_failures: how many ended because it failed; environment/<name>: mean of a
    measurement over the turns that have it.
    """
    trajectories = [t for t in trajectories if t.turns]
    if not trajectories:
        return {}
    measured: dict[str, list[float]] = defaultdict(list)
    for turn in (turn for t in trajectories for turn in t.turns):
        for name, value in turn.measurements.items():
            measured[name].append(value)
    return {
        "turns": float(np.mean([len(t.turns) for t in trajectories])),
        "given_tokens": float(np.mean([(~t.mask_T).sum() for t in trajectories])),
        "time_environments": float(np.mean([sum(turn.seconds for turn in t.turns) for t in trajectories])),
        "environment_failures": float(sum(t.failure is not None for t in trajectories)),
        **{f"environment/{name}": float(np.mean(values)) for name, values in sorted(measured.items())},
    }


def staleness_metrics(minibatch: Minibatch, version: int) -> dict[str, float]:
    """Ages in optimizer steps: staleness per trained token, lag per trajectory from the version that started it.

    staleness_share/<n>: of the trained tokens with an age from n up to 2n - 1 (0: with age 0).
    """
    trajectories = minibatch.trajectories
    if not trajectories:
        return {}
    ages = np.concatenate([version - t.versions_T[t.mask_T] for t in trajectories])
    lags = np.array([version - t.start_version for t in trajectories])
    # 0, 1, 2-3, 4-7, ...
    classes, counts = np.unique(np.frexp(ages.astype(np.float64))[1], return_counts=True)
    shares = {
        f"staleness_share/{2 ** int(c) // 2}": float(count / len(ages))
        for c, count in zip(classes, counts, strict=True)
    }
    return {
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max()) if len(ages) else 0.0,
        **shares,
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
    }


def ratio_metrics(minibatch: Minibatch, measured: Measurements) -> dict[str, float]:
    """Distance between learner and sampler.

    ess, max_weight_share: from raw sequence ratios; ess_applied, max_applied_share: from the weights that the method
    made of them, if one is not 0. kl, kl_k3: KL(mu || pi) per token, as the mean of -log r and of r - 1 - log r.
    chi_square: the estimate mean(w^2) - 1 from sequence ratios. truncated_share: of the ratios (of tokens or of
    trajectories) that got a smaller weight than they are; masked_share: of the tokens that got weight 0.
    """
    scored = minibatch.scored_B
    log_ratios_S, lengths_S = measured.log_ratios_B[scored], minibatch.trained_B[scored]
    if not len(log_ratios_S):
        return {}
    weights_S = measured.weights_B[scored]
    applied = {}
    if weights_S.any():
        applied["ess_applied"] = float(effective_sample_size(weights_S.log()))
        applied["max_applied_share"] = float(largest_weight_share(weights_S.log()))
    token_log_ratios = measured.token_log_ratios_K[scored.repeat_interleave(minibatch.trained_B)]
    tokens = float(lengths_S.sum())
    ratios = tokens if measured.ratios_are_of_tokens else float(len(log_ratios_S))
    return {
        "ess": float(effective_sample_size(log_ratios_S)),
        "max_weight_share": float(largest_weight_share(log_ratios_S)),
        **applied,
        "log_ratio_mean": _mean(log_ratios_S),
        "log_ratio_median": float(log_ratios_S.median()),
        "log_ratio_min": float(log_ratios_S.min()),
        "log_ratio_max": float(log_ratios_S.max()),
        **{f"token_log_ratio_q{name}": value for name, value in _quantiles(token_log_ratios)},
        "kl": -float(log_ratios_S.sum()) / tokens,
        "kl_k3": float(measured.k3_B[scored].sum()) / tokens,
        "chi_square": float((2 * log_ratios_S).exp().mean()) - 1,
        "truncated_share": float(measured.reduced_B[scored].sum()) / ratios,
        "masked_share": float(measured.dropped_B[scored].sum()) / tokens,
        "entropy": float(measured.entropies_B[scored].sum()) / tokens,
    }


def norm_metrics(minibatch: Minibatch, measured: Measurements) -> dict[str, float]:
    """Gradient norms of the trajectories that contribute, and what each baseline would leave of the second moment.

    second_moment/<baseline>: see ``second_moments``.
    """
    judged = minibatch.judged_B
    if not judged.any():
        return {}
    squared_norms = measured.squared_norms_B[judged]
    moments = second_moments(
        minibatch.shaped_B[judged],
        measured.outer_log_ratios_B[judged],
        measured.outer_B[judged].log(),
        squared_norms,
        (minibatch.factors_B / minibatch.scales_B)[judged],
        minibatch.set_B[judged],
    )
    norms = squared_norms.sqrt()
    return {
        "norm_mean": _mean(norms),
        "norm_max": float(norms.max()),
        **{f"second_moment/{name}": value for name, value in moments.items()},
    }


def baseline_metrics(minibatch: Minibatch) -> dict[str, float]:
    """The mean baseline of the trajectories that contribute; per token, the mean over their tokens."""
    judged = minibatch.judged_B
    if not judged.any():
        return {}
    if minibatch.token_baselines_K is not None:
        return {"baseline_mean": _mean(minibatch.token_baselines_K[judged.repeat_interleave(minibatch.trained_B)])}
    return {"baseline_mean": _mean(minibatch.baselines_B[judged])}


def _quantiles(values: Tensor) -> list[tuple[str, float]]:
    ordered = values.sort().values
    positions = {"01": 0.01, "50": 0.5, "99": 0.99}
    return [(name, float(ordered[int(share * (len(ordered) - 1))])) for name, share in positions.items()]


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _first_of_each(group_S: Tensor) -> Tensor:
    first = torch.ones(len(group_S), dtype=torch.bool)
    first[1:] = group_S[1:] != group_S[:-1]
    return first
