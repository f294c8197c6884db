"""AdamW on float32 copies of the weights where the model's own are coarser, with float32 gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.config import TrainingSection
from vcpo.gradnorm.sums import GradientSums
from vcpo.learner.parallel import DataParallel
from vcpo.methods.gradient_control import GradientControl


@dataclass(frozen=True)
class Alignment:
    """cosine: between this gradient and the one before; NaN if there is none or one of them is 0."""

    cosine: float
    must_skip: bool


class MasterAdamW:
    """AdamW over the trainable parameters of a model.

    At learning rates such as 1e-6 an update is far below the resolution of bfloat16 weights and would be rounded away,
    so parameters coarser than float32 have a float32 master copy that is updated and then rounded into the model.
    Gradients of several backward passes are summed in the master's dtype.
    """

    def __init__(self, model: nn.Module, training: TrainingSection, parallel: DataParallel) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self._masters = [_master(p) for p in self.parameters]
        self._parallel = parallel
        self.sums = GradientSums()
        self._previous: list[Tensor] | None = None
        self.adamw = torch.optim.AdamW(
            self._masters,
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            weight_decay=training.weight_decay,
        )

    def begin(self) -> None:
        """Start a new gradient. It is collected in ``sums`` and in the parameters' own ``grad``."""
        self.drop_gradient()
        for parameter in self.parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Take over what a backward pass has left in parameters that are coarser than their masters."""
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            if parameter is not master and parameter.grad is not None:
                self.sums.add(name, parameter.grad)
                parameter.grad = None

    def take_single(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that a backward pass has left in the parameters, which then have none."""
        for name, parameter in zip(self._names, self.parameters, strict=True):
            if parameter.grad is not None:
                yield name, parameter.grad
                parameter.grad = None

    def finish(self) -> None:
        """Complete the gradient: what was collected on all ranks; exactly 0 for parameters without any."""
        if not self.sums.is_complete:
            raise RuntimeError("a baseline stayed unknown: the gradient would lack the trajectories that wait for it")
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            gradient, own = self.sums.totals.pop(name, None), parameter.grad
            if own is not None:
                gradient = own if gradient is None else gradient.add_(own)
            parameter.grad = None
            master.grad = self._parallel.reduce(gradient, master)

    def gradient(self) -> dict[str, Tensor]:
        """The finished gradient by parameter name, whole; all ranks must call it."""
        named = zip(self._names, self._masters, strict=True)
        return {name: self._parallel.whole(master.grad) for name, master in named if master.grad is not None}

    def align(self, control: GradientControl | None) -> Alignment:
        """Compare the finished gradient with the latest one that was compared, and let the control change it.

        Keeps a copy of the gradient as it was before, unless it is not finite.
        """
        gradients = [master.grad for master in self._masters if master.grad is not None]
        before = self._previous
        products = torch.zeros(3, dtype=torch.float64)
        for number, gradient in enumerate(gradients):
            own = _local(gradient)
            products[0] += _dot(own, own)
            if before is not None:
                previous = _local(before[number])
                products[1] += _dot(own, previous)
                products[2] += _dot(previous, previous)
        square, product, previous_square = self._parallel.sum(products).tolist()
        if not math.isfinite(square):
            return Alignment(math.nan, must_skip=False)
        self._previous = [gradient.clone() for gradient in gradients]
        if before is None or square == 0 or previous_square == 0:
            return Alignment(math.nan, must_skip=False)
        cosine = product / math.sqrt(square * previous_square)
        factor = 1.0 if control is None else control.parallel_factor(cosine)
        if factor is not None and factor != 1:
            for gradient, previous in zip(gradients, before, strict=True):
                gradient.add_(previous, alpha=(factor - 1) * product / previous_square)
        return Alignment(cosine, must_skip=factor is None)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to ``max_norm`` if it is longer; returns its length before that."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self._masters, max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, learning_rate: float) -> None:
        """One update with this learning rate in every parameter group, then forget the gradient."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self._masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Forget the gradient without a step."""
        self.sums = GradientSums()
        for master in self._masters:
            master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to continue, by parameter name: AdamW's moments and step counts, the master copies, and
        the gradient that the next one is compared with.

        Whole tensors, whatever the layout of the parameters; all ranks must call it.
        """
        state: dict[str, Tensor] = {}
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            state |= {f"{name}.{key}": self._parallel.whole(value) for key, value in self.adamw.state[master].items()}
            if parameter is not master:
                state[f"{name}.master"] = self._parallel.whole(master.detach())
        for name, previous in zip(self._names, self._previous or [], strict=False):
            state[f"{name}.previous_gradient"] = self._parallel.whole(previous)
        return state

    def load_tensors(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            moments: dict[str, Any] = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{name}.{key}" in state:
                    value = state[f"{name}.{key}"]
                    moments[key] = value.clone() if key == "step" else self._parallel.share(value, master)
            if moments:
                self.adamw.state[master] = moments
            if parameter is not master:
                with torch.no_grad():
                    master.copy_(self._parallel.share(state[f"{name}.master"], master))
        if f"{self._names[0]}.previous_gradient" in state:
            self._previous = [
                self._parallel.share(state[f"{name}.previous_gradient"], master)
                for name, master in zip(self._names, self._masters, strict=True)
            ]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.flatten()


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float().clone())
