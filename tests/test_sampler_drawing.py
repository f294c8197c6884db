import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.records import SamplingParams
from vcpo.sampler.drawing import draw, uniforms

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor([[math.log(p) for p in PROBS]])
MASK = 2**64 - 1
CHI_SQUARE_99 = {1: 6.635, 2: 9.210, 3: 11.345, 4: 13.277}  # 99% quantiles by degrees of freedom


def params(**values: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **values)  # type: ignore[arg-type]


def draw_many(logits: torch.Tensor, count: int, chosen: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    u = uniforms(np.arange(count).astype(np.uint64), np.zeros(count, dtype=np.int64))
    ids, logprobs = draw(logits.expand(count, -1), torch.from_numpy(u), chosen)
    return ids.numpy(), logprobs.numpy()


def assert_frequencies(ranks: np.ndarray, probabilities: np.ndarray) -> None:
    expected = len(ranks) * probabilities
    counts = np.bincount(ranks, minlength=len(expected))
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_99[len(expected) - 1]


def python_uniform(seed: int, position: int) -> float:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    return (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


@given(st.integers(0, MASK), st.integers(0, 10**6))
def test_uniforms_are_splitmix64_of_seed_and_position(seed: int, position: int) -> None:
    value = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0]
    assert value == python_uniform(seed, position)
    assert 0 <= value < 1


def test_uniforms_of_neighbouring_seeds_and_positions_look_independent() -> None:
    seeds, positions = np.meshgrid(np.arange(100), np.arange(100))
    u = uniforms(seeds.ravel().astype(np.uint64), positions.ravel())
    gap = np.abs(np.sort(u) - (np.arange(len(u)) + 0.5) / len(u)).max()
    assert gap * math.sqrt(len(u)) < 1.63  # Kolmogorov-Smirnov, 99%
    table = u.reshape(100, 100)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_a_token_is_drawn_by_inverting_the_cumulative_distribution() -> None:
    u = torch.tensor([0.0, 0.39, 0.41, 0.69, 0.71, 0.84, 0.86, 0.94, 0.96, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = draw(LOGITS.expand(len(u), -1), u, params())
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert logprobs.tolist() == pytest.approx([math.log(PROBS[i]) for i in ids.tolist()], abs=1e-6)


def test_frequencies_match_the_probabilities() -> None:
    ids, _ = draw_many(LOGITS, 20_000, params())
    assert_frequencies(ids, np.array(PROBS))


def test_temperature_divides_the_logits_and_is_in_the_logprob() -> None:
    ids, logprobs = draw_many(LOGITS, 20_000, params(temperature=2.0))
    expected = np.sqrt(PROBS) / np.sqrt(PROBS).sum()  # p^(1/2), renormalised
    assert_frequencies(ids, expected)
    np.testing.assert_allclose(logprobs, np.log(expected)[ids], atol=1e-6)


def test_temperature_zero_takes_the_largest_logit_with_certainty() -> None:
    ids, logprobs = draw_many(LOGITS.flip(1), 4, params(temperature=0.0))
    assert ids.tolist() == [4] * 4
    assert logprobs.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        (params(top_k=2), 2),
        (params(top_k=99), 5),
        (params(top_p=0.05), 1),
        (params(top_p=0.5), 2),  # 0.4 does not reach 0.5: the token that crosses belongs to the set
        (params(top_p=0.86), 4),
        (params(top_k=3, top_p=0.8), 2),  # of the renormalised 0.4706, 0.3529, 0.1765
    ],
)
def test_truncation_keeps_the_right_tokens_and_renormalises(chosen: SamplingParams, kept: int) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])  # token j has probability PROBS[order[j]]
    ids, logprobs = draw_many(LOGITS[:, order], 4000, chosen)
    ranks = order.numpy()[ids]
    expected = np.array(PROBS[:kept]) / sum(PROBS[:kept])
    assert set(ranks) == set(range(kept))
    np.testing.assert_allclose(logprobs, np.log(expected)[ranks], atol=1e-6)
    if kept > 1:
        assert_frequencies(ranks, expected)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    ids, logprobs = draw_many(torch.zeros(1, 6), 200, params(top_k=2))
    assert set(ids) == {0, 1}
    np.testing.assert_allclose(logprobs, math.log(0.5), atol=1e-6)


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    ids, _ = draw(logits.expand(3, -1), u, params())
    assert ids.tolist() == [1, 3, 3]


@pytest.mark.parametrize("chosen", [params(), params(temperature=0.0), params(top_p=0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(chosen: SamplingParams, bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    ids, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), chosen)
    assert torch.isfinite(logprobs).tolist() == [False, True]
    assert ids.max() < 3


def test_tail_of_a_large_vocabulary_keeps_its_probability() -> None:
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = math.log(200_000)  # half of the mass; each other token has 2.5e-6
    u = torch.linspace(0.5001, 0.9999, 20, dtype=torch.float64)
    ids, _ = draw(logits.expand(20, -1), u, params())
    expected = (u.numpy() - 0.5) / 0.5 * 200_000
    np.testing.assert_allclose(ids.numpy(), expected, atol=2)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    st.floats(0.2, 3),
    st.integers(0, 12),
    st.floats(0.05, 1),
    st.integers(0, 2**63 - 1),
)
def test_logprob_is_that_of_the_distribution_drawn_from(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    u = python_uniform(seed, 0)
    chosen = params(temperature=temperature, top_k=top_k, top_p=top_p)
    ids, logprobs = draw(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), chosen)
    id = int(ids[0])
    scaled = [x / temperature for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))[: top_k or None]
    probs = [math.exp(scaled[i] - max(scaled)) for i in ranked]
    total, mass, kept = sum(probs), 0.0, []
    for i, p in zip(ranked, probs, strict=True):
        if kept and mass / total >= top_p - 1e-6:
            break
        kept.append(i)
        mass += p
    boundary = any(abs(sum(probs[: k + 1]) / total - top_p) < 1e-5 for k in range(len(probs)))
    if not boundary:
        assert id in kept
        assert float(logprobs[0]) == pytest.approx(scaled[id] - max(scaled) - math.log(mass), abs=1e-4)
