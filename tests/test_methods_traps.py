"""What others fell into, at the level of the learner and of every method.

Locked elsewhere: positions of packed rows (``test_packing``: packed log-probabilities equal single sequences); a real
end token belongs to its response, and each token knows its version across weight updates (``test_sampler_engine``);
truncated sampling is refused (``test_config``); versions and ages continue after a resume (``test_resume``,
``test_learner_state``; the previous gradient: ``test_methods_gradient_control``); dropped infinite ratios rule by rule
(``test_methods_masks``) and of given tokens (``test_learner_failures``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner_cases import make_groups, make_model, slow_logprobs
from test_learner import training
from test_methods_named import assert_close, flat, learner_of, set_log_ratios, spec_of, trajectories_of
from vcpo.learner.head import run_head
from vcpo.learner.learner import Learner
from vcpo.methods.spec import METHODS
from vcpo.methods.weights import Truncate
from vcpo.records import Grade, Group

MODEL = make_model("gpt2")
REWARDS: list[list[float | None]] = [[1, 0, 0, 1], [0, 1, 2.0]]


def with_sequence_ratios(ratios: Sequence[float]) -> list[Group]:
    half = len(ratios) // 2
    groups = make_groups(MODEL, [[1.0, *[0.0] * (half - 1)]] * 2, given=False)
    for trajectory, ratio in zip(trajectories_of(groups), ratios, strict=True):
        count = len(trajectory.response_ids_T)
        set_log_ratios(trajectory, [math.log(ratio) / count] * count)
    return groups


def test_truncation_does_not_hide_a_collapse_from_the_step_size() -> None:
    groups = with_sequence_ratios([400, 50, 9, 6, 4, 3, 3, 3])
    spec = replace(METHODS["vcpo"], weight=Truncate(2.0))
    result = Learner(copy.deepcopy(MODEL), spec, training(), 1.0).step(groups)
    assert result.weights_B == pytest.approx([2.0] * 8)
    assert result.metrics["ess"] == pytest.approx(0.176, abs=1e-3)
    assert result.metrics["ess_applied"] == pytest.approx(1.0)
    assert result.metrics["step_scale"] == pytest.approx(math.sqrt(result.metrics["ess"]))


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_sample_size_is_of_the_minibatch_and_not_a_mean_over_its_parts(max_tokens: int) -> None:
    groups = with_sequence_ratios([1, 1, 1, 1, 2, 2, 2, 2])
    metrics = learner_of(METHODS["vcpo"], max_tokens_per_microbatch=max_tokens).examine(groups).result.metrics
    assert metrics["ess"] == pytest.approx(0.9, rel=1e-6)


def test_cap_by_sample_size_is_of_the_minibatch_and_not_of_its_parts() -> None:
    """Each trajectory alone has equal token ratios: its own sample size is 1, which would leave some a weight of 1."""
    groups = make_groups(MODEL, [[1, 0, 0.5, 0], [0, 1, 0.5, 1]], given=False)
    logs = []
    for number, trajectory in enumerate(trajectories_of(groups)):
        own = [math.log(2.0) * (number % 2)] * len(trajectory.response_ids_T)
        set_log_ratios(trajectory, own)
        logs += own
    ratios = np.exp(logs)
    e = ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)
    result = learner_of(METHODS["trust_the_batch"], max_tokens_per_microbatch=1).examine(groups).result
    assert e < 0.95
    assert result.weights_B == pytest.approx([e] * 8, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "reinforce"])
def test_float_noise_in_equal_rewards_is_no_signal(name: str) -> None:
    noisy = 7 * 0.1
    assert noisy != 0.7
    equal, nearly = ([[1, 0, 1], [0.7, value, 0.7, 0.7]] for value in (0.7, noisy))
    expected, ours = (learner_of(spec_of(name)).examine(make_groups(MODEL, r, drift=0.8)) for r in (equal, nearly))
    assert expected.result.skipped == ours.result.skipped
    assert set(expected.gradient) == set(ours.gradient)
    assert all(gradient.equal(ours.gradient[key]) for key, gradient in expected.gradient.items())
    assert ours.result.advantages_B[3:] == [0.0] * 4


@pytest.mark.parametrize("name", METHODS)
def test_a_response_that_could_not_be_scored_is_not_one_with_reward_zero(name: str) -> None:
    with_them = make_groups(MODEL, REWARDS, drift=0.4)
    for group in with_them:
        stranger = copy.deepcopy(group.trajectories[-1])
        stranger.index, stranger.grade = 9, Grade(None)
        stranger.logprobs_T -= np.float32(3.0)
        group.trajectories.insert(1, stranger)
    without = make_groups(MODEL, REWARDS, drift=0.4)
    ours, expected = (learner_of(spec_of(name)).examine(groups) for groups in (with_them, without))
    assert ours.result.skipped == expected.result.skipped
    if expected.gradient:
        assert_close(flat(ours.gradient), flat(expected.gradient))
    of_all = ("unscored", "packed_tokens", "response_length", "length_limited_share", "accuracy")
    for key, value in expected.result.metrics.items():
        if key not in of_all and not key.startswith(("staleness", "lag")):
            assert ours.result.metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_energies_are_of_the_distribution_that_was_sampled_from(temperature: float) -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 3, 1])
    head = run_head(rows, None, targets, [2, 3], temperature, wants_energies=True)
    expected = []
    for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
        masses = [math.exp(x / temperature) for x in row]
        p = [m / sum(masses) for m in masses]
        expected.append(sum((float(v == target) - q) ** 2 for v, q in enumerate(p)))  # |onehot - p|^2
    assert head.energies_K is not None
    assert head.energies_K.tolist() == pytest.approx(expected, rel=1e-12)


def test_an_end_token_is_trained_wherever_it_stands_and_only_the_mask_decides() -> None:
    groups = make_groups(MODEL, REWARDS, drift=0.0)
    trajectory = groups[0].trajectories[3]
    end = MODEL.config.eos_token_id
    trajectory.response_ids_T[[0, -1]] = end
    logprobs = slow_logprobs(MODEL, trajectory.prompt_ids, trajectory.response_ids_T).detach().numpy()
    trajectory.logprobs_T[:] = logprobs - 0.125
    trained = int(trajectory.mask_T.sum())
    result = learner_of(METHODS["vcpo"]).examine(groups).result
    assert result.log_ratios_B[3] == pytest.approx(0.125 * trained, abs=1e-5)
    trajectory.mask_T[-1] = False
    result = learner_of(METHODS["vcpo"]).examine(groups).result
    assert result.log_ratios_B[3] == pytest.approx(0.125 * (trained - 1), abs=1e-5)
