from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from vcpo.gradnorm.sums import GradientSums, LateCoefficients
from vcpo.learner.forward import trained_token_logits

from learner_cases import FAMILIES, make_groups, make_model, make_trajectory, slow_gradient
from vcpo.errors import UserError
from vcpo.gradnorm import kernels, reference
from vcpo.gradnorm import recorder as recorder_module
from vcpo.gradnorm.recorder import GradientRecorder, NormMode, Recording
from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.rules import find_rule
from vcpo.learner.packing import PackedBatch, pack
from vcpo.records import Trajectory

CPU = torch.device("cpu")


def run(model: Any, batch: PackedBatch) -> Tensor:
    logits = trained_token_logits(model, batch)
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1).gather(
        1, batch.targets_K[:, None]
    )[:, 0]


def record(
    model: Any,
    trajectories: Sequence[Trajectory],
    token_weights: Tensor | None = None,
    mode: NormMode = "auto",
    sums: GradientSums | None = None,
    late: LateCoefficients | None = None,
) -> Recording:
    batch = pack(trajectories, CPU)
    with GradientRecorder(model).record(
        batch.lengths_B, batch.trained_B, device=CPU, mode=mode, sums=sums, late=late
    ) as recording:
        logprobs = run(model, batch)
        recording.backward(logprobs, torch.ones(len(logprobs)) if token_weights is None else token_weights)
    return recording


