"""Per-trajectory norms and gradients of language models against one autograd pass per trajectory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradnorm_cases import (
    CPU,
    FEW_WAYS,
    WAYS,
    Way,
    assert_exact,
    in_float64,
    record_policy,
    some_trajectories,
    squared_norm,
    token_weights,
    trained_logprobs,
)
from learner_cases import FAMILIES, VOCABULARY, make_model, make_trajectory, slow_gradient
from vcpo.gradnorm import kernels, reference
from vcpo.gradnorm import recorder as recorder_module
from vcpo.gradnorm.kernels import GramCache, gram_squared_norms, single_gradient_tiles
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.sums import GradientSums, LateCoefficients
from vcpo.gradnorm.uses import OuterUse
from vcpo.learner.packing import pack
from vcpo.records import Trajectory

pytestmark = pytest.mark.usefixtures("exact_reference")


@cache
def model_of(family: str, tied: bool) -> Any:
    return make_model(family, tied)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_norms_and_gradient_equal_one_autograd_pass_per_trajectory(family: str, tied: bool) -> None:
    model = model_of(family, tied)
    trajectories = some_trajectories(model)
    weights = token_weights(trajectories)
    singles = [slow_gradient(model, t, w.tolist()) for t, w in zip(trajectories, weights, strict=True)]
    for way in WAYS:
        assert_exact(
            model, record_policy(model, trajectories, torch.from_numpy(np.concatenate(weights)), way), singles, 1e-12
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_is_exact_to_four_digits(family: str, tied: bool) -> None:
    model = make_model(family, tied, torch.float32)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(in_float64(model), t) for t in trajectories]
    for way in FEW_WAYS:
        assert_exact(model, record_policy(model, trajectories, way=way), singles, 1e-4)


@st.composite
def some_sequences(draw: st.DrawFn) -> list[Trajectory]:
    """One to six trajectories; few different tokens, any part of a response untrained."""
    trajectories = []
    for index in range(draw(st.integers(1, 6))):
        prompt, response = draw(st.integers(1, 6)), draw(st.integers(1, 12))
        given = [t for t in range(response) if draw(st.booleans())]
        if len(given) == response:
            given.pop(draw(st.integers(0, response - 1)))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        trajectory = make_trajectory(rng, 0, index, 1.0, prompt, response, given)
        distinct = draw(st.integers(1, VOCABULARY))
        trajectory.prompt_ids[:] %= distinct
        trajectory.response_ids_T[:] %= distinct
        trajectories.append(trajectory)
    return trajectories


@given(some_sequences(), st.sampled_from(FAMILIES), st.booleans(), st.sampled_from(WAYS))
@settings(max_examples=40, deadline=None)
def test_any_lengths_tokens_and_masks(trajectories: list[Trajectory], family: str, tied: bool, way: Way) -> None:
    model = model_of(family, tied)
    singles = [slow_gradient(model, t) for t in trajectories]
    assert_exact(model, record_policy(model, trajectories, way=way), singles, 1e-12)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_trajectory_of_one_token(way: Way) -> None:
    model = model_of("gpt2", True)
    single = make_trajectory(np.random.default_rng(0), 0, 0, 1.0, prompt=1, response=1)
    assert_exact(model, record_policy(model, [single], way=way), [slow_gradient(model, single)], 1e-12)


@pytest.mark.parametrize("mode", ["auto", "gram", "single"])
@pytest.mark.parametrize("tied", [True, False])
def test_sums_over_microbatches_that_share_a_coefficient(mode: Any, tied: bool) -> None:
    """The number of set 1 is known only after the third pass, that of set 0 after the second."""
    model = model_of("qwen3", tied)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    fixed, slope = [0.0, 0.0, 2.0, 0.0, -1.0, 0.0, 0.0], [1.0, -0.5, 0.3, 1.1, 0.0, 0.9, -2.0]
    sets, factors = [0, 0, 0, 1, 1, 1, 1], [0.6, -1.3]
    coefficients = [f + s * factors[index] for f, s, index in zip(fixed, slope, sets, strict=True)]
    sums = GradientSums()
    recordings = []
    for own, closes in ((slice(0, 2), ()), (slice(2, 5), (0,)), (slice(5, 7), (1,))):
        batch = pack(trajectories[own], CPU)
        with GradientRecorder(model).record(
            batch.lengths_B, batch.trained_B, device=CPU, mode=mode, sums=sums,
            late=LateCoefficients(fixed[own], slope[own], sets[own]),
        ) as recording:  # fmt: skip
            logprobs = trained_logprobs(model, batch)
            recording.backward(logprobs, torch.ones_like(logprobs))
        recordings.append((recording, torch.tensor(coefficients[own], dtype=torch.float64)))
        for index in closes:
            sums.close(index, factors[index])
    assert sums.is_complete
    for recording, coefficients_B in recordings:
        recording.add_kept_gradients(sums, coefficients_B)
    norms = torch.cat([recording.squared_norms() for recording, _ in recordings])
    assert norms.tolist() == pytest.approx([squared_norm(single) for single in singles], rel=1e-12)
    for index, (name, _) in enumerate(model.named_parameters()):
        total = sum(c * single[index] for c, single in zip(coefficients, singles, strict=True))
        torch.testing.assert_close(sums.totals[name], total, rtol=1e-11, atol=1e-11 * float(total.abs().max()))


def test_tied_embeddings_are_summed_before_the_norm() -> None:
    """Both uses point along the same rows here: the norm of the sum differs from the sum of the norms."""
    model = make_model("gpt2", tied=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "transformer.wte.weight")
    trajectories = some_trajectories(model)
    recording, _, _ = record_policy(model, trajectories)
    exact = torch.tensor([squared_norm(slow_gradient(model, t)) for t in trajectories], dtype=torch.float64)
    torch.testing.assert_close(recording.squared_norms(), exact, rtol=1e-12, atol=0)
    uses = recording._kept["transformer.wte.weight"]
    assert len(uses) == 2
    separate = sum(use.squared_norms() for use in uses)
    assert ((separate - exact).abs() / exact).max() > 1e-2


@pytest.mark.parametrize("elements", [1, 700, 2**30])
def test_chunk_size_does_not_matter(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3", True)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(recorder_module, "BATCHED_ELEMENTS", elements)
    monkeypatch.setattr(recorder_module, "SMALL_ELEMENTS", elements)
    assert_exact(model, record_policy(model, trajectories, way=Way("single", True)), singles, 1e-12)


@given(st.permutations(range(7)), st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_order_and_partition_do_not_matter(order: list[int], cut: int) -> None:
    model = model_of("gpt2", True)
    trajectories = some_trajectories(model)
    expected = record_policy(model, trajectories)[0].squared_norms()
    parts = [order[:cut], order[cut:]]
    norms = torch.cat([record_policy(model, [trajectories[i] for i in part])[0].squared_norms() for part in parts])
    torch.testing.assert_close(norms, expected[order], rtol=1e-12, atol=0)


def test_norms_scale_with_the_square_of_the_token_weights() -> None:
    model = model_of("gpt2", True)
    trajectories = some_trajectories(model)
    count = sum(int(t.mask_T.sum()) for t in trajectories)
    once, thrice = (record_policy(model, trajectories, torch.full((count,), w))[0] for w in (1.0, 3.0))
    torch.testing.assert_close(thrice.squared_norms(), 9 * once.squared_norms(), rtol=1e-12, atol=0)


def cancelling_use(size: float) -> OuterUse:
    """Rows of three trajectories. The gradient of the second is about ``size`` of the sum of its tokens' gradients."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(24, 30, generator=generator), torch.randn(24, 20, generator=generator)
    for pair in range(8, 16, 2):
        left[pair + 1] = -left[pair]
        right[pair + 1] = right[pair] + 2 * size * right[pair + 1]
    return OuterUse(left, right, Rows([8, 8, 8], CPU))


