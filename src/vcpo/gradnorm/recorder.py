"""Per-trajectory gradient norms and a gradient with late coefficients, from one forward and one backward pass.

The backward pass computes gradients of activations only. Each layer hands its input rows and output-gradient rows to a
``Recording``; they determine every trajectory's parameter gradient. For every layer one of two ways is taken:

- *Gram*: the norms come from products of rows with rows, and the rows are kept until the coefficients are known, when
  one product makes the layer's gradient. No single gradient ever exists.
- *single*: each trajectory's gradient is made in parts that fit into a cache, measured, and added to running sums; the
  rows are given back at once.

Which is quicker depends on lengths and sizes (``vcpo.gradnorm.costs``). Lookups, biases and norm weights are always
kept: they are small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.gradnorm.costs import cost_model
from vcpo.gradnorm.kernels import (
    BATCHED_ELEMENTS,
    SMALL_ELEMENTS,
    GramCache,
    gram_squared_norms,
    single_gradient_tiles,
)
from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.rules import LayerRule, find_rule
from vcpo.gradnorm.sums import GradientSums, LateCoefficients
from vcpo.gradnorm.uses import LookupUse, OuterUse, ParameterUse, SingleUse, at_least_float32, row_squares

NormMode = Literal["auto", "gram", "single"]


class GradientRecorder:
    """Records the layers of a model.

    Raises UserError, naming a parameter, if a trainable parameter lies in a layer without a rule: a silently missing
    parameter would lower every norm.

    names: of the trainable parameters, as ``named_parameters`` has them.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.names: list[str] = list(names.values())
        self._parameters = list(names)
        self._layers: dict[nn.Module, _Layer] = {}
        for module_name, module in model.named_modules():
            own = {local: names[p] for local, p in module.named_parameters(recurse=False) if p in names}
            if not own:
                continue
            rule = find_rule(module)
            if rule is None:
                raise UserError(
                    f"parameter {next(iter(own.values()))!r} is in a layer of type {type(module).__name__}, for which"
                    " there is no rule for per-trajectory gradient norms; register one"
                    " (vcpo.gradnorm.rules.layer_rule), set training.gradient_norm_fallback=true (slower), freeze the"
                    " parameter, or choose a method without gradient norms"
                )
            self._layers[module] = _Layer(module_name, rule, own)

    @contextmanager
    def record(
        self,
        *lengths_B: Sequence[int],
        device: torch.device,
        mode: NormMode = "auto",
        sums: GradientSums | None = None,
        late: LateCoefficients | None = None,
        delivers: nn.Module | None = None,
    ) -> Iterator[Recording]:
        """Record the forward and the backward pass inside the ``with`` block; both must be in it.

        Inside the block, parameters get no ``grad`` of their own.

        lengths_B: for every number of rows that layers see, how many of them belong to each trajectory, in order:
            all tokens for most layers, the trained tokens for an output layer that computes no other logits. A padded
            batch has the padded length for every trajectory.
        mode: force one of the two ways for all matrices. "single" without ``sums`` makes norms only; rows are kept.
        sums, late: where single gradients go, and with which coefficients. Without them every row is kept.
        delivers: a module whose rows the caller hands over (``Recording.deliver``) instead of calling it.
        """
        recording = Recording(self, [Rows(lengths, device) for lengths in lengths_B], mode, sums, late)
        handles = []
        for module, layer in self._layers.items():
            if module is delivers:
                recording.expect(layer)
                continue
            handles += [
                module.register_forward_pre_hook(partial(_hide_parameters, layer)),
                module.register_forward_hook(partial(_tap, recording, layer), with_kwargs=True, always_call=True),
            ]
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield recording
            self._refuse_other_gradients()
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            for handle in handles:
                handle.remove()
            for module, layer in self._layers.items():
                # a KeyboardInterrupt in a forward keeps torch from calling the hooks after it
                _show_parameters(layer, module)

    def layer(self, module: nn.Module) -> _Layer | None:
        """What is known of a module; ``None`` if it has no trainable parameter of its own."""
        return self._layers.get(module)

    def _refuse_other_gradients(self) -> None:
        for name, parameter in zip(self.names, self._parameters, strict=True):
            if parameter.grad is not None:
                raise UserError(
                    f"parameter {name!r} is used outside of its layer's forward, where its per-trajectory gradient"
                    " cannot be followed; set training.gradient_norm_fallback=true (slower), freeze it, or choose a"
                    " method without gradient norms"
                )


