"""Every named method: the learner's gradient against the papers' coefficients (``method_cases``) and autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner_cases import PLAIN_ATTENTION, make_groups, make_model
from method_cases import CONSTANT_LENGTH, SLOW, Batch, Coefficients, Response, grpo, standardised, vcpo
from vcpo.config import TrainingSection
from vcpo.learner.learner import Learner
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.records import Group, Trajectory

MODEL = make_model("gpt2")
TWO_GROUPS: list[list[float | None]] = [[1, 0, 0.5, 0], [0, 2, 1]]
SKIPPED = "the method gives every token weight 0"


@dataclass(frozen=True)
class Case:
    """A minibatch, the same in plain numbers, and what autograd says of it.

    scored: where the responses of ``batch`` are among all trajectories.
    gradients: of the log-probability of every trained token of ``batch``, (tokens, parameters).
    """

    groups: list[Group]
    batch: Batch
    scored: list[int]
    gradients: Tensor

    def parts(self, coefficients: Coefficients) -> list[Tensor]:
        """The gradients of the responses, coefficients included."""
        lengths = [r.length for r in self.batch]
        pairs = zip(coefficients, self.gradients.split(lengths), strict=True)
        return [torch.tensor(u, dtype=torch.float64) @ gradients for u, gradients in pairs]


def spec_of(name: str) -> MethodSpec:
    return replace(METHODS[name], constant_length=CONSTANT_LENGTH)


def learner_of(spec: MethodSpec, model: Any = MODEL, **options: Any) -> Learner:
    section = TrainingSection.model_validate({"learning_rate": 1e-3, "max_grad_norm": 1e9, **options})
    return Learner(model, spec, section, 1.0)


def distributions(trajectory: Trajectory) -> Tensor:
    """(T, V) log-probabilities at the response's positions, by one pass over this trajectory alone."""
    ids = torch.tensor([[*trajectory.prompt_ids.tolist(), *trajectory.response_ids_T.tolist()]])
    implementation = MODEL.config._attn_implementation
    MODEL.set_attn_implementation(PLAIN_ATTENTION)
    try:
        logits: Tensor = MODEL(input_ids=ids, use_cache=False).logits[0]
    finally:
        MODEL.set_attn_implementation(implementation)
    return torch.log_softmax(logits[len(trajectory.prompt_ids) - 1 : -1], dim=-1)


def set_log_ratios(trajectory: Trajectory, logs: Sequence[float]) -> None:
    """Change the sampler's record so that the trained tokens have these log-ratios."""
    trained = np.flatnonzero(trajectory.mask_T)
    with torch.no_grad():
        logprobs = distributions(trajectory)
    for position, log in zip(trained, logs, strict=True):
        trajectory.logprobs_T[position] = float(logprobs[position, trajectory.response_ids_T[position]]) - log


