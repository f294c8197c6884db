"""One rule per layer type: which parameters a layer uses, and how its rows make their gradients.

A rule takes the layer, its input rows ``x`` (R, ...), the gradient rows ``g`` (R, D) of its output, and the rows'
trajectories, and yields one use per trainable parameter. A new layer type is one decorated function::

    @layer_rule(lambda module: type(module) is MyLinear)
    def _my_linear(module, x, g, rows):
        yield module.weight, OuterUse(g, x, rows)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.uses import LookupUse, OuterUse, ParameterUse, VectorUse, at_least_float32

Uses = Iterator[tuple[nn.Parameter, ParameterUse]]
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
    """The RMSNorm classes of transformers' families differ in details but are all affine in their only parameter."""
    names = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("RMSNorm") and names == ["weight"] and module.weight.dim() == 1


@layer_rule(_computes_as(nn.Linear))
def linear_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = x W^T + b."""
    yield module.weight, OuterUse(g, x, rows)
    if module.bias is not None:
        yield module.bias, VectorUse(rows.sums(at_least_float32(g)), rows)


@layer_rule(_computes_as(Conv1D))
def conv1d_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = x W + b: GPT-2's linear layer."""
    yield module.weight, OuterUse(x, g, rows)
    yield module.bias, VectorUse(rows.sums(at_least_float32(g)), rows)


@layer_rule(lambda m: _is_plain_embedding(m) and _computes_as(nn.Embedding)(m))
def embedding_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = W[x]; torch gives the padding row no gradient."""
    if module.padding_idx is not None:
        g = g.masked_fill((x == module.padding_idx)[:, None], 0)
    yield module.weight, LookupUse(x, g, module.num_embeddings, rows)


@layer_rule(lambda m: _is_plain_embedding(m) and type(m).__name__.endswith("ScaledWordEmbedding"))
def scaled_embedding_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = s W[x]: Gemma's embedding."""
    return embedding_rule(module, x, g * module.embed_scale.to(g.dtype), rows)


@layer_rule(_computes_as(nn.LayerNorm))
def layer_norm_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = w xhat + b."""
    g = at_least_float32(g)
    xhat = F.layer_norm(at_least_float32(x), module.normalized_shape, None, None, module.eps)
    yield module.weight, VectorUse(rows.sums(g * xhat), rows)
    if module.bias is not None:
        yield module.bias, VectorUse(rows.sums(g), rows)


@layer_rule(_is_rms_norm)
def rms_norm_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
    """y = a(x) + w xhat, whatever the family: w xhat in Llama and Qwen, (1 + w) xhat in Gemma; also per attention head.

    Affine in w, so xhat is the difference of the outputs at w = 1 and at w = 0.
    """
    weight = at_least_float32(module.weight.detach())
    x = at_least_float32(x)
    at_one = torch.func.functional_call(module, {"weight": torch.ones_like(weight)}, (x,))
    at_zero = torch.func.functional_call(module, {"weight": torch.zeros_like(weight)}, (x,))
    yield module.weight, VectorUse(rows.sums(at_least_float32(g) * (at_one - at_zero)), rows)