class Recording:
    """What one forward and backward pass over a batch of trajectories has left.

    imprecise: how many norms (of one layer and trajectory) had too few digits as Gram products and were computed from
    the single gradient instead.
    """

    def __init__(
        self,
        recorder: GradientRecorder,
        layouts: Sequence[Rows],
        mode: NormMode,
        sums: GradientSums | None,
        late: LateCoefficients | None,
    ) -> None:
        self._recorder = recorder
        self._layouts = {rows.count: rows for rows in layouts}
        self._device = layouts[0].device
        self._mode = mode
        self._sums = sums
        self._late = late
        self.anchor = torch.zeros((), device=self._device, requires_grad=True)
        self._squared_norms_B = torch.zeros(len(layouts[0].lengths), dtype=torch.float64, device=self._device)
        self.imprecise = 0
        self._calls: Counter[str] = Counter()
        self._lookups: dict[str, list[tuple[Tensor, Rows]]] = {}
        self._in_backward = False
        self._may_keep = True
        self._seen: set[str] = set()
        self._kept: dict[str, list[ParameterUse]] = {}
        self._unmeasured: set[str] = set()
        self._cross: dict[str, dict[int, Tensor]] = {}
        self._shared = GramCache()

    def backward(self, outputs: Tensor, gradients: Tensor) -> None:
        """Backward of sum(outputs * gradients); trajectory i's gradient is that of its own terms."""
        self._in_backward = True
        torch.autograd.backward(outputs, gradients.to(outputs))
        missing = [name for name in self._recorder.names if name not in self._seen]
        if missing:
            raise UserError(
                f"the gradient of parameter {missing[0]!r} could not be followed: its layer was not called on packed"
                " rows; freeze the parameter, register a layer rule, or choose a method without gradient norms"
            )
        with _without_autocast(self._device):
            for name in sorted(self._unmeasured):
                self._measure_together(name)

    def squared_norms(self) -> Tensor:
        """(B,) float64 squared norms of each trajectory's gradient over all trainable parameters."""
        return self._squared_norms_B

    def kept_gradients(self, coefficients_B: Tensor) -> Iterator[tuple[str, Tensor]]:
        """For every parameter whose rows were kept, the sum over trajectories of coefficient times gradient."""
        for name in self._kept:
            sums = GradientSums()
            self._add_kept(name, sums, coefficients_B)
            yield name, sums.totals[name]

    def add_kept_gradients(self, sums: GradientSums, coefficients_B: Tensor) -> None:
        """Add ``kept_gradients`` to sums."""
        for name in self._kept:
            self._add_kept(name, sums, coefficients_B)

    def expect(self, layer: _Layer) -> None:
        """A layer will be delivered, as one call."""
        self._calls.update(layer.parameters.values())

    def deliver(
        self, module: nn.Module, x_RI: Tensor, g_RD: Tensor, lengths: Sequence[int], first: int, may_keep: bool
    ) -> None:
        """The rows of some trajectories, in place of a call of the module.

        first: index of the first of them; ``lengths``: rows of each. may_keep: whether the rows may be kept; if not,
        and there are sums, single gradients are added to them.
        """
        layer = self._recorder.layer(module)
        if layer is not None:
            self._may_keep = may_keep
            self._take_all(layer, module, x_RI, g_RD, Rows(lengths, self._device, first))
            self._may_keep = True

    def deliver_single(self, module: nn.Module, gradients: dict[str, Tensor], index: int) -> None:
        """The finished gradients of a module's parameters for one trajectory, by their names in the module."""
        layer = self._recorder.layer(module)
        for local, gradient in gradients.items():
            if layer is not None and local in layer.parameters:
                self._take(layer.parameters[local], SingleUse(gradient, Rows([1], self._device, index)))

    def called(self, layer: _Layer, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """A layer was called in the forward pass."""
        if self._in_backward:  # activation checkpointing runs it again
            return
        self._calls.update(layer.parameters.values())
        if isinstance(module, nn.Embedding):
            rows = self._rows_of(layer, output)
            self._lookups.setdefault(layer.parameters["weight"], []).append((x.flatten(), rows))

    def record(self, layer: _Layer, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """The gradient of a layer's output has arrived."""
        if self._has_heads_first(x):
            x, g = x.transpose(1, 2), g.transpose(1, 2)
        rows = self._rows_of(layer, g)
        x_R = x.flatten() if isinstance(module, nn.Embedding) else x.flatten(0, -2)
        self._take_all(layer, module, x_R, g.flatten(0, -2), rows)

    def _rows_of(self, layer: _Layer, output: Tensor) -> Rows:
        """Leading dimensions are (batch, tokens) or (tokens); more may follow, such as attention heads."""
        count = prod(output.shape[:-1])
        for leading in (2, 1):
            shape = output.shape[: min(leading, output.dim() - 1)]
            layout = self._layout(*shape)
            if layout is not None:
                return layout if layout.count == count else layout.repeated(count // layout.count)
        raise UserError(
            f"layer {layer.name!r} was called on {count} rows, which are not the rows of the packed trajectories;"
            " per-trajectory gradient norms need layers that see every token"
        )

    def _layout(self, *shape: int) -> Rows | None:
        """The rows of which (tokens), or (batch, tokens), is the shape."""
        layout = self._layouts.get(prod(shape))
        # not (tokens, batch), which has as many rows
        if layout is None or len(shape) < 2 or shape[0] == 1 or layout.is_batch(*shape):
            return layout
        return None

    def _has_heads_first(self, x: Tensor) -> bool:
        """Whether these are (batch, heads, tokens, width), which Gemma 3 normalises, not (batch, tokens, heads, width).

        Both fit where there are as many heads as rows of a layout. Layers between a projection and the output layer
        see every token, and a projection writes a token's heads side by side.
        """
        if x.dim() != 4:
            return False
        batch, second, third = x.shape[:3]
        if self._layout(batch, third) is None or self._layout(batch, second) is None:
            return self._layout(batch, third) is not None
        return second < third or (second == third and x.stride(1) < x.stride(2))

    def _take_all(self, layer: _Layer, module: nn.Module, x_R: Tensor, g_RD: Tensor, rows: Rows) -> None:
        if rows.count == 0:
            self._seen.update(layer.parameters.values())
            return
        with _without_autocast(self._device):
            for local, use in layer.rule(module, x_R, g_RD, rows):
                if local in layer.parameters:
                    self._take(layer.parameters[local], use)

    def _take(self, name: str, use: ParameterUse) -> None:
        self._seen.add(name)
        lookups = self._lookups.get(name, [])
        is_tied = self._calls[name] == 2 and len(lookups) == 1
        if self._calls[name] == 1:
            self._measure(name, use)
        elif is_tied and isinstance(use, OuterUse | SingleUse) and name not in self._unmeasured:
            self._remember_cross_terms(name, use, *lookups[0])
            self._measure(name, use)
        elif is_tied and isinstance(use, LookupUse) and name in self._cross:
            self._add_norms(use, use.squared_norms())
            self._add_cross_terms(name, use)
            self._keep(name, use)
        else:
            self._keep(name, use)
            self._unmeasured.add(name)

    def _measure(self, name: str, use: ParameterUse) -> None:
        """Norms of a parameter's only use, and its share of the gradient: kept, or added to the sums."""
        if isinstance(use, SingleUse) and self._sums is not None:
            assert self._late is not None
            self._add_norms(use, use.squared_norms())
            gradient = use.gradient
            self._sums.add_single(name, gradient.shape, 0, gradient.view(-1), self._late, use.rows.first)
        elif isinstance(use, OuterUse) and self._takes_gram(use):
            squares_B, doubtful = gram_squared_norms(use, self._shared)
            for index in doubtful:
                squares_B[index] = sum(
                    torch.dot(part, part).double() for _, _, part in single_gradient_tiles(use, index)
                )
            self.imprecise += len(doubtful)
            self._add_norms(use, squares_B)
            self._keep(name, use)
        elif isinstance(use, OuterUse) and self._sums is not None:
            self._add_to_sums(name, use, self._sums)
        else:
            self._add_norms(use, use.squared_norms())
            self._keep(name, use)

    def _takes_gram(self, use: OuterUse) -> bool:
        if not self._may_keep and self._sums is not None:
            return False
        if self._mode != "auto":
            return self._mode == "gram"
        left, right = use.left_RP, use.right_RQ
        size = left.shape[1] * right.shape[1]
        if size <= SMALL_ELEMENTS:
            return False
        if self._sums is None:
            # the rows are kept in any case, and the product of all rows comes on top: single gradients only cost
            return max(use.rows.lengths) * (left.shape[1] + right.shape[1]) < size
        costs = cost_model(left.device, torch.promote_types(left.dtype, torch.float32), torch.get_num_threads())
        return costs.prefers_gram(use.rows.lengths, left.shape[1], right.shape[1], self._shared.has(right))

    def _add_to_sums(self, name: str, use: OuterUse, sums: GradientSums) -> None:
        """Single gradients: norm, and into the sums."""
        assert self._late is not None
        first = use.rows.first
        shape = (use.left_RP.shape[1], use.right_RQ.shape[1])
        size = prod(shape)
        if size <= SMALL_ELEMENTS:
            for chunk in use.rows.chunks(BATCHED_ELEMENTS, size):
                singles = use.per_trajectory(chunk)
                members = [first + index for index in chunk.members]
                self._squared_norms_B[members] += row_squares(singles.flatten(1))
                sums.add_singles(name, shape, singles, self._late, members)
            return
        indices, squares = [], []
        for index, offset, part in single_gradient_tiles(use):
            indices.append(first + index)
            squares.append(torch.dot(part, part))
            sums.add_single(name, shape, offset, part, self._late, first + index)
        where = torch.tensor(indices, device=self._device)
        self._squared_norms_B.index_add_(0, where, torch.stack(squares).double())

    def _remember_cross_terms(self, name: str, use: OuterUse | SingleUse, ids_R: Tensor, lookup_rows: Rows) -> None:
        """Of a tied output layer's gradient, the table rows that the trajectory's own ids look up: |a + b|^2 = |a|^2 +
        |b|^2 + 2 <a, b>, and the gradient b of the lookup is 0 in all other rows."""
        terms = self._cross.setdefault(name, {})
        slices = lookup_rows.slices()
        for position, own in enumerate(use.rows.slices()):
            index = use.rows.first + position
            ids = ids_R[slices[index]]
            if isinstance(use, SingleUse):
                terms[index] = use.gradient[ids]
            else:
                left, right = at_least_float32(use.left_RP[own][:, ids]), at_least_float32(use.right_RQ[own])
                terms[index] = left.T @ right

    def _add_cross_terms(self, name: str, use: LookupUse) -> None:
        terms = self._cross.pop(name)
        gradients_RD = at_least_float32(use.gradients_RD)
        for index, own in enumerate(use.rows.slices()):
            if index in terms:
                self._squared_norms_B[index] += 2 * (gradients_RD[own] * terms[index]).sum(dtype=torch.float64)

    def _measure_together(self, name: str) -> None:
        """Norms of a parameter with several uses: the norm of their sum, one trajectory after another."""
        for index in range(len(self._squared_norms_B)):
            total: Tensor | None = None
            for use in self._kept[name]:
                position = index - use.rows.first
                if 0 <= position < len(use.rows.lengths) and use.rows.lengths[position]:
                    single = use.per_trajectory(use.rows.chunk([position]))[0]
                    total = single if total is None else total + single
            if total is not None:
                self._squared_norms_B[index] += row_squares(total.flatten()[None])[0]

    def _add_norms(self, use: ParameterUse, squares_B: Tensor) -> None:
        use.rows.own(self._squared_norms_B).add_(squares_B)

    def _add_kept(self, name: str, sums: GradientSums, coefficients_B: Tensor) -> None:
        with _without_autocast(self._device):
            for use in self._kept[name]:
                if isinstance(use, LookupUse):
                    shape = (use.table_rows, use.gradients_RD.shape[1])
                    use.add_combined(coefficients_B, sums.total(name, shape, use.gradients_RD))
                else:
                    sums.add(name, use.combined(coefficients_B))

    def _keep(self, name: str, use: ParameterUse) -> None:
        self._kept.setdefault(name, []).append(use)


def _without_autocast(device: torch.device) -> torch.autocast:
    """Sums over rows are made in float32 even where a caller runs the backward pass under autocast."""
    return torch.autocast(device.type, enabled=False)


class _Layer:
    """A module with trainable parameters of its own: ``parameters`` maps their names in it to those in the model."""

    def __init__(self, name: str, rule: LayerRule, parameters: dict[str, str]) -> None:
        self.name = name
        self.rule = rule
        self.parameters = parameters


def _hide_parameters(layer: _Layer, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Let the forward see constants in place of parameters, so that autograd makes no gradient for them.

    Instance attributes come before registered parameters. Not ``requires_grad_(False)``: the parameters that a sharded
    model uses are not those that it shows outside of the forward pass.
    """
    if torch.is_grad_enabled():
        for local in layer.parameters:
            module.__dict__[local] = module._parameters[local].detach()  # type: ignore[union-attr]


def _show_parameters(layer: _Layer, module: nn.Module) -> None:
    for local in layer.parameters:
        module.__dict__.pop(local, None)


def _tap(
    recording: Recording,
    layer: _Layer,
    module: nn.Module,
    inputs: tuple[Any, ...],
    named_inputs: dict[str, Any],
    output: Any,
) -> Any:
    _show_parameters(layer, module)
    if output is None or not torch.is_grad_enabled():
        return output
    x = (inputs or tuple(named_inputs.values()))[0].detach()
    recording.called(layer, module, x, output)
    if output.is_leaf:  # such as an embedding's that was made to require a gradient, for checkpointing
        output = output.detach()
    tap: Any = _Tap.apply
    return tap(output, x, recording.anchor, recording, layer, module)


class _Tap(torch.autograd.Function):
    """Leaves a layer's output as it is, and shows its gradient to the recording, with the input that autograd has kept.

    The output counts as modified in place rather than as a view, so that later layers may modify it in place. The
    anchor makes the output require a gradient even where nothing before it does, as at an embedding.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, anchor: Tensor, recording: Recording, layer: _Layer, module: nn.Module
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = (recording, layer, module)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        recording, layer, module = ctx.rest
        recording.record(layer, module, x, gradient)
        return gradient, None, None, None, None, None
