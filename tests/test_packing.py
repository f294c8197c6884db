from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from learner_cases import FAMILIES, make_groups, make_model, make_trajectory
from vcpo.learner.forward import PolicyForward, trained_token_logits
from vcpo.learner.head import run_head
from vcpo.learner.packing import PackedPlan, microbatches, pack, shares
from vcpo.models.attention import ATTENTION
from vcpo.records import Trajectory

CPU = torch.device("cpu")


def hf_logprobs(model, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Trained tokens' log-probabilities by transformers' own sdpa attention on the trajectory alone."""
    ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids_T]))
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    logprobs = torch.log_softmax(logits / temperature, -1)
    positions = len(trajectory.prompt_ids) + np.flatnonzero(trajectory.mask_T)
    return logprobs[positions - 1, ids[positions]]


def our_logprobs(model, trajectories: Sequence[Trajectory], temperature: float = 1.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Trained tokens' log-probabilities by the learner's packed pass."""
    batch = pack(trajectories, CPU)
    forward = PolicyForward(model, CPU)
    with torch.no_grad():
        rows_KD = forward.rows(batch)
    return run_head(rows_KD, forward.head, batch.targets_K, batch.trained_B, temperature).logprobs_K


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_single_sequences_through_transformers(family: str, temperature: float) -> None:
    model = make_model(family, dtype=torch.float32)
    groups = make_groups(model, [[1, 0, 1], [0, 1, 1, 0], [1]])
    trajectories = [t for g in groups for t in g.trajectories]
    packed = our_logprobs(model, trajectories, temperature)
    expected = torch.cat([hf_logprobs(model, t, temperature) for t in trajectories])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_sliding_window_equals_transformers(window: int) -> None:
    config = MistralConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(rng, 0, i, 1.0, prompt, 9) for i, prompt in enumerate((2, 7, 7, 30))]
    packed = our_logprobs(model, trajectories)
    expected = torch.cat([hf_logprobs(model, t) for t in trajectories])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def test_model_that_cannot_choose_logits_gives_the_same() -> None:
    model = make_model("qwen3")

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids, position_ids, attention_plan, use_cache):  # type: ignore[no-untyped-def]
            return self.inner(
                input_ids=input_ids, position_ids=position_ids, attention_plan=attention_plan, use_cache=use_cache
            )

    batch = pack([t for g in make_groups(model, [[1, 0], [0, 1, 1]]) for t in g.trajectories], CPU)
    torch.testing.assert_close(trained_token_logits(Plain(), batch), trained_token_logits(model, batch))


def test_layout_by_hand_leaves_given_tokens_and_prompts_untrained() -> None:
    rng = np.random.default_rng(0)
    first = make_trajectory(rng, 0, 0, 1.0, prompt=2, response=4, given=[1, 2])
    second = make_trajectory(rng, 0, 1, 1.0, prompt=1, response=1)
    batch = pack([first, second], CPU)
    assert batch.position_ids_1N.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert batch.input_ids_1N.tolist() == [
        [*first.prompt_ids, *first.response_ids_T, *second.prompt_ids, *second.response_ids_T]
    ]
    assert batch.predictors_K.tolist() == [1, 4, 6]
    assert batch.targets_K.tolist() == [first.response_ids_T[0], first.response_ids_T[3], second.response_ids_T[0]]
    assert (batch.lengths_B, batch.trained_B) == ((6, 2), (2, 1))


def test_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="group 3 response 1 has an empty prompt"):
        pack([make_trajectory(np.random.default_rng(0), 3, 1, 1.0, prompt=0)], CPU)


def test_trajectories_of_one_row_do_not_see_each_other() -> None:
    model = make_model("llama")
    rng = np.random.default_rng(0)
    first, second, other = (make_trajectory(rng, 0, i, 1.0) for i in range(3))
    row, changed = pack([first, second], CPU), pack([other, second], CPU)
    with torch.no_grad():
        logits, changed_logits = (trained_token_logits(model, batch)[5:] for batch in (row, changed))
    torch.testing.assert_close(logits, changed_logits, atol=1e-12, rtol=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None)
