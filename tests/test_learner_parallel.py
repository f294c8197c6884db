"""Two learner processes make the update that one makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
import torch

from parallel_cases import Case, Outcome, Ranks, outcome

KINDS = ("replicated", "sharded")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


CASES: dict[str, Case] = {
    "vcpo": Case(),
    "vcpo, a pass for each trajectory": Case(max_tokens=1),
    "vcpo, shared baseline": Case(spec={"opob_scope": "minibatch", "scale_rewards": "none"}),
    "vcpo, single gradients": Case(options={"gradient_norm_mode": "single"}),
    "vcpo, qwen2": Case(family="qwen2"),
    "vcpo, untied qwen2": Case(family="qwen2", tied=False, max_tokens=1000),
    "vcpo, recomputed activations": Case(checkpointing=True, steps=1),
    "vcpo, float32": Case(family="qwen2", dtype=torch.float32),
    "one group": Case(rewards=((1, 0, 0, 1, 0, 1),)),
    "three groups": Case(rewards=((1, 0, 0, 1), (0, 1, 1), (1, 0, 2)), tied=False),
    "an idle rank": Case(method="reinforce", rewards=((1, 0, 0),)),
    "tis": Case(method="tis"),
    "tis, one pass": Case(method="tis", family="qwen2", tied=False, max_tokens=1000),
    "tis, float32": Case(method="tis", family="qwen2", dtype=torch.float32),
    "tis_token": Case(method="tis_token", tied=False),
    # weights decay all the same, which the next step has to see
    "no active trajectory": Case(rewards=((1, 1), (0, 0, 0)), steps=3),
    "NaN early": Case(broken=((), (1,)), tied=False, steps=3),
    "NaN late": Case(broken=((9,),), tied=False),
    "tis, NaN early": Case(method="tis", broken=((), (1,)), tied=False, steps=3),
    "tis, NaN late": Case(method="tis", broken=((9,),), tied=False),
}


@lru_cache
def alone(name: str) -> Outcome:
    return outcome(CASES[name], "one")


def assert_same(one: Outcome, both: list[Outcome], rel: float) -> None:
    for other in both:
        for name, weights in one.weights.items():
            distance = np.linalg.norm(other.weights[name] - weights)
            assert distance <= rel * np.linalg.norm(weights), name
        for expected, result in zip(one.results, other.results, strict=True):
            assert result.skipped == expected.skipped
            assert result.metrics == pytest.approx(expected.metrics, rel=rel, abs=1e-6, nan_ok=True)
            names = ["log_ratios_B", "weights_B", "advantages_B"]
            if not expected.skipped:  # which norms there are until then depends on the passes
                names.append("squared_norms_B")
            for name in names:
                values, right = getattr(result, name) or [], getattr(expected, name) or []
                assert values == pytest.approx(right, rel=rel, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_same_updates_as_one(ranks: Ranks, name: str, kind: str) -> None:
    is_exact = CASES[name].dtype == torch.float64 and CASES[name].family == "gpt2"
    assert_same(alone(name), ranks.run(outcome, CASES[name], kind), 1e-9 if is_exact else 1e-6)
