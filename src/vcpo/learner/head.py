"""The output layer: log-probabilities, entropies and gradients of the trained tokens, some rows of logits at a time.

The logits of a batch would be its largest tensor by far. They are made, used and overwritten in chunks of whole
trajectories. Because a token's weight is known as soon as its trajectory's log-probabilities are, the gradient is taken
in the same visit: nothing is computed twice. Only a trajectory whose own logits exceed a chunk is visited twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vcpo.gradnorm.uses import at_least_float32

CHUNK_ELEMENTS = 2**25  # logits that exist at one time
_CACHED_ELEMENTS = 2**19  # that a CPU's caches hold while several operations go over them

TokenWeights = Callable[[int, int, Tensor], Tensor | None]
"""(first trajectory, trajectories, their (k,) log-probabilities) to the (k,) weights of log pi in the objective."""


class HeadConsumer(Protocol):
    """Takes the gradient of the output layer's parameters."""

    def rows(self, x_RD: Tensor, g_RV: Tensor, lengths: Sequence[int], first: int, is_everything: bool) -> None:
        """Input rows and output-gradient rows of consecutive trajectories, ``lengths`` rows each."""
        ...

    def single(self, gradients: dict[str, Tensor], index: int) -> None:
        """The gradients of weight and bias of one trajectory."""
        ...


@dataclass(frozen=True)
class HeadResult:
    """logprobs_K, entropies_K: of the trained tokens, without a graph, float32 or better.

    energies_K: 1 - 2 p(target) + sum_v p(v)^2 of each row's distribution p, or ``None`` if not asked for.
    gradient_KD: of the objective, by the rows that went in; ``None`` if only log-probabilities were asked for, or if a
    chunk had no weights.
    """

    logprobs_K: Tensor
    entropies_K: Tensor
    energies_K: Tensor | None
    gradient_KD: Tensor | None


@contextmanager
def bypassed(head: nn.Module) -> Iterator[None]:
    """Inside the block the layer returns its input."""
    head.__dict__["forward"] = lambda rows: rows
    try:
        yield
    finally:
        del head.__dict__["forward"]