def test_attention_and_its_gradient_equal_a_masked_square(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    count = sum(lengths)
    shapes = {"query": 4, "key": 2, "value": 2}
    states = {
        name: torch.randn(1, heads, count, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, heads in shapes.items()
    }
    upstream = torch.randn(1, count, 4, 3, generator=generator, dtype=torch.float64)
    packed = PackedPlan(lengths, CPU).attend(0, **states, scaling=0.3, sliding_window=None)
    gradients = torch.autograd.grad((packed * upstream).sum(), list(states.values()))

    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (segment[:, None] == segment[None, :]).tril()
    key, value = (states[name].repeat_interleave(2, dim=1) for name in ("key", "value"))
    scores = (0.3 * states["query"] @ key.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
    square = (scores.softmax(-1) @ value).transpose(1, 2)
    expected = torch.autograd.grad((square * upstream).sum(), list(states.values()))
    torch.testing.assert_close(packed, square, atol=1e-12, rtol=0)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-12, rtol=0)


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 50))
@settings(deadline=None)
def test_microbatches_keep_order_and_the_limit(lengths: list[int], limit: int) -> None:
    runs = microbatches(lengths, limit)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    for run in runs:
        assert sum(lengths[i] for i in run) <= limit or len(run) == 1


@st.composite
def grouped_lengths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 5), max_size=8))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return draw(st.lists(st.integers(1, 400), min_size=len(groups), max_size=len(groups))), groups


@given(grouped_lengths(), st.integers(1, 2000), st.integers(1, 3))
@settings(deadline=None)
def test_microbatches_spread_a_group_only_if_it_fits_into_none(
    case: tuple[list[int], list[int]], limit: int, most_groups: int
) -> None:
    lengths, groups = case
    runs = microbatches(lengths, limit, groups, most_groups)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    for run in runs:
        assert sum(lengths[i] for i in run) <= limit or len(run) == 1
    for group in set(groups):
        if sum(length for length, own in zip(lengths, groups, strict=True) if own == group) <= limit:
            assert sum(group in [groups[i] for i in run] for run in runs) == 1


def test_microbatches_of_groups_by_hand() -> None:
    groups = [0, 0, 1, 1, 2, 2]
    # a group that does not fit into the rest of a run begins a new one; without groups the run is filled
    assert microbatches([4, 4, 4, 4, 4, 4], 12, groups, most_groups=9) == [[0, 1], [2, 3], [4, 5]]
    assert microbatches([4, 4, 4, 4, 4, 4], 12) == [[0, 1, 2], [3, 4, 5]]
    # a group that fits into no run takes what is left of the present one
    assert microbatches([4, 9, 9, 4], 12, [0, 1, 1, 2], most_groups=9) == [[0], [1], [2], [3]]
    assert microbatches([4, 8, 9, 3], 12, [0, 1, 1, 2], most_groups=9) == [[0, 1], [2, 3]]
    # small groups share a run whatever their number; others end it at most_groups
    assert microbatches([4] * 6, 10_000, groups) == [[0, 1, 2, 3, 4, 5]]
    assert microbatches([300] * 6, 10_000, groups) == [[0, 1], [2, 3], [4, 5]]
    assert microbatches([300] * 6, 10_000, groups, most_groups=2) == [[0, 1, 2, 3], [4, 5]]


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
@settings(deadline=None)
def test_shares_keep_order_and_are_even_up_to_one_trajectory(lengths: list[int], size: int) -> None:
    parts = shares(lengths, size)
    assert len(parts) == size
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    for part in parts:
        assert sum(lengths[i] for i in part) <= sum(lengths) / size + max(lengths, default=0)


def test_shares_by_hand() -> None:
    assert shares([5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    assert shares([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert shares([3], 2) in ([[0], []], [[], [0]])
    assert shares([], 2) == [[], []]