def squared_norm(gradients: Sequence[Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients)


def some_trajectories(model: Any) -> list[Trajectory]:
    return [t for g in make_groups(model, [[1, 0, 1], [0, 1, 1, 0]]) for t in g.trajectories]


def assert_gradients_match(model: Any, recording: Recording, singles: list[list[Tensor]], rel: float) -> None:
    """Norms of each trajectory, and the gradient with arbitrary coefficients, against one autograd pass each."""
    expected = [squared_norm(single) for single in singles]
    assert recording.squared_norms().tolist() == pytest.approx(expected, rel=rel)
    coefficients = torch.linspace(-1.5, 2.0, len(singles), dtype=torch.float64)
    assert_combined_match(model, dict(recording.kept_gradients(coefficients)), coefficients, singles, rel)


def assert_combined_match(
    model: Any, combined: dict[str, Tensor], coefficients: Tensor, singles: list[list[Tensor]], rel: float
) -> None:
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(combined) == set(trainable)
    totals = [sum(float(c) * s[i] for c, s in zip(coefficients, singles, strict=True)) for i in range(len(trainable))]
    difference = sum(float((combined[n] - t).double().square().sum()) for n, t in zip(trainable, totals, strict=True))
    size = sum(float(t.double().square().sum()) for t in totals)
    assert (difference / size) ** 0.5 <= rel


# transformers computes RMSNorm and eager softmax in float32 whatever the model's dtype; GPT-2 stays in float64
@pytest.mark.parametrize(("family", "rel"), [(f, 1e-11 if f == "gpt2" else 2e-6) for f in FAMILIES])
@pytest.mark.parametrize("tied", [True, False])
def test_norms_and_gradient_equal_one_autograd_pass_per_trajectory(family: str, rel: float, tied: bool) -> None:
    model = make_model(family, tied)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    assert_gradients_match(model, record(model, trajectories), singles, rel)


def test_token_weights_are_inside_the_norm() -> None:
    model = make_model("gpt2")
    trajectories = some_trajectories(model)
    rng = np.random.default_rng(1)
    weights = [rng.uniform(0, 8, int(t.mask_T.sum())) for t in trajectories]
    singles = [slow_gradient(model, t, w.tolist()) for t, w in zip(trajectories, weights, strict=True)]
    recording = record(model, trajectories, torch.from_numpy(np.concatenate(weights)))
    assert_gradients_match(model, recording, singles, 1e-11)


def test_tied_embeddings_are_summed_before_the_norm() -> None:
    """Both uses point along the same rows here: the norm of the sum differs from the sum of the norms."""
    model = make_model("gpt2", tied=True)
    trajectories = some_trajectories(model)
    recording = record(model, trajectories)
    uses = recording._kept["transformer.wte.weight"]
    assert len(uses) == 2
    separate = sum(use.per_trajectory(use.rows.chunk(range(len(trajectories)))).square().sum((1, 2)) for use in uses)
    everything = recording.squared_norms()
    exact = torch.tensor([squared_norm(slow_gradient(model, t)) for t in trajectories], dtype=torch.float64)
    torch.testing.assert_close(everything, exact, rtol=1e-11, atol=0)
    joint = sum(use.per_trajectory(use.rows.chunk(range(len(trajectories)))) for use in uses).square().sum((1, 2))
    assert ((separate - joint).abs() / exact).max() > 1e-3


@pytest.mark.parametrize("elements", [1, 700, 2**30])
def test_chunk_size_does_not_matter(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    trajectories = some_trajectories(model)
    expected = record(model, trajectories).squared_norms()
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(recorder_module, "BATCHED_ELEMENTS", elements)
    monkeypatch.setattr(recorder_module, "SMALL_ELEMENTS", elements)
    norms = record(model, trajectories, mode="single").squared_norms()
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)


@given(st.permutations(range(7)), st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_order_and_partition_do_not_matter(order: list[int], cut: int) -> None:
    model = make_model("gpt2")
    trajectories = some_trajectories(model)
    expected = record(model, trajectories).squared_norms()
    parts = [order[:cut], order[cut:]]
    norms = torch.cat([record(model, [trajectories[i] for i in part]).squared_norms() for part in parts])
    torch.testing.assert_close(norms, expected[order], rtol=1e-11, atol=0)


def test_norms_scale_with_the_square_of_the_token_weights() -> None:
    model = make_model("gpt2")
    trajectories = some_trajectories(model)
    count = sum(int(t.mask_T.sum()) for t in trajectories)
    once = record(model, trajectories).squared_norms()
    thrice = record(model, trajectories, torch.full((count,), 3.0)).squared_norms()
    torch.testing.assert_close(thrice, 9 * once, rtol=1e-12, atol=0)


def test_one_trajectory_of_one_token() -> None:
    model = make_model("gpt2")
    single = make_trajectory(np.random.default_rng(0), 0, 0, 1.0, prompt=1, response=1)
    assert_gradients_match(model, record(model, [single]), [slow_gradient(model, single)], 1e-11)


def test_frozen_parameters_are_no_part_of_the_norm() -> None:
    model = make_model("gpt2", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "lm_head" in name)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    assert_gradients_match(model, record(model, trajectories), singles, 1e-11)


def test_padding_row_of_an_embedding_gets_no_gradient_as_in_torch() -> None:
    model = make_model("gpt2", tied=True)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = 3
    trajectories = some_trajectories(model)
    assert any(3 in t.prompt_ids for t in trajectories)
    singles = [slow_gradient(model, t) for t in trajectories]
    assert_gradients_match(model, record(model, trajectories), singles, 1e-11)


def test_bfloat16_rows_are_summed_in_float32() -> None:
    model = make_model("qwen2", dtype=torch.bfloat16)
    trajectories = some_trajectories(model)
    recording = record(model, trajectories)
    exact = [squared_norm(slow_gradient(model, t)) for t in trajectories]
    assert recording.squared_norms().tolist() == pytest.approx(exact, rel=0.05)
    assert all(g.dtype == torch.float32 for _, g in recording.kept_gradients(torch.ones(len(trajectories))))


def test_the_model_is_left_as_it_was() -> None:
    model = make_model("gpt2")
    model.get_input_embeddings().weight.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    record(model, some_trajectories(model))
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_parameter_flags_come_back_after_an_exception() -> None:
    model = make_model("gpt2")
    with pytest.raises(KeyboardInterrupt), GradientRecorder(model).record([3], device=CPU):
        raise KeyboardInterrupt
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.tensor([1.1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.inner(x)


class ShiftedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


def test_trainable_parameter_without_a_rule_is_named() -> None:
    model = make_model("gpt2")
    model.transformer.h[1].mlp = Scaled(model.transformer.h[1].mlp)
    with pytest.raises(UserError, match=r"parameter 'transformer.h.1.mlp.gain' is in a layer of type Scaled"):
        GradientRecorder(model)
    model.transformer.h[1].mlp.gain.requires_grad_(False)
    GradientRecorder(model)


def test_subclass_with_another_forward_has_no_rule() -> None:
    assert find_rule(nn.Linear(2, 2)) is not None
    assert find_rule(ShiftedLinear(2, 2)) is None
    assert find_rule(nn.Embedding(2, 2, max_norm=1.0)) is None
    assert find_rule(nn.Embedding(2, 2, scale_grad_by_freq=True)) is None


def test_parameter_whose_layer_is_never_called_is_named() -> None:
    model = make_model("gpt2")
    model.spare = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(UserError, match=r"'spare\.weight' could not be followed"):
        record(model, some_trajectories(model))


def test_layer_that_sees_other_rows_is_named() -> None:
    model = make_model("gpt2")
    batch = pack(some_trajectories(model), CPU)
    with (
        pytest.raises(UserError, match="layer 'lm_head' was called on"),
        GradientRecorder(model).record(batch.lengths_B, device=CPU) as recording,
    ):
        logprobs = run(model, batch)
        recording.backward(logprobs, torch.ones(len(logprobs)))


def test_reference_norms_by_hand() -> None:
    a, b, unused = (nn.Parameter(torch.tensor([v])) for v in (2.0, 3.0, 5.0))
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
