"""The chunked output layer against the logits of everything at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner_cases import make_groups, make_model
from vcpo.config import TrainingSection
from vcpo.gradnorm import recorder as recorder_module
from vcpo.learner import head as head_module
from vcpo.learner.head import add_head_gradients, bypassed, run_head
from vcpo.learner.learner import Learner
from vcpo.methods.spec import METHODS

CPU = torch.device("cpu")
VOCABULARY = 37  # no other size in these tests is the same


@contextmanager
def chunks_of(rows: int, vocabulary: int = VOCABULARY) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "CHUNK_ELEMENTS", rows * vocabulary)
        yield


class Collected:
    """A consumer that keeps every trajectory's gradient of weight and bias."""

    def __init__(self, count: int) -> None:
        self.gradients: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self.is_everything: list[bool] = []

    def rows(self, x_RD: Tensor, g_RV: Tensor, lengths: Sequence[int], first: int, is_everything: bool) -> None:
        parts = zip(x_RD.split(list(lengths)), g_RV.split(list(lengths)), strict=True)
        for index, (x, g) in enumerate(parts, first):
            add_head_gradients(self.gradients[index], x.clone(), g.clone())
        self.is_everything.append(is_everything)

    def single(self, gradients: dict[str, Tensor], index: int) -> None:
        assert not self.gradients[index]
        self.gradients[index] = gradients


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.integers(1, 20),
    st.sampled_from([1.0, 0.6]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_any_chunk_size_equals_full_logits(
    lengths: list[int], rows: int, temperature: float, has_bias: bool, is_logits: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    count, width = sum(lengths), VOCABULARY if is_logits else 5
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator)
    layer = nn.Linear(5, VOCABULARY, bias=has_bias, dtype=torch.float64)
    weights = torch.randn(count, generator=generator, dtype=torch.float64)
    consumer = Collected(len(lengths))
    seen: list[int] = []

    def weigh(first: int, trajectories: int, logprobs_k: Tensor) -> Tensor:
        own = slice(sum(lengths[:first]), sum(lengths[: first + trajectories]))
        assert len(logprobs_k) == own.stop - own.start
        seen.extend(range(first, first + trajectories))
        return weights[own]

    with chunks_of(rows):
        result = run_head(
            hidden, None if is_logits else layer, targets, lengths, temperature, weigh, None if is_logits else consumer
        )
    assert seen == list(range(len(lengths)))

    logprobs = torch.log_softmax((hidden if is_logits else layer(hidden)) / temperature, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(result.logprobs_K, chosen.detach(), rtol=1e-12, atol=1e-13)
    entropies = -(logprobs.exp() * logprobs).sum(1).detach()
    torch.testing.assert_close(result.entropies_K, entropies, rtol=1e-12, atol=1e-13)
    (expected,) = torch.autograd.grad((weights * chosen).sum(), hidden, retain_graph=True)
    assert result.gradient_KD is not None
    torch.testing.assert_close(result.gradient_KD, expected, rtol=1e-11, atol=1e-13)
    if not is_logits:
        for index, parts in enumerate(zip(weights.split(lengths), chosen.split(lengths), strict=True)):
            if lengths[index]:
                total = (parts[0] * parts[1]).sum()
                for name, parameter in layer.named_parameters():
                    (single,) = torch.autograd.grad(total, parameter, retain_graph=True)
                    torch.testing.assert_close(consumer.gradients[index][name], single, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_weights_are_asked_for_with_all_tokens_of_a_trajectory(rows: int) -> None:
    torch.manual_seed(0)
    layer, hidden, targets = nn.Linear(5, VOCABULARY), torch.randn(9, 5), torch.arange(9)
    lengths = [2, 6, 1]
    expected = torch.log_softmax(layer(hidden), -1).gather(1, targets[:, None])[:, 0].detach().split(lengths)
    seen: list[Tensor] = []

    def weigh(first: int, count: int, logprobs_k: Tensor) -> Tensor:
        seen.extend(logprobs_k.split(lengths[first : first + count]))
        return torch.ones_like(logprobs_k)

    consumer = Collected(3)
    with chunks_of(rows):
        run_head(hidden, layer, targets, lengths, 1.0, weigh, consumer)
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    # rows may only be kept if they are all there is
    assert consumer.is_everything == {1: [False], 4: [False, False], 100: [True]}[rows]


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_without_weights_for_a_trajectory_the_rest_is_only_measured(rows: int) -> None:
    torch.manual_seed(0)
    layer, hidden, targets = nn.Linear(5, VOCABULARY), torch.randn(9, 5), torch.arange(9)
    asked = []

    def weigh(first: int, count: int, logprobs_k: Tensor) -> Tensor | None:
        asked.append(first)
        return torch.ones_like(logprobs_k) if first + count <= 1 else None

    with chunks_of(rows):
        result = run_head(hidden, layer, targets, [2, 6, 1], 1.0, weigh, Collected(3))
    assert result.gradient_KD is None
    assert asked == ([0] if rows == 100 else [0, 1])
    torch.testing.assert_close(result.logprobs_K, run_head(hidden, layer, targets, [2, 6, 1], 1.0).logprobs_K)


def test_entropy_by_hand_and_at_the_temperature() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, -torch.inf]])
    targets = torch.zeros(2, dtype=torch.int64)
    assert run_head(logits, None, targets, [2], 1.0).entropies_K.tolist() == pytest.approx([np.log(2), 0.0])
    skewed = torch.tensor([[1.0, 0.0, -1.0]])
    p = np.exp(np.array([2.0, 0.0, -2.0]))
    p /= p.sum()
    entropy = run_head(skewed, None, targets[:1], [1], 0.5).entropies_K
    assert entropy.tolist() == pytest.approx([-(p * np.log(p)).sum()], rel=1e-5)


