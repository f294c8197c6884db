"""Recorded passes, and what they are compared with: one autograd pass per trajectory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from learner_cases import make_groups
from vcpo.gradnorm import kernels
from vcpo.gradnorm import recorder as recorder_module
from vcpo.gradnorm.recorder import GradientRecorder, NormMode, Recording
from vcpo.gradnorm.sums import GradientSums, LateCoefficients
from vcpo.learner.forward import trained_token_logits
from vcpo.learner.packing import PackedBatch, pack
from vcpo.records import Trajectory

CPU = torch.device("cpu")
# of the batches of ids for modules that are no language models
BATCH, TOKENS, WIDTH = 5, 6, 7


@contextmanager
def float64_norms() -> Iterator[None]:
    """RMSNorm in its input's dtype. transformers computes it in float32 whatever the dtype, which hides digits."""

    def plain(module: Any, x: Tensor) -> Tensor:
        return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()

    def gemma(module: Any, x: Tensor) -> Tensor:
        return (1 + module.weight) * x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt()

    with pytest.MonkeyPatch.context() as patch:
        for norm in (Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm):
            patch.setattr(norm, "forward", plain)
        patch.setattr(GemmaRMSNorm, "forward", gemma)
        yield


@dataclass(frozen=True)
class Way:
    """How a gradient is taken. is_large: layers count as too large for batches; they come in many parts."""

    mode: NormMode
    has_sums: bool
    is_large: bool = False

    def __str__(self) -> str:
        return f"{self.mode}{'-sums' if self.has_sums else ''}{'-large' if self.is_large else ''}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if self.is_large:
                patch.setattr(recorder_module, "SMALL_ELEMENTS", 0)
                patch.setattr(kernels, "TILE_ELEMENTS", 40)
                patch.setattr(recorder_module, "cost_model", lambda *_: _Alternating())
            yield


class _Alternating:
    """A cost model that takes both ways within one model."""

    def prefers_gram(self, lengths: Sequence[int], height: int, width: int, is_shared: bool) -> bool:
        return is_shared or height == width


WAYS = [
    Way("auto", False),
    Way("gram", False),
    Way("single", False),
    Way("auto", True),
    Way("gram", True),
    Way("single", True),
    Way("auto", True, is_large=True),
    Way("single", True, is_large=True),
]
FEW_WAYS = [Way("gram", False), Way("gram", True), Way("single", True, is_large=True)]

Run = Callable[[], tuple[Tensor, Tensor]]
"""Runs the model, inside a recording: outputs, and what multiplies them in the objective."""


def record_run(
    model: nn.Module, layouts: Sequence[Sequence[int]], run: Run, way: Way = WAYS[0]
) -> tuple[Recording, dict[str, Tensor], list[float]]:
    """A recorded pass, the gradient with some coefficients by parameter name, and these coefficients."""
    count = len(layouts[0])
    fixed = [0.0 if i % 3 == 1 else 1.5 - 0.4 * i for i in range(count)]
    slope = [0.0 if i % 4 == 3 else 0.7 + 0.3 * i for i in range(count)]
    sets = [i // 2 for i in range(count)]
    factors = [1.25 - 0.5 * index for index in range(count)]
    coefficients = [f + s * factors[index] for f, s, index in zip(fixed, slope, sets, strict=True)]
    sums = GradientSums() if way.has_sums else None
    late = LateCoefficients(fixed, slope, sets) if way.has_sums else None
    with (
        way.applied(),
        GradientRecorder(model).record(*layouts, device=CPU, mode=way.mode, sums=sums, late=late) as recording,
    ):
        recording.backward(*run())
    coefficients_B = torch.tensor(coefficients, dtype=torch.float64)
    if sums is None:
        return recording, dict(recording.kept_gradients(coefficients_B)), coefficients
    for index in set(sets):
        sums.close(index, factors[index])
    recording.add_kept_gradients(sums, coefficients_B)
    assert sums.is_complete
    return recording, sums.totals, coefficients


def record_policy(
    model: Any, trajectories: Sequence[Trajectory], token_weights: Tensor | None = None, way: Way = WAYS[0]
) -> tuple[Recording, dict[str, Tensor], list[float]]:
    """``record_run`` of a language model's log-probabilities of the trained tokens."""
    batch = pack(trajectories, CPU)

    def run() -> tuple[Tensor, Tensor]:
        logprobs = trained_logprobs(model, batch)
        return logprobs, torch.ones_like(logprobs) if token_weights is None else token_weights

    return record_run(model, [batch.lengths_B, batch.trained_B], run, way)


def trained_logprobs(model: Any, batch: PackedBatch) -> Tensor:
    logits = trained_token_logits(model, batch)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, dim=-1).gather(1, batch.targets_K[:, None])[:, 0]


def squared_norm(gradients: Sequence[Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients)


def assert_exact(
    model: nn.Module,
    result: tuple[Recording, dict[str, Tensor], list[float]],
    singles: Sequence[Sequence[Tensor]],
    rel: float,
) -> None:
    """Norms of each trajectory, and the gradient with the coefficients, against the gradient of each trajectory."""
    recording, combined, coefficients = result
    expected = [squared_norm(single) for single in singles]
    assert recording.squared_norms().tolist() == pytest.approx(expected, rel=rel, abs=1e-30)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(combined) <= set(names)
    difference = size = 0.0
    for index, name in enumerate(names):
        total = sum(c * s[index].double() for c, s in zip(coefficients, singles, strict=True))
        # a parameter whose coefficients are all 0 may have no gradient
        difference += float((combined.get(name, torch.zeros(())) - total).square().sum())
        size += float(total.square().sum())
    assert difference**0.5 <= rel * size**0.5


def in_float64(model: nn.Module) -> Any:
    """A copy in float64, for gradients without rounding."""
    return copy.deepcopy(model).double()


def some_trajectories(model: Any) -> list[Trajectory]:
    """Seven of them, of many lengths, with holes in their masks."""
    return [t for g in make_groups(model, [[1, 0, 1], [0, 1, 1, 0]]) for t in g.trajectories]


def assert_untouched(model: nn.Module) -> None:
    """No hook, instance attribute or gradient is left."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not set(module._parameters) & set(module.__dict__)
    assert all(p.requires_grad for p in model.parameters())


def token_weights(trajectories: Sequence[Trajectory], seed: int = 1) -> list[np.ndarray]:
    """Arbitrary weights of both signs, one array per trajectory."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-2, 8, int(t.mask_T.sum())) for t in trajectories]


def lookup(*layers: nn.Module, **options: Any) -> nn.Sequential:
    """Layers behind an embedding."""
    return nn.Sequential(nn.Embedding(9, WIDTH, **options), *layers)


def inputs_and_gradients(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Token ids, and what multiplies the outputs: nothing in the padding, which is of another length for each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (BATCH, TOKENS), generator=generator)
    ids[1] = ids[1, 0]
    g = torch.randn(model(ids).shape, generator=generator, dtype=torch.float64)
    for index, length in enumerate((6, 4, 1, 5, 3)):
        g[index, length:] = 0
    return ids, g


def slow_rows(model: nn.Module, ids: Tensor, g: Tensor, segments: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """The gradient of each segment of a batch, by autograd on that segment alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [torch.autograd.grad((model(ids[own]) * g[own]).sum(), parameters) for own in segments]