def exact_squares(use: OuterUse) -> list[float]:
    left, right = use.left_RP.double(), use.right_RQ.double()
    return [squared_norm([left[own].T @ right[own]]) for own in use.rows.slices()]


def test_gram_products_that_lose_digits_are_found() -> None:
    use = cancelling_use(3e-4)
    squares_B, doubtful = gram_squared_norms(use, GramCache())
    exact = exact_squares(use)
    assert doubtful == [1]
    assert abs(float(squares_B[1]) / exact[1] - 1) > 1e-3
    for index in (0, 2):
        assert float(squares_B[index]) == pytest.approx(exact[index], rel=1e-5)
    one_by_one = sum(float(part.square().sum()) for _, _, part in single_gradient_tiles(use, member=1))
    assert one_by_one == pytest.approx(exact[1], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["gram", "single"])
def test_nearly_cancelling_gradients_are_exact(dtype: torch.dtype, mode: Any) -> None:
    use = cancelling_use(1e-3 if dtype == torch.float32 else 1e-7)
    layer = torch.nn.Linear(20, 30, bias=False, dtype=dtype)
    with GradientRecorder(layer).record(use.rows.lengths, device=CPU, mode=mode) as recording:
        recording.backward(layer(use.right_RQ.to(dtype)), use.left_RP)
    rel = 1e-4 if dtype == torch.float32 else 1e-8
    assert recording.squared_norms().tolist() == pytest.approx(exact_squares(use), rel=rel)
    assert recording.imprecise == (1 if mode == "gram" else 0)