def case_of(groups: list[Group]) -> Case:
    batch, scored, gradients = [], [], []
    trajectories = [(group, t) for group in groups for t in group.trajectories]
    for number, (group, trajectory) in enumerate(trajectories):
        assert trajectory.grade is not None
        trained = np.flatnonzero(trajectory.mask_T).tolist()
        if trajectory.grade.reward is None or not trained:
            continue
        table = distributions(trajectory)
        probabilities = table.exp().tolist()
        tokens = [int(trajectory.response_ids_T[t]) for t in trained]
        pi = [table[t, token] for t, token in zip(trained, tokens, strict=True)]
        own = []
        for log_pi in pi:
            parameters = list(MODEL.parameters())
            pieces = torch.autograd.grad(
                log_pi, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            own.append(torch.cat([piece.flatten() for piece in pieces]))
        gradients += own
        scored.append(number)
        batch.append(
            Response(
                group=group.id,
                reward=float(trajectory.grade.reward),
                mu=[float(trajectory.logprobs_T[t]) for t in trained],
                pi=[log_pi.item() for log_pi in pi],
                energies=[
                    1 - 2 * probabilities[t][token] + sum(p * p for p in probabilities[t])
                    for t, token in zip(trained, tokens, strict=True)
                ],
                square=float(sum(own[1:], own[0]).square().sum()),
            )
        )
    return Case(groups, batch, scored, torch.stack(gradients))


def trajectories_of(groups: list[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


def drifted() -> list[Group]:
    """Many distances from the sampler: the last group is as near to it as the narrowest bands."""
    rewards: list[list[float | None]] = [[1, 0, 0, 1], [0.5, 0.5, 0.5], [0, 1, None, 2.0], [3.0], [1, 0, 0.25, 0, 1]]
    groups = make_groups(MODEL, rewards, drift=0.6)
    rng = np.random.default_rng(3)
    for trajectory, target in zip(groups[-1].trajectories, (2e-4, -2e-4, 0.0015, -0.0008, 0.0006), strict=True):
        noise = rng.normal(0, 0.3, int(trajectory.mask_T.sum()))
        set_log_ratios(trajectory, (noise - noise.mean() + target).tolist())
    far = groups[0].trajectories[1]  # one token, in a response that is worse than the others
    set_log_ratios(far, [*rng.normal(0, 0.1, int(far.mask_T.sum()) - 1).tolist(), -8.0])
    return groups


def negative_and_mixed() -> list[Group]:
    groups = make_groups(MODEL, [[-1, -0.5, -2, 0.25], [-1, 1, -1], [-0.5, -0.5]], seed=4, drift=1.0)
    for trajectory in trajectories_of(groups):
        trajectory.versions_T[:] = np.arange(len(trajectory.versions_T)) // 2
    return groups


def extreme() -> list[Group]:
    groups = make_groups(MODEL, TWO_GROUPS, seed=5)
    for number, trajectory in enumerate(trajectories_of(groups)):
        shares = np.linspace(0.5, 1.5, int(trajectory.mask_T.sum()))
        set_log_ratios(trajectory, ((-1) ** number * 30 * shares / shares.sum()).tolist())
    return groups


def infinite(log_ratio: float, index: int) -> list[Group]:
    """The reward of response 0 is above the mean of its group, that of response 1 below it."""
    groups = make_groups(MODEL, TWO_GROUPS, seed=6)
    groups[0].trajectories[index].logprobs_T[-1] = -log_ratio
    return groups


CASES: dict[str, Any] = {
    "drift, None rewards, given tokens": drifted,
    "negative rewards, several versions": negative_and_mixed,
    "on the policy": lambda: make_groups(MODEL, TWO_GROUPS, seed=2, drift=0.0),
    "extreme ratios": extreme,
    "one trajectory": lambda: make_groups(MODEL, [[1.0]], drift=0.6),
    "equal rewards": lambda: make_groups(MODEL, [[1, 1, 1], [-0.3, -0.3]], drift=0.6),
    "infinite ratio, A > 0": lambda: infinite(math.inf, 0),
    "infinite ratio, A < 0": lambda: infinite(math.inf, 1),
    "ratio 0, A > 0": lambda: infinite(-math.inf, 0),
    "ratio 0, A < 0": lambda: infinite(-math.inf, 1),
}


@lru_cache
def case(name: str) -> Case:
    return case_of(CASES[name]())


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name, _ in MODEL.named_parameters()])


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert float((ours - expected).norm()) <= 1e-9 * float(expected.norm())


def assert_matches(given: Case, coefficients: Coefficients, spec: MethodSpec, **options: Any) -> None:
    """The learner's gradient is minus the sum of u grad log pi; or none, for the reason that the u have."""
    examination = learner_of(spec, **options).examine(given.groups)
    skipped, values = examination.result.skipped, [u for row in coefficients for u in row]
    broken = [r for r in trajectories_of(given.groups) if np.isinf(r.logprobs_T[r.mask_T]).any()]
    if not all(math.isfinite(u) for u in values):
        assert skipped is not None
        assert broken[0].name in skipped
    elif not any(values) and any(u for row in grpo(given.batch) for u in row):
        assert skipped == SKIPPED
    else:
        assert skipped is None
        parts = given.parts(coefficients)
        assert_close(flat(examination.gradient), -sum(parts[1:], parts[0]))
    if skipped is not None:
        assert not examination.gradient


def test_every_method_has_a_slow_counterpart() -> None:
    assert list(SLOW) == list(METHODS)


@pytest.mark.parametrize("where", CASES)
@pytest.mark.parametrize("name", METHODS)
def test_gradient_equals_the_papers_coefficients_times_scores(name: str, where: str) -> None:
    given = case(where)
    assert_matches(given, SLOW[name](given.batch), spec_of(name))


def test_no_two_methods_are_the_same_on_these_minibatches() -> None:
    seen: dict[str, str] = {}
    for name, slow in SLOW.items():
        numbers = [slow(case(where).batch) for where in list(CASES)[:2]]
        seen.setdefault(str(numbers), name)
    # differ by their learning rate and by what happens to the whole gradient
    assert set(METHODS) - set(seen.values()) == {"low_lr_tis", "gac"}


@pytest.mark.parametrize("max_tokens", [1, 25])
@pytest.mark.parametrize("name", METHODS)
def test_gradient_does_not_depend_on_the_microbatches(name: str, max_tokens: int) -> None:
    given = case("drift, None rewards, given tokens")
    whole = learner_of(spec_of(name), max_tokens_per_microbatch=10_000).examine(given.groups)
    cut = learner_of(spec_of(name), max_tokens_per_microbatch=max_tokens).examine(given.groups)
    assert_close(flat(cut.gradient), flat(whole.gradient))
    for key in ("weights_B", "advantages_B", "log_ratios_B"):
        assert getattr(cut.result, key) == pytest.approx(getattr(whole.result, key), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_norms_of_the_applied_gradients_equal_autograd(name: str) -> None:
    given = case("drift, None rewards, given tokens")
    plain = learner_of(spec_of(name)).examine(given.groups)
    measured = learner_of(spec_of(name), max_tokens_per_microbatch=40).examine(given.groups, norms=True)
    assert_close(flat(measured.gradient), flat(plain.gradient))
    assert measured.applied_squared_norms_B is not None
    assert len(measured.applied_squared_norms_B) == len(trajectories_of(given.groups))
    expected = dict.fromkeys(range(len(measured.applied_squared_norms_B)), 0.0)
    for index, part in zip(given.scored, given.parts(SLOW[name](given.batch)), strict=True):
        expected[index] = float(part.square().sum())
    for index, squared_norm in enumerate(measured.applied_squared_norms_B):
        if expected[index]:
            assert squared_norm == pytest.approx(expected[index], rel=1e-9)
        else:
            assert math.isnan(squared_norm) or squared_norm == 0


def test_examining_changes_nothing() -> None:
    before = copy.deepcopy(MODEL.state_dict())
    learner = learner_of(METHODS["vcpo"])
    first = learner.examine(case("extreme ratios").groups)
    second = learner.examine(case("extreme ratios").groups)
    assert flat(first.gradient).equal(flat(second.gradient))
    assert first.result.metrics == second.result.metrics
    assert all(value.equal(before[key]) for key, value in MODEL.state_dict().items())
    assert learner.version == 0
    assert all(p.grad is None for p in MODEL.parameters())


def test_opob_that_leaves_its_own_reward_out() -> None:
    for where in list(CASES)[:4]:
        given = case(where)
        spec = replace(METHODS["vcpo"], opob_leave_one_out=True)
        for max_tokens in (25, 10_000):
            assert_matches(given, vcpo(given.batch, leave_own_out=True), spec, max_tokens_per_microbatch=max_tokens)


def out_of_band(away: bool) -> Case:
    """Token ratios of e^5; ``away``: of e^-5 where the advantage is negative, so that a step would go further away."""
    groups = make_groups(MODEL, [[1, 0, 0.5], [0.5, 0.5], [-1, 1]], seed=8)
    signs = standardised(case_of(groups).batch)
    for trajectory, advantage in zip(trajectories_of(groups), signs, strict=True):
        set_log_ratios(trajectory, [-5.0 if away and advantage < 0 else 5.0] * int(trajectory.mask_T.sum()))
    return case_of(groups)


PPO = ["ppo", "grpo_clip", "opsm"]  # the dual clip drops high ratios where the advantage is negative
HIGH = ["mis", "mis_token", "mis_geometric", "icepop", "seq_mask_tis", "decoupled_ppo", "copc", *PPO]
AWAY = ["gspo", "gmpo", "aspo", "m2po", "icepop", "seq_mask_tis", "copc", *PPO]


@pytest.mark.parametrize("away", [False, True])
def test_step_of_which_a_mask_leaves_nothing_is_skipped_but_is_no_failure(away: bool) -> None:
    given = out_of_band(away)
    names = [name for name, slow in SLOW.items() if not any(u for row in slow(given.batch) for u in row)]
    assert set(names) == set(AWAY if away else HIGH)
    for name in names:
        model = copy.deepcopy(MODEL)
        learner = learner_of(spec_of(name), model, max_skipped_steps=0, max_tokens_per_microbatch=25)
        for _ in range(3):
            result = learner.step(given.groups)
            assert result.skipped == SKIPPED, name
            assert result.metrics["skipped"] == 1
            assert result.metrics["learning_rate"] == 0
            assert 0 < result.metrics["masked_share"] <= 1
            assert all(math.isfinite(value) for value in result.metrics.values()), name
        assert learner.version == 3
        pairs = zip(model.parameters(), MODEL.parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs), name


def test_masked_tokens_count_in_every_average() -> None:
    """Out of the first of two groups everything is masked: the other one's gradient stays as small as it was."""
    groups = make_groups(MODEL, [[1, 0], [1, 0]], seed=9, drift=0.0)
    whole = case_of(copy.deepcopy(groups))
    for trajectory in groups[0].trajectories:
        set_log_ratios(trajectory, [5.0] * int(trajectory.mask_T.sum()))
    for name in HIGH:
        full = learner_of(spec_of(name)).examine(whole.groups)
        masked = learner_of(spec_of(name)).examine(groups)
        part = whole.parts(SLOW[name](whole.batch))
        assert_close(flat(full.gradient), -sum(part[1:], part[0]))
        assert_close(flat(masked.gradient), -(part[2] + part[3]))


def test_low_lr_tis_makes_the_steps_of_tis_at_a_tenth_of_the_learning_rate() -> None:
    given = case("negative rewards, several versions")
    rates = [
        learner_of(METHODS[name], copy.deepcopy(MODEL)).step(given.groups).metrics["learning_rate"]
        for name in ("tis", "low_lr_tis")
    ]
    assert rates == pytest.approx([1e-3, 1e-4])
