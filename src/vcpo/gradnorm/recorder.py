"""Per-trajectory gradient norms and a gradient with late coefficients, from one forward and one backward pass.

The backward pass computes gradients of activations only. Each layer's input rows and output-gradient rows are kept;
they determine every trajectory's parameter gradient, so that norms can be taken one chunk of trajectories at a time,
and the gradient of the update is formed once, when the coefficients are known ("book-keeping"). Memory: about the
activations of a plain step, held until the coefficients are known, and one chunk of single gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.rules import find_rule
from vcpo.gradnorm.uses import LookupUse, ParameterUse

_CHUNK_ELEMENTS = 2**20  # numbers of single-trajectory gradients that exist at one time, unless one alone is larger


class Recording:
    """What one packed forward and backward pass has left: the uses of every trainable parameter."""

    def __init__(self, names: dict[nn.Parameter, str], layouts: Sequence[Rows]) -> None:
        self._names = names
        self._layouts = {rows.count: rows for rows in layouts}
        self._trajectories = len(layouts[0].lengths_B)
        self._uses: dict[nn.Parameter, list[ParameterUse]] = {}

    def backward(self, logprobs_K: Tensor, weights_K: Tensor) -> None:
        """Backward of sum_k weights_k log pi_k; trajectory i's gradient is that of its own terms."""
        torch.autograd.backward(logprobs_K, weights_K.to(logprobs_K))
        missing = [name for parameter, name in self._names.items() if parameter not in self._uses]
        if missing:
            raise UserError(
                f"the gradient of parameter {missing[0]!r} could not be followed: its layer was not called on packed"
                " rows; freeze the parameter, register a layer rule, or choose a method without gradient norms"
            )

    def squared_norms(self) -> Tensor:
        """(B,) float64 squared norms of each trajectory's gradient over all trainable parameters.

        The uses of a parameter (tied embeddings) are added up before the norm is taken.
        """
        device = self._uses[next(iter(self._uses))][0].rows.lengths_B.device
        total_B = torch.zeros(self._trajectories, dtype=torch.float64, device=device)
        for parameter, uses in self._uses.items():
            if len(uses) == 1 and isinstance(uses[0], LookupUse):
                total_B += uses[0].squared_norms()
                continue
            for members, gradients in _single_gradients(parameter, uses):
                norms = torch.linalg.vector_norm(gradients.flatten(1), dim=1)
                total_B.index_add_(0, members, norms.double().square())
        return total_B

    def gradients(self, coefficients_B: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """For every parameter, the sum over trajectories of coefficient times gradient, in float32 or better."""
        for parameter, uses in self._uses.items():
            total = uses[0].combined(coefficients_B)
            for use in uses[1:]:
                total += use.combined(coefficients_B)
            yield parameter, total

    def record(self, name: str, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """One call of a layer: its input and the gradient of its output, as they went through it."""
        rule = find_rule(module)
        assert rule is not None, "coverage is checked before"
        length = g.shape[1] if g.dim() > 2 and g.shape[0] == 1 else g.shape[0]
        layout = self._layouts.get(length)
        if layout is None:
            raise UserError(
                f"layer {name!r} was called on {length} rows, which are not the rows of the packed trajectories;"
                " per-trajectory gradient norms need layers that see every token"
            )
        g_RD = g.flatten(0, -2)
        x_R = x.flatten() if isinstance(module, nn.Embedding) else x.flatten(0, -2)
        repeats = len(g_RD) // length
        rows = layout if repeats == 1 else layout.repeated(repeats)
        for parameter, use in rule(module, x_R, g_RD, rows):
            if parameter in self._names:
                self._uses.setdefault(parameter, []).append(use)


class GradientRecorder:
    """Records the layers of a model.

    Raises UserError, naming a parameter, if a trainable parameter lies in a layer without a rule: a silently missing
    parameter would lower every norm.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._layers: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p in self._parameters]
            if own and find_rule(module) is None:
                raise UserError(
                    f"parameter {self._parameters[own[0]]!r} is in a layer of type {type(module).__name__}, for which"
                    " there is no rule for per-trajectory gradient norms; register one"
                    " (vcpo.gradnorm.rules.layer_rule), set training.gradient_norm_fallback=true (slower), freeze the"
                    " parameter, or choose a method without gradient norms"
                )
            if own or isinstance(module, nn.Embedding):
                self._layers.append((name, module))

    @contextmanager
    def capture(self, *lengths_B: Sequence[int], device: torch.device) -> Iterator[Recording]:
        """Record the forward pass inside the ``with`` block; the backward pass may come after it.

        lengths_B: for every number of rows that layers see, how many of them belong to each trajectory, in order:
            all tokens for most layers, the trained tokens for an output layer that computes no other logits.
        """
        recording = Recording(self._parameters, [Rows(lengths, device) for lengths in lengths_B])
        handles = [module.register_forward_hook(partial(_follow, recording, name)) for name, module in self._layers]
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        try:
            yield recording
        finally:
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()


def _follow(recording: Recording, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return output
    if isinstance(module, nn.Embedding):
        # the root of the graph, because no parameter requires a gradient during the pass
        output = output.detach().requires_grad_()
    x = inputs[0].detach()

    def on_gradient(gradient: Tensor) -> None:
        recording.record(name, module, x, gradient.detach())

    register: Any = output.register_hook
    register(on_gradient)
    return output


def _single_gradients(parameter: nn.Parameter, uses: Sequence[ParameterUse]) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of trajectories (their indices) and their gradients, all uses added up."""
    widest = max(uses, key=lambda use: use.rows.count)
    per_member = parameter.numel()
    for chunk in widest.rows.chunks(_CHUNK_ELEMENTS, per_member):
        members = chunk.members.tolist()
        total = widest.per_trajectory(chunk)
        for use in uses:
            if use is not widest:
                total += use.per_trajectory(use.rows.chunk(members))
        yield chunk.members, total