def test_nearly_cancelling_tokens_of_a_model_are_exact() -> None:
    """The same token over and over has the same gradient everywhere in the last layer; the weights nearly cancel."""
    model = make_model("llama", tied=False, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name or "lm_head" in name)
    rng = np.random.default_rng(0)
    ordinary, constant = (make_trajectory(rng, 0, i, 1.0, prompt=3, response=8) for i in range(2))
    constant.prompt_ids[:] = constant.response_ids_T[:] = 5
    weights = [[1.0] * 8, [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -0.9]]
    singles = [slow_gradient(in_float64(model), t, w) for t, w in zip((ordinary, constant), weights, strict=True)]
    assert squared_norm(singles[1]) < 1e-3 * squared_norm(singles[0])
    result = record_policy(model, [ordinary, constant], torch.tensor(weights).flatten(), Way("gram", True))
    assert_exact(model, result, singles, 1e-4)
    # gate, up, down and the output layer
    assert result[0].imprecise == 4


def test_reference_norms_by_hand() -> None:
    a, b, unused = (torch.nn.Parameter(torch.tensor([v])) for v in (2.0, 3.0, 5.0))
    norms = reference.squared_norms([a, b, unused], [lambda: (a * b).sum(), lambda: (4 * a).sum()])
    assert norms.tolist() == [13.0, 16.0]


def test_rows_by_hand() -> None:
    rows = Rows([2, 0, 3], CPU)
    assert rows.spread(torch.tensor([5.0, 6.0, 7.0])).tolist() == [5, 5, 7, 7, 7]
    assert rows.sums(torch.arange(5.0)[:, None]).tolist() == [[1.0], [0.0], [9.0]]
    chunk = rows.chunk([2, 0])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert chunk.gather_or_zero(values).tolist() == [[3, 4, 5], [1, 2, 0]]
    assert [c.members for c in rows.chunks(elements=20, per_member=10)] == [[1, 0], [2]]
    assert rows.repeated(2).count == 10


def test_gram_matrices_are_shared_by_the_same_rows_only() -> None:
    rows, cache = torch.ones(5, 2), GramCache()
    cache.of(rows, Rows([2, 3], CPU))
    assert cache.has(rows.detach())
    assert not cache.has(rows[:4])
    assert not cache.has(rows.clone())