def test_bfloat16_logits_have_log_probabilities_in_float32() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, VOCABULARY, dtype=torch.bfloat16)
    hidden = torch.randn(4, 5, dtype=torch.bfloat16)
    result = run_head(hidden, layer, torch.arange(4), [4], 1.0, lambda *_: torch.ones(4), None)
    expected = torch.log_softmax(layer(hidden).float(), -1)[range(4), range(4)]
    assert result.logprobs_K.dtype == torch.float32
    torch.testing.assert_close(result.logprobs_K, expected)
    assert result.gradient_KD is not None
    assert result.gradient_KD.dtype == torch.bfloat16


def test_a_bypassed_layer_comes_back_after_an_exception() -> None:
    layer = nn.Linear(2, 3)
    x = torch.ones(1, 2)

    def fail() -> None:
        with bypassed(layer):
            assert layer(x) is x
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert layer(x).shape == (1, 3)
    assert "forward" not in layer.__dict__


class LargestLogits(TorchDispatchMode):
    """The most rows that a tensor over the vocabulary has had; parameters and views of them do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim()
                and tensor.shape[-1] == VOCABULARY
                and tensor.untyped_storage().data_ptr() not in self._known
            ):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


def training(**options: Any) -> TrainingSection:
    return TrainingSection.model_validate(
        {"learning_rate": 1e-3, "max_grad_norm": 1e9, "adam_epsilon": 1e-4, **options}
    )


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["vcpo", "tis"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["auto", "gram", "single"])
def test_updates_do_not_depend_on_the_chunks_and_no_more_logits_exist(
    name: str, tied: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a layer this small would be padded for batched products
    monkeypatch.setattr(recorder_module, "SMALL_ELEMENTS", 0)
    model = make_model("qwen2", tied, vocabulary=VOCABULARY)
    groups = make_groups(model, [[1, 0, 0, 1], [0, 1, 2.0], [3.0, 3.0]], temperature=0.7)
    assert max(len(t.response_ids_T) for g in groups for t in g.trajectories) > 8
    expected, rest = copy.deepcopy(model), {}
    for rows in (10_000, 14, 5, 1):
        changed = copy.deepcopy(model)
        learner = Learner(changed, METHODS[name], training(gradient_norm_mode=mode), 0.7)
        with chunks_of(rows), LargestLogits(changed) as largest:
            result = learner.step(groups)
        assert result.skipped is None
        if rows == 10_000:
            expected, rest = changed, result.metrics
            assert largest_difference(model, expected) > 1e-4
            assert largest.rows > 14
        else:
            assert largest.rows <= rows
            assert largest_difference(changed, expected) < 1e-12
            assert result.metrics == pytest.approx(rest, rel=1e-9, abs=1e-12)