def run_head(
    rows_KD: Tensor,
    head: nn.Module | None,
    targets_K: Tensor,
    lengths: Sequence[int],
    temperature: float,
    token_weights: TokenWeights | None = None,
    consumer: HeadConsumer | None = None,
    wants_energies: bool = False,
) -> HeadResult:
    """Log-probabilities of the targets at the sampling temperature, and the gradient of sum_k u_k log pi_k.

    rows_KD: the rows before the output layer, or the logits themselves if ``head`` is ``None``.
    lengths: trained tokens of each trajectory, in order.
    token_weights: gives the u_k; without it there is no gradient.
    consumer: takes the gradient of the layer's parameters; may be ``None`` if they are frozen.
    """
    with torch.no_grad():
        run = _HeadRun(rows_KD.detach(), head, targets_K, temperature, token_weights, consumer, wants_energies)
        chunks = list(_chunks(lengths, max(1, CHUNK_ELEMENTS // run.vocabulary)))
        for chunk in chunks:
            if run.is_stopped:
                run.measure(chunk)
            elif chunk.is_part:
                run.visit_in_parts(chunk)
            else:
                run.visit(chunk, is_everything=len(chunks) == 1)
        gradient = None if run.is_stopped else run.gradient_KD
        return HeadResult(run.logprobs_K, run.entropies_K, run.energies_K, gradient)


@dataclass(frozen=True)
class _Chunk:
    """Rows ``begin`` to ``end`` of whole trajectories; ``is_part``: one whose logits are too many for a chunk."""

    first: int
    lengths: list[int]
    begin: int
    end: int
    is_part: bool
    most: int


def _chunks(lengths: Sequence[int], most: int) -> Iterator[_Chunk]:
    first = begin = 0
    while first < len(lengths):
        last, rows = first + 1, lengths[first]
        while last < len(lengths) and rows + lengths[last] <= most:
            rows += lengths[last]
            last += 1
        yield _Chunk(first, list(lengths[first:last]), begin, begin + rows, rows > most, most)
        first, begin = last, begin + rows


class _HeadRun:
    def __init__(
        self,
        rows_KD: Tensor,
        head: nn.Module | None,
        targets_K: Tensor,
        temperature: float,
        token_weights: TokenWeights | None,
        consumer: HeadConsumer | None,
        wants_energies: bool,
    ) -> None:
        self._rows_KD = rows_KD
        weight: Any = None if head is None else head.weight
        self._weight: Tensor | None = None if weight is None else weight.detach()
        bias: Any = None if head is None else head.bias
        self._bias: Tensor | None = None if bias is None else bias.detach()
        self._targets_K = targets_K
        self._temperature = temperature
        self._token_weights = token_weights
        self._consumer = consumer
        self.vocabulary = rows_KD.shape[1] if self._weight is None else self._weight.shape[0]
        fine = at_least_float32(rows_KD[:0])
        self.logprobs_K = fine.new_zeros(len(rows_KD))
        self.entropies_K = fine.new_zeros(len(rows_KD))
        self.energies_K = fine.new_zeros(len(rows_KD)) if wants_energies else None
        self.gradient_KD = None if token_weights is None else torch.zeros_like(rows_KD)
        self.is_stopped = token_weights is None

    def measure(self, chunk: _Chunk) -> None:
        for begin in range(chunk.begin, chunk.end, chunk.most):
            self._probabilities(slice(begin, min(begin + chunk.most, chunk.end)))

    def visit(self, chunk: _Chunk, is_everything: bool) -> None:
        own = slice(chunk.begin, chunk.end)
        probabilities_kV = self._probabilities(own)
        weights_k = self._weights(chunk)
        if weights_k is None:
            return
        g_kV = self._logit_gradient(own, probabilities_kV, weights_k)
        if self._consumer is not None:
            self._consumer.rows(self._rows_KD[own], g_kV, chunk.lengths, chunk.first, is_everything)

    def visit_in_parts(self, chunk: _Chunk) -> None:
        """All log-probabilities first, then the logits again for the gradient."""
        self.measure(chunk)
        weights_k = self._weights(chunk)
        if weights_k is None:
            return
        total: dict[str, Tensor] = {}
        for begin in range(chunk.begin, chunk.end, chunk.most):
            own = slice(begin, min(begin + chunk.most, chunk.end))
            part_k = weights_k[begin - chunk.begin : own.stop - chunk.begin]
            g_kV = self._logit_gradient(own, self._probabilities(own), part_k)
            if self._consumer is not None:
                add_head_gradients(total, self._rows_KD[own], g_kV)
        if self._consumer is not None:
            self._consumer.single(total, chunk.first)

    def _weights(self, chunk: _Chunk) -> Tensor | None:
        assert self._token_weights is not None
        weights_k = self._token_weights(chunk.first, len(chunk.lengths), self.logprobs_K[chunk.begin : chunk.end])
        self.is_stopped = weights_k is None
        return weights_k

    def _probabilities(self, own: slice) -> Tensor:
        """(k, V) probabilities at the sampling temperature; fills in what is measured of them."""
        rows_kD = self._rows_KD[own]
        if self._weight is None:
            logits_kV = at_least_float32(rows_kD).clone()
        else:
            logits_kV = at_least_float32(F.linear(rows_kD, self._weight, self._bias))
        if self._temperature != 1:
            logits_kV.div_(self._temperature)
        log_total_k = torch.logsumexp(logits_kV, dim=1)
        self.logprobs_K[own] = logits_kV.gather(1, self._targets_K[own, None])[:, 0] - log_total_k
        entropies_k = self.entropies_K[own]
        step = max(1, _CACHED_ELEMENTS // self.vocabulary) if logits_kV.device.type == "cpu" else len(logits_kV)
        for begin in range(0, len(logits_kV), step):
            few = slice(begin, begin + step)
            logprobs_kV = logits_kV[few].sub_(log_total_k[few, None])
            probabilities_kV = logprobs_kV.exp()
            # an impossible token adds 0 * log 0 = 0, not NaN
            logprobs_kV.clamp_(min=torch.finfo(logprobs_kV.dtype).min)
            torch.linalg.vecdot(probabilities_kV, logprobs_kV, out=entropies_k[few]).neg_()
            logprobs_kV.copy_(probabilities_kV)
            if self.energies_K is not None:
                torch.linalg.vecdot(probabilities_kV, probabilities_kV, out=self.energies_K[own][few])
        if self.energies_K is not None:
            self.energies_K[own] += 1 - 2 * self.logprobs_K[own].exp()
        return logits_kV

    def _logit_gradient(self, own: slice, probabilities_kV: Tensor, weights_k: Tensor) -> Tensor:
        """u (onehot - p) / temperature, in place of the probabilities."""
        assert self.gradient_KD is not None
        weights_k1 = (weights_k.to(probabilities_kV) / self._temperature)[:, None]
        probabilities_kV.mul_(-weights_k1).scatter_add_(1, self._targets_K[own, None], weights_k1)
        g_kV = probabilities_kV.to(self._rows_KD.dtype)
        if self._weight is None:
            self.gradient_KD[own] = g_kV
        else:
            torch.mm(g_kV, self._weight, out=self.gradient_KD[own])
        return g_kV


def add_head_gradients(total: dict[str, Tensor], x_RD: Tensor, g_RV: Tensor) -> None:
    """Add the weight's and the bias's gradient of some rows, in float32 or better."""
    x_RD, g_RV = at_least_float32(x_RD), at_least_float32(g_RV)
    if "weight" not in total:
        total["weight"] = g_RV.new_zeros(g_RV.shape[1], x_RD.shape[1])
        total["bias"] = g_RV.new_zeros(g_RV.shape[1])
    total["weight"].addmm_(g_RV.T, x_RD)
    total["bias"] += g_RV.sum(0)
