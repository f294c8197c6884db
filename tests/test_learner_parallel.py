"""Two learner processes make the update that one makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
import torch

from learner_cases import make_model
from parallel_cases import (
    Case,
    Outcome,
    Ranks,
    communication,
    ddp_trajectories,
    outcome,
    outcome_of_resumed,
    recorded,
    recorded_under_ddp,
    refusal,
    step_in_which_a_rank_dies,
    step_with_broken_backward,
)
from vcpo.gradnorm.recorder import GradientRecorder

KINDS = ("replicated", "sharded")
ALL_ACTIVE = ((1, 0, 0, 1), (0, 1, 1), (1, 0, 2))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


CASES: dict[str, Case] = {
    "vcpo": Case(),
    "vcpo, a pass for each trajectory": Case(max_tokens=1),
    "vcpo, shared baseline": Case(spec={"opob_scope": "minibatch", "scale_rewards": "none"}),
    "vcpo, untied qwen2": Case(family="qwen2", tied=False, max_tokens=1000, options={"gradient_norm_mode": "single"}),
    "vcpo, recomputed activations": Case(checkpointing=True, steps=1),
    "vcpo, float32": Case(family="qwen2", dtype=torch.float32),
    "vcpo, frozen embedding": Case(frozen="transformer.wte"),
    "vcpo, one group": Case(rewards=((1, 0, 0, 1, 0, 1),)),
    "vcpo, three groups": Case(rewards=ALL_ACTIVE, tied=False),
    "tis, untied qwen2": Case(method="tis", family="qwen2", tied=False, max_tokens=1000),
    "tis, float32": Case(method="tis", family="qwen2", dtype=torch.float32, frozen="model.layers.0"),
    "tis_token": Case(method="tis_token", tied=False),
    "a rank without a pass": Case(method="reinforce", rewards=((1, 0, 0),)),
    # weights decay all the same, which the next step has to see
    "no active trajectory": Case(rewards=((1, 1), (0, 0, 0)), steps=3),
    # in late and early passes and in a group of equal rewards; then a good step
    "vcpo, NaN": Case(broken=((10,), (1,), (5,)), tied=False, steps=4, max_tokens=20),
    "tis, NaN": Case(method="tis", broken=((10,), (1,), (5,)), tied=False, steps=4, max_tokens=20),
}


@lru_cache
def alone(name: str) -> Outcome:
    return outcome(CASES[name], "one")


def assert_same(one: Outcome, both: list[Outcome], rel: float) -> None:
    for other in both:
        for name, weights in one.weights.items():
            distance = np.linalg.norm(other.weights[name] - weights)
            # a single gradient's float32 rounding is larger than that of what averages make of it
            allowed = 10 * rel if name.endswith("previous_gradient") else rel
            assert distance <= allowed * np.linalg.norm(weights), name
        for expected, result in zip(one.results, other.results, strict=True):
            assert result.skipped == expected.skipped
            assert result.metrics == pytest.approx(expected.metrics, rel=rel, abs=1e-6, nan_ok=True)
            names = ["log_ratios_B", "weights_B"]
            if not expected.skipped:  # which norms and baselines there are until then depends on the passes
                names += ["advantages_B", "squared_norms_B"]
            for name in names:
                values, right = getattr(result, name) or [], getattr(expected, name) or []
                assert values == pytest.approx(right, rel=rel, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_same_updates_as_one(ranks: Ranks, name: str, kind: str) -> None:
    is_exact = CASES[name].dtype == torch.float64 and CASES[name].family == "gpt2"
    assert_same(alone(name), ranks.run(outcome, CASES[name], kind), 1e-9 if is_exact else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_have_float32_masters_on_their_ranks(ranks: Ranks, kind: str) -> None:
    case = Case(dtype=torch.bfloat16, family="qwen2")
    one, both = outcome(case, "one"), ranks.run(outcome, case, kind)
    masters = [name for name in one.weights if name.endswith(".master")]
    assert len(masters) == len(list(case.model().parameters()))
    for other in both:
        for name in masters:
            assert np.linalg.norm(other.weights[name] - one.weights[name]) <= 1e-6 * np.linalg.norm(one.weights[name])
            weight = torch.from_numpy(other.weights[name.removesuffix(".master")])
            assert weight.equal(torch.from_numpy(other.weights[name]).bfloat16().double())


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_the_same_weights_and_metrics_bit_for_bit(ranks: Ranks, kind: str) -> None:
    first, second = ranks.run(outcome, Case(), kind)
    assert all(np.array_equal(weights, second.weights[name]) for name, weights in first.weights.items())
    assert [result.metrics for result in first.results] == [result.metrics for result in second.results]


@pytest.mark.parametrize(
    ("kind", "later", "dtype"),
    [
        ("sharded", "sharded", torch.bfloat16),
        ("sharded", "one", torch.float64),
        ("one", "sharded", torch.float64),
    ],
)
def test_a_learner_continues_from_the_state_of_another_kind(
    ranks: Ranks, kind: str, later: str, dtype: torch.dtype
) -> None:
    case = Case(steps=3, dtype=dtype)
    one = outcome(case, "one") if kind != later else ranks.run(outcome, case, kind)[0]
    assert_same(one, ranks.run(outcome_of_resumed, case, kind, later), 0.0 if kind == later else 1e-9)


@pytest.mark.parametrize("method", ["vcpo", "tis"])
def test_replicated_model_is_reduced_once_per_parameter(ranks: Ranks, method: str) -> None:
    case = Case(method=method, rewards=ALL_ACTIVE, max_tokens=25, steps=1, tied=False)
    counted = ranks.run(communication, case, "replicated")
    rounds = max(passes for passes, _ in counted)
    assert rounds > 1
    parameters = len(list(case.model().parameters()))
    for _, counts in counted:
        # a table after every pass, one at the end, and the cosine
        assert counts == {"allreduce": parameters + rounds + 2}


@pytest.mark.parametrize("method", ["vcpo", "tis"])
def test_sharded_model_is_reduced_once_and_gathered_as_in_any_pass(ranks: Ranks, method: str) -> None:
    case = Case(method=method, rewards=ALL_ACTIVE, max_tokens=25, steps=1, tied=False)
    layers, parameters = 2, len(list(case.model().parameters()))
    for passes, counts in ranks.run(communication, case, "sharded"):
        assert passes > 1
        assert counts == {
            # layers in the forward and in the backward pass, the rest once
            "allgather": passes * (2 * layers + 1),
            # plain gradients go through FSDP2, which reduces a unit's parameters together
            "reducescatter": parameters if method == "vcpo" else layers + 1,
            # a table after every pass, one at the end, the cosine, and the norm of the whole gradient
            "allreduce": passes + 3,
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["vcpo", "tis"])
def test_gradient_that_is_not_finite_skips_the_step_on_all_ranks(ranks: Ranks, method: str, kind: str) -> None:
    expected = "the gradient of group 7 response 2 is not finite"
    if (method, kind) == ("tis", "sharded"):
        expected = "the gradient of the minibatch is not finite"
    for sentence, weights in ranks.run(step_with_broken_backward, Case(method=method, rewards=ALL_ACTIVE), kind):
        assert sentence == expected
        assert all(np.array_equal(before, after) for before, after in weights)


def test_one_at_a_time_fallback_is_for_whole_models(ranks: Ranks) -> None:
    case = Case(unknown_layer=True, options={"gradient_norm_fallback": True})
    assert_same(outcome(case, "one"), ranks.run(outcome, case, "replicated"), 1e-9)
    for sentence in ranks.run(refusal, case, "sharded"):
        assert "which a sharded model cannot do" in sentence
        assert "transformer.h.0.mlp.c_proj.weight" in sentence


def test_recorder_takes_a_ddp_module_without_its_reduction(ranks: Ranks) -> None:
    model = make_model("gpt2")
    norms, gradient = recorded(GradientRecorder(model), model, ddp_trajectories())
    for rank, (untouched, own_norms, total) in enumerate(ranks.run(recorded_under_ddp)):
        assert untouched
        assert own_norms == pytest.approx(norms[rank::2], rel=1e-10)
        assert set(total) == set(gradient)
        for name, expected in gradient.items():
            assert total[name] == pytest.approx(expected.numpy(), rel=1e-9, abs=1e-9), name


def test_a_rank_that_dies_ends_the_others(ranks: Ranks) -> None:
    (waited, message), (survived, _) = ranks.answers(step_in_which_a_rank_dies, Case(), "sharded")
    ranks.close()
    assert not survived
    assert not waited
    assert "RuntimeError" in message
