"""AdamW on float32 copies of the weights where the model's own are coarser, with float32 gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.config import TrainingSection


class MasterAdamW:
    """AdamW over the trainable parameters of a model.

    At learning rates such as 1e-6 an update is far below the resolution of bfloat16 weights and would be rounded away,
    so parameters coarser than float32 have a float32 master copy that is updated and then rounded into the model.
    Gradients of several backward passes are summed in the master's dtype.
    """

    def __init__(self, model: nn.Module, training: TrainingSection) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self._masters = [_master(p) for p in self.parameters]
        self._index = {p: i for i, p in enumerate(self.parameters)}
        self.adamw = torch.optim.AdamW(
            self._masters,
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            weight_decay=training.weight_decay,
        )

    def zero_gradient(self) -> None:
        """Start a new gradient at exactly 0 for every parameter."""
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            parameter.grad = None
            master.grad = torch.zeros_like(master)

    def collect(self) -> None:
        """Take over what a backward pass has left in the parameters' own ``grad``."""
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if parameter is not master and parameter.grad is not None:
                assert master.grad is not None, "zero_gradient comes first"
                master.grad.add_(parameter.grad)
                parameter.grad = None

    def accumulate(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Add gradients to those of the step in progress."""
        for parameter, gradient in gradients:
            total = self._masters[self._index[parameter]].grad
            assert total is not None, "zero_gradient comes first"
            total.add_(gradient)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to ``max_norm`` if it is longer; returns its length before that."""
        return float(torch.nn.utils.clip_grad_norm_(self._masters, max_norm))

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
        for master in self._masters:
            master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to continue: AdamW's moments and step counts, and the master copies, by parameter name."""
        state: dict[str, Tensor] = {}
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            state |= {f"{name}.{key}": value for key, value in self.adamw.state[master].items()}
            if parameter is not master:
                state[f"{name}.master"] = master.detach()
        return state

    def load_tensors(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
            moments: dict[str, Any] = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{name}.{key}" in state:
                    value = state[f"{name}.{key}"]
                    moments[key] = value.clone() if key == "step" else value.to(master, copy=True)
            if moments:
                self.adamw.state[master] = moments
            if parameter is not master:
                with torch.no_grad():
                    master.copy_(state[f"{name}.master"])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float().clone())
