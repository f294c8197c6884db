"""The slow, plain way: one trajectory at a time through autograd. Any model; the measure of the fast way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

Objective = Callable[[], Tensor]
"""Runs one trajectory through the model and returns sum_t u_t log pi_t, with its graph."""


def single_gradients(parameters: Sequence[nn.Parameter], objectives: Iterable[Objective]) -> Iterator[list[Tensor]]:
    """Each trajectory's gradient, one tensor per parameter (zeros where a parameter was not used)."""
    for objective in objectives:
        yield list(torch.autograd.grad(objective(), parameters, allow_unused=True, materialize_grads=True))


def squared_norms(parameters: Sequence[nn.Parameter], objectives: Iterable[Objective]) -> Tensor:
    """(B,) float64 squared norms of each trajectory's gradient over all parameters."""
    norms = [
        sum(float(torch.linalg.vector_norm(g, dtype=_summed_in(g))) ** 2 for g in gradients)
        for gradients in single_gradients(parameters, objectives)
    ]
    return torch.tensor(norms, dtype=torch.float64)


def _summed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
