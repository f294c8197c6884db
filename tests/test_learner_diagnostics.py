"""What a step reports of ratios, masks, ages and baselines, against computations of their definitions."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from learner_cases import make_groups, make_model, slow_gradient, slow_logprobs
from test_learner import training
from vcpo.learner.learner import Learner, StepResult
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.methods.weights import Truncate
from vcpo.records import Group, Trajectory

MODEL = make_model("gpt2")
REWARDS: list[list[float | None]] = [[1, 0, 0, 1], [0.5, 0.5, 0.5], [0, 1, None, 2.0]]


def examined(spec: MethodSpec, groups: list[Group], **options: Any) -> StepResult:
    section = training(max_tokens_per_microbatch=30, **options)
    return Learner(MODEL, spec, section, 1.0).examine(groups).result


def scored_of(groups: list[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories if t.grade is not None and t.grade.reward is not None]


def logs_of(trajectory: Trajectory) -> list[float]:
    new = slow_logprobs(MODEL, trajectory.prompt_ids, trajectory.response_ids_T).tolist()
    rows = zip(new, trajectory.logprobs_T.tolist(), trajectory.mask_T, strict=True)
    return [a - b for a, b, is_trained in rows if is_trained]


def ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)


def test_applied_sample_size_and_share_are_of_the_weights_that_are_applied() -> None:
    groups = make_groups(MODEL, REWARDS, drift=1.0)
    sums = [sum(logs_of(t)) for t in scored_of(groups)]
    raw, capped = [math.exp(x) for x in sums], [min(math.exp(x), 1.2) for x in sums]
    metrics = examined(replace(METHODS["tis"], weight=Truncate(1.2)), groups).metrics
    assert metrics["ess"] == pytest.approx(ess(raw), rel=1e-9)
    assert metrics["ess_applied"] == pytest.approx(ess(capped), rel=1e-9)
    assert metrics["max_weight_share"] == pytest.approx(max(raw) / sum(raw), rel=1e-9)
    assert metrics["max_applied_share"] == pytest.approx(max(capped) / sum(capped), rel=1e-9)
    assert metrics["ess"] < metrics["ess_applied"] < 1
    assert metrics["chi_square"] == pytest.approx(sum(w * w for w in raw) / len(raw) - 1, rel=1e-9)


def test_applied_weight_of_a_trajectory_with_token_weights_is_their_mean() -> None:
    groups = make_groups(MODEL, REWARDS, drift=1.0)
    means = [np.mean([x if 0.5 <= x <= 5 else 0.0 for x in np.exp(logs_of(t))]) for t in scored_of(groups)]
    result = examined(METHODS["icepop"], groups)
    scored = [result.weights_B[i] for i in range(len(result.weights_B)) if i != 9]
    assert scored == pytest.approx([float(m) for m in means], rel=1e-9)
    assert result.metrics["ess_applied"] == pytest.approx(ess([float(m) for m in means]), rel=1e-9)


@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_methods_without_ratios_apply_equal_weights(name: str) -> None:
    metrics = examined(METHODS[name], make_groups(MODEL, REWARDS, drift=1.0)).metrics
    assert metrics["ess_applied"] == 1
    assert metrics["max_applied_share"] == pytest.approx(1 / 10)
    assert metrics["ess"] < 0.9
    assert metrics["truncated_share"] == metrics["masked_share"] == 0


def test_quantiles_of_token_log_ratios() -> None:
    groups = make_groups(MODEL, REWARDS, drift=1.0)
    logs = np.array([x for t in scored_of(groups) for x in logs_of(t)])
    metrics = examined(METHODS["vcpo"], groups).metrics
    for name, share in (("01", 0.01), ("50", 0.5), ("99", 0.99)):
        expected = float(np.quantile(logs, share, method="lower"))
        assert metrics[f"token_log_ratio_q{name}"] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize(
    ("name", "is_dropped"),
    [
        ("icepop", lambda logs: [not math.log(0.5) <= x <= math.log(5) for x in logs]),
        ("copc", lambda logs: [abs(x) > math.log(2) for x in logs]),
        ("mis", lambda logs: [sum(logs) > math.log(8)] * len(logs)),
        ("seq_mask_tis", lambda logs: [not math.log(0.999) <= sum(logs) / len(logs) <= math.log(1.002)] * len(logs)),
        ("tis", lambda logs: [False] * len(logs)),
    ],
)
def test_masked_share_is_of_the_tokens_of_all_scored_trajectories(name: str, is_dropped: Any) -> None:
    groups = make_groups(MODEL, REWARDS, drift=1.2)
    flags = [flag for t in scored_of(groups) for flag in is_dropped(logs_of(t))]
    assert name == "tis" or any(flags)
    assert examined(METHODS[name], groups).metrics["masked_share"] == pytest.approx(sum(flags) / len(flags))


def test_truncated_share_counts_the_ratios_that_lost_weight() -> None:
    groups = make_groups(MODEL, REWARDS, drift=1.2)
    sums = [sum(logs_of(t)) for t in scored_of(groups)]
    metrics = examined(replace(METHODS["tis"], weight=Truncate(1.5)), groups).metrics
    assert metrics["truncated_share"] == pytest.approx(sum(math.exp(x) > 1.5 for x in sums) / len(sums))


def test_staleness_shares_add_up_and_lie_in_classes_of_doubling_width() -> None:
    groups = make_groups(MODEL, [[1, 0, 1], [None, 1]])
    trajectories = [t for g in groups for t in g.trajectories]
    ages = iter([0, 0, 1, 2, 3, 3, 4, 5, 7, 8, 15, 16, 31, 32, 40, 1, 0, 9] * 10)
    counted: Counter[int] = Counter()
    for trajectory in trajectories:
        for t in range(len(trajectory.versions_T)):
            age = next(ages)
            trajectory.versions_T[t] = 100 - age
            if trajectory.mask_T[t]:
                counted[0 if age == 0 else 2 ** int(math.log2(age))] += 1
    learner = Learner(MODEL, METHODS["vcpo"], training(), 1.0)
    learner.version = 100
    metrics = learner.examine(groups).result.metrics
    shares = {key: value for key, value in metrics.items() if key.startswith("staleness_share/")}
    total = sum(counted.values())
    assert shares == pytest.approx({f"staleness_share/{low}": n / total for low, n in counted.items()})
    assert sum(shares.values()) == pytest.approx(1.0)


def slow_second_moments(groups: list[Group], cap: float = 8.0) -> dict[str, float]:
    """sum_i |g_i|^2 under every baseline, from one autograd pass per trajectory."""
    scored = scored_of(groups)
    rows = []
    for t in scored:
        assert t.grade is not None
        assert t.grade.reward is not None
        mates = [o.grade.reward for o in scored if o.group_id == t.group_id and o.grade and o.grade.reward is not None]
        spread = float(np.std(mates))
        if not spread:
            continue
        w = math.exp(sum(logs_of(t)))
        n = sum(float(g.square().sum()) for g in slow_gradient(MODEL, t))
        factor = 1 / (len(scored) * int(t.mask_T.sum()) * spread)
        rows.append((t.group_id, t.grade.reward, w, n, factor))
    totals = dict.fromkeys(("none", "mean", "leave_one_out", "opob_paper", "opob_applied", "opob_reference"), 0.0)
    for group, reward, w, n, factor in rows:
        mates = [r for r in rows if r[0] == group]

        def weighted(v: Any, mates: Any = mates) -> float:
            return float(sum(v(*r[2:]) * r[1] for r in mates) / sum(v(*r[2:]) for r in mates))

        baselines = {
            "none": 0.0,
            "mean": weighted(lambda w, n, f: 1.0),
            "leave_one_out": (sum(r[1] for r in mates) - reward) / (len(mates) - 1),
            "opob_paper": weighted(lambda w, n, f: w**2 * n),
            "opob_applied": weighted(lambda w, n, f: (min(w, cap) * f) ** 2 * n),
            "opob_reference": weighted(lambda w, n, f: min(w, cap) ** 2 * w**2 * n),
        }
        for name, b in baselines.items():
            totals[name] += (min(w, cap) * factor * (reward - b)) ** 2 * n
    return totals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drift", [0.0, 1.5])
def test_second_moments_of_every_baseline(seed: int, drift: float) -> None:
    groups = make_groups(MODEL, REWARDS, seed=seed, drift=drift)
    metrics = examined(METHODS["vcpo"], groups).metrics
    moments = {k.removeprefix("second_moment/"): v for k, v in metrics.items() if k.startswith("second_moment/")}
    assert moments == pytest.approx(slow_second_moments(groups), rel=1e-8)
    assert moments["opob_applied"] == pytest.approx(min(moments.values()), rel=1e-12)


@pytest.mark.parametrize("weighting", ["paper", "applied", "reference"])
def test_second_moment_of_the_baseline_in_use_is_that_of_the_applied_gradients(weighting: Any) -> None:
    spec = replace(METHODS["vcpo"], opob_weighting=weighting)
    groups = make_groups(MODEL, REWARDS, drift=1.0)
    examination = Learner(MODEL, spec, training(), 1.0).examine(groups, norms=True)
    assert examination.applied_squared_norms_B is not None
    total = sum(n for n in examination.applied_squared_norms_B if not math.isnan(n))
    assert examination.result.metrics[f"second_moment/opob_{weighting}"] == pytest.approx(total, rel=1e-9)


def test_cosine_of_consecutive_gradients() -> None:
    learner = Learner(copy.deepcopy(MODEL), METHODS["tis"], training(), 1.0)
    first, second = (make_groups(MODEL, REWARDS, seed=seed, drift=1.0) for seed in (1, 2))
    a = learner.examine(first).gradient
    assert "gradient_cosine" not in learner.step(first).metrics
    b = learner.examine(second).gradient
    x, y = (np.concatenate([g[name].numpy().ravel() for name in a]) for g in (a, b))
    expected = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
    assert learner.step(second).metrics["gradient_cosine"] == pytest.approx(expected, rel=1e-9)


def test_no_metric_is_nan_when_ratios_overflow() -> None:
    groups = make_groups(MODEL, [[1, 0, 1], [0, 1]])
    groups[0].trajectories[1].logprobs_T[-1] = -math.inf
    for name in ("vcpo", "mis", "icepop", "sapo", "trust_the_batch"):
        metrics = examined(METHODS[name], groups).metrics
        assert not [key for key, value in metrics.items() if math.isnan(value)], name
