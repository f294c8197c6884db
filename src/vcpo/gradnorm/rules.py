"""One rule per layer type: which parameters a layer uses, and how its rows make their gradients.

A rule takes the layer, its input rows ``x`` (R, ...), the gradient rows ``g`` (R, D) of its output, and the rows'
trajectories, and yields one use for each of its parameters, by the parameter's name in the layer. A new layer type is
one decorated function::

    @layer_rule(lambda module: type(module) is MyLinear)
    def my_linear_rule(module, x, g, rows):
        yield "weight", OuterUse(g, x, rows)

Rules must not read the values of parameters: when they run, a sharded model may have given them away again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.uses import LookupUse, OuterUse, ParameterUse, VectorUse, at_least_float32

Uses = Iterator[tuple[str, ParameterUse]]
LayerRule = Callable[[Any, Tensor, Tensor, Rows], Uses]
Matches = Callable[[nn.Module], bool]

_RULES: list[tuple[Matches, LayerRule]] = []


def layer_rule(matches: Matches) -> Callable[[LayerRule], LayerRule]:
    """Register a rule for the modules that ``matches`` accepts; the latest registered rule is asked first.

    ``matches`` must be sure of the layer's forward computation, not only of its parameters' names.
    """

    def register(rule: LayerRule) -> LayerRule:
        _RULES.insert(0, (matches, rule))
        return rule

    return register


def find_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a layer, or ``None``."""
    return next((rule for matches, rule in _RULES if matches(module)), None)


def _computes_as(base: type[nn.Module]) -> Matches:
    """Modules of a class, or of a subclass that leaves its forward alone."""
    return lambda module: isinstance(module, base) and type(module).forward is base.forward


def _is_plain_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq


def _is_rms_norm(module: Any) -> bool:
    """Known by what it computes, because the families' classes only share a name: affine in its one vector ``weight``,
    which multiplies x / rms(x). So in Llama and Qwen, as 1 + w in Gemma, and in ``nn.RMSNorm``."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.dim() != 1 or list(module.children()):
        return False
    width = module.weight.shape[0]
    # rows of very different size, where a wrong epsilon shows
    x = torch.linspace(-1, 2, 3 * width).view(3, width).sin() * torch.tensor([[1e-3], [1.0], [30.0]])
    x = x.to(module.weight.device)
    if _rms_epsilon(module, x.dtype) is None:
        return False
    weights = [torch.full_like(x[0], value) for value in (0.0, 1.0, 2.0)]
    try:
        with torch.autocast(x.device.type, enabled=False):
            outputs = [functional_call(module, {"weight": weight}, (x,)) for weight in weights]
            xhat = x * _inverse_rms(module, x)[:, None]
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(torch.allclose(after - before, xhat, rtol=1e-4, atol=1e-5) for before, after in pairwise(outputs))


def _rms_epsilon(module: Any, dtype: torch.dtype) -> float | None:
    """dtype: in which the layer computes."""
    for name in ("variance_epsilon", "eps", "norm_eps"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return torch.finfo(dtype).eps if isinstance(module, nn.RMSNorm) else None


def _inverse_rms(module: Any, x: Tensor) -> Tensor:
    """(R,) 1 / rms of each row, as the layer has it."""
    epsilon = _rms_epsilon(module, x.dtype)
    assert epsilon is not None
    inverse: Tensor = (torch.linalg.vecdot(x, x) / x.shape[-1] + epsilon).rsqrt()
    return inverse


@layer_rule(_computes_as(nn.Linear))
def linear_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = x W^T + b."""
    yield "weight", OuterUse(g, x, rows)
    if module.bias is not None:
        yield "bias", VectorUse(rows.sums(at_least_float32(g)), rows)


@layer_rule(_computes_as(Conv1D))
def conv1d_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = x W + b: GPT-2's linear layer."""
    yield "weight", OuterUse(x, g, rows)
    yield "bias", VectorUse(rows.sums(at_least_float32(g)), rows)


@layer_rule(lambda m: _is_plain_embedding(m) and _computes_as(nn.Embedding)(m))
def embedding_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = W[x]; torch gives the padding row no gradient."""
    if module.padding_idx is not None:
        g = g.masked_fill((x == module.padding_idx)[:, None], 0)
    yield "weight", LookupUse(x, g, module.num_embeddings, rows)


@layer_rule(lambda m: _is_plain_embedding(m) and type(m).__name__.endswith("ScaledWordEmbedding"))
def scaled_embedding_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = s W[x]: Gemma's embedding."""
    return embedding_rule(module, x, g * module.embed_scale.to(g.dtype), rows)


@layer_rule(_computes_as(nn.LayerNorm))
def layer_norm_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = w xhat + b."""
    g = at_least_float32(g)
    xhat = F.layer_norm(at_least_float32(x), module.normalized_shape, None, None, module.eps)
    yield "weight", VectorUse(rows.sums(g * xhat), rows)
    if module.bias is not None:
        yield "bias", VectorUse(rows.sums(g), rows)


@layer_rule(_is_rms_norm)
def rms_norm_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = w x / rms(x), or with 1 + w; also per attention head."""
    x = at_least_float32(x)
    yield "weight", VectorUse(rows.sums(at_least_float32(g) * x, _inverse_rms(module, x)), rows)
