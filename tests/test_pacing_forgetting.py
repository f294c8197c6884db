"""The prefix-forgetting score: re-scored log-probabilities of what was written before the weights last changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from vcpo.config import ModelSection
from vcpo.learner.forward import trained_token_logits
from vcpo.learner.packing import pack
from vcpo.models.loading import load_model
from vcpo.pipeline.prefix_forgetting import PrefixForgetting, prefix_of
from vcpo.records import Group, Problem, StopReason, Trajectory


@pytest.fixture
def model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return load_model(ModelSection.model_validate({"init": sizes}), 0)[0]


def response(versions: Sequence[int], logprobs: Sequence[float], ids: Sequence[int] | None = None) -> Trajectory:
    return Trajectory(
        group_id=0,
        index=0,
        prompt_ids=np.array([1, 2]),
        response_ids_T=np.array(ids or [3] * len(versions)),
        mask_T=np.ones(len(versions), dtype=bool),
        logprobs_T=np.array(logprobs, dtype=np.float32),
        versions_T=np.array(versions),
        stop_reason=StopReason.EOS,
        start_version=versions[0] if len(versions) else 0,
    )


def group_of(*trajectories: Trajectory) -> Group:
    return Group(0, Problem("0", ""), 1, list(trajectories))


def test_the_prefix_ends_where_the_last_version_begins() -> None:
    prefix = prefix_of(response([1, 1, 2, 4, 4], [-1.0, -2.0, -3.0, -4.0, -5.0]))
    assert prefix.versions_T.tolist() == [1, 1, 2]
    assert prefix.logprobs_T.tolist() == [-1.0, -2.0, -3.0]
    assert len(prefix_of(response([3, 3], [-1.0, -1.0])).response_ids_T) == 0
    assert len(prefix_of(response([], [])).response_ids_T) == 0


def test_the_score_is_the_mean_absolute_change_over_the_prefix_tokens_of_the_group(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token now has probability 1 / vocabulary
    uniform = -math.log(model.config.vocab_size)
    drifted = response([0, 0, 1], [uniform + 0.5, uniform - 0.25, uniform + 9])
    quiet = response([0, 1], [uniform, uniform + 9])
    whole = response([1, 1], [uniform + 9, uniform + 9])
    given_token = response([0, 0, 1], [uniform + 9, uniform - 1.5, uniform])
    given_token.mask_T[0] = False
    scores = PrefixForgetting(model, 1.0, None)(
        [group_of(drifted, quiet), group_of(whole), group_of(given_token, whole)]
    )
    assert scores == pytest.approx([0.75 / 3, 0.0, 1.5], abs=1e-6)


@pytest.mark.parametrize("max_tokens", [None, 1, 9])
def test_nothing_is_forgotten_by_the_policy_that_wrote_it(model: PreTrainedModel, max_tokens: int | None) -> None:
    """Scores of the model's own log-probabilities at a temperature are 0, and known after a known change of them."""
    temperature = 0.7
    trajectories = [response([0] * 4 + [1], [0.0] * 5, ids=[3, 5, 7, 2 + i, 4]) for i in range(3)]
    for trajectory in trajectories:
        with torch.no_grad():
            logits = trained_token_logits(model, pack([trajectory], torch.device("cpu"))) / temperature
        own = logits.log_softmax(-1)[range(5), trajectory.response_ids_T]
        trajectory.logprobs_T = own.numpy()
    trajectories[2].logprobs_T = trajectories[2].logprobs_T + np.array([0.4, -0.4, 0.0, 0.0, 7.0], dtype=np.float32)
    scores = PrefixForgetting(model, temperature, max_tokens)([group_of(t) for t in trajectories])
    assert scores == pytest.approx([0.0, 0.0, 0.2], abs=1e-5)
